"""MNIST, CIFAR-10 and CIFAR-100 as published, in any of their formats; one domain, "clean"."""

import gzip
import hashlib
import math
import pickle
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
from tribe.fields import check_fields
from tribe.io.files import read_regular, regular_size

DOMAIN = "clean"
LARGEST_IDX = 2**27  # bytes of an idx file, unpacked; MNIST's training images have 47 MB
LARGEST_PICKLE = 200_000_000  # bytes; CIFAR-100's training set has 155 MB
MD5 = {  # of the files in the archives of the python versions, as cs.toronto.edu publishes them
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Clean(ABC):
    """A base class: images in their published files; the binary versions of CIFAR are memory-mapped."""

    data: str | None = None  # root folder; None: $TRIBE_DATA or the cache directory
    split: Literal["test", "train"] = "test"

    count: ClassVar[int] = 10
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)

    def __post_init__(self) -> None:
        check_fields(self)

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
    """Small photographs (Krizhevsky, 2009): the binary version, else the python version."""

    title: ClassVar[str]
    binary: ClassVar[str]  # folders of the two versions
    python: ClassVar[str]
    archive: ClassVar[str]
    files: ClassVar[Mapping[str, Sequence[str]]]  # of each split, without suffix
    labels_per_row: ClassVar[int]  # in the binary version; the last one is used
    key: ClassVar[bytes]  # of the labels in the python version

    def _open(self) -> tuple[Bytes, NDArray[Any]]:
        hint = download_hint(f"https://www.cs.toronto.edu/~kriz/{self.archive}", self._root)
        parts = []
        for name in self.files[self.split]:
            names = f"{self.binary}/{name}.bin", f"{self.python}/{name}"
            path = find(self._root, *names, what=f"{self.title}'s {name}", hint=hint)
            parts.append(_rows(path, self.labels_per_row) if path.suffix == ".bin" else _unpickled(path, self.key))
        if len(parts) == 1:
            return parts[0]
        pixels, labels = zip(*parts, strict=True)
        return np.concatenate(pixels), np.concatenate(labels)


@register("cifar10")
@dataclass(frozen=True)
class Cifar10(Cifar):
    """Small photographs of ten classes (Krizhevsky, 2009), binary or python version."""

    title, archive = "CIFAR-10", "cifar-10-binary.tar.gz"
    binary, python = "cifar-10-batches-bin", "cifar-10-batches-py"
    files = MappingProxyType({"test": ("test_batch",), "train": tuple(f"data_batch_{i}" for i in range(1, 6))})
    labels_per_row, key = 1, b"labels"


@register("cifar100")
@dataclass(frozen=True)
class Cifar100(Cifar):
    """Small photographs of a hundred classes (Krizhevsky, 2009), binary or python version; the fine labels."""

    count = 100
    title, archive = "CIFAR-100", "cifar-100-binary.tar.gz"
    binary, python = "cifar-100-binary", "cifar-100-python"
    files = MappingProxyType({"test": ("test",), "train": ("train",)})
    labels_per_row, key = 2, b"fine_labels"


def _rows(path: Path, labels: int) -> tuple[Bytes, Bytes]:
    """Memory-map records of label bytes and 3 x 32 x 32 pixels."""
    width = labels + 3 * 32 * 32
    size = path.stat().st_size  # 0 for a pipe or a device
    if size == 0 or size % width:
        raise ValueError(f"{path} has {size} bytes; expected records of {width} bytes each: it was cut short")
    rows = np.memmap(path, np.uint8, "r").reshape(-1, width)
    return rows[:, labels:], np.array(rows[:, labels - 1])


def _unpickled(path: Path, key: bytes) -> tuple[Bytes, NDArray[Any]]:
    """Read the pixels and labels of a published pickle; opening any other pickle could run code."""
    content = read_regular(path, LARGEST_PICKLE)
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 != MD5[path.name]:
        raise ValueError(
            f"{path} is not the published file, so it is not opened: a pickle can run code. Its md5 is {md5}; expected "
            f"{MD5[path.name]}. Download it again, or use the binary version"
        )
    batch = pickle.loads(content, encoding="bytes")
    return batch[b"data"], np.array(batch[key])


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
