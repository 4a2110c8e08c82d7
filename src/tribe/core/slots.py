"""Slots: stateless layers that replace normalisation layers and read their arguments from the current pass.

A third-party module offers no way to hand an argument to a nested layer. So `Backbone` replaces each normalisation
layer by a slot and sets the current pass, a ContextVar that each thread has its own value of; the slots read it. It is
the only dynamic scope in the library that arguments travel through.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tribe.core.context import hold
from tribe.core.moments import Epilogue, accumulation_dtype, fold, normalise, observe, observe_samples, scale_and_shift
from tribe.core.rules import Norm, PerBatch, Recorded
from tribe.core.state import Stats, tree_map

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
KNOWN_FORWARDS = {
    cls.forward
    for cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
}


@dataclasses.dataclass
class Pass:
    """The arguments of one forward pass, and the records of its slots."""

    rows: int
    batch: int
    weight: tuple[Tensor, ...]  # per slot (R, c)
    bias: tuple[Tensor, ...]
    stats: Any  # (R, K, C) before this pass: Stats or PackedStats
    norm: Norm
    labels: Any  # the labels (R, B) as the rule takes them, or None
    valid: Tensor
    called: set[int] = dataclasses.field(default_factory=set)  # indices of the slots that were called
    kept: dict[int, Any] = dataclasses.field(default_factory=dict)  # by slot, (R, K, c), after this pass
    room: Any = None  # memory for the statistics after this pass
    prepared: Callable[[slice], Any] | None = None  # by columns, what a layer gets in place of labels when first called
    folded: tuple[tuple[Tensor, Tensor], ...] | None = None  # by slot, scale and shift if the rule ignores the batch
    stored: tuple[tuple[Tensor, ...], ...] | None = None  # by slot, what torch normalises one row with, (c,) each
    features: Tensor | None = None  # the input of the classifier
    slot_hook: "SlotHook | None" = None  # called with each slot and its input
    find_order: Callable[["Slot"], bool] | None = None  # a trial: whether views come before samples at a slot
    fusing: Any = None  # a `FusionTrial` or a `FusedPass` of `tribe.core.fusion`, notified of each call of a slot


SlotHook = Callable[["Slot", Tensor], None]
SourcePass = Callable[[int, SlotHook | None], Pass]  # of so many images, with the source's normalisation
current_pass: ContextVar[Pass | None] = ContextVar("tribe_pass", default=None)


def set_current_pass(current: Pass) -> AbstractContextManager[None]:
    """Set the current pass; clear it on exit."""
    return hold(current_pass, current)


class Slot(nn.Module, ABC):
    """A layer in place of a normalisation layer. It holds nothing that adapts, only the position of its columns."""

    layer: Any  # the layer that this slot replaces

    def __init__(self, name: str, layer: nn.Module, index: int = 0, column: int = 0) -> None:
        super().__init__()
        self.name, self.index, self.channels = name, index, channels_of(layer)
        width = self.channels if getattr(layer, "running_mean", None) is not None else 0
        self.columns = slice(column, column + width)  # of its statistics
        self.tracked = width > 0  # a layer without stored statistics uses each batch's
        self.has_weight, self.has_bias = layer.weight is not None, layer.bias is not None
        self.layer_eps = float(layer.eps)  # type: ignore[arg-type]
        # torch's fused transformer layer would read .weight without calling the slot. It is not used where two eps
        # differ, and a NaN differs from everything.
        self.eps = float("nan")
        # The layers inside a normalisation layer that it applies afterwards: dropout and activation, as in timm.
        names = () if type(layer).forward in KNOWN_FORWARDS else ("drop", "act")
        inner = [getattr(layer, name, None) for name in names]
        after = [m for m in inner if isinstance(m, nn.Module) and not isinstance(m, nn.Identity)]
        self.relu = len(after) == 1 and type(after[0]) is nn.ReLU and isinstance(layer, _BatchNorm)  # fused
        self.after = nn.Sequential(*after) if after and not self.relu else None
        self.tokens_first = False  # whether tokens may come before samples, (T, N, C)
        self.views_first: bool | None = None  # the order where views (crops, time) are folded into N; None: unknown
        vars(self)["layer"] = layer  # not a submodule: it serves exports

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the arguments of the current pass."""
        current = current_pass.get()
        if current is None:
            raise RuntimeError(
                f"normalisation layer {self.name!r} was used outside a pass: call the Backbone, not the model inside "
                "it. If you did, the model itself leaves the pass: by torch.utils.checkpoint, which runs layers again "
                "during backward (turn checkpointing off), or by running layers in another thread (run them in the "
                "caller's)"
            )
        current.called.add(self.index)
        if current.slot_hook is not None:
            current.slot_hook(self, x)
        weight, bias = current.weight[self.index], current.bias[self.index]  # (R, c)
        if not self.has_weight:
            weight = torch.ones_like(weight)
        if not self.has_bias:
            bias = torch.zeros_like(bias)
        fusing = current.fusing
        epilogue = Epilogue() if fusing is None else fusing.enter(self, x)
        y = self.normalise(x, weight, bias, current, epilogue._replace(relu=True) if self.relu else epilogue)
        if self.after is not None:
            y = self.after(y)
        if fusing is not None:
            fusing.leave(self, y)
        return y

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the layer: a setting, but not a tensor, which is an argument of each pass."""
        layer = vars(self).get("layer")
        if name in vars(self).get("_modules", ()) or not hasattr(layer, name):
            return super().__getattr__(name)
        value = getattr(layer, name)
        if value is None or isinstance(value, int | float | str | tuple):
            return value
        raise AttributeError(
            f"the network reads {name!r} of its normalisation layer {self.name!r} without calling the layer, and the "
            "adapting network has no such attribute: parameters and statistics of normalisation are arguments of each "
            "pass. Let its forward call the layer, as in self.norm(x), in place of F.batch_norm and the like"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "Slot":
        self.layer._apply(fn)  # exports have the network's device and precision
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    @abstractmethod
    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, current: Pass, epilogue: Epilogue) -> Tensor:
        """Normalise (N, ...) with each row's affine parameters (R, c)."""

    def plain(self, weight: Tensor, bias: Tensor, stats: Stats | None) -> nn.Module:
        """Return the layer that the slot replaced, with these affine parameters (1, c) and statistics (1, 1, C).

        Without statistics (None) a BatchNorm normalises each batch with that batch's.
        """
        layer = self.layer
        vars(layer).pop("forward", None)  # see `place_slots`
        for hooks in (layer._forward_hooks, layer._forward_pre_hooks):  # the slot called none, see placement.py
            hooks.clear()
        for name, row in (("weight", weight), ("bias", bias)):
            if (old := getattr(layer, name)) is not None:  # it may be shared with another layer
                setattr(layer, name, nn.Parameter(row.detach().view_as(old).to(old, copy=True), requires_grad=False))
        if getattr(layer, "running_mean", None) is None:
            return layer  # type: ignore[no-any-return]
        if stats is None:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        else:
            layer.running_mean = stats.mean[0, 0, self.columns].to(layer.running_mean, copy=True)
            layer.running_var = stats.var[0, 0, self.columns].to(layer.running_var, copy=True)
        return layer  # type: ignore[no-any-return]

    def unfold(self, x: Tensor, current: Pass) -> Any:
        """Reshape (N, C, ...) to (R, B, C, ...); time or views that a model folds into N become pixels."""
        rows, batch = current.rows, current.batch
        if x.shape[0] == rows * batch:
            return x.unflatten(0, (rows, batch))
        if not batch or x.shape[0] % (rows * batch):
            raise self.mixed_images(x.shape[0], current)
        if self.puts_views_first(current):
            return x.unflatten(0, (-1, rows, batch)).movedim(0, 3)
        return x.unflatten(0, (rows, batch, -1)).movedim(2, 3)

    def puts_views_first(self, current: Pass) -> bool:
        """Return whether the views of an image, folded into N, are a batch apart (as after torch.cat) or adjacent."""
        if self.views_first is None and current.find_order is not None:
            self.views_first = current.find_order(self)
        return bool(self.views_first)

    def mixed_images(self, samples: int, current: Pass) -> RuntimeError:
        """Return the error of a layer whose input does not have one sample, or several, for each image."""
        return RuntimeError(
            f"layer {self.name!r} received {samples} samples where the pass has {current.rows} x {current.batch}: the "
            "model mixes or drops images before this layer, so statistics per image cannot be computed"
        )


class StatisticsSlot(Slot):
    """BatchNorm of any dimension: statistics and affine parameters."""

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, current: Pass, epilogue: Epilogue) -> Tensor:
        """Normalise with the scale and shift that the norm rule makes of the moments."""
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise RuntimeError(f"layer {self.name!r} has {self.channels} channels; it received {tuple(x.shape)}")
        norm = current.norm if self.tracked else PerBatch()
        fits = x.shape[0] == current.batch and accumulation_dtype(x.dtype) == weight.dtype
        if current.stored is not None and self.tracked and fits:
            if isinstance(norm, Recorded):
                seen = x.detach() if x.requires_grad else x
                current.kept[self.index] = observe_samples(seen[norm.part])
            mean, var, scale, shift = current.stored[self.index]
            own = scale if self.has_weight else None, shift if self.has_bias else None
            y = torch.batch_norm(x, *own, mean, var, False, 0.0, self.layer_eps, False)
            return y.relu_() if self.relu else y
        if isinstance(norm, Recorded):
            with torch.no_grad(), full_precision(x.device.type):
                current.kept[self.index] = observe(self.unfold(x, current)[:, norm.part], epilogue.offset)
        stats = current.stats.layer(self.columns, self.index)
        if norm.observes:  # the second call of a layer continues from the first
            stats = current.kept.get(self.index) or stats
        labels = current.labels
        if current.prepared is not None and self.index not in current.kept:
            labels = current.prepared(self.columns)
        folded = self.unfold(x, current)  # (R, B, C, ...)
        count = folded.shape[3:].numel()

        def rule(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
            mean, var, kept = norm(mean, var, count, stats, labels, current.valid, self.layer_eps)
            if self.tracked:
                current.kept[self.index] = tree_map(Tensor.detach, kept)
            return fold(mean, var, weight, bias, self.layer_eps)

        if epilogue.residual is not None:
            epilogue = epilogue._replace(residual=self.unfold(epilogue.residual, current))
        # Autocast is off: statistics stay in full precision.
        with full_precision(x.device.type):
            if norm.observes:
                y = normalise(folded, rule, epilogue)
            elif current.folded is not None:
                y = scale_and_shift(folded, *current.folded[self.index], epilogue)
            else:
                y = scale_and_shift(folded, *fold(stats.mean, stats.var, weight, bias, self.layer_eps), epilogue)
        if y.dim() == x.dim() + 1:
            return y.flatten(0, 1)
        return y.movedim(3, 0 if self.views_first else 2).reshape(x.shape)  # the inverse of `unfold`


class AffineSlot(Slot):
    """LayerNorm or GroupNorm: their statistics are per image, so only the affine parameters adapt."""

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, current: Pass, epilogue: Epilogue) -> Tensor:
        """Normalise as the layer does, then scale and shift by row."""
        y, shape = self.standardise(x)
        samples = current.rows * current.batch
        axis = int(self.tokens_first and x.shape[0] != samples and x.shape[1:-1] == (samples,))  # of the samples
        if current.rows > 1 and x.shape[axis] % samples:
            raise self.mixed_images(x.shape[axis], current)
        if current.rows > 1 and self.tokens_first and x.shape[:-1] == (samples, samples):
            raise RuntimeError(
                f"layer {self.name!r} received as many tokens as samples, {samples}, and the model has attention that "
                "puts tokens first: which axis holds samples is ambiguous. Use another batch size, or batch_first=True"
            )
        weight, bias = (t.view(current.rows, 1, *shape) for t in (weight, bias))
        if current.rows > 1 and not axis and x.shape[0] > samples and self.puts_views_first(current):
            y = y.unflatten(0, (-1, current.rows, current.batch))  # (V, R, B, ...)
            return torch.addcmul(bias, y.to(bias.dtype), weight).to(x.dtype).flatten(0, 2)
        y = y.unflatten(axis, (current.rows, -1)).movedim(axis, 0)  # (R, N / R, ...) or (R, T, N / R, ...)
        y = torch.addcmul(bias, y.to(bias.dtype), weight).to(x.dtype)
        return y.movedim(0, axis).flatten(axis, axis + 1)

    def standardise(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Normalise as the layer does before it scales and shifts; and the shape of its parameters beside an image."""
        layer: Any = self.layer
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(x, layer.num_groups, eps=self.layer_eps), (self.channels, *[1] * (x.dim() - 2))
        shape = normalized_shape(layer)
        return F.layer_norm(x, shape, eps=self.layer_eps), (*[1] * (x.dim() - 1 - len(shape)), *shape)


class ChannelSlot(AffineSlot):
    """LayerNorm over the channels of each pixel, (N, C, H, W)."""

    def standardise(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Normalise over axis 1."""
        if x.dim() != 4:
            raise RuntimeError(f"layer {self.name!r} normalises the channels of (N, C, H, W); got {tuple(x.shape)}")
        y = F.layer_norm(x.movedim(1, -1), (self.channels,), eps=self.layer_eps).movedim(-1, 1)
        return y, (self.channels, 1, 1)


def full_precision(device: str) -> Any:
    """Turn autocast off, where it is on."""
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


def channels_of(layer: nn.Module) -> int:
    """Return the number of channels that a normalisation layer scales and shifts, or would."""
    if isinstance(layer, _BatchNorm | nn.GroupNorm):
        return int(getattr(layer, "num_features", 0) or layer.num_channels)  # type: ignore[arg-type]
    return torch.Size(normalized_shape(layer)).numel()


def normalized_shape(layer: Any) -> tuple[int, ...]:
    """Return the shape that a LayerNorm normalises over; of another class, the size of its parameters."""
    return tuple(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else (layer.weight.numel(),)


class _Received(BaseException):
    """Ends a trial pass at the slot of interest. A BaseException, so that the network does not catch it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@torch.no_grad()
def views_come_first(slot: Slot, model: nn.Module, like: Tensor, source_pass: SourcePass) -> bool:
    """Return whether the views of an image reach a slot a batch apart, as after torch.cat of two batches, or adjacent.

    Two trial passes answer it: the images of the second are those of the first in reverse order, so the position where
    the first image is found again shows the order.
    """

    def input_of_slot(images: Tensor) -> Tensor | None:
        def stop_at_slot(at: Slot, x: Tensor) -> None:
            if at.index == slot.index and len(x) > len(images):
                raise _Received(x)

        try:
            with set_current_pass(source_pass(len(images), stop_at_slot)):
                model(images)
        except _Received as received:
            return received.x
        return None

    noise = torch.rand(2, *like.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu").to(like)
    one, two = input_of_slot(noise.clone()), input_of_slot(noise.flip(0))
    if one is not None and two is not None and len(two) == len(one) and len(one) % 2 == 0:
        half = len(one) // 2
        adjacent, apart = ((a - b).abs().max().item() for a, b in ((one[:half], two[half:]), (one[::2], two[1::2])))
        if min(adjacent, apart) <= 0.05 * one.abs().max().item():  # room for rounding in bfloat16
            return apart < adjacent
    raise RuntimeError(
        f"layer {slot.name!r} receives several samples of each image, neither adjacent nor a batch apart: which image "
        "they belong to cannot be determined"
    )
