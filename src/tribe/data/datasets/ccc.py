"""Continuously changing corruptions: ImageNet under two corruptions at once, one fading while the next one grows.

Press et al., RDumb: a simple approach that questions our progress in continual test-time adaptation, NeurIPS 2023. A
walk goes from one corruption to another in quarters of a severity, so that a ResNet-50 is right in a given share of the
images on average: 40 % is CCC-Easy, 20 % CCC-Medium, 0 CCC-Hard. The images are made while they are read.

NOTE: the authors publish the accuracy of a ResNet-50 for every pair of corruptions and severities. Here it follows from
one number for each corruption (`ERROR`): the accuracy falls evenly with the severity, and the shares that two
corruptions leave are multiplied. So walks are alike, not the same. The authors also store images as JPEG of quality 85.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tribe.core.rng import Key
from tribe.data import corruptions
from tribe.data.corruptions import Draw, Function
from tribe.data.corruptions.between import apply_at
from tribe.data.datasets import register
from tribe.data.datasets.array_files import positions
from tribe.data.datasets.corrupted import to_bytes
from tribe.data.datasets.imagenet import ImageNet
from tribe.fields import is_whole, plain_numbers, require
from tribe.registry import nearest

CLEAN = 76.13  # accuracy of torchvision's ResNet-50 on clean images, in percent
ERROR = {  # of a ResNet-50 at severity 5, in percent: TEST of the paper's table on ImageNet-C
    "gaussian_noise": 97.81,
    "shot_noise": 97.09,
    "impulse_noise": 98.17,
    "defocus_blur": 81.68,
    "glass_blur": 89.73,
    "motion_blur": 85.15,
    "zoom_blur": 77.93,
    "snow": 83.45,
    "frost": 77.07,
    "fog": 75.88,
    "contrast": 94.52,
    "elastic_transform": 82.48,
    "pixelate": 79.31,
    "jpeg_compression": 68.5,
}
MEDIUM = tuple(name for name in ERROR if name != "jpeg_compression")
HARD = ("gaussian_noise", "shot_noise", "impulse_noise", "contrast")
LEVELS = 21  # severities 0 to 5 in quarters
MOST_STEPS = 4000  # a record counts every class in every step


class Step(NamedTuple):
    """Two corruptions, in the order in which they are applied, and their severities."""

    first: str
    severity: float
    second: str
    second_severity: float


def names_for(baseline: float) -> tuple[str, ...]:
    """The corruptions of a baseline accuracy: weak ones cannot reach a low one."""
    return tuple(ERROR) if baseline >= 40 else MEDIUM if baseline >= 20 else HARD


def accuracies(first: str, second: str) -> list[list[float]]:
    """The accuracy of a ResNet-50 by the level of two corruptions, in percent."""
    shares = [
        [1 - level / (LEVELS - 1) * (1 - (100 - ERROR[name]) / CLEAN) for level in range(LEVELS)]
        for name in (first, second)
    ]
    return [[CLEAN * a * b for b in shares[1]] for a in shares[0]]


def find_walk(accuracy: Sequence[Sequence[float]], baseline: float) -> list[tuple[int, int]]:
    """The levels of two corruptions along a walk whose mean accuracy is near the baseline.

    A walk begins with the first corruption alone and ends with the second alone; in each step the first falls by a
    level or the second grows by one. From every place the better of two walks is kept, from the end to the beginning.

    >>> find_walk([[50, 40, 30], [40, 30, 20], [30, 20, 10]], 30)
    [(1, 0), (1, 1), (1, 2), (0, 2)]
    """
    best: dict[tuple[int, int], tuple[float, list[tuple[int, int]]]] = {}
    for j in reversed(range(len(accuracy[0]))):
        best[0, j] = accuracy[0][j], [(0, j)]
        for i in range(1, len(accuracy)):
            ways = [best[place] for place in ((i, j + 1), (i - 1, j)) if place in best]
            sums = [(total + accuracy[i][j], [(i, j), *walk]) for total, walk in ways]
            best[i, j] = min(sums, key=lambda way: abs(way[0] / len(way[1]) - baseline))
    starts = [best[i, 0] for i in range(1, len(accuracy))]
    return min(starts, key=lambda way: abs(way[0] / len(way[1]) - baseline))[1]


@cache
def _walk(first: str, second: str, baseline: float) -> list[Step]:
    walk = find_walk(accuracies(first, second), baseline)
    return [Step(first, i / 4, second, j / 4) for i, j in walk]


@register("ccc")
@dataclass(frozen=True)
class ContinuouslyChanging:
    """ImageNet under two corruptions that change continuously (CCC, Press et al., 2023), made from clean images.

    A domain is a step of a walk; the scenario "replay" plays them in order. Each step draws its images at random.
    """

    data: str | None = None  # root folder, or the folder of the classes; None: $TRIBE_DATA or the cache directory
    baseline: float = 20.0  # accuracy of a ResNet-50 in percent; 40 is CCC-Easy, 20 CCC-Medium, 0 CCC-Hard
    speed: int = 1000  # images in each step; 1,000, 2,000 or 5,000 in the paper
    steps: int = 100  # length; the paper plays 7.5 million images
    seed: int = 43  # 43, 44 and 45 in the paper
    crop: bool = True  # cut out a random part of each image, and mirror half of them
    workers: int | None = None  # threads that decode; None: one for each core

    clean_name: ClassVar[str] = "imagenet"

    def __post_init__(self) -> None:
        plain_numbers(self)
        require(0 <= self.baseline <= 100, "baseline is an accuracy in percent", self.baseline)
        require(is_whole(self.speed, least=1), "speed is how many images each step has, at least 1", self.speed)
        fits = is_whole(self.steps, least=1) and self.steps <= MOST_STEPS
        require(fits, f"steps is the length of the walk, 1 to {MOST_STEPS}", self.steps)

    @cached_property
    def clean(self) -> ImageNet:
        """The clean images."""
        return ImageNet(self.data, workers=self.workers)

    @property
    def functions(self) -> list[Function]:
        """The functions that corrupt: code that the images depend on."""
        return [corruptions.function(name, "common") for name in names_for(self.baseline)]

    @property
    def classes(self) -> Sequence[str]:
        """The classes of the clean images."""
        return self.clean.classes

    @property
    def outputs(self) -> Sequence[int] | None:
        """The outputs of an ImageNet network that are the classes."""
        return self.clean.outputs

    @cached_property
    def walk(self) -> dict[str, Step]:
        """The steps by the names of their domains."""
        draw, names, steps = random.Random(self.seed), names_for(self.baseline), list[Step]()
        first, second = draw.sample(names, 2)
        while len(steps) < self.steps:
            steps += _walk(first, second, self.baseline)
            first, second = second, draw.choice([name for name in names if name != second])
        return {f"{n:04} {s.first}@{s[1]:g} {s.second}@{s[3]:g}": s for n, s in enumerate(steps[: self.steps])}

    @property
    def domains(self) -> Sequence[str]:
        """The steps of the walk, numbered."""
        return tuple(self.walk)

    def labels(self, domain: str) -> Tensor:
        """The labels of the images of a step."""
        return self.clean.labels("clean")[self._drawn(domain)]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Read, crop and corrupt some images of a step."""
        drawn, step = self._drawn(domain), self.walk[domain]
        chosen = torch.tensor(positions(index, len(drawn), domain), dtype=torch.int64)
        number = self.domains.index(domain) * self.speed + chosen  # in the whole stream
        images = self.clean.images("clean", drawn[chosen])
        if self.crop:
            images = _random_part(images, Draw(Key(torch.full_like(number, self.seed), number), "ccc/crop"))
        for name, severity in (step[:2], step[2:]):
            if severity:
                images = to_bytes(apply_at(images, name, severity, seed=self.seed, index=number)).float().div_(255)
        return images

    def _drawn(self, domain: str) -> Tensor:
        """The numbers of the clean images of a step: drawn without repetition, as long as there are others."""
        if domain not in self.walk:
            raise ValueError(f"unknown domain {domain!r}: {nearest(domain, self.walk)}")
        count = len(self.clean.labels("clean"))
        draw = torch.Generator().manual_seed(self.seed * MOST_STEPS + self.domains.index(domain))
        rounds = -(-self.speed // count)
        return torch.cat([torch.randperm(count, generator=draw) for _ in range(rounds)])[: self.speed]


def _random_part(images: Tensor, draw: Draw) -> Tensor:
    """A random part of each image, at its size: 8 to 100 % of the area, sides 3:4 to 4:3; half are mirrored."""
    n, _, height, width = images.shape
    area, ratio, up, left, mirror = draw.uniform((5,)).unbind(1)
    side, slant = (0.08 + 0.92 * area).sqrt(), (4 / 3) ** (ratio - 0.5)  # the slant is the root of the ratio
    tall, wide = (side / slant).clamp(max=1), (side * slant).clamp(max=1)
    wide = torch.where(mirror < 0.5, -wide, wide)
    zero = torch.zeros(n)
    top, start = (2 * up - 1) * (1 - tall), (2 * left - 1) * (1 - wide.abs())
    places = torch.stack((wide, zero, start, zero, tall, top), 1).view(n, 2, 3)
    grid = F.affine_grid(places, [n, 1, height, width], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False).clamp_(0, 1)
