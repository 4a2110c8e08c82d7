"""Contenders, which are timed: plain inference, and any method, on one shared network and its images.

A contender has the name of a method, or of a function with `@contender`. Code outside the package can add more.
A network by name has random weights and matching BatchNorm statistics.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tribe import methods
from tribe.core import kernels
from tribe.core.backbone import Backbone
from tribe.core.clock import Call
from tribe.core.kernels import Switch
from tribe.core.state import count_bytes
from tribe.data import models
from tribe.methods import AnyMethod, get_fields, with_fields
from tribe.registry import nearest
from tribe.streams.adapter import adapt
from tribe.streams.budget import MOST

PLAIN, CHANNELS_LAST, COMPILED = "plain", "channels-last", "compiled"
INFERENCE = (PLAIN, CHANNELS_LAST, COMPILED)  # the network without adaptation
STUDIED = 2  # batches of source images for methods that need source knowledge
PASSES, BATCH = 3, 8  # to estimate the statistics of BatchNorm


@dataclass(frozen=True)
class Workload:
    """The network and images of all contenders, in the precision of the setting."""

    net: nn.Module  # the user's network
    backbone: Backbone  # a copy, which all methods share
    images: Tensor  # (S, B, ...)
    classes: int
    graphs: Switch


@dataclass(frozen=True)
class Contender:
    """A call to time."""

    call: Call  # one step with all images
    state_bytes: int = 0  # the state of all streams, between steps
    period: int = 1  # calls after which the cost of a call repeats
    capture_disabled_reason: Callable[[], str | None] = lambda: None  # why steps are not captured; known after a call


Build = Callable[[Workload], Contender]
_builders: dict[str, Build] = {}


def contender(name: str) -> Callable[[Build], Build]:
    """Decorator: register a contender that is not a method."""

    def add(build: Build) -> Build:
        _builders[name] = build
        return build

    return add


def create(name: str, workload: Workload) -> Contender:
    """Build a contender from its name."""
    return _builders[name](workload) if name in _builders else _method(name, workload)


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError if a name is unknown, or if there are none."""
    if not names:
        raise ValueError(f"no method to measure: {nearest('', methods.names())}")
    for name in names:
        alone = methods.parse(name).alone
        if name not in _builders and alone not in methods.variants() and alone not in methods.names():
            if name.partition("+")[0] in methods.names():
                methods.get(name)  # raises with the names of guards and time filters
            raise ValueError(f"unknown method {name!r}: {nearest(name, [*methods.names(), *_builders])}")


@contender(PLAIN)
def _plain(workload: Workload) -> Contender:
    """The user's network: eager, NCHW."""
    return Contender(torch.no_grad()(partial(workload.net, workload.images.flatten(0, 1))))


@contender(CHANNELS_LAST)
def _channels_last(workload: Workload) -> Contender:
    """The same in channels-last layout, which is faster for most convolutions."""
    net, x = _in_channels_last(workload)
    return Contender(torch.no_grad()(partial(net, x)))


@contender(COMPILED)
def _compiled(workload: Workload) -> Contender:
    """The fastest plain inference: compiled, channels-last, and on CUDA in a CUDA graph."""
    net, x = _in_channels_last(workload)
    compiled: Any = torch.compile(net, mode="reduce-overhead" if x.is_cuda else None)
    built = Contender(torch.no_grad()(partial(compiled, x)))
    try:
        built.call()
    except Exception as error:  # a compiler may raise anything
        raise ValueError(f"this network could not be compiled here ({type(error).__name__}: {error})") from error
    return built


def _in_channels_last(workload: Workload) -> tuple[nn.Module, Tensor]:
    images = workload.images.flatten(0, 1)
    layout = torch.channels_last if images.dim() == 4 else torch.contiguous_format
    net = copy.deepcopy(workload.net).to(memory_format=layout)  # type: ignore[call-overload]
    return net, images.contiguous(memory_format=layout)


def _method(name: str, workload: Workload) -> Contender:
    streams, batch, *shape = workload.images.shape
    # A memory of images has room for the values of an image.
    room = {"room": math.prod(shape)} if "room" in methods.field_names(name) else {}
    method = with_knowledge(methods.create(name, classes=workload.classes, **room), workload.backbone, tuple(shape))
    adapter = adapt(workload.backbone, method, streams=streams, graphs=workload.graphs)
    return Contender(
        partial(adapter, workload.images if streams > 1 else workload.images[0]),
        state_bytes=count_bytes(adapter.state),
        period=steps_period(method, batch),
        capture_disabled_reason=lambda: adapter.capture_disabled_reason,
    )


def steps_period(method: AnyMethod, batch: int) -> int:
    """Return after how many batches the cost of a step repeats: some methods learn every N images, or batches."""
    fields = get_fields(method)
    every, rare = (fields.get(name) or 1 for name in ("every", "learn_every"))
    rare = rare if rare < MOST else 1  # then all but the first are predictions
    return int(every // math.gcd(every, batch) * rare)


def with_knowledge(method: AnyMethod, net: Backbone, shape: tuple[int, ...]) -> AnyMethod:
    """The method with source knowledge from noise, if it needs any: the values do not change the cost of a step."""
    if method.needs is None:
        return method
    batches = noise((STUDIED, 8, *shape), net.device).to(net.dtype)
    knowledge = method.study(net, [(x, torch.zeros(len(x), dtype=torch.int64, device=net.device)) for x in batches])
    return with_fields(method, knowledge=knowledge)


class _Operations(TorchDispatchMode):
    """Counts with torch's formulas. (FlopCounterMode adds module hooks, which torch.autograd.grad refuses.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: float = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **options, out_val=out)
        return out


def count_operations(contender: Contender) -> float:
    """Floating-point operations of a call: convolutions and matrix products, forward and backward.

    The contender must be eager, and the kernels are off: torch counts only the operations that it dispatches.
    """
    with kernels.using(False), _Operations() as counter:
        for _ in range(contender.period):
            contender.call()
    return float(counter.total) / contender.period


def build(name: str, classes: int = 10, device: str | torch.device = "cpu") -> nn.Module:
    """A network by name in evaluation mode; its weights are always the same."""
    design = models.architecture(name, classes=classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = design.build()
    return estimate_statistics(net.to(device), noise((PASSES, BATCH, *design.shape), device))


def noise(shape: tuple[int, ...], device: str | torch.device = "cpu") -> Tensor:
    """Images in [0, 1], always the same."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)


@torch.no_grad()
def estimate_statistics(net: nn.Module, batches: Tensor) -> nn.Module:
    """Estimate BatchNorm's statistics from a few batches: with the initial ones activations double at every block."""
    norms = {layer: layer.momentum for layer in net.modules() if isinstance(layer, _BatchNorm)}
    for norm in norms:
        norm.momentum = None  # a plain average over the passes
    net.train()
    for x in batches:
        net(x)
    for norm, momentum in norms.items():
        norm.momentum = momentum
    return net.eval()
