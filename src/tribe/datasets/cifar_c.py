"""CIFAR-10-C and CIFAR-100-C as published: ``<corruption>.npy`` with five blocks of images, mild to severe, and labels.

Hendrycks & Dietterich, Benchmarking neural network robustness to common corruptions and perturbations, ICLR 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tribe.datasets import register
from tribe.datasets.files import data_root, find, open_array, open_labels, to_images
from tribe.registry import nearest
from tribe.scenarios.orders import CIFAR_C

LEVELS = 5
INCOMPLETE = "The folder is incomplete: unpack the published archive again"


@dataclass(frozen=True)
class CifarC:
    """Corrupted images, memory-mapped; a domain is a corruption at a severity, "fog@5"."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = CIFAR_C
    severities: Sequence[int] = (5,)

    count: ClassVar[int]
    folder: ClassVar[str]

    def __post_init__(self) -> None:
        for severity in self.severities:
            if severity not in range(1, LEVELS + 1):
                raise ValueError(f"a severity is 1 to {LEVELS}; got {severity!r}")

    @property
    def classes(self) -> Sequence[str]:
        """Numbers: the published files carry no names."""
        return tuple(str(k) for k in range(self.count))

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every severity asked for."""
        return tuple(f"{name}@{severity}" for name in self.corruptions for severity in self.severities)

    @cached_property
    def _folder(self) -> Path:
        hint = f"Place the folder {self.folder} of the published archive there"
        return find(data_root(self.data), self.folder, what=self.folder, hint=hint)

    @cached_property
    def _labels(self) -> Tensor:
        path = find(self._folder, "labels.npy", what="the labels", hint=INCOMPLETE)
        labels = open_labels(path, self.count)
        if len(labels) % LEVELS:
            raise ValueError(f"{path} has {len(labels)} labels; expected {LEVELS} blocks of equal length")
        return labels

    @cached_property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {}

    def labels(self, domain: str) -> Tensor:
        """The labels of a severity's block, in file order."""
        _, block = self._block(domain)
        return self._labels[block]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images of a block."""
        name, block = self._block(domain)
        if name not in self._arrays:
            path = find(self._folder, f"{name}.npy", what=f"corruption {name!r}", hint=INCOMPLETE)
            self._arrays[name] = open_array(path, (len(self._labels), 32, 32, 3))
        return to_images(self._arrays[name][np.asarray(index) + block.start])

    def _block(self, domain: str) -> tuple[str, slice]:
        if domain not in self.domains:
            raise ValueError(f"unknown domain {domain!r}: {nearest(domain, self.domains)}")
        name, _, severity = domain.partition("@")
        rows = len(self._labels) // LEVELS
        return name, slice((int(severity) - 1) * rows, int(severity) * rows)


@register("cifar10-c")
@dataclass(frozen=True)
class Cifar10C(CifarC):
    """The CIFAR-10 test images under each corruption, at five severities."""

    count = 10
    folder = "CIFAR-10-C"


@register("cifar100-c")
@dataclass(frozen=True)
class Cifar100C(CifarC):
    """The CIFAR-100 test images under each corruption, at five severities."""

    count = 100
    folder = "CIFAR-100-C"
