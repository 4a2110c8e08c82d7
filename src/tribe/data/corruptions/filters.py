"""Filters that several corruptions use."""

import math
from functools import lru_cache

import torch
from torch import Tensor


def pad(x: Tensor, margin: int, mode: str) -> Tensor:
    """Pad all four sides by the margin, which may be larger than the image: "reflect" (edge once) or "replicate"."""
    height, width = x.shape[2:]
    rows, columns = (fold_positions(torch.arange(-margin, s + margin), s, mode).to(x.device) for s in (height, width))
    return x.index_select(2, rows).index_select(3, columns)


def fold_positions(place: Tensor, size: int, mode: str) -> Tensor:
    """Map positions outside 0..size-1 to the edge, or mirror them at ("reflect") or behind ("symmetric") the edge."""
    if mode == "replicate":
        return place.clamp(0, size - 1)
    if mode == "reflect":
        place = place.remainder(2 * size - 2)
        return torch.minimum(place, 2 * size - 2 - place)
    place = place.remainder(2 * size)
    return torch.minimum(place, 2 * size - 1 - place)


def gaussian_weights(sd: float, reach: int) -> list[float]:
    """Weights of a Gaussian at -reach..reach; their sum is 1."""
    weights = [math.exp(-0.5 * (i / sd) ** 2) if sd else float(i == 0) for i in range(-reach, reach + 1)]
    total = sum(weights)
    return [w / total for w in weights]


def gaussian_blur(x: Tensor, sd: float) -> Tensor:
    """Gaussian blur, cut at 4 sd, the edge repeated."""
    reach = int(4 * sd + 0.5)
    if reach == 0:
        return x
    weights = gaussian_weights(sd, reach)
    x = pad(x, reach, "replicate")
    for dim in (2, 3):
        size = x.shape[dim] - 2 * reach
        out = torch.zeros_like(x.narrow(dim, 0, size))
        for i, weight in enumerate(weights):
            out.add_(x.narrow(dim, i, size), alpha=weight)
        x = out
    return x


@lru_cache(32)
def gaussian_matrix(size: int, sd: float) -> Tensor:
    """Gaussian blur along an axis as a matrix (size, size): cut at 3 sd, mirrored behind the edge."""
    reach = int(3 * sd + 0.5)
    place = fold_positions(torch.arange(size)[:, None] + torch.arange(-reach, reach + 1), size, "symmetric")
    weights = torch.tensor(gaussian_weights(sd, reach), dtype=torch.float64).expand(place.shape)
    return torch.zeros(size, size, dtype=torch.float64).scatter_add_(1, place, weights).to(torch.float32)


def blur_along_line(x: Tensor, radius: float, sd: float, degrees: Tensor) -> Tensor:
    """Average along a line that starts at each pixel, as ImageMagick's motion blur; `degrees` (N,)."""
    n, c, height, width = x.shape
    taps = 2 * math.ceil(radius) + 1
    weights = [math.exp(-(i**2) / (2 * sd**2)) for i in range(taps)]
    weights = [w for w in weights if w > 1e-5]  # the others together change a grey level by less than a hundredth
    total, reach = sum(weights), len(weights)
    weights = [w / total for w in weights]
    step = torch.arange(reach, device=x.device, dtype=torch.float64)
    angle = degrees.to(torch.float64).deg2rad()[:, None]
    dy, dx = ((step * f - 0.5).ceil().to(torch.int64) for f in (angle.sin(), angle.cos()))  # (N, taps)
    x = pad(x, reach, "replicate")
    stride = width + 2 * reach
    rows = torch.arange(reach, reach + height, device=x.device)[:, None]
    start = (rows * stride + torch.arange(reach, reach + width, device=x.device)).flatten()  # (P,)
    flat = x.flatten(2)
    out = x.new_zeros(n, c, height * width)
    for weight, shift in zip(weights, (dy * stride + dx).unbind(1), strict=True):
        index = (start + shift[:, None])[:, None].expand(n, c, height * width)
        out.add_(flat.gather(2, index), alpha=weight)
    return out.view(n, c, height, width)


@lru_cache(256)
def zoom_matrix(size: int, factor: float) -> Tensor:
    """Cut out the centre, enlarge it with linear interpolation, cut to size: (size, size), from old to new pixels."""
    cut = math.ceil(size / factor)
    start = (size - cut) // 2
    grown = round(cut * factor)
    skip = (grown - size) // 2
    place = torch.arange(skip, skip + size, dtype=torch.float64) * ((cut - 1) / max(grown - 1, 1))
    source = torch.arange(size, dtype=torch.float64) - start
    return (1 - (place[:, None] - source).abs()).clamp_(min=0).to(torch.float32)
