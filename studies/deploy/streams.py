"""Streams with labels: days of a camera, and recordings on which adapting helps, changes nothing or cannot help."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tribe import corruptions

BURST = 25  # images of a class in a row, at most


class Labelled(NamedTuple):
    """A stream of N images; parts are numbered in their order."""

    images: Tensor  # (N, C, H, W) bytes
    labels: Tensor  # (N,)
    part: Tensor  # (N,)
    parts: tuple[str, ...]


def night(x: Tensor, draw: torch.Generator) -> Tensor:
    """Return dark images with the noise of a sensor."""
    return (0.22 * x + 0.03 * torch.randn(x.shape, generator=draw)).clamp(0, 1)


def rain(x: Tensor, draw: torch.Generator) -> Tensor:
    """Return images behind bright diagonal streaks."""
    drops = (torch.rand(len(x), 1, *x.shape[2:], generator=draw) < 0.03).float()
    streak = torch.eye(7).flip(1)[None, None]
    drops = torch.nn.functional.conv2d(drops, streak, padding=3).clamp(0, 1)
    return (0.85 * x * (1 - 0.6 * drops) + 0.48 * drops).clamp(0, 1)


def lens(x: Tensor, draw: torch.Generator) -> Tensor:
    """Return blurred images with a cast, as another lens gives."""
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
    cast = torch.linspace(1.15, 0.8, x.shape[1]).view(-1, 1, 1) if x.shape[1] > 1 else 1.0
    return (torch.nn.functional.avg_pool2d(padded, 3, 1) * cast + 0.03).clamp(0, 1)


def scrambled(x: Tensor, draw: torch.Generator) -> Tensor:
    """Return images whose pixels are in another order, the same for all: no network can know them."""
    order = torch.randperm(x[0, 0].numel(), generator=torch.Generator().manual_seed(0))
    return x.flatten(2)[:, :, order].view_as(x)


CHANGES: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "clean": lambda x, draw: x,
    "night": night,
    "rain": rain,
    "lens": lens,
    "scrambled": scrambled,
}
DAYS = ("clean", "fog", "night", "rain", "clean", "lens", "night", "clean")  # as CHANGES, or a corruption at severity 3


def record(images: Tensor, labels: Tensor, parts: tuple[str, ...], each: int, bursts: bool, seed: int) -> Labelled:
    """Return a stream: of each part so many images, drawn at random, in bursts of classes or not."""
    draw = torch.Generator().manual_seed(seed)
    shown, named, places = [], [], []
    for place, name in enumerate(parts):
        index = torch.randperm(len(images), generator=draw)[:each]
        if bursts:
            index = index[_in_bursts(labels[index], draw)]
        x, kind = images[index], name.partition("@")
        if kind[0] in CHANGES:
            x = CHANGES[kind[0]](x, draw)
        else:
            x = corruptions.apply(x, kind[0], int(kind[2] or 3), seed=seed, index=index)
        shown.append((255 * x).round().byte())
        named.append(labels[index])
        places.append(torch.full((len(index),), place))
    return Labelled(torch.cat(shown), torch.cat(named), torch.cat(places), parts)


def _in_bursts(labels: Tensor, draw: torch.Generator) -> Tensor:
    """Return an order in which classes come in bursts."""
    pools = {int(k): (labels == k).nonzero()[:, 0].tolist() for k in labels.unique()}
    order: list[int] = []
    while left := [k for k, pool in pools.items() if pool]:
        k = left[int(torch.randint(len(left), (1,), generator=draw))]
        order += pools[k][:BURST]
        pools[k] = pools[k][BURST:]
    return torch.tensor(order)
