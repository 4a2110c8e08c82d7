"""A colour picture that needs no licence: a landscape, drawn from a few formulas, for the gallery of corruptions."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Picture = NDArray[np.float64]


def landscape(size: int = 224) -> Tensor:
    """The picture (3, size, size) in [0, 1]; drawn four times as large and averaged, so that its edges are smooth."""
    fine = 4 * size
    y, x = np.mgrid[0:fine, 0:fine] / fine
    draw = np.random.default_rng(3)
    picture = sky(x, y, draw)
    ridge = 0.42 - 0.16 * np.exp(-(((x - 0.3) / 0.16) ** 2)) - 0.1 * np.exp(-(((x - 0.72) / 0.2) ** 2))
    ridge = ridge + 0.012 * waves(x, draw, 9, 60)
    rock = np.stack([0.36 + 0 * x, 0.40 + 0 * x, 0.50 + 0 * x]) + 0.08 * smooth(draw, fine, 40)
    snow = (y < 0.36 + 0.02 * waves(x, draw, 20, 60)) & (y > ridge)
    picture = np.where(y > ridge, rock, picture)
    picture = np.where(snow, np.array([0.93, 0.95, 0.98])[:, None, None], picture)
    meadow = 0.56 + 0.02 * np.sin(7 * x) + 0.004 * waves(x, draw, 40, 120)
    grass = np.stack([0.28 + 0 * x, 0.52 + 0 * x, 0.20 + 0 * x]) + 0.16 * smooth(draw, fine, 90) - 0.2 * (y - 0.7)
    picture = np.where(y > meadow, grass, picture)
    picture = fence(picture, x, y)
    picture = tree(picture, x, y, draw, fine)
    picture = house(picture, x, y)
    tiles = picture.clip(0, 1).reshape(3, size, 4, size, 4).mean((2, 4))
    return torch.from_numpy(tiles).float()


def sky(x: Picture, y: Picture, draw: np.random.Generator) -> Picture:
    """Blue that fades downwards, clouds, and a sun."""
    blue = np.stack([0.35 + 0.5 * y, 0.60 + 0.4 * y, 0.92 + 0.05 * y])
    cloud = np.clip(3 * smooth(draw, len(x), 7) + 1.5 * smooth(draw, len(x), 18) - 0.2, 0, 1)
    cloud = cloud * np.clip(1 - 2.5 * y, 0, 1)
    far = np.hypot(x - 0.84, y - 0.14)
    sun = np.clip((0.075 - far) * 80, 0, 1)
    glow = 0.35 * np.exp(-far / 0.12)
    picture = blue + (0.97 - blue) * cloud
    picture = picture + glow * np.array([1.0, 0.9, 0.4])[:, None, None]
    return picture * (1 - sun) + sun * np.array([1.0, 0.93, 0.55])[:, None, None]


def house(picture: Picture, x: Picture, y: Picture) -> Picture:
    """White walls, a red roof, a door and two windows with bars."""
    parts = [
        ((0.95, 0.92, 0.84), (abs(x - 0.66) < 0.15) & (y > 0.55) & (y < 0.80)),
        ((0.72, 0.20, 0.15), (y > 0.40) & (y < 0.56) & (abs(x - 0.66) < (y - 0.40) * 1.1 + 0.005)),
        ((0.55, 0.15, 0.12), (abs(x - 0.75) < 0.02) & (y > 0.42) & (y < 0.50)),
        ((0.40, 0.25, 0.14), (abs(x - 0.66) < 0.032) & (y > 0.66) & (y < 0.80)),
    ]
    for centre in (0.575, 0.745):
        pane = (abs(x - centre) < 0.035) & (abs(y - 0.66) < 0.04)
        bar = pane & ((abs(x - centre) < 0.005) | (abs(y - 0.66) < 0.005))
        parts += [((0.30, 0.48, 0.66), pane), ((0.98, 0.98, 0.98), bar)]
    for colour, where in parts:
        picture = np.where(where, np.array(colour)[:, None, None], picture)
    return picture


def tree(picture: Picture, x: Picture, y: Picture, draw: np.random.Generator, fine: int) -> Picture:
    """A trunk and a crown of uneven green."""
    trunk = (abs(x - 0.22) < 0.018 + 0.02 * np.clip(y - 0.74, 0, 1)) & (y > 0.55) & (y < 0.86)
    picture = np.where(trunk, np.array([0.36, 0.24, 0.15])[:, None, None], picture)
    crown = np.hypot((x - 0.22) / 1.0, (y - 0.47) / 1.15) < 0.15 + 0.05 * smooth(draw, fine, 24)
    green = np.stack([0.12 + 0 * x, 0.36 + 0 * x, 0.12 + 0 * x]) + 0.3 * smooth(draw, fine, 60) + 0.25 * (0.5 - y)
    return np.where(crown, green, picture)


def fence(picture: Picture, x: Picture, y: Picture) -> Picture:
    """Thin posts and rails: fine detail, which blur and compression lose first."""
    wood = np.array([0.62, 0.50, 0.36])[:, None, None]
    post = (abs((x * 22) % 1 - 0.5) < 0.13) & (y > 0.82) & (y < 0.94)
    rail = (abs(y - 0.855) < 0.007) | (abs(y - 0.905) < 0.007)
    return np.where(post | rail, wood, picture)


def smooth(draw: np.random.Generator, fine: int, cells: int) -> Picture:
    """Smooth noise around 0, (fine, fine): random numbers on a grid of cells, interpolated."""
    grid = torch.from_numpy(draw.normal(size=(1, 1, cells, cells)))
    large = torch.nn.functional.interpolate(grid, (fine, fine), mode="bicubic", align_corners=True)
    return np.asarray(large[0, 0].numpy()) * 0.35


def waves(x: Picture, draw: np.random.Generator, low: float, high: float) -> Picture:
    """A sum of waves with random phases, around 0."""
    numbers = draw.uniform(low, high, 8)
    return np.asarray(sum(np.sin(n * x + p) for n, p in zip(numbers, draw.uniform(0, 6.3, 8), strict=True)) / 3)
