"""Faults of a camera, seen in the images themselves: black, white, flat, noise, outside [0, 1], frozen, blurred.

A few moments of every image decide, before and without the network. No threshold fires on the data
sets of the paper. `judge` is a pure function over rows with a state of fixed size; it does not synchronise.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.fields import document, is_number, is_whole, require

GRID = 8  # rows and columns of the small picture that a state keeps of the last frame
LEAST = 8  # pixels on a side that an image needs for the tests of noise and blur
TINY = 1e-12  # keeps the divisions of a constant image finite


@dataclass(frozen=True)
class FrameRules:
    """The thresholds of `judge`, each with what was measured on real images; grey is the mean over channels.

    "Real images" are CIFAR-10-C, CIFAR-100-C and MNIST-C at severity 5, the clean images, and ImageNet photos, clean
    and corrupted.
    """

    flat: float = 0.0025  # standard deviation of grey, 0.6 of 255 levels; CIFAR's images have at least 0.0033
    dark: float = 0.04  # a pixel is dark below this grey and bright above one minus it
    share: float = 0.99  # of pixels, for a black or white frame; real images have at most 0.966 dark pixels
    deviations: float = 4.0  # noise has no more structure than white noise, by so many standard deviations
    blur: float = 0.7  # detail, where 1 is one wave across the image; defocused seas and skies have it, too ...
    blurred: int = 32  # ... so that it takes as many frames in a row: at most 46 % of a class, at severity 5, are below
    margin: float = 0.3  # outside [0, 1]; sharp resizing overshoots by 0.15, normalised images reach -2
    patience: int = 4  # frames in a row that make noise, white or flat a fault: single real images look like each
    still: int = 10  # equal frames in a row that make a frozen camera; a slow camera may deliver each frame twice
    tolerance: float = 1 / 4096  # greatest change of a frozen picture; sensor noise of 0.5 % changes it more

    def __post_init__(self) -> None:
        for name in ("flat", "dark", "deviations", "blur", "margin", "tolerance"):
            value = getattr(self, name)
            require(is_number(value) and value >= 0, f"{name} of FrameRules is a number, at least 0", value)
        require(is_number(self.share) and 0 < self.share <= 1, "share of FrameRules is above 0, at most 1", self.share)
        for name in ("patience", "still", "blurred"):
            value = getattr(self, name)
            require(is_whole(value, least=1), f"{name} of FrameRules is a whole number, at least 1", value)


class Moments(NamedTuple):
    """What is measured of every image, (S, B) each."""

    mean: Tensor
    std: Tensor
    low: Tensor
    high: Tensor
    dark: Tensor
    bright: Tensor
    sharpness: Tensor
    detail: Tensor
    structure: Tensor
    picture: Tensor  # (S, B, 64)


document(
    Moments,
    mean="Mean grey, the mean over channels.",
    std="Standard deviation of grey.",
    low="The smallest value of any channel.",
    high="The largest value of any channel.",
    dark="Share of dark pixels.",
    bright="Share of bright pixels.",
    sharpness="Mean absolute difference of neighbouring pixels.",
    detail="Squared differences of neighbours relative to the variance: 1 for one wave across the image.",
    structure="Standard deviations above white noise: the larger of two tests, of neighbours and of 8 x 8 blocks.",
    picture="Grey in 8 x 8 blocks.",
)


class FrameState(NamedTuple):
    """What is kept of the last frame of every stream."""

    picture: Tensor  # (S, 64)
    std: Tensor  # (S,)
    sharpness: Tensor  # (S,)
    still: Tensor  # (S,) int64, how many frames in a row equal the one before
    flat: Tensor  # (S,) int64, how many frames in a row are flat
    noise: Tensor  # (S,) int64, how many frames in a row are noise
    white: Tensor  # (S,) int64, how many frames in a row are white
    blurred: Tensor  # (S,) int64, how many frames in a row have no detail


class Verdict(NamedTuple):
    """Which images (S, B) show which fault."""

    black: Tensor
    white: Tensor
    flat: Tensor
    noise: Tensor
    outside: Tensor
    frozen: Tensor
    blurred: Tensor

    @property
    def teaches_nothing(self) -> Tensor:
        """Which images (S, B) a method must not learn from: all faults but blur, which methods adapt to."""
        return self.black | self.white | self.flat | self.noise | self.outside | self.frozen


document(
    Verdict,
    black="Nearly all pixels are dark.",
    white="Nearly all pixels are bright, for several frames.",
    flat="All pixels have nearly the same grey, for several frames.",
    noise="No more structure than white noise, for several frames.",
    outside="A value is outside [0, 1] by far: 0 to 255, or normalised already.",
    frozen="Equal to the frame before, for several frames.",
    blurred="Hardly more than a gradient, for many frames.",
)


def start_frames(streams: int, device: torch.device | str | None = None) -> FrameState:
    """The state before the first frame; no frame equals it."""
    count = torch.zeros(streams, dtype=torch.int64, device=device)
    none = torch.full((streams,), -1.0, device=device)
    runs = (count.clone() for _ in range(5))
    return FrameState(none[:, None].repeat(1, GRID * GRID), none, none.clone(), *runs)


@torch.no_grad()
def measure(x: Tensor, rules: FrameRules) -> Moments:
    """Measure images (S, B, C, H, W); other inputs (S, B, ...) have neither detail nor structure that can be judged."""
    lead = x.shape[:2]
    low, high = x.flatten(2).aminmax(dim=2)
    picture = x.dim() == 5 and min(x.shape[3:]) >= LEAST
    grey = (x.mean(2, dtype=torch.float32) if picture else x.float().flatten(2).unsqueeze(2)).flatten(0, 1)  # (n, H, W)
    std, mean = torch.std_mean(grey, (1, 2), correction=0)
    pixels = grey.shape[1] * grey.shape[2]
    dark, bright = ((mask.sum((1, 2)) / pixels) for mask in (grey < rules.dark, grey > 1 - rules.dark))
    if picture:
        sharpness, detail, structure, blocks = _texture(grey, std)
    else:
        sharpness = (grey[:, 0, 1:] - grey[:, 0, :-1]).abs().sum(1)
        detail = structure = torch.full_like(std, math.inf)
        blocks = F.adaptive_avg_pool1d(grey, GRID * GRID)
    ends = low.float().flatten(), high.float().flatten()
    flat = (mean, std, *ends, dark, bright, sharpness, detail, structure, blocks.flatten(1))  # (S * B, ...) each
    return Moments(*(t.unflatten(0, lead) for t in flat))


def _texture(grey: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sharpness, detail, structure (n,) and the blocks of grey images (n, H, W).

    White noise: the correlation of neighbours is normal with variance 1 / (2 H W), and the variance of the means of
    blocks is chi-square. The Wilson-Hilferty formula makes the second normal, too.
    """
    height, width = grey.shape[1:]
    steps = [grey[:, :, 1:] - grey[:, :, :-1], grey[:, 1:] - grey[:, :-1]]
    squares = [step.square().mean((1, 2)) for step in steps]
    sharpness = (steps[0].abs().mean((1, 2)) + steps[1].abs().mean((1, 2))) / 2
    variance = std.square().clamp_min(TINY)
    rough = (squares[0] + squares[1]) / (4 * variance)  # 1 minus the correlation of neighbours
    side = max(2, height // GRID), max(2, width // GRID)
    blocks = F.avg_pool2d(grey.unsqueeze(1), side)
    spread = 2 / (9 * (blocks[0].numel() - 1))
    ratio = blocks.var((1, 2, 3)) * (side[0] * side[1]) / variance  # 1 for white noise
    structure = torch.maximum(
        (1 - rough) * math.sqrt(2 * height * width),
        (ratio.pow(1 / 3) - (1 - spread)) / math.sqrt(spread),
    )
    detail = rough * (height * width / (2 * math.pi**2))
    return sharpness, detail, structure, F.adaptive_avg_pool2d(blocks, GRID)


@torch.no_grad()
def judge(rules: FrameRules, state: FrameState, x: Tensor, valid: Tensor) -> tuple[Verdict, Moments, FrameState]:
    """Judge images (S, B, ...) of which ``valid`` (S, B) count: the faults, what was measured, and the next state."""
    moments = measure(x, rules)
    real = valid & (moments.mean.abs() < math.inf)  # a frame that is not finite leaves no trace
    outside = ~((moments.low >= -rules.margin) & (moments.high <= 1 + rules.margin))
    black = moments.dark >= rules.share
    inside = real & ~outside
    even = moments.std < rules.flat
    white = _run(state.white, moments.bright >= rules.share, real)
    flat = _run(state.flat, even, real)
    noise = _run(state.noise, (moments.structure < rules.deviations) & ~even, real)
    blurred = _run(state.blurred, (moments.detail < rules.blur) & ~even & ~black, real)
    before, last = _previous(real)  # positions in [state, batch]: 0 is the frame before the batch
    kept = torch.cat((state.picture, state.std[:, None], state.sharpness[:, None]), 1).unsqueeze(1)
    here = torch.cat((moments.picture, moments.std.unsqueeze(2), moments.sharpness.unsqueeze(2)), 2)
    trail = torch.cat((kept, here), 1)  # (S, 1 + B, 66)
    earlier = torch.take_along_dim(trail, before.unsqueeze(2), 1)
    still = _run(state.still, (here - earlier).abs().amax(2) <= rules.tolerance, real)
    verdict = Verdict(
        black=inside & black,
        white=inside & (white >= rules.patience),
        flat=inside & (flat >= rules.patience) & ~black,
        noise=inside & (noise >= rules.patience),
        outside=valid & outside,
        frozen=real & (still >= rules.still),
        blurred=inside & (blurred >= rules.blurred),
    )
    newest = torch.take_along_dim(trail, last[:, None, None], 1)[:, 0]
    runs = (run[:, -1] for run in (still, flat, noise, white, blurred))
    return verdict, moments, FrameState(newest[:, :-2], newest[:, -2], newest[:, -1], *runs)


def _previous(real: Tensor) -> tuple[Tensor, Tensor]:
    """For every place (S, B) the last real frame before it, and the last of all (S,): 0 is the one before the batch."""
    place = torch.arange(1, real.shape[1] + 1, device=real.device)
    latest = torch.where(real, place, 0).cummax(1).values
    return F.pad(latest[:, :-1], (1, 0)), latest[:, -1]


def _run(before: Tensor, marked: Tensor, real: Tensor) -> Tensor:
    """How many real frames in a row up to each place (S, B) are marked; ``before`` (S,): so many before the batch."""
    count = real.cumsum(1)
    return count - torch.where(real & ~marked, count, -before.unsqueeze(1)).cummax(1).values
