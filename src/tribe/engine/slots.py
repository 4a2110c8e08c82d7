"""Where normalisation layers stood: stateless slots that take what is theirs from the pass on the desk.

A third-party module offers no way to hand an argument to a nested layer. So `Backbone` puts a slot where each
normalisation layer stood, lays the arguments of a pass on a private desk (a ContextVar: threads do not meet), and the
slots take them from there. That is the only dynamic scope in the library.
"""

import copy
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from tribe.engine.moments import fold, normalise, scale_and_shift, wide
from tribe.engine.rules import Frozen, Norm, PerBatch
from tribe.engine.state import Affine, Stats

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
_KNOWN_FORWARDS = {
    cls.forward
    for cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
}


class Source(NamedTuple):
    """The source model's own parameters and statistics, one row each."""

    affine: Affine  # (1, C)
    stats: Stats  # (1, 1, C)


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
    called: set[int] = dataclasses.field(default_factory=set)  # slots, by their index
    kept: dict[int, Stats] = dataclasses.field(default_factory=dict)  # what each slot's rule left, (R, K, c)
    folded: tuple[tuple[Tensor, Tensor], ...] | None = None  # per slot scale and shift, where no batch changes them
    features: Tensor | None = None
    slot_hook: "SlotHook | None" = None  # shown what each slot receives
    find_order: Callable[["Slot"], bool] | None = None  # whether views come before samples at a slot, by a trial


SlotHook = Callable[["Slot", Tensor], None]
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
        self.views_first: bool | None = None  # where time, crops or views are folded into N; None: not known yet
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
                f"normalisation layer {self.name!r} was used outside a pass: call the Backbone, not the model inside "
                "it. If you did, the model itself leaves the pass: with torch.utils.checkpoint, which runs a part of "
                "it again during backward (turn checkpointing off), or by running a part in a thread of its own (run "
                "it in the caller's)"
            )
        current.called.add(self.index)
        if current.slot_hook is not None:
            current.slot_hook(self, x)
        weight, bias = current.weight[self.index], current.bias[self.index]  # (R, c)
        if self.layer.weight is None:
            weight = torch.ones_like(weight)
        if self.layer.bias is None:
            bias = torch.zeros_like(bias)
        return self.after(self.normalise(x, weight, bias, current))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        """What else a network may ask its layer for: settings, but no tensors, which each pass brings with it."""
        layer = vars(self).get("_template", (None,))[0]
        if name in vars(self).get("_modules", ()) or not hasattr(layer, name):
            return super().__getattr__(name)
        value = getattr(layer, name)
        if value is None or isinstance(value, int | float | str | tuple):
            return value
        raise AttributeError(
            f"the network reads {name!r} of its normalisation layer {self.name!r} past the layer's own call, and there "
            "is no such thing here: while a network adapts, parameters and statistics of normalisation are arguments "
            "of each pass. Let its forward call the layer, as in self.norm(x), in place of F.batch_norm and the like"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "Slot":
        self.layer._apply(fn)  # what is exported is where the network is, in its precision
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    @abstractmethod
    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, current: Pass) -> Tensor:
        """Normalise (N, ...) with the affine parameters of each row."""

    def plain(self, weight: Tensor, bias: Tensor, stats: Stats | None) -> nn.Module:
        """The ordinary layer again, holding these affine parameters (1, c) and statistics (1, 1, C).

        Without statistics (None) a BatchNorm will normalise each batch with the batch's own.
        """
        layer = self.layer
        vars(layer).pop("forward", None)  # see `lead_here`
        for hooks in (layer._forward_hooks, layer._forward_pre_hooks):  # the slot called none, see `why_not`
            hooks.clear()
        _take_off_parametrizations(layer)
        for name, row in (("weight", weight), ("bias", bias)):
            if (old := getattr(layer, name)) is not None:  # which may be another layer's as well, or made by something
                _give(layer, name, row.detach().view_as(old).to(old, copy=True))
        if getattr(layer, "running_mean", None) is None:
            return layer  # type: ignore[no-any-return]
        if stats is None:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        else:
            layer.running_mean = stats.mean[0, 0, self.columns].to(layer.running_mean, copy=True)
            layer.running_var = stats.var[0, 0, self.columns].to(layer.running_var, copy=True)
        return layer  # type: ignore[no-any-return]

    def lead_here(self) -> None:
        """Let calls of the layer itself arrive here, too: a network may hold it outside its modules, say in a list."""
        self.layer.forward = self.forward

    def unfold(self, x: Tensor, current: Pass) -> Any:
        """(N, C, ...) -> (R, B, C, ...); where a model folds time or views into N they become pixels."""
        rows, batch = current.rows, current.batch
        if x.shape[0] == rows * batch:
            return x.unflatten(0, (rows, batch))
        if not batch or x.shape[0] % (rows * batch):
            raise self.cannot_tell_apart(x.shape[0], current)
        if self.puts_views_first(current):
            return x.unflatten(0, (-1, rows, batch)).movedim(0, 3)
        return x.unflatten(0, (rows, batch, -1)).movedim(2, 3)

    def refold(self, y: Tensor, shape: torch.Size) -> Tensor:
        """The way back of `unfold`, to (N, C, ...)."""
        if y.dim() == len(shape) + 1:
            y = y.flatten(0, 1)
        else:
            y = y.movedim(3, 0 if self.views_first else 2).reshape(shape)
        return y

    def puts_views_first(self, current: Pass) -> bool:
        """Whether several views of an image, in N, lie a batch apart (as after torch.cat) instead of side by side."""
        if self.views_first is None and current.find_order is not None:
            self.views_first = current.find_order(self)
        return bool(self.views_first)

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
        norm = current.norm if tracked else PerBatch()
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
        return self.refold(y, x.shape)


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
        weight, bias = (t.view(current.rows, 1, *shape) for t in (weight, bias))
        if current.rows > 1 and not axis and x.shape[0] > samples and self.puts_views_first(current):
            y = y.unflatten(0, (-1, current.rows, current.batch))  # (V, R, B, ...)
            return torch.addcmul(bias, y.to(bias.dtype), weight).to(x.dtype).flatten(0, 2)
        y = y.unflatten(axis, (current.rows, -1)).movedim(axis, 0)  # (R, N / R, ...) or (R, T, N / R, ...)
        y = torch.addcmul(bias, y.to(bias.dtype), weight).to(x.dtype)
        return y.movedim(0, axis).flatten(axis, axis + 1)


def _full_precision(device: str) -> Any:
    """Keep autocast away, where there is any."""
    known = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if known and torch.is_autocast_enabled(device) else nullcontext()


def source_of(layers: Sequence[nn.Module], device: torch.device) -> Source:
    """Gather the parameters and statistics of layers into one row."""

    def row(name: str, default: float | None) -> Tensor:
        parts = []
        for layer in layers:
            values: Tensor | None = getattr(layer, name, None)
            if values is not None:
                parts.append(values.detach().flatten().to(wide(values.dtype), copy=True))
            elif default is not None:
                parts.append(torch.full((channels_of(layer),), default, dtype=torch.float32, device=device))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device=device)

    affine = Affine(row("weight", 1.0)[None], row("bias", 0.0)[None])
    stats = Stats(row("running_mean", None)[None, None], row("running_var", None)[None, None])
    return Source(affine, stats)


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
    own = type(layer).forward not in _KNOWN_FORWARDS
    activates = isinstance(layer, _BatchNorm | nn.GroupNorm) and isinstance(getattr(layer, "act", None), nn.Module)
    if "forward" in vars(layer) or (own and not (activates and _agrees(layer))):
        return f"{type(layer).__name__} has a forward of its own"
    if not isinstance(layer, _BatchNorm) and layer.weight is None:
        return "it has neither statistics nor affine parameters"
    if layer._backward_hooks or layer._backward_pre_hooks:
        return "it has hooks on its gradient"
    if (layer._forward_hooks or layer._forward_pre_hooks) and not _agrees(layer):
        return "its hooks change what it gives"
    return None


def slot_for(layer: nn.Module, name: str = "", index: int = 0, column: int = 0) -> Slot:
    """The slot that takes a layer's place; its statistics begin at ``column``."""
    kind = StatisticsSlot if isinstance(layer, _BatchNorm) else AffineSlot
    width = channels_of(layer) if getattr(layer, "running_mean", None) is not None else 0
    return kind(name, layer, index, slice(column, column + width))


@torch.no_grad()
def _agrees(layer: nn.Module) -> bool:
    """Whether a slot does what a layer with a forward or hooks of its own does, by a trial on random numbers.

    It is made on copies, on the CPU and in float64: no rounding has to be allowed for, and nobody's state changes. They
    get random parameters and statistics, too: with those of a fresh layer, 0 and 1, much looks the same that is not.
    """
    if any(t.is_meta for t in itertools.chain(layer.parameters(), layer.buffers())):
        return True  # no values, nothing to compare
    generator = torch.Generator().manual_seed(0)
    try:
        theirs = copy.deepcopy(layer).to("cpu", torch.float64)
        for name in ("weight", "bias", "running_mean", "running_var"):
            if (values := theirs._parameters.get(name, theirs._buffers.get(name))) is not None:
                values.uniform_(0.5, 1.5, generator=generator)
        ours = copy.deepcopy(theirs)
    except Exception:  # what may be in a layer of somebody's own nobody knows
        return False
    slot, source = slot_for(ours), source_of([ours], torch.device("cpu"))
    same = []
    for shape in _trial_shapes(layer):
        x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        valid = torch.ones(1, len(x), dtype=torch.bool, device="cpu")
        current = Pass(1, len(x), source.affine[:1], source.affine[1:], source.stats, Frozen(), None, valid)
        with torch.random.fork_rng(devices=[]), on_desk(current):
            try:
                same.append(_close(theirs(x.clone()), slot(x)))
            except Exception:
                continue  # it takes no such shape
    return bool(same) and all(same)


def _trial_shapes(layer: nn.Module) -> list[tuple[int, ...]]:
    if isinstance(layer, nn.LayerNorm):
        return [(4, *layer.normalized_shape)]
    return [(4, channels_of(layer), *pixels) for pixels in ((), (3,), (3, 3), (2, 2, 2))]


def _close(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a.to(b), b, 1e-6, 1e-6, equal_nan=True)


def _give(layer: nn.Module, name: str, value: Tensor) -> None:
    """Give a layer a parameter of its own."""
    vars(layer).pop(name, None)  # a tensor that a hook made
    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))


def _take_off_parametrizations(layer: nn.Module) -> None:
    """Keep what parametrizations made. Torch's own function would break every copy of a layer: they share a class."""
    if parametrize.is_parametrized(layer):
        made = {name: getattr(layer, name).detach() for name in layer.parametrizations}  # type: ignore[union-attr]
        layer.__class__ = parametrize.type_before_parametrizations(layer)
        del layer.parametrizations
        for name, value in made.items():
            _give(layer, name, value)
