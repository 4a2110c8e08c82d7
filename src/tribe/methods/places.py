"""Notice that the world has changed, and remember the places where the stream has been.

Each image's moments surprise the statistics that normalise it. Where the average surprise over some 32 images is more
than usual, in deviations of single images, the world has changed. A return to the source surprises little: it shows as
a loss of what adapting foresaw better than the source. The next images pass the source too, and their
moments in all layers are compared with the source's statistics and with those that were recorded, by the source too, at
each place: the place that is much nearer is where the stream is.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import COUNT, NOT_NEGATIVE, TRUTH
from tribe.core.rules import pool_batch
from tribe.core.state import Stats

FAST, SLOW = 32.0, 256.0  # images over which surprise is averaged
USUAL = 1024.0  # and its variance
STEP = 1.0  # deviations of an image's surprise: the world has changed
LEAST_SPREAD = 0.04  # the least variance: where all images are alike, the next one is not a new world
LEAST = 1e-9  # the least divergence, so that its logarithm is finite
LEAST_AGE = 64.0  # images in a world before a change is noticed
LOOK = 16.0  # images of a new world that pass the source, before the place is known
STAY = 192.0  # images in a world before it is worth remembering
SEEN = 48.0  # images over which the source's moments are averaged
FEW = 4.0  # images that the first look at a world weighs
SAME = 0.03  # divergence below which two places are one
NEARER = 0.25  # a place is recognised if its divergence is so many times that of the world before
BACK = 0.2  # and the source's statistics are restored if theirs is
LOST = 0.4  # of what adapting foresaw better than the source: where so much is lost, the stream may be back
LEAST_LOST = 0.01  # nats of a channel, and at least as much
LOST_SLOW = 96.0  # images over which that is averaged
BACK_NEAR = 0.03  # distance from the source: such an alarm counts only where the new world is so near
OF_CLASS = 0.06  # most divergence from the source that is due to few classes
MANY = 2.0  # classes, beside the first, from which none is


class World(NamedTuple):
    """Averages of the world that the stream is in."""

    fast: Tensor  # (S, 2), of surprise, and of its excess over the source's
    slow: Tensor
    spread: Annotated[Tensor, NOT_NEGATIVE]  # (S,), the variance of an image's surprise
    age: Annotated[Tensor, NOT_NEGATIVE]  # (S,), images since it began
    look: Annotated[Tensor, NOT_NEGATIVE]  # (S,), images that are still to pass the source before the place is known
    lost: Tensor  # (S,) bool, whether they do because adapting foresees less than it did
    by_source: Stats  # (S, 1, C), of the source's pass
    seen: Annotated[Tensor, NOT_NEGATIVE]  # (S,), images in that, at most `SEEN`
    new: Stats  # (S, 1, C), the same of the images after a change
    classes: Annotated[Tensor, TRUTH]  # (S, 2, K), the source's predictions of both
    distance: Annotated[Tensor, NOT_NEGATIVE]  # (S,), of the source's pass from the source's statistics


class PlaceMemory(NamedTuple):
    """Statistics that are remembered."""

    stats: Stats  # (S, P, C), to normalise with
    by_source: Stats  # (S, P, C), of the source's pass
    used: Annotated[Tensor, COUNT]  # (S,) int64, how many of P hold one


def first_world(source: Stats, streams: int, classes: int) -> World:
    """Return a world of no image."""

    def start() -> Stats:
        return Stats(*(t.expand(streams, -1, -1).clone() for t in source))

    age, look, seen, distance = (source.mean.new_zeros(streams) for _ in range(4))
    fast, slow = (source.mean.new_zeros(streams, 2) for _ in range(2))
    even = source.mean.new_full((streams, 2, classes), 1 / classes)
    return World(fast, slow, torch.ones_like(age), age, look, look > 0, start(), seen, start(), even, distance)


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


def measure_surprise(moments: Stats, stats: Stats, eps: Tensor) -> Tensor:
    """Return how surprising the moments of each image (S, B, C) are where statistics (S, 1, C) normalise: (S, B)."""
    return _surprise(_ratio(moments, stats, eps))


def measure_surprise_and_excess(moments: Stats, stats: Stats, source: Stats, eps: Tensor) -> Tensor:
    """Return the surprise of each image, and its excess over the source's, in nats: (S, B, 2)."""
    ratio = _ratio(moments, stats, eps)
    cost, by_source = ratio + (stats.var + eps).log(), _ratio(moments, source, eps) + (source.var + eps).log()
    return torch.stack((_surprise(ratio), 0.5 * (cost - by_source).mean(-1)), 2)


def _surprise(ratio: Tensor) -> Tensor:
    surprise: Tensor = (0.5 * (ratio - 1 - ratio.log()).mean(-1)).clamp_min(LEAST).log()
    return surprise


def _ratio(moments: Stats, stats: Stats, eps: Tensor) -> Tensor:
    """Return the squares around the statistics' mean, divided by their variance."""
    return (moments.var + eps + (moments.mean - stats.mean).square()) / (stats.var + eps)


def watch(world: World, surprise: Tensor, images: Tensor, seen: Tensor) -> World:
    """Average the surprise of the samples ``seen``, and decide whether the world has changed.

    Args:
        world: the averages.
        surprise: of the samples that were recorded, and its excess over the source's (S, B, 2).
        images: how many images these stand for (S,).
        seen: which samples count (S, B).
    """
    came, count = seen.any(1), seen.sum(1).clamp_min(1)
    known = torch.where(world.look > 0, LOOK - world.look, world.age)
    after = seen.flip(1).cumsum(1).flip(1) - seen.long()  # samples that come after each

    def average(t: Tensor, weight: Tensor) -> Tensor:
        weight = torch.where(seen, weight, 0)
        weight = (weight / weight.sum(1, keepdim=True).clamp_min(LEAST)).view(*seen.shape, *[1] * (t.ndim - 2))
        return (weight * torch.where(weight > 0, t, 0)).sum(1)

    def rate(horizon: float) -> Tensor:
        """Return the weight of these images in an average, which begins as a plain mean."""
        at_first = images / (known + images).clamp_min(1)
        return torch.where(came, torch.maximum(1 - torch.exp(-images / horizon), at_first), 0)

    each, one = (images / count).unsqueeze(1), torch.ones_like(surprise[..., 0])
    mean = average(surprise, one)
    fast = torch.lerp(world.fast, average(surprise, torch.exp(-after * each / FAST)), rate(FAST).unsqueeze(1))
    usual = torch.stack((world.slow[:, 0], torch.minimum(world.slow, world.fast)[:, 1]), 1)
    above = torch.where((world.age > 0).unsqueeze(1), fast - usual, 0)
    much = torch.stack((STEP * world.spread.sqrt(), (LOST * usual[:, 1].abs()).clamp_min(LEAST_LOST)), 1)
    changed = (above > much) & ((world.age >= LEAST_AGE) & (world.look == 0)).unsqueeze(1)
    slow = torch.lerp(world.slow, mean, torch.where(changed, 1.0, torch.stack((rate(SLOW), rate(LOST_SLOW)), 1)))
    spread = average((surprise[..., 0] - slow[:, :1]).square().minimum(4 * world.spread.unsqueeze(1)), one)
    spread = torch.lerp(world.spread, spread, rate(USUAL)).clamp_min(LEAST_SPREAD)
    look = torch.where(changed.any(1), LOOK, world.look)
    lost = torch.where(changed.any(1), ~changed[:, 0], world.lost)
    return world._replace(fast=fast, slow=slow, spread=spread, age=world.age + images * came, look=look, lost=lost)


def record(world: World, moments: Stats, classes: Tensor, weight: Tensor, source: Stats, eps: Tensor) -> World:
    """Average the moments (S, B, C) and predictions (S, B, K) of the source's pass over images of weight 1, (S, B).

    While a new world is looked at, they are averaged beside those of the world before.
    """
    added = weight.sum(1)
    looking = world.look > 0
    mean, var = pool_samples(moments, weight)
    known = torch.where(looking, LOOK - world.look, world.seen)
    rate = torch.where(added > 0, torch.maximum(added / (known + added).clamp_min(1), added / SEEN).clamp_max(1), 0)
    before, after = torch.where(looking, 0, rate), torch.where(looking, rate, 0)
    by_source = merge(world.by_source, mean, var, before)
    predicted = (weight.unsqueeze(2) * classes).sum(1, keepdim=True) / added.clamp_min(1).view(-1, 1, 1)
    classes = world.classes.lerp(predicted, torch.stack((before, after), 1).unsqueeze(2))
    return world._replace(
        by_source=by_source,
        distance=measure_distance(by_source, classes[:, 0], source, eps),
        new=merge(world.new, mean, var, after),
        classes=classes,
        seen=torch.where(looking, world.seen, (world.seen + added).clamp_max(SEEN)),
        look=(world.look - added).clamp_min(0),
    )


def measure_distance(by_source: Stats, classes: Tensor, source: Stats, eps: Tensor) -> Tensor:
    """Return how far a world is from the source's statistics, less what is due to few classes: (S,)."""
    apart = divergence(by_source, source, eps)[:, 0]
    varied = ((1 / classes.square().sum(1) - 1) / MANY).clamp(0, 1)
    return apart - (1 - varied) * apart.clamp_max(OF_CLASS)


class Arrival(NamedTuple):
    """The decision after a change."""

    arrived: Tensor  # (S,) bool, which streams there is a decision for
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
    distance = measure_distance(world.new, world.classes[:, 1], source, eps)
    arrived = arrived & (~world.lost | back | (distance < BACK_NEAR))
    known = known & arrived
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
    classes = torch.where(chosen, world.classes[:, 1:], world.classes)
    distance = torch.where(arrived, distance, world.distance)
    world = world._replace(by_source=by_source, seen=seen, age=age, classes=classes, distance=distance)
    return Arrival(arrived, known | back, start, known, world, places)


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
