"""The paper's hierarchical model in three fields: domains, the class profile, and the local draw.

Every protocol in the paper's table "Comparing existing real-world TTA protocols" is a case of it, registered here.
"""

from dataclasses import KW_ONLY, dataclass, field

import torch

from tribe.data.scenarios.sampling import Dirichlet, Local, LongTail, Natural, Profile, Random, Shuffled
from tribe.data.scenarios.scenario import Scenario, register
from tribe.data.scenarios.schedules import Schedule


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

    @property
    def profile(self) -> Profile:
        """One long tail for all domains."""
        return LongTail(self.imbalance)


@register("gli-v")
@dataclass(frozen=True)
class GLIV(GLIF):
    """One domain after the other, classes in bursts and long-tailed, other classes rare in every domain."""

    @property
    def profile(self) -> Profile:
        """Return a long tail with other rare classes in each domain."""
        return LongTail(self.imbalance, varying=True)


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
