"""A clean data set, corrupted while it is read: always the same images, in any order of reading."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from tribe.data import corruptions
from tribe.data.corruptions import Function, family_for, require_severity
from tribe.data.datasets import Dataset, create, get, optional, register
from tribe.data.scenarios.orders import CIFAR_C, IMAGENET_C, MNIST_C
from tribe.registry import nearest


@dataclass(frozen=True)
class Corrupted:
    """All images of a clean data set under every corruption. A domain is "fog@5".

    Args:
        clean: the data set to corrupt; only its first domain is used.
        names: corruptions, see ``tribe.corruptions.names``.
        severities: the severities of each corruption.
        seed: seed of the corruptions' random numbers.
    """

    clean: Dataset
    names: Sequence[str]
    severities: Sequence[int] = (5,)
    seed: int = 0

    @property
    def classes(self) -> Sequence[str]:
        """The classes of the clean data set."""
        return self.clean.classes

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every severity."""
        return tuple(f"{name}@{severity}" for name in self.names for severity in self.severities)

    def labels(self, domain: str) -> Tensor:
        """Return the labels of the clean images."""
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
    """Convert images (N, C, H, W) in [0, 1] to uint8 like the published files: MNIST-C rounds, the others truncate."""
    levels = images * 255
    return (levels.round() if family_for(images.shape[1:]) == "mnist" else levels).to(torch.uint8)


def family_of(clean_name: str) -> str:
    """Return the family of corruptions for a clean data set, whose class has an attribute `shape`."""
    clean: Any = get(clean_name)
    return family_for(clean.shape)


def check_corruptions(names: Sequence[str], family: str) -> None:
    """Raise an error if a family has no corruption of one of these names."""
    known = corruptions.names(family)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown corruption {name!r}: {nearest(name, known)}")


@dataclass(frozen=True)
class Live:
    """A published clean test set, corrupted while it is read. It needs only the clean files."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = CIFAR_C
    severities: Sequence[int] = (5,)
    seed: int = 0  # seed of the corruptions' random numbers

    clean_name: ClassVar[str]  # the clean data set, one with a class attribute `shape`

    def __post_init__(self) -> None:
        check_corruptions(self.corruptions, family_of(self.clean_name))
        for severity in self.severities:
            require_severity(severity)

    @property
    def clean(self) -> Dataset:
        """The clean data set."""
        return self._corrupted.clean

    @property
    def functions(self) -> list[Function]:
        """The functions that corrupt: code that the images depend on."""
        family = family_of(self.clean_name)
        return [corruptions.function(name, family) for name in self.corruptions]

    @cached_property
    def _corrupted(self) -> Corrupted:
        return Corrupted(create(self.clean_name, data=self.data), self.corruptions, self.severities, self.seed)

    @property
    def classes(self) -> Sequence[str]:
        """The classes of the clean data set."""
        return self._corrupted.classes

    @property
    def outputs(self) -> Sequence[int] | None:
        """The outputs of a network that are the classes, if the clean data set says so."""
        outputs: Sequence[int] | None = optional(self.clean, "outputs")
        return outputs

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every severity."""
        return self._corrupted.domains

    def labels(self, domain: str) -> Tensor:
        """Return the labels of the clean images."""
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


@register("live-imagenet-c")
@dataclass(frozen=True)
class LiveImageNetC(Live):
    """The ImageNet validation images, corrupted on the fly, without the published files' JPEG compression."""

    corruptions: Sequence[str] = IMAGENET_C

    clean_name = "imagenet"
