"""Passes over activations: per-sample moments, scale and shift, and their joint backward.

Activations are N = R x B samples of C channels and L pixels, with any strides; channels-last is fastest. Every pass
computes the operations next to the normalisation, too: the ``offset`` (C,) that the layer before would have added (the
bias of a convolution), and the ``residual`` and ReLU after it. A program covers a tile of pixels and channels, and
programs with adjacent numbers read adjacent memory. Sums stay in the registers of each thread until the last tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

import math

import torch
from torch import Tensor

from tribe.core.kernels import LINE, Strides, strides_of, tl, triton

SUMMED = 2048  # elements of a tile that is summed: more would not fit into the registers
COPIED = 8192  # bytes of a tile that is read, changed and written
PROGRAMS = 1024  # that a GPU needs to be busy; sums over fewer are split by pixels


def match_layout(g: Tensor, x: Tensor) -> Tensor:
    """Return a gradient with the type and strides of its activations; gradients of means come expanded."""
    return g if g.stride() == x.stride() and g.dtype == x.dtype else torch.empty_like(x).copy_(g)


def _tile(x: Tensor, at: Strides, elements: int) -> tuple[int, int]:
    """Return pixels and channels of one tile, powers of two: whole lines of memory, and few elements beyond the end."""
    if at.channel == 1:
        wide = min(triton.next_power_of_2(at.channels), LINE // x.element_size())
        while wide > 32 and at.channels % wide:
            wide //= 2
        return min(triton.next_power_of_2(at.pixels), max(elements // wide, 1)), wide
    long = min(triton.next_power_of_2(at.pixels), elements)
    return long, min(triton.next_power_of_2(at.channels), max(elements // long, 1))


def _parts(at: Strides, long: int, wide: int) -> tuple[int, int]:
    """Return the number of parts that the pixels of a sample are summed in, and the pixels of a part: whole tiles."""
    tiles = triton.cdiv(at.pixels, long)
    programs = at.samples * triton.cdiv(at.channels, wide)
    each = triton.cdiv(tiles, max(min(triton.cdiv(PROGRAMS, programs), tiles // 4), 1))
    return triton.cdiv(tiles, each), each * long


def _sizes(at: Strides) -> tuple[int, ...]:
    """Return channels, pixels and the three strides, divided; and by what those of channels and of pixels are.

    Triton reads several numbers at once where it knows that all offsets are multiples of a vector. It finds out about
    multiples of 16; a product in the kernel shows it multiples of 8, 4 or 2, such as the widths of MobileNet.
    """
    channels, pixels, sample, channel, pixel = at[1:]
    last = channel == 1
    pixel = channels if last and pixels == 1 else pixel  # any stride will do
    shared = math.gcd(sample, *((channels, pixel) if last else (pixels, channel)))
    unit = 1 if shared % 16 == 0 or 1 not in (channel, pixel) else math.gcd(shared, 8)
    if last:
        return channels // unit, pixels, sample // unit, channel, pixel // unit, unit, 1
    return channels, pixels // unit, sample // unit, channel // unit, pixel, 1, unit


def observe(x: Tensor, offset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each sample and channel over its pixels: (R, B, C, ...) -> (R, B, C) twice."""
    at = _require_strides(x)
    long, wide = _tile(x, at, SUMMED)
    parts, span = _parts(at, long, wide)
    mean, var = (x.new_empty(x.shape[:3], dtype=torch.float32) for _ in range(2))
    sums = (mean, var) if parts == 1 else x.new_empty((2, at.samples, parts, at.channels), dtype=torch.float32)
    _moments[at.samples * parts * triton.cdiv(at.channels, wide),](
        x, _line(offset, x), *sums, *_sizes(at), parts, span, offset is not None, long, wide, num_warps=4
    )
    if parts > 1:
        _join[at.samples, triton.cdiv(at.channels, LINE)](*sums, mean, var, at.channels, at.pixels, parts, span, LINE)
    return mean, var


def apply(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    relu: bool = False,
    offset: Tensor | None = None,
    residual: Tensor | None = None,
    active: Tensor | None = None,
) -> Tensor:
    """Compute (x + offset) * scale + shift + residual for (R, B, C, ...) and (R, 1|B, C), in x's precision.

    ``relu``: where that is positive, 0 elsewhere. Where it is positive is written to ``active``, int8.
    ``residual`` and ``active`` have the strides of x.
    """
    at, y = _require_strides(x), torch.empty_like(x)
    long, wide = _tile(x, at, COPIED // x.element_size())
    tiles = triton.cdiv(at.pixels, long)
    *sizes, width, length = _sizes(at)
    adjacent = scale.stride(2) == 1 and scale.stride() == shift.stride() and scale.stride(0) % width == 0
    if not adjacent or scale.shape[1] > 1:
        scale, shift = scale.contiguous(), shift.contiguous()
    row = scale.stride(1 if scale.shape[1] > 1 else 0)
    _apply[at.samples * tiles * triton.cdiv(at.channels, wide),](
        x, _line(offset, x), scale, shift, _or(residual, x), y, _or(active, x), *sizes, width, length,
        row // width, _sharing(x, scale), tiles, offset is not None, residual is not None, active is not None, relu,
        long, wide, num_warps=4,
    )  # fmt: skip
    return y


def apply_backward(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    relu: bool = False,
    offset: Tensor | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of scale and shift in `apply`, (R, 1|B, C): sums of g x and of g; and of the residual.

    ``g`` has the strides of x, see `match_layout`. Where ReLU was active is computed again, unless ``active`` says it;
    then the gradient of the residual is g where it was active, and otherwise it is g itself.
    """
    at = _require_strides(x)
    long, wide = _tile(x, at, SUMMED)
    parts, span = _parts(at, long, wide)
    sums = x.new_empty((2, *x.shape[:2], parts, x.shape[2]), dtype=torch.float32)
    masked = g if active is None else torch.empty_like(x)
    scale, shift = scale.contiguous(), shift.contiguous()
    _slopes[at.samples * parts * triton.cdiv(at.channels, wide),](
        g, x, _line(offset, x), scale, shift, _or(active, x), masked, sums[0], sums[1], *_sizes(at),
        _sharing(x, scale), parts, span, offset is not None, active is not None, relu and active is None, long, wide,
        num_warps=4,
    )  # fmt: skip
    if scale.shape[1] != x.shape[1]:
        sums = sums.flatten(2, 3).sum(2, keepdim=True)
    else:
        sums = sums.squeeze(3) if parts == 1 else sums.sum(3)
    return sums[0], sums[1], masked


def joint_backward(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    moments: tuple[Tensor, Tensor, Tensor] | None,
    relu: bool = False,
    offset: Tensor | None = None,
) -> Tensor:
    """Compute the joint backward of `observe` and `apply`: g scale + x a + b, a = 2 dvar / L, b = dmean / L - a mean.

    ``moments`` are mean, dmean and dvar (R, B, C); None: no moments were taken, and the gradient is g scale.
    """
    at, dx = _require_strides(x), torch.empty_like(x)
    long, wide = _tile(x, at, COPIED // x.element_size())
    tiles = triton.cdiv(at.pixels, long)
    scale, shift = scale.contiguous(), shift.contiguous()
    mean, dmean, dvar = (scale, scale, scale) if moments is None else (t.contiguous() for t in moments)
    _joint[at.samples * tiles * triton.cdiv(at.channels, wide),](
        g, x, _line(offset, x), scale, shift, mean, dmean, dvar, dx, *_sizes(at), _sharing(x, scale), tiles,
        offset is not None, moments is not None, relu, long, wide, num_warps=4,
    )  # fmt: skip
    return dx


def _require_strides(x: Tensor) -> Strides:
    at = strides_of(x)
    assert at is not None, "check can_normalise first"
    return at


def _or(t: Tensor | None, placeholder: Tensor) -> Tensor:
    """Return a tensor that a kernel does not read, where there is none."""
    return placeholder if t is None else t


def _line(offset: Tensor | None, placeholder: Tensor) -> Tensor:
    """Return an offset (C,) whose numbers are adjacent: it may be a column of a matrix, or one number, expanded."""
    return placeholder if offset is None else offset.contiguous()


def _sharing(x: Tensor, scale: Tensor) -> int:
    """Return how many adjacent samples share a scale."""
    return 1 if scale.shape[1] == x.shape[1] else x.shape[1]


@triton.jit
def _moments(
    x, offset, mean, var, C, L, sample, channel, pixel, WIDTH: tl.constexpr, LENGTH: tl.constexpr, parts, span,
    OFFSET: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    C, L, sample, channel, pixel = C * WIDTH, L * LENGTH, sample * (WIDTH * LENGTH), channel * LENGTH, pixel * WIDTH
    blocks = tl.cdiv(C, WIDE)
    which = tl.program_id(0) // blocks
    n, begin, c = (which // parts).to(tl.int64), (which % parts) * span, (tl.program_id(0) % blocks) * WIDE
    c += tl.arange(0, WIDE)
    end = tl.minimum(begin + span, L)
    x += n * sample
    # Each element of the first tile is the pivot of the pixels that come to stand in its place: their differences from
    # it are summed, and nothing cancels.
    i = begin + tl.arange(0, LONG)
    pivot = tl.load(x + i[:, None] * pixel + c[None, :] * channel, (i < end)[:, None] & (c < C)[None, :], 0)
    pivot = pivot.to(tl.float32)
    plain, square = tl.zeros([LONG, WIDE], tl.float32), tl.zeros([LONG, WIDE], tl.float32)
    for start in range(begin + LONG, end, LONG):
        i = start + tl.arange(0, LONG)
        inside = (i < end)[:, None] & (c < C)[None, :]
        off = tl.load(x + i[:, None] * pixel + c[None, :] * channel, inside, 0).to(tl.float32) - pivot
        off = tl.where(inside, off, 0.0)
        plain += off
        square += off * off
    first = begin + tl.arange(0, LONG)
    count = tl.where(first < end, (end - first + LONG - 1) // LONG, 0).to(tl.float32)[:, None]
    each = tl.maximum(count, 1.0)
    own = pivot + plain / each
    square = square - plain * (plain / each)
    # The places together (Chan et al., 1983), around the mean of the first: again nothing cancels.
    length = (end - begin).to(tl.float32)
    centre = tl.sum(own * count, 0) / length
    centre += tl.sum((own - centre[None, :]) * count, 0) / length
    off = own - centre[None, :]
    total = tl.sum(tl.maximum(square, 0.0) + count * off * off, 0)
    if OFFSET:
        centre += tl.load(offset + c, c < C, 0).to(tl.float32)
    tl.store(mean + which.to(tl.int64) * C + c, centre, c < C)
    tl.store(var + which.to(tl.int64) * C + c, tl.where(parts == 1, total / L, total), c < C)


@triton.jit
def _join(part_mean, part_square, mean, var, C, L, parts, span, LINE: tl.constexpr):
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
    centre, square = tl.zeros([LINE], tl.float32), tl.zeros([LINE], tl.float32)
    for p in range(parts):
        at, seen = (n * parts + p) * C + c, p * span
        count = tl.minimum(span, L - seen).to(tl.float32)
        step, share = tl.load(part_mean + at, c < C, 0) - centre, count / (seen + count)
        square += tl.load(part_square + at, c < C, 0) + step * step * (seen * share)
        centre += step * share
    tl.store(mean + n * C + c, centre, c < C)
    tl.store(var + n * C + c, square / L, c < C)


@triton.jit
def _apply(
    x, offset, scale, shift, residual, y, active, C, L, sample, channel, pixel, WIDTH: tl.constexpr,
    LENGTH: tl.constexpr, row, sharing, tiles,
    OFFSET: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVE: tl.constexpr, RELU: tl.constexpr,
    LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    C, L, sample, channel, pixel = C * WIDTH, L * LENGTH, sample * (WIDTH * LENGTH), channel * LENGTH, pixel * WIDTH
    blocks = tl.cdiv(C, WIDE)
    which = tl.program_id(0) // blocks
    n, c = (which // tiles).to(tl.int64), (tl.program_id(0) % blocks) * WIDE + tl.arange(0, WIDE)
    i = (which % tiles) * LONG + tl.arange(0, LONG)
    inside = (i < L)[:, None] & (c < C)[None, :]
    at = n * sample + i[:, None] * pixel + c[None, :] * channel
    mine = (n // sharing) * (row * WIDTH) + c
    s, b = tl.load(scale + mine, c < C, 0), tl.load(shift + mine, c < C, 0)
    if OFFSET:
        b += s * tl.load(offset + c, c < C, 0).to(tl.float32)
    t = tl.load(x + at, inside, 0).to(tl.float32) * s[None, :] + b[None, :]
    if RESIDUAL:
        t += tl.load(residual + at, inside, 0).to(tl.float32)
    if ACTIVE:
        tl.store(active + at, (t > 0).to(tl.int8), inside)
    if RELU:
        t = tl.where(t < 0, 0.0, t)
    tl.store(y + at, t.to(y.dtype.element_ty), inside)


@triton.jit
def _slopes(
    g, x, offset, scale, shift, active, masked, by_scale, by_shift, C, L, sample, channel, pixel, WIDTH: tl.constexpr,
    LENGTH: tl.constexpr, sharing, parts, span,
    OFFSET: tl.constexpr, ACTIVE: tl.constexpr, RELU: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    C, L, sample, channel, pixel = C * WIDTH, L * LENGTH, sample * (WIDTH * LENGTH), channel * LENGTH, pixel * WIDTH
    blocks = tl.cdiv(C, WIDE)
    which = tl.program_id(0) // blocks
    n, begin, c = (which // parts).to(tl.int64), (which % parts) * span, (tl.program_id(0) % blocks) * WIDE
    c += tl.arange(0, WIDE)
    end = tl.minimum(begin + span, L)
    mine = (n // sharing) * C + c
    o = tl.zeros([WIDE], tl.float32)
    if OFFSET:
        o += tl.load(offset + c, c < C, 0).to(tl.float32)
    if RELU:
        s = tl.load(scale + mine, c < C, 0)
        b = tl.load(shift + mine, c < C, 0) + o * s
    product, plain = tl.zeros([LONG, WIDE], tl.float32), tl.zeros([LONG, WIDE], tl.float32)
    for start in range(begin, end, LONG):
        i = start + tl.arange(0, LONG)
        inside = (i < end)[:, None] & (c < C)[None, :]
        at = n * sample + i[:, None] * pixel + c[None, :] * channel
        slope, t = tl.load(g + at, inside, 0).to(tl.float32), tl.load(x + at, inside, 0).to(tl.float32)
        if RELU:
            slope = tl.where(t * s[None, :] + b[None, :] > 0, slope, 0.0)
        if ACTIVE:
            slope = tl.where(tl.load(active + at, inside, 0) != 0, slope, 0.0)
            tl.store(masked + at, slope.to(masked.dtype.element_ty), inside)
        product += slope * t
        plain += slope
    total = tl.sum(plain, 0)
    tl.store(by_scale + which.to(tl.int64) * C + c, tl.sum(product, 0) + o * total, c < C)
    tl.store(by_shift + which.to(tl.int64) * C + c, total, c < C)


@triton.jit
def _joint(
    g, x, offset, scale, shift, mean, dmean, dvar, dx, C, L, sample, channel, pixel, WIDTH: tl.constexpr,
    LENGTH: tl.constexpr, sharing, tiles,
    OFFSET: tl.constexpr, OBSERVED: tl.constexpr, RELU: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    C, L, sample, channel, pixel = C * WIDTH, L * LENGTH, sample * (WIDTH * LENGTH), channel * LENGTH, pixel * WIDTH
    blocks = tl.cdiv(C, WIDE)
    which = tl.program_id(0) // blocks
    n, c = (which // tiles).to(tl.int64), (tl.program_id(0) % blocks) * WIDE + tl.arange(0, WIDE)
    i = (which % tiles) * LONG + tl.arange(0, LONG)
    inside = (i < L)[:, None] & (c < C)[None, :]
    at = n * sample + i[:, None] * pixel + c[None, :] * channel
    own, mine = n * C + c, (n // sharing) * C + c
    slope, s = tl.load(g + at, inside, 0).to(tl.float32), tl.load(scale + mine, c < C, 0)
    o = tl.zeros([WIDE], tl.float32)
    if OFFSET:
        o += tl.load(offset + c, c < C, 0).to(tl.float32)
    if OBSERVED or RELU:
        t = tl.load(x + at, inside, 0).to(tl.float32)
    if RELU:
        slope = tl.where(t * s[None, :] + (tl.load(shift + mine, c < C, 0) + o * s)[None, :] > 0, slope, 0.0)
    slope *= s[None, :]
    if OBSERVED:
        a = tl.load(dvar + own, c < C, 0) * (2.0 / L)
        b = tl.load(dmean + own, c < C, 0) / L - a * (tl.load(mean + own, c < C, 0) - o)
        slope += t * a[None, :] + b[None, :]
    tl.store(dx + at, slope.to(dx.dtype.element_ty), inside)
