"""Clean data sets, corrupted while they are read: always the same images, in any order of reading."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from tribe.data import corruptions
from tribe.data.corruptions import Function, family_for
from tribe.data.datasets import BySeverity, Dataset, create, get, optional, register, require_domain
from tribe.data.scenarios import CIFAR_C, IMAGENET_C, MNIST_C


def to_bytes(images: Tensor) -> Tensor:
    """Convert images (N, C, H, W) in [0, 1] to uint8 like the published files: MNIST-C rounds, the others truncate."""
    levels = images * 255
    return (levels.round() if family_for(images.shape[1:]) == "mnist" else levels).byte()


def functions_of(clean_name: str, names: Sequence[str]) -> list[Function]:
    """Return the functions that corrupt a clean data set, whose class has an attribute `shape`."""
    clean: Any = get(clean_name)
    return [corruptions.function(name, family_for(clean.shape)) for name in names]


@dataclass(frozen=True)
class Live(BySeverity):
    """A published clean test set, corrupted while it is read. It needs only the clean files. A domain is "fog@5"."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = CIFAR_C
    severities: Sequence[int] = (5,)
    seed: int = 0  # seed of the corruptions' random numbers

    clean_name: ClassVar[str]  # the clean data set, one with a class attribute `shape`

    def __post_init__(self) -> None:
        _ = self.functions  # raises an error for an unknown corruption
        super().__post_init__()

    @property
    def functions(self) -> list[Function]:
        """The functions that corrupt: code that the images depend on."""
        return functions_of(self.clean_name, self.corruptions)

    @cached_property
    def clean(self) -> Dataset:
        """The clean data set; only its first domain is used."""
        return create(self.clean_name, data=self.data)

    @property
    def classes(self) -> Sequence[str]:
        """The classes of the clean data set."""
        return self.clean.classes

    @property
    def outputs(self) -> Sequence[int] | None:
        """The outputs of a network that are the classes, if the clean data set says so."""
        outputs: Sequence[int] | None = optional(self.clean, "outputs")
        return outputs

    def labels(self, domain: str) -> Tensor:
        """Return the labels of the clean images."""
        require_domain(domain, self.domains)
        return self.clean.labels(self.clean.domains[0])

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images and corrupt them."""
        require_domain(domain, self.domains)
        name, _, severity = domain.partition("@")
        images = self.clean.images(self.clean.domains[0], index)
        return to_bytes(corruptions.apply(images, name, int(severity), seed=self.seed, index=index)).float().div_(255)


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
