"""Operations on moments: pool them, fold them into scale and shift, and update Balanced BN's class statistics.

The update is Eqs. 1 to 4 of the paper, see `tribe.norms.balanced`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.kernels import LINE, tl, triton

PROGRAMS = 512  # of an update, at least where there are many classes


def fold(mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Turn statistics (R, 1|B, C) and affine parameters (R, C), with any strides, into a scale and a shift."""
    mean, var, weight, bias = mean.contiguous(), var.contiguous(), _by_row(weight), _by_row(bias)
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
    weight = _by_row(weight)
    dmean, dvar = mean.new_empty((2, *mean.shape))
    rows, batch, channels = mean.shape
    dweight, dbias = mean.new_empty((2, rows, channels))
    _fold_backward[rows, triton.cdiv(channels, LINE)](
        dscale, dshift, mean, var, weight, dmean, dvar, dweight, dbias, batch, channels, weight.stride(0), eps, LINE
    )
    return dmean, dvar, dweight, dbias


def _by_row(t: Tensor) -> Tensor:
    """Return a tensor (R, C) whose columns are adjacent; its rows may be apart."""
    return t if t.stride(1) == 1 else t.contiguous()


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


# -- class statistics --------------------------------------------------------------------------------------------------


def product_precision() -> str:
    """Return how to multiply with marks of 0 and 1: in three TF32 products, which lose no digit of float32.

    For AMD's GPUs Triton has no such products; there they are float32's own.
    """
    return "tf32x3" if torch.version.hip is None else "ieee"


class UpdateTerms(NamedTuple):
    """Intermediate values of `update` that its backward needs."""

    d: Tensor  # (R, B, C), each sample's mean minus the mean of its class
    delta: Tensor  # (R, B, C), how far the mean of its class moves
    off_centre: Tensor  # (R, B, C), the mean of its class minus the mean over classes
    move: Tensor  # (R, 1, C), how far the mean over classes moves
    pooled_var: Tensor  # (R, 1, C), before it is clamped at 0


def update(
    mean: Tensor,
    var: Tensor,
    past: tuple[Tensor, Tensor],
    over_classes: Tensor,
    groups: Any,
    classes: int,
    gamma: float,
    freedom: int,
    among_present: bool,
    room: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, UpdateTerms]:
    """Return the pooled mean and var (clamped at 0), the class statistics to keep, and the terms for the backward.

    ``past`` holds two (R, K, C) tensors, which may be slices of wider ones, and so does ``room``, the memory for the
    statistics to keep. ``over_classes`` (3, R, C) are the mean of the past means, the mean of the past variances, and
    the summed squared deviation of the past means. ``groups`` are the rule's `Groups`.
    """
    rows, batch, channels = mean.shape
    if past[0].stride() != past[1].stride() or past[0].stride(2) != 1:
        past = past[0].contiguous(), past[1].contiguous()
    if room is None or room[0].stride() != room[1].stride() or room[0].stride(2) != 1:
        room = mean.new_empty((rows, classes, channels)), mean.new_empty((rows, classes, channels))
    over_classes = over_classes if over_classes.stride(2) == 1 else over_classes.contiguous()
    mean, var = mean.contiguous(), var.contiguous()
    pooled_mean, pooled_var, move, raw = (mean.new_empty((rows, 1, channels)) for _ in range(4))
    d, delta, off_centre = (torch.empty_like(mean) for _ in range(3))
    terms = UpdateTerms(d, delta, off_centre, move, raw)
    wide, many = 16, min(max(triton.next_power_of_2(classes), 16), 64)
    blocks, tiles = triton.cdiv(channels, wide), triton.cdiv(classes, many)
    # Every program computes the update of its channels; each copies a part of the other classes.
    each = triton.cdiv(tiles, min(triton.cdiv(PROGRAMS, rows * blocks), tiles)) * many
    _update[rows, blocks, triton.cdiv(classes, each)](
        mean, var, *past, over_classes, groups.code, groups.lead, groups.rate, groups.weight, groups.over,
        groups.shrink, groups.present, pooled_mean, pooled_var, *room, *terms,
        batch, classes, channels, each, past[0].stride(0), past[0].stride(1), over_classes.stride(0),
        over_classes.stride(1), room[0].stride(0), room[0].stride(1), float(gamma), freedom,
        among_present, product_precision(), max(triton.next_power_of_2(batch), 16), many, wide,
        num_warps=4 if batch <= 64 else 8,
    )  # fmt: skip
    return pooled_mean, pooled_var, *room, terms


def update_backward(
    g_mean: Tensor,
    g_var: Tensor,
    terms: UpdateTerms,
    groups: Any,
    classes: int,
    gamma: float,
    freedom: int,
    among_present: bool,
) -> tuple[Tensor, Tensor]:
    """Return gradients of the per-sample moments (R, B, C)."""
    rows, batch, channels = terms.d.shape
    dmean, dvar = terms.d.new_empty((2, rows, batch, channels))
    _update_backward[rows * batch, triton.cdiv(channels, LINE)](
        g_mean.contiguous(), g_var.contiguous(), *terms, groups.shrink, groups.rate, groups.over, dmean, dvar,
        batch, channels, float(gamma), (1 - gamma) / classes, freedom, among_present, LINE,
    )  # fmt: skip
    return dmean, dvar


@triton.jit
def _update(
    mean, var, past_mean, past_var, over_classes, code, lead, rate, weight, over, shrinking, present,
    pooled_mean, pooled_var, kept_mean, kept_var, d_out, delta_out, off_centre_out, move_out, raw_out,
    B, K, C, each, past_row, past_class, plane, plane_row, kept_row, kept_class, gamma, freedom,
    AMONG_PRESENT: tl.constexpr, PRODUCT: tl.constexpr, BATCH: tl.constexpr, MANY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    in_c = (c < C)[None, :]
    past_mean += r * past_row
    past_var += r * past_row
    kept_mean += r * kept_row
    kept_var += r * kept_row
    over_classes += r * plane_row + c  # Eq. 2 of the past
    centre, within = tl.load(over_classes, c < C, 0), tl.load(over_classes + plane, c < C, 0)
    between = tl.load(over_classes + 2 * plane, c < C, 0)

    # Eq. 1: sums over a class, given to every sample of it.
    b = tl.arange(0, BATCH)
    in_b, n = b < B, r * B + b
    inside = in_b[:, None] & in_c
    who = tl.load(code + n, in_b, -1).to(tl.int64)  # the class, -1 for samples that do not count
    first, speed = tl.load(lead + n, in_b, 0)[:, None], tl.load(rate + n, in_b, 0)[:, None]
    mass = tl.load(weight + n, in_b, 0)[:, None]
    mine = tl.maximum(who, 0)[:, None] * past_class + c[None, :]
    mu, sigma2 = tl.load(past_mean + mine, inside, 0), tl.load(past_var + mine, inside, 0)
    at = n[:, None] * C + c[None, :]
    d = tl.load(mean + at, inside, 0) - mu
    same = ((who[:, None] == who[None, :]) & (who >= 0)[:, None]).to(tl.float32)
    delta = speed * tl.dot(same, d, input_precision=PRODUCT)
    fresh = speed * tl.dot(same, tl.load(var + at, inside, 0) + d * d, input_precision=PRODUCT) - delta * delta
    step, growth = (1 - gamma) * delta, (1 - gamma) * (fresh - mass * sigma2)

    # Eq. 2 from the past's and this batch's increments; Eqs. 3 and 4, a share gamma to all classes alike.
    move = tl.sum(first * step, 0) / K
    off_centre = mu - centre[None, :]
    spread = tl.sum(first * step * (2 * off_centre + step), 0) - K * move * move
    sharing, shrink = tl.load(over + r), tl.load(shrinking + r)
    shared_step, shared_square = gamma * tl.sum(first * delta, 0) / sharing, gamma * tl.sum(first * fresh, 0) / sharing
    if AMONG_PRESENT:
        growth *= 1 - shrink
    if tl.program_id(2) == 0:
        pooled = shared_square + within * (1 - shrink) + tl.sum(first * growth, 0) / K + (between + spread) / freedom
        tl.store(pooled_mean + r * C + c, centre + move + shared_step, c < C)
        tl.store(pooled_var + r * C + c, tl.maximum(pooled, 0.0), c < C)
        tl.store(raw_out + r * C + c, pooled, c < C)
        tl.store(move_out + r * C + c, move, c < C)
        tl.store(d_out + at, d, inside)
        tl.store(delta_out + at, delta, inside)
        tl.store(off_centre_out + at, off_centre, inside)
        # What is kept: the first sample of a class writes its row.
        theirs = tl.maximum(who, 0)[:, None] * kept_class + c[None, :]
        speaks = inside & (first > 0)
        tl.store(kept_mean + theirs, mu + shared_step[None, :] + step, speaks)
        tl.store(kept_var + theirs, sigma2 * (1 - shrink) + shared_square[None, :] + growth, speaks)

    begin = tl.program_id(2) * each
    for start in range(begin, tl.minimum(begin + each, K), MANY):
        k = (start + tl.arange(0, MANY)).to(tl.int64)  # K times the channels of a network can pass 2 ** 31
        absent = (k < K) & (tl.load(present + r * K + k, k < K, 1) == 0)
        others = absent[:, None] & in_c
        source, row = k[:, None] * past_class + c[None, :], k[:, None] * kept_class + c[None, :]
        tl.store(kept_mean + row, tl.load(past_mean + source, others, 0) + shared_step[None, :], others)
        v = tl.load(past_var + source, others, 0) * (1 - shrink) + shared_square[None, :]
        tl.store(kept_var + row, v, others)


@triton.jit
def _update_backward(
    g_mean, g_var, d, delta, off_centre, move, raw, shrink, rate, over, dmean, dvar, B, C, gamma, own, freedom,
    AMONG_PRESENT: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
    r, at = n // B, n * C + c
    shared = gamma / tl.load(over + r)
    by_mean, by_var = tl.load(g_mean + r * C + c, c < C, 0), tl.load(g_var + r * C + c, c < C, 0)
    by_var = tl.where(tl.load(raw + r * C + c, c < C, 0) >= 0, by_var, 0.0)
    if AMONG_PRESENT:
        by_fresh = by_var * (own * (1 - tl.load(shrink + r)) + shared)
    else:
        by_fresh = by_var * (own + shared)
    moved = tl.load(delta + at, c < C, 0)
    off = tl.load(off_centre + at, c < C, 0) + (1 - gamma) * moved - tl.load(move + r * C + c, c < C, 0)
    by_delta = by_mean * (own + shared) + by_var * (2 * (1 - gamma) / freedom) * off
    speed = tl.load(rate + n)
    tl.store(dmean + at, speed * (by_delta + 2 * by_fresh * (tl.load(d + at, c < C, 0) - moved)), c < C)
    tl.store(dvar + at, speed * by_fresh, c < C)
