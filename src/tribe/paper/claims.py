"""What the paper's sentences assert of its tables, as predicates: judged on its own numbers, or on ours.

A claim (``claims.json``) names a predicate and its arguments. A predicate looks numbers up and says whether the
sentence holds, with the cells that decide; where a number is missing nothing can be said. Thresholds for words such as
"robust" are our reading, and stand in the claim.
"""

import fnmatch
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tribe import paper

Numbers = Callable[[str, str, str], float | None]  # table, row, column -> number
SHOWN = 4  # cells that are named where a sentence fails
OF_THE_PAPER = ("quoted", "margins_span")  # predicates about the paper's own numbers, to the last digit


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper in our words."""

    name: str
    where: str  # in the paper
    says: str
    tables: Sequence[str]
    predicate: str
    arguments: dict[str, Any]


class Verdict(NamedTuple):
    """Whether a claim holds (None: numbers are missing), and the numbers that say so."""

    holds: bool | None
    why: str


class Missing(Exception):
    """A number that a claim needs is not there."""


@cache
def claims() -> tuple[Claim, ...]:
    """All of them."""
    return tuple(Claim(**told) for told in json.loads((paper.FOLDER / paper.CLAIMS).read_text()))


def of_paper(table: str, row: str, column: str) -> float | None:
    """The paper's own numbers."""
    value = paper.get(table).value(row, column)
    return value if isinstance(value, float) else None


def judge(claim: Claim, numbers: Numbers) -> Verdict:
    """Judge a claim on some numbers."""
    if claim.predicate in OF_THE_PAPER and numbers is not of_paper:
        return Verdict(None, "it repeats numbers of the paper")
    try:
        findings = [PREDICATES[claim.predicate](View(table, numbers), **claim.arguments) for table in claim.tables]
    except Missing as missing:
        return Verdict(None, f"{missing} is missing")
    within = [f"{table}: " if len(findings) > 1 else "" for table in claim.tables]
    against = [f"{table}{text}" for table, found in zip(within, findings, strict=True) for text in found.against]
    if against:
        more = f" and {len(against) - SHOWN} more" if len(against) > SHOWN else ""
        return Verdict(False, "; ".join(against[:SHOWN]) + more)
    return Verdict(True, "; ".join(f"{table}{found.says}" for table, found in zip(within, findings, strict=True)))


class Finding(NamedTuple):
    """What a predicate saw in one table: a summary, and all that speaks against the claim."""

    says: str
    against: list[str]


class View:
    """The numbers of one table."""

    def __init__(self, table: str, numbers: Numbers) -> None:
        self.table, self._numbers = paper.get(table), numbers

    def __call__(self, row: str, column: str) -> float:
        """A number, or `Missing`."""
        value = self._numbers(self.table.name, row, column)
        if value is None or math.isnan(value):
            raise Missing(f"{self.table.name}, {row}, {column}")
        return value

    def rows(self, patterns: str | Sequence[str], but: Sequence[str] = ()) -> list[str]:
        """The rows that a pattern, or one of several, means: "*", "100 *"."""
        return [row for row in _match(patterns, self.table.row_keys) if row not in but]

    def columns(self, patterns: str | Sequence[str]) -> list[str]:
        """The columns likewise."""
        return _match(patterns, self.table.column_keys)

    def span(self, row: str, columns: Sequence[str]) -> float:
        """How much a row moves between its best column and its worst."""
        values = [self(row, column) for column in columns]
        return max(values) - min(values)


def _match(patterns: str | Sequence[str], keys: Sequence[str]) -> list[str]:
    wanted = [patterns] if isinstance(patterns, str) else patterns
    return [key for key in keys if any(key == p or fnmatch.fnmatchcase(key, p) for p in wanted)]


# -- predicates -------------------------------------------------------------------------------------------------------


def lower(
    view: View, row: str, than: str | list[str] = "*", columns: str | list[str] = "*", by: float = 0.0
) -> Finding:
    """A row is below others (all but itself) in every column, by at least some points."""
    against, checked = [], 0
    for column in view.columns(columns):
        for other in view.rows(than, but=[row]):
            mine, theirs = view(row, column), view(other, column)
            checked += 1
            if not theirs - mine > by:
                against.append(f"{column}: {row} {mine:g}, {other} {theirs:g}")
    return Finding(f"{row} is lower in {checked} comparisons", against)


def higher(view: View, rows: list[str], than: str, columns: str | list[str] = "*") -> Finding:
    """Rows are above another in every column."""
    pairs = [(row, column) for row in rows for column in view.columns(columns)]
    against = [
        f"{column}: {row} {view(row, column):g}, {than} {view(than, column):g}"
        for row, column in pairs
        if not view(row, column) > view(than, column)
    ]
    return Finding(f"{', '.join(rows)} above {than} in {len(pairs)} cells", against)


def some_higher(view: View, than: str, columns: str | list[str] = "*") -> Finding:
    """At least one row is above another in every column."""
    worse = [
        row
        for row in view.rows("*", but=[than])
        if all(view(row, column) > view(than, column) for column in view.columns(columns))
    ]
    return Finding(f"above {than}: {', '.join(worse)}", [] if worse else [f"no row is above {than}"])


def consistently_lower(view: View, rows: list[str], than: str, columns: str | list[str] = "*") -> Finding:
    """Each of these rows is below one row in every column."""
    against = [
        f"{row} is not below {than} at {column} ({view(row, column):g}, {view(than, column):g})"
        for row in rows
        for column in view.columns(columns)
        if not view(row, column) < view(than, column)
    ]
    return Finding(f"{', '.join(rows)} are below {than} throughout", against)


def not_consistently_lower(view: View, rows: list[str], than: str, columns: str | list[str] = "*") -> Finding:
    """Each of these rows is above one row in some column."""
    better = [r for r in rows if all(view(r, c) < view(than, c) for c in view.columns(columns))]
    return Finding(f"none of {', '.join(rows)} is below {than} throughout", [f"{r} is below {than}" for r in better])


def rises(
    view: View, rows: str | list[str], start: str, end: str, by: float = 0.0, but: list[str] | None = None
) -> Finding:
    """Rows are higher in one column than in another, by at least some points."""
    chosen = view.rows(rows, but=but or [])
    moves = {row: (view(row, start), view(row, end)) for row in chosen}
    against = [f"{row} {a:g} at {start}, {b:g} at {end}" for row, (a, b) in moves.items() if not b - a > by]
    told = ", ".join(f"{row} {a:g} to {b:g}" for row, (a, b) in moves.items())
    return Finding(told, against)


def rises_less(view: View, row: str, than: str | list[str], start: str, end: str) -> Finding:
    """A row rises less from one column to another than others do."""
    mine = view(row, end) - view(row, start)
    rest = {other: view(other, end) - view(other, start) for other in view.rows(than, but=[row])}
    against = [f"{row} {mine:+.2f}, {other} {move:+.2f}" for other, move in rest.items() if not mine < move]
    return Finding(f"{row} {mine:+.2f} from {start} to {end}", against)


def steadier(view: View, row: str, than: str | list[str], columns: str | list[str] = "*") -> Finding:
    """A row moves less between columns than others do."""
    chosen = view.columns(columns)
    mine, rest = view.span(row, chosen), {r: view.span(r, chosen) for r in view.rows(than, but=[row])}
    against = [f"{row} moves by {mine:.2f}, {other} by {span:.2f}" for other, span in rest.items() if not mine < span]
    return Finding(f"{row} moves by {mine:.2f}", against)


def less_varied(view: View, row: str, columns: str | list[str] = "*", but: list[str] | None = None) -> Finding:
    """A row's standard deviation over columns is the lowest."""
    chosen = view.columns(columns)
    spread = {r: statistics.pstdev(view(r, c) for c in chosen) for r in view.rows("*", but=but or [])}
    against = [f"{row} {spread[row]:.2f}, {r} {s:.2f}" for r, s in spread.items() if r != row and s <= spread[row]]
    return Finding(f"the deviation of {row} is {spread[row]:.2f}", against)


def stays_within(view: View, rows: str | list[str], points: float, columns: str | list[str] = "*") -> Finding:
    """Rows move by no more than some points between columns."""
    spans = {row: view.span(row, view.columns(columns)) for row in view.rows(rows)}
    against = [f"{row} moves by {span:.2f}" for row, span in spans.items() if span > points]
    return Finding(", ".join(f"{row} moves by {span:.2f}" for row, span in spans.items()), against)


def margin(view: View, row: str, over: str, column: str, least: float, most: float = math.inf) -> Finding:
    """A row is below another by between so many points; "*" is the best of the others."""
    best = min(view(other, column) for other in view.rows(over, but=[row]))
    gap = best - view(row, column)
    told = f"{row} is {gap:.4g} below {'the best of the others' if over == '*' else over} at {column}"
    return Finding(told, [] if least <= gap <= most else [told])


def margins_span(view: View, row: str, columns: str | list[str], least: float, most: float, within: float) -> Finding:
    """The margins of a row over the best of the others run from one number to another."""
    gaps = [min(view(o, c) for o in view.rows("*", but=[row])) - view(row, c) for c in view.columns(columns)]
    told = f"the margins run from {min(gaps):.2f} to {max(gaps):.2f}"
    fine = abs(min(gaps) - least) <= within and abs(max(gaps) - most) <= within
    return Finding(told, [] if fine else [f"{told}, not from {least} to {most}"])


def widest_margin(view: View, row: str, column: str) -> Finding:
    """The margin over the best of the others is the widest in one column."""
    gaps = {c: min(view(o, c) for o in view.rows("*", but=[row])) - view(row, c) for c in view.columns("*")}
    told = ", ".join(f"{gap:.2f} at {c}" for c, gap in gaps.items())
    return Finding(told, [] if max(gaps, key=lambda c: gaps[c]) == column else [told])


def wins(view: View, row: str, columns: str | list[str], count: int) -> Finding:
    """A row is the lowest in so many columns."""
    won = [c for c in view.columns(columns) if all(view(row, c) <= view(o, c) for o in view.rows("*", but=[row]))]
    told = f"{row} is lowest in {len(won)} of {len(view.columns(columns))}"
    return Finding(told, [] if len(won) == count else [told])


def quoted(view: View, cells: list[list[Any]], within: float = 0.05) -> Finding:
    """Numbers that the text repeats, [row, column, number] each, are those of the table."""
    against = [
        f"{r}, {c} is {view(r, c):g}, not {number:g}" for r, c, number in cells if abs(view(r, c) - number) > within
    ]
    return Finding("; ".join(f"{r}, {c} is {view(r, c):g}" for r, c, _ in cells), against)


def helps_less(view: View, added_to: list[str], than_to: list[str], columns: str | list[str] = "*") -> Finding:
    """A part improves one row [without, with] less than it improves another."""
    against, told = [], []
    for column in view.columns(columns):
        here, there = (view(pair[0], column) - view(pair[1], column) for pair in (added_to, than_to))
        told.append(f"{column}: {here:+.2f} against {there:+.2f}")
        if not here < there:
            against.append(told[-1])
    return Finding("; ".join(told), against)


PREDICATES: dict[str, Callable[..., Finding]] = {
    function.__name__: function
    for function in (
        *(lower, higher, some_higher, consistently_lower, not_consistently_lower, rises, rises_less, steadier),
        *(less_varied, stays_within, margin, margins_span, widest_margin, wins, quoted, helps_less),
    )
}
