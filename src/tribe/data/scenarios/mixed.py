"""Any domain at any time: d_t ~ Cat(q_d), the domain indicator of the paper's model, is drawn for every sample."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from tribe.data.scenarios.real_world import Composed
from tribe.data.scenarios.sampling import Random, deal, drain
from tribe.data.scenarios.scenario import register
from tribe.data.scenarios.schedules import Schedule
from tribe.fields import is_number, require


@register("mixed")
@dataclass(frozen=True)
class MixedDomains(Composed):
    """Each sample draws its domain, which plays its next image; an exhausted domain drops out."""

    _: KW_ONLY
    weights: Sequence[float] | None = None  # q_d, one per domain, up to a factor; None: all alike

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(self.weights))
            fine = len(self.weights) > 0 and all(is_number(w) and w > 0 for w in self.weights)
            require(fine, "weights are numbers above 0, one per domain", self.weights)
            same = self.domains is None or len(self.weights) == len(self.domains)
            require(same, f"weights are one per domain of {self.domains}", self.weights)
        super().__post_init__()

    def schedule(self, labels: Sequence[Tensor], seed: int) -> Schedule:
        """Make the stream of one seed."""
        if self.weights is not None and len(self.weights) != len(labels):
            raise ValueError(f"weights are one per domain; got {len(self.weights)} for {len(labels)} label sets")
        return super().schedule(labels, seed)

    def mix(self, schedule: Schedule, rng: Random) -> Schedule:
        """Interleave the domains' streams."""
        lengths = np.bincount(schedule.domain.numpy())
        log_q = np.log(self.weights or np.ones(len(lengths)))
        turns = drain(log_q, lengths, int(lengths.sum()), rng)
        piles = [np.flatnonzero(schedule.domain.numpy() == d) for d in range(len(lengths))]
        order = torch.from_numpy(deal(piles, turns))
        return Schedule(*(t[order] for t in schedule))
