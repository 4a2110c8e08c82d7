"""The passes over activations, and Balanced BN's small sums, as one launch each: Triton kernels for CUDA.

Written with tensor operations (`tribe.engine.moments`, `tribe.norms.balanced`) a normalisation layer is about a hundred
launches, forward and backward, and reads its activations many times; here it is nine, and every pass reads once. The
numbers are the same up to rounding: sums are in float32, centred before they are squared, and in a fixed order, so that
a run repeats bit by bit.

They are used for tensors on CUDA; elsewhere, in float64, where Triton is missing, and after ``kernels.use("off")`` or
with TRIBE_KERNELS=off in the environment, the tensor operations are. (Triton's interpreter, TRITON_INTERPRET=1, runs
the kernels on the CPU, for tests.)

Activations are N = R x B samples of C channels and L pixels, wherever these lie in memory; channels-last suits best.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, import-not-found, import-untyped"

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it: nothing below is launched then, but it has to be readable

    class tl:  # type: ignore[no-redef]  # noqa: D101
        constexpr = int

    class triton:  # type: ignore[no-redef]  # noqa: D101
        @staticmethod
        def jit(kernel: Any) -> Any:  # noqa: D102
            return kernel

    INSTALLED = False
else:
    INSTALLED = True

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LINE = 256  # bytes of channels that a program reads at a stretch; also how many of the few numbers one takes
NEEDED = (8, 0)  # compute capability: Ampere, whose TF32 products one kernel uses
SAMPLES = 128  # the most samples a row for which `update` holds the sums over classes on the chip

Mode = Literal["auto", "off"]
_mode: Mode = "off" if os.environ.get("TRIBE_KERNELS") == "off" else "auto"


def use(mode: Mode) -> None:
    """Use the kernels wherever they can be ("auto"), or nowhere ("off"): for the whole process."""
    global _mode
    if mode not in ("auto", "off"):
        raise ValueError(f"kernels are 'auto' or 'off'; got {mode!r}")
    _mode = mode


def mode() -> Mode:
    """What `use` was told last."""
    return _mode


@contextlib.contextmanager
def using(mode: Mode) -> Iterator[None]:
    """`use` for a while."""
    before = _mode
    use(mode)
    try:
        yield
    finally:
        use(before)


def ready(x: Tensor) -> bool:
    """Whether a tensor's work is for the kernels."""
    return x.dtype in DTYPES and x.numel() > 0 and _reachable(x)


def _reachable(x: Tensor) -> bool:
    if _mode == "off" or not INSTALLED:
        return False
    if INTERPRETED:
        return x.device.type == "cpu"
    # Triton launches on the current device.
    return x.is_cuda and x.device.index == torch.cuda.current_device() and works(x.device.index)


@functools.cache
def works(device: int) -> bool:
    """Whether kernels can be built and launched on a GPU: Triton also needs a compiler of C, and the GPU to be recent.

    Where they cannot, that is said once, and the tensor operations serve.
    """
    try:
        if (capability := torch.cuda.get_device_capability(device)) < NEEDED:
            raise RuntimeError(f"a GPU of compute capability {NEEDED} or more is needed, this one has {capability}")
        _try[(1,)](torch.zeros(1, device=f"cuda:{device}"))
    except Exception as error:  # whatever a compiler raises
        warnings.warn(
            f"Triton's kernels cannot be used on cuda:{device} ({type(error).__name__}: {error}): steps take several "
            "times as long. TRIBE_KERNELS=off says nothing of it",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@triton.jit
def _try(x):
    tl.store(x, 1.0)


# -- passes over activations -----------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Where sample n, channel c, pixel l of x (R, B, C, ...) lies: at n * sample + c * channel + l * pixel."""

    samples: int
    channels: int
    pixels: int
    sample: int
    channel: int
    pixel: int


def _layout(x: Tensor) -> _Layout | None:
    """None where rows and samples, or the pixels' axes, are not one run each, or where there are gaps."""
    rows, batch, channels = x.shape[:3]
    if sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) != x.numel() - 1:
        return None
    sample = x.stride(1) if batch > 1 else x.stride(0)
    if rows > 1 and batch > 1 and x.stride(0) != batch * x.stride(1):
        return None
    pixels, step = 1, 1
    for size, stride in zip(reversed(x.shape[3:]), reversed(x.stride()[3:]), strict=True):
        if size == 1:
            continue
        if pixels == 1:
            step = stride
        elif stride != pixels * step:
            return None
        pixels *= size
    return _Layout(rows * batch, channels, pixels, sample, x.stride(2), step)


def laid_out(x: Tensor) -> bool:
    """Whether the kernels are to be used for these activations (R, B, C, ...), and can find their way in them."""
    return ready(x) and _layout(x) is not None


def alike(g: Tensor, x: Tensor) -> Tensor:
    """A gradient in the layout of the activations it belongs to; gradients of means come expanded."""
    return g if g.stride() == x.stride() and g.dtype == x.dtype else torch.empty_like(x).copy_(g)


def _tile(x: Tensor, at: _Layout, elements: int) -> tuple[int, int]:
    """Pixels and channels a program takes at a time, powers of two: whole lines of memory, and few beyond the end."""
    if at.channel == 1:
        wide = min(triton.next_power_of_2(at.channels), LINE // x.element_size())
        while wide > 32 and at.channels % wide:
            wide //= 2
        return min(triton.next_power_of_2(at.pixels), max(elements // wide, 1)), wide
    long = min(triton.next_power_of_2(at.pixels), elements)
    return long, min(triton.next_power_of_2(at.channels), max(elements // long, 1))


def observe(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each sample and channel over its pixels: (R, B, C, ...) -> (R, B, C) twice."""
    at = _known(x)
    mean, var = (x.new_empty(x.shape[:3], dtype=torch.float32) for _ in range(2))
    long, wide = _tile(x, at, 4096)
    _moments[at.samples, triton.cdiv(at.channels, wide)](x, mean, var, *at[1:], long, wide, num_warps=4)
    return mean, var


def apply(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = False) -> Tensor:
    """x * scale + shift for (R, B, C, ...) and (R, 1|B, C), in x's precision; ``relu``: where that is positive."""
    at, y = _known(x), torch.empty_like(x)
    long, wide = _tile(x, at, 2048)
    tiles = triton.cdiv(at.pixels, long)
    if scale.stride() != shift.stride() or scale.stride(2) != 1 or scale.shape[1] > 1:
        scale, shift = scale.contiguous(), shift.contiguous()
    row = scale.stride(1 if scale.shape[1] > 1 else 0)
    _apply[at.samples * tiles, triton.cdiv(at.channels, wide)](
        x, scale, shift, y, *at[1:], row, _sharing(x, scale), tiles, relu, long, wide, num_warps=4
    )
    return y


def slopes(g: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool = False) -> tuple[Tensor, Tensor]:
    """What the gradient of `apply` is to scale and to shift, (R, 1|B, C): sums of g x and of g.

    ``g`` lies in memory as x does; see `alike`.
    """
    at = _known(x)
    sums = x.new_empty((2, *x.shape[:3]), dtype=torch.float32)
    long, wide = _tile(x, at, 4096)
    scale, shift = scale.contiguous(), shift.contiguous()
    _slopes[at.samples, triton.cdiv(at.channels, wide)](
        g, x, scale, shift, sums[0], sums[1], *at[1:], _sharing(x, scale), relu, long, wide, num_warps=4
    )
    by_scale, by_shift = sums if scale.shape[1] == x.shape[1] else sums.sum(2, keepdim=True)
    return by_scale, by_shift


def joint(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    moments: tuple[Tensor, Tensor, Tensor] | None,
    relu: bool = False,
) -> Tensor:
    """The joint backward of `observe` and `apply`: g scale + x a + b, a = 2 dvar / L, b = dmean / L - a mean.

    ``moments`` are mean, dmean and dvar (R, B, C); None: nothing was observed, and the gradient is g scale.
    """
    at, dx = _known(x), torch.empty_like(x)
    long, wide = _tile(x, at, 2048)
    tiles = triton.cdiv(at.pixels, long)
    scale, shift = scale.contiguous(), shift.contiguous()
    mean, dmean, dvar = (scale, scale, scale) if moments is None else (t.contiguous() for t in moments)
    _joint[at.samples * tiles, triton.cdiv(at.channels, wide)](
        g, x, scale, shift, mean, dmean, dvar, dx, *at[1:], _sharing(x, scale), tiles,
        moments is not None, relu, long, wide, num_warps=4,
    )  # fmt: skip
    return dx


def _known(x: Tensor) -> _Layout:
    at = _layout(x)
    assert at is not None, "asked `laid_out` first"
    return at


def _sharing(x: Tensor, scale: Tensor) -> int:
    """How many samples, one after the other, share a scale."""
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


# -- the few numbers around them --------------------------------------------------------------------------------------


def fold(mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Statistics (R, 1|B, C) and affine parameters (R, C), whatever their strides, as a scale and a shift."""
    mean, var = mean.contiguous(), var.contiguous()
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    rows, batch, channels = mean.shape
    grid = rows * batch, triton.cdiv(channels, LINE)
    _fold[grid](mean, var, weight, bias, scale, shift, batch, channels, weight.stride(0), bias.stride(0), eps, LINE)
    return scale, shift


def fold_backward(
    dscale: Tensor, dshift: Tensor, mean: Tensor, var: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of mean, var (R, 1|B, C), weight and bias (R, C)."""
    mean, var, dscale, dshift = (t.contiguous() for t in (mean, var, dscale, dshift))
    dmean, dvar = mean.new_empty((2, *mean.shape))
    rows, batch, channels = mean.shape
    dweight, dbias = mean.new_empty((2, rows, channels))
    _fold_backward[rows, triton.cdiv(channels, LINE)](
        dscale, dshift, mean, var, weight, dmean, dvar, dweight, dbias, batch, channels, weight.stride(0), eps, LINE
    )
    return dmean, dvar, dweight, dbias


def pools(mean: Tensor) -> bool:
    """Whether the kernels are to pool moments (R, B, C)."""
    return ready(mean) and mean.dtype == torch.float32


def pool(mean: Tensor, var: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance (R, 1, C) over the valid (R, B) samples of a row, and how many these are (R,)."""
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
    """Gradients of the per-sample moments (R, B, C)."""
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


# -- Balanced BN -------------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """What the backward of `update` needs of its forward."""

    d: Tensor  # (R, B, C), each sample's mean from its class's
    delta: Tensor  # (R, B, C), the move of its class
    off_centre: Tensor  # (R, B, C), its class from the centre of all
    move: Tensor  # (R, 1, C), of the centre
    pooled_var: Tensor  # (R, 1, C), as it was before its clamp


def updates(mean: Tensor) -> bool:
    """Whether the kernels are to update class statistics from moments (R, B, C)."""
    return ready(mean) and mean.dtype == torch.float32 and mean.shape[1] <= SAMPLES


def update(
    mean: Tensor,
    var: Tensor,
    past: tuple[Tensor, Tensor],
    groups: Any,
    classes: int,
    gamma: float,
    freedom: int,
    among_present: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Sums]:
    """Eqs. 1 to 4 of Balanced BN, see `tribe.norms.balanced`: pooled mean and var (clamped at 0), statistics kept.

    ``past`` is (R, K, C) twice, a slice of a wider one perhaps; ``groups`` are the rule's `Groups`.
    """
    rows, batch, channels = mean.shape
    if past[0].stride() != past[1].stride() or past[0].stride(2) != 1:
        past = past[0].contiguous(), past[1].contiguous()
    mean, var = mean.contiguous(), var.contiguous()
    pooled_mean, pooled_var, move, raw = (mean.new_empty((rows, 1, channels)) for _ in range(4))
    kept_mean, kept_var = (mean.new_empty((rows, classes, channels)) for _ in range(2))
    d, delta, off_centre = (torch.empty_like(mean) for _ in range(3))
    sums = Sums(d, delta, off_centre, move, raw)
    wide, many = 16, min(max(triton.next_power_of_2(classes), 16), 256)
    _update[rows, triton.cdiv(channels, wide)](
        mean, var, *past, groups.code, groups.lead, groups.rate, groups.weight, groups.over, groups.shrink,
        groups.present,
        pooled_mean, pooled_var, kept_mean, kept_var, *sums,
        batch, classes, channels, past[0].stride(0), past[0].stride(1), float(gamma), freedom,
        among_present, max(triton.next_power_of_2(batch), 16), many, wide, num_warps=4 if batch <= 64 else 8,
    )  # fmt: skip
    return pooled_mean, pooled_var, kept_mean, kept_var, sums


def update_backward(
    g_mean: Tensor,
    g_var: Tensor,
    sums: Sums,
    groups: Any,
    classes: int,
    gamma: float,
    freedom: int,
    among_present: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the per-sample moments (R, B, C)."""
    rows, batch, channels = sums.d.shape
    dmean, dvar = sums.d.new_empty((2, rows, batch, channels))
    _update_backward[rows * batch, triton.cdiv(channels, LINE)](
        g_mean.contiguous(), g_var.contiguous(), *sums, groups.shrink, groups.rate, groups.over, dmean, dvar,
        batch, channels, float(gamma), (1 - gamma) / classes, freedom, among_present, LINE,
    )  # fmt: skip
    return dmean, dvar


@triton.jit
def _update(
    mean, var, past_mean, past_var, code, lead, rate, weight, over, shrinking, present,
    pooled_mean, pooled_var, kept_mean, kept_var, d_out, delta_out, off_centre_out, move_out, raw_out,
    B, K, C, past_row, past_class, gamma, freedom,
    AMONG_PRESENT: tl.constexpr, BATCH: tl.constexpr, MANY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    in_c = (c < C)[None, :]
    past_mean += r * past_row
    past_var += r * past_row

    # Eq. 2 of the past, tile by tile of classes as in `_moments`; the mean of a tile is corrected by what it leaves, as
    # its rounding would move every pixel of the layer.
    centre, within, between = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    for start in range(0, K, MANY):
        k = start + tl.arange(0, MANY)
        inside = (k < K)[:, None] & in_c
        t = tl.load(past_mean + k[:, None] * past_class + c[None, :], inside, 0)
        count = tl.minimum(MANY, K - start).to(tl.float32)
        own = tl.sum(t, 0) / count
        own += tl.sum(tl.where(inside, t - own[None, :], 0.0), 0) / count
        off = tl.where(inside, t - own[None, :], 0.0)
        step, share = own - centre, count / (start + count)
        between += tl.sum(off * off, 0) + step * step * (start * share)
        centre += step * share
        within += tl.sum(tl.load(past_var + k[:, None] * past_class + c[None, :], inside, 0), 0)
    within /= K

    # Eq. 1: sums over a class, told to every sample of it.
    b = tl.arange(0, BATCH)
    in_b, n = b < B, r * B + b
    inside = in_b[:, None] & in_c
    who = tl.load(code + n, in_b, -1)  # the class, -1 for samples that do not count
    first, speed = tl.load(lead + n, in_b, 0)[:, None], tl.load(rate + n, in_b, 0)[:, None]
    mass = tl.load(weight + n, in_b, 0)[:, None]
    mine = tl.maximum(who, 0)[:, None] * past_class + c[None, :]
    mu, sigma2 = tl.load(past_mean + mine, inside, 0), tl.load(past_var + mine, inside, 0)
    at = n[:, None] * C + c[None, :]
    d = tl.load(mean + at, inside, 0) - mu
    same = ((who[:, None] == who[None, :]) & (who >= 0)[:, None]).to(tl.float32)
    # In three TF32 products, which is float32 up to its last bit: `same` has no digits to lose.
    delta = speed * tl.dot(same, d, input_precision="tf32x3")
    fresh = speed * tl.dot(same, tl.load(var + at, inside, 0) + d * d, input_precision="tf32x3") - delta * delta
    step, growth = (1 - gamma) * delta, (1 - gamma) * (fresh - mass * sigma2)

    # Eq. 2 from the past's and this batch's increments; Eqs. 3 and 4, a share gamma to all classes alike.
    move = tl.sum(first * step, 0) / K
    off_centre = mu - centre[None, :]
    spread = tl.sum(first * step * (2 * off_centre + step), 0) - K * move * move
    sharing, shrink = tl.load(over + r), tl.load(shrinking + r)
    shared_step, shared_square = gamma * tl.sum(first * delta, 0) / sharing, gamma * tl.sum(first * fresh, 0) / sharing
    if AMONG_PRESENT:
        growth *= 1 - shrink
    pooled = shared_square + within * (1 - shrink) + tl.sum(first * growth, 0) / K + (between + spread) / freedom
    tl.store(pooled_mean + r * C + c, centre + move + shared_step, c < C)
    tl.store(pooled_var + r * C + c, tl.maximum(pooled, 0.0), c < C)
    tl.store(raw_out + r * C + c, pooled, c < C)
    tl.store(move_out + r * C + c, move, c < C)
    tl.store(d_out + at, d, inside)
    tl.store(delta_out + at, delta, inside)
    tl.store(off_centre_out + at, off_centre, inside)

    # What is kept: the first sample of a class writes its row, the other rows are written as they pass by.
    kept_mean += r * K * C
    kept_var += r * K * C
    theirs = tl.maximum(who, 0).to(tl.int64)[:, None] * C + c[None, :]
    speaks = inside & (first > 0)
    tl.store(kept_mean + theirs, mu + shared_step[None, :] + step, speaks)
    tl.store(kept_var + theirs, sigma2 * (1 - shrink) + shared_square[None, :] + growth, speaks)
    for start in range(0, K, MANY):
        k = start + tl.arange(0, MANY)
        absent = (k < K) & (tl.load(present + r * K + k, k < K, 1) == 0)
        others = absent[:, None] & in_c
        source, row = k[:, None] * past_class + c[None, :], k.to(tl.int64)[:, None] * C + c[None, :]
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


# -- random numbers and colours ----------------------------------------------------------------------------------------

PIXELS = 4096  # of an image that `jitter` can hold on the chip


def draws(seed: Tensor) -> bool:
    """Whether random numbers for these seeds (S,) come from here."""
    return _reachable(seed)


def uniform(key: Any, purpose: int, shape: Sequence[int]) -> Tensor:
    """`tribe.engine.rng.uniform` in one launch: the same numbers."""
    return _draw(key, purpose, shape, normal=False)


def normal(key: Any, purpose: int, shape: Sequence[int]) -> Tensor:
    """`tribe.engine.rng.normal` in one launch: the same numbers, up to the last digits of logarithm and cosine."""
    return _draw(key, purpose, shape, normal=True)


def _draw(key: Any, purpose: int, shape: Sequence[int], normal: bool) -> Tensor:
    streams, n = len(key.seed), math.prod(shape)
    out = torch.empty(streams, *shape, device=key.seed.device)
    blocks = triton.cdiv(n, 4)
    _philox[streams, triton.cdiv(blocks, LINE)](
        key.seed.contiguous(), key.clock.contiguous(), out, n, purpose, normal, LINE
    )
    return out


def jitters(x: Tensor) -> bool:
    """Whether `jitter` is for these images (G, M, C, H, W)."""
    return ready(x) and x.dtype == torch.float32 and x.shape[2] in (1, 3) and x[0, 0, 0].numel() <= PIXELS


def jitter(x: Tensor, order: Tensor, strength: Tensor) -> Tensor:
    """The five colour operations of `tribe.engine.augment`; each set of images (G, M, C, H, W) has its order (G, 5)."""
    (sets, shared, channels), pixels = x.shape[:3], x[0, 0, 0].numel()
    x, y = x.contiguous(), torch.empty(x.shape, device=x.device)
    tile = triton.next_power_of_2(pixels)
    _jitter[(sets * shared,)](
        x, order.contiguous(), strength.contiguous(), y, shared, pixels, channels == 3, tile,
        num_warps=4 if tile <= 1024 else 8,
    )  # fmt: skip
    return y


@triton.jit
def _philox(seed, clock, out, n, PURPOSE: tl.constexpr, NORMAL: tl.constexpr, LINE: tl.constexpr):
    s, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * LINE + tl.arange(0, LINE)
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
    at = 4 * block
    out += s * n
    tl.store(out + at, v0, at < n)
    tl.store(out + at + 1, v1, at + 1 < n)
    tl.store(out + at + 2, v2, at + 2 < n)
    tl.store(out + at + 3, v3, at + 3 < n)


@triton.jit
def _unit(t):
    return tl.minimum(tl.maximum(t, 0.0), 1.0)


@triton.jit
def _power(t, f):
    return tl.exp(tl.log(tl.minimum(tl.maximum(t, 1e-8), 1.0)) * f)


@triton.jit
def _hue(low, depth, h):
    """What a channel becomes whose own hue is a distance h from the colour's."""
    d = tl.abs(h - tl.floor(h + 0.5))
    return low + 2 * depth - 6 * depth * tl.minimum(tl.maximum(d, 0.16666667), 0.33333334)


@triton.jit
def _jitter(x, order, strength, y, shared, pixels, COLOUR: tl.constexpr, TILE: tl.constexpr):
    n, i = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    g, inside = n // shared, i < pixels
    if COLOUR:
        at = n * 3 * pixels + i
        red, green = tl.load(x + at, inside, 0), tl.load(x + at + pixels, inside, 0)
        blue = tl.load(x + at + 2 * pixels, inside, 0)
    else:
        at = n * pixels + i
        red = tl.load(x + at, inside, 0)
        green, blue = red, red
    for place in range(5):
        due = tl.load(order + g * 5 + place)
        f = tl.load(strength + g * 5 + due)
        grey = red * 0.2989 + green * 0.587 + blue * 0.114 if COLOUR else red
        if due == 0:  # brightness
            red, green, blue = _unit(red * f), _unit(green * f), _unit(blue * f)
        elif due == 1:  # contrast
            target = tl.sum(tl.where(inside, grey, 0.0)) / pixels * (1 - f)
            red, green, blue = _unit(red * f + target), _unit(green * f + target), _unit(blue * f + target)
        elif due == 4:  # gamma
            red, green, blue = _power(red, f), _power(green, f), _power(blue, f)
        elif COLOUR:
            if due == 2:  # saturation
                target = grey * (1 - f)
                red, green, blue = _unit(red * f + target), _unit(green * f + target), _unit(blue * f + target)
            else:  # hue
                top, low = tl.maximum(tl.maximum(red, green), blue), tl.minimum(tl.minimum(red, green), blue)
                depth = top - low
                h = tl.where(green == top, blue - red + 2 * depth, red - green + 4 * depth)
                h = tl.where(red == top, green - blue, h) / tl.maximum(6 * depth, 1.1754944e-38) + f
                red, green = _hue(low, depth, h), _hue(low, depth, h - 0.33333334)
                blue = _hue(low, depth, h - 0.6666667)
    tl.store(y + at, red, inside)
    if COLOUR:
        tl.store(y + at + pixels, green, inside)
        tl.store(y + at + 2 * pixels, blue, inside)
