"""What every corruption shares: a registry of functions, their tables of parameters, and their randomness.

A corruption is a function `f(x, params, draw) -> x`: x (N, C, H, W) float32 in [0, 1], `params` the numbers of one
severity, `draw` the source of its random numbers. It is registered beside its table, and nothing else is edited:

    @corruption("fog", family="common", table=((0.2, 3), ...), large=((1.5, 2), ...))
    def _fog(x, params, draw): ...

What it returns is clipped to [0, 1] for it; x must not be changed in place.

Shapes: N images, C channels, H rows, W columns.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.engine import rng
from tribe.engine.rng import Key
from tribe.registry import nearest

__all__ = ["SEVERITIES", "Draw", "apply", "corruption", "function", "names"]

SEVERITIES = range(1, 6)
LARGE = 100  # pixels: from here on (the shorter side) the parameters of ImageNet-C, below them those of CIFAR-C
CHUNK = {"cpu": 2**20}  # values worked on at once: on a CPU what its caches like,
ELSEWHERE = 2**26  # elsewhere what fits into memory some twenty times over

Params = tuple[Any, ...]
Function = Callable[[Tensor, Params, "Draw"], Tensor]


@dataclass(frozen=True)
class Draw:
    """Random numbers for N images: a row each, a function of its index, the seed, the corruption and the severity.

    Each call gives fresh numbers, independent of those of the calls before.

    >>> draw = Draw(Key(seed=torch.tensor([0, 0]), clock=torch.tensor([3, 8])), "common/fog@1")
    >>> draw.uniform((4, 4)).shape, draw.integers(-1, 1, ()).shape
    (torch.Size([2, 4, 4]), torch.Size([2]))
    """

    key: Key
    name: str  # whose numbers these are
    calls: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def uniform(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw (N, *shape) float32 on [0, 1); one never appears."""
        return rng.uniform(self.key, self._purpose(), shape)

    def normal(self, shape: Sequence[int] = ()) -> Tensor:
        """Draw (N, *shape) float32, standard normal."""
        return rng.normal(self.key, self._purpose(), shape)

    def integers(self, low: int, high: int, shape: Sequence[int] = ()) -> Tensor:
        """Draw (N, *shape) int64, low <= value < high, with high - low at most 2**31."""
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
    """Function decorator: make a corruption known.

    `table` holds its parameters, an entry a severity (a number or a tuple); a single entry serves every severity.
    `large` is the table for images of 100 pixels and more, where that differs.
    """
    tables = [tuple(_params(entry) for entry in t) for t in (table, table if large is None else large)]
    for t in tables:
        if len(t) not in (1, len(SEVERITIES)):
            raise ValueError(
                f"the table of {name!r} needs an entry a severity ({len(SEVERITIES)}) or one, got {len(t)}"
            )

    def add(function: Function) -> Function:
        known = _families.setdefault(family, {}).get(name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(f"corruption {family}/{name} is registered already, by {known.function.__module__}")
        _families[family][name] = _Entry(function, *tables)
        return function

    return add


def names(family: str | None = None) -> list[str]:
    """All known corruptions of a family, in the order of the benchmark; of all families, as family/name, for None."""
    if family is None:
        return [f"{f}/{name}" for f in sorted(_families) for name in _families[f]]
    return list(_family(family))


def function(name: str, family: str) -> Function:
    """What corrupts, under a name."""
    return _family(family)[name].function


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
    """Corrupt images (N, C, H, W), floating-point in [0, 1], on any device; same shape and dtype come back.

    What happens to an image is a function of its number in `index` (N,), the name, the severity and the seed, not of
    the other images of the batch; `index` counts from 0 if not given. `params` replaces the table's entry.

    `family` says whose corruption of that name is meant, "common" (ImageNet-C and CIFAR-C) or "mnist" (MNIST-C); if
    not given, that of MNIST-C for images of one channel and 28 x 28 pixels, else the common one. MNIST-C knows a
    single strength, which any severity stands for.

    >>> x = torch.rand(4, 3, 32, 32)
    >>> apply(x, "fog", 5).shape
    torch.Size([4, 3, 32, 32])
    >>> torch.equal(apply(x, "fog", 5)[2:], apply(x[2:], "fog", 5, index=torch.tensor([2, 3])))
    True
    """
    if images.ndim != 4 or images.shape[1] == 0 or min(images.shape[2:]) < 2:
        raise ValueError(f"images must be (number, channels, height, width), got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise TypeError(f"images must be floating-point in [0, 1], got {images.dtype}; divide uint8 images by 255")
    if family is None:
        family = "mnist" if images.shape[1:] == (1, 28, 28) else "common"
    entry = _find(name, family)
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5, got {severity!r}")
    severity, n = int(severity), len(images)
    if index is None:
        index = torch.arange(n)
    elif index.shape != (n,) or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"index must hold {n} integers, one an image, got {index.dtype} {tuple(index.shape)}")
    if n == 0:
        return images.clone()
    low, high = images.aminmax()
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # so that NaN is refused, too
        raise ValueError(f"images must lie in [0, 1], got values from {low:g} to {high:g}")
    table = entry.large if min(images.shape[2:]) >= LARGE else entry.table
    chosen = table[min(severity, len(table)) - 1] if params is None else _params(params)
    index = index.to(images.device, torch.int64)
    key = Key(torch.full_like(index, seed), index)
    step = max(1, CHUNK.get(images.device.type, ELSEWHERE) // images[0].numel())
    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    for i in range(0, n, step):
        x = images[i : i + step].to(torch.float32).contiguous().clamp(0, 1)
        draw = Draw(Key(key.seed[i : i + step], key.clock[i : i + step]), f"{family}/{name}@{severity}")
        out[i : i + step] = entry.function(x, chosen, draw).clamp(0, 1)
    return out


def _params(entry: Any) -> Params:
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def _family(family: str) -> dict[str, _Entry]:
    if family not in _families:
        raise ValueError(f"unknown family of corruptions {family!r}: {nearest(str(family), _families)}")
    return _families[family]


def _find(name: str, family: str) -> _Entry:
    known = _family(family)
    if name not in known:
        raise ValueError(f"unknown corruption {name!r} of family {family!r}: {nearest(str(name), known)}")
    return known[name]
