"""The fifteen corruptions of MNIST-C: noise, blur, warps, weather, strokes and edges.

Mu and Gilmer, "MNIST-C: A robustness benchmark for computer vision", 2019. Each has one strength, the published one,
for every severity (the random numbers still differ between severities). Those that MNIST-C took from ImageNet-C
unchanged are registered here with their numbers; their code is in `common`.

NOTE: MNIST-C stores the result times 255, rounded half to even; the other two benchmarks truncate.

Shapes: N images, H rows, W columns, P = H W pixels; x (N, 1, H, W) in [0, 1].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.core import rng
from tribe.core.rng import Key
from tribe.data.corruptions import LARGEST_GREY, Draw, Function, Params, chunk_size, corruption
from tribe.data.corruptions.common import brightness, impulse_noise, plasma, shot_noise
from tribe.data.corruptions.filters import blur_along_line, gaussian_blur


def _mnist(name: str, *params: float) -> Callable[[Function], Function]:
    """Register a corruption with these parameters (function decorator)."""
    return corruption(name, family="mnist", table=(params,))


_mnist("shot_noise", 3)(shot_noise)
_mnist("impulse_noise", 0.17)(impulse_noise)


@_mnist("glass_blur", 0.7, 1, 2)  # sd, reach, rounds
def glass_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Blur, swap half of the pixels with a near one, blur again.

    The swaps go from the last row and column to the first. Swaps that cannot touch the same pixel run together.
    """
    sd, reach, rounds = params
    height, width = x.shape[2:]
    steps = _turns(height, width, reach)
    here = torch.cat(steps).to(x.device)
    y = (gaussian_blur(x, sd) * 255).floor_().flatten(1)  # (N, P)
    for _ in range(rounds):
        jump = draw.integers(0, 2 * (2 * reach) ** 2, here.shape)  # a coin and both directions in one number
        swaps, jump = jump % 2, jump // 2
        jump = jump // (2 * reach) * width + jump % (2 * reach) - reach * (width + 1)
        there = here + jump * swaps  # (N, turns); no swap is a swap with itself
        for a, b in zip(here.split([len(s) for s in steps]), there.split([len(s) for s in steps], 1), strict=True):
            old, new = y[:, a], y.gather(1, b)
            y.scatter_(1, b, old)
            y[:, a] = new
    return gaussian_blur(y.div_(255).view(x.shape), sd)


@lru_cache(8)
def _turns(height: int, width: int, reach: int) -> tuple[Tensor, ...]:
    """Pixels in the order of their swaps, in groups that can run together.

    A swap touches no pixel further away than `reach`. So a row may start when the row below it is 2 reach columns
    ahead.
    """
    last = range(height - reach, reach, -1), range(width - reach, reach, -1)
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(last[0]):
        for j, column in enumerate(last[1]):
            groups.setdefault(2 * reach * i + j, []).append(row * width + column)
    return tuple(torch.tensor(groups[i]) for i in sorted(groups))


@_mnist("motion_blur", 10, 3)  # radius, sd
def motion_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Average along a random direction; the benchmark truncates the grey levels here."""
    radius, sd = params
    y = blur_along_line(x, radius, sd, draw.uniform().mul_(90).sub_(45))
    return y.mul_(255).add_(1e-3).floor_().div_(255)


@_mnist("shear", 0.4)  # radians
def shear(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Slant by an angle, to the left or to the right."""
    (angle,) = params
    slope = _sign(draw) * math.tan(angle)
    return _warp(x, torch.ones_like(slope), slope, torch.zeros_like(slope), torch.ones_like(slope))


@_mnist("scale", 1 / 0.7)  # old pixels a new one
def scale(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Shrink by a factor."""
    (factor,) = params
    zoom = x.new_full((len(x),), factor)
    return _warp(x, zoom, torch.zeros_like(zoom), torch.zeros_like(zoom), zoom)


@_mnist("rotate", 0.4)  # radians
def rotate(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Rotate by an angle, clockwise or anticlockwise."""
    (angle,) = params
    sin = _sign(draw) * math.sin(angle)
    cos = torch.full_like(sin, math.cos(angle))
    return _warp(x, cos, -sin, sin, cos)


def _sign(draw: Draw) -> Tensor:
    """Draw -1 or 1, (N,)."""
    return draw.integers(0, 2).mul_(2).sub_(1).to(torch.float32)


def _warp(x: Tensor, xx: Tensor, xy: Tensor, yx: Tensor, yy: Tensor) -> Tensor:
    """Sample x bilinearly where the matrix ((xx, xy), (yx, yy)), (N,) each, maps a pixel; the centre is fixed.

    Outside the image is black.
    """
    height, width = x.shape[2:]
    u, v = (torch.arange(s, device=x.device, dtype=x.dtype) - (s - 1) / 2 for s in (width, height))
    v = v[:, None]
    xx, xy, yx, yy = (m[:, None, None] for m in (xx, xy, yx, yy))
    grid = torch.stack(((xx * u + xy * v) * (2 / (width - 1)), (yx * u + yy * v) * (2 / (height - 1))), -1)
    return F.grid_sample(x, grid, padding_mode="zeros", align_corners=True)  # grid (N, H, W, 2)


_mnist("brightness", 0.5)(brightness)


@_mnist("translate", 3)  # pixels
def translate(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Move by a number of pixels, up or down and left or right; fill with black."""
    (step,) = params
    n, _, height, width = x.shape
    x = F.pad(x, (step,) * 4)
    top, left = draw.integers(0, 2, (2,)).mul_(2 * step).unbind(1)  # (N,), in the padded image
    rows = top[:, None] + torch.arange(height, device=x.device)
    columns = left[:, None] + torch.arange(width, device=x.device)
    x = x.gather(2, rows[:, None, :, None].expand(n, 1, height, x.shape[3]))
    return x.gather(3, columns[:, None, None, :].expand(n, 1, height, width))


@_mnist("stripe", 7, 21)  # columns
def stripe(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Invert the columns before the first number and from the second number on."""
    left, right = params
    return torch.cat((1 - x[..., :left], x[..., left:right], 1 - x[..., right:]), -1)


@_mnist("fog", 3, 1.4, LARGEST_GREY)  # strength, decay, size of the clouds
def fog(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add the upper left corner of a large cloud."""
    strength, decay, size = params
    height, width = x.shape[2:]
    top = x.amax((1, 2, 3), keepdim=True)
    layer = torch.empty_like(x)
    step = chunk_size((size, size), x.device)
    for i in range(0, len(x), step):  # in parts: a cloud has far more pixels than an image
        part = Key(draw.key.seed[i : i + step], draw.key.clock[i : i + step])
        layer[i : i + step, 0] = plasma(_Bytes(part, draw.name), size, decay)[:, :height, :width]
    return layer.mul_(strength).add_(x).mul_(top / (top + strength))


@dataclass(frozen=True)
class _Bytes(Draw):
    """Random numbers with eight bits in large draws: fifteen of sixteen of them move a pixel by about a grey level."""

    def uniform(self, shape: Sequence[int] = ()) -> Tensor:
        n = math.prod(shape)
        if n < 2**13:
            return super().uniform(shape)
        words = rng.bits(self.key, self._purpose(), -(-n // 4))
        eights = words.to(torch.int32).contiguous().view(torch.uint8)[:, :n]  # four per word
        return eights.to(torch.float32).add_(0.5).mul_(2.0**-8).view(len(words), *shape)


@_mnist("spatter", 0.65, 0.3, 1, 0.65, 1.5, 0.8, 63 / 255)  # mean, sd, smoothness and cut of the noise; rim; colour
def spatter(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Cover with soft drops of mud where smooth noise is high; leave out their thin rim."""
    mean, sd, size, cut, rim, thin, colour = params
    layer = gaussian_blur(draw.normal(x.shape[1:]).mul_(sd).add_(mean), size)
    mud = gaussian_blur((layer > cut).to(x.dtype), rim)
    mud = torch.where(mud < thin, 0, mud)
    return (x * (1 - mud)).add_(mud, alpha=colour)


@_mnist("dotted_line")
def dotted_line(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Draw a line from the first to the last column (excluded), between two random rows: two columns of every four."""
    height, width = x.shape[2:]
    start, end = draw.integers(0, height - 1, (2, 1, 1, 1)).to(x.dtype).unbind(1)  # (N, 1, 1, 1)
    row, column = (torch.arange(s, device=x.device, dtype=x.dtype) for s in (height, width))
    ink = _ink(row[:, None] - (start + (end - start) / (width - 1) * column))
    return x + ink * ((column % 4 >= 2) & (column < width - 1))


@_mnist("zigzag", 2, 25, 5, 2.0, 2.0)  # columns, most rows to rise; length and depth of a tooth
def zigzag(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Draw a saw from one column to another; the row where it starts and how far it rises or falls are random."""
    first, last, rise, length, depth = params
    height, width = x.shape[2:]
    saws = torch.stack([_saw(height, width, first, last, r, length, depth) for r in range(-rise, rise)]).to(x.device)
    start, which = draw.integers(0, height - 1), draw.integers(0, len(saws))
    rows = torch.arange(height, device=x.device) - start[:, None] + height  # (N, H)
    return x + saws[which[:, None], rows][:, None]


@lru_cache(64)
def _saw(height: int, width: int, first: int, last: int, rise: int, length: float, depth: float) -> Tensor:
    """A saw (2 H, W) that starts in the middle row and rises by a number of rows: corners with lines between them."""
    run = last - first
    whole = math.hypot(run, rise)
    teeth = int((whole - length) // (2 * length)) + 1
    corners = [(0.0, 0.0)] + [((2 * i + 1) * length, (-1) ** i * depth) for i in range(teeth)]
    # The last line stops before the middle; the position is measured from the benchmark's images.
    rest = whole - 2 * (teeth - 1) * length
    corners.append((whole, corners[-1][1] / (2 * rest)))
    cos, sin = run / whole, rise / whole
    points = [(first + cos * u - sin * v, sin * u + cos * v) for u, v in corners]  # column, row
    row = torch.arange(-height, height, dtype=torch.float64)[:, None]
    column = torch.arange(width, dtype=torch.float64)
    saw = torch.zeros(2 * height, width, dtype=torch.float64)
    for (c0, r0), (c1, r1) in pairwise(points):
        line = _ink(row - (r0 + (r1 - r0) / (c1 - c0) * (column - c0)))
        saw += line * ((column >= math.floor(c0 + 1e-9)) & (column < math.ceil(c1 - 1e-9)))
    return saw.clamp_(max=1).to(torch.float32)


def _ink(distance: Tensor) -> Tensor:
    """The intensity of a stroke at a distance (in rows) from its middle line; 0 from 1.45 rows on."""
    return (1 - distance.abs().clamp(max=2) / 2.3).log_().add_(1).clamp_(min=0)


@_mnist("canny_edges", 1, 0.1, 0.2)  # sd, low and high threshold
def canny_edges(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Canny's edges: ridges of the slope above the low threshold that are connected to one above the high threshold."""
    sd, low, high = params
    margin = int(4 * sd + 0.5)
    inside = slice(margin, -margin or None)
    x = x.to(torch.float64)  # drawings have many equal slopes, and rounding must not decide between them
    # Smooth with black outside the border, then divide by the same for a white image.
    y, white = (gaussian_blur(F.pad(z, (margin,) * 4), sd)[..., inside, inside] for z in (x, torch.ones_like(x[:1])))
    y = F.pad(y / white, (1,) * 4, mode="replicate")
    down = y[..., 2:, :] - y[..., :-2, :]
    down = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
    right = y[..., 2:] - y[..., :-2]
    right = right[..., :-2, :] + 2 * right[..., 1:-1, :] + right[..., 2:, :]
    slope = (down.square() + right.square()).sqrt_()  # (N, 1, H, W)
    height, width = slope.shape[2:]

    def near(i: int, j: int) -> Tensor:
        return slope[..., 1 + i : height - 1 + i, 1 + j : width - 1 + j]

    # A ridge is not lower than its neighbours along the gradient, interpolated between a straight and a diagonal one.
    middle, down, right = near(0, 0), down[..., 1:-1, 1:-1], right[..., 1:-1, 1:-1]
    steep, falling = down.abs() >= right.abs(), down * right >= 0
    mix = torch.minimum(down.abs(), right.abs()) / torch.maximum(down.abs(), right.abs()).clamp(min=1e-300)
    ridge = middle >= low
    for i in (1, -1):
        straight = torch.where(steep, near(i, 0), torch.where(falling, near(0, i), near(0, -i)))
        diagonal = torch.where(falling, near(i, i), near(i, -i))
        ridge &= middle >= straight * (1 - mix) + diagonal * mix
    ridges = F.pad(ridge.to(torch.float32), (1,) * 4)
    edges = torch.where(slope >= high, ridges, 0)
    while True:
        grown = F.max_pool2d(edges, 3, 1, 1) * ridges
        if torch.equal(grown, edges):
            return edges
        edges = grown
