"""The claims that the paper makes about its tables, as numbers with thresholds.

A claim (``claims.json``) names a measure, its arguments and a threshold. A measure turns a table into one number, the
worst case of the claim: the smallest margin of TRIBE over all methods and columns, say. The claim holds if the number
reaches the threshold. It is computed from the paper's numbers and from ours, seed by seed; where the threshold lies
within one standard deviation between seeds, the claim is "too close". Thresholds for words such as "robust" are our
choice, and a word has the same threshold in all claims. Better numbers than the paper's do not refute a claim.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from reproduction import tables
from reproduction.compare import Comparison

Patterns = str | Sequence[str]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, in our words, and the number that decides it."""

    name: str
    where: str  # in the paper
    says: str
    tables: Sequence[str]
    measure: str
    arguments: Mapping[str, Any]
    at_least: float | None = None  # the threshold of the number,
    at_most: float | None = None  # one of the two

    @property
    def number(self) -> str:
        """What the number is, in words."""
        return (MEASURES[self.measure].__doc__ or "").removeprefix("Return ").rstrip(".")

    @property
    def threshold(self) -> str:
        """The threshold in words."""
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"

    def slack(self, number: float) -> float:
        """Return by how much a number is on the right side of the threshold."""
        return number - self.at_least if self.at_least is not None else (self.at_most or 0.0) - number


class Judgement(NamedTuple):
    """The number of a claim, and whether it reaches the threshold."""

    number: float | None  # the mean over seeds
    verdict: str  # "holds", "fails", "too close", "incomplete": numbers are missing and those there do not refute it
    deviation: float | None = None  # between seeds


class Verdict(NamedTuple):
    """A claim, judged on the paper's numbers and on ours."""

    claim: Claim
    paper: Judgement
    ours: Judgement
    stand_in: str = ""  # the data set and the network of ours, where they are not the paper's

    @property
    def says(self) -> str:
        """The claim; where a stand-in was played, it says that the data it names were not."""
        return self.claim.says + (f" (ours: {self.stand_in} in their place)" if self.stand_in else "")

    def json(self) -> dict[str, Any]:
        """Return it as plain data."""
        claim = {name: getattr(self.claim, name) for name in ("name", "says", "where", "tables", "threshold")}
        return claim | {"paper": self.paper._asdict(), "ours": self.ours._asdict(), "stand_in": self.stand_in}


@cache
def claims() -> tuple[Claim, ...]:
    """Return all claims."""
    return tuple(Claim(**fields) for fields in json.loads(Path(__file__).with_name("claims.json").read_text()))


def judge(claim: Claim, comparisons: Mapping[str, Comparison]) -> Verdict:
    """Judge a claim on the paper's numbers, and on ours where the tables are in ``comparisons``, by name."""
    paper = _judge(claim, [[View.of_paper(tables.get(name)) for name in claim.tables]])
    compared = [comparisons[name] for name in claim.tables if name in comparisons]
    ours = _judge(claim, [[View.of_seed(comparison, seed) for comparison in compared] for seed in _seeds(compared)])
    if ours.verdict == "holds" and len(compared) < len(claim.tables):
        ours = ours._replace(verdict="incomplete")
    return Verdict(claim, paper, ours, "; ".join(sorted({c.stand_in for c in compared if c.stand_in})))


def _seeds(comparisons: Sequence[Comparison]) -> list[int]:
    """Return the seeds that most cells have."""
    counts: dict[int, int] = {}
    for comparison in comparisons:
        for entry in comparison.entries.values():
            for seed in entry.by_seed:
                counts[seed] = counts.get(seed, 0) + 1
    most = max(counts.values(), default=0)
    return sorted(seed for seed, count in counts.items() if count == most)


def _judge(claim: Claim, by_seed: Sequence[Sequence["View"]]) -> Judgement:
    """Judge a claim on tables of one or more seeds; the worst table of each seed counts."""
    numbers: list[float] = []
    for views in by_seed:
        found = [n for view in views if (n := MEASURES[claim.measure](view, **claim.arguments)) is not None]
        if found:
            numbers.append(min(found, key=claim.slack))
    if not numbers:
        return Judgement(None, "incomplete")
    number = round(statistics.fmean(numbers), 6)  # 19.53 - 19.52 is 0.01
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    if abs(claim.slack(number)) < (deviation or 0.0):
        verdict = "too close"
    elif claim.slack(number) < 0:
        verdict = "fails"
    else:
        verdict = "incomplete" if any(view.missing for views in by_seed for view in views) else "holds"
    return Judgement(number, verdict, deviation)


@dataclass
class View:
    """The numbers of one table, of the paper or of one seed of ours."""

    table: tables.Table
    numbers: Mapping[tuple[str, str], float]
    settled: Sequence[str]  # the rows that a claim about all rows is about
    missing: set[tuple[str, str]] = field(default_factory=set)  # cells that were read and are not there

    @staticmethod
    def of_paper(table: tables.Table) -> "View":
        """Return the paper's own numbers."""
        values = {place: table.value(*place) for place in table.cells}
        return View(table, {p: v for p, v in values.items() if isinstance(v, float)}, table.row_keys)

    @staticmethod
    def of_seed(comparison: Comparison, seed: int) -> "View":
        """Return our numbers of one seed. A row that is our reading of what the paper leaves open has none."""
        table = tables.get(comparison.name)
        settled = [row for row in table.row_keys if row not in table.readings]
        cells = {p: e.by_seed[seed] for p, e in comparison.entries.items() if seed in e.by_seed and p[0] in settled}
        return View(table, cells, settled)

    def rows(self, patterns: Patterns, but: Sequence[str] = ()) -> list[str]:
        """Return the rows that match; one that is not settled only if it is named, or if no other matches."""
        named = [patterns] if isinstance(patterns, str) else patterns
        found = [row for row in tables.matching(patterns, self.table.row_keys) if row not in but]
        return [row for row in found if row in self.settled or row in named] or found

    def columns(self, patterns: Patterns) -> list[str]:
        """Return the columns that match."""
        return tables.matching(patterns, self.table.column_keys)

    def get(self, row: str, column: str) -> float | None:
        """Return a number; note it if it is missing."""
        if (row, column) not in self.numbers:
            self.missing.add((row, column))
        return self.numbers.get((row, column))

    def gaps(self, rows: Patterns, over: Patterns, columns: Patterns) -> list[float]:
        """Return how far rows are below other rows, in every column where both have a number."""
        found = []
        for column in self.columns(columns):
            for row in self.rows(rows):
                for other in self.rows(over, but=[row]):
                    mine, theirs = self.get(row, column), self.get(other, column)
                    if mine is not None and theirs is not None:
                        found.append(theirs - mine)
        return found

    def rise(self, row: str, start: str, end: str) -> float | None:
        """Return by how much a row rises from one column to another."""
        first, last = self.get(row, start), self.get(row, end)
        return None if first is None or last is None else last - first

    def spread(self, row: str, columns: Patterns, measure: str = "span", partial: bool = False) -> float | None:
        """Return how much a row varies between columns: the span, or the standard deviation.

        Without one of the numbers it is None, or with ``partial`` the least that it can be.
        """
        values = [value for c in self.columns(columns) if (value := self.get(row, c)) is not None]
        if len(values) < (2 if partial else len(self.columns(columns))):
            return None
        return max(values) - min(values) if measure == "span" else statistics.pstdev(values)


# -- measures: each returns one number of a table, None if too much is missing ---------------------------------------


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def margin(view: View, row: Patterns, over: Patterns = "*", columns: Patterns = "*") -> float | None:
    """Return the smallest margin of some rows over others, over all columns."""
    return _least(view.gaps(row, over, columns))


def smallest_rise(view: View, rows: Patterns, start: str, end: str, but: Sequence[str] = ()) -> float | None:
    """Return the smallest rise of some rows from one column to another."""
    return _least([view.rise(row, start, end) for row in view.rows(rows, but=but)])


def extra_rise(view: View, row: str, of: Patterns, start: str, end: str) -> float | None:
    """Return by how much more others rise than a row does, at least."""
    mine = view.rise(row, start, end)
    others = [view.rise(other, start, end) for other in view.rows(of, but=[row])]
    return _least([None if mine is None or rise is None else rise - mine for rise in others])


def largest_span(view: View, rows: Patterns, columns: Patterns = "*") -> float | None:
    """Return the largest span of some rows over columns."""
    spans = [view.spread(row, columns, partial=True) for row in view.rows(rows)]
    return max((span for span in spans if span is not None), default=None)


def extra_spread(
    view: View, row: str, of: Patterns, columns: Patterns = "*", but: Sequence[str] = (), measure: str = "span"
) -> float | None:
    """Return by how much more others vary between columns than a row does, at least."""
    mine = view.spread(row, columns, measure)
    others = [view.spread(other, columns, measure) for other in view.rows(of, but=[row, *but])]
    return _least([None if mine is None or spread is None else spread - mine for spread in others])


def wins(view: View, row: str, columns: Patterns) -> float | None:
    """Return in how many columns a row is the lowest."""
    gaps = [view.gaps(row, "*", column) for column in view.columns(columns)]
    return None if view.missing else float(sum(min(gap) >= 0 for gap in gaps))


def extra_margin(view: View, row: str, column: str) -> float | None:
    """Return by how much the margin of a row in one column exceeds its margin in the others, at least."""
    here = _least(view.gaps(row, "*", column))
    rest = [_least(view.gaps(row, "*", other)) for other in view.columns("*") if other != column]
    return _least([None if here is None or gap is None else here - gap for gap in rest])


def extra_gain(view: View, of: Sequence[str], over: Sequence[str], columns: Patterns = "*") -> float | None:
    """Return by how much more a part improves one row [without, with] than it improves another, at least."""
    found = []
    for column in view.columns(columns):
        a, b, c, d = (view.get(row, column) for row in (*of, *over))
        found.append(None if a is None or b is None or c is None or d is None else (a - b) - (c - d))
    return _least(found)


def highest_above(view: View, than: str, columns: Patterns = "*") -> float | None:
    """Return by how much the worst row is above another, in all columns."""
    lowest = [[-gap for gap in view.gaps(row, than, columns)] for row in view.rows("*", but=[than])]
    return None if view.missing else max(min(gaps) for gaps in lowest)


def worst_column(view: View, rows: Patterns, than: str, columns: Patterns) -> float | None:
    """Return by how much each row is above another in its worst column, at least."""
    above = [[-gap for gap in view.gaps(row, than, columns)] for row in view.rows(rows)]
    return None if view.missing else min(max(gaps) for gaps in above)


MEASURES: Mapping[str, Callable[..., float | None]] = {
    function.__name__: function
    for function in (
        *(margin, smallest_rise, extra_rise, largest_span, extra_spread),
        *(wins, extra_margin, extra_gain, highest_above, worst_column),
    )
}
