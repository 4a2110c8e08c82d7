"""Faults of a camera, seen in the images themselves: black, white, flat, noise, outside [0, 1], frozen, blurred.

A few moments of every image decide, before and without the network. No threshold fires on the data
sets of the paper. `judge` is a pure function over rows with a state of fixed size; it does not synchronise.
"""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.core.bounds import COUNT

GRID = 8  # rows and columns of the small picture that a state keeps of the last frame
LEAST = 8  # pixels on a side that an image needs for the tests of noise and blur
TINY = 1e-12  # keeps the divisions of a constant image finite


@dataclass(frozen=True)
class FrameRules:
    """The thresholds of `judge`, each with what was measured on real images; grey is the mean over channels.

    Real: CIFAR-10-C, CIFAR-100-C and MNIST-C at severity 5, clean images, and ImageNet photos, clean and corrupted.
    """

    flat: float = 0.0025  # standard deviation of grey, 0.6 of 255 levels; CIFAR's images have at least 0.0033
    dark: float = 0.04  # a pixel is dark below this grey and bright above one minus it
    share: float = 0.99  # of pixels, for a black or white frame; real images have at most 0.966 dark pixels
    lamps: float = 0.03  # standard deviation of grey from which a dark frame shows lamps, or other small bright things
    deviations: float = 4.0  # noise has no more structure than white noise, by so many standard deviations
    blur: float = 0.7  # detail, where 1 is one wave across the image; defocused seas and skies have it, too ...
    blurred: int = 32  # ... so that it takes as many frames in a row: at most 46 % of a class, at severity 5, are below
    margin: float = 0.3  # outside [0, 1]; sharp resizing overshoots by 0.15, normalised images reach -2
    patience: int = 4  # frames in a row that make noise, white or flat a fault: single real images look like each
    still: int = 10  # equal frames in a row that make a frozen camera; a slow camera may deliver each frame twice
    tolerance: float = 1 / 4096  # greatest change of a frozen picture; sensor noise of 0.5 % changes it more


class Moments(NamedTuple):
    """The measurements of every image, (S, B) each."""

    mean: Tensor  # mean grey, the mean over channels
    std: Tensor  # standard deviation of grey
    low: Tensor  # the smallest value of any channel
    high: Tensor  # the largest value of any channel
    dark: Tensor  # share of dark pixels
    bright: Tensor  # share of bright pixels
    sharpness: Tensor  # mean absolute difference of neighbouring pixels
    detail: Tensor  # squared differences of neighbours relative to the variance: 1 for one wave across the image
    # standard deviations from white noise: the largest of tests of rows, of columns and of 8 x 8 blocks
    structure: Tensor
    picture: Tensor  # grey in 8 x 8 blocks: the mean of the block and of the pixel in its middle


class FrameState(NamedTuple):
    """The last frame of every stream."""

    last: Tensor  # (S, 66) the picture in 8 x 8 blocks, the standard deviation of grey, and sharpness
    # (S, 5) int64, how many frames in a row are white, flat, noise, blurred and equal to the one before
    runs: Annotated[Tensor, COUNT]

    @property
    def grey(self) -> Tensor:
        """The mean grey of the last frame (S,)."""
        return self.last[:, : GRID * GRID].mean(1)


class Verdict(NamedTuple):
    """The images (S, B) that show each fault."""

    black: Tensor  # nearly all pixels are dark, and fewer than about one in 1,000 is white
    white: Tensor  # nearly all pixels are bright, for several frames
    flat: Tensor  # all pixels have nearly the same grey, for several frames
    noise: Tensor  # no more structure than white noise, for several frames
    outside: Tensor  # a value is outside [0, 1] by far: 0 to 255, or normalised already
    frozen: Tensor  # equal to the frame before, for several frames
    blurred: Tensor  # hardly more than a gradient, for many frames

    @property
    def teaches_nothing(self) -> Tensor:
        """The images (S, B) that a method must not learn from: all faults but blur, which methods adapt to."""
        return torch.stack((self.black, self.white, self.flat, self.noise, self.outside, self.frozen)).any(0)


def start_frames(streams: int, device: torch.device | str | None = None) -> FrameState:
    """The state before the first frame; no frame equals it."""
    none = torch.full((streams, GRID * GRID + 2), -1.0, device=device)
    return FrameState(none, torch.zeros(streams, 5, dtype=torch.int64, device=device))


@torch.no_grad()
def measure(x: Tensor, rules: FrameRules) -> Moments:
    """Measure images (S, B, C, H, W); other inputs (S, B, ...) have neither detail nor structure that can be judged."""
    lead = x.shape[:2]
    low, high = x.flatten(2).aminmax(dim=2)
    picture = x.dim() == 5 and min(x.shape[3:]) >= LEAST
    grey = (x.mean(2, dtype=torch.float32) if picture else x.float().flatten(2).unsqueeze(2)).flatten(0, 1)  # (n, H, W)
    std, mean = torch.std_mean(grey, (1, 2), correction=0)
    dark, bright = (mask.float().mean((1, 2)) for mask in (grey < rules.dark, grey > 1 - rules.dark))
    if picture:
        sharpness, detail, structure, blocks = _texture(grey, std)
        pixels = F.interpolate(grey.unsqueeze(1), (GRID, GRID), mode="nearest-exact")  # those in the middles of blocks
        sample = (blocks + pixels) / 2  # what moves is seen in blocks, the noise of a sensor in pixels
    else:
        sharpness = (grey[:, 0, 1:] - grey[:, 0, :-1]).abs().sum(1)
        detail = structure = torch.full_like(std, math.inf)
        sample = F.adaptive_avg_pool1d(grey, GRID * GRID)
    ends = low.float().flatten(), high.float().flatten()
    flat = (mean, std, *ends, dark, bright, sharpness, detail, structure, sample.flatten(1))  # (S * B, ...) each
    return Moments(*(t.unflatten(0, lead) for t in flat))


def _texture(grey: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sharpness, detail, structure (n,) and the blocks (n, 1, 8, 8) of grey images (n, H, W).

    White noise: the correlation of neighbours in a row is normal with variance 1 / (H W), that in a column likewise, so
    that their mean has half of it. The variance of the means of blocks is chi-square; the Wilson-Hilferty formula makes
    it normal, too.
    """
    height, width = grey.shape[1:]
    across, down = grey[:, :, 1:] - grey[:, :, :-1], grey[:, 1:] - grey[:, :-1]
    sharpness = (across.abs().mean((1, 2)) + down.abs().mean((1, 2))) / 2
    variance = std.square().clamp_min_(TINY)
    alike = 1 - torch.stack([t.square_().mean((1, 2)) for t in (across, down)]) / (2 * variance)  # correlations (2, n)
    together = alike.mean(0)
    side = max(2, height // GRID), max(2, width // GRID)
    blocks = F.avg_pool2d(grey.unsqueeze(1), side)
    spread = 2 / (9 * (blocks[0].numel() - 1))
    ratio = blocks.var((1, 2, 3)) / variance * (side[0] * side[1])  # 1 for white noise
    of_blocks = ratio.pow_(1 / 3).sub_(1 - spread).div_(math.sqrt(spread))
    of_neighbours = torch.maximum(alike.abs().amax(0), math.sqrt(2) * together)  # stripes have -1 in one direction
    structure = torch.maximum(of_neighbours.mul_(math.sqrt(height * width)), of_blocks)
    detail = (1 - together) * (height * width / (2 * math.pi**2))
    means = blocks if blocks.shape[2:] == (GRID, GRID) else F.adaptive_avg_pool2d(blocks, GRID)
    return sharpness, detail, structure, means


@torch.no_grad()
def judge(rules: FrameRules, state: FrameState, x: Tensor, valid: Tensor) -> tuple[Verdict, FrameState]:
    """Judge images (S, B, ...) of which ``valid`` (S, B) count: the faults, and the next state."""
    moments = measure(x, rules)
    real = valid & (moments.mean.abs() < math.inf)  # a frame that is not finite leaves no trace
    outside = ~((moments.low >= -rules.margin) & (moments.high <= 1 + rules.margin))
    inside = real & ~outside
    black = (moments.dark >= rules.share) & (moments.std < rules.lamps)
    even = moments.std < rules.flat
    before, newest = _previous(real)  # places in the trail: 0 is the frame before the batch
    here = torch.cat((moments.picture, moments.std.unsqueeze(2), moments.sharpness.unsqueeze(2)), 2)
    trail = torch.cat((state.last.unsqueeze(1), here), 1)  # (S, 1 + B, 66)
    earlier = trail.gather(1, before.unsqueeze(2).expand_as(here))
    marks = (
        moments.bright >= rules.share,
        even,
        (moments.structure < rules.deviations) & ~even,
        (moments.detail < rules.blur) & ~(even | black),
        (here - earlier).abs_().amax(2) <= rules.tolerance,
    )
    runs = _runs(state.runs, torch.stack(marks, 1), real)  # (S, 5, B)
    white, flat, noise = (inside.unsqueeze(1) & (runs[:, :3] >= rules.patience)).unbind(1)
    verdict = Verdict(
        black=inside & black,
        white=white,
        flat=flat & ~black,
        noise=noise,
        outside=valid & outside,
        frozen=real & (runs[:, 4] >= rules.still),
        blurred=inside & (runs[:, 3] >= rules.blurred),
    )
    last = trail.gather(1, newest[:, None, None].expand_as(trail[:, :1]))[:, 0]
    return verdict, FrameState(last, runs[:, :, -1])


def _previous(real: Tensor) -> tuple[Tensor, Tensor]:
    """For every place (S, B) the last real frame before it, and the last of all (S,): 0 is the one before the batch."""
    place = torch.arange(1, real.shape[1] + 1, device=real.device)
    latest = (place * real).cummax(1).values
    return F.pad(latest[:, :-1], (1, 0)), latest[:, -1]


def _runs(before: Tensor, marked: Tensor, real: Tensor) -> Tensor:
    """Count the marked real frames in a row up to each place, of n kinds (S, n, B); ``before`` (S, n): at first."""
    count = real.cumsum(1).unsqueeze(1)
    broken = real.unsqueeze(1) & ~marked
    return count - torch.where(broken, count, -before.unsqueeze(2)).cummax(2).values
