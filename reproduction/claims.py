"""The claims that the paper makes about its tables, as predicates: judged on the paper's numbers, or on ours.

A claim (``claims.json``) names a predicate and its arguments. A predicate turns the claim into checks, each with a
counterexample to print if it fails. A missing number may have any value: a check that depends on it is undecided, the
others are decided. One counterexample refutes a claim about all cells, even if other cells are missing; one example
proves a claim that there is one.

Better numbers than the paper's do not refute a claim: its exact counts and margins are checked on the paper's own
numbers, while ours must only reach them. Thresholds for words such as "robust" are our choice. They are stated in the
claim, and a word has the same threshold in all claims.

Our numbers have a spread: another seed gives another stream. A difference counts only if it exceeds the spread: the
standard deviation between seeds of the differences, seed by seed, where both numbers have two seeds or more in common,
else of both numbers together. Else the claim is too close to judge. A row that is our reading of what the paper leaves
open (`Table.readings`) settles nothing: a claim about it is not judged, one about all rows is judged without it.
"""

import fnmatch
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from reproduction import tables


class Measured(NamedTuple):
    """A number of ours: the mean over seeds, each of them, and the standard deviation between seeds."""

    value: float
    by_seed: Mapping[int, float] = {}
    noise: float = 0.0


Numbers = Callable[[str, str, str], float | Measured | None]  # table, row, column -> number
SHOWN = 4  # counterexamples that a verdict names
OF_THE_PAPER = ("quoted", "margins_span")  # predicates about the paper's own numbers, to the last digit


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, in our words."""

    name: str
    where: str  # in the paper
    says: str
    tables: Sequence[str]
    predicate: str
    arguments: dict[str, Any]


class Verdict(NamedTuple):
    """Whether a claim holds (None: it depends on missing numbers), and the numbers that decide it."""

    holds: bool | None
    why: str


@cache
def claims() -> tuple[Claim, ...]:
    """All claims."""
    return tuple(Claim(**fields) for fields in json.loads(Path(__file__).with_name("claims.json").read_text()))


def of_paper(table: str, row: str, column: str) -> float | None:
    """The paper's own numbers."""
    value = tables.get(table).value(row, column)
    return value if isinstance(value, float) else None


def judge(claim: Claim, numbers: Numbers) -> Verdict:
    """Judge a claim on numbers; some may be missing."""
    if claim.predicate in OF_THE_PAPER and numbers is not of_paper:
        return Verdict(None, "the claim repeats numbers of the paper")
    views = [View(table, numbers) for table in claim.tables]
    findings = [PREDICATES[claim.predicate](view, **claim.arguments) for view in views]
    prefixes = [f"{table}: " if len(views) > 1 else "" for table in claim.tables]
    named = list(zip(prefixes, findings, strict=True))
    missing = [cell for view in views for cell in view.missing]
    against = [f"{prefix}{check.against}" for prefix, found in named for check in found.checks if check.holds is False]
    if against:
        more = f" and {len(against) - SHOWN} more" if len(against) > SHOWN else ""
        lacking = f"; {_are_missing(missing)}" if missing else ""
        return Verdict(False, "; ".join(against[:SHOWN]) + more + lacking)
    if open_checks := [f"{p}{check.against}" for p, found in named for check in found.checks if check.holds is None]:
        readings = [reading for view in views for reading in view.readings]
        close = f"within the spread of the seeds: {open_checks[0]}"
        return Verdict(None, _are_missing(missing) if missing else "; ".join(readings) or close)
    return Verdict(True, "; ".join(f"{prefix}{found.says}" for prefix, found in named))


def _are_missing(cells: Sequence[str]) -> str:
    return f"{cells[0]} is missing" if len(cells) == 1 else f"{cells[0]} and {len(cells) - 1} more are missing"


# -- logic and arithmetic with missing numbers -----------------------------------------------------------------------

Answer = bool | None  # None: it depends on missing numbers


def _not(answer: Answer) -> Answer:
    return None if answer is None else not answer


def _all(answers: Sequence[Answer]) -> Answer:
    """False if one answer is False, even if others are undecided."""
    return False if False in answers else None if None in answers else True


def _any(answers: Iterable[Answer]) -> Answer:
    return _not(_all([_not(answer) for answer in answers]))


@dataclass(frozen=True)
class Range:
    """The values that a number may have: one value if it is known, any value if it is missing."""

    low: float = -math.inf
    high: float = math.inf
    noise: float = 0.0  # standard deviation between seeds
    by_seed: Mapping[int, float] = field(default_factory=dict)  # the number of each seed, if it has seeds

    @classmethod
    def at(cls, value: float, noise: float = 0.0, by_seed: Mapping[int, float] | None = None) -> "Range":
        """A number that is known."""
        return cls(value, value, noise, by_seed or {})

    @classmethod
    def at_least(cls, value: float, exactly: bool, noise: float = 0.0) -> "Range":
        """A known number, or a lower bound that missing numbers can only raise."""
        return cls(value, value if exactly else math.inf, noise)

    @classmethod
    def of(cls, values: Sequence["Range"], choose: Callable[[Iterable[float]], float]) -> "Range":
        """The lowest or the highest of several, also of each seed that all of them have."""
        seeds = [seed for seed in values[0].by_seed if all(seed in v.by_seed for v in values)]
        by_seed = {seed: choose([v.by_seed[seed] for v in values]) for seed in seeds}
        ends = choose(v.low for v in values), choose(v.high for v in values)
        return cls(*ends, _deviation(by_seed, max(v.noise for v in values)), by_seed)

    @classmethod
    def lowest(cls, values: Sequence["Range"]) -> "Range":
        """The lowest of several."""
        return cls.of(values, min)

    @classmethod
    def highest(cls, values: Sequence["Range"]) -> "Range":
        """The highest of several."""
        return cls.of(values, max)

    @property
    def known(self) -> bool:
        """Whether it has one value."""
        return self.low == self.high

    def __sub__(self, other: "Range") -> "Range":
        both = math.hypot(self.noise, other.noise)
        gaps = {seed: self.by_seed[seed] - other.by_seed[seed] for seed in self.by_seed if seed in other.by_seed}
        if not gaps:
            return Range(self.low - other.high, self.high - other.low, both)
        return Range.at(sum(gaps.values()) / len(gaps), _deviation(gaps, both), gaps)

    def below(self, other: "Range") -> Answer:
        """Whether it is lower than another number, by more than the spread of the difference."""
        gap = other - self
        return True if gap.low > gap.noise else False if gap.high <= -gap.noise else None

    def within(self, least: float, most: float) -> Answer:
        """Whether it lies between two numbers, both included."""
        return _all([_not(self.below(Range.at(least))), _not(Range.at(most).below(self))])

    def __format__(self, spec: str) -> str:
        low, high = (format(end, spec) if math.isfinite(end) else "" for end in (self.low, self.high))
        if self.known:
            return low
        return f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}" if high else "?"


def _deviation(by_seed: Mapping[int, float], otherwise: float) -> float:
    """The standard deviation between seeds; of a single one it is unknown."""
    return otherwise if len(by_seed) < 2 else statistics.stdev(by_seed.values())


class Check(NamedTuple):
    """A part of a claim: whether it holds, and the counterexample if it does not."""

    holds: Answer
    against: str


class Finding(NamedTuple):
    """The result of a predicate on one table: a summary for a claim that holds, and its checks."""

    says: str
    checks: list[Check]


class View:
    """The numbers of one table; it collects the cells that were read and are missing."""

    def __init__(self, table: str, numbers: Numbers) -> None:
        self.table, self._numbers = tables.get(table), numbers
        self.exact = numbers is of_paper  # whether better numbers refute a claim
        self.missing = dict[str, None]()  # in order
        self.readings = dict[str, None]()  # rows that were read and settle nothing, in words

    def __call__(self, row: str, column: str) -> Range:
        """A number."""
        if not self.exact and (why := self.table.readings.get(row)) is not None:
            self.readings[f"{row} is our reading, and settles nothing: {why}"] = None
            return Range()
        found = self._numbers(self.table.name, row, column)
        measured = Measured(found) if isinstance(found, float | int) else found
        if measured is None or math.isnan(measured.value):
            self.missing[f"{self.table.name}, {row}, {column}"] = None
            return Range()
        return Range.at(measured.value, measured.noise, measured.by_seed)

    def rows(self, patterns: str | Sequence[str], but: Sequence[str] = ()) -> list[str]:
        """The rows that match a pattern, or one of several; those of our reading only if they are named."""
        named = [patterns] if isinstance(patterns, str) else patterns
        found = [row for row in matching(patterns, self.table.row_keys) if row not in but]
        settled = [row for row in found if self.exact or row in named or row not in self.table.readings]
        return settled or found

    def columns(self, patterns: str | Sequence[str]) -> list[str]:
        """The columns that match a pattern, or one of several."""
        return matching(patterns, self.table.column_keys)

    def best(self, column: str, but: str, rows: str | Sequence[str] = "*") -> Range:
        """The lowest number of a column, without one row."""
        return Range.lowest([self(row, column) for row in self.rows(rows, but=[but])])

    def span(self, row: str, columns: Sequence[str]) -> Range:
        """The difference between the worst and the best column of a row; missing numbers can only widen it."""
        known = [v for v in (self(row, column) for column in columns) if v.known]
        if len(known) == len(columns):
            return Range.highest(known) - Range.lowest(known)
        ends = [v.low for v in known] or [0.0]
        return Range.at_least(max(ends) - min(ends), exactly=False)

    def deviation(self, row: str, columns: Sequence[str]) -> Range:
        """The standard deviation of a row; a missing number adds least if it equals the mean of the others."""
        known = [v for v in (self(row, column) for column in columns) if v.known]
        values = [v.low for v in known]
        mean = sum(values) / len(values) if values else 0.0
        low = math.sqrt(sum((value - mean) ** 2 for value in values) / len(columns))
        return Range.at_least(low, len(known) == len(columns), max((v.noise for v in known), default=0.0))


def matching(patterns: str | Sequence[str], keys: Sequence[str]) -> list[str]:
    """The keys that match a pattern such as "100 *", or one of several."""
    wanted = [patterns] if isinstance(patterns, str) else patterns
    return [key for key in keys if any(key == p or fnmatch.fnmatchcase(key, p) for p in wanted)]


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


# -- predicates -------------------------------------------------------------------------------------------------------


def lower(
    view: View,
    rows: str | list[str],
    than: str | list[str] = "*",
    columns: str | list[str] = "*",
    by: float = 0.0,
) -> Finding:
    """Rows are below other rows in every column, by more than some points."""
    checks = []
    for row in view.rows(rows):
        for column in view.columns(columns):
            for other in view.rows(than, but=[row]):
                mine, theirs = view(row, column), view(other, column)
                against = f"{column}: {row} {mine:.4g}, {other} {theirs:.4g}"
                checks.append(Check(Range.at(by).below(theirs - mine), against))
    names = view.rows(rows)
    verb = "is" if len(names) == 1 else "are"
    return Finding(f"{', '.join(names)} {verb} lower in {_many(len(checks), 'comparison')}", checks)


def some_higher(view: View, than: str, columns: str | list[str] = "*") -> Finding:
    """At least one row is above another in every column."""
    above = {
        row: _all([view(than, column).below(view(row, column)) for column in view.columns(columns)])
        for row in view.rows("*", but=[than])
    }
    worse = [row for row, is_above in above.items() if is_above]
    return Finding(f"above {than}: {', '.join(worse)}", [Check(_any(above.values()), f"no row is above {than}")])


def not_consistently_lower(view: View, rows: list[str], than: str, columns: str | list[str] = "*") -> Finding:
    """Each of these rows is not below one row in some column."""
    checks = [
        Check(_any([_not(view(r, c).below(view(than, c))) for c in view.columns(columns)]), f"{r} is below {than}")
        for r in rows
    ]
    return Finding(f"none of {', '.join(rows)} is below {than} throughout", checks)


def rises(
    view: View, rows: str | list[str], start: str, end: str, by: float = 0.0, but: list[str] | None = None
) -> Finding:
    """Rows are higher in one column than in another, by more than some points."""
    moves = {row: (view(row, start), view(row, end)) for row in view.rows(rows, but=but or [])}
    checks = [
        Check(Range.at(by).below(b - a), f"{row} {a:.4g} at {start}, {b:.4g} at {end}") for row, (a, b) in moves.items()
    ]
    return Finding(", ".join(f"{row} {a:.4g} to {b:.4g}" for row, (a, b) in moves.items()), checks)


def rises_less(view: View, row: str, than: str | list[str], start: str, end: str) -> Finding:
    """A row rises less from one column to another than others do."""
    mine = view(row, end) - view(row, start)
    rest = {other: view(other, end) - view(other, start) for other in view.rows(than, but=[row])}
    checks = [Check(mine.below(move), f"{row} {mine:+z.2f}, {other} {move:+z.2f}") for other, move in rest.items()]
    return Finding(f"{row} {mine:+z.2f} from {start} to {end}", checks)


def steadier(
    view: View,
    row: str,
    than: str | list[str],
    columns: str | list[str] = "*",
    but: list[str] | None = None,
    measure: Literal["span", "deviation"] = "span",
) -> Finding:
    """A row varies less between columns than others do."""
    chosen, vary = view.columns(columns), view.span if measure == "span" else view.deviation
    mine, rest = vary(row, chosen), {other: vary(other, chosen) for other in view.rows(than, but=[row, *(but or [])])}
    checks = [
        Check(mine.below(theirs), f"{row} varies by {mine:.2f}, {other} by {theirs:.2f}")
        for other, theirs in rest.items()
    ]
    lowest = Range.lowest([*rest.values()]).low
    return Finding(f"{row} varies by {mine:.2f}, the others by {lowest:.2f} or more", checks)


def stays_within(view: View, rows: str | list[str], points: float, columns: str | list[str] = "*") -> Finding:
    """Rows move by no more than some points between columns."""
    spans = {row: view.span(row, view.columns(columns)) for row in view.rows(rows)}
    text = {row: f"{row} varies by {span:.2f}" for row, span in spans.items()}
    return Finding(", ".join(text.values()), [Check(spans[row].within(0, points), text[row]) for row in spans])


def margin(view: View, row: str, over: str, column: str, least: float, most: float = math.inf) -> Finding:
    """A row is below another by so many points; "*" is the best of the others."""
    gap = view.best(column, but=row, rows=over) - view(row, column)
    size, side = (Range.at(0) - gap, "above") if gap.high < 0 else (gap, "below")
    text = f"{row} is {size:.4g} {side} {'the best of the others' if over == '*' else over} at {column}"
    return Finding(text, [Check(gap.within(least, most if view.exact else math.inf), text)])


def margins_span(view: View, row: str, columns: str | list[str], least: float, most: float, within: float) -> Finding:
    """The margins of a row over the best of the others run from one number to another."""
    gaps = [view.best(c, but=row) - view(row, c) for c in view.columns(columns)]
    ends = Range.lowest(gaps), Range.highest(gaps)
    text = f"the margins run from {ends[0]:.2f} to {ends[1]:.2f}"
    close = [end.within(number - within, number + within) for end, number in zip(ends, (least, most), strict=True)]
    return Finding(text, [Check(_all(close), f"{text}, not from {least} to {most}")])


def widest_margin(view: View, row: str, column: str) -> Finding:
    """The margin over the best of the others is the widest in one column."""
    gaps = {c: view.best(c, but=row) - view(row, c) for c in view.columns("*")}
    here = gaps[column]
    checks = [
        Check(gap.below(here), f"{gap:.2f} at {c}, {here:.2f} at {column}") for c, gap in gaps.items() if c != column
    ]
    return Finding(", ".join(f"{gap:.2f} at {c}" for c, gap in gaps.items()), checks)


def wins(view: View, row: str, columns: str | list[str], count: int) -> Finding:
    """A row is the lowest in so many columns."""
    won = [_not(view.best(c, but=row).below(view(row, c))) for c in view.columns(columns)]
    number = Range(won.count(True), len(won) - won.count(False))
    text = f"{row} is lowest in {number:g} of {len(won)}"
    return Finding(text, [Check(number.within(count, count if view.exact else math.inf), text)])


def quoted(view: View, cells: list[list[Any]], within: float = 0.05) -> Finding:
    """Numbers that the text repeats, [row, column, number] each, are those of the table."""
    text = {(row, column): f"{row}, {column} is {view(row, column):g}" for row, column, _ in cells}
    checks = [
        Check(view(r, c).within(number - within, number + within), f"{text[r, c]}, not {number:g}")
        for r, c, number in cells
    ]
    return Finding("; ".join(text.values()), checks)


def helps_less(view: View, added_to: list[str], than_to: list[str], columns: str | list[str] = "*") -> Finding:
    """A part improves one row [without, with] less than it improves another."""
    checks = []
    for column in view.columns(columns):
        here, there = (view(pair[0], column) - view(pair[1], column) for pair in (added_to, than_to))
        checks.append(Check(here.below(there), f"{column}: {here:+z.2f} against {there:+z.2f}"))
    return Finding("; ".join(check.against for check in checks), checks)


PREDICATES: dict[str, Callable[..., Finding]] = {
    function.__name__: function
    for function in (
        *(lower, some_higher, not_consistently_lower, rises, rises_less, steadier),
        *(stays_within, margin, margins_span, widest_margin, wins, quoted, helps_less),
    )
}
