"""Normalise with the statistics as they stand, and keep them: inference as everyone knows it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tribe.norms import register
from tribe.state import Stats


@register("frozen")
@dataclass(frozen=True)
class Frozen:
    """The stored statistics, whatever the batch; (R, 1, C) only."""

    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = False

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return what is stored."""
        return stats.mean, stats.var, stats
