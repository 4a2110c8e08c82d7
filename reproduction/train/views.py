"""Training images and their views: shifted, flipped, with a square cut out.

Images stay on the device as bytes, and a batch of views is one gather. The views of an epoch are a function of the seed
and the epoch alone, the same on every device, so there is no random state to save.

Shapes: N images of the data set, B images a batch, C channels, H rows, W columns.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tribe.core import rng
from tribe.core.rng import Key
from tribe.data.datasets import Dataset

ORDER, PLACE, HOLE = 0x5452414F, 0x54524150, 0x54524148  # purposes of the draws ("TRAO", "TRAP", "TRAH" in ASCII)
CHUNK = 2000  # images read at once

Border = Literal["reflect", "zero"]


class Images(NamedTuple):
    """All images and labels of a data set, in memory."""

    pixels: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64

    def to(self, device: torch.device) -> "Images":
        """Copy to a device."""
        return Images(self.pixels.to(device), self.labels.to(device))


def read_images(dataset: Dataset) -> Images:
    """Read all domains of a data set into memory."""
    pixels, labels = [], []
    for domain in dataset.domains:
        y = dataset.labels(domain)
        if len(y) and int(y.min()) < 0:
            raise ValueError(f"some images of domain {domain!r} have no label; training needs one for each")
        labels.append(y)
        for index in torch.arange(len(y)).split(CHUNK):
            pixels.append(dataset.images(domain, index).mul(255).round_().to(torch.uint8))
    if not pixels:
        raise ValueError("the data set is empty")
    return Images(torch.cat(pixels), torch.cat(labels))


class Views(NamedTuple):
    """The views of an epoch: the order of the images, and how each is shifted and flipped."""

    order: Tensor  # (N,) int64
    dx: Tensor  # (N,) int64, pixels that the window moves to the right
    dy: Tensor  # (N,) int64, pixels that it moves down
    flip: Tensor  # (N,) bool
    hole: Tensor  # (N, 2) float32, centre of the square that is cut out: shares of height and width

    def batches(self, size: int) -> "Iterator[Views]":
        """Batches of equal size; what is left over at the end is not used in this epoch."""
        for start in range(0, len(self.order) - size + 1, size):
            yield Views(*(column[start : start + size] for column in self))


def draw_views(count: int, shift: int, flip: bool, seed: int, epoch: int, device: torch.device) -> Views:
    """Draw the views of an epoch of ``count`` images."""
    key = Key(torch.tensor([seed], device=device), torch.tensor([epoch], device=device))
    order = rng.bits(key, ORDER, count)[0].argsort(stable=True)
    u = rng.uniform(key, PLACE, (3, count))[0]
    dx, dy = (u[:2] * (2 * shift + 1)).long() - shift
    return Views(order, dx, dy, (u[2] < 0.5) & flip, rng.uniform(key, HOLE, (count, 2))[0])


def crop(pixels: Tensor, views: Views, border: Border, cutout: int = 0) -> Tensor:
    """The views (B, C, H, W) of images (N, C, H, W): shift, flip, and set a square to 0."""
    channels, height, width = pixels.shape[1:]
    rows = views.dy[:, None] + torch.arange(height, device=pixels.device)  # (B, H)
    columns = torch.arange(width, device=pixels.device).expand(len(views.flip), -1)
    columns = views.dx[:, None] + torch.where(views.flip[:, None], width - 1 - columns, columns)  # (B, W)
    y = pixels[
        views.order[:, None, None, None],
        torch.arange(channels, device=pixels.device)[None, :, None, None],
        _reflect(rows, height)[:, None, :, None],
        _reflect(columns, width)[:, None, None, :],
    ]
    if border == "zero":
        within = _within(rows, height)[:, None, :, None] & _within(columns, width)[:, None, None, :]
        y = y * within
    if cutout:
        y = y * ~_squares(views.hole, cutout, height, width)
    return y


def _squares(centre: Tensor, side: int, height: int, width: int) -> Tensor:
    """Masks of squares with this side, cut off at the border: (B, 1, H, W) bool."""
    first = (centre * torch.tensor([height, width], device=centre.device)).long() - side // 2  # (B, 2)
    rows, columns = (
        torch.arange(size, device=centre.device) - start[:, None]
        for size, start in zip((height, width), first.unbind(1), strict=True)
    )
    return (_within(rows, side)[:, :, None] & _within(columns, side)[:, None, :]).unsqueeze(1)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Reflect positions outside the image at the first and last pixel, which are not repeated."""
    last = size - 1
    return (last - (last - position.abs()).abs()).clamp_(0, last)


def _within(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)
