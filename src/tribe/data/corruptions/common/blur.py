"""Blur: each pixel becomes a mean of pixels near it."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.data.corruptions.common.filters import blur_along_line, gaussian_blur, gaussian_weights, pad, zoom_matrix
from tribe.data.corruptions.families import Draw, Params, corruption


@corruption(
    "defocus_blur",
    family="common",
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


@corruption(
    "glass_blur",
    family="common",
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


@corruption(
    "motion_blur",
    family="common",
    table=((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sd
    large=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
)
def motion_blur(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Average along a random direction."""
    radius, sd = params
    return blur_along_line(x, radius, sd, draw.uniform().mul_(90).sub_(45))


@corruption(
    "zoom_blur",
    family="common",
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
