"""Fuse bias, residual addition and ReLU into the normalisation layer next to them.

Each would read and write all activations once more. They are found by a trial pass with two random images, which
records every call of a torch function and of a slot, and which call uses whose result. A plan names calls by their
number:

    conv (bias) -> slot -> add (residual) -> relu      the slot computes all four; the later calls return its result

A value that is fused away must have no other use: no other call takes it, nothing holds it after the pass, and no
compiled code computes what the record does not show. The trial is repeated with the plan, and its logits must agree
with those of tensor operations. Each pass checks that it makes the same calls on the same tensors. A network that does
not is computed call by call from then on; `Fusion.reason` says why.

A convolution whose weights are frozen does not keep its input, as torch does for the gradient of the weights: it would
be half of the memory of a step, and the gradient of the input needs the weights only.
"""

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tribe.core import kernels
from tribe.core.kernels import Switch
from tribe.core.moments import Epilogue, accumulation_dtype
from tribe.core.slots import Slot, SourcePass, StatisticsSlot, full_precision, set_current_pass
from tribe.core.state import flatten, tree_map

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")  # of a convolution
DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
RELU = (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
ADD = (torch.add, Tensor.add, Tensor.add_)  # the operators + and += call them
IN_PLACE = (Tensor.add_, F.relu_, torch.relu_, Tensor.relu_)
METADATA_METHODS = {
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
    *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.element_size, Tensor.get_device),
}
METADATA_ATTRS = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "itemsize", "nbytes")
# The largest difference of logits in a trial, relative to the largest logit. The rounding of bfloat16 alone can move
# logits by a tenth, so it is float32, which may mean TF32, at least; float64 where rounding moves logits by as much.
CLOSE = {torch.float32: 0.05, torch.float64: 1e-4}

_switch: Switch = "auto"  # "auto": where kernels run

Kind = Literal["slot", "convolution", "add", "relu", "other"]


@contextmanager
def using(switch: Switch) -> Iterator[None]:
    """Fuse where kernels run ("auto"), everywhere (True) or nowhere (False), in the whole process; for tests."""
    global _switch
    before, _switch = _switch, switch
    try:
        yield
    finally:
        _switch = before


class FusedLayer(NamedTuple):
    """The numbers of the calls that one call of a slot computes; None for those that do not exist."""

    slot: int  # the slot's index
    bias: int | None  # the convolution whose bias is added
    residual: int | None  # the call whose result is added
    add: int | None
    relu: int | None


class FusionPlan(NamedTuple):
    """The calls that a pass fuses, by their number, in the order of the network."""

    calls: int  # in the whole pass
    layers: dict[int, FusedLayer]  # by the number of the slot's call
    convolutions: dict[int, int]  # those without their bias, and the call of the slot that adds it
    skipped: dict[int, int]  # additions and ReLU, and the call of the slot that has computed them
    sources: dict[int, int]  # the calls whose results are residuals, and the last call of a slot that adds each

    @staticmethod
    def of(layers: dict[int, FusedLayer], calls: int) -> "FusionPlan":
        """Return the plan for these layers."""
        convolutions = {layer.bias: at for at, layer in layers.items() if layer.bias is not None}
        skipped = {n: at for at, layer in layers.items() for n in (layer.add, layer.relu) if n is not None}
        sources = {layer.residual: at for at, layer in layers.items() if layer.residual is not None}
        return FusionPlan(calls, layers, convolutions, skipped, sources)


class Mismatch(BaseException):
    """A pass deviates from its plan. A BaseException, so that the network does not catch it."""


class Fusion:
    """Fuses the passes of one network."""

    def __init__(self) -> None:
        self.plan: FusionPlan | None = None
        self.reason: str | None = "there was no pass on a GPU yet"  # why nothing is fused
        self.tried = False  # whether there was a trial pass: on a CPU there is none

    def describe(self) -> str:
        """Describe what is fused, or why nothing is."""
        if self.plan is None:
            return f"nothing is fused: {self.reason}"
        layers = self.plan.layers.values()
        named = {"bias": "biases of convolutions", "add": "residual additions", "relu": "ReLU"}
        counts = {words: sum(getattr(layer, field) is not None for layer in layers) for field, words in named.items()}
        parts = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
        return f"computed together with normalisation: {parts}"

    def start(self, model: nn.Module, images: Tensor, source_pass: SourcePass) -> "FusedPass | None":
        """Return the mode that fuses a pass; None if it is to be computed call by call."""
        if _switch is False or (_switch == "auto" and not kernels.can_run(images)):
            return None
        if torch.is_inference_mode_enabled():
            return None  # whether a residual has changed is not known: inference tensors have no version
        if not self.tried:
            if images.is_cuda and torch.cuda.is_current_stream_capturing():
                return None  # a trial reads values
            self.tried = True
            self.plan, self.reason = _try(model, images, source_pass)
        return None if self.plan is None else FusedPass(self.plan)

    def give_up(self, why: Mismatch) -> None:
        """Fuse no more passes of this network."""
        self.plan, self.reason = None, f"a pass differed from the trial: {why}"


# -- the trial ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _try(model: nn.Module, images: Tensor, source_pass: SourcePass) -> tuple[FusionPlan | None, str | None]:
    noise = torch.rand(2, *images.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu")
    form = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    noise = noise.to(images).contiguous(memory_format=form) if images.dim() == 4 else noise.to(images)

    def logits(mode: "FusionTrial | FusedPass", network: nn.Module, x: Tensor) -> Tensor:
        current, x = source_pass(len(x), None), x.clone()  # the network may write into x
        current.fusing, precision = mode, accumulation_dtype(x.dtype)
        current.stats = tree_map(lambda t: t.to(precision), current.stats)
        current.weight, current.bias = (tuple(t.to(precision) for t in ts) for ts in (current.weight, current.bias))
        with (
            set_current_pass(current),
            UntracedOpDetector(mode) if isinstance(mode, FusionTrial) else nullcontext(),
            mode,
        ):
            result = network(x)
        mode.finish()
        found: Tensor = getattr(result, "logits", result)
        return found

    try:
        logits(trial := FusionTrial(), model, noise)
        if trial.untraced is not None:
            return None, f"compiled code computes {trial.untraced}"
        plan = trial.plan()
        if not plan.layers:
            return None, "no bias, addition or ReLU belongs to one normalisation layer alone"
        difference = 0.0
        for dtype, close in CLOSE.items():
            if torch.finfo(dtype).bits >= torch.finfo(noise.dtype).bits:
                if dtype != noise.dtype:
                    model, noise = copy.deepcopy(model).to(dtype), noise.to(dtype)
                with full_precision(noise.device.type):
                    fused, bare = logits(FusedPass(plan), model, noise), FusionPlan.of({}, plan.calls)
                    with kernels.using(False):
                        nearby = noise + 1e-6 * noise.flip(0)
                        plain, near = (logits(FusedPass(bare), model, x) for x in (noise, nearby))
                difference, rounding = (_difference(found, plain) for found in (fused, near))
                if difference <= close:
                    return plan, None
                if difference > 10 * rounding:  # no rounding; in float64 no kernel runs, so it would not show
                    break
    except (Exception, Mismatch) as error:  # a network may raise anything
        return None, f"the trial failed ({type(error).__name__}: {error})"
    return None, f"in the trial it changed logits by {difference:.1%}"


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


class TracedCall(NamedTuple):
    """A call of a torch function or of a slot."""

    kind: Kind
    inputs: tuple[int | None, ...]  # by tensor, the number of the call that made it; None: not a result
    fusable: bool  # by its arguments alone
    in_place: bool  # it writes its result into its first input
    slot: int  # the slot's index, or -1
    result: "weakref.ref[Tensor] | None"


class FusionTrial(TorchFunctionMode):
    """Records the calls of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TracedCall] = []
        self.paused = False  # inside a call
        self.untraced: str | None = None  # an operation outside of all calls
        self._makers: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id, the tensor and the call that made it

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or _reads_metadata_only(func):
            return func(*args, **kwargs)
        inputs = self._inputs(tensors_in((args, kwargs)))
        self.paused = True
        result = func(*args, **kwargs)
        self.paused = False
        kind = _kind(func)
        self._record(kind, inputs, _fusable(kind, args, kwargs, result), -1, result, func in IN_PLACE)
        return result

    def enter(self, slot: Slot, x: Tensor) -> Epilogue:
        """Return what a slot computes besides its normalisation, when it is called with x."""
        self._entered = self._inputs([x])
        self.paused = True
        return Epilogue()

    def leave(self, slot: Slot, y: Tensor) -> None:
        """Note that a slot has computed y."""
        self.paused = False
        fusable = isinstance(slot, StatisticsSlot) and not slot.relu and slot.after is None
        self._record("slot", self._entered, fusable, slot.index, y)

    def finish(self) -> None:
        """End the pass."""

    def _inputs(self, tensors: list[Tensor]) -> tuple[int | None, ...]:
        made = [self._makers.get(id(t)) for t in tensors]
        return tuple(m[1] if m is not None and m[0]() is t else None for m, t in zip(made, tensors, strict=True))

    def _record(
        self, kind: Kind, inputs: tuple[int | None, ...], fusable: bool, slot: int, result: Any, in_place: bool = False
    ) -> None:
        made = tensors_in(result)
        one = weakref.ref(made[0]) if len(made) == 1 and made[0] is result else None
        for t in made:
            self._makers[id(t)] = weakref.ref(t), len(self.calls)
        self.calls.append(TracedCall(kind, inputs, fusable and one is not None, in_place, slot, one))

    def plan(self) -> FusionPlan:
        """Return what can be fused."""
        users: dict[int, list[int]] = {}
        for number, call in enumerate(self.calls):
            for made in call.inputs:
                if made is not None:
                    users.setdefault(made, []).append(number)

        def only_user(number: int, kind: Kind) -> int | None:
            """Return the call that alone uses a result, if it is of this kind and nothing holds the result."""
            result = self.calls[number].result
            held = result is not None and (t := result()) is not None and self._makers[id(t)][1] == number
            using = users.get(number, [])
            fits = len(using) == 1 and not held and self.calls[using[0]].kind == kind
            return using[0] if fits and self.calls[using[0]].fusable else None

        layers = {}
        for number, call in enumerate(self.calls):
            if call.kind != "slot" or not call.fusable:
                continue
            maker = call.inputs[0]
            before = maker is not None and self.calls[maker].kind == "convolution" and self.calls[maker].fusable
            bias = maker if maker is not None and before and only_user(maker, "slot") == number else None
            add, residual = only_user(number, "add"), None
            if add is not None:
                residual = self._residual(add, number)
                add = None if residual is None else add
            relu = only_user(number if add is None else add, "relu")
            if any(n is not None for n in (bias, add, relu)):
                layers[number] = FusedLayer(call.slot, bias, residual, add, relu)
        return FusionPlan.of(layers, len(self.calls))

    def _residual(self, add: int, slot: int) -> int | None:
        """Return the call whose result is added to that of a slot; None if it comes later, or if it is overwritten."""
        call = self.calls[add]
        others = [made for made in call.inputs if made is not None and made < slot]
        usable = len(others) == 1 and self.calls[others[0]].result is not None
        return others[0] if usable and (not call.in_place or call.inputs[0] == slot) else None


class UntracedOpDetector(TorchDispatchMode):
    """Detects operations that a network computes without calling a torch function, as code of torch.jit does."""

    def __init__(self, trial: FusionTrial) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trial = trial

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self.trial.paused:
            self.trial.untraced = str(func)
        return func(*args, **(kwargs or {}))


def _kind(func: Any) -> Kind:
    if func in CONVOLUTIONS:
        return "convolution"
    return "relu" if func in RELU else "add" if func in ADD else "other"


def _fusable(kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Return whether a call, by its arguments, is one that a slot can compute."""
    if kind == "add":
        plain = len(args) == 2 and not kwargs and all(isinstance(t, Tensor) for t in args)
        return plain and args[0] is not args[1] and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
    if kind == "relu":
        return isinstance(args[0], Tensor) if args else False
    if kind == "convolution":
        return bias_of(args, kwargs) is not None and isinstance(result, Tensor)
    return False


def _reads_metadata_only(func: Any) -> bool:
    """Return whether a function reads facts of a tensor, and no values."""
    if getattr(func, "__name__", "") == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in METADATA_ATTRS
    return func in METADATA_METHODS


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    return [t for t in flatten(value) if isinstance(t, Tensor)]


# -- the passes --------------------------------------------------------------------------------------------------------


class PendingTensor(NamedTuple):
    """A tensor whose value the next calls change: its bias is still to be added, or its epilogue is already applied."""

    tensor: Tensor  # held, so that no other tensor gets its id
    user: int  # the number of the call that may use it
    bias: Tensor | None  # still to be added
    residual: Tensor | None  # added already
    version: int  # of the residual
    with_grad: bool


class FusedPass(TorchFunctionMode):
    """Fuses the calls of one pass as planned; raises `Mismatch` where the network makes others."""

    def __init__(self, plan: FusionPlan) -> None:
        super().__init__()
        self.plan = plan
        self.paused = False
        self._number = 0  # of the next call
        self._pending: dict[int, PendingTensor] = {}  # by id
        self._sources: dict[int, Tensor] = {}  # by call

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or _reads_metadata_only(func):
            return func(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        if number in self.plan.skipped:
            result = self._skip(number, func, args)
        else:
            if self._pending and any(id(t) in self._pending for t in tensors_in((args, kwargs))):
                raise Mismatch(f"{func} uses a value that is fused away")
            result = self._call(number, func, args, kwargs)
        if number in self.plan.sources:
            self._sources[number] = result
        return result

    def _call(self, number: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func not in CONVOLUTIONS:
            if number in self.plan.convolutions:
                raise Mismatch(f"{func} is called in place of a convolution")
            return func(*args, **kwargs)
        bias = bias_of(args, kwargs)
        user = self.plan.convolutions.get(number)
        if user is None:
            return convolve(func, args, kwargs)
        if bias is None:
            raise Mismatch("a convolution has no bias")
        result = convolve(func, args, kwargs, add_bias=False)
        bias = bias.contiguous()  # kernels read it without strides
        self._pending[id(result)] = PendingTensor(result, user, bias, None, 0, torch.is_grad_enabled())
        return result

    def _skip(self, number: int, func: Any, args: Sequence[Any]) -> Tensor:
        """Return the result of an addition or of ReLU, which the slot has computed."""
        layer = self.plan.layers[self.plan.skipped[number]]
        pending = [t for t in args[:2] if isinstance(t, Tensor) and id(t) in self._pending]
        one = self._pending.pop(id(pending[0])) if len(pending) == 1 else None
        if one is None or one.user != number or func not in (ADD if number == layer.add else RELU):
            raise Mismatch(f"{func} is called in place of an addition or ReLU")
        if one.with_grad != torch.is_grad_enabled():
            raise Mismatch("an activation is computed without gradients, or a normalisation layer is")
        if number == layer.add:
            others = [t for t in args if t is not one.tensor]
            if len(others) != 1 or others[0] is not one.residual or one.residual._version != one.version:
                raise Mismatch("another residual is added, or it has changed")
            if func in IN_PLACE and args[0] is not one.tensor:
                raise Mismatch("the sum is written into the residual")
            if layer.relu is not None:
                self._pending[id(one.tensor)] = one._replace(user=layer.relu, residual=None)
        return one.tensor

    def enter(self, slot: Slot, x: Tensor) -> Epilogue:
        """Return what a slot computes besides its normalisation, when it is called with x."""
        number, self._number = self._number, self._number + 1
        self.paused, self._entered = True, number
        layer, given = self.plan.layers.get(number), self._pending.pop(id(x), None)
        if layer is None and given is None:
            return Epilogue()
        if layer is None or layer.slot != slot.index or (given is None) != (layer.bias is None):
            raise Mismatch(f"layer {slot.name!r} is called at another place, or with another input")
        if given is not None and given.user != number:
            raise Mismatch(f"layer {slot.name!r} receives the input of another layer")
        residual = None if layer.residual is None else self._sources[layer.residual]
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise Mismatch(f"the residual of layer {slot.name!r} has another shape or type")
        return Epilogue(layer.relu is not None, None if given is None else given.bias, residual)

    def leave(self, slot: Slot, y: Tensor) -> None:
        """Note that a slot has computed y."""
        number = self._entered
        if number in self.plan.sources:
            self._sources[number] = y
        layer = self.plan.layers.get(number)
        user = None if layer is None else layer.relu if layer.add is None else layer.add
        if layer is not None and user is not None:
            residual = None if layer.residual is None else self._sources[layer.residual]
            if layer.residual is not None and self.plan.sources[layer.residual] == number:
                del self._sources[layer.residual]  # it needs no memory any more
            version = 0 if residual is None else residual._version
            self._pending[id(y)] = PendingTensor(y, user, None, residual, version, torch.is_grad_enabled())
        self.paused = False

    def finish(self) -> None:
        """End the pass; raise `Mismatch` if it has not made all the calls of the plan."""
        if self._pending or self._number != self.plan.calls:
            raise Mismatch(f"the pass made {self._number} calls, the trial {self.plan.calls}")


# -- convolutions with frozen weights -------------------------------------------------------------------------------


def bias_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the bias of a call of a convolution with these arguments; None without one, or if x is not a batch."""
    given = _convolution_arguments(args, kwargs)
    bias: Tensor | None = given["bias"]
    return bias if given["input"].dim() == given["weight"].dim() else None


def convolve(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], add_bias: bool = True) -> Tensor:
    """Call a convolution; with gradients it keeps its weights only, where these are frozen."""
    given = _convolution_arguments(args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    bias = bias if add_bias else None
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    plain = not isinstance(given["padding"], str) and x.dim() == weight.dim() and x.dtype == weight.dtype
    plain = plain and not torch.is_autocast_enabled(x.device.type)
    settings = [given[name] for name in ARGUMENTS[3:]]
    if torch.is_grad_enabled() and x.requires_grad and frozen and plain:
        return _FrozenConvolution.apply(func, x, weight, bias, *settings)  # type: ignore[no-any-return,no-untyped-call]
    return func(x, weight, bias, *settings)  # type: ignore[no-any-return]


def _convolution_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**DEFAULTS, **dict(zip(ARGUMENTS, args, strict=False)), **kwargs}


class _FrozenConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.strides, ctx.settings = x.shape, x.stride(), settings
        return func(x, weight, bias, *settings)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        axes = weight.dim() - 2
        stride, padding, dilation = ([t] * axes if isinstance(t, int) else list(t) for t in ctx.settings[:3])
        # Of x only shape and strides are read: memory in its order, which is never written. An expanded number would do
        # on the CPU, but cuDNN copies g into the order that x seems to have, and back into that of the weights.
        x = g.new_empty_strided(ctx.shape, ctx.strides)
        dx, _, _ = torch.ops.aten.convolution_backward(
            g, x, weight, None, stride, padding, dilation, False, [0] * axes, ctx.settings[3], (True, False, False)
        )
        return (None, dx, *[None] * (2 + len(ctx.settings)))
