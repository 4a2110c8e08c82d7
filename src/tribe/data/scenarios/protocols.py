"""The scenarios. The paper's hierarchical model has three parts: domains, the class profile, and the local draw.

Every protocol in the paper's table "Comparing existing real-world TTA protocols" is a case of it, registered here.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Self

import numpy as np
import torch

from tribe.data.scenarios.sampling import (
    Dirichlet,
    Ints,
    Local,
    LongTail,
    Natural,
    Profile,
    Random,
    Shuffled,
    deal,
    drain,
)
from tribe.data.scenarios.scenario import Scenario, register
from tribe.data.scenarios.schedules import Schedule
from tribe.fields import Count, is_number, require


@dataclass(frozen=True)
class RealWorld(Scenario):
    """Domains one after the other, without a reset, with any class profile and local draw.

    >>> labels = [torch.arange(1000) % 10] * 2
    >>> stream = RealWorld(("fog@5", "snow@5"), LongTail(100), Dirichlet(0.1)).schedule(labels, seed=0)
    >>> torch.bincount(stream.domain).tolist()
    [242, 242]
    """

    profile: Profile = field(default=Natural())
    local: Local = field(default=Shuffled())


@register("iid")
@dataclass(frozen=True)
class IID(Scenario):
    """All images of all domains in one random order."""

    def mix(self, schedule: Schedule, rng: Random) -> Schedule:
        """Shuffle the whole stream."""
        order = torch.from_numpy(rng.permutation(len(schedule.index)))
        return Schedule(*(t[order] for t in schedule))


@register("continual")
@dataclass(frozen=True)
class Continual(Scenario):
    """One domain after the other, each in random order; no signal marks their ends."""

    paper = "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022"


@register("fully")
@dataclass(frozen=True)
class Fully(Scenario):
    """Every domain by itself, in random order, with a reset to the source model at its start."""

    paper = "Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021"
    resets = True


@register("replay")
@dataclass(frozen=True)
class Replay(Scenario):
    """Every image once, in the order of the files, domain after domain; also for images without labels."""

    needs_labels = False
    same_for_all_seeds = "the stream is the order of the files; only order='random' depends on the seed"

    def play(self, labels: Ints, classes: int, rng: Random) -> Ints:
        """Play the first image first."""
        return np.arange(len(labels))


@dataclass(frozen=True)
class Correlated(Scenario):
    """A stream whose classes come in bursts."""

    sigma: float = 0.1  # Dirichlet concentration; smaller: fewer classes at a time
    _: KW_ONLY
    window: int = 64  # samples that share one q in the paper's draw, a batch

    @property
    def local(self) -> Local:
        """Few classes at a time."""
        return Dirichlet(self.sigma, self.window)


@register("noniid")
@dataclass(frozen=True)
class NonIID(Correlated):
    """Every domain by itself, with a reset to the source model at its start; its classes come in bursts."""

    paper = "Gong et al., NOTE: Robust Continual Test-time Adaptation Against Temporal Correlation, NeurIPS 2022"
    resets = True


@register("ptta")
@dataclass(frozen=True)
class PTTA(Correlated):
    """One domain after the other, classes in bursts, all images of every class."""

    paper = "Yuan et al., Robust Test-Time Adaptation in Dynamic Scenarios, CVPR 2023"


@register("gli-f")
@dataclass(frozen=True)
class GLIF(Correlated):
    """One domain after the other, classes in bursts and long-tailed, the same classes rare throughout."""

    imbalance: float = 100.0  # IF, the largest class over the smallest

    paper = "Su et al., Towards Real-World Test-Time Adaptation, AAAI 2024"
    varying: ClassVar[bool] = False  # True: other classes are rare in each domain

    @property
    def profile(self) -> Profile:
        """Return a long tail."""
        return LongTail(self.imbalance, self.varying)


@register("gli-v")
@dataclass(frozen=True)
class GLIV(GLIF):
    """One domain after the other, classes in bursts and long-tailed, other classes rare in every domain."""

    varying = True


@dataclass(frozen=True)
class Composed(Scenario):
    """A base for scenarios that combine their visits with any class profile and local draw."""

    imbalance: float | None = None  # IF of a long tail; None: all images
    varying: bool = False  # with a long tail: other classes are rare in each domain
    sigma: float | None = None  # Dirichlet concentration; None: random order
    _: KW_ONLY
    window: int = 64  # samples that share one q in the paper's draw, a batch

    @property
    def profile(self) -> Profile:
        """Return a long tail if `imbalance` is set."""
        return Natural() if self.imbalance is None else LongTail(self.imbalance, self.varying)

    @property
    def local(self) -> Local:
        """Return a Dirichlet draw if `sigma` is set."""
        return Shuffled() if self.sigma is None else Dirichlet(self.sigma, self.window)


@register("recurring")
@dataclass(frozen=True)
class Recurring(Composed):
    """The whole stream N times, by default with the same samples in the same order each time."""

    sigma: float | None = 0.1
    rounds: Count = 20  # N
    _: KW_ONLY
    redraw: bool = False  # True: every round draws its own samples and order

    paper = "Hoang et al., Persistent Test-time Adaptation in Recurring Testing Scenarios, NeurIPS 2024"

    def visits(self, order: Sequence[int]) -> list[int]:
        """Return all domains, N times."""
        return super().visits(order) * self.rounds


@register("mixed")
@dataclass(frozen=True)
class MixedDomains(Composed):
    """Any domain at any time: each sample draws its domain d_t ~ Cat(q_d), which plays its next image.

    An exhausted domain drops out.
    """

    _: KW_ONLY
    weights: Sequence[float] | None = None  # q_d, one per domain, up to a factor; None: all alike

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(self.weights))
            fine = len(self.weights) > 0 and all(is_number(w) and w > 0 for w in self.weights)
            require(fine, "weights are numbers above 0, one per domain", self.weights)
        super().__post_init__()

    def mix(self, schedule: Schedule, rng: Random) -> Schedule:
        """Interleave the domains' streams."""
        lengths = np.bincount(schedule.domain.numpy())
        weights = self.weights or np.ones(len(lengths))
        if len(weights) != len(lengths):
            raise ValueError(f"weights are one per domain; got {len(weights)} for {len(lengths)} label sets")
        turns = drain(np.log(weights), lengths, int(lengths.sum()), rng)
        piles = [np.flatnonzero(schedule.domain.numpy() == d) for d in range(len(lengths))]
        order = torch.from_numpy(deal(piles, turns))
        return Schedule(*(t[order] for t in schedule))


@dataclass(frozen=True)
class Severities(Composed):
    """``domains`` are base names ("fog"); domain number i * len(severities) + j is base i at the j-th severity.

    All severities of a corruption have the same images, so one label tensor per base domain is enough.
    """

    _: KW_ONLY
    severities: Sequence[int] = (1, 2, 3, 4, 5)  # in the order of their first visit
    redraw: bool = False  # False: the same images in the same order at every severity, like the paper

    def __post_init__(self) -> None:
        object.__setattr__(self, "severities", tuple(self.severities))
        fine = all(s in (1, 2, 3, 4, 5) for s in self.severities) and len(set(self.severities)) == len(self.severities)
        require(fine and bool(self.severities), "severities are different numbers from 1 to 5", self.severities)
        super().__post_init__()
        for name in self.domains or ():
            require("@" not in name, "the scenario adds the severities: use 'fog', not 'fog@3'", name)

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the severities, as endings of a name."""
        return tuple(f"@{severity}" for severity in self.severities)

    def on(self, domains: Sequence[str]) -> Self:
        """Return the same scenario on named domains; a data set's "fog@1" to "fog@5" become "fog"."""
        bases = tuple(dict.fromkeys(name.partition("@")[0] for name in domains))
        scenario = super().on(bases)
        if bases != tuple(domains) and (missing := [n for n in scenario.domain_names if n not in domains]):
            wanted = ",".join(map(str, sorted(self.severities)))
            raise ValueError(
                f"the severities {self.severities} need domain {missing[0]!r}, which the data set lacks: build it with "
                f"--severity {wanted} or severities=({wanted}); it has {', '.join(domains)}"
            )
        return scenario


@register("gradual")
@dataclass(frozen=True)
class Gradual(Severities):
    """The whole stream at severity 1, then again at 2, up to 5."""

    imbalance: float | None = 100.0
    sigma: float | None = 0.1

    paper = "Su et al., Towards Real-World Test-Time Adaptation, AAAI 2024, on gradually changing corruptions"

    def visits(self, order: Sequence[int]) -> list[int]:
        """Return all domains at each severity."""
        count = len(self.severities)
        return [base * count + step for step in range(count) for base in order]


@register("zigzag")
@dataclass(frozen=True)
class Zigzag(Severities):
    """Each corruption grows from severity 1 to 5 and fades to 1 before the next begins."""

    paper = "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022, 'gradually changing'"

    def visits(self, order: Sequence[int]) -> list[int]:
        """Up and down at each domain, the highest severity once."""
        up = list(range(len(self.severities)))
        return [base * len(up) + step for base in order for step in up + up[-2::-1]]
