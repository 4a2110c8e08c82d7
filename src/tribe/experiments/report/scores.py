"""The scores of a row: means and standard deviations over seeds, and the best of several."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tribe.experiments.report.collect import MethodRow


class Column(NamedTuple):
    """A metric that every row of a table shows."""

    name: str
    short: str
    key: str  # among the scores of a stream
    scale: float
    needs_labels: bool = True
    spread: bool = True  # whether to show the standard deviation over seeds
    best: bool = True  # whether to mark the lowest


INSTANCE = Column("instance error, %", "instance", "instance_error", 100)
CATEGORY = Column("category error, %", "category", "category_error", 100)
CALIBRATION = Column("ECE, %", "ECE", "calibration_error", 100)
CONFIDENCE = Column("confidence, %", "confidence", "confidence", 100, needs_labels=False, best=False)
COST = Column("ms per image", "ms", "seconds_per_image", 1000, needs_labels=False, spread=False)
SHORT = (INSTANCE, CATEGORY, COST)
LONG = (INSTANCE, CATEGORY, CALIBRATION, CONFIDENCE, COST)


class MeanScore(NamedTuple):
    """Mean and standard deviation over seeds; NaN where there are no records."""

    mean: float
    spread: float | None = None  # standard deviation; None for a single seed

    @property
    def text(self) -> str:
        """Return the mean, as printed."""
        return "–" if math.isnan(self.mean) else f"{self.mean:.2f}"

    @property
    def text_with_spread(self) -> str:
        """Return mean and standard deviation, as printed.

        >>> MeanScore(10.204, 0.5).text_with_spread, MeanScore(math.nan).text_with_spread
        ('10.20 ± 0.50', '–')
        """
        return self.text if self.spread is None else f"{self.text} ± {self.spread:.2f}"


def score(row: MethodRow, column: Column) -> MeanScore:
    """Return the score of a row in a column."""
    found = [played.scores.get(column.key) for played in (row.labelled if column.needs_labels else row.played)]
    if not found:
        return MeanScore(math.nan)
    values = column.scale * torch.tensor([math.nan if value is None else value for value in found], dtype=torch.float64)
    return MeanScore(values.mean().item(), values.std().item() if len(values) > 1 and column.spread else None)


def best(scores: Sequence[MeanScore]) -> str | None:
    """Return the lowest mean, as printed; several scores may have it. None if fewer than two have a mean."""
    means = [score.mean for score in scores if not math.isnan(score.mean)]
    return MeanScore(min(means)).text if len(means) > 1 else None
