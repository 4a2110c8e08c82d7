"""The colour jitter of `tribe.core.augment`: one launch for all five operations, two for large images.

Contrast needs the mean of a whole image. A program holds a small image on the chip. A large one is cut into tiles: the
first launch sums the grey of each tile as it is before contrast, the second applies all operations.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

import torch
from torch import Tensor

from tribe.core.kernels import PIXELS, tl, triton

TILE = 1024  # pixels of a large image that one program takes


def jitter(x: Tensor, order: Tensor, strength: Tensor) -> Tensor:
    """Apply the five operations to images (G, M, C, H, W), each of the G sets in its own order (G, 5)."""
    (sets, shared, channels), pixels = x.shape[:3], x[0, 0, 0].numel()
    x = x.contiguous()
    y = torch.empty_like(x)
    tile = triton.next_power_of_2(pixels) if pixels <= PIXELS else TILE
    tiles = triton.cdiv(pixels, tile)
    sums = x.new_empty((sets * shared, tiles))
    for part in ("all",) if tiles == 1 else ("sum", "apply"):
        _jitter[(sets * shared * tiles,)](
            x, order.contiguous(), strength.contiguous(), sums, y, shared, pixels, tiles, channels == 3, part, tile,
            num_warps=4 if tile <= 1024 else 8,
        )  # fmt: skip
    return y


@triton.jit
def _unit(t):
    return tl.minimum(tl.maximum(t, 0.0), 1.0)


@triton.jit
def _power(t, f):
    return tl.exp(tl.log(tl.minimum(tl.maximum(t, 1e-8), 1.0)) * f)


@triton.jit
def _hue(low, depth, h):
    """Return the value of a channel whose own hue is a distance h from the colour's."""
    d = tl.abs(h - tl.floor(h + 0.5))
    return low + 2 * depth - 6 * depth * tl.minimum(tl.maximum(d, 0.16666667), 0.33333334)


@triton.jit
def _jitter(
    x, order, strength, sums, y, shared, pixels, tiles,
    COLOUR: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0)
    n, i = (which // tiles).to(tl.int64), (which % tiles) * TILE + tl.arange(0, TILE)
    g, inside = n // shared, i < pixels
    total = 0.0
    if PART == "apply":  # what the other launch has summed
        for start in range(0, tiles, TILE):
            t = start + tl.arange(0, TILE)
            total += tl.sum(tl.load(sums + n * tiles + t, t < tiles, 0))
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
            if PART != "apply":
                total = tl.sum(tl.where(inside, grey, 0.0))
            if PART == "sum":
                tl.store(sums + which, total)
            target = total / pixels * (1 - f)
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
    if PART != "sum":
        tl.store(y + at, red, inside)
        if COLOUR:
            tl.store(y + at + pixels, green, inside)
            tl.store(y + at + 2 * pixels, blue, inside)
