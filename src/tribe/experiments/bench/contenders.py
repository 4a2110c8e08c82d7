"""Contenders, which are timed: plain inference, and any method, on one shared network.

A contender has the name of a method, or of a function with `@contender`. Code outside the package can add more.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.kernels import Switch
from tribe.core.state import count_bytes
from tribe.experiments.bench.clock import Call
from tribe.experiments.bench.networks import noise
from tribe.methods import AnyMethod, with_fields
from tribe.registry import nearest
from tribe.streams.adapter import adapt

PLAIN, CHANNELS_LAST, COMPILED = "plain", "channels-last", "compiled"
INFERENCE = (PLAIN, CHANNELS_LAST, COMPILED)  # the network without adaptation
STUDIED = 2  # batches of source images for methods that need source knowledge


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


# -- plain inference ---------------------------------------------------------------------------------------------------


@contender(PLAIN)
def _plain(workload: Workload) -> Contender:
    """The user's network: eager, NCHW."""
    return _inference(workload.net, workload.images.flatten(0, 1))


@contender(CHANNELS_LAST)
def _channels_last(workload: Workload) -> Contender:
    """The same in channels-last layout, which is faster for most convolutions."""
    return _inference(*_in_channels_last(workload))


@contender(COMPILED)
def _compiled(workload: Workload) -> Contender:
    """The fastest plain inference: compiled, channels-last, and on CUDA in a CUDA graph."""
    net, x = _in_channels_last(workload)
    built = _inference(torch.compile(net, mode="reduce-overhead" if x.is_cuda else None), x)  # type: ignore[arg-type]
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


def _inference(net: nn.Module, x: Tensor) -> Contender:
    return Contender(torch.no_grad()(partial(net, x)))


# -- methods -----------------------------------------------------------------------------------------------------------


def _method(name: str, workload: Workload) -> Contender:
    streams, batch, *shape = workload.images.shape
    room = (
        {"room": math.prod(shape)} if "room" in methods.field_names(name) else {}
    )  # values an image, for memories of images
    method = with_knowledge(methods.create(name, classes=workload.classes, **room), workload.backbone, tuple(shape))
    adapter = adapt(workload.backbone, method, streams=streams, graphs=workload.graphs)
    return Contender(
        partial(adapter, workload.images if streams > 1 else workload.images[0]),
        state_bytes=count_bytes(adapter.state),
        period=_period(method, batch),
        capture_disabled_reason=lambda: adapter.capture_disabled_reason,
    )


def _period(method: AnyMethod, batch: int) -> int:
    """Calls after which the cost of a call repeats: a method that learns every N images learns in some calls only."""
    every = getattr(method, "every", None) or 1  # None: once a batch
    return int(every // math.gcd(every, batch))


def with_knowledge(method: AnyMethod, net: Backbone, shape: tuple[int, ...]) -> AnyMethod:
    """The method with source knowledge from noise, if it needs any: the values do not change the cost of a step."""
    if method.needs is None:
        return method
    batches = noise((STUDIED, 8, *shape), net.device).to(net.dtype)
    knowledge = method.study(net, [(x, torch.zeros(len(x), dtype=torch.int64, device=net.device)) for x in batches])
    return with_fields(method, knowledge=knowledge)
