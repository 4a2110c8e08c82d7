"""Where normalisation layers stood: stateless slots that take what is theirs from the pass on the desk.

A third-party module offers no way to hand an argument to a nested layer. So `Backbone` puts a slot where each
normalisation layer stood, lays the arguments of a pass on a private desk (a ContextVar: threads do not meet), and the
slots take them from there. That is the only dynamic scope in the library.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tribe.moments import fold, normalise, scale_and_shift
from tribe.norms import Norm
from tribe.norms.batch import Batch
from tribe.state import Stats

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
_KNOWN_FORWARDS = {
    cls.forward
    for cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
}


@dataclasses.dataclass
class Pass:
    """One forward pass on the desk."""

    rows: int
    batch: int
    weight: tuple[Tensor, ...]  # per slot (R, c)
    bias: tuple[Tensor, ...]
    stats: Stats  # (R, K, C) before this pass
    norm: Norm
    labels: Tensor | None
    valid: Tensor
    kept: dict[int, Stats] = dataclasses.field(default_factory=dict)  # what each slot's rule left, (R, K, c)
    folded: tuple[tuple[Tensor, Tensor], ...] | None = None  # per slot scale and shift, where no batch changes them
    features: Tensor | None = None


desk: ContextVar[Pass | None] = ContextVar("tribe_pass", default=None)


@contextmanager
def on_desk(current: Pass) -> Iterator[None]:
    """Lay a pass on the desk, and take it off whatever happens."""
    token = desk.set(current)
    try:
        yield
    finally:
        desk.reset(token)


class Slot(nn.Module, ABC):
    """Stands where a normalisation layer stood; holds nothing that adapts, only which columns are its own."""

    def __init__(self, name: str, layer: nn.Module, index: int, columns: slice) -> None:
        super().__init__()
        self.name, self.index, self.columns = name, index, columns
        self.channels = channels_of(layer)
        self.layer_eps = float(layer.eps)  # type: ignore[arg-type]
        # torch's fused transformer layer would read .weight past the slot; it steps aside when two eps differ, and a
        # NaN differs from everything.
        self.eps = float("nan")
        after = [m for m in _after(layer) if not isinstance(m, nn.Identity)]
        self.relu = len(after) == 1 and type(after[0]) is nn.ReLU and isinstance(layer, _BatchNorm)  # done on the way
        self.after = nn.Sequential(*([] if self.relu else after))
        self.tokens_first = False  # whether tokens may come before samples, (T, N, C)
        self._template = (layer,)  # in a tuple: the source's layer is a template for export, not part of the network

    @property
    def layer(self) -> Any:
        """The layer whose place this slot takes."""
        return self._template[0]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise as the pass on the desk says."""
        current = desk.get()
        if current is None:
            raise RuntimeError(
                f"normalisation layer {self.name!r} was used outside a pass: call the Backbone, not the model inside it"
            )
        weight, bias = current.weight[self.index], current.bias[self.index]  # (R, c)
        if self.layer.weight is None:
            weight = torch.ones_like(weight)
        if self.layer.bias is None:
            bias = torch.zeros_like(bias)
        return self.after(self.normalise(x, weight, bias, current))  # type: ignore[no-any-return]

    @abstractmethod
    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, current: Pass) -> Tensor:
        """Normalise (N, ...) with the affine parameters of each row."""

    def plain(self, weight: Tensor, bias: Tensor, stats: Stats | None) -> nn.Module:
        """The ordinary layer again, holding these affine parameters (1, c) and statistics (1, 1, C).

        Without statistics (None) a BatchNorm will normalise each batch with the batch's own.
        """
        layer = self.layer.to(weight.device)
        with torch.no_grad():
            if layer.weight is not None:
                layer.weight.copy_(weight.view_as(layer.weight))
            if layer.bias is not None:
                layer.bias.copy_(bias.view_as(layer.bias))
            if getattr(layer, "running_mean", None) is None:
                return layer  # type: ignore[no-any-return]
            if stats is None:
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            else:
                layer.running_mean.copy_(stats.mean[0, 0, self.columns])
                layer.running_var.copy_(stats.var[0, 0, self.columns])
        return layer  # type: ignore[no-any-return]

    def unfold(self, x: Tensor, current: Pass) -> Any:
        """(N, C, ...) -> (R, B, C, ...); where a model folds time or patches into N they become pixels."""
        rows, batch = current.rows, current.batch
        if x.shape[0] == rows * batch:
            return x.unflatten(0, (rows, batch))
        if batch and x.shape[0] % (rows * batch) == 0:
            return x.unflatten(0, (rows, batch, -1)).movedim(2, 3)
        raise self.cannot_tell_apart(x.shape[0], current)

    def cannot_tell_apart(self, samples: int, current: Pass) -> RuntimeError:
        """The refusal of a layer that does not see the images of the pass one by one."""
        return RuntimeError(
            f"layer {self.name!r} received {samples} samples where the pass has {current.rows} x {current.batch}: the "
            "model mixes or drops images before this layer, so its statistics cannot be told apart by image"
        )


class StatisticsSlot(Slot):
    """BatchNorm of any dimension: statistics and affine parameters."""

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, current: Pass) -> Tensor:
        """Let the norm rule turn moments into scale and shift."""
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise RuntimeError(f"layer {self.name!r} has {self.channels} channels; it received {tuple(x.shape)}")
        # A layer that never kept statistics has none to start from: it uses each batch's own, as it always did.
        tracked = self.layer.running_mean is not None
        norm = current.norm if tracked else Batch()
        # A layer called a second time goes on from its own first call.
        stats = current.kept.get(self.index) or Stats(*(t[..., self.columns] for t in current.stats))
        folded = self.unfold(x, current)  # (R, B, C, ...)
        count = folded.shape[3:].numel()

        def rule(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
            mean, var, kept = norm(mean, var, count, stats, current.labels, current.valid, self.layer_eps)
            if tracked:
                current.kept[self.index] = Stats(kept.mean.detach(), kept.var.detach())
            return fold(mean, var, weight, bias, self.layer_eps)

        # Statistics and the few numbers around them stay in full precision, whatever autocast does to the network.
        with _full_precision(x.device.type):
            if norm.observes:
                y = normalise(folded, rule, self.relu)
            elif current.folded is not None:
                y = scale_and_shift(folded, *current.folded[self.index], self.relu)
            else:
                y = scale_and_shift(folded, *fold(*stats, weight, bias, self.layer_eps), self.relu)
        if folded.dim() > x.dim() + 1:  # what `unfold` made pixels goes back into N
            return y.movedim(3, 2).reshape(x.shape)
        return y.flatten(0, 1)


class AffineSlot(Slot):
    """LayerNorm or GroupNorm: their statistics are per image already; only the affine parameters adapt."""

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, current: Pass) -> Tensor:
        """Normalise as the layer does, then scale and shift by row."""
        layer: Any = self.layer
        if isinstance(layer, nn.GroupNorm):
            y = F.group_norm(x, layer.num_groups, eps=self.layer_eps)
            shape = (self.channels, *[1] * (x.dim() - 2))
        else:
            y = F.layer_norm(x, layer.normalized_shape, eps=self.layer_eps)
            shape = (*[1] * (x.dim() - 1 - len(layer.normalized_shape)), *layer.normalized_shape)
        samples = current.rows * current.batch
        axis = int(self.tokens_first and x.shape[0] != samples and x.shape[1:-1] == (samples,))  # of the samples
        if current.rows > 1 and x.shape[axis] % samples:
            raise self.cannot_tell_apart(x.shape[axis], current)
        if current.rows > 1 and self.tokens_first and x.shape[:-1] == (samples, samples):
            raise RuntimeError(
                f"layer {self.name!r} received as many tokens as samples, {samples}, and the model has attention that "
                "puts tokens first: which are the samples cannot be told. Use another batch size, or batch_first=True"
            )
        y = y.unflatten(axis, (current.rows, -1)).movedim(axis, 0)  # (R, N / R, ...) or (R, T, N / R, ...)
        weight, bias = (t.view(current.rows, 1, *shape) for t in (weight, bias))
        y = torch.addcmul(bias, y.to(bias.dtype), weight).to(x.dtype)
        return y.movedim(0, axis).flatten(axis, axis + 1)


def _full_precision(device: str) -> Any:
    """Keep autocast away, where there is any."""
    known = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if known and torch.is_autocast_enabled(device) else nullcontext()


def channels_of(layer: nn.Module) -> int:
    """How many affine pairs a normalisation layer has, or would have."""
    if isinstance(layer, nn.LayerNorm):
        return torch.Size(layer.normalized_shape).numel()
    return int(getattr(layer, "num_features", 0) or layer.num_channels)  # type: ignore[arg-type]


def _after(layer: nn.Module) -> list[nn.Module]:
    """What a normalisation layer with a built-in activation (as in timm) does after normalising."""
    if type(layer).forward in _KNOWN_FORWARDS:
        return []
    return [m for m in (getattr(layer, n, None) for n in ("drop", "act")) if isinstance(m, nn.Module)]


def why_not(layer: nn.Module) -> str | None:
    """Why a normalisation layer has to stay as it is, if it has to."""
    if type(layer).forward not in _KNOWN_FORWARDS and not (
        isinstance(layer, _BatchNorm | nn.GroupNorm) and isinstance(getattr(layer, "act", None), nn.Module)
    ):
        return f"{type(layer).__name__} has a forward of its own"
    if not isinstance(layer, _BatchNorm) and layer.weight is None:
        return "it has neither statistics nor affine parameters"
    return None
