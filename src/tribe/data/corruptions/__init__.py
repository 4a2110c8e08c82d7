"""Corruptions of ImageNet-C, CIFAR-C ("common") and MNIST-C ("mnist"), batched, on any device, and replayable.

`apply(images, name, severity)` corrupts a batch. The result for an image depends only on its index, the corruption,
the severity and the seed.

>>> apply(torch.rand(2, 3, 32, 32), "contrast", 3).shape
torch.Size([2, 3, 32, 32])

To add a corruption, put a file beside this one, see CONTRIBUTING: a function of x (N, C, H, W) float32 in [0, 1], the
numbers of one severity, and a `Draw`. `apply` clips its result to [0, 1].

Shapes: N images, C channels, H rows, W columns.
"""

import importlib
import math
import pkgutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core import rng
from tribe.core.rng import Key
from tribe.fields import is_whole, require
from tribe.registry import nearest

SEVERITIES = range(1, 6)
LARGE = 100  # pixels of the shorter side from which the parameters of ImageNet-C apply; below it those of CIFAR-C
LARGEST_GREY = 256  # rows and columns that the corruptions of MNIST-C take: the size of their fog
CHUNK = {"cpu": 2**20}  # values corrupted at once: few enough for the caches of a CPU
CHUNK_ELSEWHERE = 2**26  # on other devices: a corruption needs about twenty times this memory

Params = tuple[Any, ...]
Function = Callable[[Tensor, Params, "Draw"], Tensor]


@dataclass(frozen=True)
class Draw:
    """Random numbers for N images, one row each: a function of index, seed, corruption and severity.

    Each call gives new numbers, independent of the earlier calls.
    """

    key: Key
    name: str  # family, corruption and severity
    calls: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def uniform(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw (N, *shape) float32 in [0, 1), without 1."""
        return rng.uniform(self.key, self._purpose(), shape)

    def normal(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw (N, *shape) float32, standard normal."""
        return rng.normal(self.key, self._purpose(), shape)

    def integers(self, low: int, high: int, shape: Sequence[int] = ()) -> Tensor:
        """Draw (N, *shape) int64 with low <= value < high; high - low is at most 2**31."""
        words = rng.bits(self.key, self._purpose(), math.prod(shape))
        return (words * (high - low) >> 32).add_(low).view(len(words), *shape)

    def _purpose(self) -> int:
        return zlib.crc32(f"tribe.corruptions/{self.name}#{next(self.calls)}".encode())


class _Entry(NamedTuple):
    function: Function
    table: tuple[Params, ...]
    large: tuple[Params, ...]


_families: dict[str, dict[str, _Entry]] = {}


def corruption(
    name: str, *, family: str, table: Sequence[Any] = ((),), large: Sequence[Any] | None = None
) -> Callable[[Function], Function]:
    """Register a corruption (function decorator).

    `table` holds its parameters, one entry per severity (a number or a tuple); a single entry applies to every
    severity. `large` is the table for images of 100 pixels and more, where it differs.
    """
    tables = [tuple(_params(entry) for entry in t) for t in (table, table if large is None else large)]
    for t in tables:
        if len(t) not in (1, len(SEVERITIES)):
            raise ValueError(
                f"the table of {name!r} has {len(t)} entries; expected 1, or one per severity ({len(SEVERITIES)})"
            )

    def add(function: Function) -> Function:
        known = _families.setdefault(family, {}).get(name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(f"corruption {family}/{name} is already registered by {known.function.__module__}")
        _families[family][name] = _Entry(function, *tables)
        return function

    return add


def names(family: str | None = None) -> list[str]:
    """The corruptions of a family, in the order of the benchmark; None: those of all families, as family/name."""
    if family is None:
        return [f"{f}/{name}" for f in sorted(_families) for name in _families[f]]
    if family not in _families:
        raise ValueError(f"unknown family of corruptions {family!r}: {nearest(str(family), _families)}")
    return list(_families[family])


def function(name: str, family: str) -> Function:
    """The function of a corruption."""
    return _find(name, family).function


def family_for(shape: Sequence[int]) -> str:
    """The family of corruptions for images of a shape (C, H, W): "mnist" for 28 x 28 grey images, else "common"."""
    return "mnist" if tuple(shape) == (1, 28, 28) else "common"


def require_severity(severity: Any) -> None:
    """Raise a ValueError unless this is a severity."""
    require(is_whole(severity) and severity in SEVERITIES, "a severity is 1, 2, 3, 4 or 5", severity)


def chunk_size(shape: Sequence[int], device: torch.device) -> int:
    """Return how many images of a shape are corrupted at once."""
    return max(1, CHUNK.get(device.type, CHUNK_ELSEWHERE) // math.prod(shape))


@torch.no_grad()
def apply(
    images: Tensor,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    index: Tensor | None = None,
    params: Any = None,
    family: str | None = None,
) -> Tensor:
    """Corrupt images (N, C, H, W), floating-point in [0, 1], on any device; return the same shape and dtype.

    The result for an image is a function of its number in `index` (N,), the name, the severity and the seed. It does
    not depend on the other images of the batch. `index` counts from 0 by default. `params` replaces the table's entry.

    `family` is "common" (ImageNet-C and CIFAR-C) or "mnist" (MNIST-C), by default that of `family_for`. MNIST-C has a
    single strength, the same for every severity.

    >>> x = torch.rand(4, 3, 32, 32)
    >>> apply(x, "fog", 5).shape
    torch.Size([4, 3, 32, 32])
    >>> torch.equal(apply(x, "fog", 5)[2:], apply(x[2:], "fog", 5, index=torch.tensor([2, 3])))
    True
    """
    if images.ndim != 4 or images.shape[1] == 0 or min(images.shape[2:]) < 2:
        raise ValueError(f"images must be (number, channels, height, width); got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise TypeError(f"images must be floating-point in [0, 1], got {images.dtype}; divide uint8 images by 255")
    if family is None:
        family = family_for(images.shape[1:])
    entry = _find(name, family)
    if family == "mnist" and (images.shape[1] != 1 or max(images.shape[2:]) > LARGEST_GREY):
        raise ValueError(
            f"the corruptions of MNIST-C take images of one channel and at most {LARGEST_GREY} x {LARGEST_GREY} "
            f"pixels, got {tuple(images.shape[1:])}; those of family='common' take any size"
        )
    require_severity(severity)
    severity, n = int(severity), len(images)
    if index is None:
        index = torch.arange(n)
    elif index.shape != (n,) or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"index must hold {n} integers, one per image; got {index.dtype} {tuple(index.shape)}")
    if n == 0:
        return images.clone()
    low, high = images.aminmax()
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # written so that NaN is refused too
        raise ValueError(f"images must lie in [0, 1]; got values from {low:g} to {high:g}")
    table = entry.large if min(images.shape[2:]) >= LARGE else entry.table
    chosen = table[min(severity, len(table)) - 1] if params is None else _params(params)
    index = index.to(images.device, torch.int64)
    key = Key(torch.full_like(index, seed), index)
    step = chunk_size(images.shape[1:], images.device)
    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    for i in range(0, n, step):
        x = images[i : i + step].to(torch.float32).contiguous().clamp(0, 1)
        draw = Draw(Key(key.seed[i : i + step], key.clock[i : i + step]), f"{family}/{name}@{severity}")
        out[i : i + step] = entry.function(x, chosen, draw).clamp(0, 1)
    return out


def _params(entry: Any) -> Params:
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def _find(name: str, family: str) -> _Entry:
    if name not in (known := names(family)):
        raise ValueError(f"unknown corruption {name!r} of family {family!r}: {nearest(str(name), known)}")
    return _families[family][name]


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
