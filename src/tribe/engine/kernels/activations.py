"""Passes over activations: per-sample moments, scale and shift, and their joint backward.

Activations are N = R x B samples of C channels and L pixels, with any strides; channels-last is fastest.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

import torch
from torch import Tensor

from tribe.engine.kernels.launch import LINE, Strides, strides_of, tl, triton


def match_layout(g: Tensor, x: Tensor) -> Tensor:
    """A gradient with the type and strides of its activations; gradients of means come expanded."""
    return g if g.stride() == x.stride() and g.dtype == x.dtype else torch.empty_like(x).copy_(g)


def _tile(x: Tensor, at: Strides, elements: int) -> tuple[int, int]:
    """Pixels and channels of one tile, powers of two: whole lines of memory, and few elements beyond the end."""
    if at.channel == 1:
        wide = min(triton.next_power_of_2(at.channels), LINE // x.element_size())
        while wide > 32 and at.channels % wide:
            wide //= 2
        return min(triton.next_power_of_2(at.pixels), max(elements // wide, 1)), wide
    long = min(triton.next_power_of_2(at.pixels), elements)
    return long, min(triton.next_power_of_2(at.channels), max(elements // long, 1))


def observe(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each sample and channel over its pixels: (R, B, C, ...) -> (R, B, C) twice."""
    at = _require_strides(x)
    mean, var = (x.new_empty(x.shape[:3], dtype=torch.float32) for _ in range(2))
    long, wide = _tile(x, at, 4096)
    _moments[at.samples, triton.cdiv(at.channels, wide)](x, mean, var, *at[1:], long, wide, num_warps=4)
    return mean, var


def apply(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = False) -> Tensor:
    """x * scale + shift for (R, B, C, ...) and (R, 1|B, C), in x's precision; ``relu``: where that is positive."""
    at, y = _require_strides(x), torch.empty_like(x)
    long, wide = _tile(x, at, 2048)
    tiles = triton.cdiv(at.pixels, long)
    if scale.stride() != shift.stride() or scale.stride(2) != 1 or scale.shape[1] > 1:
        scale, shift = scale.contiguous(), shift.contiguous()
    row = scale.stride(1 if scale.shape[1] > 1 else 0)
    _apply[at.samples * tiles, triton.cdiv(at.channels, wide)](
        x, scale, shift, y, *at[1:], row, _sharing(x, scale), tiles, relu, long, wide, num_warps=4
    )
    return y


def apply_backward(g: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool = False) -> tuple[Tensor, Tensor]:
    """Gradients of scale and shift in `apply`, (R, 1|B, C): sums of g x and of g.

    ``g`` has the strides of x, see `match_layout`.
    """
    at = _require_strides(x)
    sums = x.new_empty((2, *x.shape[:3]), dtype=torch.float32)
    long, wide = _tile(x, at, 4096)
    scale, shift = scale.contiguous(), shift.contiguous()
    _slopes[at.samples, triton.cdiv(at.channels, wide)](
        g, x, scale, shift, sums[0], sums[1], *at[1:], _sharing(x, scale), relu, long, wide, num_warps=4
    )
    by_scale, by_shift = sums if scale.shape[1] == x.shape[1] else sums.sum(2, keepdim=True)
    return by_scale, by_shift


def joint_backward(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    moments: tuple[Tensor, Tensor, Tensor] | None,
    relu: bool = False,
) -> Tensor:
    """The joint backward of `observe` and `apply`: g scale + x a + b, a = 2 dvar / L, b = dmean / L - a mean.

    ``moments`` are mean, dmean and dvar (R, B, C); None: no moments were taken, and the gradient is g scale.
    """
    at, dx = _require_strides(x), torch.empty_like(x)
    long, wide = _tile(x, at, 2048)
    tiles = triton.cdiv(at.pixels, long)
    scale, shift = scale.contiguous(), shift.contiguous()
    mean, dmean, dvar = (scale, scale, scale) if moments is None else (t.contiguous() for t in moments)
    _joint[at.samples * tiles, triton.cdiv(at.channels, wide)](
        g, x, scale, shift, mean, dmean, dvar, dx, *at[1:], _sharing(x, scale), tiles,
        moments is not None, relu, long, wide, num_warps=4,
    )  # fmt: skip
    return dx


def _require_strides(x: Tensor) -> Strides:
    at = strides_of(x)
    assert at is not None, "check can_normalise first"
    return at


def _sharing(x: Tensor, scale: Tensor) -> int:
    """How many adjacent samples share a scale."""
    return 1 if scale.shape[1] == x.shape[1] else x.shape[1]


@triton.jit
def _moments(x, mean, var, C, L, sample, channel, pixel, LONG: tl.constexpr, WIDE: tl.constexpr):
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    x += n * sample
    centre, square = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    for start in range(0, L, LONG):
        i = start + tl.arange(0, LONG)
        inside = (i < L)[:, None] & (c < C)[None, :]
        t = tl.load(x + i[:, None] * pixel + c[None, :] * channel, inside, 0).to(tl.float32)
        # A tile's own mean and spread, then the two together (Chan et al., 1983): nothing cancels.
        count = tl.minimum(LONG, L - start).to(tl.float32)
        own = tl.sum(t, 0) / count
        off = tl.where(inside, t - own[None, :], 0.0)
        step, share = own - centre, count / (start + count)
        square += tl.sum(off * off, 0) + step * step * (start * share)
        centre += step * share
    tl.store(mean + n * C + c, centre, c < C)
    tl.store(var + n * C + c, square / L, c < C)


@triton.jit
def _apply(
    x, scale, shift, y, C, L, sample, channel, pixel, row, sharing, tiles,
    RELU: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    n, c = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    i = (tl.program_id(0) % tiles) * LONG + tl.arange(0, LONG)
    inside = (i < L)[:, None] & (c < C)[None, :]
    at = n * sample + i[:, None] * pixel + c[None, :] * channel
    mine = (n // sharing) * row + c
    t = tl.load(x + at, inside, 0).to(tl.float32) * tl.load(scale + mine, c < C, 0)[None, :]
    t += tl.load(shift + mine, c < C, 0)[None, :]
    if RELU:
        t = tl.where(t < 0, 0.0, t)
    tl.store(y + at, t.to(y.dtype.element_ty), inside)


@triton.jit
def _slopes(
    g, x, scale, shift, by_scale, by_shift, C, L, sample, channel, pixel, sharing,
    RELU: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    product, plain = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    s, b = tl.load(scale + (n // sharing) * C + c, c < C, 0), tl.load(shift + (n // sharing) * C + c, c < C, 0)
    for start in range(0, L, LONG):
        i = start + tl.arange(0, LONG)
        inside = (i < L)[:, None] & (c < C)[None, :]
        at = n * sample + i[:, None] * pixel + c[None, :] * channel
        slope, t = tl.load(g + at, inside, 0).to(tl.float32), tl.load(x + at, inside, 0).to(tl.float32)
        if RELU:
            slope = tl.where(t * s[None, :] + b[None, :] > 0, slope, 0.0)
        product += tl.sum(slope * t, 0)
        plain += tl.sum(slope, 0)
    tl.store(by_scale + n * C + c, product, c < C)
    tl.store(by_shift + n * C + c, plain, c < C)


@triton.jit
def _joint(
    g, x, scale, shift, mean, dmean, dvar, dx, C, L, sample, channel, pixel, sharing, tiles,
    OBSERVED: tl.constexpr, RELU: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    n, c = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    i = (tl.program_id(0) % tiles) * LONG + tl.arange(0, LONG)
    inside = (i < L)[:, None] & (c < C)[None, :]
    at = n * sample + i[:, None] * pixel + c[None, :] * channel
    own, mine = n * C + c, (n // sharing) * C + c
    slope, s = tl.load(g + at, inside, 0).to(tl.float32), tl.load(scale + mine, c < C, 0)
    if OBSERVED or RELU:
        t = tl.load(x + at, inside, 0).to(tl.float32)
    if RELU:
        slope = tl.where(t * s[None, :] + tl.load(shift + mine, c < C, 0)[None, :] > 0, slope, 0.0)
    slope *= s[None, :]
    if OBSERVED:
        a = tl.load(dvar + own, c < C, 0) * (2.0 / L)
        b = tl.load(dmean + own, c < C, 0) / L - a * tl.load(mean + own, c < C, 0)
        slope += t * a[None, :] + b[None, :]
    tl.store(dx + at, slope.to(dx.dtype.element_ty), inside)
