"""The random numbers of `tribe.core.rng`, one launch a draw; where no kernel can run, `tribe.core.rng` draws them."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tribe.core import rng
from tribe.core.kernels import LINE, can_launch, comparison, tl, triton
from tribe.core.rng import Key


def uniform(key: Key, purpose: int, shape: Sequence[int]) -> Tensor:
    """Draw the same numbers as `tribe.core.rng.uniform`."""
    return _draw(key, purpose, shape, normal=False) if can_launch(key.seed) else rng.uniform(key, purpose, shape)


def normal(key: Key, purpose: int, shape: Sequence[int]) -> Tensor:
    """Draw the same numbers as `tribe.core.rng.normal`, up to the last digits of logarithm and cosine."""
    return _draw(key, purpose, shape, normal=True) if can_launch(key.seed) else rng.normal(key, purpose, shape)


@comparison
def _numbers(device: torch.device) -> dict[str, Sequence[Tensor]]:
    key = Key(*(torch.tensor(values, device=device) for values in ([425, -3, 2**40 + 7], [0, 2**33 + 5, 1])))
    return {"random numbers": [draw(key, 0xABCDEF01, (5, 419)) for draw in (uniform, normal)]}


def _draw(key: Key, purpose: int, shape: Sequence[int], normal: bool) -> Tensor:
    streams, n = len(key.seed), math.prod(shape)
    out = torch.empty(streams, *shape, dtype=torch.float32, device=key.seed.device)
    lines = triton.cdiv(triton.cdiv(n, 4), LINE)  # along the first axis: a grid's others end at 65,535
    _philox[(streams * lines,)](key.seed.contiguous(), key.clock.contiguous(), out, n, lines, purpose, normal, LINE)
    return out


@triton.jit
def _philox(seed, clock, out, n, lines, PURPOSE: tl.constexpr, NORMAL: tl.constexpr, LINE: tl.constexpr):
    s, block = (tl.program_id(0) // lines).to(tl.int64), (tl.program_id(0) % lines) * LINE + tl.arange(0, LINE)
    tick, zero = tl.load(clock + s), tl.zeros([LINE], tl.uint32)
    purpose = zero + tl.full([LINE], PURPOSE, tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        tl.load(seed + s), block.to(tl.uint32), zero + tick.to(tl.uint32), zero + (tick >> 32).to(tl.uint32), purpose
    )
    if NORMAL:  # Box-Muller, twice a block
        r0 = tl.sqrt(-2.0 * tl.log((w0.to(tl.float32) + 0.5) * 2.3283064365386963e-10))  # 2 ** -32
        r1 = tl.sqrt(-2.0 * tl.log((w2.to(tl.float32) + 0.5) * 2.3283064365386963e-10))
        a0, a1 = w1.to(tl.float32) * 1.4629180792671596e-09, w3.to(tl.float32) * 1.4629180792671596e-09  # 2 pi 2 ** -32
        v0, v1, v2, v3 = r0 * tl.cos(a0), r0 * tl.sin(a0), r1 * tl.cos(a1), r1 * tl.sin(a1)
    else:
        v0, v1 = (w0 >> 8).to(tl.float32) * 5.9604644775390625e-08, (w1 >> 8).to(tl.float32) * 5.9604644775390625e-08
        v2, v3 = (w2 >> 8).to(tl.float32) * 5.9604644775390625e-08, (w3 >> 8).to(tl.float32) * 5.9604644775390625e-08
    at = 4 * block.to(tl.int64)
    out += s * n
    tl.store(out + at, v0, at < n)
    tl.store(out + at + 1, v1, at + 1 < n)
    tl.store(out + at + 2, v2, at + 2 < n)
    tl.store(out + at + 3, v3, at + 3 < n)
