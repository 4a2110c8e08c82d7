"""A frozen classifier whose normalisation is an argument.

Convolution weights are frozen and shared. What differs between student, teacher and anchor, and between one camera and
the next, comes in with each pass as matrices with a row each; rows fold into the batch for convolutions and unfold
for normalisation (`tribe.slots`).
"""

import copy
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tribe.moments import fold
from tribe.norms import Norm
from tribe.slots import NORMS, Pass, Slot, Source, desk, on_desk, slot_for, source_of, why_not
from tribe.state import Affine, Stats, Store, hash_tensors

USUAL_EPS = 1e-5  # the default of every normalisation layer of torch
NO_GRADIENT = (
    "the network gives logits without a gradient, so its normalisation layers cannot learn: its forward cuts it, with "
    "torch.no_grad, torch.inference_mode or .detach(). Give the network without that (tribe takes gradients only where "
    "it needs them), or choose a method that needs none, such as bn"
)
NO_AFFINE = (
    "no normalisation layer of the network has affine parameters to learn (they were made with affine=False), and this "
    "method learns nothing else. Choose one that needs none: bn, lame, cotta, petal or ttac"
)
UNCALLED = (
    "It may reach them past their call: by a method kept from before (f = self.norm.forward), or with their tensors, "
    "taken out before, in F.batch_norm and the like. Let its forward call them, as in self.norm(x)"
)


class Output(NamedTuple):
    """What a pass gives back."""

    logits: Tensor  # (R, B, K)
    features: Tensor | None  # (R, B, F), the classifier's input; None where no classifier layer was found
    stats: Stats  # (R, K, C), as the norm rule leaves them


class Doubles(threading.local):
    """A thread's double of a network for passes with other weights, which are put into its modules for as long.

    The modules are its own, the tensors the network's: other threads, and whoever looks at the network meanwhile, see
    the source's weights only. Doubles are made when they are needed, by copies and pickles anew.
    """

    model: nn.Module | None = None

    def of(self, model: nn.Module) -> nn.Module:
        """This thread's double of the model."""
        if self.model is None:
            layers = [slot.layer for slot in model.modules() if isinstance(slot, Slot)]
            tensors = (t for m in (model, *layers) for t in itertools.chain(m.parameters(), m.buffers()))
            self.model = copy.deepcopy(model, {id(t): t for t in tensors})
        return self.model

    def __reduce__(self) -> Any:
        return type(self), ()


class Backbone(nn.Module):
    """A frozen classifier whose normalisation is an argument; the caller's model is copied and never changed.

    Args:
        model: any `nn.Module` with BatchNorm, SyncBatchNorm, LayerNorm or GroupNorm layers, nested anywhere, that
            returns logits (N, K) or an object with ``.logits``. DataParallel and `torch.compile` wrappers are
            taken off.
        classifier: name of the layer whose input are the features; by default the last Linear that a pass calls.

    >>> net = Backbone(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)))
    >>> affine, stats = net.source(rows=2)
    >>> from tribe.norms.frozen import Frozen
    >>> net(torch.rand(2, 7, 3, 8, 8), affine, stats, Frozen()).logits.shape
    torch.Size([2, 7, 5])
    """

    def __init__(self, model: nn.Module, classifier: str | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module; got {type(model).__name__}")
        model = _unwrap(model)
        _refuse_adapters(model)
        _refuse_scripts(model)
        _refuse_unknown_sizes(model)
        device = next((t.device for t in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))
        self.model = _copy(model).eval().requires_grad_(False)
        self.slots: list[Slot] = []
        self.left_alone: dict[str, str] = {}  # normalisation layers that stay as they are, and why
        self._place_slots()
        if not self.slots:
            raise ValueError(_nothing_to_adapt(self.model, self.left_alone))
        self.model._apply(_channels_last)
        self.origin = Store(source_of([slot.layer for slot in self.slots], device))
        self._split = [slot.channels for slot in self.slots]
        self._eps = _common_eps(self.slots)
        self._candidates = self._classifiers(classifier)
        for layer in self._candidates.values():
            layer.register_forward_pre_hook(_note_features)
        self._doubles = Doubles()
        self._warned = False

    def _place_slots(self) -> None:
        placed: dict[int, Slot] = {}  # a layer reached by two names is one slot
        columns = 0
        attention = (m for m in self.model.modules() if isinstance(m, nn.MultiheadAttention))
        tokens_first = any(not m.batch_first for m in attention)
        for name, layer in list(self.model.named_modules(remove_duplicate=False)):
            if not isinstance(layer, NORMS):
                continue
            if id(layer) not in placed:
                if reason := why_not(layer):
                    self.left_alone[name] = reason
                    continue
                placed[id(layer)] = slot = slot_for(layer, name, len(self.slots), columns)
                slot.tokens_first = tokens_first
                slot.lead_here()
                columns = slot.columns.stop
                self.slots.append(slot)
            if not name:
                self.model = placed[id(layer)]
            else:
                parent, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(parent), child, placed[id(layer)])

    def _classifiers(self, name: str | None) -> dict[str, nn.Module]:
        modules = dict(self.model.named_modules())
        if name is not None:
            if name not in modules:
                raise ValueError(f"the model has no layer {name!r} to take features from; it has {_some(modules)}")
            return {name: modules[name]}
        linear = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
        pointwise = [n for n, m in modules.items() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
        return {n: modules[n] for n in linear or pointwise}

    @property
    def classes(self) -> int | None:
        """The outputs of the classifier layer, as far as the modules tell; None where they do not."""
        for layer in reversed(self._candidates.values()):
            width = getattr(layer, "out_features", getattr(layer, "out_channels", None))
            return int(width) if width is not None else None
        return None

    @property
    def classifier(self) -> str | None:
        """The name of the layer that `classes` was read from."""
        return next(reversed(self._candidates), None)

    @property
    def channels(self) -> int:
        """C: normalised channels of the whole network."""
        return sum(self._split)

    @property
    def has_statistics(self) -> bool:
        """Whether any layer keeps statistics that can adapt (BatchNorm); LayerNorm and GroupNorm keep none."""
        return self.origin.get().stats.mean.numel() > 0  # type: ignore[no-any-return]

    @property
    def has_affine(self) -> bool:
        """Whether any normalisation layer has affine parameters, which gradients can move."""
        return any(slot.layer.weight is not None for slot in self.slots)

    @property
    def rank(self) -> int | None:
        """Axes of a batch of images (B, ...), judged by the first convolution; None where there is none."""
        first = self._first_convolution()
        return None if first is None else 2 + len(first.kernel_size)

    def _first_convolution(self) -> nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
        return next((m for m in self.model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)

    def _expected(self, shape: tuple[int, ...]) -> str:
        first = self._first_convolution()
        if first is None or self.rank is None:
            return ""
        if len(shape) != self.rank - 1:
            return f". Its first layer takes batches with {self.rank} axes, (B, {first.in_channels}, ...)"
        return f". Its first layer takes {first.in_channels} channels" if shape[0] != first.in_channels else ""

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return next(self.origin.buffers()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the network's weights, which images are converted to."""
        floating = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(floating, torch.float32)

    def source(self, rows: int = 1, classes: int = 1) -> tuple[Affine, Stats]:
        """The source model's affine parameters (rows, C) and statistics (rows, classes, C), fresh copies."""
        source: Source = self.origin.get()
        affine = Affine(*(t.expand(rows, -1).clone() for t in source.affine))
        stats = Stats(*(t.expand(rows, classes, -1).clone() for t in source.stats))
        return affine, stats

    def fingerprint(self, exact: bool = True) -> str:
        """A hash of the source model: its weights, statistics and layer names; not ``exact``: as float32 holds them."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}  # persistent or not
        named |= self.origin.state_dict()
        # Only where it is not everyone's: marks of networks from before it counted stay as they are.
        layers = ((name, m.layer if isinstance(m, Slot) else m) for name, m in self.model.named_modules())
        eps = {f"{name}.eps": layer.eps for name, layer in layers if isinstance(layer, NORMS)}
        named |= {name: torch.tensor(value, dtype=torch.float64) for name, value in eps.items() if value != USUAL_EPS}
        if not exact:
            named = {name: t.float() if t.is_floating_point() else t for name, t in named.items()}
        return hash_tensors(named)

    def train(self, mode: bool = True) -> "Backbone":
        """Stay in evaluation mode: dropout and the like are never wanted here."""
        return super().train(False)

    def forward(
        self,
        x: Tensor,
        affine: Affine,
        stats: Stats,
        norm: Norm,
        labels: Tensor | None = None,
        valid: Tensor | None = None,
        weights: Mapping[str, Tensor] | None = None,
        spare: Stats | None = None,
    ) -> Output:
        """One pass over (R, B, ...) images, each row with its own normalisation.

        Args:
            x: images, (R, B, ...).
            affine: (R, C); gradients flow to it.
            stats: (R, K, C); not changed, the updated ones are in the output.
            norm: the rule.
            labels: (R, B) pseudo labels for rules that use them.
            valid: (R, B); False marks padding, which weighs nothing in any statistic.
            weights: other weights by name instead of the frozen ones (`torch.func.functional_call`, on a double of
                the network: see `Doubles`).
            spare: statistics nobody needs any more, whose memory may hold the new ones.
        """
        rows, batch = x.shape[:2]
        if affine.weight.shape != (rows, self.channels):
            raise ValueError(
                f"x has {rows} rows and the network {self.channels} channels; affine is {tuple(affine.weight.shape)}"
            )
        if stats.mean.shape != (rows, norm.classes, self.slots[-1].columns.stop):
            raise ValueError(
                f"x has {rows} rows, the rule keeps {norm.classes} statistics per channel and the network "
                f"{self.slots[-1].columns.stop} channels with statistics; stats is {tuple(stats.mean.shape)}"
            )
        if valid is None:
            valid = torch.ones(rows, batch, dtype=torch.bool, device=x.device)
        if labels is not None and hasattr(norm, "group"):  # what a rule makes of the labels is the same for every layer
            labels = norm.group(labels, valid, affine.weight.dtype)
        current = Pass(
            rows,
            batch,
            affine.weight.split(self._split, 1),
            affine.bias.split(self._split, 1),
            Stats(stats.mean.detach(), stats.var.detach()),
            norm,
            labels,
            valid,
        )
        if self._eps is not None and not norm.observes:  # one fold for the whole network
            both = fold(*current.stats, *affine, self._eps)
            current.folded = tuple(zip(*(t.split(self._split, 2) for t in both), strict=True))
        images = x.flatten(0, 1).to(self.dtype)
        if images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        try:
            with on_desk(current):
                if weights is None:
                    result = self.model(images)
                else:
                    double = self._doubles.of(self.model)
                    result = torch.func.functional_call(double, dict(weights), (images,))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the device's trouble, not the images'
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shape = tuple(x.shape[2:])
            raise ValueError(
                f"the network could not take images of shape {shape}: {error}{self._expected(shape)}"
            ) from error
        logits = _logits(result, len(images)).unflatten(0, (rows, batch))
        if len(current.called) < len(self.slots):
            self._tell_uncalled(current.called)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in affine)
        if wanted and not logits.requires_grad:
            raise ValueError(NO_GRADIENT if self.has_affine or weights is not None else NO_AFFINE)
        features = current.features
        if features is not None:
            whole = features.shape[0] == len(images)  # not where frames or crops are classified one by one
            features = features.flatten(2).mean(2) if features.dim() == 4 else features.flatten(1)
            features = features.unflatten(0, (rows, batch)) if whole else None
        return Output(logits, features, self._collect(current, spare))

    def _tell_uncalled(self, called: set[int]) -> None:
        if not called:
            raise ValueError(f"the network called none of its normalisation layers, so none can adapt. {UNCALLED}")
        if not self._warned:
            self._warned = True
            names = [slot.name for slot in self.slots if slot.index not in called]
            warnings.warn(
                f"normalisation layers that the network did not call do not adapt: {_some(names)}. Where they serve "
                f"training only, as in an auxiliary head, all is well. {UNCALLED}",
                UserWarning,
                stacklevel=2,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Backbone":
        self._doubles = Doubles()  # of another device or precision, soon
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    def _collect(self, current: Pass, spare: Stats | None) -> Stats:
        """The statistics each slot's rule left, side by side; those of layers that were not called stay."""
        if not current.norm.observes or not current.kept:
            return current.stats
        parts = [
            current.kept.get(slot.index) or Stats(*(t[..., slot.columns] for t in current.stats)) for slot in self.slots
        ]
        if spare is None or spare.mean.shape != current.stats.mean.shape or _overlap(spare, current.stats):
            spare = Stats(*(torch.empty_like(t) for t in current.stats))
        for out, pieces in zip(spare, zip(*parts, strict=True), strict=True):
            torch.cat(pieces, -1, out=out)
        return spare

    def plain(self, affine: Affine, stats: Stats | None, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """An ordinary module with ordinary layers that hold these affine parameters (1, C) and statistics (1, 1, C).

        Without statistics (None) its BatchNorm layers normalise each batch with the batch's own. ``weights`` are other
        layers' by name, where they are not the source's.
        """
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, value in (weights or {}).items():
                model.get_parameter(name).copy_(value)
        for layer in model.modules():
            for key in [k for k, hook in layer._forward_pre_hooks.items() if hook is _note_features]:
                del layer._forward_pre_hooks[key]
        scales, biases = affine.weight.split(self._split, 1), affine.bias.split(self._split, 1)
        for name, slot in list(model.named_modules(remove_duplicate=False)):
            if not isinstance(slot, Slot):
                continue
            layer = slot.plain(scales[slot.index], biases[slot.index], stats)  # a layer used twice stays one
            if not name:
                model = layer
            else:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, layer)
        return model.eval().requires_grad_(False)


def _unwrap(model: nn.Module) -> nn.Module:
    """Take off DataParallel, DistributedDataParallel and torch.compile, in any order."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _refuse_adapters(model: nn.Module) -> None:
    if any(isinstance(m, Backbone) for m in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is or holds a tribe.Backbone, whose normalisation is not in its layers any more. "
            "tribe.adapt takes a Backbone as it is; of an adapter give its .net to start from the source again, or its "
            ".export() to start from what it has learned"
        )


def _refuse_scripts(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and next(part.parameters(), None) is not None:
            raise ValueError(
                f"{f'layer {name!r}' if name else 'the model'} was compiled by torch.jit (script, trace, or a file of "
                "either), and compiled code admits no other normalisation: give the eager module that it was made from"
            )


def _refuse_unknown_sizes(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"the size of layer {name!r} is not known yet: run the model once before adapting it")


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied ({error}), and tribe never adapts the caller's own. Usual causes are tensors "
            "that still carry a graph, or hooks of an old weight_norm: remove those first"
        ) from error


def _nothing_to_adapt(model: nn.Module, left_alone: Mapping[str, str]) -> str:
    if left_alone:
        found = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in left_alone.items())
        return f"none of the model's normalisation layers can be adapted ({found})"
    return (
        f"{type(model).__name__} has no normalisation layers, so there is nothing to adapt: tribe moves the statistics "
        "and affine parameters of BatchNorm, SyncBatchNorm, LayerNorm or GroupNorm. If BatchNorm was folded into the "
        "convolutions for deployment, adapt the network from before the folding"
    )


def _common_eps(slots: list[Slot]) -> float | None:
    """The eps of all layers, if they are BatchNorm with statistics and parameters throughout and agree on it."""
    parts = ("running_mean", "weight", "bias")
    whole = all(getattr(slot.layer, part, None) is not None for slot in slots for part in parts)
    found = {slot.layer_eps for slot in slots}
    return found.pop() if whole and len(found) == 1 else None


def _overlap(a: Stats, b: Stats) -> bool:
    return any(s.data_ptr() == t.data_ptr() for s in a for t in b)


def _note_features(_: nn.Module, args: tuple[Any, ...]) -> None:
    """Remember the input of the classifier: the last candidate called is the one."""
    current = desk.get()
    if current is not None and args and isinstance(args[0], Tensor):
        current.features = args[0]


def _logits(result: Any, samples: int) -> Tensor:
    logits = getattr(result, "logits", result)
    if not isinstance(logits, Tensor):
        raise TypeError(f"the model returned {type(result).__name__}; expected logits or an object with .logits")
    if logits.dim() != 2 or logits.shape[0] != samples:
        raise ValueError(f"the model returned {tuple(logits.shape)} for {samples} images; expected logits (N, classes)")
    return logits


def _some(names: Iterable[str]) -> str:
    known = [name for name in names if name]
    return ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
