"""MNIST-C as published: ``<corruption>/test_images.npy`` and ``test_labels.npy``, one severity each.

Mu & Gilmer, MNIST-C: a robustness benchmark for computer vision, 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor

from tribe.data.datasets import register
from tribe.data.datasets.files import data_root, find, open_images, open_labels, positions, to_images
from tribe.data.datasets.manifest import block_digest, corrupt_command, remedy, require_block, with_remedy
from tribe.data.scenarios.orders import MNIST_C
from tribe.registry import nearest

ARCHIVE = "https://zenodo.org/records/3239543/files/mnist_c.zip"
SEVERITY = 5  # MNIST-C has a single strength; commands and manifests call it this severity


@register("mnist-c")
@dataclass(frozen=True)
class MnistC:
    """Corrupted digits, memory-mapped. A domain is a corruption, "fog"; "identity" is the clean set."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = MNIST_C

    clean_name: ClassVar[str] = "mnist"  # the clean data set that it is made from
    folder: ClassVar[str] = "mnist_c"

    @property
    def classes(self) -> Sequence[str]:
        """The digits."""
        return tuple("0123456789")

    @property
    def domains(self) -> Sequence[str]:
        """The corruptions."""
        return tuple(self.corruptions)

    @cached_property
    def _folder(self) -> Path:
        hint = (
            f"To make it from the clean set, run `{self._command(self.corruptions)}`. "
            f"Or place the folder {self.folder} of {ARCHIVE} there"
        )
        return find(data_root(self.data), self.folder, "MNIST-C", what="MNIST-C", hint=hint)

    @cached_property
    def _opened(self) -> dict[str, tuple[NDArray[Any], Tensor]]:
        return {}

    def labels(self, domain: str) -> Tensor:
        """Return the labels of a corruption, in file order."""
        return self._open(domain)[1]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images of a corruption."""
        array, labels = self._open(domain)
        return to_images(array[positions(index, len(labels), domain)])

    def digest(self, domain: str) -> str | None:
        """Return the hash of the images in the manifest; None for the published archive."""
        self._open(domain)
        return block_digest(self._folder, f"{domain}@{SEVERITY}")

    def _open(self, domain: str) -> tuple[NDArray[Any], Tensor]:
        if domain not in self.domains:
            raise ValueError(f"unknown domain {domain!r}: {nearest(domain, self.domains)}")
        if domain not in self._opened:
            command = self._command([domain])
            require_block(self._folder, f"{domain}@{SEVERITY}", command)
            hint = remedy(self._folder, command)
            images, labels = (
                find(self._folder, f"{domain}/{name}.npy", what=f"corruption {domain!r}", hint=hint)
                for name in ("test_images", "test_labels")
            )
            with with_remedy(self._folder, command):
                y = open_labels(labels, len(self.classes))
                self._opened[domain] = open_images(images, (len(y), 28, 28, 1)), y
        return self._opened[domain]

    def _command(self, names: Sequence[str]) -> str:
        corruptions = () if tuple(names) == MNIST_C else names
        return corrupt_command(self.clean_name, data_root(self.data), corruptions=corruptions)
