"""The base class of scenarios: it turns visits to domains, with a class profile and a local draw, into a schedule."""

import dataclasses
from abc import ABC
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from tribe.data.scenarios.sampling import Draw, Ints, Local, Natural, Profile, Random, Shuffled
from tribe.data.scenarios.schedules import Schedule
from tribe.fields import Count, check_fields, is_whole, require
from tribe.registry import Registry

registry: Registry["Scenario"] = Registry("scenario")
register = registry.register
MOST_CLASSES = 2**16  # the limit if `classes` is not given: a larger label is a mistake that would exhaust the memory

# The order in which the paper plays its corruptions.
CIFAR_C = (
    *("motion_blur", "snow", "fog", "shot_noise", "defocus_blur", "contrast", "zoom_blur", "brightness", "frost"),
    *("elastic_transform", "glass_blur", "gaussian_noise", "pixelate", "jpeg_compression", "impulse_noise"),
)
IMAGENET_C = CIFAR_C
MNIST_C = (
    *("shot_noise", "impulse_noise", "glass_blur", "motion_blur", "shear", "scale", "rotate", "brightness"),
    *("translate", "stripe", "fog", "spatter", "dotted_line", "zigzag", "canny_edges"),
)


@dataclass(frozen=True)
class Scenario(ABC):
    """A stream protocol: it makes a schedule from labels alone, before any image is read.

    A scenario visits domains. The samples of a domain are drawn once, at its first visit, from one generator; a second
    visit replays them, or draws again if the scenario has ``redraw``. Without ``domains`` there are as many domains as
    label sets. To add a scenario override `profile`, `local`, `visits` or `mix`.
    """

    domains: Sequence[str] | None = None  # names, in the order of the label sets
    _: KW_ONLY
    draw: Draw = "released"  # "released": the samplers of the paper's code; "paper": the paper's generative model
    order: Literal["given", "random"] = "given"  # of the domains; "random" depends on the seed
    classes: Count | None = None  # K; None: the largest label + 1

    name: ClassVar[str]  # set by @register
    paper: ClassVar[str | None] = None  # where the protocol comes from
    resets: ClassVar[bool] = False  # True: reset to the source model at every visit
    needs_labels: ClassVar[bool] = True  # False: it can play images without a label (-1)
    same_for_all_seeds: ClassVar[str | None] = None  # why the stream ignores the seed; None: it depends on the seed

    def __post_init__(self) -> None:
        check_fields(self)
        if self.domains is not None:
            names = () if isinstance(self.domains, str) else tuple(self.domains)
            fine = all(isinstance(name, str) and name for name in names) and 0 < len(names) == len(set(names))
            require(fine, "domains are different names, such as 'fog@3', at least one", self.domains)
            object.__setattr__(self, "domains", names)
        _ = self.profile, self.local  # so that wrong numbers raise now, not when the stream is made

    @property
    def profile(self) -> Profile:
        """Return how many images of each class a visit plays."""
        return Natural()

    @property
    def local(self) -> Local:
        """Return the order of the images of a visit."""
        return Shuffled()

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the domains that the scenario makes of each base domain, as endings of its name."""
        return ("",)

    @property
    def redraw(self) -> bool:
        """Whether a second visit to a domain draws again; otherwise it replays the first."""
        return False

    @property
    def domain_names(self) -> tuple[str, ...]:
        """Return the names that a schedule's domain numbers refer to."""
        if self.domains is None:
            raise ValueError("this scenario has no domain names: set domains=..., or use scenario.on(names)")
        return tuple(f"{name}{ending}" for name in self.domains for ending in self.variants)

    def on(self, domains: Sequence[str]) -> Self:
        """Return the same scenario on named domains, such as those of a data set."""
        return dataclasses.replace(self, domains=domains)

    def visits(self, order: Sequence[int]) -> list[int]:
        """Return the numbers of the domains in the order of the stream, given the order of the base domains."""
        return list(order)

    def play(self, labels: Ints, classes: int, rng: Random) -> Ints:
        """Choose and order the images of one visit, given the labels in file order."""
        ends = np.cumsum(np.bincount(labels, minlength=classes))
        members = np.split(np.argsort(labels, kind="stable"), ends[:-1])  # the images of each class, in file order
        pool = self.profile.select(members, self.draw, rng)
        return self.local.arrange(pool, self.draw, rng)

    def mix(self, schedule: Schedule, rng: Random) -> Schedule:
        """Reorder the finished stream; by default it stays."""
        return schedule

    def expand(self, labels: Sequence[Tensor]) -> list[Tensor]:
        """Check the labels and return one tensor per domain number; there is one per base domain or per domain name."""
        return [y for y in self._base_labels(labels) for _ in self.variants]

    def schedule(self, labels: Sequence[Tensor], seed: int) -> Schedule:
        """Make the stream of one seed.

        ``labels``: one tensor per base domain, in file order; or one per `domain_names` if ``domains`` is given.
        """
        require(is_whole(seed, least=0) and seed < 2**32, "seed is an integer from 0 to 2^32 - 1", seed)
        bases = [y.cpu().numpy() for y in self._base_labels(labels)]
        classes = self.classes or 1 + max(int(y.max()) for y in bases)
        rng = Random(seed)
        drawn: dict[int, Ints] = {}
        stretches = []
        order = list(range(len(bases)))
        if self.order == "random":  # another generator, so that the samples of a domain do not depend on `order`
            order = Random([seed, 1]).permutation(len(bases)).tolist()
        for domain in self.visits(order):
            base = domain // len(self.variants)
            if base not in drawn or self.redraw:
                drawn[base] = self.play(bases[base], classes, rng)
                if not len(drawn[base]):
                    name = base if self.domains is None else repr(self.domains[base])
                    raise ValueError(f"domain {name} keeps no image with {self.profile}")
            index = torch.from_numpy(np.array(drawn[base], np.int64))  # a copy: torch takes no reversed views
            reset = torch.zeros(len(index), dtype=torch.bool)
            reset[:1] = self.resets
            stretches.append(Schedule(torch.full_like(index, domain), index, reset))
        return self.mix(Schedule(*map(torch.cat, zip(*stretches, strict=True))), rng)

    def _base_labels(self, labels: Sequence[Tensor]) -> list[Tensor]:
        """Return one checked label tensor per base domain."""
        if isinstance(labels, Tensor) or len(labels) == 0:
            raise ValueError("labels is a sequence of label tensors, one per domain, at least one")
        names = [f"domain {i}" for i in range(len(labels))]
        each = 1  # label tensors per base domain
        if self.domains is not None:
            counts = sorted({len(self.domains), len(self.domain_names)})
            if len(labels) not in counts:
                expected = " or ".join(map(str, counts))
                raise ValueError(f"got {len(labels)} label tensors; expected {expected}, one per domain")
            each = len(labels) // len(self.domains)
            names = [f"domain {name!r}" for name in (self.domains if each == 1 else self.domain_names)]
        least = 0 if self.needs_labels else -1
        checked = [_check_labels(y, name, least, self.classes) for y, name in zip(labels, names, strict=True)]
        for i, y in enumerate(checked):
            first = i - i % each
            if not torch.equal(y, checked[first]):
                raise ValueError(f"{names[i]} has other labels than {names[first]}; expected the same images")
        return checked[::each]


def _check_labels(labels: Any, of: str, least: int, classes: int | None) -> Tensor:
    y = torch.as_tensor(labels)
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"labels of {of} are {y.dtype} of shape {tuple(y.shape)}; expected integers, one per image")
    if len(y) == 0:
        raise ValueError(f"{of} has no images: its labels are empty")
    if int(y.min()) < least:
        classes_as_domains = "If the domains are classes, as in an ImageFolder, name the folder above them"
        hint = "" if least else f"; only the scenario 'replay' plays images without a label. {classes_as_domains}"
        raise ValueError(f"labels of {of} hold {int(y.min())}; expected classes from 0{hint}")
    most = MOST_CLASSES if classes is None else classes
    if int(y.max()) >= most:
        raise ValueError(f"labels of {of} hold {int(y.max())}; expected classes from 0 to {most - 1}")
    return y.long()
