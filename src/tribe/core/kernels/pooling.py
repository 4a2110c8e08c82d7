"""Small operations on moments: pool them over a batch, fold statistics and affine parameters into scale and shift."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

import torch
from torch import Tensor

from tribe.core.kernels.launch import LINE, tl, triton


def fold(mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Turn statistics (R, 1|B, C) and affine parameters (R, C), with any strides, into a scale and a shift."""
    mean, var = mean.contiguous(), var.contiguous()
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    rows, batch, channels = mean.shape
    grid = rows * batch, triton.cdiv(channels, LINE)
    _fold[grid](mean, var, weight, bias, scale, shift, batch, channels, weight.stride(0), bias.stride(0), eps, LINE)
    return scale, shift


def fold_backward(
    dscale: Tensor, dshift: Tensor, mean: Tensor, var: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of mean, var (R, 1|B, C), weight and bias (R, C)."""
    mean, var, dscale, dshift = (t.contiguous() for t in (mean, var, dscale, dshift))
    dmean, dvar = mean.new_empty((2, *mean.shape))
    rows, batch, channels = mean.shape
    dweight, dbias = mean.new_empty((2, rows, channels))
    _fold_backward[rows, triton.cdiv(channels, LINE)](
        dscale, dshift, mean, var, weight, dmean, dvar, dweight, dbias, batch, channels, weight.stride(0), eps, LINE
    )
    return dmean, dvar, dweight, dbias


def pool(mean: Tensor, var: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance (R, 1, C) over the valid (R, B) samples of a row, and their number (R,)."""
    mean, var, valid = mean.contiguous(), var.contiguous(), valid.contiguous()
    rows, batch, channels = mean.shape
    centre, spread = mean.new_empty((2, rows, 1, channels))
    count = mean.new_empty(rows)
    many, wide = min(max(triton.next_power_of_2(batch), 16), 64), 16
    _pool[rows, triton.cdiv(channels, wide)](mean, var, valid, centre, spread, count, batch, channels, many, wide)
    return centre, spread, count


def pool_backward(
    by_centre: Tensor, by_spread: Tensor, mean: Tensor, valid: Tensor, centre: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of the per-sample moments (R, B, C)."""
    rows, batch, channels = mean.shape
    dmean, dvar = mean.new_empty((2, rows, batch, channels))
    _pool_backward[rows * batch, triton.cdiv(channels, LINE)](
        by_centre.contiguous(), by_spread.contiguous(), mean.contiguous(), valid.contiguous(), centre, count,
        dmean, dvar, batch, channels, LINE,
    )  # fmt: skip
    return dmean, dvar


@triton.jit
def _pool(
    mean, var, valid, centre, spread, count, B, C, MANY: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total, number = tl.zeros([WIDE], tl.float32), 0.0
    for start in range(0, B, MANY):
        b = start + tl.arange(0, MANY)
        weight = tl.load(valid + r * B + b, b < B, 0).to(tl.float32)
        at = (r * B + b)[:, None] * C + c[None, :]
        t = tl.load(mean + at, (b < B)[:, None] & (c < C)[None, :], 0)
        total += tl.sum(weight[:, None] * t, 0)
        number += tl.sum(weight, 0)
    many = tl.maximum(number, 1.0)
    own, square = total / many, tl.zeros([WIDE], tl.float32)
    for start in range(0, B, MANY):
        b = start + tl.arange(0, MANY)
        weight = tl.load(valid + r * B + b, b < B, 0).to(tl.float32)
        at, inside = (r * B + b)[:, None] * C + c[None, :], (b < B)[:, None] & (c < C)[None, :]
        off = tl.load(mean + at, inside, 0) - own[None, :]
        square += tl.sum(weight[:, None] * (tl.load(var + at, inside, 0) + off * off), 0)
    tl.store(centre + r * C + c, own, c < C)
    tl.store(spread + r * C + c, square / many, c < C)
    tl.store(count + r, many)


@triton.jit
def _pool_backward(by_centre, by_spread, mean, valid, centre, count, dmean, dvar, B, C, LINE: tl.constexpr):
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
    r, at = n // B, n * C + c
    share = tl.load(valid + n).to(tl.float32) / tl.load(count + r)
    by_var = share * tl.load(by_spread + r * C + c, c < C, 0)
    off = tl.load(mean + at, c < C, 0) - tl.load(centre + r * C + c, c < C, 0)
    tl.store(dmean + at, share * tl.load(by_centre + r * C + c, c < C, 0) + 2 * by_var * off, c < C)
    tl.store(dvar + at, by_var, c < C)


@triton.jit
def _fold(mean, var, weight, bias, scale, shift, B, C, weight_row, bias_row, eps, LINE: tl.constexpr):
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
    r, at = n // B, n * C + c
    s = tl.load(weight + r * weight_row + c, c < C, 0) * tl.rsqrt(tl.load(var + at, c < C, 1) + eps)
    tl.store(scale + at, s, c < C)
    tl.store(shift + at, tl.load(bias + r * bias_row + c, c < C, 0) - tl.load(mean + at, c < C, 0) * s, c < C)


@triton.jit
def _fold_backward(
    dscale, dshift, mean, var, weight, dmean, dvar, dweight, dbias, B, C, weight_row, eps, LINE: tl.constexpr
):
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
    w = tl.load(weight + r * weight_row + c, c < C, 0)
    by_weight, by_bias = tl.zeros([LINE], tl.float32), tl.zeros([LINE], tl.float32)
    for b in range(B):
        at = (r * B + b) * C + c
        g = tl.load(dshift + at, c < C, 0)
        total = tl.load(dscale + at, c < C, 0) - tl.load(mean + at, c < C, 0) * g
        root = tl.rsqrt(tl.load(var + at, c < C, 1) + eps)
        tl.store(dmean + at, -w * root * g, c < C)
        tl.store(dvar + at, -0.5 * w * total * root * root * root, c < C)
        by_weight += total * root
        by_bias += g
    tl.store(dweight + r * C + c, by_weight, c < C)
    tl.store(dbias + r * C + c, by_bias, c < C)
