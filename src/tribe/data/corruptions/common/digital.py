"""Colour, distortion and compression."""

import io
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.data.corruptions.common.filters import gaussian_matrix
from tribe.data.corruptions.families import LARGE, Draw, Params, corruption
from tribe.data.corruptions.pillow import require_pillow


@corruption("brightness", family="common", table=(0.05, 0.1, 0.15, 0.2, 0.3), large=(0.1, 0.2, 0.3, 0.4, 0.5))
def brightness(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add to the value of HSV; hue and saturation stay, so all channels grow by the same factor."""
    (c,) = params
    value = x.amax(1, keepdim=True)
    lit = (value + c).clamp_(0, 1)
    return torch.where(value > 0, x * (lit / value), lit)


@corruption("contrast", family="common", table=(0.75, 0.5, 0.4, 0.3, 0.15), large=(0.4, 0.3, 0.2, 0.1, 0.05))
def contrast(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Move every channel towards its mean."""
    (c,) = params
    mean = x.mean(-1, keepdim=True).mean(-2, keepdim=True)  # in two steps: see `tribe.core.augment`
    return (x - mean).mul_(c).add_(mean)


@corruption(
    "elastic_transform",
    family="common",
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


@corruption("pixelate", family="common", table=(0.95, 0.9, 0.85, 0.75, 0.65), large=(0.6, 0.5, 0.4, 0.3, 0.25))
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
    """Round to whole grey levels."""
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


@corruption("jpeg_compression", family="common", table=(80, 65, 58, 50, 40), large=(25, 18, 15, 10, 7))
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
