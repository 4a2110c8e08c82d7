"""Diagnose a model, and some images, before adapting: what can adapt, what looks wrong, which methods fit."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tribe import methods
from tribe.core import kernels
from tribe.core.backbone import Backbone
from tribe.core.graphs import cuda_graphs
from tribe.core.losses import entropy
from tribe.core.moments import observe
from tribe.core.placement import by_reason
from tribe.core.rules import Frozen
from tribe.core.slots import Slot, StatisticsSlot
from tribe.core.state import count_bytes
from tribe.core.validation import PROBABILITIES, are_probabilities, good_images, in_range
from tribe.norms import pool_batch

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MISSING = {  # what a method works on: why it is of no use to a network without it
    "affine": "no layer has affine parameters to learn",
    "statistics": "the network has no BatchNorm: batch statistics change nothing",
    "features": "no classifier layer was found that sees each image once: tribe.Backbone(model, classifier=...)",
}
ENOUGH = 16  # labelled images that show whether a network is better than chance
PACKED = "tribe with class_stats='packed'"
LARGE = 50e6  # bytes of a state from which on leaner settings are named
OFF, FAR = 1.0, 4.0  # shifts at the first layer: above OFF another scaling is tried, above FAR it is a problem


@dataclass(frozen=True)
class LayerReport:
    """A normalisation layer, and what can adapt in it."""

    name: str
    kind: str
    channels: int
    statistics: bool
    affine: bool


@dataclass(frozen=True)
class Report:
    """The result of `doctor`. ``str(report)`` is for people, ``dataclasses.asdict(report)`` for programs."""

    adaptable: bool
    layers: list[LayerReport] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    classes: int | None = None
    classifier: str | None = None
    features: int | None = None
    methods: dict[str, str] = field(default_factory=dict)  # name -> "" if it fits, else why not
    needs: dict[str, str] = field(default_factory=dict)  # name -> what a method that fits must know of the source data
    # What a method keeps for each stream, in bytes; with its settings if they are not the defaults.
    state_bytes: dict[str, int] = field(default_factory=dict)
    shift: float | None = None  # how far the batch is from the source at the first layer, see `_first_shift`
    confidence: float | None = None
    accuracy: float | None = None  # on these images, if their labels are given
    graphs: str | None = None  # "available", or why steps cannot be captured in CUDA graphs
    kernels: str | None = None  # "on", and how they were checked, or why Triton's kernels do not run
    fusion: str | None = None  # what kernels compute together, or why they do not
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        alike: dict[tuple[str, bool, bool], list[LayerReport]] = {}
        for layer in self.layers:
            alike.setdefault((layer.kind, layer.statistics, layer.affine), []).append(layer)
        lines, count = ["can be adapted" if self.adaptable else "cannot be adapted"], len(self.problems)
        if self.adaptable and count:
            lines[0] += f", but {count} problem{'s were' if count > 1 else ' was'} found, see below"
        for (kind, *has), group in alike.items():
            parts = " and ".join(itertools.compress(("statistics", "affine parameters"), has))
            lines.append(f"  {len(group)} x {kind}, {sum(g.channels for g in group)} channels: {parts or 'batch only'}")
        lines += [f"  left as they are: {text}" for text in by_reason(self.left_alone)]
        if self.classifier is not None:
            lines.append(f"  {self.classes} classes, from layer {self.classifier!r}")
        if (most := self.state_bytes.get("tribe")) is not None:
            leaner = [f"{name} {_size(n)}" for name, n in self.state_bytes.items() if n < most]
            many = f"; leaner: {', '.join(leaner)}" if most >= LARGE and leaner else ""
            lines.append(f"  state of a stream: tribe {_size(most)}{many}")
        measured = {
            "first layer: statistics of these images {:.2f} deviations from the source's": self.shift,
            "mean confidence on these images: {:.0%}": self.confidence,
            "accuracy on these images: {:.0%}": self.accuracy,
        }
        lines += [f"  {text.format(value)}" for text, value in measured.items() if value is not None]
        gpu = {"CUDA graphs": self.graphs, "kernels": self.kernels, "fusion": self.fusion}
        for state in filter(None, dict.fromkeys(gpu.values())):
            lines.append(f"  {', '.join(name for name in gpu if gpu[name] == state)}: {state}")
        if fitting := [name for name, reason in self.methods.items() if not reason and name not in self.needs]:
            lines.append(f"  methods that fit: {', '.join(fitting)}")
        if self.needs:
            lines.append(f"  methods that fit once they know the source data (tribe source): {', '.join(self.needs)}")
        lines += [f"  {name}: {reason}" for name, reason in self.methods.items() if reason]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


@torch.inference_mode(False)  # a gradient is computed
def doctor(
    model: nn.Module | Backbone, x: Tensor | None = None, labels: Tensor | None = None, *, noise: bool = False
) -> Report:
    """Report what can adapt in a model and whether its input looks right; changes nothing.

    Args:
        model: the classifier, or a `Backbone` of it.
        x: a batch of images (B, ...) as the model will get them; None: the input is not checked.
        labels: the classes (B,) of clean images. They show whether the network has its classes in the same order.
        noise: ``x`` is random and serves to test shapes only: its values are not reported as a problem.

    >>> report = doctor(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4)))
    >>> report.adaptable, report.classes, [layer.name for layer in report.layers]
    (True, 4, ['1'])
    """
    try:
        net = model if isinstance(model, Backbone) else Backbone(model)
    except (ValueError, TypeError) as error:
        return Report(False, problems=[str(error)])
    layers = []
    for slot in net.slots:
        statistics, affine = getattr(slot.layer, "running_mean", None) is not None, slot.layer.weight is not None
        layers.append(LayerReport(slot.name, type(slot.layer).__name__, slot.channels, statistics, affine))
    report: dict[str, Any] = {
        "layers": layers,
        "left_alone": dict(net.left_alone),
        "classes": net.classes,
        "classifier": net.classifier,
        "problems": [],
    }
    if net.classes is None:
        report["problems"].append("no classifier layer found: pass classes= to tribe.adapt")
    if broken := list(_not_finite(net)):
        more = f" and {len(broken) - 4} more" if len(broken) > 4 else ""
        report["problems"].append(f"the network's own numbers are not finite: {', '.join(broken[:4])}{more}")
    if x is not None:
        warned, net._warned = net._warned, True  # of layers that the network does not call: the report lists them
        try:
            report.update(_examine(net, x, labels, report, noise))
        finally:
            net._warned = warned
    features = report["features"] is not None if "features" in report else net.classifier is not None
    has = {"affine": net.has_affine, "statistics": net.has_statistics, "features": features}
    classes = {name: methods.get(name) for name in methods.names()}
    fit = {name: next((MISSING[p] for p in method.works_on if not has[p]), "") for name, method in classes.items()}
    needs = {name: method.needs for name, method in classes.items() if method.needs and not fit[name]}
    sizes = {} if net.classes is None else _state_bytes(net, max(net.classes, 2), fit)
    return Report(True, **report, methods=fit, needs=needs, state_bytes=sizes, **_on_gpu(net, x, report["problems"]))


def _on_gpu(net: Backbone, x: Tensor | None, problems: list[str]) -> dict[str, Any]:
    """Return the fields of a report on graphs, kernels and fusion."""
    gpu, on_cpu = net.device.type == "cuda", f"off: the network is on {net.device}, and they need a GPU"
    with torch.cuda.device(net.device) if gpu else contextlib.nullcontext():  # where kernels launch
        can_launch = kernels.can_launch(net.eps)
        graphs = _try_graphs(net, x, problems) if gpu else on_cpu
    state = kernels.state() if gpu or can_launch else on_cpu
    fusion = net.fusion.describe() if net.fusion.tried or can_launch else "off: it needs kernels" if gpu else on_cpu
    return {"graphs": graphs, "kernels": state, "fusion": fusion}


@torch.no_grad()
def _try_graphs(net: Backbone, x: Tensor | None, problems: list[str]) -> str:
    if x is None or problems:
        return "available" if x is None else "not tried: there are problems"
    affine, stats = net.source()
    try:
        images = x.to(net.device).unsqueeze(0)
        cuda_graphs(net.device)(lambda: net(images, affine, stats, Frozen()))
    except Exception as error:  # the network is the caller's, and may raise anything
        return f"off: a pass cannot be captured ({type(error).__name__}: {error})"
    return "available"


def _state_bytes(net: Backbone, classes: int, fit: dict[str, str]) -> dict[str, int]:
    """Return the bytes of TRIBE's state of a stream, and of leaner ones. Sizes are linear in the number of classes."""
    settings = {"tribe": {}, PACKED: {"class_stats": "packed"}, "tent": {}, "bn": {}}
    sizes = {}
    for name, fields in settings.items():
        if not fit[method := name.partition(" ")[0]]:
            two, three = (count_bytes(methods.create(method, classes=k, **fields).init(net)) for k in (2, 3))
            sizes[name] = two + (classes - 2) * (three - two)
    return sizes


def _size(count: int) -> str:
    """Return a number of bytes for people.

    >>> _size(52), _size(504_000), _size(505_100_000)
    ('52 bytes', '504 kB', '505 MB')
    """
    name, unit = next(((name, unit) for name, unit in (("MB", 1e6), ("kB", 1e3)) if count >= unit), ("bytes", 1))
    return f"{count / unit:.3g} {name}"


def _not_finite(net: Backbone) -> Iterator[str]:
    for place, module in net.model.named_modules():
        layer = module.layer if isinstance(module, Slot) else module
        for name, t in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            if t.is_floating_point() and not t.is_meta and not t.isfinite().all():
                yield f"{place}.{name}" if place else name


def _examine(net: Backbone, x: Tensor, labels: Tensor | None, report: dict[str, Any], noise: bool) -> dict[str, Any]:
    """Return the fields of a report that need images; add to its problems."""
    problems = report["problems"]
    if not isinstance(x, Tensor):
        problems.append(f"images are {type(x).__name__}; expected a tensor. For an array: torch.from_numpy(x)")
        return {}
    if x.dim() < 2 or not x.numel():
        problems.append(f"there are no images in x, of shape {tuple(x.shape)}; expected a batch of them (B, ...)")
        return {}
    if not x.is_floating_point():
        how = "convert them: images.float()" if x.dtype == torch.bool else "divide by 255 to get floats in [0, 1]"
        problems.append(f"images are {x.dtype}: {how}")
        x = x.float()
    if not (good := good_images(x, 1)).all():
        problems.append(f"{int((~good).sum())} of {len(x)} images are not finite, or so large that they count as bad")
        labels = labels[good] if labels is not None and len(labels) == len(x) else labels
        x = x[good] if good.any() else torch.zeros_like(x)
    called: set[str] = set()
    try:
        shift, logits, features = _first_shift(net, x, called)
    except (ValueError, TypeError, AttributeError) as error:
        problems.append(str(error))
        return {}
    if net.has_affine:
        _try_gradients(net, x[:2], problems)
    idle = {slot.name: "the network did not call it on these images" for slot in net.slots if slot.name not in called}
    if shift is not None and not noise:
        _suspect_scaling(net, x, shift, problems)
    confidence = _confidence(net, logits, problems, noise)
    return {
        "left_alone": report["left_alone"] | idle,
        "shift": shift,
        "confidence": confidence,
        "accuracy": None if labels is None else _accuracy(logits, labels, confidence, problems),
        "features": None if features is None else features.shape[-1],
    }


def _confidence(net: Backbone, logits: Tensor, problems: list[str], noise: bool) -> float | None:
    """Return the mean confidence, or None if the logits allow none; add what looks wrong about the predictions."""
    finite = logits.isfinite().all(1)
    if not finite.all():
        problems.append(f"the network's logits are not finite for {int((~finite).sum())} of {len(logits)} images")
        return None
    classes = logits.shape[-1]
    if net.classes not in (None, classes):
        problems.append(f"the network gives {classes} classes, its layer {net.classifier!r} {net.classes}")
    if classes < 2:
        problems.append("the network gives one number an image; methods expect logits of at least two classes")
        return None
    if are_probabilities(logits):
        problems.append(PROBABILITIES)
        logits = logits.clamp_min(torch.finfo(logits.dtype).tiny).log()
    if not noise and 1 - (entropy(logits).mean() / math.log(classes)).item() < 0.02:
        problems.append("predictions are close to uniform: are the weights loaded?")
    return logits.softmax(-1).amax(-1).mean().item()


def _accuracy(logits: Tensor, labels: Tensor, confidence: float | None, problems: list[str]) -> float | None:
    """Return the share of images that are predicted right; add a problem if it is not better than chance."""
    if labels.shape != (len(logits),) or labels.is_floating_point():
        problems.append(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; expected {len(logits)} integers, one for each "
            "image"
        )
        return None
    labelled = labels >= 0
    if not labelled.any() or confidence is None:
        return None
    count, chance = int(labelled.sum()), 1 / logits.shape[-1]
    if int(labels.max()) >= logits.shape[-1]:
        problems.append(f"labels reach {int(labels.max())}, but the network has {logits.shape[-1]} outputs")
        return None
    right = int((logits.argmax(-1).cpu() == labels.cpu())[labelled].sum())
    if count >= ENOUGH and right <= count * chance + 3 * math.sqrt(count * chance * (1 - chance)):
        problems.append(
            f"{right} of {count} labelled images are predicted right, which is not better than chance, with a mean "
            f"confidence of {confidence:.0%}: are the images clean, and are the network's classes in the order of the "
            "labels? Networks of ImageNet number the sorted wnids (n01440764 is 0)"
        )
    return right / count


def _try_gradients(net: Backbone, x: Tensor, problems: list[str]) -> None:
    affine, stats = net.source()
    try:
        with torch.enable_grad():
            affine = affine.leaf()
            logits = net(x.to(net.device, copy=True).unsqueeze(0), affine, stats, Frozen()).logits
            torch.autograd.grad(logits.float().square().sum(), affine, allow_unused=True)
    except (ValueError, RuntimeError) as error:  # RuntimeError: raised by torch in the backward pass
        problems.append(f"no gradient can be taken through the network: {error}")


@torch.no_grad()
def _first_shift(net: Backbone, x: Tensor, called: set[str]) -> tuple[float | None, Tensor, Tensor | None]:
    """Return the shift of a batch at the first BatchNorm, with the logits and features.

    The shift is the distance of the mean in the source's deviations plus the log ratio of the deviations, averaged
    over channels; None without a BatchNorm, or if it is not finite. ``called`` collects the names of the layers that
    the network calls.
    """
    shifts: list[float] = []

    def slot_hook(slot: Slot, received: Tensor) -> None:
        called.add(slot.name)
        if not shifts and isinstance(slot, StatisticsSlot) and slot.layer.running_mean is not None:
            everything = torch.ones(1, len(received), dtype=torch.bool, device=received.device)
            mean, var = pool_batch(*observe(received.unsqueeze(0)), everything)  # (1, 1, C)
            layer = slot.layer
            source_mean, source_std = layer.running_mean.to(mean), (layer.running_var.to(mean) + slot.layer_eps).sqrt()
            ratio = (var + slot.layer_eps).sqrt() / source_std
            shifts.append(((mean - source_mean).abs() / source_std + ratio.log().abs()).mean().item())

    affine, stats = net.source()
    logits, features, _ = net(x.to(net.device).unsqueeze(0), affine, stats, Frozen(), slot_hook=slot_hook)
    shift = shifts[0] if shifts and math.isfinite(shifts[0]) else None
    return shift, logits[0].float(), None if features is None else features[0]


def _suspect_scaling(net: Backbone, x: Tensor, shift: float, problems: list[str]) -> None:
    """Report another scaling of the same images that fits the first layer much better."""
    if not in_range(x):
        low, high = (v.item() for v in x.aminmax())
        problems.append(f"images reach from {low:.3g} to {high:.3g}; methods that augment expect [0, 1]")
    others = {"divided by 255": x / 255, "multiplied by 255": x * 255}
    if x.dim() == 4 and x.shape[1] == 3:
        mean, std = (x.new_tensor(v).view(3, 1, 1) for v in IMAGENET)
        others["normalised with ImageNet's mean and std"] = (x - mean) / std
        others["un-normalised (times ImageNet's std plus its mean)"] = x * std + mean
    shifts = {name: _first_shift(net, other, set())[0] for name, other in others.items()}
    scores = {name: math.inf if value is None else value for name, value in shifts.items()}
    best = min(scores, key=scores.__getitem__)
    if shift > OFF and scores[best] < shift / 2:
        problems.append(
            f"the images look wrongly scaled for this network: its first layer is {shift:.2f} deviations off, "
            f"and {scores[best]:.2f} with the images {best}"
        )
    elif shift > FAR:
        problems.append(
            f"the first layer is {shift:.2f} deviations off: the images are unlike what the network was trained on"
        )
