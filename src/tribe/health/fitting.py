"""Fit the estimator of accuracy to windows whose accuracy is known."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.health.estimate import Estimator, Features, Images, Term, log_odds, window_features

PIECES = (1, 2, 4, 8)  # of a stream that a window of the fit is made of: a window may see one corruption or many
REPEATS = 100  # windows of each number of pieces, of each stream
RIDGE = 3.0  # strength of the penalty on weights, in windows
SIGNS = Features(1, 1, -1, -1, -1)  # type: ignore[arg-type]  # of the weights; a feature with the other sign is left out
LEAST_SIGMA = 0.035  # streams differ from a rehearsal in more than the corruption: see docs/health.md
BEYOND = 0.3  # how far beyond the range of a feature in calibration the model goes on, as a share of that range
LEAST_STRETCH = 20  # images of a stretch of one corruption from which its accuracy can be measured
LEAST_SPREAD = 1e-3  # a feature that varies less is constant: agreement, for a method without a student

Measure = Callable[[Images, Tensor], Features]  # as `window_features`; a study compares others
Split = tuple[Tensor, Tensor]  # (M,) each: windows to fit to, and windows to test on


class Labelled(NamedTuple):
    """A played stream of N images whose labels are known."""

    images: Images  # (N,) each
    right: Tensor  # (N,) whether the prediction is right
    condition: Tensor  # (N,) int64, the corruption of each image; severities of one corruption share the number


class Windows(NamedTuple):
    """M windows of labelled streams."""

    features: Tensor  # (M, F)
    accuracy: Tensor  # (M,)
    share: Tensor  # (M, conditions), how much of a window each condition is
    stream: Tensor  # (M,) int64, the place of its stream


def fit(streams: Sequence[Labelled], classes: int, temperature: float, window: int) -> Estimator:
    """Ridge regression of the log-odds of accuracy; its error is that on corruptions left out of the fit."""
    windows = cut(streams, window)
    error = standard_error(windows, streams, window)
    return Estimator(classes, temperature, *ridge(windows), error, class_spread(streams), window)


def cut(streams: Sequence[Labelled], window: int, measure: Measure = window_features) -> Windows:
    """Windows of pieces of the streams, drawn at random, with their features."""
    count = 1 + max(int(stream.condition.max()) for stream in streams)
    draw = torch.Generator().manual_seed(0)
    parts = []
    for place, stream in enumerate(streams):
        for pieces in PIECES:
            size = -(-window // pieces)
            first = torch.randint(0, len(stream.right) - size + 1, (REPEATS, pieces, 1), generator=draw)
            index = (first + torch.arange(size)).flatten(1)[:, :window]  # (M, W)
            images = Images(*(t[index] for t in stream.images))
            features = torch.stack(measure(images, torch.ones_like(index, dtype=torch.bool)), -1).double()
            shares = torch.nn.functional.one_hot(stream.condition[index], count).double().mean(1)
            accuracy = stream.right[index].double().mean(1)
            parts.append((features, accuracy, shares, torch.full((REPEATS,), place)))
    return Windows(*(torch.cat(column) for column in zip(*parts, strict=True)))


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


def ridge(windows: Windows, chosen: Tensor | None = None, penalty: float = RIDGE) -> tuple[float, tuple[Term, ...]]:
    """Intercept and terms of the model of windows, or of those that are ``chosen`` (M,)."""
    features, accuracy = windows[:2] if chosen is None else (windows.features[chosen], windows.accuracy[chosen])
    means, scales = features.mean(0), features.std(0)
    y, signs = log_odds(accuracy), torch.tensor(SIGNS, dtype=features.dtype)
    used = scales > LEAST_SPREAD
    for _ in signs:  # until all signs are right: every round leaves out at least one feature
        x = torch.where(used, (features - means) / scales.clamp_min(LEAST_SPREAD), 0)  # (M, F)
        gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype)
        weights = torch.linalg.solve(gram, x.T @ (y - y.mean()))
        used = used & (weights * signs >= 0)
    weights = torch.where(used, weights / scales.clamp_min(LEAST_SPREAD), 0)
    low, high = features.amin(0), features.amax(0)
    margin = BEYOND * (high - low)
    rows = zip(weights, means, low - margin, high + margin, strict=True)
    return float(y.mean()), tuple(Term(*map(float, row)) for row in rows)


def standard_error(
    windows: Windows,
    streams: Sequence[Labelled],
    window: int,
    measure: Measure = window_features,
    penalty: float = RIDGE,
) -> float:
    """The standard error of the model of windows on a corruption that it has not seen.

    Windows of the fit show several corruptions, and errors average out. A deployed stream may show one for hours, so
    the error on stretches of one corruption counts where it is larger.
    """
    mixed = left_out_error(windows, window, corruptions_left_out(windows), penalty)
    return max(mixed, stretch_error(windows, streams, measure, penalty), LEAST_SIGMA)


def corruptions_left_out(windows: Windows) -> list[Split]:
    """For each corruption: the windows without it, and those that show it half of the time or more."""
    return [(share == 0, share >= 0.5) for share in windows.share.unbind(1)]


def left_out_error(windows: Windows, window: int, splits: Sequence[Split], penalty: float = RIDGE) -> float:
    """The standard error of fits to some windows on others, beyond the luck of the draw; 0 if none can be fitted."""
    squares = []
    for seen, tested in splits:
        model = _model(windows, seen, penalty)
        if model is not None and tested.any():
            found = model.accuracy(Features(*windows.features[tested].unbind(-1)))
            squares.append((found - windows.accuracy[tested]).square())
    if not squares:
        return 0.0
    luck = (windows.accuracy * (1 - windows.accuracy)).mean() / window
    return float((torch.cat(squares).mean() - luck).clamp_min(0).sqrt())


def stretch_error(
    windows: Windows, streams: Sequence[Labelled], measure: Measure = window_features, penalty: float = RIDGE
) -> float:
    """The standard error on stretches of one corruption that was left out of the fit, beyond luck; 0 without any."""
    models = [_model(windows, share == 0, penalty) for share in windows.share.unbind(1)]  # by condition
    squares = []
    for stream in streams:
        for condition, stretch in stretches(stream.condition):
            model = models[condition]
            if model is not None:
                images, right = Images(*(t[stretch] for t in stream.images)), stream.right[stretch]
                p = right.double().mean()
                found = model.accuracy(measure(images, torch.ones_like(right)))
                squares.append((found - p).square() - p * (1 - p) / len(right))
    return float(torch.stack(squares).mean().clamp_min(0).sqrt()) if squares else 0.0


def _model(windows: Windows, seen: Tensor, penalty: float) -> Estimator | None:
    """The model of the windows that are ``seen`` (M,); None if they are too few."""
    few = seen.sum() <= len(Features._fields)
    return None if few else Estimator(2, 1.0, *ridge(windows, seen, penalty), 0.0)


def stretches(condition: Tensor) -> list[tuple[int, slice]]:
    """The stretches of images (N,) of one condition, with its number; without their first third.

    There, the distances of the statistics still know the condition before.
    """
    numbers, counts = condition.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    rows = zip(numbers.tolist(), counts.tolist(), ends.tolist(), strict=True)
    return [(number, slice(end - count + count // 3, end)) for number, count, end in rows if count >= LEAST_STRETCH]
