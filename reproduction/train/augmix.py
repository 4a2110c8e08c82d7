"""AugMix: mix an image with augmented copies of itself, and train for the same prediction on all of them.

Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty", ICLR 2020. Every
operation is an affine map of positions or a table of 256 values for each channel. So a whole batch, each image with
its own operation, takes one resampling and one look-up a step. None of them is a corruption of the test sets.

Shapes: M images, C channels, H rows, W columns; V views of K chains of B images.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.core import rng
from tribe.core.rng import Key

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
CHAINS, MIXING = 0x41554D43, 0x41554D4D  # purposes of the draws ("AUMC", "AUMM" in ASCII)
LEVELS = 10  # the highest strength of an operation
DEGREES, SHEAR, SHIFT = 30.0, 0.3, 1 / 3  # at full strength; SHIFT is a share of the width
BITS = 4  # posterize keeps this many bits at strength 0, and fewer at higher strengths


@dataclass(frozen=True)
class AugMix:
    """Call the object with images and a key to draw mixtures; `consistency` is their loss."""

    width: int = 3  # number of chains
    depth: int = 3  # operations in a chain: 1 to this many
    severity: float = 3.0  # highest strength of an operation, out of 10
    weight: float = 12.0  # of the consistency loss; the cross entropy of the clean image has weight 1

    def __post_init__(self) -> None:
        if min(self.width, self.depth) < 1:
            raise ValueError(f"AugMix needs width and depth of at least 1; got {self.width} and {self.depth}")
        if not 0.1 <= self.severity <= LEVELS or self.weight < 0:
            raise ValueError(
                f"AugMix needs a severity from 0.1 to {LEVELS} and a weight of at least 0; got {self.severity} and "
                f"{self.weight}"
            )

    def __call__(self, x: Tensor, key: Key, views: int = 2) -> Tensor:
        """Mixtures (V, B, C, H, W) float in [0, 1] of images x (B, C, H, W) uint8."""
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
    """Jensen-Shannon divergence of several predictions (B, classes) of the same images, averaged over the images."""
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
    """The maps (M, 2, 3); the identity for operations on values. Rotation is about the centre."""
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
    """The tables (M, C, 256) uint8; the identity for operations on positions."""
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
    """How often each value occurs in each channel, (M, C, 256)."""
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
