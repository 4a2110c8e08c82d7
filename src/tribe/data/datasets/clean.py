"""MNIST (idx files), CIFAR-10 and CIFAR-100 (binary version) as published; one domain, "clean"."""

import gzip
import math
import shlex
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.data.datasets import register, require_domain
from tribe.data.datasets.files import data_root, download_hint, find, mnist_test, positions
from tribe.io.files import regular_size

DOMAIN = "clean"
LARGEST_IDX = 2**27  # bytes of an idx file, unpacked; MNIST's training images have 47 MB
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Clean(ABC):
    """A base class: images in their published files."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    split: Literal["test", "train"] = "test"

    count: ClassVar[int] = 10
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)

    def __post_init__(self) -> None:
        if self.split not in ("test", "train"):
            raise ValueError(f"split is 'test' or 'train'; got {self.split!r}")

    @property
    def classes(self) -> Sequence[str]:
        """The numbers of the classes: the files have no names."""
        return tuple(str(k) for k in range(self.count))

    @property
    def domains(self) -> Sequence[str]:
        """One domain."""
        return (DOMAIN,)

    def labels(self, domain: str = DOMAIN) -> Tensor:
        """Return the labels, in file order."""
        require_domain(domain, self.domains)
        return self._opened[1]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read some images."""
        require_domain(domain, self.domains)
        pixels, labels = self._opened
        rows = pixels[positions(index, len(labels), domain)]
        return torch.from_numpy(rows).float().div_(255).view(len(rows), *self.shape)

    @property
    def _root(self) -> Path:
        return data_root(self.data)

    @cached_property
    def _opened(self) -> tuple[Bytes, Tensor]:
        pixels, labels = self._open()
        files = f"the files of {type(self).__name__} under {self._root}"
        if not len(labels):
            raise ValueError(f"{files} hold no images")
        if labels.min() < 0 or labels.max() >= self.count:
            raise ValueError(f"{files} hold labels {labels.min()} to {labels.max()}; expected 0 to {self.count - 1}")
        return pixels, torch.from_numpy(labels.astype(np.int64))

    @abstractmethod
    def _open(self) -> tuple[Bytes, NDArray[Any]]:
        """Return pixels (n, ...), memory-mapped if possible, and integer labels (n,)."""


@register("mnist")
@dataclass(frozen=True)
class Mnist(Clean):
    """Handwritten digits (LeCun et al., 1998), idx files, gzipped or not; the test images come with the package."""

    shape = (1, 28, 28)

    def _open(self) -> tuple[Bytes, NDArray[Any]]:
        stem, folder = "t10k" if self.split == "test" else "train", self._root / "mnist"
        if self.split == "test" and not any(folder.glob(f"{stem}-*")):
            return mnist_test()
        names = f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"
        place, url = shlex.quote(str(folder)), "https://storage.googleapis.com/cvdf-datasets/mnist"
        each = f"for f in {' '.join(names)}; do curl -fL {url}/$f.gz | gunzip > {place}/$f; done"
        hint = f"To place it, run: mkdir -p {place} && {each}"
        paths = [find(folder, name, f"{name}.gz", what=f"MNIST's {name}", hint=hint) for name in names]
        pixels, labels = (_idx(path, axes) for path, axes in zip(paths, (3, 1), strict=True))
        if len(pixels) != len(labels) or pixels.shape[1:] != (28, 28):
            raise ValueError(f"{folder} holds {len(labels)} labels for images {pixels.shape}; expected one each, 28x28")
        return pixels, labels


@dataclass(frozen=True)
class Cifar(Clean):
    """Small photographs (Krizhevsky, 2009), memory-mapped."""

    title: ClassVar[str]
    version: ClassVar[str]  # folder of the binary version
    archive: ClassVar[str]
    files: ClassVar[Mapping[str, Sequence[str]]]  # of each split, without suffix
    labels_per_row: ClassVar[int]  # the last one is used

    def _open(self) -> tuple[Bytes, NDArray[Any]]:
        hint = download_hint(f"https://www.cs.toronto.edu/~kriz/{self.archive}", self._root)
        parts = []
        for name in self.files[self.split]:
            path = find(self._root, f"{self.version}/{name}.bin", what=f"{self.title}'s {name}", hint=hint)
            parts.append(_rows(path, self.labels_per_row))
        if len(parts) == 1:
            return parts[0]
        pixels, labels = zip(*parts, strict=True)
        return np.concatenate(pixels), np.concatenate(labels)


@register("cifar10")
@dataclass(frozen=True)
class Cifar10(Cifar):
    """Small photographs of ten classes (Krizhevsky, 2009), binary version."""

    title, version, archive = "CIFAR-10", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
    files = MappingProxyType({"test": ("test_batch",), "train": tuple(f"data_batch_{i}" for i in range(1, 6))})
    labels_per_row = 1


@register("cifar100")
@dataclass(frozen=True)
class Cifar100(Cifar):
    """Small photographs of a hundred classes (Krizhevsky, 2009), binary version; the fine labels."""

    count = 100
    title, version, archive = "CIFAR-100", "cifar-100-binary", "cifar-100-binary.tar.gz"
    files = MappingProxyType({"test": ("test",), "train": ("train",)})
    labels_per_row = 2


def _rows(path: Path, labels: int) -> tuple[Bytes, Bytes]:
    """Memory-map records of label bytes and 3 x 32 x 32 pixels."""
    width = labels + 3 * 32 * 32
    size = path.stat().st_size  # 0 for a pipe or a device
    if size == 0 or size % width:
        raise ValueError(f"{path} has {size} bytes; expected records of {width} bytes each: it was cut short")
    rows = np.memmap(path, np.uint8, "r").reshape(-1, width)
    return rows[:, labels:], np.array(rows[:, labels - 1])


def _idx(path: Path, axes: int) -> Bytes:
    """Read an idx file of bytes, perhaps gzipped: two zeros, the type (8), the number of axes, their sizes, values."""
    try:
        regular_size(path, LARGEST_IDX)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(LARGEST_IDX + 1)  # a small gzip file may unpack to any size
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be unpacked ({reason}): it was cut short, or is not a gzip file") from error
    start = 4 * (1 + axes)
    if len(content) < start or content[:4] != bytes([0, 0, 8, axes]):
        raise ValueError(f"{path} is not an idx file of bytes with {axes} axes")
    shape = tuple(map(int, np.frombuffer(content[4:start], ">u4")))
    if len(content) != start + math.prod(shape):
        raise ValueError(
            f"{path}: its header promises {math.prod(shape)} values; it has fewer or more: it was cut short"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
