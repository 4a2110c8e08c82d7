"""Copy a caller's model, replace its normalisation layers by slots, and read the source's normalisation from them."""

import copy
import inspect
import itertools
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tribe.core.moments import accumulation_dtype
from tribe.core.rules import Frozen
from tribe.core.slots import (
    KNOWN_FORWARDS,
    NORMS,
    AffineSlot,
    ChannelSlot,
    Pass,
    Slot,
    StatisticsSlot,
    channels_of,
    normalized_shape,
    set_current_pass,
)
from tribe.core.state import Affine, Stats

M = TypeVar("M", bound=nn.Module)


class SourceNorm(NamedTuple):
    """The parameters and statistics of the source network's normalisation layers, one row."""

    affine: Affine  # (1, C)
    stats: Stats  # (1, 1, C)


def unwrap(model: nn.Module) -> nn.Module:
    """Remove DataParallel, DistributedDataParallel and torch.compile wrappers, in any order."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def refuse(model: nn.Module) -> None:
    """Refuse a model with layers that cannot be adapted: compiled by torch.jit, or without a size yet."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ValueError(
                f"{f'layer {name!r}' if name else 'the model'} was compiled by torch.jit (script, trace, or a file of "
                "either), and the normalisation of compiled code cannot be replaced: give the eager module that it was "
                "made from"
            )
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"the size of layer {name!r} is not known yet: run the model once before adapting it")


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy; raise with what prevents it."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied ({error}), and tribe never adapts the caller's model itself. Usual causes are "
            "tensors that still carry a graph, or hooks of an old weight_norm: remove those first"
        ) from error


class ThreadCopies(threading.local):
    """A thread's copy of a network, for passes that put other weights into its modules.

    The copy has modules of its own and shares the network's tensors. So other threads, and code that reads the network
    during such a pass, see the source's weights only. The copy is made when it is first needed; a copy or pickle of
    this object starts empty.
    """

    model: nn.Module | None = None

    def of(self, model: nn.Module) -> nn.Module:
        """Return this thread's copy of the model."""
        if self.model is None:
            layers = [slot.layer for slot in model.modules() if isinstance(slot, Slot)]
            tensors = (t for m in (model, *layers) for t in itertools.chain(m.parameters(), m.buffers()))
            self.model = copy.deepcopy(model, {id(t): t for t in tensors})
        return self.model

    def __reduce__(self) -> Any:
        return type(self), ()


def with_memory_format(t: Tensor, channels_last: bool) -> Tensor:
    """Return a tensor of four axes in channels-last or contiguous order; any other tensor as it is."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    return t.contiguous(memory_format=form) if t.dim() == 4 else t


def is_channels_last(model: nn.Module) -> bool:
    """Return whether some weights of a model are in channels-last order."""
    weights = (p for p in model.parameters() if p.dim() == 4 and not p.is_contiguous())
    return any(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def deepcopy_module(module: M, memo: dict[int, Any]) -> M:
    """Copy a module as copy.deepcopy copies one without a ``__deepcopy__`` method."""
    new = object.__new__(type(module))
    memo[id(module)] = new
    vars(new).update(copy.deepcopy(vars(module), memo))
    return new


def place_slots(model: nn.Module) -> tuple[nn.Module, list[Slot], dict[str, str]]:
    """Replace the normalisation layers of a model, in place.

    Returns the model (a slot, where the model itself is a normalisation layer), the slots, and the names of the layers
    that stay as they are, each with the reason.
    """
    slots: dict[int, Slot] = {}  # by layer: one that has two names is one slot
    kept: dict[str, str] = {}
    columns = 0
    attention = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    tokens_first = any(not m.batch_first for m in attention)
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        tensors = itertools.chain(layer.parameters(recurse=False), layer.buffers(recurse=False))
        is_norm = isinstance(layer, NORMS) or (is_called_norm(layer) and any(True for _ in tensors))
        if isinstance(layer, Slot) or not is_norm:
            continue
        if id(layer) not in slots:
            kind = slot_kind(layer)
            if isinstance(kind, str):
                kept[name] = kind
                continue
            slots[id(layer)] = slot = kind(name, layer, len(slots), columns)
            slot.tokens_first = tokens_first
            slot.layer.forward = slot.forward  # a network may hold the layer outside its modules too, as in a list
            columns = slot.columns.stop
        model = replace_module(model, name, slots[id(layer)])
    return model, list(slots.values()), kept


def replace_module(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Replace the module of this name; returns the model, which is the new module if the name is empty."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return model


def common_eps(slots: list[Slot]) -> float | None:
    """Return the eps of all layers, if all are BatchNorm with statistics and parameters and have the same one."""
    fields = ("running_mean", "weight", "bias")
    complete = all(getattr(slot.layer, field, None) is not None for slot in slots for field in fields)
    values = {slot.layer_eps for slot in slots}
    return values.pop() if complete and len(values) == 1 else None


def source_norm(layers: Sequence[nn.Module], device: torch.device) -> SourceNorm:
    """Concatenate the parameters and statistics of layers into one row."""

    def row(name: str, default: float | None) -> Tensor:
        columns = []
        for layer in layers:
            values: Tensor | None = getattr(layer, name, None)
            if values is not None:
                columns.append(values.detach().flatten().to(accumulation_dtype(values.dtype), copy=True))
            elif default is not None:
                columns.append(torch.full((channels_of(layer),), default, dtype=torch.float32, device=device))
        return torch.cat(columns) if columns else torch.empty(0, dtype=torch.float32, device=device)

    affine = Affine(row("weight", 1.0)[None], row("bias", 0.0)[None])
    stats = Stats(row("running_mean", None)[None, None], row("running_var", None)[None, None])
    return SourceNorm(affine, stats)


def slot_kind(layer: nn.Module) -> type[Slot] | str:
    """Return the kind of slot that can replace a normalisation layer, or why none can."""
    name, is_standard = type(layer).__name__, type(layer).forward in KNOWN_FORWARDS
    if isinstance(layer, _BatchNorm):
        kinds: list[type[Slot]] = [StatisticsSlot]
    elif isinstance(layer, nn.GroupNorm):
        kinds = [AffineSlot]
    elif isinstance(layer, nn.LayerNorm) or resembles_layer_norm(layer):
        kinds = [AffineSlot, ChannelSlot] if len(normalized_shape(layer)) == 1 else [AffineSlot]
    else:
        return f"{name} is of a kind that tribe does not adapt"
    if not isinstance(layer, _BatchNorm) and layer.weight is None:
        return "it has neither statistics nor affine parameters"
    if any(getattr(layer, name, None) is not None and name not in layer._parameters for name in ("weight", "bias")):
        return "its parameters are computed, by a parametrization or a hook"
    if layer._backward_hooks or layer._backward_pre_hooks:
        return "it has hooks on its gradient"
    hooked = bool(layer._forward_hooks or layer._forward_pre_hooks)
    # A slot takes the images and nothing else.
    if "forward" in vars(layer) or (not is_standard and len(inspect.signature(layer.forward).parameters) != 1):
        return f"{name} has a custom forward"
    if is_standard and not hooked:
        return kinds[0]
    fitting = next((kind for kind in kinds if _slot_agrees(layer, kind)), None)
    return fitting or ("its hooks change its output" if hooked else f"{name} has a custom forward")


@torch.no_grad()
def _slot_agrees(layer: nn.Module, kind: type[Slot]) -> bool:
    """Return whether a slot computes the same as a layer with a custom forward or hooks, by a trial.

    The trial uses copies, on the CPU and in float64, so that no state changes and only the rounding of layers that
    compute in float32 is allowed for.
    The copies get random parameters and statistics: those of a new layer, 0 and 1, would hide differences.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        theirs = copy.deepcopy(layer)
        if any(t.is_meta for t in itertools.chain(theirs.parameters(), theirs.buffers())):
            theirs = theirs.to_empty(device="cpu")  # without values, which the trial does not use
        theirs = theirs.to("cpu", torch.float64)
        for name in ("weight", "bias", "running_mean", "running_var"):
            if (values := theirs._parameters.get(name, theirs._buffers.get(name))) is not None:
                values.uniform_(0.5, 1.5, generator=generator)
        ours = copy.deepcopy(theirs)
    except Exception:  # a custom layer may raise anything
        return False
    slot, source = kind("", ours), source_norm([ours], torch.device("cpu"))
    same = []
    for shape in _trial_shapes(layer, kind):
        x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        valid = torch.ones(1, len(x), dtype=torch.bool, device="cpu")
        current = Pass(1, len(x), source.affine[:1], source.affine[1:], source.stats, Frozen(), None, valid)
        with torch.random.fork_rng(devices=[]), set_current_pass(current):
            try:
                a, b = theirs(x.clone()), slot(x)
                same.append(a.shape == b.shape and torch.allclose(a.to(b), b, 1e-5, 1e-5, equal_nan=True))
            except Exception:
                continue  # it does not take this shape
    return bool(same) and all(same)


def _trial_shapes(layer: nn.Module, kind: type[Slot]) -> list[tuple[int, ...]]:
    """Return shapes of inputs for a trial. No other size equals the number of channels, so only their axis fits."""
    channels = channels_of(layer)
    batch, height, width = [size for size in (4, 3, 2, 5) if size != channels][:3]
    pixels: list[tuple[int, ...]] = [(), (height,), (height, width)]
    if kind is ChannelSlot:
        return [(batch, channels, height, width)]
    if not isinstance(layer, _BatchNorm | nn.GroupNorm):
        shape = normalized_shape(layer)  # without pixels, channels that come first are also last
        return [(batch, *p, *shape) for p in (pixels[1:] if len(shape) == 1 else pixels)]
    return [(batch, channels, *p) for p in (*pixels, (2, 2, 2))]


def resembles_layer_norm(layer: nn.Module) -> bool:
    """Return whether a layer has exactly what an nn.LayerNorm has: ``eps``, ``weight`` and ``bias`` of one size.

    >>> layer = nn.Module()
    >>> layer.eps, layer.weight, layer.bias = 1e-6, nn.Parameter(Tensor(4)), nn.Parameter(Tensor(4))
    >>> resembles_layer_norm(layer), resembles_layer_norm(nn.Linear(4, 1))
    (True, False)
    """
    own, eps = layer._parameters, vars(layer).get("eps")
    if set(own) != {"weight", "bias"} or layer._modules or layer._buffers or not isinstance(eps, float):
        return False
    weight, bias = own["weight"], own["bias"]
    if weight is None or bias is None or not weight.dim():
        return False
    return weight.shape == bias.shape and weight.numel() == max(weight.shape)


def is_called_norm(layer: nn.Module) -> bool:
    """Return whether a layer without child layers is named as a norm: RMSNorm, but not Normalize.

    Private classes, such as torch's parametrization by the spectral norm, belong to other layers.
    """
    named = re.search("^[^_].*norm(?!al)|^norm(?!al)", type(layer).__name__, re.IGNORECASE) is not None
    return named and not layer._modules


def nothing_to_adapt(model: nn.Module, left_alone: Mapping[str, str]) -> str:
    """Return the error message for a model none of whose layers was replaced by a slot."""
    if left_alone:
        return f"none of the model's normalisation layers can be adapted ({'; '.join(by_reason(left_alone))})"
    others = sorted({type(layer).__name__ for layer in model.modules() if is_called_norm(layer)})  # without parameters
    kinds = f" of a kind that tribe adapts, only {', '.join(others)}" if others else ""
    return (
        f"{type(model).__name__} has no normalisation layers{kinds}, so there is nothing to adapt: tribe moves "
        "the statistics and affine parameters of BatchNorm, SyncBatchNorm, LayerNorm or GroupNorm. If BatchNorm was "
        "folded into the convolutions for deployment, adapt the network from before the folding"
    )


def by_reason(left_alone: Mapping[str, str]) -> list[str]:
    """Return one text for each reason why layers are left alone, with the names of the first layers.

    >>> by_reason({"a": "it is odd", "b": "it is odd", "c": "it is odd", "d": "it has hooks"})
    ['a, b and 1 more: it is odd', 'd: it has hooks']
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_alone.items():
        names.setdefault(reason, []).append(name or "the model")
    return [
        f"{', '.join(found[:2])}{f' and {len(found) - 2} more' if len(found) > 2 else ''}: {reason}"
        for reason, found in names.items()
    ]
