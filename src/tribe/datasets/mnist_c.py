"""MNIST-C as published: ``<corruption>/test_images.npy`` and ``test_labels.npy``, one severity each.

Mu & Gilmer, MNIST-C: a robustness benchmark for computer vision, 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tribe.datasets import register
from tribe.datasets.files import data_root, find, open_array, open_labels, to_images
from tribe.registry import nearest
from tribe.scenarios.orders import MNIST_C


@register("mnist-c")
@dataclass(frozen=True)
class MnistC:
    """Corrupted digits, memory-mapped; a domain is a corruption, "fog". "identity" is the clean set."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    corruptions: Sequence[str] = MNIST_C

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
        hint = "Place the folder mnist_c of the published archive there"
        return find(data_root(self.data), "mnist_c", "MNIST-C", what="MNIST-C", hint=hint)

    @cached_property
    def _opened(self) -> dict[str, tuple[NDArray[Any], Tensor]]:
        return {}

    def labels(self, domain: str) -> Tensor:
        """The labels of a corruption, in file order."""
        return self._open(domain)[1]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images of a corruption."""
        return to_images(self._open(domain)[0][np.asarray(index)])

    def _open(self, domain: str) -> tuple[NDArray[Any], Tensor]:
        if domain not in self.domains:
            raise ValueError(f"unknown domain {domain!r}: {nearest(domain, self.domains)}")
        if domain not in self._opened:
            hint = "The folder is incomplete: unpack the published archive again"
            paths = [
                find(self._folder, f"{domain}/{name}.npy", what=f"corruption {domain!r}", hint=hint)
                for name in ("test_images", "test_labels")
            ]
            labels = open_labels(paths[1], len(self.classes))
            self._opened[domain] = open_array(paths[0], (len(labels), 28, 28, 1)), labels
        return self._opened[domain]
