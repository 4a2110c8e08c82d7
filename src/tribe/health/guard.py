"""A guard over any method: it skips frames that teach nothing, limits every step, and leans on the source.

``tribe.adapt(net, guard=True)``, or ``tribe+guard``. What the method learns is its own affair; the guard decides what
it may learn from, how fast, and how far predictions follow. It acts stream by stream, with masks, in a pure step.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.state import Affine, per_stream, select
from tribe.fields import is_number, plain_numbers, require
from tribe.health.frames import FrameRules, FrameState, judge, start_frames
from tribe.health.lean import lean
from tribe.methods import Composed, ComposedState, Deployed, Method, PerBatch, Wrapper, optim, wrappers


@dataclass(frozen=True)
class Guard:
    """What a guard does, and when."""

    lean_half: float = 0.06  # distance of the statistics (see tribe.health.lean) at which half of `lean_most` is used
    lean_most: float = 0.85  # the most that predictions follow adapted statistics; 0: the source's only
    lean_batch: float = 0.3  # for methods that normalise with the batch's statistics: their share ...
    pull: float = 0.03  # ... and the share of the way back to the source's affine parameters, after every batch
    speed: float | None = 0.003  # the most that affine parameters move in a batch, relative to their norm; None: any
    skip: bool = True  # learn nothing from a batch with black, flat, frozen or noise frames, or values of 0 to 255

    name: ClassVar[str] = "guard"
    paper: ClassVar[str] = "beyond the paper: docs/health.md"
    small: ClassVar[Mapping[str, int]] = {"skip": False}  # the images of `tribe.testing` are noise, which it skips

    def __post_init__(self) -> None:
        half, most, speed = self.lean_half, self.lean_most, self.speed
        for name in ("lean_batch", "pull"):
            value = getattr(self, name)
            require(is_number(value) and 0 <= value <= 1, f"{name} of a guard is a share, between 0 and 1", value)
        require(is_number(half) and half >= 0, "lean_half of a guard is a distance, at least 0", half)
        require(is_number(most) and 0 <= most <= 1, "lean_most of a guard is a share, between 0 and 1", most)
        require(speed is None or (is_number(speed) and speed > 0), "speed of a guard is above 0, or None", speed)
        require(isinstance(self.skip, bool), "skip of a guard is True or False", self.skip)
        if not self.skip and speed is None and (half, most, self.lean_batch, self.pull) == (0, 1, 1, 0):
            raise ValueError(
                "this guard can never act: it skips nothing, limits nothing and follows the adapted statistics wholly. "
                "Set skip, speed or lean_most, or leave the guard out"
            )
        plain_numbers(self)


class GuardState(NamedTuple):
    """What a guard remembers of each stream."""

    frames: FrameState
    held: Tensor  # (S,) int64, images that the method did not learn from


class _GuardedState(NamedTuple):
    inner: Any
    guard: GuardState


class GuardedState(_GuardedState, ComposedState):
    """The state of the method and that of the guard."""

    __slots__ = ()


@dataclass(frozen=True)
class Guarded(Composed):
    """A method and a guard."""

    more_than_a_pass = None  # as the method alone

    @classmethod
    def build_inner(cls) -> type[Method]:
        """The method, whose network leans on the source."""
        return leaning(cls.inner_class)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self.inner, "guard", self.part)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> GuardedState:
        """The first states of the method and of the guard."""
        inner = self.inner.init(net, streams, seed)
        return GuardedState(inner, GuardState(start_frames(streams, net.device), torch.zeros_like(inner.info.images)))

    def step(
        self, net: Backbone, state: GuardedState, x: Tensor, valid: Tensor | None = None, retired: Any = None
    ) -> tuple[Tensor, GuardedState]:
        """Take the method's step, and keep of it what the guard allows."""
        rule, old = self.part, state.guard
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
        verdict, _, frames = judge(FrameRules(), old.frames, x, real)
        output, moved = self.inner.step_reusing(net, state.inner, x, valid, retired and retired.inner)
        if rule.speed is not None:
            moved = limit(moved, state.inner, rule.speed)
        if rule.pull and isinstance(self.inner.deployed(net, state.inner).norm, PerBatch):
            moved = pull_back(net, moved, rule.pull * (moved.key.clock > state.key.clock))  # it took a step
        held = verdict.teaches_nothing.any(1) & rule.skip
        inner = select(~held, moved, state.inner)
        skipped = torch.where(held, real.sum(1), 0)
        inner = inner._replace(info=inner.info._replace(skipped=inner.info.skipped + skipped))
        return output, GuardedState(inner, GuardState(frames, old.held + skipped))

    def predict(self, net: Backbone, state: GuardedState, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """As the method alone."""
        return self.inner.predict(net, state.inner, x, valid)

    def follow(
        self, net: Backbone, state: GuardedState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, GuardedState]:
        """As the method alone."""
        answer, inner = self.inner.follow(net, state.inner, x, valid)
        return answer, state if inner is state.inner else GuardedState(inner, state.guard)


wrappers[Guard.name] = Wrapper(Guarded, Guard)


@functools.cache
def leaning(method: type[Method]) -> type[Method]:
    """The method, but the network that predicts leans on the source; its fields are the same."""

    def deployed(self: Any, net: Backbone, state: Any) -> Deployed:
        rule: Guard = self.guard
        return lean(net, method.deployed(self, net, state), rule.lean_half, rule.lean_most, rule.lean_batch)

    names = {"deployed": deployed, "__module__": method.__module__, "__doc__": method.__doc__, "guard": Guard()}
    cls: type[Method] = type(method.__name__, (method,), names)
    return cls


@torch.no_grad()
def limit(new: Any, old: Any, speed: float) -> Any:
    """Shorten the move of affine parameters, anywhere in a state, to ``speed`` times their norm.

    The direction of a stream's move stays. An optimiser that diverges moves in every step as far as its learning rate
    lets it, so a limit on a step is also one on what a wrong learning rate can do.
    """
    streams = len(old.key.seed)

    def shorten(value: Affine, before: Affine) -> Affine:
        after, start = (per_stream(torch.cat(pair, 1), streams).flatten(1) for pair in (value, before))
        moved = torch.linalg.vector_norm(after - start, dim=1)
        share = speed * torch.linalg.vector_norm(start, dim=1) / moved.clamp_min(torch.finfo(moved.dtype).tiny)
        shares = share.clamp_max(1).repeat_interleave(len(value.weight) // streams).unsqueeze(1)
        # NOTE: b + (v - b) is not v in floating point, and a stream that is not limited keeps its bits.
        return Affine(*(torch.where(shares < 1, b + shares * (v - b), v) for v, b in zip(value, before, strict=True)))

    return _on_parameters(shorten, new, old)


@torch.no_grad()
def pull_back(net: Backbone, state: Any, pull: Tensor) -> Any:
    """Take the affine parameters of each stream, anywhere in a state, a share ``pull`` (S,) of the way to the source's.

    Entropy falls without end while a network says one class more and more often. Against a pull, it gets so far only.
    """
    source = net.source()[0]

    def towards(value: Affine, _: Affine) -> Affine:
        share = pull.repeat_interleave(len(value.weight) // len(pull)).unsqueeze(1).to(value.weight.dtype)
        return Affine(*(v + share * (s - v) for v, s in zip(value, source, strict=True)))

    return _on_parameters(towards, state, state)


def _on_parameters(change: Callable[[Affine, Affine], Affine], value: Any, before: Any) -> Any:
    """A state whose affine parameters are changed; the moments of their gradients, of the same kind, stay."""
    if isinstance(value, Tensor | optim.Adam):
        return value
    if isinstance(value, Affine):
        return change(value, before)
    return type(value)(*(_on_parameters(change, v, b) for v, b in zip(value, before, strict=True)))
