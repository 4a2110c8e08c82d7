"""Play a class of another code base, an `nn.Module` whose forward adapts in place, without the contract: `bridge`.

Each stream has a module of its own. A step runs a copy of it, and the copy is the next state, so that a step stays
pure. The state holds the numbers of modules in place of tensors: see `ModuleIds`.
"""

import copy
import hashlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tribe.core.placement import replace_module
from tribe.core.state import flatten
from tribe.data.models.architectures import BatchNormReLU
from tribe.methods import Backbone, Deployed, Info, Key, Method, ScreenedBatch, Update

Factory = Callable[..., nn.Module]  # from an ordinary network, and perhaps settings, to a module that adapts it
PREFIX = "bridged-"  # of the names of these methods in tables and reports
UNCHECKED = "played through the bridge: their modules are not checked by the contract"
UNSAVED = (
    "a bridged method keeps modules, which no file holds: it cannot be saved or resumed, and takes no part in a fleet "
    "or a server. tribe.adapt(net, method, streams=...) and tribe.run without a checkpoint play it"
)


def bridge(factory: Factory, **fields: Any) -> "Bridge":
    """Return a method that plays modules which adapt in their own forward.

    Args:
        factory: takes an ordinary copy of the network, in evaluation mode and with all parameters unfrozen, and returns
            a module; its forward takes images (B, ...), returns logits (B, K), and adapts. Further arguments of it
            need defaults and become fields of the method; `classes` is the number of classes.
        fields: values of these arguments.

    Example:
        >>> def still(net):
        ...     return net
        >>> bridge(still).name
        'bridged-still'
    """
    return bridge_class(factory)(**fields)


def bridge_class(factory: Factory) -> type["Bridge"]:
    """Return the method of a factory, named after it."""
    name = getattr(factory, "__name__", type(factory).__name__)
    _, *arguments = inspect.signature(factory).parameters.values()
    named = [a for a in arguments if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY) and a.name != "classes"]
    for argument in named:
        if argument.default is argument.empty or hasattr(Bridge, argument.name):
            why = "needs a default" if argument.default is argument.empty else "has the name of a part of every method"
            raise TypeError(f"{name}: its argument {argument.name!r} {why}. A factory is called with a network alone")
    given = [(a.name, Any if a.annotation is a.empty else a.annotation, field(default=a.default)) for a in named]
    takes = (*(a.name for a in named), *(a.name for a in arguments if a.name == "classes"))
    own = {
        "factory": staticmethod(factory),
        "takes": takes,
        "name": f"{PREFIX}{name}",
        "__module__": factory.__module__,
        "__qualname__": getattr(factory, "__qualname__", name),
        "__doc__": inspect.getdoc(factory),
    }
    return make_dataclass(name, given, bases=(Bridge,), namespace=own, frozen=True)


def is_factory(found: Any) -> bool:
    """Return whether this is a function, or a class of modules, and so may be a factory."""
    return inspect.isfunction(found) or (isinstance(found, type) and issubclass(found, nn.Module))


class ModuleIds(Tensor):
    """Numbers of modules (S,). All copies, parts and joins of it hold the modules that they name."""

    held: Mapping[int, nn.Module]
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    @staticmethod
    def of(modules: Sequence[nn.Module], device: torch.device) -> "ModuleIds":
        """Number some modules."""
        held = {next(ModuleIds._numbers): module for module in modules}
        ids = torch.tensor(list(held), device=device).as_subclass(ModuleIds)
        ids.held = held
        return ids

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        given = [t for t in flatten([args, kwargs or {}]) if isinstance(t, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            for t in flatten([result]):
                if isinstance(t, cls) and t.dtype == torch.int64:
                    numbers = set(t.flatten().tolist())
                    t.held = {n: m for other in given for n, m in getattr(other, "held", {}).items() if n in numbers}
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()  # the modules of a state never change

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(UNSAVED)


class BridgeState(NamedTuple):
    """The module of each stream."""

    modules: Tensor  # (S,) `ModuleIds`
    total: Tensor  # (S,) the sum of all parameters: a step after which it is not finite is not kept
    key: Key
    info: Info


@dataclass(frozen=True)
class Bridge(Method):
    """A method whose step is the forward of a module, which adapts in place. Made by `bridge`."""

    factory: ClassVar[Factory]
    takes: ClassVar[tuple[str, ...]] = ()  # the arguments of the factory after the network

    paper = "code of others, not checked by the contract"
    capture = "never"
    not_exportable_because = "its module predicts in a way of its own"
    not_savable_because = UNSAVED

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> BridgeState:
        """Return a new module for each stream, on a copy of the source network."""
        key, info = self.new_key_and_info(net, streams, seed)
        modules = [self._build(net, seed + i) for i in range(streams)]
        return BridgeState(ModuleIds.of(modules, net.device), torch.zeros_like(info.trusted), key, info)

    def deployed(self, net: Backbone, state: BridgeState) -> Deployed:
        """Raise: what predicts is inside the module."""
        raise ValueError(
            f"{self.name} is a module that predicts in a way of its own: nothing can look into it, so it has no guard, "
            "no comparison and no export. A time filter takes it as it is"
        )

    def adapt(self, net: Backbone, state: BridgeState, batch: ScreenedBatch) -> Update:
        """Run a copy of each stream's module; the copies are the next state."""
        logits, copies = self._play(net, state, batch)
        totals = [sum(p.detach().double().sum() for p in module.parameters()) for module in copies]
        total = torch.stack([torch.as_tensor(t, device=net.device).float() for t in totals])
        return Update(logits, state._replace(modules=ModuleIds.of(copies, net.device), total=total))

    def logits(self, net: Backbone, state: BridgeState, batch: ScreenedBatch) -> Tensor:
        """Run a copy of each stream's module, and drop it."""
        return self._play(net, state, batch)[0]

    @torch.inference_mode(False)
    def _build(self, net: Backbone, seed: int) -> nn.Module:
        model = net.plain(*net.source())
        for name, layer in list(model.named_modules()):
            if isinstance(layer, BatchNormReLU):  # others replace BatchNorm by layers of their own, without the ReLU
                model = replace_module(model, name, _apart(layer))
        if net.outputs is not None:
            model = nn.Sequential(model, _Chosen(net.outputs)).eval()
        given = {name: getattr(self, name) for name in self.takes}
        with torch.enable_grad(), _seeded(net.device, seed):
            module = type(self).factory(model.requires_grad_(True), **given)
        if not isinstance(module, nn.Module):
            raise TypeError(f"{self.name}: its factory returned {type(module).__name__}; expected an nn.Module")
        return module

    def _play(self, net: Backbone, state: BridgeState, batch: ScreenedBatch) -> tuple[Tensor, list[nn.Module]]:
        ids = state.modules
        assert isinstance(ids, ModuleIds)
        copies, rows = [], []
        for x, valid, *numbers in zip(
            batch.x, batch.valid, ids.tolist(), *(k.tolist() for k in state.key), strict=True
        ):
            module, output = ids.held[numbers[0]], None
            if valid.any():
                module, output = self._forward(net, module, x[valid].to(net.dtype), numbers[1:])
            copies.append(module)
            rows.append((valid, output))
        like = next((output for _, output in rows if output is not None), None)
        like = batch.x.new_zeros(1, net.classes or 1) if like is None else like
        logits = like.new_zeros(*batch.valid.shape, like.shape[1])
        for row, (valid, output) in zip(logits, rows, strict=True):
            if output is not None:
                row[valid] = output
        return logits, copies

    def _forward(self, net: Backbone, module: nn.Module, x: Tensor, key: Sequence[int]) -> tuple[nn.Module, Tensor]:
        """Return a copy of a module that has adapted to images (B, ...), and its logits (B, K)."""
        try:
            mine = _copied(module)
        except Exception as error:  # the code of others may raise anything
            raise ValueError(
                f"{self.name}: its module cannot be copied, and a step must leave the state before it as it is: "
                f"{error}. Keep no tensor that carries a graph: store loss.detach()"
            ) from error
        held = [(t, t._version) for t in itertools.chain(module.parameters(), module.buffers())]
        if any(p.device != x.device for p in module.parameters()):
            raise ValueError(f"{self.name}: its module is not on {x.device}. Move the network before tribe.adapt")
        images = x.clone()
        with torch.enable_grad(), _seeded(x.device, *key):
            result = mine(images)
        if not torch.equal(images, x):
            raise ValueError(f"{self.name}: its forward changes its input, which others read. Let it work on x.clone()")
        if any(t._version != version for t, version in held):
            raise ValueError(
                f"{self.name}: a copy of its module changes the weights of the original, through a function that holds "
                "on to it, such as a lambda in a hook. Reach the network through self"
            )
        output = getattr(result, "logits", result)
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if len(found) != 2 or found != (len(x), net.classes or found[1]) or not output.is_floating_point():
            expected = (len(x), net.classes or "classes")
            raise ValueError(f"{self.name}: its forward returned {found}; expected logits, numbers of shape {expected}")
        return mine, output.detach()


class _Chosen(nn.Module):
    """Keep some outputs: the classes of a data set that has fewer than the network."""

    outputs: Tensor

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.register_buffer("outputs", outputs)

    def forward(self, logits: Tensor) -> Tensor:
        """(N, K) -> (N, outputs)."""
        return logits[:, self.outputs]


def _copied(module: nn.Module) -> nn.Module:
    """Return a deep copy; torch's own copy of an optimiser drops what a subclass, such as SAM, adds to it."""
    memo: dict[int, Any] = {}
    found = [o for m in module.modules() for o in vars(m).values() if isinstance(o, torch.optim.Optimizer)]
    for optimizer in found:  # it grows
        if id(optimizer) not in memo:
            memo[id(optimizer)] = object.__new__(type(optimizer))
            found += [inner for inner in vars(optimizer).values() if isinstance(inner, torch.optim.Optimizer)]
    for optimizer in found:
        vars(memo[id(optimizer)]).update({name: copy.deepcopy(t, memo) for name, t in vars(optimizer).items()})
    return copy.deepcopy(module, memo)


def _apart(layer: BatchNormReLU) -> nn.Sequential:
    """Return a BatchNorm and its ReLU as two layers."""
    norm = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum).to(layer.weight)
    norm.load_state_dict(layer.state_dict())
    return nn.Sequential(norm, nn.ReLU(inplace=True)).train(layer.training)


@contextmanager
def _seeded(device: torch.device, *numbers: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch, which such code draws from; restore them on exit."""
    seed = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4])
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
