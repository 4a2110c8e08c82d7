"""A frozen classifier whose normalisation is an argument.

Convolution weights are frozen and shared. Parameters and statistics of normalisation, which differ between student,
teacher and anchor and between cameras, are arguments of each pass: matrices with a row each. Rows fold into the batch
for convolutions and unfold for normalisation (`tribe.core.slots`).
"""

import copy
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tribe.core import kernels
from tribe.core.fusion import Fusion, Mismatch
from tribe.core.image_shapes import KnownShapes, explain_shape, first_convolution
from tribe.core.moments import fold
from tribe.core.packed import ClassStats, pack
from tribe.core.placement import (
    SourceNorm,
    ThreadCopies,
    common_eps,
    copy_model,
    deepcopy_module,
    is_channels_last,
    nothing_to_adapt,
    place_slots,
    refuse,
    replace_module,
    source_norm,
    unwrap,
    with_memory_format,
)
from tribe.core.rules import Frozen, Norm, Recorded
from tribe.core.shortage import is_out_of_memory
from tribe.core.slots import NORMS, Pass, Slot, SlotHook, current_pass, set_current_pass, views_come_first
from tribe.core.state import Affine, StateModule, Stats, copy_missing, hash_tensors, room_for, tree_map

USUAL_EPS = 1e-5  # the default of every normalisation layer of torch
NO_GRADIENT = (
    "the network returns logits without a gradient, so its normalisation layers cannot learn: its forward cuts the "
    "gradient, by torch.no_grad, torch.inference_mode or .detach(). Give the network without that (tribe takes "
    "gradients only where it needs them), or choose a method that needs none, such as bn"
)
NO_AFFINE = (
    "no normalisation layer of the network has affine parameters to learn (they were made with affine=False), and this "
    "method learns nothing else. Choose one that needs none: bn, lame, cotta, petal or ttac"
)
DENSE = (
    "Methods that never look at the output, source and bn, take any tensor with a row for each image, as of a "
    "segmentation head or a feature backbone: tribe.adapt(model, 'bn'), without guard, health or time"
)
NO_VIEW = "view size is not compatible"  # torch's error for x.view(len(x), -1) of a channels-last tensor
UNCALLED = (
    "It may use them without calling them: by a method taken earlier (f = self.norm.forward), or by their tensors, "
    "taken earlier, in F.batch_norm and the like. Let its forward call them, as in self.norm(x)"
)
_layout_lock = threading.Lock()  # one for all networks: an object that holds a lock cannot be copied


class Output(NamedTuple):
    """The result of a pass."""

    logits: Tensor  # (R, B, K)
    features: Tensor | None  # (R, B, F), the classifier's input; None if no classifier layer was found
    stats: Any  # (R, K, C), to keep for the next pass: Stats, or PackedStats if those were given


class Backbone(nn.Module):
    """A frozen classifier whose normalisation is an argument; the caller's model is copied and never changed.

    Args:
        model: any `nn.Module` with BatchNorm, SyncBatchNorm, LayerNorm or GroupNorm layers, nested anywhere, that
            returns logits (N, K) or an object with ``.logits``. DataParallel and `torch.compile` wrappers are
            removed. Affine parameters that two layers share adapt separately; hooks on normalisation layers that do not
            change the output are not called.
        classifier: name of the layer whose input are the features; by default the last Linear that a pass calls.
        dense: the output may be any tensor (N, ...), as of a segmentation head or a feature backbone. Only methods that
            never look at it adapt such a network: source and bn.

    >>> net = Backbone(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)))
    >>> affine, stats = net.source(rows=2)
    >>> net(torch.rand(2, 7, 3, 8, 8), affine, stats, Frozen()).logits.shape
    torch.Size([2, 7, 5])
    """

    @torch.inference_mode(False)  # the copies must be able to carry gradients
    def __init__(self, model: nn.Module, classifier: str | None = None, dense: bool = False) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a torch.nn.Module; got {type(model).__name__}")
        model = unwrap(model)
        if any(isinstance(m, Backbone) for m in model.modules()):
            raise ValueError(
                f"{type(model).__name__} is or holds a tribe.Backbone, whose layers no longer hold its normalisation. "
                "tribe.adapt takes a Backbone as it is; of an adapter give its .net to start from the source again, or "
                "its .export() to start from what it has learned"
            )
        refuse(model)
        device = next((t.device for t in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))
        # left_alone: the normalisation layers that stay as they are, and why
        self.model, self.slots, self.left_alone = place_slots(copy_model(model).eval().requires_grad_(False))
        if not self.slots:
            raise ValueError(nothing_to_adapt(self.model, self.left_alone))
        self._given_channels_last, self._channels_last = is_channels_last(self.model), True  # which is faster
        self.moves = 0  # how often the weights moved in memory: a recording that knows their addresses checks it
        self.model._apply(lambda t: with_memory_format(t, channels_last=True))
        self._buffers_given = {name: t.clone() for name, t in self.model.named_buffers()}
        self.origin = StateModule(source_norm([slot.layer for slot in self.slots], device))
        self._widths = [slot.channels for slot in self.slots]
        self.channels = sum(self._widths)  # C, of the whole network
        self.columns = [slot.columns for slot in self.slots]  # of each slot among the statistics
        self._eps = common_eps(self.slots)
        widths = self._stored_widths = [slot.columns.stop - slot.columns.start for slot in self.slots]
        each = torch.tensor([slot.layer_eps for slot in self.slots], dtype=self.origin.state.stats.mean.dtype)
        self.eps: Tensor
        self.register_buffer("eps", each.repeat_interleave(torch.tensor(widths)).to(device), persistent=False)  # (C,)
        self._candidates = self._classifiers(classifier)
        for layer in self._candidates.values():
            layer.register_forward_pre_hook(_record_features)
        self._thread_copies = ThreadCopies()
        self._warned, self.dense, self._shapes = False, dense, KnownShapes()
        self.channels_last_told = False  # whether a warning said that images came channels last
        self.fusion = Fusion()  # of other calls with normalisation, where kernels run
        self._note_place()
        self.outputs: Tensor | None
        self.register_buffer("outputs", None, persistent=False)  # (K,) those that are kept; None: all

    @torch.inference_mode(False)
    def restricted_to(self, outputs: Sequence[int]) -> "Backbone":
        """Return a copy with only these outputs, in this order: the classes of a data set that has fewer.

        ImageNet-R and ImageNet-A are evaluated like this, with 200 of 1,000 classes. A network that is exported from
        an adapter has all outputs.

        >>> net = Backbone(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 5))).restricted_to([3, 1])
        >>> net.classes
        2
        """
        kept, count = [int(k) for k in outputs], self.classes
        if self.dense:
            raise ValueError("outputs are classes, and this network may return something else: dense=True")
        if self.outputs is not None:
            raise ValueError(f"this network is restricted to {count} outputs already; restrict the whole one")
        if len(kept) < 2 or len(set(kept)) < len(kept) or min(kept) < 0 or (count is not None and max(kept) >= count):
            some = f"{min(kept)} to {max(kept)}" if kept else "none"
            below = count or "the number of outputs"
            raise ValueError(f"outputs are two or more different numbers below {below}; got {len(kept)}, {some}")
        copied = copy.deepcopy(self)
        copied.outputs = torch.tensor(kept, device=self.device)
        return copied

    def _classifiers(self, name: str | None) -> dict[str, nn.Module]:
        modules = dict(self.model.named_modules())
        if name is not None:
            if name not in modules:
                raise ValueError(
                    f"the model has no layer {name!r} to take features from; it has {_first_names(modules)}"
                )
            return {name: modules[name]}
        linear = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
        pointwise = [n for n, m in modules.items() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
        return {n: modules[n] for n in linear or pointwise}

    @property
    def classes(self) -> int | None:
        """Return the number of outputs; None if it is not known before a pass."""
        if self.outputs is not None:
            return len(self.outputs)
        for layer in reversed(self._candidates.values()):
            width = getattr(layer, "out_features", getattr(layer, "out_channels", None))
            return int(width) if width is not None else None
        return None

    @property
    def classifier(self) -> str | None:
        """Return the name of the layer that `classes` was read from."""
        return next(reversed(self._candidates), None)

    @property
    def has_statistics(self) -> bool:
        """Return whether any layer keeps statistics that can adapt (BatchNorm); LayerNorm and GroupNorm keep none."""
        return bool(self.origin.state.stats.mean.numel())

    @property
    def has_affine(self) -> bool:
        """Return whether any normalisation layer has affine parameters, which gradients can move."""
        return any(slot.layer.weight is not None for slot in self.slots)

    @cached_property  # it is read for each batch, and a network has hundreds of modules
    def rank(self) -> int | None:
        """Return the axes of a batch of images (B, ...), from the first convolution; None if there is none."""
        first = first_convolution(self.model)
        return None if first is None else 2 + len(first.kernel_size)

    @cached_property
    def image_channels(self) -> int | None:
        """Return the channels of an image, from the first convolution; None if there is none."""
        first = first_convolution(self.model)
        return None if first is None else first.in_channels

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Return whether an image of this shape passes the network; False may mean that it cannot be asked."""
        return self._shapes.takes(self.model, self.dtype, shape)

    def _note_place(self) -> None:
        """Note where the network is and in which precision: every batch asks."""
        source: SourceNorm = self.origin.state
        floating = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.device = source.affine.weight.device
        self.dtype = next(floating, torch.float32)  # of the weights; images are converted to it
        self.place = self.device, source.affine.weight.dtype  # of affine parameters and statistics, and so of states

    def source(self, rows: int = 1, classes: int = 1) -> tuple[Affine, Stats]:
        """Return the source model's affine parameters (rows, C) and statistics (rows, classes, C), fresh copies."""
        source: SourceNorm = self.origin.state
        affine = Affine(*(t.expand(rows, -1).clone() for t in source.affine))
        stats = Stats(*(t.expand(rows, classes, -1).clone() for t in source.stats))
        return affine, stats

    def class_stats(self, rows: int, classes: int, packed: bool = False) -> ClassStats:
        """Return the source's statistics for every class, (rows, classes, C); packed: see `tribe.core.packed`."""
        if not packed:
            return self.source(rows, classes)[1]
        return pack(self.source(rows)[1], self.eps, classes, len(self.slots))

    def fingerprint(self, exact: bool = True) -> str:
        """Return a hash of the source model's weights, statistics and layer names; not ``exact``: of float32 values."""
        # All buffers as they were given: a network may count or cache in them while it predicts.
        named = {**dict(self.model.named_parameters()), **self._buffers_given} | self.origin.state_dict()
        # Only an unusual eps is hashed, so that fingerprints from before eps was hashed stay valid.
        norms = [(name, m) for name, m in self.model.named_modules() if isinstance(m, (Slot, *NORMS))]
        eps = {f"{name}.eps": (m.layer if isinstance(m, Slot) else m).eps for name, m in norms}
        named |= {name: torch.tensor(value, dtype=torch.float64) for name, value in eps.items() if value != USUAL_EPS}
        if not exact:
            named = {name: t.float() if t.is_floating_point() else t for name, t in named.items()}
        return hash_tensors(named)

    def not_finite(self) -> list[str]:
        """Return the names of normalisation parameters and statistics that hold NaN or infinity."""
        source: SourceNorm = self.origin.state
        if source.affine.weight.is_meta or all(bool(t.isfinite().all()) for t in (*source.affine, *source.stats)):
            return []
        rows = (zip(self.slots, t[0].split(self._widths), strict=True) for t in source.affine)
        named = {f"{slot.name}.{n}": t for n, row in zip(("weight", "bias"), rows, strict=True) for slot, t in row}
        for name, t in zip(("running_mean", "running_var"), source.stats, strict=True):
            named |= {f"{slot.name}.{name}": t[..., slot.columns] for slot in self.slots}
        return [name for name, t in named.items() if not t.isfinite().all()]

    def train(self, mode: bool = True) -> "Backbone":
        """Stay in evaluation mode: dropout and the like would make predictions random."""
        return super().train(False)

    def forward(
        self,
        x: Tensor,
        affine: Affine,
        stats: ClassStats,
        norm: Norm,
        labels: Tensor | None = None,
        valid: Tensor | None = None,
        weights: Mapping[str, Tensor] | None = None,
        spare: ClassStats | None = None,
        slot_hook: SlotHook | None = None,
    ) -> Output:
        """Pass (R, B, ...) images through the network, each row with its own normalisation.

        Args:
            x: images, (R, B, ...).
            affine: (R, C); gradients flow to it.
            stats: (R, K, C); not changed, the updated ones are in the output.
            norm: the rule.
            labels: (R, B) pseudo labels for rules that use them.
            valid: (R, B); False marks padding, which weighs nothing in any statistic.
            weights: other weights by name instead of the frozen ones (`torch.func.functional_call`, on the copy of
                the network in `ThreadCopies`).
            spare: statistics that are no longer needed, whose memory may hold the new ones.
            slot_hook: called with each slot that the network calls, and with its input.
        """
        current = self._new_pass(x.shape[0], x.shape[1], affine, stats, norm, labels, valid, slot_hook, spare)
        channels_last = self._channels_last
        images = with_memory_format(x.flatten(0, 1).to(self.dtype), channels_last)
        if images.data_ptr() == x.data_ptr() != 0:  # 0: on the meta device
            images = images.clone()  # the network may write into them, as in x.sub_(mean), and other passes need x
        model = self.model if weights is None else self._thread_copies.of(self.model)
        current.find_order = lambda slot: views_come_first(slot, model, images[:1], self._source_pass)
        fusing = None
        if weights is None and slot_hook is None:
            current.fusing = fusing = self.fusion.start(model, images, self._source_pass)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in affine)
        if not norm.observes:
            self._fold_stored(current, affine, learns)
        try:
            with set_current_pass(current), fusing or nullcontext():
                if weights is None:
                    result = model(images)
                else:
                    named = {n: t if channels_last else with_memory_format(t, False) for n, t in weights.items()}
                    result = torch.func.functional_call(model, named, (images,))
            if fusing is not None:
                fusing.finish()
        except Mismatch as why:
            self.fusion.give_up(why)
            return Backbone.forward(self, x, affine, stats, norm, labels, valid, weights, spare, slot_hook)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # a fault of the device, not of the images
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
            if is_out_of_memory(error) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                raise  # a recording may refuse what a pass may do
            if NO_VIEW in str(error) and channels_last:
                self._give_up_channels_last()  # unless another thread has
                return Backbone.forward(self, x, affine, stats, norm, labels, valid, weights, spare, slot_hook)
            shape = tuple(x.shape[2:])
            reason = explain_shape(self.model, self.dtype, shape) or error
            raise ValueError(f"the network could not take images of shape {shape}: {reason}") from error
        logits, features = self._read(result, current)
        if learns and not logits.requires_grad:
            raise ValueError(NO_GRADIENT if self.has_affine or weights is not None else NO_AFFINE)
        return Output(logits, features, self._collect(current, spare))

    def _new_pass(
        self,
        rows: int,
        batch: int,
        affine: Affine,
        stats: ClassStats,
        norm: Norm,
        labels: Tensor | None = None,
        valid: Tensor | None = None,
        slot_hook: SlotHook | None = None,
        spare: ClassStats | None = None,
    ) -> Pass:
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
            valid = torch.ones(rows, batch, dtype=torch.bool, device=self.device)
        weight, bias = (t.split_with_sizes(self._widths, 1) for t in affine)
        stats, grouped = tree_map(Tensor.detach, stats), labels
        if labels is not None and (group := getattr(norm, "group", None)):
            grouped = group(labels, valid, affine.weight.dtype)
        current = Pass(rows, batch, weight, bias, stats, norm, grouped, valid, slot_hook=slot_hook)
        if labels is not None and (prepare := getattr(norm, "prepare", None)):
            current.room = room_for(stats, spare)
            current.prepared = prepare(grouped, stats, current.room)
        return current

    def _fold_stored(self, current: Pass, affine: Affine, learns: bool) -> None:
        """Prepare all layers for stored statistics at once."""
        if current.rows == 1 and current.fusing is None and not learns and not kernels.can_launch(current.valid):
            stats = (t[0, 0].split_with_sizes(self._stored_widths) for t in (current.stats.mean, current.stats.var))
            current.stored = tuple(zip(*stats, *(t[0].split_with_sizes(self._widths) for t in affine), strict=True))
        elif self._eps is not None:
            folded = fold(current.stats.mean, current.stats.var, *affine, self._eps)
            current.folded = tuple(zip(*(t.split(self._widths, 2) for t in folded), strict=True))

    def _read(self, result: Any, current: Pass) -> tuple[Tensor, Tensor | None]:
        """Return the logits (R, B, K) in the result of a network, and the features (R, B, F) that were recorded.

        There are no features if they do not have one row for each image (frames, crops).
        """
        by_row, samples = (current.rows, current.batch), current.rows * current.batch
        logits = getattr(result, "logits", result)
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"the model returned {type(result).__name__}; expected logits or an object with .logits. Wrap it in a "
                "module whose forward picks them out, as in self.net(x)[0] or self.net(x)['logits']"
            )
        shape = tuple(logits.shape)
        if not self.dense and (len(shape) != 2 or shape[0] != samples):
            hint = f". {DENSE}" if len(shape) > 2 and shape[0] == samples else ""
            raise ValueError(f"the model returned {shape} for {samples} images; expected logits (N, classes){hint}")
        if self.dense and (len(shape) < 2 or shape[0] != samples):
            raise ValueError(f"the model returned {shape} for {samples} images; expected a row for each, (N, ...)")
        if self.outputs is not None:
            logits = logits.index_select(-1, self.outputs)
        if len(current.called) < len(self.slots):
            self._report_uncalled(current.called)
        features = current.features
        if features is None or len(features) != samples:
            return logits.unflatten(0, by_row), None
        features = features.flatten(2).mean(2) if features.dim() == 4 else features.flatten(1)
        return logits.unflatten(0, by_row), features.unflatten(0, by_row)

    def _report_uncalled(self, called: set[int]) -> None:
        """Refuse a network that called no slot; warn once about slots that it did not call."""
        if not called:
            raise ValueError(f"the network called none of its normalisation layers, so none can adapt. {UNCALLED}")
        if not self._warned:
            self._warned = True
            names = [slot.name for slot in self.slots if slot.index not in called]
            warnings.warn(
                f"normalisation layers that the network did not call do not adapt: {_first_names(names)}. That is fine "
                f"if they serve training only, as in an auxiliary head. {UNCALLED}",
                UserWarning,
                stacklevel=2,
            )

    def _source_pass(self, batch: int, slot_hook: SlotHook | None) -> Pass:
        """Return a pass of one row with the source's normalisation, in which images do not affect each other."""
        return self._new_pass(1, batch, *self.source(), Frozen(), slot_hook=slot_hook)

    @torch.inference_mode(False)
    def _give_up_channels_last(self) -> None:
        """Change the order of weights in memory, and with it that of activations, permanently."""
        with _layout_lock:
            if self._channels_last:
                self.model._apply(lambda t: with_memory_format(t, channels_last=False))
                # After the change of the weights, so that a pass which began before it sees the change.
                self._channels_last, self._thread_copies, self.fusion = False, ThreadCopies(), Fusion()
                self.moves += 1

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Backbone":
        self._thread_copies = ThreadCopies()  # the old ones keep another device or precision
        self._buffers_given = {name: fn(t) for name, t in self._buffers_given.items()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._note_place()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as any module does; afterwards it is another source model."""
        incompatible_keys = super().load_state_dict(state_dict, strict, assign)
        self._thread_copies = ThreadCopies()
        self._buffers_given = {name: t.clone() for name, t in self.model.named_buffers()}
        self._note_place()
        return incompatible_keys

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> "Backbone":
        return deepcopy_module(self, memo)

    def _collect(self, current: Pass, spare: Any) -> Any:
        """Return the statistics that each slot's rule keeps, together; those of layers that were not called stay."""
        if not current.kept:
            return current.stats
        by_slot = [current.kept.get(slot.index) or current.stats.layer(slot.columns, slot.index) for slot in self.slots]
        if isinstance(current.norm, Recorded):  # moments of samples, of other shape than statistics
            shape = current.rows, current.valid[:, current.norm.part].shape[1]
            if len(current.kept) < len(self.slots):
                by_slot = [(mean.expand(*shape, -1), var.expand(*shape, -1)) for mean, var in by_slot]
            return Stats(*(torch.cat(ts, -1).view(*shape, -1) for ts in zip(*by_slot, strict=True)))
        room = room_for(current.stats, spare) if current.room is None else current.room
        if current.prepared is None:
            for out, columns in zip(room, zip(*by_slot, strict=True), strict=True):
                torch.cat(columns, -1, out=out)
            return room
        for slot, kept in zip(self.slots, by_slot, strict=True):
            copy_missing(kept, room.layer(slot.columns, slot.index))  # the rule has kept most of them there
        return room

    @torch.inference_mode(False)
    def plain(self, affine: Affine, stats: Stats | None, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return a plain module with ordinary layers that hold these affine parameters (1, C) and statistics (1, 1, C).

        Without statistics (None) its BatchNorm layers normalise each batch with that batch's. ``weights`` replace the
        source's weights of other layers, by name.
        """
        model: nn.Module = copy.deepcopy(self.model)._apply(lambda t: with_memory_format(t, self._given_channels_last))
        with torch.no_grad():
            for name, value in (weights or {}).items():
                model.get_parameter(name).copy_(value)
        for layer in model.modules():
            for key in [k for k, hook in layer._forward_pre_hooks.items() if hook is _record_features]:
                del layer._forward_pre_hooks[key]
        scales, biases = affine.weight.split(self._widths, 1), affine.bias.split(self._widths, 1)
        for name, slot in list(model.named_modules(remove_duplicate=False)):
            if isinstance(slot, Slot):
                # A slot with two names gives the same layer twice.
                model = replace_module(model, name, slot.plain(scales[slot.index], biases[slot.index], stats))
        return model.eval().requires_grad_(False)


def _record_features(_: nn.Module, args: tuple[Any, ...]) -> None:
    """Record the input of a candidate for the classifier; the last one that is called counts."""
    current = current_pass.get()
    if current is not None and args and isinstance(args[0], Tensor):
        current.features = args[0]


def _first_names(names: Iterable[str]) -> str:
    shown = [name for name in names if name]
    return ", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "")
