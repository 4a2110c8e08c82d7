"""The fifteen corruptions of ImageNet-C and CIFAR-C.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR 2019.
`table` is the column of CIFAR-C, `large` that of ImageNet-C. Where the benchmark passes through 8-bit images inside a
corruption, so do these; what it stores is the result times 255 with the decimals cut off (ImageNet-C: then as JPEG of
quality 85), which is left to the caller.

Shapes: N images, C channels, H rows, W columns, P = H W pixels; x (N, C, H, W) in [0, 1].
"""

import io
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import resources
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.corruptions.base import LARGE, Draw, Params, corruption

# --- noise ------------------------------------------------------------------------------------------------------------


@corruption(
    "gaussian_noise", family="common", table=(0.04, 0.06, 0.08, 0.09, 0.10), large=(0.08, 0.12, 0.18, 0.26, 0.38)
)
def _gaussian_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add normal noise."""
    (sd,) = params
    return draw.normal(x.shape[1:]).mul_(sd).add_(x)


@corruption("shot_noise", family="common", table=(500, 250, 100, 75, 50), large=(60, 25, 12, 5, 3))
def _shot_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Poisson(c x) / c, by inversion: the quantiles of all brightnesses stand in one sorted table."""
    (c,) = params
    table, first = (t.to(x.device) for t in _poisson(float(c)))
    width = len(table) // len(first)
    level = (x * (255 * FINE)).round_().to(torch.int64)  # brightness in steps of an eighth of a grey level
    place = torch.searchsorted(table, draw.uniform(x.shape[1:]).to(torch.float64).add_(level), right=True)
    counts = place.sub_(level * width).clamp_(max=width - 1).add_(first[level])
    return counts.to(x.dtype).div_(c)


FINE = 8  # steps a grey level


@lru_cache(8)
def _poisson(c: float) -> tuple[Tensor, Tensor]:
    """Return, for each brightness, `level + P(X <= k)`, all in one row, and the first k that is listed."""
    rate = torch.arange(255 * FINE + 1, dtype=torch.float64) * (c / (255 * FINE))  # (levels,)
    reach = 7 * rate.sqrt()
    first = (rate - reach - 3).floor().clamp(min=0)
    k = first[:, None] + torch.arange(int(14 * math.sqrt(c)) + 20)  # (levels, width)
    mass = (torch.xlogy(k, rate[:, None]) - rate[:, None] - torch.lgamma(k + 1)).exp()
    total = mass.cumsum(1).clamp(max=1)
    return (total + torch.arange(len(rate))[:, None]).flatten(), first.to(torch.int64)


@corruption(
    "impulse_noise", family="common", table=(0.01, 0.02, 0.03, 0.05, 0.07), large=(0.03, 0.06, 0.09, 0.17, 0.27)
)
def _impulse_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Salt and pepper: make a share of the values white or black."""
    (amount,) = params
    u = draw.uniform(x.shape[1:])
    return torch.where(u < amount, (u < amount / 2).to(x.dtype), x)


# --- blur -------------------------------------------------------------------------------------------------------------


@corruption(
    "defocus_blur",
    family="common",
    table=((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, sd
    large=((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
)
def _defocus_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Blur with a disk, as a lens out of focus does."""
    kernel = _disk(*map(float, params))
    reach = len(kernel) // 2
    x = _extend(x, reach, "reflect")
    if reach > 2:
        n, c, height, width = x.shape
        kernel = kernel.to(x).view(1, 1, *kernel.shape)
        return F.conv2d(x.view(n * c, 1, height, width), kernel).view(n, c, height - 2 * reach, width - 2 * reach)
    size = [s - 2 * reach for s in x.shape[2:]]
    out = x.new_zeros(*x.shape[:2], *size)
    for i, row in enumerate(kernel.tolist()):
        for j, weight in enumerate(row):
            if weight:
                out.add_(x[:, :, i : i + size[0], j : j + size[1]], alpha=weight)
    return out


@lru_cache(32)
def _disk(radius: float, sd: float) -> Tensor:
    """A disk, its rim softened by a small Gaussian, without the zeros around it."""
    half, taps = (8, 1) if radius <= 8 else (int(radius), 2)
    place = torch.arange(-half, half + 1, dtype=torch.float64)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).to(torch.float64)
    disk = disk / disk.sum()
    bell = torch.tensor(_bell(sd, taps), dtype=torch.float64)
    soft = F.pad(disk[None, None], (taps,) * 4, mode="reflect")
    soft = F.conv2d(F.conv2d(soft, bell.view(1, 1, 1, -1)), bell.view(1, 1, -1, 1))[0, 0]
    edge = int((soft.abs().amax(0) > 1e-9).nonzero()[0])
    return soft[edge : len(soft) - edge, edge : len(soft) - edge]


@corruption(
    "glass_blur",
    family="common",
    table=((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # sd, reach, rounds
    large=((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
)
def _glass_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Blur, let pixels be overwritten by near ones, blur again.

    From the last row and column to the first, each pixel is overwritten by a random neighbour (the benchmark's code
    means to swap the two). If the neighbour had its turn before, what it hands on is what it got; so each pixel points
    at the next one to ask, and chains of pointers are followed all at once, in strides that double.
    """
    sd, reach, rounds = params
    n, c, height, width = x.shape
    pixels = height * width
    x = (_smooth(x, sd) * 255).floor_().div_(255).flatten(2)  # (N, C, P)
    rows = torch.arange(height, device=x.device)[:, None]
    columns = torch.arange(width, device=x.device)
    moves = (rows > reach) & (rows <= height - reach) & (columns > reach) & (columns <= width - reach)  # (H, W)
    here = rows * width + columns
    for _ in range(rounds):
        jump = draw.integers(0, (2 * reach) ** 2, (height, width))  # both directions in one number
        jump = jump // (2 * reach) * width + jump % (2 * reach) - reach * (width + 1)
        there = torch.where(moves, here + jump, here)  # (N, H, W)
        earlier = moves.flatten()[there] & (there > here)
        pointer = torch.where(earlier, there, there + pixels).flatten(1)  # (N, P); a number above P ends the chain
        while (pointer < pixels).any():
            ends = pointer >= pixels
            pointer = torch.where(ends, pointer, pointer.gather(1, torch.where(ends, 0, pointer)))
        x = x.gather(2, (pointer - pixels)[:, None].expand(n, c, pixels))
    return _smooth(x.view(n, c, height, width), sd)


@corruption(
    "motion_blur",
    family="common",
    table=((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sd
    large=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
)
def _motion_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Average along a random direction."""
    radius, sd = params
    return _drag(x, radius, sd, draw.uniform().mul_(90).sub_(45))


def _drag(x: Tensor, radius: float, sd: float, degrees: Tensor) -> Tensor:
    """Average along a line that starts at each pixel, as ImageMagick's motion blur; `degrees` (N,)."""
    n, c, height, width = x.shape
    taps = 2 * math.ceil(radius) + 1
    weights = [math.exp(-(i**2) / (2 * sd**2)) for i in range(taps)]
    weights = [w for w in weights if w > 1e-5]  # the rest together would not change a grey level by a hundredth
    total, reach = sum(weights), len(weights)
    weights = [w / total for w in weights]
    step = torch.arange(reach, device=x.device, dtype=torch.float64)
    angle = degrees.to(torch.float64).deg2rad()[:, None]
    dy, dx = ((step * f - 0.5).ceil().to(torch.int64) for f in (angle.sin(), angle.cos()))  # (N, taps)
    x = _extend(x, reach, "replicate")
    stride = width + 2 * reach
    rows = torch.arange(reach, reach + height, device=x.device)[:, None]
    start = (rows * stride + torch.arange(reach, reach + width, device=x.device)).flatten()  # (P,)
    flat = x.flatten(2)
    out = x.new_zeros(n, c, height * width)
    for weight, shift in zip(weights, (dy * stride + dx).unbind(1), strict=True):
        index = (start + shift[:, None])[:, None].expand(n, c, height * width)
        out.add_(flat.gather(2, index), alpha=weight)
    return out.view(n, c, height, width)


@corruption(
    "zoom_blur",
    family="common",
    table=((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),  # end (excluded), step
    large=((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
)
def _zoom_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """The mean of the image and enlargements of its centre."""
    end, step = map(float, params)
    height, width = x.shape[2:]
    factors = np.arange(1, end, step).tolist()
    if height * width <= DENSE**2:  # all zooms at once are one matrix, from pixels to pixels
        return _rows_times(x.view(-1, height * width), _zooms(height, width, tuple(factors)).to(x.device)).view(x.shape)
    out = x.clone()
    for factor in factors:
        out += _zoom(height, factor).to(x.device) @ x @ _zoom(width, factor).to(x.device).T
    return out.div_(len(factors) + 1)


DENSE = 40  # pixels
BLOCK = 192  # rows of a product: of one size on CPUs, as how a row is summed up depends on how many there are


def _rows_times(rows: Tensor, matrix: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        return rows @ matrix
    padded = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
    return torch.cat([block @ matrix for block in padded.split(BLOCK)])[: len(rows)]


@lru_cache(8)
def _zooms(height: int, width: int, factors: tuple[float, ...]) -> Tensor:
    """The mean of the image and its zooms, (P, P): row vectors of pixels go in from the left."""
    total = torch.eye(height * width)
    for factor in factors:
        total += torch.kron(_zoom(height, factor), _zoom(width, factor)).T
    return total / (len(factors) + 1)


@lru_cache(256)
def _zoom(size: int, factor: float) -> Tensor:
    """Cut out the centre, enlarge it with linear interpolation, cut to size: (size, size), from old to new pixels."""
    cut = math.ceil(size / factor)
    start = (size - cut) // 2
    grown = round(cut * factor)
    skip = (grown - size) // 2
    place = torch.arange(skip, skip + size, dtype=torch.float64) * ((cut - 1) / max(grown - 1, 1))
    source = torch.arange(size, dtype=torch.float64) - start
    return (1 - (place[:, None] - source).abs()).clamp_(min=0).to(torch.float32)


# --- weather ----------------------------------------------------------------------------------------------------------


@corruption(
    "snow",
    family="common",
    table=(  # mean, sd, zoom and cut of the flakes, radius and sd of their motion, share of the image that stays
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    large=(
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
)
def _snow(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Pale the image, and let two layers of dragged flakes fall over it."""
    mean, sd, zoom, cut, radius, blur, keep = params
    height, width = x.shape[2:]
    layer = draw.normal((1, height, width)).mul_(sd).add_(mean)
    layer = _zoom(height, float(zoom)).to(x.device) @ layer @ _zoom(width, float(zoom)).to(x.device).T
    layer = torch.where(layer < cut, 0, layer).clamp_(0, 1)
    layer = _drag(layer, radius, blur, draw.uniform().mul_(90).sub_(135))
    pale = torch.maximum(x, _grey(x).mul_(1.5).add_(0.5))
    return x.mul(keep).add_(pale, alpha=1 - keep).clamp_(0, 1).add_(layer).add_(layer.flip(2, 3))


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.chunk(3, 1)
    return (red * 0.299).add_(green, alpha=0.587).add_(blue, alpha=0.114)


@corruption(
    "frost",
    family="common",
    table=((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # shares of image and frost
    large=((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
)
def _frost(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Mix with a random crop of a picture of frost."""
    image, frost = params
    n, c, height, width = x.shape
    pictures = _pictures(height, width)
    which = draw.integers(0, len(FROST))
    u, v = draw.uniform((2,)).unbind(1)
    # All pictures in one row of pixels; each image knows where in it its crop begins, and how long a line is.
    pixels = torch.cat([p.flatten(1) for p in pictures], 1).to(x.device)  # (3, pixels)
    sizes = torch.tensor([p.shape[1:] for p in pictures], device=x.device)  # (pictures, 2)
    begin = sizes.prod(1).cumsum(0) - sizes.prod(1)
    which = torch.tensor(FROST, device=x.device)[which]
    rows, columns = sizes[which].unbind(1)
    top, left = (u * (rows - height)).long(), (v * (columns - width)).long()
    index = (torch.arange(height, device=x.device) + top[:, None])[:, :, None] * columns[:, None, None]
    index = index + (torch.arange(width, device=x.device) + left[:, None])[:, None, :]
    index = index + begin[which][:, None, None]  # (N, H, W)
    crop = pixels[:, index.flatten()].view(3, n, height, width).transpose(0, 1)  # (N, 3, H, W)
    return x.mul(image).add_(crop if c == 3 else _grey(crop), alpha=frost)


FROST = (0, 1, 1, 2, 3)  # the benchmark draws one of five pictures; its second and third are the same


@lru_cache(4)
def _pictures(height: int, width: int) -> tuple[Tensor, ...]:
    """The frost pictures, (3, rows, columns) in [0, 1] each; larger ones for larger images."""
    folder = resources.files("tribe.corruptions") / "textures"
    if min(height, width) < LARGE:
        with (folder / "frost_small.npz").open("rb") as file, np.load(file) as z:
            arrays = [z[name] for name in ("frost1", "frost2", "frost4", "frost5")]
    else:
        image = _pillow("frost on large images")
        arrays = []
        for name in ("frost1", "frost2", "frost4", "frost5"):
            with (folder / f"{name}.jpg").open("rb") as file, image.open(file) as picture:
                arrays.append(np.array(picture.convert("RGB")))
    pictures = []
    for array in arrays:
        picture = torch.from_numpy(array).permute(2, 0, 1).to(torch.float32) / 255
        grow = max((height + 1) / picture.shape[1], (width + 1) / picture.shape[2])
        if grow > 1:  # an image that is larger than the picture: the benchmark has none
            size = [math.ceil(s * grow) for s in picture.shape[1:]]
            picture = F.interpolate(picture[None], size, mode="bilinear", align_corners=False)[0]
        pictures.append(picture)
    return tuple(pictures)


@corruption(
    "fog",
    family="common",
    table=((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # strength, decay
    large=((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
)
def _fog(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add clouds, and darken to the brightness there was."""
    strength, decay = params
    height, width = x.shape[2:]
    size = 2 ** math.ceil(math.log2(max(height, width)))  # 32 for CIFAR, 256 for ImageNet
    top = x.amax((1, 2, 3), keepdim=True)
    layer = plasma(draw, size, decay)[:, None, :height, :width]
    return x.add(layer, alpha=strength).mul_(top / (top + strength))


def plasma(draw: Draw, size: int, decay: float) -> Tensor:
    """Clouds (N, size, size) from 0 to 1: the diamond-square fractal on a torus; size is a power of two.

    From coarse to fine, each new point is the mean of its four neighbours and a random number, whose range falls by
    the square of `decay` from one scale to the next.
    """
    cloud = torch.zeros(len(draw.key.seed), size, size, device=draw.key.seed.device)
    step, wibble = size, 100.0
    while step >= 2:
        half, count = step // 2, size // step
        noise = draw.uniform((3, count, count)).mul_(2 * wibble**2).sub_(wibble**2)
        corner = cloud[:, ::step, ::step]
        centre = corner + corner.roll(-1, 1)
        centre = (centre + centre.roll(-1, 2)).mul_(0.25).add_(noise[:, 0])
        cloud[:, half::step, half::step] = centre
        above = centre + centre.roll(1, 1) + corner + corner.roll(-1, 2)  # middles of the horizontal edges
        beside = centre + centre.roll(1, 2) + corner + corner.roll(-1, 1)  # and of the vertical ones
        cloud[:, ::step, half::step] = above.mul_(0.25).add_(noise[:, 1])
        cloud[:, half::step, ::step] = beside.mul_(0.25).add_(noise[:, 2])
        step, wibble = half, wibble / decay
    cloud -= cloud.amin((1, 2), keepdim=True)
    return cloud.div_(cloud.amax((1, 2), keepdim=True))


# --- colour and digital -----------------------------------------------------------------------------------------------


@corruption("brightness", family="common", table=(0.05, 0.1, 0.15, 0.2, 0.3), large=(0.1, 0.2, 0.3, 0.4, 0.5))
def _brightness(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add to the value of HSV: with hue and saturation kept, all channels grow by the same factor."""
    (c,) = params
    value = x.amax(1, keepdim=True)
    lit = (value + c).clamp_(0, 1)
    return torch.where(value > 0, x * (lit / value), lit)


@corruption("contrast", family="common", table=(0.75, 0.5, 0.4, 0.3, 0.15), large=(0.4, 0.3, 0.2, 0.1, 0.05))
def _contrast(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Draw every channel towards its mean."""
    (c,) = params
    mean = x.mean(-1, keepdim=True).mean(-2, keepdim=True)  # in two steps: see `tribe.engine.augment`
    return (x - mean).mul_(c).add_(mean)


@corruption(
    "elastic_transform",
    family="common",
    # strength and smoothness of the displacement, jitter of the corners; shares of the side, and of 244 for ImageNet
    table=((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    large=((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
)
def _elastic_transform(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Move three corners of the centre square, and all that goes with them; then move each pixel a little by itself."""
    n, _, height, width = x.shape
    side = min(height, width)
    unit = side if side < LARGE else side * 244 / 224  # the benchmark's parameters are for 244, its images have 224
    strength, smoothness, jitter = (p * unit for p in params)
    centre = torch.tensor([width // 2, height // 2], device=x.device, dtype=torch.float32)
    reach = max(1, side // 3)
    corner = centre + torch.tensor([[1, 1], [1, -1], [-1, -1]], device=x.device) * reach  # (3, 2): x, y
    moved = corner + draw.uniform((3, 2)).mul_(2 * jitter).sub_(jitter)  # (N, 3, 2)
    # The map from new to old: corner[0] + back (place - moved[0]), with `back` from the sides that meet there.
    (ax, ay), (bx, by) = ((moved[:, i] - moved[:, i + 1]).unbind(1) for i in (0, 1))  # were (0, 2 reach), (2 reach, 0)
    scale = 2 * reach / (ax * by - ay * bx)
    back = torch.stack((-ay * scale, ax * scale, by * scale, -bx * scale), 1).view(n, 2, 2, 1, 1)
    place = torch.stack(
        torch.broadcast_tensors(
            torch.arange(width, device=x.device, dtype=torch.float32),
            torch.arange(height, device=x.device, dtype=torch.float32)[:, None],
        )
    )  # (2, H, W): x, y
    old = place - moved[:, 0, :, None, None]  # (N, 2, H, W)
    old = corner[0, :, None, None] + back[:, :, 0] * old[:, :1] + back[:, :, 1] * old[:, 1:]
    x = _sample(x, old, mirror_edge=False)
    if strength == 0:
        return x
    shift = draw.uniform((2, height, width)).mul_(2).sub_(1)
    shift = _bell_matrix(height, smoothness).to(x.device) @ shift @ _bell_matrix(width, smoothness).to(x.device).T
    return _sample(x, place + shift * strength, mirror_edge=True)


def _sample(x: Tensor, place: Tensor, *, mirror_edge: bool) -> Tensor:
    """Look up x bilinearly at place (N, 2, H, W), in pixels; beyond its border x is mirrored, with its edge or not."""
    size = torch.tensor([x.shape[3], x.shape[2]], device=x.device, dtype=x.dtype).view(2, 1, 1)
    grid = (2 * place + 1) / size - 1 if mirror_edge else 2 * place / (size - 1) - 1
    return F.grid_sample(x, grid.permute(0, 2, 3, 1), padding_mode="reflection", align_corners=not mirror_edge)


@corruption("pixelate", family="common", table=(0.95, 0.9, 0.85, 0.75, 0.65), large=(0.6, 0.5, 0.4, 0.3, 0.25))
def _pixelate(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Shrink by averaging over boxes and grow again, with 8-bit images after each pass over an axis."""
    (c,) = params
    height, width = x.shape[2:]
    low, narrow = max(1, int(height * c)), max(1, int(width * c))
    x = _eight_bits(x @ _boxes(width, narrow).to(x.device).T)
    x = _eight_bits(_boxes(height, low).to(x.device) @ x)
    rows, columns = _boxes(low, height).argmax(1), _boxes(narrow, width).argmax(1)
    return x[:, :, rows.to(x.device)][:, :, :, columns.to(x.device)]


@lru_cache(64)
def _boxes(before: int, after: int) -> Tensor:
    """Weights (after, before) of the box filter, as Pillow's."""
    scale = before / after
    support = 0.5 * max(scale, 1.0)
    weights = torch.zeros(after, before, dtype=torch.float64)
    for i in range(after):
        centre = (i + 0.5) * scale
        for j in range(max(0, int(centre - support + 0.5)), min(before, int(centre + support + 0.5))):
            weights[i, j] = -0.5 < (j + 0.5 - centre) / max(scale, 1.0) <= 0.5
    return (weights / weights.sum(1, keepdim=True)).to(torch.float32)


@corruption("jpeg_compression", family="common", table=(80, 65, 58, 50, 40), large=(25, 18, 15, 10, 7))
def _jpeg_compression(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Through JPEG and back; channels other than red, green and blue go one by one, as grey images."""
    (quality,) = params
    image = _pillow("jpeg_compression")

    def squeeze(pixels: np.ndarray) -> np.ndarray:
        buffer = io.BytesIO()
        image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
        with image.open(buffer) as picture:
            return np.array(picture)

    eight = (x * 255).round_().to(torch.uint8).cpu()
    colour = x.shape[1] == 3
    flat = eight.permute(0, 2, 3, 1).contiguous() if colour else eight.flatten(0, 1)
    if min(x.shape[2:]) < LARGE:  # too small for threads to pay
        pictures = [squeeze(pixels) for pixels in flat.numpy()]
    else:
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            pictures = list(pool.map(squeeze, flat.numpy()))
    out = torch.from_numpy(np.stack(pictures)).to(x.device)
    return (out.permute(0, 3, 1, 2) if colour else out.view(x.shape)).to(x.dtype) / 255


def _pillow(what: str) -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"{what} needs Pillow: pip install 'tribe-tta[images]' (or pip install pillow)") from error
    return Image


# --- filters ----------------------------------------------------------------------------------------------------------


def _eight_bits(x: Tensor) -> Tensor:
    """Round to whole grey levels."""
    return (x * 255).add_(0.5).floor_().div_(255)


def _extend(x: Tensor, margin: int, mode: str) -> Tensor:
    """Pad all four sides by the margin, which may exceed the image: "reflect" (edge once) or "replicate"."""
    height, width = x.shape[2:]
    rows, columns = (_fold(torch.arange(-margin, s + margin), s, mode).to(x.device) for s in (height, width))
    return x.index_select(2, rows).index_select(3, columns)


def _fold(place: Tensor, size: int, mode: str) -> Tensor:
    """Bring positions outside 0..size-1 back: to the edge, or mirrored at ("reflect") or behind ("symmetric") it."""
    if mode == "replicate":
        return place.clamp(0, size - 1)
    if mode == "reflect":
        place = place.remainder(2 * size - 2)
        return torch.minimum(place, 2 * size - 2 - place)
    place = place.remainder(2 * size)
    return torch.minimum(place, 2 * size - 1 - place)


def _bell(sd: float, reach: int) -> list[float]:
    """Weights of a Gaussian at -reach..reach, of sum one."""
    weights = [math.exp(-0.5 * (i / sd) ** 2) if sd else float(i == 0) for i in range(-reach, reach + 1)]
    total = sum(weights)
    return [w / total for w in weights]


def _smooth(x: Tensor, sd: float) -> Tensor:
    """Gaussian blur, cut at 4 sd, the edge repeated."""
    reach = int(4 * sd + 0.5)
    if reach == 0:
        return x
    weights = _bell(sd, reach)
    x = _extend(x, reach, "replicate")
    for dim in (2, 3):
        size = x.shape[dim] - 2 * reach
        out = torch.zeros_like(x.narrow(dim, 0, size))
        for i, weight in enumerate(weights):
            out.add_(x.narrow(dim, i, size), alpha=weight)
        x = out
    return x


@lru_cache(32)
def _bell_matrix(size: int, sd: float) -> Tensor:
    """Gaussian blur along an axis as a matrix (size, size): cut at 3 sd, mirrored behind the edge."""
    reach = int(3 * sd + 0.5)
    place = _fold(torch.arange(size)[:, None] + torch.arange(-reach, reach + 1), size, "symmetric")
    weights = torch.tensor(_bell(sd, reach), dtype=torch.float64).expand(place.shape)
    return torch.zeros(size, size, dtype=torch.float64).scatter_add_(1, place, weights).to(torch.float32)
