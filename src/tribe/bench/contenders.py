"""Who takes part: plain inference, and any method, on one network that all of them share.

A contender is built from a name. Beside the methods' there are those of `@contender`; code outside the package can add
more.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tribe import methods
from tribe.adapter import adapt
from tribe.bench.clock import Call
from tribe.bench.networks import noise
from tribe.engine.backbone import Backbone
from tribe.engine.graphs import Switch
from tribe.methods import Method
from tribe.registry import nearest

PLAIN, CHANNELS_LAST, COMPILED = "plain", "channels-last", "compiled"
INFERENCE = (PLAIN, CHANNELS_LAST, COMPILED)  # of the network as it is, nothing adapts
STUDIED = 2  # batches of source images for methods that must know something of them


@dataclass(frozen=True)
class Ground:
    """What contenders are built on, in the precision asked for."""

    net: nn.Module  # as a user has it
    backbone: Backbone  # tribe's copy, which all methods share
    images: Tensor  # (S, B, ...)
    classes: int
    graphs: Switch


@dataclass(frozen=True)
class Contender:
    """Something to be timed."""

    call: Call  # takes one step with all images
    state_bytes: int = 0  # what adapts, at rest, of all streams
    period: int = 1  # calls after which costs repeat
    eager_because: Callable[[], str | None] = lambda: None  # why steps are not captured, once it was called


Build = Callable[[Ground], Contender]
_known: dict[str, Build] = {}


def contender(name: str) -> Callable[[Build], Build]:
    """Decorator: make something that is no method known by a name."""

    def add(build: Build) -> Build:
        _known[name] = build
        return build

    return add


def create(name: str, ground: Ground) -> Contender:
    """Build a contender from its name."""
    return _known[name](ground) if name in _known else _adapting(name, ground)


def check(names: Sequence[str]) -> None:
    """Refuse names that nobody has, and no names at all."""
    if not names:
        raise ValueError(f"there is no method to measure: {nearest('', methods.names())}")
    for name in names:
        if name not in _known and name not in methods.variants() and name not in methods.names():
            raise ValueError(f"unknown method {name!r}: {nearest(name, [*methods.names(), *_known])}")


# -- plain inference ---------------------------------------------------------------------------------------------------


@contender(PLAIN)
def _plain(ground: Ground) -> Contender:
    """The network as a user has it: eager, NCHW."""
    return _passes(ground.net, ground.images.flatten(0, 1))


@contender(CHANNELS_LAST)
def _channels_last(ground: Ground) -> Contender:
    """The same in the layout that suits convolutions."""
    return _passes(*_in_channels_last(ground))


@contender(COMPILED)
def _compiled(ground: Ground) -> Contender:
    """The hardest to be measured against: compiled, channels-last, in a CUDA graph where there is CUDA."""
    net, x = _in_channels_last(ground)
    found = _passes(torch.compile(net, mode="reduce-overhead" if x.is_cuda else None), x)  # type: ignore[arg-type]
    try:
        found.call()
    except Exception as error:  # a compiler may fail in any way
        raise ValueError(f"this network could not be compiled here ({type(error).__name__}: {error})") from error
    return found


def _in_channels_last(ground: Ground) -> tuple[nn.Module, Tensor]:
    images = ground.images.flatten(0, 1)
    layout = torch.channels_last if images.dim() == 4 else torch.contiguous_format
    net = copy.deepcopy(ground.net).to(memory_format=layout)  # type: ignore[call-overload]
    return net, images.contiguous(memory_format=layout)


def _passes(net: nn.Module, x: Tensor) -> Contender:
    return Contender(torch.no_grad()(partial(net, x)))


# -- methods -----------------------------------------------------------------------------------------------------------


def _adapting(name: str, ground: Ground) -> Contender:
    streams, batch, *shape = ground.images.shape
    known = {field.name for field in dataclasses.fields(methods.get(name))}
    room = {"room": math.prod(shape)} if "room" in known else {}  # for memories of images
    method = informed(methods.create(name, classes=ground.classes, **room), ground.backbone, tuple(shape))
    adapter = adapt(ground.backbone, method, streams=streams, graphs=ground.graphs)
    return Contender(
        partial(adapter, ground.images if streams > 1 else ground.images[0]),
        state_bytes=sum(t.nbytes for t in adapter.adapted.buffers()),
        period=_period(method, batch),
        eager_because=lambda: adapter.eager_because,
    )


def _period(method: Method, batch: int) -> int:
    """Calls after which costs repeat: a method that learns every so many images may do so in some calls only."""
    every = getattr(method, "every", 1)
    return int(every // math.gcd(every, batch))


def informed(method: Method, net: Backbone, shape: tuple[int, ...]) -> Method:
    """The method with the source knowledge it needs, if any, of noise: a step costs the same whatever it says."""
    if method.needs is None:
        return method
    batches = noise((STUDIED, 8, *shape), net.device).to(net.dtype)
    knowledge = method.study(net, [(x, torch.zeros(len(x), dtype=torch.int64, device=net.device)) for x in batches])
    return dataclasses.replace(method, knowledge=knowledge)  # type: ignore[call-arg]
