"""CIFAR-10-C and CIFAR-100-C as published: ``<corruption>.npy`` with a block of images per severity, and labels.

Hendrycks & Dietterich, Benchmarking neural network robustness to common corruptions and perturbations, ICLR 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor

from tribe.data.corruptions import SEVERITIES, require_severity
from tribe.data.datasets import register
from tribe.data.datasets.files import (
    data_root,
    download_hint,
    find,
    open_images,
    open_labels,
    positions,
    to_images,
)
from tribe.data.datasets.manifest import block_digest, corrupt_command, remedy, require_block, with_remedy
from tribe.data.scenarios.orders import CIFAR_C
from tribe.registry import nearest


@dataclass(frozen=True)
class CifarC:
    """Corrupted images, memory-mapped. A domain is a corruption at a severity, "fog@5"."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = CIFAR_C
    severities: Sequence[int] = (5,)

    count: ClassVar[int]
    folder: ClassVar[str]
    archive: ClassVar[str]
    clean_name: ClassVar[str]  # the clean data set that it is made from

    def __post_init__(self) -> None:
        for severity in self.severities:
            require_severity(severity)

    @property
    def classes(self) -> Sequence[str]:
        """Numbers: the published files carry no names."""
        return tuple(str(k) for k in range(self.count))

    @property
    def domains(self) -> Sequence[str]:
        """Every corruption at every chosen severity."""
        return tuple(f"{name}@{severity}" for name in self.corruptions for severity in self.severities)

    @cached_property
    def _folder(self) -> Path:
        root, command = data_root(self.data), self._command(self.corruptions, self.severities)
        hint = f"To make it from the clean set, run `{command}`. {download_hint(self.archive, root)}"
        return find(root, self.folder, what=self.folder, hint=hint)

    @cached_property
    def _labels(self) -> Tensor:
        command = self._command(self.corruptions, self.severities)
        path = find(self._folder, "labels.npy", what="the labels", hint=remedy(self._folder, command))
        with with_remedy(self._folder, command):
            labels = open_labels(path, self.count)
            if len(labels) % len(SEVERITIES):
                raise ValueError(f"{path} has {len(labels)} labels; expected {len(SEVERITIES)} blocks of equal length")
        return labels

    @cached_property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {}

    @cached_property
    def _checked(self) -> set[str]:
        return set()

    def labels(self, domain: str) -> Tensor:
        """Return the labels of a block, in file order."""
        _, block = self._block(domain)
        return self._labels[block]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images of a block."""
        name, block = self._block(domain)
        if name not in self._arrays:
            command = self._command([name], self.severities)
            path = find(self._folder, f"{name}.npy", what=f"corruption {name!r}", hint=remedy(self._folder, command))
            with with_remedy(self._folder, command):
                self._arrays[name] = open_images(path, (len(self._labels), 32, 32, 3))
        rows = positions(index, block.stop - block.start, domain) + block.start
        return to_images(self._arrays[name][rows])

    def digest(self, domain: str) -> str | None:
        """Return the hash of the images in the manifest; None for the published archive."""
        self._block(domain)
        return block_digest(self._folder, domain)

    def _block(self, domain: str) -> tuple[str, slice]:
        if domain not in self.domains:
            raise ValueError(f"unknown domain {domain!r}: {nearest(domain, self.domains)}")
        name, _, severity = domain.partition("@")
        if domain not in self._checked:
            require_block(self._folder, domain, self._command([name], [int(severity)]))
            self._checked.add(domain)
            self._arrays.pop(name, None)  # if opened before this severity was added, it has zeros in its place
        rows = len(self._labels) // len(SEVERITIES)
        return name, slice((int(severity) - 1) * rows, int(severity) * rows)

    def _command(self, names: Sequence[str], severities: Sequence[int]) -> str:
        corruptions = () if tuple(names) == CIFAR_C else names
        return corrupt_command(self.clean_name, data_root(self.data), corruptions=corruptions, severities=severities)


@register("cifar10-c")
@dataclass(frozen=True)
class Cifar10C(CifarC):
    """The CIFAR-10 test images under each corruption, at five severities."""

    count = 10
    folder = "CIFAR-10-C"
    archive = "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar"
    clean_name = "cifar10"


@register("cifar100-c")
@dataclass(frozen=True)
class Cifar100C(CifarC):
    """The CIFAR-100 test images under each corruption, at five severities."""

    count = 100
    folder = "CIFAR-100-C"
    archive = "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar"
    clean_name = "cifar100"
