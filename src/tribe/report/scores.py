"""The numbers of a row: means over seeds, their spread, and which is the best of several."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.lab import metrics
from tribe.lab.record import Record
from tribe.report.collect import Row


class Column(NamedTuple):
    """A number that every row has."""

    name: str
    short: str
    metric: Callable[[Record], Tensor]
    scale: float
    judged: bool = True  # whether it needs labels
    spread: bool = True  # whether it is worth knowing how far seeds lie apart
    best: bool = True  # whether the lowest is marked


def _confidence(record: Record) -> Tensor:
    return record.confidence.double().mean()


INSTANCE = Column("instance error, %", "instance", metrics.instance_error, 100)
CATEGORY = Column("category error, %", "category", metrics.category_error, 100)
CALIBRATION = Column("ECE, %", "ECE", metrics.calibration_error, 100)
CONFIDENCE = Column("confidence, %", "confidence", _confidence, 100, judged=False, best=False)
COST = Column("ms per image", "ms", metrics.seconds_per_image, 1000, judged=False, spread=False)
SHORT = (INSTANCE, CATEGORY, COST)
LONG = (INSTANCE, CATEGORY, CALIBRATION, CONFIDENCE, COST)


class Score(NamedTuple):
    """A number over seeds; NaN where there is none."""

    mean: float
    spread: float | None = None  # standard deviation; None of a single seed

    @property
    def shown(self) -> str:
        """The mean as it is printed."""
        return "–" if math.isnan(self.mean) else f"{self.mean:.2f}"

    @property
    def words(self) -> str:
        """Mean and spread.

        >>> Score(10.204, 0.5).words, Score(math.nan).words
        ('10.20 ± 0.50', '–')
        """
        return self.shown if self.spread is None else f"{self.shown} ± {self.spread:.2f}"


def score(row: Row, column: Column) -> Score:
    """A column's number of a row."""
    records = row.judged if column.judged else row.records
    if not records:
        return Score(math.nan)
    values = column.scale * torch.stack([column.metric(record).double() for record in records])
    return Score(values.mean().item(), values.std().item() if len(values) > 1 and column.spread else None)


def best(scores: Sequence[Score]) -> str | None:
    """The lowest mean as printed, which several may share; None where there is nothing to compare."""
    means = [found.mean for found in scores if not math.isnan(found.mean)]
    return Score(min(means)).shown if len(means) > 1 else None
