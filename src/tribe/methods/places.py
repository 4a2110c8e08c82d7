"""Notice that the world has changed, and remember the places where the stream has been.

The moments of the first layer's input do not depend on what was adapted. Their average over some 32 images is compared
with that over some 256; where the Kullback-Leibler divergence is many times the usual one, the world has changed. The
next images pass the source too, and their moments in all of its layers are compared with the source's statistics and
with those that were recorded, by the source too, at each place: the place that is much nearer is where the stream is.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import COUNT, NOT_NEGATIVE
from tribe.core.rules import pool_batch
from tribe.core.state import Stats

FAST, SLOW = 32.0, 256.0  # images over which the moments of the first layer are averaged
USUAL = 1024.0  # and their divergence
LEAST_USUAL = 0.002  # divergence of a camera whose images are all alike, so that the next image is not a new world
STEP = 8.0  # times the usual divergence: the world has changed
LEAST_AGE = 64.0  # images in a world before a change is noticed
LOOK = 16.0  # images of a new world that pass the source, before the place is known
STAY = 192.0  # images in a world before it is worth remembering
SEEN = 48.0  # images over which the source's moments are averaged
FEW = 4.0  # images that the first look at a world weighs
SAME = 0.03  # divergence below which two places are one
NEARER = 0.5  # a place is recognised if its divergence is so many times that of the world before
BACK = 0.4  # and the source's statistics are restored if theirs is


class World(NamedTuple):
    """Averages of the world that the stream is in."""

    fast: Stats  # (S, 1, C0), of the first layer
    slow: Stats
    usual: Annotated[Tensor, NOT_NEGATIVE]  # (S,), the usual divergence of the two
    age: Annotated[Tensor, NOT_NEGATIVE]  # (S,), images since it began
    look: Annotated[Tensor, NOT_NEGATIVE]  # (S,), images that are still to pass the source before the place is known
    by_source: Stats  # (S, 1, C), of the source's pass
    seen: Annotated[Tensor, NOT_NEGATIVE]  # (S,), images in that, at most `SEEN`
    new: Stats  # (S, 1, C), the same of the images after a change


class PlaceMemory(NamedTuple):
    """Statistics that are remembered."""

    stats: Stats  # (S, P, C), to normalise with
    by_source: Stats  # (S, P, C), of the source's pass
    used: Annotated[Tensor, COUNT]  # (S,) int64, how many of P hold one


def first_world(source: Stats, first: slice, streams: int) -> World:
    """Return a world of no image."""

    def start(columns: slice) -> Stats:
        return Stats(*(t[..., columns].expand(streams, -1, -1).clone() for t in source))

    zero, every = source.mean.new_zeros(streams), slice(None)
    usual = torch.full_like(zero, 0.05)
    age, look, seen = (zero.clone() for _ in range(3))
    return World(start(first), start(first), usual, age, look, start(every), seen, start(every))


def no_places(source: Stats, places: int, streams: int) -> PlaceMemory:
    """Return an empty memory."""
    stats, by_source = (Stats(*(t.expand(streams, places, -1).clone() for t in source)) for _ in range(2))
    return PlaceMemory(stats, by_source, torch.zeros(streams, dtype=torch.int64, device=source.mean.device))


def merge(stats: Stats, mean: Tensor, var: Tensor, rate: Tensor) -> Stats:
    """Move statistics (S, 1, C) a share (S,) of the way to those of other values: those of a mixture."""
    rate = rate.view(-1, 1, 1)
    apart = mean - stats.mean
    return Stats(stats.mean + rate * apart, torch.lerp(stats.var, var, rate) + rate * (1 - rate) * apart.square())


def pool_samples(moments: Stats, weight: Tensor) -> Stats:
    """Pool moments (S, B, C) over the samples of weight 1, (S, B); others may not be finite: (S, 1, C)."""
    counted = weight > 0
    mean, var = (torch.where(counted.unsqueeze(2), t, 0) for t in moments)
    return Stats(*pool_batch(mean, var, counted))


def divergence(of: Stats, from_: Stats, eps: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of Gaussians, channel by channel: (S, n, C) -> (S, n)."""
    var, other = of.var + eps, from_.var + eps
    ratio = (var + (of.mean - from_.mean).square()) / other
    return 0.5 * (ratio - 1 - (var / other).log()).mean(-1)


def watch(world: World, moments: Stats, images: Tensor, weight: Tensor, eps: Tensor) -> World:
    """Average the first layer's moments (S, B, C0), and decide whether the world has changed.

    Args:
        world: the averages.
        moments: of the samples that were recorded.
        images: how many images came (S,).
        weight: which samples count (S, B).
        eps: of the first layer (C0,).
    """
    images = torch.where(weight.any(1), images, 0)  # none may be among the samples
    came = images > 0
    mean, var = pool_samples(moments, weight)

    known = torch.where(world.look > 0, LOOK - world.look, world.age)

    def rate(horizon: float) -> Tensor:
        """Return the weight of these images in an average, which begins as a plain mean."""
        at_first = images / (known + images).clamp_min(1)
        return torch.where(came, torch.maximum(1 - torch.exp(-images / horizon), at_first), 0)

    fast = merge(world.fast, mean, var, rate(FAST))
    apart = torch.where(came & (world.age > 0), divergence(fast, world.slow, eps)[:, 0], world.usual)
    changed = (apart > STEP * world.usual) & (world.age >= LEAST_AGE) & (world.look == 0)
    slow = merge(world.slow, mean, var, torch.where(changed, 1.0, rate(SLOW)))
    usual = torch.lerp(world.usual, torch.minimum(apart, 4 * world.usual), 1 - torch.exp(-images / USUAL))
    usual = usual.clamp_min(LEAST_USUAL)
    return world._replace(
        fast=fast,
        slow=slow,
        usual=usual,
        age=world.age + images,
        look=torch.where(changed, LOOK, world.look),
    )


def record(world: World, moments: Stats, weight: Tensor) -> World:
    """Average the moments (S, B, C) of the source's pass over the images of weight 1, (S, B).

    While a new world is looked at, they are averaged beside those of the world before.
    """
    added = weight.sum(1)
    looking = world.look > 0
    mean, var = pool_samples(moments, weight)
    known = torch.where(looking, LOOK - world.look, world.seen)
    rate = torch.where(added > 0, torch.maximum(added / (known + added).clamp_min(1), added / SEEN).clamp_max(1), 0)
    return world._replace(
        by_source=merge(world.by_source, mean, var, torch.where(looking, 0, rate)),
        new=merge(world.new, mean, var, torch.where(looking, rate, 0)),
        seen=torch.where(looking, world.seen, (world.seen + added).clamp_max(SEEN)),
        look=(world.look - added).clamp_min(0),
    )


class Arrival(NamedTuple):
    """The decision after a change."""

    moves: Tensor  # (S,) bool, whether statistics start from ``stats``
    stats: Stats  # (S, 1, C)
    recalled: Tensor  # (S,) bool, whether they were remembered
    world: World
    places: PlaceMemory


def arrive(arrived: Tensor, world: World, places: PlaceMemory, current: Stats, source: Stats, eps: Tensor) -> Arrival:
    """Find the place where streams (S,) have ``arrived``, and remember the one that they left.

    Args:
        arrived: streams whose images after a change have passed the source.
        world: with the averages of these images.
        places: the memory.
        current: the statistics that normalise (S, 1, C).
        source: the source's (1, 1, C).
        eps: (C,).
    """
    count = places.used.shape[0], places.stats.mean.shape[1]
    free = torch.arange(count[1], device=eps.device) >= places.used.unsqueeze(1)  # (S, P)
    here = divergence(world.new, world.by_source, eps)[:, 0]
    clean = divergence(world.new, source, eps)[:, 0]
    there = divergence(world.new, places.by_source, eps).masked_fill(free, torch.inf)
    best = there.argmin(1) if count[1] else torch.zeros_like(places.used)
    nearest = there.amin(1) if count[1] else torch.full_like(here, torch.inf)
    known = arrived & (nearest < NEARER * torch.minimum(here, clean))
    back = arrived & ~known & (clean < BACK * here)
    if count[1]:
        row = best.view(-1, 1, 1)
        recalled = Stats(*(t.take_along_dim(row, 1) for t in places.stats))
        start = Stats(*(torch.where(known.view(-1, 1, 1), a, b) for a, b in zip(recalled, source, strict=True)))
        places = _remember(arrived & (world.age >= STAY + LOOK), world.by_source, places, current, free, eps)
    else:
        start = Stats(*(t.expand_as(c) for t, c in zip(source, current, strict=True)))
    chosen = arrived.view(-1, 1, 1)
    by_source = Stats(*(torch.where(chosen, a, b) for a, b in zip(world.new, world.by_source, strict=True)))
    seen, age = torch.where(arrived, FEW, world.seen), torch.where(arrived, LOOK, world.age)
    world = world._replace(by_source=by_source, seen=seen, age=age)
    return Arrival(known | back, start, known, world, places)


def _remember(
    leaves: Tensor, by_source: Stats, places: PlaceMemory, current: Stats, free: Tensor, eps: Tensor
) -> PlaceMemory:
    """Keep the place that streams leave: over the nearest one if that is the same, or memory is full."""
    apart = divergence(by_source, places.by_source, eps).masked_fill(free, torch.inf)
    full = places.used == free.shape[1]
    over = full | (apart.amin(1) < SAME)
    at = torch.where(over, apart.argmin(1), places.used)
    hit = (leaves.unsqueeze(1) & (torch.arange(free.shape[1], device=eps.device) == at.unsqueeze(1))).unsqueeze(2)

    def put(memory: Stats, new: Stats) -> Stats:
        return Stats(*(torch.where(hit, b, a) for a, b in zip(memory, new, strict=True)))

    used = places.used + (leaves & ~over)
    return PlaceMemory(put(places.stats, current), put(places.by_source, by_source), used)
