"""A clean data set, corrupted on the fly: the same pictures every time, whatever the order they are asked for in."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from tribe import corruptions
from tribe.corruptions import Function
from tribe.datasets import Dataset, create, register
from tribe.registry import nearest
from tribe.scenarios.orders import CIFAR_C, MNIST_C


@dataclass(frozen=True)
class Corrupted:
    """Every image of a clean data set under every corruption; a domain is "fog@5".

    Args:
        clean: the data set to corrupt; its first domain is used.
        names: corruptions, see ``tribe.corruptions.names``.
        severities: of each.
        seed: of the corruptions' randomness.
    """

    clean: Dataset
    names: Sequence[str]
    severities: Sequence[int] = (5,)
    seed: int = 0

    @property
    def classes(self) -> Sequence[str]:
        """Those of the clean data set."""
        return self.clean.classes

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every severity."""
        return tuple(f"{name}@{severity}" for name in self.names for severity in self.severities)

    def labels(self, domain: str) -> Tensor:
        """The clean images' labels."""
        self._parse(domain)
        return self.clean.labels(self.clean.domains[0])

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images and corrupt them."""
        name, severity = self._parse(domain)
        images = self.clean.images(self.clean.domains[0], index)
        return to_bytes(corruptions.apply(images, name, severity, seed=self.seed, index=index)).float().div_(255)

    def _parse(self, domain: str) -> tuple[str, int]:
        if domain not in self.domains:
            raise ValueError(f"unknown domain {domain!r}: {nearest(domain, self.domains)}")
        name, _, severity = domain.partition("@")
        return name, int(severity)


def to_bytes(images: Tensor) -> Tensor:
    """Cut images (N, C, H, W) in [0, 1] to uint8 as the published files hold them: MNIST-C rounds, others truncate."""
    levels = images * 255
    return (levels.round() if images.shape[1:] == (1, 28, 28) else levels).to(torch.uint8)


@dataclass(frozen=True)
class Live:
    """A published clean test set, corrupted while it is read; needs no more than the clean files."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = CIFAR_C
    severities: Sequence[int] = (5,)
    seed: int = 0  # of the corruptions' randomness

    clean_name: ClassVar[str]  # the clean data set

    def __post_init__(self) -> None:
        known = corruptions.names("mnist" if self.clean_name == "mnist" else "common")
        for name in self.corruptions:
            if name not in known:
                raise ValueError(f"unknown corruption {name!r}: {nearest(name, known)}")
        for severity in self.severities:
            if severity not in corruptions.SEVERITIES:
                raise ValueError(f"a severity is 1, 2, 3, 4 or 5; got {severity!r}")

    @property
    def clean(self) -> Dataset:
        """The clean data set."""
        return self._corrupted.clean

    @property
    def functions(self) -> list[Function]:
        """What corrupts: code that the images depend on."""
        family = "mnist" if self.clean_name == "mnist" else "common"
        return [corruptions.function(name, family) for name in self.corruptions]

    @cached_property
    def _corrupted(self) -> Corrupted:
        return Corrupted(create(self.clean_name, data=self.data), self.corruptions, self.severities, self.seed)

    @property
    def classes(self) -> Sequence[str]:
        """Those of the clean data set."""
        return self._corrupted.classes

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every severity."""
        return self._corrupted.domains

    def labels(self, domain: str) -> Tensor:
        """The clean images' labels."""
        return self._corrupted.labels(domain)

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images and corrupt them."""
        return self._corrupted.images(domain, index)


@register("live-mnist-c")
@dataclass(frozen=True)
class LiveMnistC(Live):
    """The MNIST test images, which come with the package, corrupted on the fly by MNIST-C's 15 corruptions."""

    corruptions: Sequence[str] = MNIST_C

    clean_name = "mnist"


@register("live-cifar10-c")
@dataclass(frozen=True)
class LiveCifar10C(Live):
    """The CIFAR-10 test images, corrupted on the fly."""

    clean_name = "cifar10"


@register("live-cifar100-c")
@dataclass(frozen=True)
class LiveCifar100C(Live):
    """The CIFAR-100 test images, corrupted on the fly."""

    clean_name = "cifar100"
