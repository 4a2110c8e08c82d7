"""Training images and their augmentation: shifts, flips, cutout, and AugMix.

Images stay on the device as bytes, and a batch of views is one gather. The views of an epoch are a function of the seed
and the epoch alone, the same on every device, so there is no random state to save.

AugMix (Hendrycks et al., ICLR 2020) mixes an image with augmented copies of itself. Every operation is an affine map of
positions or a table of 256 values for each channel, so a whole batch, each image with its own operation, takes one
resampling and one look-up a step. None of them is a corruption of the test sets.

Shapes: N images of the data set, B images a batch, C channels, H rows, W columns; V views of K chains, M = V K B.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.core import rng
from tribe.core.rng import Key
from tribe.data.datasets import Dataset

ORDER, PLACE, HOLE = 0x5452414F, 0x54524150, 0x54524148  # purposes of the draws ("TRAO", "TRAP", "TRAH" in ASCII)
CHAINS, MIXING = 0x41554D43, 0x41554D4D  # of AugMix ("AUMC", "AUMM")
OPERATIONS = (
    "autocontrast",
    "equalize",
    "posterize",
    "solarize",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
LEVELS = 10  # the highest strength of an operation
DEGREES, SHEAR, SHIFT = 30.0, 0.3, 1 / 3  # at full strength; SHIFT is a share of the width
BITS = 4  # posterize keeps this many bits at strength 0, and fewer at higher strengths
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
        """Yield batches of equal size; images left over at the end are not used in this epoch."""
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
    """Return views (B, C, H, W) of images (N, C, H, W): shift, flip, and set a square to 0."""
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
    """Return masks of squares with this side, cut off at the border: (B, 1, H, W) bool."""
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


# -- AugMix -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AugMix:
    """Draw mixtures of images; `consistency` is their loss."""

    width: int = 3  # number of chains
    depth: int = 3  # operations in a chain: 1 to this many
    severity: float = 3.0  # highest strength of an operation, out of 10
    weight: float = 12.0  # of the consistency loss; the cross entropy of the clean image has weight 1

    def __call__(self, x: Tensor, key: Key, views: int = 2) -> Tensor:
        """Return mixtures (V, B, C, H, W) float in [0, 1] of images x (B, C, H, W) uint8."""
        batch = len(x)
        u = rng.uniform(key, CHAINS, (4, self.depth, views * self.width * batch))[0]
        operation = (u[0] * len(OPERATIONS)).long()  # (depth, M): M = V K B
        level = 0.1 + u[1] * (self.severity - 0.1)
        sign = torch.where(u[2] < 0.5, -1.0, 1.0)
        length = 1 + (u[3, 0] * self.depth).long()  # (M,)
        chains = x.repeat(views * self.width, 1, 1, 1)
        for step in range(self.depth):
            after = operate(chains, operation[step], level[step], sign[step])
            chains = torch.where((step < length).view(-1, 1, 1, 1), after, chains)
        mixed = chains.float().div_(255).view(views, self.width, batch, *x.shape[1:])
        v = rng.uniform(key, MIXING, (self.width + 1, views, batch))[0]
        share = -torch.log1p(-v[: self.width])  # exponential; their shares of the sum are Dirichlet(1)
        share = (share / share.sum(0).clamp_min(torch.finfo(share.dtype).tiny)).transpose(0, 1)  # (V, K, B)
        mixed = (share[..., None, None, None] * mixed).sum(1)
        return torch.lerp(x.float().div(255).expand_as(mixed), mixed, v[-1].view(views, batch, 1, 1, 1))  # Beta(1, 1)


def consistency(*logits: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of several predictions (B, classes) of the same images: the mean over B."""
    predictions = [F.log_softmax(each.float(), -1) for each in logits]
    mean = torch.stack(predictions).exp().mean(0).clamp(1e-7, 1).log()
    divergences = [F.kl_div(mean, each, reduction="batchmean", log_target=True) for each in predictions]
    return torch.stack(divergences).mean()


def operate(x: Tensor, operation: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Apply to each image x (M, C, H, W) uint8 its own operation (M,), an index into OPERATIONS.

    The level (M,) is a strength out of 10; the sign (M,) is the direction of a geometric operation.
    """
    return _look_up(_warp(x, _matrices(operation, level, sign, x.shape[-1])), _tables(x, operation, level))


def _is(operation: Tensor, name: str) -> Tensor:
    return operation == OPERATIONS.index(name)


# --- geometry: an affine map from output to input, in pixels from the upper left corner -------------------------------


def _matrices(operation: Tensor, level: Tensor, sign: Tensor, width: int) -> Tensor:
    """Return the maps (M, 2, 3); the identity for operations on values. Rotation is about the centre."""
    nothing = torch.zeros_like(level)
    turn = torch.where(_is(operation, "rotate"), sign * _whole(level, DEGREES), nothing).deg2rad()
    shear, shift = sign * level * (SHEAR / LEVELS), sign * _whole(level, width * SHIFT)
    shear_x, shear_y = (torch.where(_is(operation, f"shear_{axis}"), shear, nothing) for axis in "xy")
    shift_x, shift_y = (torch.where(_is(operation, f"translate_{axis}"), shift, nothing) for axis in "xy")
    cos, sin, centre = turn.cos(), turn.sin(), width / 2
    first = torch.stack((cos, shear_x - sin, shift_x + centre * (1 - cos + sin)), -1)
    second = torch.stack((shear_y + sin, cos, shift_y + centre * (1 - cos - sin)), -1)
    return torch.stack((first, second), 1)


def _whole(level: Tensor, most: float) -> Tensor:
    return (level * (most / LEVELS)).floor()


def _warp(x: Tensor, matrix: Tensor) -> Tensor:
    """Resample x (M, C, H, W) uint8 bilinearly; black where the map leaves the image."""
    height, width = x.shape[-2:]
    across, down = (torch.arange(size, device=x.device) + 0.5 for size in (width, height))
    a, b, c = matrix[..., None, None].unbind(2)  # (M, 2, 1, 1) each; matrix products are less precise on some GPUs
    source = (a * across + b * down[:, None] + c).permute(0, 2, 3, 1)  # (M, H, W, 2)
    size = source.new_tensor((width, height))
    inside = ((source >= 0) & (source < size)).all(-1)
    y = F.grid_sample(x.float(), source / size * 2 - 1, "bilinear", "border", align_corners=False)
    return (y * inside[:, None]).round_().to(torch.uint8)


# --- values: a table for each image and channel -----------------------------------------------------------------------


def _tables(x: Tensor, operation: Tensor, level: Tensor) -> Tensor:
    """Return the tables (M, C, 256) uint8; the identity for operations on positions."""
    values = torch.arange(256, device=x.device)
    count = _histogram(x)
    bits = 8 - BITS + _whole(level, BITS).long()[:, None, None]
    threshold = 256 - _whole(level, 256)[:, None, None]
    tables = {
        "autocontrast": _autocontrast(count, values),
        "equalize": _equalize(count, values),
        "posterize": (values >> bits) << bits,
        "solarize": torch.where(values < threshold, values, 255 - values),
    }
    table = values.expand_as(count)
    for name, other in tables.items():
        table = torch.where(_is(operation, name)[:, None, None], other, table)
    return table.to(torch.uint8)


def _histogram(x: Tensor) -> Tensor:
    """Count how often each value occurs in each channel, (M, C, 256)."""
    values = x.flatten(2).long()
    return torch.zeros(*values.shape[:2], 256, dtype=torch.long, device=x.device).scatter_add_(
        2, values, torch.ones_like(values)
    )


def _autocontrast(count: Tensor, values: Tensor) -> Tensor:
    """Stretch the values of a channel to 0 to 255; a channel with one value stays."""
    present = count > 0
    low = torch.where(present, values, 255).amin(-1, keepdim=True)
    high = torch.where(present, values, 0).amax(-1, keepdim=True)
    stretched = ((values - low) * 255 // (high - low).clamp_min(1)).clamp(0, 255)
    return torch.where(high > low, stretched, values)


def _equalize(count: Tensor, values: Tensor) -> Tensor:
    """Equalise the histogram, as Pillow does."""
    total = count.cumsum(-1)
    highest = torch.where(count > 0, values, 0).amax(-1, keepdim=True)
    step = (total[..., -1:] - count.gather(-1, highest)) // 255
    below = total - count
    equalized = ((below + step // 2) // step.clamp_min(1)).clamp(0, 255)
    return torch.where(step > 0, equalized, values)


def _look_up(x: Tensor, table: Tensor) -> Tensor:
    return table.gather(2, x.flatten(2).long()).view_as(x)
