"""Fit the estimator of accuracy to windows whose accuracy is known."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.health.estimate import (
    CLIP,
    Z90,
    Estimator,
    Features,
    Images,
    known_log_odds,
    log_odds,
    window_features,
)
from tribe.health.regression import AMPLITUDE, LEAST_SPREAD, GaussianProcess

SHARES = (4, 2, 1)  # windows of a stretch of one corruption are this share of a window, and as long as the stretch
PIECES = (1, 2, 4, 8)  # of a stream that a window that mixes corruptions is made of
REPEATS = 15  # such windows of each number of pieces, of each stream
MIXED = -1  # in place of the condition of a window that shows several
LEAST_WIDENING = 0.5  # a few stretches say too little of the errors to narrow intervals further
ALIKE = 2  # corruptions most like one are left out with it to see how errors grow with the distance
LEAST_DISTANCE = 0.1  # of a corruption that was left out from the others, in standard deviations of the features
LEAST_FARTHER = 0.2  # a few corruptions say too little of what is farther away
LEAST_STRETCH = 20  # images of a stretch of one corruption from which its accuracy can be measured


class Labelled(NamedTuple):
    """A played stream of N images whose labels are known."""

    images: Images  # (N,) each
    right: Tensor  # (N,) whether the prediction is right
    condition: Tensor  # (N,) int64, the corruption of each image; severities of one corruption share the number
    source_right: Tensor | None = None  # (N,) whether the source's prediction is right; None: not known


class Windows(NamedTuple):
    """M windows of labelled streams."""

    features: Tensor  # (M, F)
    accuracy: Tensor  # (M,)
    images: Tensor  # (M,) how many
    condition: Tensor  # (M,) int64, or MIXED
    offset: Tensor  # (M,) log-odds that the model adds to: see `Estimator.beyond_agreement`


def fit(streams: Sequence[Labelled], classes: int, temperature: float, window: int) -> Estimator:
    """Regress the log-odds of accuracy on features; intervals hold corruptions that were left out of the fit."""
    of_source = [stream._replace(right=known) for stream in streams if (known := stream.source_right) is not None]
    source = _fit_one(of_source, classes, temperature, window, True) if of_source else None
    return replace(_fit_one(streams, classes, temperature, window, False), source=source)


def _fit_one(
    streams: Sequence[Labelled], classes: int, temperature: float, window: int, beyond_agreement: bool
) -> Estimator:
    windows = cut(streams, window, classes, beyond_agreement)
    errors = left_out(windows, window)
    unseen = float(errors.found.abs().mean()) if len(errors.found) else 0.0
    model, wider, spread = regress(windows), widening(errors), class_spread(streams)
    more = growth(left_out(windows, window, alike=ALIKE), wider)
    return Estimator(classes, temperature, model, wider, more, spread, unseen, window, beyond_agreement)


def cut(streams: Sequence[Labelled], window: int, classes: int, beyond_agreement: bool = False) -> Windows:
    """Windows of the streams, with their features: of stretches of one corruption, and of pieces drawn at random.

    A deployed stream shows one corruption for hours, or many that alternate.
    """
    draw = torch.Generator().manual_seed(0)
    parts = []
    for stream in streams:
        found = [*_of_stretches(stream.condition, window), *_of_pieces(len(stream.right), window, draw)]
        for condition, index in found:
            images = Images(*(t[index] for t in stream.images))
            features = window_features(images, torch.ones_like(index, dtype=torch.bool), classes)
            right = stream.right[index].double().mean()
            offset = known_log_odds(features) if beyond_agreement else torch.tensor(0.0)
            counts = torch.tensor(len(index)), torch.tensor(condition)
            parts.append((torch.stack(features).double(), right, *counts, offset.double()))
    return Windows(*(torch.stack(column) for column in zip(*parts, strict=True)))


def _of_stretches(condition: Tensor, window: int) -> list[tuple[int, Tensor]]:
    found = []
    for number, stretch in stretches(condition):
        images = torch.arange(stretch.start, stretch.stop)
        sizes = {min(window // share, len(images)) for share in SHARES}
        found += [(number, images[i : i + n]) for n in sorted(sizes) for i in range(0, len(images) - n + 1, n)]
    return found


def _of_pieces(images: int, window: int, draw: torch.Generator) -> list[tuple[int, Tensor]]:
    found = []
    for pieces in PIECES:
        size = min(-(-window // pieces), images)
        first = torch.randint(0, images - size + 1, (REPEATS, pieces, 1), generator=draw)
        found += [(MIXED, index[:window]) for index in (first + torch.arange(size)).flatten(1)]
    return found


def regress(windows: Windows, chosen: Tensor | None = None, amplitude: float = AMPLITUDE) -> GaussianProcess:
    """The model of windows, or of those that are ``chosen`` (M,); each window's accuracy has its own luck."""
    features, accuracy, images, _, offset = (t if chosen is None else t[chosen] for t in windows)
    p = accuracy.clamp(CLIP, 1 - CLIP)
    luck = 1 / (images * p * (1 - p)).clamp_min(1)
    return GaussianProcess.fit(features, log_odds(accuracy) - offset, luck, amplitude)


class Errors(NamedTuple):
    """Of estimates for windows of corruptions that were left out of the fit, in accuracy."""

    found: Tensor  # (N,)
    expected: Tensor  # (N,) the standard error of model and luck
    distance: Tensor | None = None  # (N,) from the windows of the fit


def left_out(windows: Windows, window: int, amplitude: float = AMPLITUDE, alike: int = 0) -> Errors:
    """The errors on each corruption of a fit to the others; empty if none can be fitted.

    The ``alike`` corruptions whose windows are most like its own are left out, too.
    """
    found = [torch.empty(3, 0, dtype=torch.float64)]
    numbers = [number for number in windows.condition.unique() if number != MIXED]
    x = windows.features - windows.features.nanmean(0)
    x = torch.nan_to_num(x / x.nan_to_num(0).std(0).clamp_min(LEAST_SPREAD))
    middles = torch.stack([x[windows.condition == number].mean(0) for number in numbers]) if numbers else x[:0]
    for number, apart in zip(numbers, torch.cdist(middles, middles), strict=True):
        own = windows.condition == number
        hidden = torch.stack(numbers)[apart.argsort(stable=True)[: alike + 1]]
        seen = ~torch.isin(windows.condition, hidden) & (windows.condition != MIXED)
        if seen.sum() <= len(Features._fields):
            continue
        longest = int(windows.images[own].amax())
        tested = own & (windows.images >= min(window // SHARES[0], longest))
        model, features = regress(windows, seen, amplitude), windows.features[tested].float()
        p = torch.sigmoid(model.value(features) + windows.offset[tested]).double()
        slope = p * (1 - p)
        variance = slope.square() * model.variance(features).double() + slope / windows.images[tested]
        far = model.distance(features).double()
        found.append(torch.stack((p - windows.accuracy[tested], variance.sqrt(), far)))
    return Errors(*torch.cat(found, 1))


def growth(errors: Errors, wider: float) -> float:
    """Return how fast errors grow with the distance, so that 90 % of intervals hold corruptions that are farther."""
    if errors.distance is None or not len(errors.found):
        return LEAST_FARTHER
    rest = (errors.found.square() - (Z90 * wider * errors.expected).square()).clamp_min(0).sqrt()
    return max(float((rest / errors.distance.clamp_min(LEAST_DISTANCE)).quantile(0.9)), LEAST_FARTHER)


def widening(errors: Errors) -> float:
    """Return the factor of the model's standard error, so that 90 % of intervals hold a corruption it has not seen."""
    distances = errors.found.abs() / errors.expected
    return max(float(distances.quantile(0.9)) / Z90, LEAST_WIDENING) if len(distances) else 1.0


def class_spread(streams: Sequence[Labelled]) -> float:
    """The standard deviation of the accuracy between predicted classes, within conditions; 0 if it is all luck.

    Two images of one class and condition are right together more often than two of different classes. The mean product
    of their deviations from the condition's accuracy is the variance between classes; luck adds nothing to it.
    """
    products, pairs = 0.0, 0
    for stream in streams:
        for condition in stream.condition.unique():
            here = stream.condition == condition
            deviation = stream.right[here].double()
            deviation = deviation - deviation.mean()
            group = stream.images.predicted[here].long()
            count = group.bincount()
            total = torch.zeros(len(count), dtype=torch.float64).scatter_add(0, group, deviation)
            products += float(total.square().sum() - deviation.square().sum())
            pairs += int((count * (count - 1)).sum())
    return math.sqrt(max(products / max(pairs, 1), 0.0))


def stretches(condition: Tensor) -> list[tuple[int, slice]]:
    """The stretches of images (N,) of one condition, with its number; without their first third.

    There, the distances of the statistics still know the condition before.
    """
    numbers, counts = condition.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    rows = zip(numbers.tolist(), counts.tolist(), ends.tolist(), strict=True)
    return [(number, slice(end - count + count // 3, end)) for number, count, end in rows if count >= LEAST_STRETCH]
