"""Calibration: what health must know of a network and a method, from labelled source images that no training used.

The method plays the images as three streams, clean and under the corruptions of their family: all mixed, one
corruption for hundreds of images after another, and the same with bursts of classes, some of which are rare. The labels
say how accurate each window was; `tribe.health.fitting` learns it from signals without labels. Every method is
over-confident in its own way: so an estimator belongs to one network and one method.

    calibration = tribe.calibrate(net, images, labels, method="tribe")
    calibration.save("health.safetensors")          # or: tribe source health --model ... --dataset ...
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.losses import cross_entropy, entropy
from tribe.core.validation import good_images, warn
from tribe.fields import Count, Share, check_fields, is_whole, require
from tribe.health.estimate import WINDOW, Estimator, Features
from tribe.health.fitting import Labelled, fit
from tribe.health.martingale import LEVELS, Reference, fit_reference
from tribe.health.playing import Player, Progress, choose_conditions
from tribe.health.probe import source_logits
from tribe.health.regression import GaussianProcess
from tribe.io.json_files import check
from tribe.knowledge import Knowledge, KnowledgeError
from tribe.methods import AnyMethod, Method, Pipeline, guards
from tribe.methods.building import build_method

NAME = "health"  # of the knowledge in a file
PARTS = {"estimator": "model.", "source": "source."}  # how the names of an estimator's tensors in a file begin
NUMBERS = tuple(f.name for f in fields(Estimator) if f.name not in ("model", "source", "beyond_agreement"))
ADVICE = "tribe source health --model ... --dataset ..."
LEAST = 200  # images
PRIOR = 10.0  # strength of the prior of the logarithm of the temperature, in images
NEAR_CHANCE = 0.1  # share of the way from chance to perfection below which labels contradict the network
TOO_GOOD = 0.999  # accuracy from which images may be those of the training
FEW = 10  # images of a class that say what its label means
SWAPPED = 0.5  # share of a class's images that are predicted as another one: its labels may mean that one


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration. Files of source knowledge hold it."""

    estimator: Estimator
    method: str  # the name of what played: a method, with a guard that acts and a time filter; see `answers_by`
    network: str  # Backbone.fingerprint(exact=False)
    images: Count  # labelled images
    accuracy: Share  # of the source network on them
    corruptions: tuple[str, ...]
    normal: Reference = field(compare=False)  # entropies on them by predicted class: see tribe.health.martingale

    def __post_init__(self) -> None:
        check_fields(self)
        if self.estimator.source is None:  # the method is the source, or nothing else is known
            object.__setattr__(self, "estimator", replace(self.estimator, source=self.estimator))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file, whole or not at all."""
        self.knowledge().save(path)

    def knowledge(self) -> Knowledge:
        """The calibration as source knowledge."""
        spec = {**vars(self), "corruptions": list(self.corruptions)}
        normal = spec.pop("normal")
        tensors = normal._asdict()  # with the models: the digest covers them
        for part, begin in PARTS.items():
            estimator = self.estimator if part == "estimator" else cast(Estimator, self.estimator.source)
            spec[part] = {name: getattr(estimator, name) for name in (*NUMBERS, "beyond_agreement")}
            tensors |= {begin + name: t.clone() for name, t in estimator.model._asdict().items()}
        return Knowledge(NAME, tensors, spec.pop("network"), spec)

    @staticmethod
    def load(path: str | PathLike[str]) -> "Calibration":
        """Read a file that `save` wrote; KnowledgeError says why if it cannot be read."""
        return Calibration.of(Knowledge.load(path))

    @staticmethod
    def of(known: Knowledge) -> "Calibration":
        """The calibration in source knowledge."""
        place = known.path or "this"
        if known.method != NAME:
            raise KnowledgeError(f"{place} is source knowledge of {known.method}; expected a calibration: {ADVICE}")
        try:
            return _decode(known)
        except ValueError as error:
            message = (
                f"{place} is damaged or older: it holds no calibration of today ({error}). Make it again: {ADVICE}"
            )
            raise KnowledgeError(message) from None

    def check(self, net: Backbone) -> None:
        """Refuse a calibration of another network."""
        if self.network != net.fingerprint(exact=False):
            raise KnowledgeError(
                f"the calibration belongs to another network: its weights differ from this one's. Make it again: "
                f"{ADVICE}"
            )

    def check_method(self, name: str) -> None:
        """Refuse a calibration of another method, guard or filter: ``name`` is what `Pipeline.answers_by` returns."""
        if name != self.method:
            raise KnowledgeError(
                f"the calibration was made with {self.method}; this stream answers by {name}, which is over-confident "
                f"in its own way. Make it again: {ADVICE} --method {name}"
            )


SCHEMA: dict[str, Any] = {  # of a calibration in the header of its file; the classes check the ranges
    **{part: dict.fromkeys(NUMBERS, float) | {"beyond_agreement": bool} for part in PARTS},
    **{"method": str, "images": int, "accuracy": float, "corruptions": [str]},
}


def _decode(known: Knowledge) -> Calibration:
    """The calibration in source knowledge; ValueError if there is none."""
    spec = check(dict(known.spec), SCHEMA, "its header")
    features, shapes = len(Features._fields), {"quantiles": (spec["estimator"]["classes"], LEVELS), "tolerance": ()}
    for begin in PARTS.values():
        points = known.tensors.get(f"{begin}weights", torch.empty(0)).numel()
        of_model = ((), *[(features,)] * 4, (points, features), (points,), (points, points), ())
        shapes |= {begin + name: shape for name, shape in zip(GaussianProcess._fields, of_model, strict=True)}
    for name, shape in shapes.items():
        tensor = known.tensors.get(name, torch.empty(0))
        if tensor.shape != shape or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of shape {tuple(tensor.shape)}; expected {shape}, finite")
    estimators = {
        part: Estimator(
            model=GaussianProcess(*(known.tensors[begin + name].float() for name in GaussianProcess._fields)),
            **{name: spec[part][name] for name in (*NUMBERS, "beyond_agreement")},
        )
        for part, begin in PARTS.items()
    }
    return Calibration(
        replace(estimators["estimator"], source=estimators["source"]),
        network=known.network,
        normal=Reference(*(known.tensors[name].float() for name in Reference._fields)),
        **{name: spec[name] for name in SCHEMA if name not in PARTS} | {"corruptions": tuple(spec["corruptions"])},
    )


def calibrate(
    net: nn.Module | Backbone,
    images: Tensor,
    labels: Tensor,
    *,
    method: str | AnyMethod = "tribe",
    guard: Any = None,
    corruptions: Sequence[str] | None = None,
    window: int = WINDOW,
    seed: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """Learn from labelled source images how to estimate accuracy without labels.

    Args:
        net: the classifier, as for `tribe.adapt`.
        images: (N, C, H, W) in [0, 1], at least 200, better 1,000 or more. The network must not have been trained on
            them: on its training images it is right more often than on any others.
        labels: (N,) class numbers.
        method: what will answer, or its name, with its time filter: ``tribe+time``. The estimate is of its answers.
        guard: the `tribe.Guard` that will guard it, such as one of ``Guard.fitted``; None: that of the method, if any.
        corruptions: names from ``tribe.corruptions.names(family)``, at least three; by default all.
        window: images that an estimate is for.
        seed: of the order of images and of the corruptions.
        progress: called after every batch, with how many are done and how many there are.
    """
    backbone = net if isinstance(net, Backbone) else Backbone(net)
    built = _built(backbone, method, guard)
    require(is_whole(window, least=50), "window is how many images an estimate is for, at least 50", window)
    images, labels = check_images(images, labels)
    conditions = choose_conditions(images.shape[1:], corruptions)
    logits = source_logits(backbone, images)
    check_labels(logits, labels)
    for doubt in doubt_labels(logits, labels):
        warn(doubt)
    temperature = fit_temperature(logits, labels)
    player = Player(backbone, built, images, labels, conditions, temperature, seed)
    return calibrate_played(player, player.run(progress), logits, int(window))


def calibrate_played(player: Player, streams: Sequence[Labelled], logits: Tensor, window: int = WINDOW) -> Calibration:
    """Return the calibration from streams that were played, and the source's logits of the clean images (N, K)."""
    labels, classes, predicted = player.labels, logits.shape[-1], logits.argmax(-1)
    share = (entropy(logits) / math.log(classes)).double()
    return Calibration(
        estimator=fit(streams, classes, player.temperature, window),
        method=Pipeline.of(player.method).answers_by,
        network=player.net.fingerprint(exact=False),
        images=len(labels),
        accuracy=float((predicted == labels).double().mean()),
        corruptions=player.names[1:],
        normal=fit_reference(share, predicted, labels, classes),
    )


def _built(net: Backbone, method: Any, guard: Any) -> AnyMethod:
    """Return what is calibrated: a method with its guard and its filter."""
    kinds = tuple(guards.get(name) for name in guards.names())
    if isinstance(method, kinds):
        raise TypeError("a guard guards a method: give tribe.calibrate(..., method='tribe', guard=GUARD)")
    if not isinstance(method, str | Method | Pipeline):
        raise TypeError(f"method is a name, such as 'tribe+guard', or a method that is built; got {method!r}")
    if guard is not None and not isinstance(guard, kinds):
        raise TypeError(f"guard is a tribe.Guard, such as tribe.Guard.fitted returns; got {guard!r}")
    return build_method(net, method, None, None, {}, guard)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature with the lowest cross-entropy of logits (N, K) / temperature (Guo et al., ICML 2017).

    A weak prior keeps it near 1 where there are hardly any errors to learn it from.
    """

    def cost(log_t: float) -> float:
        return float(cross_entropy(logits.double() / math.exp(log_t), labels).sum()) + PRIOR * log_t**2

    low, high = math.log(0.1), math.log(20.0)
    for _ in range(40):
        third = (high - low) / 3
        low, high = (low, high - third) if cost(low + third) < cost(high - third) else (low + third, high)
    return math.exp((low + high) / 2)


# -- the images --------------------------------------------------------------------------------------------------------


def check_images(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sound images and their labels, on the CPU."""
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(
            f"images are {images.dtype} of shape {tuple(images.shape)}; expected floating point (N, C, H, W) in [0, 1]"
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; expected a class number for each of "
            f"{len(images)} images"
        )
    good = good_images(images, 1)
    images, labels = images[good].cpu(), labels.to(images.device)[good].cpu().long()
    if len(labels) < LEAST:
        raise ValueError(
            f"{len(labels)} images that can be used are too few to calibrate with; expected at least {LEAST}, better "
            "1,000, that the network was not trained on"
        )
    return images, labels


def check_labels(logits: Tensor, labels: Tensor) -> None:
    """Refuse labels out of range, and labels that contradict the network."""
    classes = logits.shape[-1]
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(
            f"the network has {classes} classes, numbered from 0; labels go from {int(labels.min())} to "
            f"{int(labels.max())}"
        )
    accuracy, chance = float((logits.argmax(-1) == labels).double().mean()), 1 / classes
    if accuracy < chance + NEAR_CHANCE * (1 - chance):
        raise ValueError(
            f"the network is right on {100 * accuracy:.1f} % of these images, and guessing is on {100 * chance:.1f} %: "
            "are the classes numbered in the network's order, and are the images in [0, 1], as the network takes them?"
        )


def doubt_labels(logits: Tensor, labels: Tensor, names: Sequence[str] = ()) -> list[str]:
    """Return doubts about labelled images: the network knows them too well, or another order of its classes."""
    predicted, classes, doubts = logits.argmax(-1), logits.shape[-1], list[str]()
    accuracy = float((predicted == labels).double().mean())
    if accuracy >= TOO_GOOD:
        doubts.append(
            f"the network is right on {100 * accuracy:.1f} % of these images: if it was trained on them, estimates of "
            "its accuracy will be too high. Take images that no training used"
        )
    confusion = torch.zeros(classes, classes).index_put_((labels, predicted), torch.tensor(1.0), accumulate=True)
    share = confusion / confusion.sum(1, keepdim=True).clamp_min(1)
    for label in ((share.amax(1) >= SWAPPED) & (confusion.sum(1) >= FEW)).nonzero()[:, 0].tolist():
        if (other := int(share[label].argmax())) != label:
            one, two = (names[k] if names else f"class {k}" for k in (label, other))
            doubts.append(
                f"of the images of {one}, {100 * float(share[label, other]):.0f} % are predicted as {two}: are the "
                "labels numbered in the network's order?"
            )
    if missing := classes - len(labels.unique()):
        doubts.append(f"{missing} of {classes} classes have no image: take images of all classes")
    return doubts
