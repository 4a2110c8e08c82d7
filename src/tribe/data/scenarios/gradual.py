"""Corruptions whose severity changes: the domains are severities of base domains, "fog@1" to "fog@5" of "fog"."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Self

from tribe.data.scenarios.real_world import Composed
from tribe.data.scenarios.scenario import Visit, register
from tribe.fields import require


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

    def _visit(self, base: int, step: int) -> Visit:
        return Visit(base, base * len(self.severities) + step)


@register("gradual")
@dataclass(frozen=True)
class Gradual(Severities):
    """The whole stream at severity 1, then again at 2, up to 5."""

    imbalance: float | None = 100.0
    sigma: float | None = 0.1

    paper = (
        "Su et al., Towards Real-World Test-Time Adaptation, AAAI 2024, 'Evaluation on gradually changing corruptions'"
    )

    def visits(self, order: Sequence[int]) -> list[Visit]:
        """Return all domains at each severity."""
        return [self._visit(base, step) for step in range(len(self.severities)) for base in order]


@register("zigzag")
@dataclass(frozen=True)
class Zigzag(Severities):
    """Each corruption grows from severity 1 to 5 and fades to 1 before the next begins."""

    paper = "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022, 'gradually changing'"

    def visits(self, order: Sequence[int]) -> list[Visit]:
        """Up and down at each domain, the highest severity once."""
        up = list(range(len(self.severities)))
        return [self._visit(base, step) for base in order for step in up + up[-2::-1]]
