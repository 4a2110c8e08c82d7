"""Weather: a layer of snow, frost or fog over the image."""

import math
from functools import lru_cache
from importlib import resources

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.data.corruptions.common.filters import blur_along_line, zoom_matrix
from tribe.data.corruptions.families import LARGE, Draw, Params, corruption
from tribe.data.corruptions.pillow import require_pillow


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


@corruption(
    "frost",
    family="common",
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


@corruption(
    "fog",
    family="common",
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
