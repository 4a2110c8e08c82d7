"""Look at a model (and some images) before adapting: what can adapt, what looks wrong, which methods fit."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tribe import methods
from tribe.backbone import Backbone
from tribe.losses import entropy
from tribe.moments import observe
from tribe.norms.batch import pool_batch
from tribe.norms.frozen import Frozen
from tribe.slots import StatisticsSlot

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OFF, FAR = 1.0, 4.0  # shifts at the first layer that another scaling may explain, and that need an explanation


@dataclass(frozen=True)
class Layer:
    """One normalisation layer and what of it can adapt."""

    name: str
    kind: str
    channels: int
    statistics: bool
    affine: bool


@dataclass(frozen=True)
class Report:
    """What `doctor` found. ``str(report)`` is for people, ``report.as_dict()`` for programs."""

    adaptable: bool
    layers: list[Layer] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    classes: int | None = None
    classifier: str | None = None
    features: int | None = None
    methods: dict[str, str] = field(default_factory=dict)  # name -> "" if it fits, else why not
    shift: float | None = None  # how far the batch is from the source at the first layer, see `_first_shift`
    confidence: float | None = None
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        kinds: dict[str, list[Layer]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kind, []).append(layer)
        lines = ["can be adapted" if self.adaptable else "cannot be adapted"]
        for kind, group in kinds.items():
            parts = " and ".join(
                part
                for part, has in (("statistics", group[0].statistics), ("affine parameters", group[0].affine))
                if has
            )
            lines.append(f"  {len(group)} x {kind}, {sum(g.channels for g in group)} channels: {parts or 'batch only'}")
        lines += [f"  left as it is: {name} ({reason})" for name, reason in self.left_alone.items()]
        if self.classifier is not None:
            lines.append(f"  {self.classes} classes, from layer {self.classifier!r}")
        if self.shift is not None:
            lines.append(f"  first layer: statistics of these images {self.shift:.2f} deviations from the source's")
        if self.confidence is not None:
            lines.append(f"  mean confidence on these images: {self.confidence:.0%}")
        if fitting := [name for name, reason in self.methods.items() if not reason]:
            lines.append(f"  methods that fit: {', '.join(fitting)}")
        lines += [f"  {name}: {reason}" for name, reason in self.methods.items() if reason]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def doctor(model: nn.Module, x: Tensor | None = None) -> Report:
    """Say what of a model can be adapted and whether its input looks right; changes nothing.

    Args:
        model: the classifier.
        x: a batch of images (B, ...) as they would be given to it, if at hand.

    >>> report = doctor(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4)))
    >>> report.adaptable, report.classes, [layer.name for layer in report.layers]
    (True, 4, ['1'])
    """
    try:
        net = Backbone(model)
    except (ValueError, TypeError) as error:
        return Report(False, problems=[str(error)])
    layers = [
        Layer(
            slot.name,
            type(slot.layer).__name__,
            slot.channels,
            getattr(slot.layer, "running_mean", None) is not None,
            slot.layer.weight is not None,
        )
        for slot in net.slots
    ]
    report: dict[str, Any] = {
        "layers": layers,
        "left_alone": dict(net.left_alone),
        "classes": net.classes,
        "classifier": net.classifier,
        "methods": {name: _unfit(name, net, layers) for name in methods.names()},
        "problems": [],
    }
    if net.classes is None:
        report["problems"].append("no classifier layer found: pass classes= to tribe.adapt")
    if x is not None:
        report.update(_examine(net, x, report["problems"]))
    return Report(True, **report)


def _unfit(name: str, net: Backbone, layers: list[Layer]) -> str:
    """Why a method would do nothing useful for this network, if so."""
    if name == "bn" and not net.has_statistics:
        return "the network has no BatchNorm: batch statistics change nothing"
    if not any(layer.affine for layer in layers) and name not in ("source", "bn"):
        return "no layer has affine parameters to learn"
    return ""


def _examine(net: Backbone, x: Tensor, problems: list[str]) -> dict[str, Any]:
    if not x.is_floating_point():
        problems.append(f"images are {x.dtype}: divide by 255 to get floats in [0, 1]")
        x = x.float()
    finite = x.isfinite()
    if not finite.all():
        problems.append(f"{int((~finite.flatten(1).all(1)).sum())} of {len(x)} images are not finite")
        x = x.nan_to_num(0.0, 0.0, 0.0)
    try:
        shift, logits, features = _first_shift(net, x)
    except (ValueError, TypeError) as error:
        problems.append(str(error))
        return {}
    if shift is not None:
        _suspect_scaling(net, x, shift, problems)
    confidence = logits.softmax(-1).amax(-1).mean().item()
    certain = 1 - (entropy(logits).mean() / math.log(logits.shape[-1])).item()
    if certain < 0.02:
        problems.append("predictions are close to uniform: are the weights loaded?")
    if net.classes not in (None, logits.shape[-1]):
        problems.append(f"the network gives {logits.shape[-1]} classes, its layer {net.classifier!r} {net.classes}")
    return {"shift": shift, "confidence": confidence, "features": None if features is None else features.shape[-1]}


@torch.no_grad()
def _first_shift(net: Backbone, x: Tensor) -> tuple[float | None, Tensor, Tensor | None]:
    """How far the batch is from the source at the first BatchNorm: mean off in deviations plus log ratio of those."""
    seen: list[float] = []
    everything = torch.ones(1, len(x), dtype=torch.bool, device=net.device)

    def watch(slot: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not seen and isinstance(slot, StatisticsSlot) and slot.layer.running_mean is not None:
            mean, var = pool_batch(*observe(args[0].unsqueeze(0)), everything)  # (1, 1, C)
            layer = slot.layer
            source_mean, source_std = layer.running_mean.to(mean), (layer.running_var.to(mean) + slot.layer_eps).sqrt()
            ratio = (var + slot.layer_eps).sqrt() / source_std
            seen.append(((mean - source_mean).abs() / source_std + ratio.log().abs()).mean().item())

    handles = [slot.register_forward_pre_hook(watch) for slot in net.slots]
    try:
        affine, stats = net.source()
        logits, features, _ = net(x.to(net.device).unsqueeze(0), affine, stats, Frozen())
    finally:
        for handle in handles:
            handle.remove()
    return (seen[0] if seen else None), logits[0].float(), None if features is None else features[0]


def _suspect_scaling(net: Backbone, x: Tensor, shift: float, problems: list[str]) -> None:
    """If another scaling of the same images suits the first layer much better, name it."""
    low, high = x.min().item(), x.max().item()
    if low < -1e-3 or high > 1 + 1e-3:
        problems.append(f"images reach from {low:.3g} to {high:.3g}; methods that augment expect [0, 1]")
    others = {"divided by 255": x / 255, "multiplied by 255": x * 255}
    if x.dim() == 4 and x.shape[1] == 3:
        mean, std = (x.new_tensor(v).view(3, 1, 1) for v in IMAGENET)
        others["normalised with ImageNet's mean and std"] = (x - mean) / std
        others["un-normalised (times ImageNet's std plus its mean)"] = x * std + mean
    scores = {name: _first_shift(net, other)[0] or 0.0 for name, other in others.items()}
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
