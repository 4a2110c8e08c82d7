"""Estimate the accuracy of a stream without labels, over its last 500 images and over all of it.

Signals of a window become `Features`. A Gaussian process gives the log-odds of the accuracy, and how much it knows.
`tribe.health.calibration` fits the model. The functions here are pure, over rows with a state of fixed size, and read
no value on the host, so that a step that calls them can be captured in a CUDA graph.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import CLASS, COUNT
from tribe.core.losses import probabilities
from tribe.core.state import tree_map
from tribe.fields import NotNegative, Positive, Range, Share, check_fields
from tribe.health.changes import DEPTHS
from tribe.health.probe import Answers
from tribe.health.regression import REACH, GaussianProcess

WINDOW = 500  # images
Z90 = 1.6449  # 90 % of a normal distribution lie within so many standard deviations
TINY = 1e-3  # the least distance of statistics
EVEN = 0.02  # added to a concentration before its logarithm is taken
CLIP = 0.005  # shares stay so far from 0 and 1 before their log-odds are taken


class Features(NamedTuple):
    """The features of windows, each (...), one value a window; NaN: unknown. Shares are log-odds, others logarithms.

    The distances are those of `tribe.health.probe`. Unlike the others they do not depend on what the network believes.
    """

    confidence: Tensor  # the mean probability of the predicted class, after a temperature
    agreement: Tensor  # of teacher and student, where the method has a student
    source: Tensor  # the share of images on which the source agrees, of those that it predicts, too
    near: Tensor  # distance of the images' statistics from the source's, in the first third of the network
    middle: Tensor
    deep: Tensor
    concentration: Tensor  # how unequal the predicted classes are: images of one class have other statistics
    repeated: Tensor  # share of images predicted like the one before: in bursts, neighbours differ where one is wrong


class Images(NamedTuple):
    """The signals of each image: (..., W)."""

    confidence: Tensor
    agreement: Tensor  # of the image's batch; 1 without a student
    source: Tensor  # 1: the source predicts the same class; -1: another; 0: unknown; less where it is asked more often
    near: Tensor  # distances of statistics when the image came; 0: unknown
    middle: Tensor
    deep: Tensor
    predicted: Annotated[Tensor, CLASS]  # the class; it says how many classes a window shows, and how often they change


def window_features(images: Images, filled: Tensor, classes: int) -> Features:
    """The features of windows of W images, of which those ``filled`` (..., W) count."""
    weight = filled.to(images.confidence.dtype)
    count = weight.sum(-1).clamp_min(1)

    def mean(values: Tensor) -> Tensor:
        return (values * weight).sum(-1) / count

    distances = images.near, images.middle, images.deep
    near, middle, deep = (
        ((v * weight).sum(-1) / (weight * (v > 0)).sum(-1)).clamp_min(TINY).log()  # or 0 / 0
        for v in distances
    )
    asked = (weight * images.source.abs()).sum(-1)
    agreed = (weight * images.source.clamp_min(0)).sum(-1) / asked  # or 0 / 0
    believed = log_odds(mean(images.confidence)), log_odds(mean(images.agreement)), log_odds(agreed)
    uneven = concentration(images.predicted, filled, classes)
    repeated = log_odds(repetition(images.predicted, filled))
    return Features(*believed, near, middle, deep, (uneven + EVEN).log(), repeated)


def concentration(predicted: Tensor, filled: Tensor, classes: int) -> Tensor:
    """Return the sum of the classes' squared shares in windows (..., W), less its value where all are equal."""
    counts = torch.zeros(*predicted.shape[:-1], classes, dtype=torch.float32, device=predicted.device)
    counts = counts.scatter_add(-1, predicted.long(), filled.to(counts.dtype))
    shares = counts / filled.sum(-1, keepdim=True).clamp_min(1)
    return (shares.square().sum(-1) - 1 / classes).clamp_min(0)


def repetition(predicted: Tensor, filled: Tensor) -> Tensor:
    """In windows (..., W), the share of images with the predicted class of the image before; NaN: there is none.

    The first image of a full window follows the last: so a ring gives the same wherever it begins.
    """
    pairs = filled & filled.roll(1, -1)
    return ((predicted == predicted.roll(1, -1)) & pairs).sum(-1) / pairs.sum(-1)


@torch.no_grad()
def per_image_signals(logits: Tensor, temperature: float, agreement: Tensor, answers: Answers | None) -> Images:
    """Return the signals of each image of a batch (S, B), from logits (S, B, K); see `Estimator.observe`."""
    confidence = probabilities(logits / temperature).amax(-1)
    share = agreement.unsqueeze(1).expand_as(confidence)
    unknown = confidence.new_zeros(len(confidence), DEPTHS)
    shift = unknown if answers is None else answers.shift.to(confidence.dtype)
    near, middle, deep = (t.expand_as(confidence) for t in shift.split(1, 1))
    predicted = logits.argmax(-1)
    source = torch.zeros_like(confidence)
    if answers is not None:
        same = torch.where(answers.logits.argmax(-1) == predicted, 1.0, -1.0)
        same = same if answers.weight is None else same * answers.weight.unsqueeze(1)
        source = torch.where(answers.known, same, 0).to(confidence.dtype)
    return Images(confidence, share, source, near, middle, deep, predicted)


def log_odds(share: Tensor) -> Tensor:
    """The log-odds of shares between 0 and 1, clipped."""
    return share.clamp(CLIP, 1 - CLIP).logit()


def known_log_odds(features: Features) -> Tensor:
    """Return the log-odds of the agreement with the source; 0 where it is not known."""
    return features.source.nan_to_num(0)


@dataclass(frozen=True)
class Estimator:
    """A fitted model of a method's accuracy on a network. Made by `tribe.health.calibration`."""

    classes: Annotated[int, Range(2, 2**20)]
    temperature: Positive
    model: GaussianProcess = field(compare=False)  # of the log-odds of the accuracy
    widening: Positive = 1.0  # of the model's standard error, so that intervals hold corruptions that it has not seen
    farther: NotNegative = 0.0  # error of the accuracy for each unit of distance from the windows of calibration
    spread: Share = 0.0  # the standard deviation of the accuracy between predicted classes, under one corruption
    unseen: Share = 0.0  # the mean absolute error on a corruption that calibration has not seen
    window: Annotated[int, Range(2, 2**20)] = WINDOW
    # Whether the model is of the log-odds beyond those of the agreement with the source: of the source's own accuracy,
    # which can be no higher where the two disagree, also under a change that calibration has not seen.
    beyond_agreement: bool = False
    source: "Estimator | None" = None  # of the source network's accuracy, from the same features

    def __post_init__(self) -> None:
        check_fields(self)

    def accuracy(self, features: Features) -> Tensor:
        """Features of windows (...) -> accuracy (...)."""
        value = self.model.value(torch.stack(features, -1))
        return torch.sigmoid(value + known_log_odds(features) if self.beyond_agreement else value)

    def half_width(self, features: Features, images: Tensor) -> Tensor:
        """Half of the 90 % interval of an estimate over so many images.

        It holds the model's error, the luck of the draw, and that some classes are easier than others.
        """
        accuracy, variance = self.accuracy(features), self.model.variance(torch.stack(features, -1))
        slope = accuracy * (1 - accuracy)  # of the accuracy over its log-odds
        error = (slope * self.widening).square() * variance
        concentrated = (features.concentration.exp() - EVEN).clamp_min(0)
        return Z90 * (slope / images.clamp_min(1) + error + self.spread**2 * concentrated).sqrt()

    def familiar(self, features: Features) -> Tensor:
        """Return whether features (...) are like those of a window of calibration: else the accuracy is not known."""
        return self._distance(features) <= REACH

    def _distance(self, features: Features) -> Tensor:
        return self.model.distance(torch.stack(features, -1))

    def to(self, device: torch.device) -> "Estimator":
        """Return the same on a device."""
        source = None if self.source is None else self.source.to(device)
        return replace(self, model=tree_map(lambda t: t.to(device), self.model), source=source)

    def interval(
        self, features: Features, images: Tensor, asked: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the accuracy over so many images, and the ends of its 90 % interval.

        It is everything before the first image, and where the features are not `familiar`. ``asked``: of how many
        images the source's predictions are known, which its agreement is the share of.
        """
        accuracy, half = self.accuracy(features), self.half_width(features, images)
        distance = self._distance(features)
        half = torch.hypot(half, self.farther * distance)
        if self.beyond_agreement and asked is not None:
            agreement = torch.sigmoid(known_log_odds(features))
            luck = accuracy * (1 - accuracy) / (asked.clamp_min(1) * agreement * (1 - agreement)).sqrt()
            half = torch.hypot(half, Z90 * luck)
        half = torch.where((images > 0) & (distance <= REACH), half, 1)
        return accuracy, (accuracy - half).clamp_min(0), (accuracy + half).clamp_max(1)

    # -- over a stream ------------------------------------------------------------------------------------------------

    def init(self, streams: int = 1, device: torch.device | str = "cpu") -> "EstimateState":
        """The state before the first image."""
        ring = torch.zeros(streams, self.window + 1, device=device)
        none = torch.zeros(streams, dtype=torch.int64, device=device)
        rings = Images(*(ring.clone() for _ in Images._fields))
        return EstimateState(rings, none, torch.zeros(streams, dtype=torch.float64, device=device))

    @torch.no_grad()
    def observe(
        self, state: "EstimateState", logits: Tensor, valid: Tensor, agreement: Tensor, answers: Answers | None
    ) -> "EstimateState":
        """Add the predictions (S, B, K) of the next batch, of the images that are ``valid`` (S, B).

        ``agreement`` (S,) is that of teacher and student; 1: no student. ``answers`` None: the source was not asked.
        """
        new = per_image_signals(logits, self.temperature, agreement, answers)
        before = state.images.unsqueeze(1)
        rank = before + valid.cumsum(1) - 1  # the number of each valid image in its stream
        after = state.images + valid.sum(1)
        kept = valid & (rank >= after.unsqueeze(1) - self.window)  # of a batch larger than the window, the last
        place = torch.where(kept, rank % self.window, self.window)  # all others go to the last place
        rings = Images(*(r.scatter(1, place, t.to(r.dtype)) for r, t in zip(state.rings, new, strict=True)))
        for ring in rings:
            ring[:, -1] = 0  # padding leaves no trace
        moved = EstimateState(rings, after, state.total)
        ended = after // self.window - state.images // self.window  # (S,) windows that end in this batch
        if ended.device.type == "cpu" and not ended.any():  # on other devices this would synchronise
            return moved
        return moved._replace(total=state.total + self.accuracy(self._features(moved)) * ended)

    @torch.no_grad()
    def read(self, state: "EstimateState") -> "Estimate":
        """The estimates of all streams; before the first image the interval is everything."""
        features, images = self._features(state), state.images.clamp_max(self.window)
        accuracy, low, high = source = self.interval(features, images)
        if self.source is not None:
            weight = state.rings.source.abs()
            asked = weight.sum(1).square() / weight.square().sum(1).clamp_min(CLIP)  # as many of equal weight
            source = self.source.interval(features, images, asked)
        ended = state.images // self.window * self.window
        whole = self.window * state.total + accuracy * (state.images - ended)  # the last window has not ended
        overall = torch.where(state.images > 0, whole / state.images.clamp_min(1), accuracy).to(accuracy.dtype)
        return Estimate(accuracy, low, high, overall, *source, self.familiar(features))

    def read_window(self, state: "EstimateState") -> tuple[Tensor, Tensor, Tensor]:
        """Return the accuracy of the last images of all streams, and the ends of its 90 % interval."""
        return self.interval(self._features(state), state.images.clamp_max(self.window))

    def _features(self, state: "EstimateState") -> Features:
        filled = torch.arange(self.window, device=state.images.device) < state.images.unsqueeze(1)  # (S, W)
        return window_features(Images(*(r[:, :-1] for r in state.rings)), filled, self.classes)


class EstimateState(NamedTuple):
    """The last W images of S streams in rings, and sums over the streams."""

    rings: Images  # (S, W + 1); the last place is written by images that do not count, and never read
    images: Annotated[Tensor, COUNT]  # (S,) int64, valid images so far
    total: Tensor  # (S,) float64, the sum of the estimates of all windows that have ended


class Estimate(NamedTuple):
    """The accuracy of S streams, estimated without labels; shares between 0 and 1."""

    accuracy: Tensor  # (S,) of the last 500 images, or of all if there were fewer
    low: Tensor  # (S,) the lower end of the interval that holds this window's accuracy with a probability of 90 %
    high: Tensor  # (S,) its upper end
    overall: Tensor  # (S,) over the whole stream
    source_accuracy: Tensor  # (S,) of the source network on the same images
    source_low: Tensor  # (S,)
    source_high: Tensor  # (S,)
    familiar: Tensor  # (S,) bool, whether calibration saw such windows; else nothing is known, and intervals say so
