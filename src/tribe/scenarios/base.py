"""What every scenario shares: visits to domains, each with a class profile and a local draw, become a schedule."""

import dataclasses
from abc import ABC
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tribe.fields import is_whole, plain_numbers, require
from tribe.registry import Registry
from tribe.scenarios.orders import paper_order
from tribe.scenarios.sampling import Draw, Ints, Local, Natural, Profile, Random, Shuffled
from tribe.scenarios.schedule import Schedule

registry: Registry["Scenario"] = Registry("scenario")
register = registry.register
MOST_CLASSES = 2**16  # believed without `classes`: a label beyond is a mistake, and would only exhaust the memory


class Visit(NamedTuple):
    """A stretch of the stream."""

    base: int  # whose images are played
    domain: int  # as which domain; differs from base where a base domain has several severities


@dataclass(frozen=True)
class Scenario(ABC):
    """A stream protocol: from labels alone to a schedule, before any image is read.

    A scenario visits domains. What it plays at a visit is drawn once for each domain, in the order of the first visits,
    from one generator; a second visit replays it (or, where there is a field ``redraw``, draws anew). Without
    ``domains`` it takes as many as there are label sets. To add a scenario override `profile`, `local`, `visits` or
    `mix`.
    """

    domains: Sequence[str] | None = None  # names, in the order of the label sets
    _: KW_ONLY
    draw: Draw = "released"  # the samplers released with the paper, or the paper's generative model
    order: Literal["given", "random", "paper"] = "given"  # of the domains; random: by the seed
    classes: int | None = None  # K; None: the largest label + 1

    name: ClassVar[str]  # set by @register
    paper: ClassVar[str | None] = None  # where the protocol comes from
    resets: ClassVar[bool] = False  # True: back to the source model at every visit
    needs_labels: ClassVar[bool] = True  # False: images without a label (-1) can be played
    same_for_all_seeds: ClassVar[str | None] = None  # why nothing is drawn; None: the seed makes the stream

    def __post_init__(self) -> None:
        plain_numbers(self)
        require(self.draw in ("released", "paper"), "draw is 'released' or 'paper'", self.draw)
        require(self.order in ("given", "random", "paper"), "order is 'given', 'random' or 'paper'", self.order)
        require(self.classes is None or is_whole(self.classes, least=1), "classes is K, at least 1", self.classes)
        if self.domains is not None:
            object.__setattr__(self, "domains", _names(self.domains))
        _ = self.profile, self.local  # their numbers are looked at now, not when the stream is made
        if self.order == "paper":
            require(self.domains is not None, "order 'paper' needs the names of the domains", self.domains)
            paper_order(self.domains or ())

    @property
    def profile(self) -> Profile:
        """How many images of each class a visit plays."""
        return Natural()

    @property
    def local(self) -> Local:
        """In what order they come."""
        return Shuffled()

    @property
    def variants(self) -> tuple[str, ...]:
        """What the scenario makes of each base domain: endings of its name."""
        return ("",)

    @property
    def redraw(self) -> bool:
        """Whether a second visit to a domain draws anew; else it replays the first."""
        return False

    @property
    def domain_names(self) -> tuple[str, ...]:
        """The names that a schedule's domain numbers refer to."""
        if self.domains is None:
            raise ValueError("this scenario has no domain names yet: give domains=..., or scenario.on(names)")
        return tuple(f"{name}{ending}" for name in self.domains for ending in self.variants)

    def on(self, domains: Sequence[str]) -> Self:
        """Return the same scenario on named domains, say those of a data set."""
        return dataclasses.replace(self, domains=domains)

    def visits(self, order: Sequence[int]) -> list[Visit]:
        """Where the stream goes, given the order of the base domains."""
        return [Visit(base, base) for base in order]

    def play(self, labels: Ints, classes: int, rng: Random) -> Ints:
        """Choose and order the images of one visit, given the labels in file order."""
        pool = self.profile.select(by_class(labels, classes), self.draw, rng)
        return self.local.arrange(pool, self.draw, rng)

    def mix(self, schedule: Schedule, rng: Random) -> Schedule:
        """Reorder the finished stream; most scenarios do not."""
        return schedule

    def expand(self, labels: Sequence[Tensor]) -> list[Tensor]:
        """One label tensor per domain number, from one per base domain or one per domain name; checked."""
        return [y for y in self._base_labels(labels) for _ in self.variants]

    def schedule(self, labels: Sequence[Tensor], seed: int) -> Schedule:
        """Make the stream of one seed.

        ``labels``: one tensor per base domain, in file order; or, where ``domains`` are given, one per `domain_names`.
        """
        require(is_whole(seed, least=0) and seed < 2**32, "seed is an integer from 0 to 2^32 - 1", seed)
        bases = [y.cpu().numpy() for y in self._base_labels(labels)]
        classes = self.classes or 1 + max(int(y.max()) for y in bases)
        rng = Random(seed)
        drawn: dict[int, Ints] = {}
        parts = []
        for base, domain in self.visits(self._order(len(bases), seed)):
            if base not in drawn or self.redraw:
                drawn[base] = self.play(bases[base], classes, rng)
                if not len(drawn[base]):
                    raise ValueError(f"{self._called(base, len(bases))} keeps no image with {self.profile}")
            index = torch.from_numpy(np.array(drawn[base], np.int64))  # a copy: torch takes no reversed views
            reset = torch.zeros(len(index), dtype=torch.bool)
            reset[:1] = self.resets
            parts.append(Schedule(torch.full_like(index, domain), index, reset))
        return self.mix(Schedule(*map(torch.cat, zip(*parts, strict=True))), rng)

    def _order(self, count: int, seed: int) -> list[int]:
        if self.order == "random":  # a generator of its own, so that what a domain plays does not depend on `order`
            return [int(i) for i in Random([seed, 1]).permutation(count)]
        return paper_order(self.domains or ()) if self.order == "paper" else list(range(count))

    def _base_labels(self, labels: Sequence[Tensor]) -> list[Tensor]:
        """One checked label tensor per base domain."""
        if isinstance(labels, Tensor) or len(labels) == 0:
            raise ValueError("labels is a sequence of label tensors, one per domain, at least one")
        least = 0 if self.needs_labels else -1
        checked = [_labels(y, self._called(i, len(labels)), least, self.classes) for i, y in enumerate(labels)]
        if self.domains is None or len(checked) == len(self.domains):
            return checked
        per = len(self.variants)
        if per == 1 or len(checked) != per * len(self.domains):
            wanted = f"{len(self.domains)}" + (f" (or {per * len(self.domains)}, one per severity)" if per > 1 else "")
            relation = "more domains than" if len(self.domains) > len(checked) else "fewer domains than"
            raise ValueError(f"{relation} label sets: got {len(checked)} label tensors; expected {wanted}")
        for i, y in enumerate(checked):
            if not torch.equal(y, checked[i - i % per]):
                names = self.domain_names
                raise ValueError(f"{names[i]} has other labels than {names[i - i % per]}; expected the same images")
        return checked[::per]

    def _called(self, i: int, count: int) -> str:
        for names in (self.domains, self.domains and self.domain_names):
            if names and len(names) == count:
                return f"domain {names[i]!r}"
        return f"domain {i}"


def by_class(labels: Ints, classes: int) -> list[Ints]:
    """The images of each class, in file order."""
    ends = np.cumsum(np.bincount(labels, minlength=classes))
    return np.split(np.argsort(labels, kind="stable"), ends[:-1])


def _names(domains: Any) -> tuple[str, ...]:
    if isinstance(domains, str) or not all(isinstance(name, str) and name for name in domains):
        raise ValueError(f"domains is a sequence of names such as 'fog@3'; got {domains!r}")
    names = tuple(domains)
    require(bool(names), "domains holds at least one name", names)
    require(len(set(names)) == len(names), "every domain has a name of its own", names)
    return names


def _labels(labels: Any, of: str, least: int, classes: int | None) -> Tensor:
    y = torch.as_tensor(labels)
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"labels of {of} are {y.dtype} of shape {tuple(y.shape)}; expected integers, one per image")
    if len(y) == 0:
        raise ValueError(f"{of} has no images: its labels are empty")
    if int(y.min()) < least:
        hint = "" if least else "; images without a label are played by the scenario 'replay' only"
        raise ValueError(f"labels of {of} hold {int(y.min())}; expected classes from 0{hint}")
    most = MOST_CLASSES if classes is None else classes
    if int(y.max()) >= most:
        raise ValueError(f"labels of {of} hold {int(y.max())}; expected classes from 0 to {most - 1}")
    return y.long()
