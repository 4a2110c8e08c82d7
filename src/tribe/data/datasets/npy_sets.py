"""MNIST-C, CIFAR-10-C and CIFAR-100-C as published: npy files of images and labels, which are memory-mapped.

Mu & Gilmer, MNIST-C: a robustness benchmark for computer vision, 2019. Hendrycks & Dietterich, Benchmarking neural
network robustness to common corruptions and perturbations, ICLR 2019.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.data.corruptions import SEVERITIES
from tribe.data.datasets import BySeverity, register, require_domain
from tribe.data.datasets.files import data_root, download_hint, find, open_images, open_labels, positions
from tribe.data.datasets.manifest import corrupt_command, read_manifest, remedy, require_block
from tribe.data.scenarios import CIFAR_C, MNIST_C

SEVERITY = 5  # MNIST-C has a single strength; commands and manifests call it this severity


@dataclass(frozen=True)
class NpyImages(ABC):
    """A base class: the images of a domain are a block in an npy file."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = CIFAR_C

    count: ClassVar[int] = 10  # classes
    folder: ClassVar[str]
    archive: ClassVar[str]
    clean_name: ClassVar[str]  # the clean data set that it is made from

    @property
    def classes(self) -> Sequence[str]:
        """Numbers: the published files carry no names."""
        return tuple(str(k) for k in range(self.count))

    @property
    def domains(self) -> Sequence[str]:
        """The corruptions."""
        return tuple(self.corruptions)

    def labels(self, domain: str) -> Tensor:
        """Return the labels of a domain, in file order."""
        return self._block(domain)[1]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images of a domain."""
        array, labels = self._block(domain)
        rows = array[positions(index, len(labels), domain)].transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(rows)).float().div_(255)

    def digest(self, domain: str) -> str | None:
        """Return the hash of the images in the manifest; None for the published archive."""
        self._block(domain)
        name, _, severity = domain.partition("@")
        manifest = read_manifest(self._folder)
        return None if manifest is None else manifest.blocks[f"{name}@{severity or SEVERITY}"]["sha256"]

    @cached_property
    def _blocks(self) -> dict[str, tuple[NDArray[Any], Tensor]]:
        return {}

    def _block(self, domain: str) -> tuple[NDArray[Any], Tensor]:
        require_domain(domain, self.domains)
        if domain not in self._blocks:
            name, _, severity = domain.partition("@")
            command = self._command([name], [int(severity)] if severity else [])
            require_block(self._folder, f"{name}@{severity or SEVERITY}", command)
            advice = remedy(self._folder, command)
            try:
                self._blocks[domain] = self._open(name, int(severity or SEVERITY), advice)
            except ValueError as error:
                raise ValueError(f"{error}. {advice}") from error
        return self._blocks[domain]

    @abstractmethod
    def _open(self, name: str, severity: int, hint: str) -> tuple[NDArray[Any], Tensor]:
        """Return images (n, H, W, C) and labels of a domain; ``hint`` is what to do if a file is missing."""

    @property
    def _folder(self) -> Path:
        root, severities = data_root(self.data), getattr(self, "severities", ())
        published = f"Or place the folder {self.folder} of {self.archive} there"
        if self.archive.endswith(".tar"):
            published = download_hint(self.archive, root)
        hint = f"To make it from the clean set, run `{self._command(self.corruptions, severities)}`. {published}"
        return find(root, self.folder, what=self.folder, hint=hint)

    def _command(self, names: Sequence[str], severities: Sequence[int]) -> str:
        corruptions = () if tuple(names) == type(self).corruptions else names
        return corrupt_command(self.clean_name, data_root(self.data), corruptions=corruptions, severities=severities)


@register("mnist-c")
@dataclass(frozen=True)
class MnistC(NpyImages):
    """Corrupted digits, ``<corruption>/test_images.npy``. A domain is "fog"; "identity" is the clean set."""

    corruptions: Sequence[str] = MNIST_C

    folder = "mnist_c"
    archive = "https://zenodo.org/records/3239543/files/mnist_c.zip"
    clean_name = "mnist"

    def _open(self, name: str, severity: int, hint: str) -> tuple[NDArray[Any], Tensor]:
        images, labels = (
            find(self._folder, f"{name}/{file}.npy", what=f"corruption {name!r}", hint=hint)
            for file in ("test_images", "test_labels")
        )
        y = open_labels(labels, self.count)
        return open_images(images, (len(y), 28, 28, 1)), y


@dataclass(frozen=True)
class CifarC(BySeverity, NpyImages):
    """Corrupted photographs, ``<corruption>.npy`` with a block for each severity. A domain is "fog@5"."""

    severities: Sequence[int] = (5,)

    def _open(self, name: str, severity: int, hint: str) -> tuple[NDArray[Any], Tensor]:
        path = find(self._folder, "labels.npy", what="the labels", hint=hint)
        labels = open_labels(path, self.count)
        rows, extra = divmod(len(labels), len(SEVERITIES))
        if extra:
            raise ValueError(f"{path} has {len(labels)} labels; expected {len(SEVERITIES)} blocks of equal length")
        path = find(self._folder, f"{name}.npy", what=f"corruption {name!r}", hint=hint)
        block = slice((severity - 1) * rows, severity * rows)
        return open_images(path, (len(labels), 32, 32, 3))[block], labels[block]


@register("cifar10-c")
@dataclass(frozen=True)
class Cifar10C(CifarC):
    """The CIFAR-10 test images under each corruption, at five severities."""

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
