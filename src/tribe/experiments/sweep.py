"""A sweep: one experiment for each point of a grid of fields, and the best point, with labels and without.

A point is chosen without labels by one of `SCORES`, which need nothing but the records. Labels of the stream say how
good that choice was; a deployment does not have them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from tribe.experiments.parallel import Failure
from tribe.experiments.record import Record
from tribe.experiments.store import Result

MOST_POINTS = 10_000


class SweepAxis(NamedTuple):
    """Fields that vary together, and the values that they take: one field in a grid, several in a list."""

    places: tuple[str, ...]  # the fields, such as tribe.lr
    values: tuple[tuple[Any, ...], ...]  # for each point of the axis, a value for each field

    @property
    def name(self) -> str:
        """The fields in one text."""
        return ", ".join(self.places)

    def labels(self) -> list[str]:
        """Return the values as text, one for each point."""
        return [", ".join(map(str, value)) for value in self.values]


Point = dict[str, Any]  # field, such as tribe.lr -> value


def make_axes(grid: Mapping[str, Sequence[Any]], listed: Mapping[str, Sequence[Any]]) -> list[SweepAxis]:
    """Return the axes of a sweep: one for each field of ``grid``, and one for all fields of ``listed`` together.

    >>> [axis.labels() for axis in make_axes({"tribe.lr": [0.1, 0.2]}, {"tribe.eta": [1, 2], "tribe.h0": [3, 4]})]
    [['0.1', '0.2'], ['1, 3', '2, 4']]
    """
    if not grid and not listed:
        raise ValueError("the sweep is empty: name a field and its values, such as --grid tribe.lr=1e-4,1e-3")
    if both := sorted(grid.keys() & listed.keys()):
        raise ValueError(f"{both[0]} is in a grid and in a list: name it once")
    for place, values in (*grid.items(), *listed.items()):
        if not values:
            raise ValueError(f"the sweep is empty: {place} has no value; expected some, such as {place}=0.1,0.2")
    lengths = {place: len(values) for place, values in listed.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{place} has {count}" for place, count in lengths.items())
        raise ValueError(f"fields of a list vary together and need as many values each: {counts}")
    axes = [SweepAxis((place,), tuple((value,) for value in _different(values))) for place, values in grid.items()]
    if listed:
        axes.append(SweepAxis(tuple(listed), tuple(_different(list(zip(*listed.values(), strict=True))))))
    if (count := math.prod(len(axis.values) for axis in axes)) > MOST_POINTS:
        raise ValueError(f"the sweep has {count:,} points; expected at most {MOST_POINTS:,}")
    return axes


def points_of(axes: Sequence[SweepAxis]) -> Iterator[Point]:
    """Yield all points of a sweep; the values of the last axis change fastest.

    >>> list(points_of(make_axes({"a.x": [1, 2]}, {})))
    [{'a.x': 1}, {'a.x': 2}]
    """
    for chosen in itertools.product(*(axis.values for axis in axes)):
        pairs = zip(axes, chosen, strict=True)
        yield {place: value for axis, values in pairs for place, value in zip(axis.places, values, strict=True)}


def _different(values: Sequence[Any]) -> list[Any]:
    """Return values without repeats; 1, 1.0 and True are different."""
    return list({(repr(value)): value for value in values}.values())


class SweepScore(NamedTuple):
    """A score that needs no labels: the mean of a column of the records."""

    words: str
    better: Literal["higher", "lower"]
    part: Literal["watched", "trace"] | None  # of the record; None: the record itself
    column: str

    def of(self, record: Record) -> float:
        """Return the mean of the values; NaN if there are none."""
        part = record if self.part is None else getattr(record, self.part)
        return math.nan if part is None else float(getattr(part, self.column).double().nanmean())


SCORES = {
    "estimate": SweepScore(
        "estimated accuracy, of a method with +watch and a calibration", "higher", "watched", "accuracy"
    ),
    "entropy": SweepScore("mean entropy of the predictions, as a share of log K", "lower", "trace", "entropy"),
    "confidence": SweepScore("mean probability of the predicted class", "higher", None, "confidence"),
    # Not before the others: branches that have collapsed to the same few classes agree, too.
    "agreement": SweepScore("agreement of teacher and student", "higher", "trace", "student_agreement"),
}


def predicted_classes(record: Record) -> float:
    """Return the effective number of predicted classes: e to the entropy of their shares. 1: a collapse.

    It is not a score: how many classes a stream shows is not known without labels.
    """
    shares = record.prediction.bincount().double() / max(len(record.prediction), 1)
    return float((-shares * shares.clamp_min(1e-300).log()).sum().exp())


@dataclass(frozen=True)
class SweepRow:
    """A point of a sweep that was played, or the reason why it was not."""

    point: Point
    result: Result | None
    scores: Mapping[str, float]  # of SCORES, by name; NaN where the records do not hold it
    classes: float = math.nan  # see `predicted_classes`
    reason: str = ""

    @property
    def error(self) -> float:
        """The mean instance error over the seeds; NaN without labels."""
        return math.nan if self.result is None else self.result.error()


def make_row(point: Point, outcome: Result | Failure) -> SweepRow:
    """Return the row of a point."""
    if isinstance(outcome, Failure):
        return SweepRow(point, None, dict.fromkeys(SCORES, math.nan), reason=outcome.reason)
    records = outcome.records() if outcome.has_records else []
    scores = {name: fmean(map(score.of, records)) if records else math.nan for name, score in SCORES.items()}
    return SweepRow(point, outcome, scores, fmean(map(predicted_classes, records)) if records else math.nan)


def default_score(rows: Sequence[SweepRow]) -> str:
    """Return the first of `SCORES` that every result has and that differs between them; else the confidence."""
    played = [row for row in rows if row.result is not None]
    for name in SCORES:
        values = [row.scores[name] for row in played]
        if not any(map(math.isnan, values)) and len(set(values)) > 1:
            return name
    return "confidence"


def lowest(rows: Sequence[SweepRow], of: Callable[[SweepRow], float]) -> SweepRow | None:
    """Return the point with the lowest number; None if no point has it."""
    return min((row for row in rows if not math.isnan(of(row))), key=of, default=None)


def best_by_score(rows: Sequence[SweepRow], name: str) -> SweepRow | None:
    """Return the best point without labels; None if no result has the score."""
    sign = 1 if SCORES[name].better == "lower" else -1
    return lowest(rows, lambda row: sign * row.scores[name])
