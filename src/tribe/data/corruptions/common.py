"""The fifteen corruptions of ImageNet-C and CIFAR-C, in the benchmark's order.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR 2019.
`table` holds the parameters of CIFAR-C, `large` those of ImageNet-C. Where the benchmark rounds to 8-bit images inside
a corruption, so do these. The benchmark then stores the result times 255, truncated (ImageNet-C: as JPEG of quality
85); the caller does that.

Shapes: N images, C channels, H rows, W columns, P = H W pixels; x (N, C, H, W) in [0, 1].
"""

import io
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib import resources

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.data.corruptions import LARGE, Draw, Params, corruption
from tribe.data.corruptions.filters import (
    blur_along_line,
    gaussian_blur,
    gaussian_matrix,
    gaussian_weights,
    pad,
    zoom_matrix,
)
from tribe.data.images import require_pillow

common = partial(corruption, family="common")

# --- noise ------------------------------------------------------------------------------------------------------------


@common("gaussian_noise", table=(0.04, 0.06, 0.08, 0.09, 0.10), large=(0.08, 0.12, 0.18, 0.26, 0.38))
def gaussian_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add normal noise."""
    (sd,) = params
    return draw.normal(x.shape[1:]).mul_(sd).add_(x)


@common("shot_noise", table=(500, 250, 100, 75, 50), large=(60, 25, 12, 5, 3))
def shot_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Poisson(c x) / c, by inversion: one sorted table holds the quantiles of all brightnesses."""
    (c,) = params
    table, first = (t.to(x.device) for t in _poisson_table(float(c)))
    width = len(table) // len(first)
    level = (x * (255 * FINE)).round_().to(torch.int64)  # brightness in steps of an eighth of a grey level
    place = torch.searchsorted(table, draw.uniform(x.shape[1:]).to(torch.float64).add_(level), right=True)
    counts = place.sub_(level * width).clamp_(max=width - 1).add_(first[level])
    return counts.to(x.dtype).div_(c)


FINE = 8  # steps a grey level


@lru_cache(8)
def _poisson_table(c: float) -> tuple[Tensor, Tensor]:
    """Return `level + P(X <= k)` for each brightness, flat in one row, and the first k of each brightness."""
    rate = torch.arange(255 * FINE + 1, dtype=torch.float64) * (c / (255 * FINE))  # (levels,)
    reach = 7 * rate.sqrt()
    first = (rate - reach - 3).floor().clamp(min=0)
    k = first[:, None] + torch.arange(int(14 * math.sqrt(c)) + 20)  # (levels, width)
    mass = (torch.xlogy(k, rate[:, None]) - rate[:, None] - torch.lgamma(k + 1)).exp()
    total = mass.cumsum(1).clamp(max=1)
    return (total + torch.arange(len(rate))[:, None]).flatten(), first.to(torch.int64)


@common("impulse_noise", table=(0.01, 0.02, 0.03, 0.05, 0.07), large=(0.03, 0.06, 0.09, 0.17, 0.27))
def impulse_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Salt and pepper: make a share of the values white or black."""
    (amount,) = params
    u = draw.uniform(x.shape[1:])
    return torch.where(u < amount, (u < amount / 2).to(x.dtype), x)


# --- blur -------------------------------------------------------------------------------------------------------------


@common(
    "defocus_blur",
    table=((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, sd
    large=((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
)
def defocus_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Blur with a disk, like a lens out of focus."""
    kernel = _disk_kernel(*map(float, params))
    reach = len(kernel) // 2
    x = pad(x, reach, "reflect")
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
def _disk_kernel(radius: float, sd: float) -> Tensor:
    """A disk with a rim softened by a small Gaussian, without the zeros around it."""
    half, taps = (8, 1) if radius <= 8 else (int(radius), 2)
    place = torch.arange(-half, half + 1, dtype=torch.float64)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).to(torch.float64)
    disk = disk / disk.sum()
    bell = torch.tensor(gaussian_weights(sd, taps), dtype=torch.float64)
    soft = F.pad(disk[None, None], (taps,) * 4, mode="reflect")
    soft = F.conv2d(F.conv2d(soft, bell.view(1, 1, 1, -1)), bell.view(1, 1, -1, 1))[0, 0]
    edge = int((soft.abs().amax(0) > 1e-9).nonzero()[0])
    return soft[edge : len(soft) - edge, edge : len(soft) - edge]


@common(
    "glass_blur",
    table=((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # sd, reach, rounds
    large=((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
)
def glass_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Blur, overwrite pixels with near ones, blur again.

    From the last row and column to the first, a random neighbour overwrites each pixel (the benchmark's code intends to
    swap the two). A neighbour that was overwritten earlier passes on its new value. So each pixel points at the next
    pixel of a chain, and all chains are followed at once, in strides that double.
    """
    sd, reach, rounds = params
    n, c, height, width = x.shape
    pixels = height * width
    x = (gaussian_blur(x, sd) * 255).floor_().div_(255).flatten(2)  # (N, C, P)
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
    return gaussian_blur(x.view(n, c, height, width), sd)


@common(
    "motion_blur",
    table=((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sd
    large=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
)
def motion_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Average along a random direction."""
    radius, sd = params
    return blur_along_line(x, radius, sd, draw.uniform().mul_(90).sub_(45))


@common(
    "zoom_blur",
    table=((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),  # end (excluded), step
    large=((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
)
def zoom_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """The mean of the image and enlargements of its centre."""
    end, step = map(float, params)
    height, width = x.shape[2:]
    factors = np.arange(1, end, step).tolist()
    if height * width <= DENSE**2:  # all zooms at once are one matrix, from pixels to pixels
        matrix = _mean_zoom_matrix(height, width, tuple(factors)).to(x.device)
        return _multiply_rows(x.view(-1, height * width), matrix).view(x.shape)
    out = x.clone()
    for factor in factors:
        out += zoom_matrix(height, factor).to(x.device) @ x @ zoom_matrix(width, factor).to(x.device).T
    return out.div_(len(factors) + 1)


DENSE = 40  # pixels
BLOCK = 192  # rows of a product on CPUs: a fixed number, because the order of a row's sum depends on it


def _multiply_rows(rows: Tensor, matrix: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        return rows @ matrix
    padded = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
    return torch.cat([block @ matrix for block in padded.split(BLOCK)])[: len(rows)]


@lru_cache(8)
def _mean_zoom_matrix(height: int, width: int, factors: tuple[float, ...]) -> Tensor:
    """The mean of the image and its zooms as a matrix (P, P), to multiply row vectors of pixels with."""
    total = torch.eye(height * width)
    for factor in factors:
        total += torch.kron(zoom_matrix(height, factor), zoom_matrix(width, factor)).T
    return total / (len(factors) + 1)


# --- weather ----------------------------------------------------------------------------------------------------------


@common(
    "snow",
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
def snow(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Pale the image and add two layers of flakes blurred by motion."""
    mean, sd, zoom, cut, radius, blur, keep = params
    height, width = x.shape[2:]
    layer = draw.normal((1, height, width)).mul_(sd).add_(mean)
    layer = zoom_matrix(height, float(zoom)).to(x.device) @ layer @ zoom_matrix(width, float(zoom)).to(x.device).T
    layer = torch.where(layer < cut, 0, layer).clamp_(0, 1)
    layer = blur_along_line(layer, radius, blur, draw.uniform().mul_(90).sub_(135))
    pale = torch.maximum(x, _greyscale(x).mul_(1.5).add_(0.5))
    return x.mul(keep).add_(pale, alpha=1 - keep).clamp_(0, 1).add_(layer).add_(layer.flip(2, 3))


def _greyscale(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.chunk(3, 1)
    return (red * 0.299).add_(green, alpha=0.587).add_(blue, alpha=0.114)


@common(
    "frost",
    table=((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # shares of image and frost
    large=((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
)
def frost(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Mix with a random crop of a photograph of frost."""
    image, frost = params
    n, c, height, width = x.shape
    photographs = _frost_images(height, width)
    which = draw.integers(0, len(FROST))
    u, v = draw.uniform((2,)).unbind(1)
    # All photographs in one row of pixels; `begin` is where each starts in it, `columns` how long its lines are.
    pixels = torch.cat([p.flatten(1) for p in photographs], 1).to(x.device)  # (3, pixels)
    sizes = torch.tensor([p.shape[1:] for p in photographs], device=x.device)  # (photographs, 2)
    begin = sizes.prod(1).cumsum(0) - sizes.prod(1)
    which = torch.tensor(FROST, device=x.device)[which]
    rows, columns = sizes[which].unbind(1)
    top, left = (u * (rows - height)).long(), (v * (columns - width)).long()
    index = (torch.arange(height, device=x.device) + top[:, None])[:, :, None] * columns[:, None, None]
    index = index + (torch.arange(width, device=x.device) + left[:, None])[:, None, :]
    index = index + begin[which][:, None, None]  # (N, H, W)
    crop = pixels[:, index.flatten()].view(3, n, height, width).transpose(0, 1)  # (N, 3, H, W)
    return x.mul(image).add_(crop if c == 3 else _greyscale(crop), alpha=frost)


FROST = (0, 1, 1, 2, 3)  # the benchmark draws one of five photographs; its second and third are the same


@lru_cache(4)
def _frost_images(height: int, width: int) -> tuple[Tensor, ...]:
    """The frost photographs, each (3, rows, columns) in [0, 1]; larger ones for larger images."""
    folder = resources.files("tribe.data.corruptions") / "textures"
    if min(height, width) < LARGE:
        with (folder / "frost_small.npz").open("rb") as file, np.load(file) as z:
            arrays = [z[name] for name in ("frost1", "frost2", "frost4", "frost5")]
    else:
        image = require_pillow("frost on large images")
        arrays = []
        for name in ("frost1", "frost2", "frost4", "frost5"):
            with (folder / f"{name}.jpg").open("rb") as file, image.open(file) as picture:
                arrays.append(np.array(picture.convert("RGB")))
    pictures = []
    for array in arrays:
        picture = torch.from_numpy(array).permute(2, 0, 1).to(torch.float32) / 255
        grow = max((height + 1) / picture.shape[1], (width + 1) / picture.shape[2])
        if grow > 1:  # the image is larger than the photograph, which never happens in the benchmark
            size = [math.ceil(s * grow) for s in picture.shape[1:]]
            picture = F.interpolate(picture[None], size, mode="bilinear", align_corners=False)[0]
        pictures.append(picture)
    return tuple(pictures)


@common(
    "fog",
    table=((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # strength, decay
    large=((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
)
def fog(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add clouds and scale back to the previous maximum."""
    strength, decay = params
    height, width = x.shape[2:]
    size = 2 ** math.ceil(math.log2(max(height, width)))  # 32 for CIFAR, 256 for ImageNet
    top = x.amax((1, 2, 3), keepdim=True)
    layer = plasma(draw, size, decay)[:, None, :height, :width]
    return x.add(layer, alpha=strength).mul_(top / (top + strength))


def plasma(draw: Draw, size: int, decay: float) -> Tensor:
    """Clouds (N, size, size) from 0 to 1: the diamond-square fractal on a torus; size is a power of two.

    From coarse to fine, each new point is the mean of its four neighbours plus a random number. The range of the
    random numbers falls by the square of `decay` from one scale to the next.
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


# --- colour, distortion and compression -------------------------------------------------------------------------------


@common("brightness", table=(0.05, 0.1, 0.15, 0.2, 0.3), large=(0.1, 0.2, 0.3, 0.4, 0.5))
def brightness(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add to the value of HSV; hue and saturation stay, so all channels grow by the same factor."""
    (c,) = params
    value = x.amax(1, keepdim=True)
    lit = (value + c).clamp_(0, 1)
    return torch.where(value > 0, x * (lit / value), lit)


@common("contrast", table=(0.75, 0.5, 0.4, 0.3, 0.15), large=(0.4, 0.3, 0.2, 0.1, 0.05))
def contrast(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Move every channel towards its mean."""
    (c,) = params
    mean = x.mean(-1, keepdim=True).mean(-2, keepdim=True)  # in two steps: see `tribe.core.augment`
    return (x - mean).mul_(c).add_(mean)


@common(
    "elastic_transform",
    # strength and smoothness of the displacement, jitter of the corners; shares of the side, and of 244 for ImageNet
    table=((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    large=((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
)
def elastic_transform(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Apply a random affine map, given by three moved corners of the centre square; then move each pixel a little."""
    n, _, height, width = x.shape
    side = min(height, width)
    unit = side if side < LARGE else side * 244 / 224  # the benchmark's parameters are for 244, its images have 224
    strength, smoothness, jitter = (p * unit for p in params)
    centre = torch.tensor([width // 2, height // 2], device=x.device, dtype=torch.float32)
    reach = max(1, side // 3)
    corner = centre + torch.tensor([[1, 1], [1, -1], [-1, -1]], device=x.device) * reach  # (3, 2): x, y
    moved = corner + draw.uniform((3, 2)).mul_(2 * jitter).sub_(jitter)  # (N, 3, 2)
    # The map from new to old positions: corner[0] + back (place - moved[0]); `back` comes from the sides there.
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
    x = _sample_bilinear(x, old, mirror_edge=False)
    if strength == 0:
        return x
    shift = draw.uniform((2, height, width)).mul_(2).sub_(1)
    shift = gaussian_matrix(height, smoothness).to(x.device) @ shift @ gaussian_matrix(width, smoothness).to(x.device).T
    return _sample_bilinear(x, place + shift * strength, mirror_edge=True)


def _sample_bilinear(x: Tensor, place: Tensor, *, mirror_edge: bool) -> Tensor:
    """Sample x bilinearly at place (N, 2, H, W), in pixels; outside, x is mirrored with or without its edge."""
    size = torch.tensor([x.shape[3], x.shape[2]], device=x.device, dtype=x.dtype).view(2, 1, 1)
    grid = (2 * place + 1) / size - 1 if mirror_edge else 2 * place / (size - 1) - 1
    return F.grid_sample(x, grid.permute(0, 2, 3, 1), padding_mode="reflection", align_corners=not mirror_edge)


@common("pixelate", table=(0.95, 0.9, 0.85, 0.75, 0.65), large=(0.6, 0.5, 0.4, 0.3, 0.25))
def pixelate(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Shrink by averaging over boxes and enlarge again; round to 8 bits after each axis."""
    (c,) = params
    height, width = x.shape[2:]
    low, narrow = max(1, int(height * c)), max(1, int(width * c))
    x = _round_to_eight_bits(x @ _box_matrix(width, narrow).to(x.device).T)
    x = _round_to_eight_bits(_box_matrix(height, low).to(x.device) @ x)
    rows, columns = _box_matrix(low, height).argmax(1), _box_matrix(narrow, width).argmax(1)
    return x[:, :, rows.to(x.device)][:, :, :, columns.to(x.device)]


def _round_to_eight_bits(x: Tensor) -> Tensor:
    return (x * 255).add_(0.5).floor_().div_(255)


@lru_cache(64)
def _box_matrix(before: int, after: int) -> Tensor:
    """Weights (after, before) of Pillow's box filter."""
    scale = before / after
    support = 0.5 * max(scale, 1.0)
    weights = torch.zeros(after, before, dtype=torch.float64)
    for i in range(after):
        centre = (i + 0.5) * scale
        for j in range(max(0, int(centre - support + 0.5)), min(before, int(centre + support + 0.5))):
            weights[i, j] = -0.5 < (j + 0.5 - centre) / max(scale, 1.0) <= 0.5
    return (weights / weights.sum(1, keepdim=True)).to(torch.float32)


@common("jpeg_compression", table=(80, 65, 58, 50, 40), large=(25, 18, 15, 10, 7))
def jpeg_compression(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Encode as JPEG and decode; images without three channels go channel by channel, as grey images."""
    (quality,) = params
    image = require_pillow("jpeg_compression")

    def squeeze(pixels: np.ndarray) -> np.ndarray:
        buffer = io.BytesIO()
        image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
        with image.open(buffer) as picture:
            return np.array(picture)

    eight = (x * 255).round_().to(torch.uint8).cpu()
    colour = x.shape[1] == 3
    flat = eight.permute(0, 2, 3, 1).contiguous() if colour else eight.flatten(0, 1)
    if min(x.shape[2:]) < LARGE:  # threads cost more than they save on small images
        pictures = [squeeze(pixels) for pixels in flat.numpy()]
    else:
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            pictures = list(pool.map(squeeze, flat.numpy()))
    out = torch.from_numpy(np.stack(pictures)).to(x.device)
    return (out.permute(0, 3, 1, 2) if colour else out.view(x.shape)).to(x.dtype) / 255
