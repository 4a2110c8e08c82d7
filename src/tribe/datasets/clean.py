"""MNIST, CIFAR-10 and CIFAR-100 as published, in their binary formats; one domain, "clean"."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.datasets import register
from tribe.datasets.files import data_root, find

DOMAIN = "clean"


@dataclass(frozen=True)
class Clean(ABC):
    """Images as they were published, memory-mapped."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    split: Literal["test", "train"] = "test"

    count: ClassVar[int] = 10
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    folder: ClassVar[str]

    def __post_init__(self) -> None:
        if self.split not in ("test", "train"):
            raise ValueError(f"split is 'test' or 'train'; got {self.split!r}")

    @property
    def classes(self) -> Sequence[str]:
        """Numbers, as in the files."""
        return tuple(str(k) for k in range(self.count))

    @property
    def domains(self) -> Sequence[str]:
        """One: nothing has happened to the images."""
        return (DOMAIN,)

    def labels(self, domain: str = DOMAIN) -> Tensor:
        """The labels, in file order."""
        self._check(domain)
        return self._opened[1]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images."""
        self._check(domain)
        pixels, _ = self._opened
        return torch.from_numpy(pixels[np.asarray(index)]).float().div_(255).view(-1, *self.shape)

    def _check(self, domain: str) -> None:
        if domain != DOMAIN:
            raise ValueError(f"unknown domain {domain!r}; there is {DOMAIN!r} only")

    def _find(self, name: str) -> Path:
        hint = f"Place the folder {self.folder} of the published archive there"
        return find(data_root(self.data), f"{self.folder}/{name}", what=f"{self.folder}/{name}", hint=hint)

    @cached_property
    def _opened(self) -> tuple[NDArray[np.uint8], Tensor]:
        pixels, labels = self._open()
        if int(labels.max()) >= self.count:
            raise ValueError(f"{self.folder} holds label {int(labels.max())}; expected 0 to {self.count - 1}")
        return pixels, torch.from_numpy(labels.astype(np.int64))

    @abstractmethod
    def _open(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Pixels (n, ...) and labels (n,), not read yet."""


@register("mnist")
@dataclass(frozen=True)
class Mnist(Clean):
    """Handwritten digits (LeCun et al., 1998), idx files."""

    shape = (1, 28, 28)
    folder = "mnist"

    def _open(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        name = "t10k" if self.split == "test" else "train"
        pixels = _idx(self._find(f"{name}-images-idx3-ubyte"), 3)
        labels = _idx(self._find(f"{name}-labels-idx1-ubyte"), 1)
        if len(pixels) != len(labels) or pixels.shape[1:] != (28, 28):
            raise ValueError(
                f"{self.folder} holds {len(labels)} labels for images {pixels.shape}; expected one each, 28x28"
            )
        return pixels, labels


@register("cifar10")
@dataclass(frozen=True)
class Cifar10(Clean):
    """Small photographs of ten kinds (Krizhevsky, 2009), binary version."""

    folder = "cifar-10-batches-bin"

    def _open(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        names = ["test_batch"] if self.split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
        rows = [_rows(self._find(f"{name}.bin"), 1) for name in names]
        whole: Any = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return whole[:, 1:], np.array(whole[:, 0])


@register("cifar100")
@dataclass(frozen=True)
class Cifar100(Clean):
    """Small photographs of a hundred kinds (Krizhevsky, 2009), binary version; the fine labels."""

    count = 100
    folder = "cifar-100-binary"

    def _open(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        rows = _rows(self._find(f"{self.split}.bin"), 2)
        return rows[:, 2:], np.array(rows[:, 1])  # after the coarse label


def _rows(path: Path, labels: int) -> NDArray[np.uint8]:
    """Records of label bytes and 3 x 32 x 32 pixels."""
    width = labels + 3 * 32 * 32
    size = path.stat().st_size
    if size == 0 or size % width:
        raise ValueError(f"{path} has {size} bytes, no whole number of records of {width}: it was cut short")
    return np.memmap(path, np.uint8, "r").reshape(-1, width)


def _idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, the type (8), the number of axes, their sizes, the values."""
    header = np.fromfile(path, ">u4", 1 + axes)
    if len(header) != 1 + axes or header[0] != (8 << 8) + axes:
        raise ValueError(f"{path} is no idx file of bytes with {axes} axes")
    shape = tuple(int(size) for size in header[1:])
    expected, size = 4 * (1 + axes) + int(np.prod(shape)), path.stat().st_size
    if size != expected:
        raise ValueError(f"{path} has {size} bytes; its header promises {expected}: it was cut short")
    return np.memmap(path, np.uint8, "r", offset=4 * (1 + axes), shape=shape)
