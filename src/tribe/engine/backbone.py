"""A frozen classifier whose normalisation is an argument.

Convolution weights are frozen and shared. What differs between student, teacher and anchor, and between one camera and
the next, comes in with each pass as matrices with a row each; rows fold into the batch for convolutions and unfold
for normalisation (`tribe.engine.slots`).
"""

import copy
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tribe.engine.moments import fold
from tribe.engine.rules import Frozen, Norm
from tribe.engine.slots import NORMS, Pass, Slot, SlotHook, Source, desk, on_desk, slot_for, source_of, why_not
from tribe.engine.state import Affine, Stats, Store, hash_tensors

T = TypeVar("T", bound=nn.Module)

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
NO_VIEW = "view size is not compatible"  # how torch refuses x.view(len(x), -1) of what is not laid out as images are
_moving = threading.Lock()  # one for all networks: nothing that has one could be copied
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
            taken off. Affine parameters that two layers share adapt apart; hooks on normalisation layers that only
            look are not called.
        classifier: name of the layer whose input are the features; by default the last Linear that a pass calls.

    >>> net = Backbone(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)))
    >>> affine, stats = net.source(rows=2)
    >>> from tribe.engine.rules import Frozen
    >>> net(torch.rand(2, 7, 3, 8, 8), affine, stats, Frozen()).logits.shape
    torch.Size([2, 7, 5])
    """

    @torch.inference_mode(False)  # what is copied here must be able to carry gradients
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
        self._given_channels_last, self._channels_last = _lies_channels_last(self.model), True  # which is faster
        self.moves = 0  # how often the weights were laid out anew: what knows their place in memory looks here
        self.model._apply(lambda t: _laid_out(t, channels_last=True))
        self._buffers_given = {name: t.clone() for name, t in self.model.named_buffers()}
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
        layers = [m for m in self.model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
        gates = [layer for layer in layers if layer.in_channels == layer.out_channels == 1]  # over channels, as in ECA
        return next((layer for layer in layers if layer not in gates), next(iter(layers), None))

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
        # Buffers, persistent or not, as they were given: a network may count or cache in them while it predicts.
        named = {**dict(self.model.named_parameters()), **self._buffers_given} | self.origin.state_dict()
        # Only where it is not everyone's: marks of networks from before it counted stay as they are.
        layers = ((name, m.layer if isinstance(m, Slot) else m) for name, m in self.model.named_modules())
        eps = {f"{name}.eps": layer.eps for name, layer in layers if isinstance(layer, NORMS)}
        named |= {name: torch.tensor(value, dtype=torch.float64) for name, value in eps.items() if value != USUAL_EPS}
        if not exact:
            named = {name: t.float() if t.is_floating_point() else t for name, t in named.items()}
        return hash_tensors(named)

    def not_finite(self) -> list[str]:
        """The normalisation layers' parameters and statistics that hold NaN or infinity, by name."""
        source: Source = self.origin.get()
        if source.affine.weight.is_meta or all(bool(t.isfinite().all()) for part in source for t in part):
            return []
        rows = (zip(self.slots, t[0].split(self._split), strict=True) for t in source.affine)
        named = {f"{slot.name}.{n}": t for n, row in zip(("weight", "bias"), rows, strict=True) for slot, t in row}
        for name, t in zip(("running_mean", "running_var"), source.stats, strict=True):
            named |= {f"{slot.name}.{name}": t[..., slot.columns] for slot in self.slots}
        return [name for name, t in named.items() if not t.isfinite().all()]

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
        slot_hook: SlotHook | None = None,
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
            slot_hook: called with each slot that the network comes to, and what it receives there.
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
            slot_hook=slot_hook,
        )
        if self._eps is not None and not norm.observes:  # one fold for the whole network
            both = fold(*current.stats, *affine, self._eps)
            current.folded = tuple(zip(*(t.split(self._split, 2) for t in both), strict=True))
        channels_last = self._channels_last
        images = _laid_out(x.flatten(0, 1).to(self.dtype), channels_last)
        if images.data_ptr() == x.data_ptr() != 0:  # 0: on the meta device
            images = images.clone()  # the network may write into them, as in x.sub_(mean), and other passes need x
        model = self.model if weights is None else self._doubles.of(self.model)
        current.find_order = lambda slot: _views_first(slot, model, images[:1], self._source_pass)
        try:
            with on_desk(current):
                if weights is None:
                    result = model(images)
                else:
                    own = {name: t if channels_last else _laid_out(t, False) for name, t in weights.items()}
                    result = torch.func.functional_call(model, own, (images,))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the device's trouble, not the images'
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if NO_VIEW in str(error) and channels_last:
                self._give_up_channels_last()  # unless another thread has
                return Backbone.forward(self, x, affine, stats, norm, labels, valid, weights, spare, slot_hook)
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

    def _source_pass(self, batch: int, slot_hook: SlotHook) -> Pass:
        """A pass of one row with the source's own normalisation, in which images do not meet."""
        affine, stats = self.source()
        scales, shifts = affine.weight.split(self._split, 1), affine.bias.split(self._split, 1)
        valid = torch.ones(1, batch, dtype=torch.bool, device=self.device)
        return Pass(1, batch, scales, shifts, stats, Frozen(), None, valid, slot_hook=slot_hook)

    @torch.inference_mode(False)
    def _give_up_channels_last(self) -> None:
        """Change the order of weights in memory, and with it that of activations, for good."""
        with _moving:
            if self._channels_last:
                self.model._apply(lambda t: _laid_out(t, channels_last=False))
                self._channels_last, self._doubles = False, Doubles()  # last: passes that began before will see it
                self.moves += 1

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Backbone":
        self._doubles = Doubles()  # of another device or precision, soon
        self._buffers_given = {name: fn(t) for name, t in self._buffers_given.items()}
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module; it is another source model afterwards."""
        told = super().load_state_dict(state_dict, strict, assign)
        self._doubles = Doubles()
        self._buffers_given = {name: t.clone() for name, t in self.model.named_buffers()}
        return told

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> "Backbone":
        return copied(self, memo)

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

    @torch.inference_mode(False)
    def plain(self, affine: Affine, stats: Stats | None, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """An ordinary module with ordinary layers that hold these affine parameters (1, C) and statistics (1, 1, C).

        Without statistics (None) its BatchNorm layers normalise each batch with the batch's own. ``weights`` are other
        layers' by name, where they are not the source's.
        """
        model: nn.Module = copy.deepcopy(self.model)._apply(lambda t: _laid_out(t, self._given_channels_last))
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


def _laid_out(t: Tensor, channels_last: bool) -> Tensor:
    form = torch.channels_last if channels_last else torch.contiguous_format
    return t.contiguous(memory_format=form) if t.dim() == 4 else t


def _lies_channels_last(model: nn.Module) -> bool:
    weights = (p for p in model.parameters() if p.dim() == 4 and not p.is_contiguous())
    return any(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


class _Received(BaseException):
    """Ends a trial pass: what it was made for is there. No network is to catch it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@torch.no_grad()
def _views_first(slot: Slot, model: nn.Module, like: Tensor, source_pass: Callable[[int, SlotHook], Pass]) -> bool:
    """Whether views of an image come to a slot a batch apart, as torch.cat of two batches puts them, or side by side.

    It is seen where the first of two images is found again when they change places.
    """

    def received(images: Tensor) -> Tensor | None:
        def slot_hook(at: Slot, x: Tensor) -> None:
            if at.index == slot.index and len(x) > len(images):
                raise _Received(x)

        try:
            with on_desk(source_pass(len(images), slot_hook)):
                model(images)
        except _Received as done:
            return done.x
        return None

    noise = torch.rand(2, *like.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu").to(like)
    one, two = received(noise.clone()), received(noise.flip(0))
    if one is not None and two is not None and len(two) == len(one) and len(one) % 2 == 0:
        half = len(one) // 2
        together, apart = ((a - b).abs().max().item() for a, b in ((one[:half], two[half:]), (one[::2], two[1::2])))
        if min(together, apart) <= 0.05 * one.abs().max().item():  # room for rounding in bfloat16
            return apart < together
    raise RuntimeError(
        f"layer {slot.name!r} receives several samples of each image, neither side by side nor a batch apart: which "
        "image they belong to cannot be told"
    )


def copied(module: T, memo: dict[int, Any]) -> T:
    """What copy.deepcopy makes of a module that has no say in it."""
    new = object.__new__(type(module))
    memo[id(module)] = new
    vars(new).update(copy.deepcopy(vars(module), memo))
    return new


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
    other = sorted({type(m).__name__ for m in model.modules() if "norm" in type(m).__name__.lower()})
    kinds = f" of a kind that tribe adapts, only {', '.join(other)}" if other else ""
    return (
        f"{type(model).__name__} has no normalisation layers{kinds}, so there is nothing to adapt: tribe moves "
        "the statistics and affine parameters of BatchNorm, SyncBatchNorm, LayerNorm or GroupNorm. If BatchNorm was "
        "folded into the convolutions for deployment, adapt the network from before the folding"
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
        raise TypeError(
            f"the model returned {type(result).__name__}; expected logits or an object with .logits. Wrap it in a "
            "module whose forward picks them out, as in self.net(x)[0] or self.net(x)['logits']"
        )
    if logits.dim() != 2 or logits.shape[0] != samples:
        raise ValueError(f"the model returned {tuple(logits.shape)} for {samples} images; expected logits (N, classes)")
    return logits


def _some(names: Iterable[str]) -> str:
    known = [name for name in names if name]
    return ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
