"""Calibration: what health must know of a network and a method, from labelled source images that no training used.

The method plays the images as three streams, clean and under the corruptions of their family: all mixed, one
corruption for hundreds of images after another, and the same with bursts of classes, some of which are rare. The labels
say how accurate each window was; `tribe.health.fitting` learns it from signals without labels. Every method is
over-confident in its own way: so an estimator belongs to one network and one method.

    calibration = tribe.calibrate(net, images, labels, method="tribe")
    calibration.save("health.safetensors")          # or: tribe source health --model ... --dataset ...
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.losses import cross_entropy, entropy
from tribe.core.validation import good_images
from tribe.fields import Count, Share, check_fields, is_whole, require
from tribe.health.estimate import WINDOW, Estimator, Features, Images, per_image_signals
from tribe.health.fitting import Labelled, fit
from tribe.health.martingale import LEVELS, Reference, fit_reference
from tribe.health.probe import BATCH, ask, source_logits, start_shift
from tribe.health.regression import GaussianProcess
from tribe.io.json_files import check
from tribe.knowledge import Knowledge, KnowledgeError
from tribe.methods import AnyMethod, Method, Pipeline, guards
from tribe.methods.building import build_method
from tribe.registry import nearest

NAME = "health"  # of the knowledge in a file
PARTS = {"estimator": "model.", "source": "source."}  # how the names of an estimator's tensors in a file begin
NUMBERS = tuple(field.name for field in fields(Estimator) if field.name not in ("model", "source"))
ADVICE = "tribe source health --model ... --dataset ..."
PROBE = 4  # one image in so many is also predicted by the source
LEAST = 200  # images
PRIOR = 10.0  # strength of the prior of the logarithm of the temperature, in images
NEAR_CHANCE = 0.1  # share of the way from chance to perfection below which labels contradict the network

ORDERS = ("iid", "continual", "ptta")  # scenarios: conditions mixed, one after another, and with bursts of classes
STRETCH = 512  # images of one condition after another: a method is better at the end of a stretch than at its beginning
MIXED = 128  # images of each condition where all are mixed: there are no stretches
LEAST_CORRUPTIONS = 3
IMBALANCE = 100.0  # the most images of a class over the fewest, in the stream with bursts
SEVERITIES = {"mnist": (5,)}  # MNIST-C has a single strength
USUAL_SEVERITIES = (3, 5)

Condition = tuple[str, int]  # a corruption and a severity; ("clean", 0)
Progress = Callable[[int, int], None]  # batches done, of so many


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
            spec[part] = {name: getattr(estimator, name) for name in NUMBERS}
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
    **{part: dict.fromkeys(NUMBERS, float) for part in PARTS},
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
            **{name: spec[part][name] for name in NUMBERS},
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
    images, labels = _checked(images, labels)
    conditions = choose_conditions(images.shape[1:], corruptions)
    logits = source_logits(backbone, images)
    _check_labels(logits, labels)
    temperature = fit_temperature(logits, labels)
    share = (entropy(logits) / math.log(logits.shape[-1])).double()
    streams = _play(backbone, built, images, labels, conditions, temperature, seed, progress)
    return Calibration(
        estimator=fit(streams, logits.shape[-1], temperature, int(window)),
        method=Pipeline.of(built).answers_by,
        network=backbone.fingerprint(exact=False),
        images=len(labels),
        accuracy=float((logits.argmax(-1) == labels).double().mean()),
        corruptions=tuple(dict.fromkeys(name for name, severity in conditions if severity)),
        normal=fit_reference(share, logits.argmax(-1), labels, logits.shape[-1]),
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


def _checked(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
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


def _check_labels(logits: Tensor, labels: Tensor) -> None:
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


# -- the streams: a plan says which image comes when, and under which condition ----------------------------------------


class Plan(NamedTuple):
    """One stream of N images."""

    order: str  # the name of the scenario
    condition: Tensor  # (N,) int64, the place in the list of conditions
    number: Tensor  # (N,) int64, the place among the labelled images


def choose_conditions(shape: Sequence[int], names: Sequence[str] | None) -> list[Condition]:
    """The corruptions and severities that are played, for images (C, H, W); None: all corruptions of their family."""
    from tribe.data import corruptions as corrupting  # not imported with `tribe`: an adapter does not need it

    family = corrupting.family_for(shape)
    known = corrupting.names(family)
    chosen = tuple(known) if names is None else tuple(names)
    for name in chosen:
        if name not in known:
            raise ValueError(f"unknown corruption {name!r} of family {family!r}: {nearest(name, known)}")
    if len(set(chosen)) < LEAST_CORRUPTIONS:
        raise ValueError(
            f"corruptions are {len(set(chosen))} different names; expected at least {LEAST_CORRUPTIONS}, so that the "
            "error on one that is left out can be measured"
        )
    severities = SEVERITIES.get(family, USUAL_SEVERITIES)
    return [("clean", 0), *((name, severity) for name in dict.fromkeys(chosen) for severity in severities)]


def plan_streams(labels: Tensor, conditions: Sequence[Condition], seed: int) -> list[Plan]:
    """A plan for each of `ORDERS`."""
    return [_plan(labels, conditions, order, seed) for order in ORDERS]


def side_by_side(plans: Sequence[Plan]) -> list[list[Plan]]:
    """The plans in groups of equal length: a method plays the streams of a group in one call."""
    lengths = dict.fromkeys(len(plan.number) for plan in plans)
    return [[plan for plan in plans if len(plan.number) == length] for length in lengths]


def _plan(labels: Tensor, conditions: Sequence[Condition], order: str, seed: int) -> Plan:
    """In bursts, each condition has its own frequent classes: a long tail of imbalance 1 to 100, with replacement."""
    from tribe.data import scenarios  # not imported with `tribe`

    draw = torch.Generator().manual_seed(seed)
    count = min(MIXED if order == "iid" else STRETCH, len(labels))
    present, class_number = labels.unique(return_inverse=True)
    chosen = []
    for _ in conditions:
        if order != "ptta":
            chosen.append(torch.randperm(len(labels), generator=draw)[:count])
            continue
        rank = torch.randperm(len(present), generator=draw) / max(len(present) - 1, 1)
        share = IMBALANCE ** -(rank * torch.rand(1, generator=draw)) / class_number.bincount()
        chosen.append(torch.multinomial(share[class_number], count, replacement=True, generator=draw))
    names = [f"{name}@{severity}" for name, severity in conditions]
    whole = scenarios.create(order, order="random").on(names).schedule([labels[i] for i in chosen], seed)
    return Plan(order, whole.domain, torch.stack(chosen)[whole.domain, whole.index])


def corrupt_images(images: Tensor, number: Tensor, conditions: Sequence[Condition], seed: int) -> Tensor:
    """Images by their numbers (N,), each under its condition."""
    from tribe.data import corruptions as corrupting  # not imported with `tribe`

    x = images[number]
    for name, severity in set(conditions):
        if severity:
            here = torch.tensor([condition == (name, severity) for condition in conditions])
            x[here] = corrupting.apply(x[here], name, severity, seed=seed, index=number[here])
    return x


def _play(
    net: Backbone,
    method: AnyMethod,
    images: Tensor,
    labels: Tensor,
    conditions: Sequence[Condition],
    temperature: float,
    seed: int,
    progress: Progress | None,
) -> list[Labelled]:
    """Play the method over one stream of each order; streams of equal length play side by side."""
    groups = side_by_side(plan_streams(labels, conditions, seed))
    batches, done = sum(math.ceil(len(group[0].number) / BATCH) for group in groups), 0
    kinds = {name: k for k, name in enumerate(dict.fromkeys(name for name, _ in conditions))}
    kind = torch.tensor([kinds[name] for name, _ in conditions])
    streams = list[Labelled]()
    for plans in groups:
        domain = torch.stack([plan.condition for plan in plans])  # (S, N)
        number = torch.stack([plan.number for plan in plans])
        state, shift = method.init(net, len(plans), seed), start_shift(net, len(plans))
        seen: list[tuple[Tensor, ...]] = []  # signals of each batch, and which predictions are right
        for d, i in zip(domain.split(BATCH, 1), number.split(BATCH, 1), strict=True):
            x = corrupt_images(images, i.flatten(), [conditions[k] for k in d.flatten()], seed).unflatten(0, i.shape)
            x, every = x.to(net.device), torch.ones_like(d, dtype=torch.bool, device=net.device)
            answers, shift = ask(net, shift, x, every, PROBE)
            source = source_logits(net, x.flatten(0, 1)).argmax(-1).view_as(d)
            output, state = method.step(net, state, x)
            logits = output if method.output == "logits" else output.clamp_min(torch.finfo(output.dtype).tiny).log()
            signals = per_image_signals(logits, temperature, state.info.student_agreement, answers)
            seen.append((*(t.cpu() for t in signals), logits.argmax(-1).cpu() == labels[i], source == labels[i]))
            done += 1
            if progress is not None:
                progress(done, batches)
        *whole, right, source_right = (torch.cat(column, 1) for column in zip(*seen, strict=True))
        for s, plan in enumerate(plans):
            images_of = Images(*(t[s] for t in whole))
            streams.append(Labelled(images_of, right[s], kind[plan.condition], source_right[s]))
    return streams
