"""A guard over any method: it watches, skips frames that teach nothing, limits every step, and goes back.

Fitted to its network (`Guard.fitted`), it also leans on the source where little has changed.
``tribe.adapt(net, guard=True)``, or ``tribe+guard``. The guard does not change the method's update rule: it
skips batches, limits updates, and blends what predicts. It acts stream by stream, with masks, in a pure step.
``tribe+watch`` only watches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Annotated, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tribe.core import optim
from tribe.core.backbone import Backbone
from tribe.core.bounds import COUNT
from tribe.core.graphs import SideStream
from tribe.core.rules import PerBatch
from tribe.core.state import Affine, Info, Stats, clone, copy_like, per_stream, select_joined
from tribe.core.validation import good_images
from tribe.fields import Count, NotNegative, Positive, Range, Share, check_fields, require
from tribe.health.alarms import KINDS, SHIFT
from tribe.health.calibration import Calibration
from tribe.health.estimate import Estimate
from tribe.health.probe import (
    RATIO,
    distance_in_single_images,
    distance_of_images,
    distance_of_statistics,
    shift_weight,
)
from tribe.health.report import Health
from tribe.health.watch import Watcher, WatchState
from tribe.knowledge import Knowledge, KnowledgeError, KnowledgeLike
from tribe.methods import AnyMethod, Deployed, EmptyState, Method, Pipeline, PipelineState, create, guards
from tribe.methods.method import count_classes
from tribe.methods.rare import Rare
from tribe.methods.stepping import distance_of
from tribe.norms.balanced import Balanced
from tribe.norms.batch import MixedBatch

_watchers: WeakKeyDictionary[Backbone, dict[Any, Watcher]] = WeakKeyDictionary()
_kinds: WeakKeyDictionary[Backbone, dict[Method, tuple[bool, bool]]] = WeakKeyDictionary()
FAULTY = slice(0, KINDS.index("blurred"))  # alarms of frames that teach nothing; methods adapt to blur and shift
GONE_WRONG = slice(KINDS.index("drift"), len(KINDS))  # alarms of the method itself, not of the images


class GuardState(NamedTuple):
    """The state of a guard."""

    watch: WatchState
    held: Annotated[Tensor, COUNT]  # (S,) int64, images that the method did not learn from
    returned: Annotated[Tensor, COUNT]  # (S,) int64, how often a stream returned to its last good state
    kept: Annotated[Tensor, COUNT]  # (S,) int64, how many images had come when `good` was kept
    good: Any  # the last good state of the method; `EmptyState` if none is kept


@guards.register("watch")
@dataclass(frozen=True)
class Watch:
    """Settings of watching a stream: alarms, estimated accuracy, agreement with the source."""

    calibration: KnowledgeLike = None  # a `tribe.health.Calibration`, or its file; None: no estimate, fewer alarms
    probe: Annotated[int, Range()] = 4  # every so many images of a batch, one is also predicted by the source; 0: none

    name: ClassVar[str]  # set by the registry
    paper: ClassVar[str] = "beyond the paper: docs/health.md"
    small: ClassVar[Mapping[str, Any]] = {}  # values for tests; see `tribe.testing`
    acts: ClassVar[bool] = False  # whether predictions are others than the method's

    def __post_init__(self) -> None:
        check_fields(self)
        given: Any = self.calibration
        if isinstance(given, Calibration):
            given = given.knowledge()
        elif given is not None and not isinstance(given, Knowledge):
            if not isinstance(given, str | PathLike):
                raise KnowledgeError(f"calibration is what tribe.calibrate returns, or its file; got {given!r}")
            given = Knowledge.load(given)
        if given is not None:
            Calibration.of(given)  # refuses other knowledge
        object.__setattr__(self, "calibration", given)

    def lean(self, net: Backbone, method: Method, state: Any) -> Deployed:
        """Return the network that predicts: the method's."""
        return method.deployed(net, state)

    def check_calibration(self, answers_by: str) -> None:
        """Refuse a calibration that was made with another method, guard or filter; see `Pipeline.answers_by`."""
        if self.calibration is not None:
            Calibration.of(self.calibration).check_method(answers_by)  # type: ignore[arg-type]

    def watcher(self, net: Backbone, method: Method) -> Watcher:
        """Return the watcher of streams of this network; made once for each: a calibration is compared with it."""
        made = _watchers.setdefault(net, {})
        place = self.name, method.name, method.classes, self.calibration, self.probe, net.device
        if place not in made:
            calibration = None if self.calibration is None else Calibration.of(self.calibration)  # type: ignore[arg-type]
            if calibration is not None:
                calibration.check(net)
            made[place] = Watcher.of(count_classes(net, method.classes), self.probe, calibration, net.device)
        return made[place]

    def init(self, net: Backbone, method: Method, state: Any) -> GuardState:
        """Return the state before the first image, for the method's first state."""
        none = torch.zeros_like(state.info.images)
        watch = self.watcher(net, method).init(net, len(none))
        return GuardState(watch, none, none.clone(), none.clone(), EmptyState())

    def recast(self, net: Backbone, method: Method, state: GuardState) -> GuardState:
        """Return a state that was cast with the network: sums are float64 on every network, all else is float32."""
        return state._replace(watch=copy_like(state.watch, self.watcher(net, method).init(net, len(state.held))))

    def step(
        self,
        net: Backbone,
        method: Method,
        state: Any,
        old: GuardState,
        x: Tensor,
        valid: Tensor | None = None,
        retired: Any = None,
        *,
        rare: Rare | None = None,
        deliver: Callable[[Tensor], tuple[Tensor, Any]],
    ) -> tuple[Tensor, Any, GuardState, Any]:
        """Take the method's step, ``rare`` or not, watch it, and apply the guard's limits to the result.

        What watches runs beside the method's own work, and reads what the method reported of the batch before.
        ``deliver`` makes answers of predictions, and returns them with a time filter's next state: the estimate is of
        answers. Return the answers, the next states of the method and of the guard, and that of the filter.
        """
        watcher, beside = self.watcher(net, method), SideStream(x.device)
        good = good_images(x)  # a bad image leaves no trace
        real = good if valid is None else good & valid
        verdict, answers, looked = beside(lambda: watcher.look(net, old.watch, x, real))
        watched: list[tuple[WatchState, Tensor]] = []  # with the tensor that was read, which must be kept

        def on_prediction(output: Tensor) -> None:
            seen = real & _differs(output)
            watched.append((watcher.observe(looked, verdict, answers, output, seen, state.info), output))

        options: dict[str, Any] = {"deploy": lambda net, state: self.lean(net, method, state)}
        due = torch.ones_like(state.key.clock, dtype=torch.bool)
        if rare is not None:
            due = rare.due(state).to(x.device)
            output, moved = rare.step(method, net, state, x, valid, retired, **options)
        else:
            if method.capture == "whole":
                options["on_prediction"] = lambda output: beside(lambda: on_prediction(output))
            output, moved = method.step(net, state, x, valid, retired, **options)
        if not watched:
            beside(lambda: on_prediction(output))
        beside.join()
        answer, filtered = deliver(output)
        watch = watcher.estimate(watched[0][0], answers, answer, real & _differs(output), state.info)
        new = old._replace(watch=watcher.report(watch, moved.info, real))
        idle = torch.where((verdict.teaches_nothing & real).any(1) & due, real.sum(1), 0)
        return answer, *self.restrain(net, method, state, moved, old, new, idle, due), filtered

    def restrain(
        self,
        net: Backbone,
        method: Method,
        before: Any,
        moved: Any,
        old: GuardState,
        new: GuardState,
        idle: Tensor,
        due: Tensor,
    ) -> tuple[Any, GuardState]:
        """Apply the limits of a guard to a step; what only watches has none.

        ``idle`` (S,) are the images of a batch with a frame that teaches nothing; 0 for other batches. ``due`` (S,) are
        the streams that learn from this batch.
        """
        return moved, new

    def health(self, net: Backbone, method: Method, state: PipelineState) -> list[Health]:
        """Return the health of each stream. Waits for the device."""
        found = self.read_health(net, method, state.guard, state.info)
        adapted = method.deployed(net, state.method)
        if isinstance(adapted.norm, PerBatch) or not adapted.stats.mean.shape[-1]:
            return found
        anchored = method.anchored(net, state.method)
        seen = adapted.stats if anchored is None else anchored
        own = method.followed(state.method)
        followed = self.follow(net, state.method, seen) if own is None else own
        rows = zip(found, distance_of_statistics(net, seen).tolist(), followed.tolist(), strict=True)
        return [health._replace(statistics=far, followed=share) for health, far, share in rows]

    def read_health(self, net: Backbone, method: Method, guard: GuardState, info: Info) -> list[Health]:
        """Return the same without `Health.statistics` and `Health.followed`; the guard's state needs no ``good``."""
        watcher, watch = self.watcher(net, method), guard.watch
        none = [None] * len(info.images)
        estimate = watcher.read(watch)
        known = watcher.normal is not None
        agreed, probed = watch.agreement.unbind(1)
        shares = (agreed / probed.clamp_min(1)).tolist()
        *reported, images = watch.recent.unbind(1)
        entropy, trusted = ((sums / images.clamp_min(1)).tolist() for sums in reported)
        columns: dict[str, Sequence[Any]] = {
            "images": watch.alarms.images.tolist(),
            **{name: getattr(estimate, name).tolist() if known else none for name in Estimate._fields},
            "calibrated": [known] * len(none),
            "alarms": [tuple(k for k, on in zip(KINDS, row, strict=True) if on) for row in watch.alarms.on.tolist()],
            "entropy": entropy,
            "trusted": trusted,
            "distance": info.distance.tolist(),
            "statistics": none,
            "followed": none,
            "source_agreement": [s if n > 0 else None for s, n in zip(shares, probed.tolist(), strict=True)],
            "predicted": [tuple(row) for row in watch.predicted.tolist()],
            "held": guard.held.tolist(),
            "returned": guard.returned.tolist(),
        }
        return [Health(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]

    def follow(self, net: Backbone, state: Any, seen: Stats) -> Tensor:
        """Return the share of the adapted statistics in those that predict, (S,)."""
        return torch.ones(len(state.info.images))


@guards.register("guard")
@dataclass(frozen=True)
class Guard(Watch):
    """Settings of a guard: its limits, and how far predictions lean on the source."""

    probe: Annotated[int, Range()] = 16
    lean_half: NotNegative | None = None  # distance of the statistics at which predictions lean halfway; see `fitted`
    lean_single: NotNegative | None = None  # the same in batches of one image, else by 1 / size; None: lean_half
    lean_most: Share = 1.0  # the most that predictions follow adapted statistics; 0: the source's only
    lean_batch: Share = 0.3  # for methods that normalise with the batch's statistics: their share ...
    pull: Share = 0.03  # ... and the share of the way back to the source's affine parameters, after every batch
    speed: Positive | None = 0.003  # the most that affine parameters move in a batch, relative to their norm; None: any
    skip: bool = True  # learn nothing from a batch with black, flat, frozen or noise frames, or values of 0 to 255
    good_every: Count | None = 1000  # images after which a healthy state is kept, to return to; None: never return

    small: ClassVar[Mapping[str, Any]] = {"skip": False}  # the images of `tribe.testing` are noise, which it skips
    acts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        half, single = self.lean_half, self.lean_single
        known = single is None or (half is not None and single >= half)
        require(known, "lean_single of a guard is a distance, at least lean_half, or None: as lean_half", single)
        leans = (half or 0, self.lean_most if half is not None else 1, self.lean_batch, self.pull) != (0, 1, 1, 0)
        if not (self.skip or self.speed is not None or self.good_every is not None or leans):
            raise ValueError(
                "this guard can never act: it skips nothing, limits nothing, keeps no state to return to, and follows "
                "the adapted statistics wholly. Set skip, speed, good_every or lean_half; tribe+watch only watches"
            )

    @classmethod
    def fitted(cls, net: Any, images: Tensor, method: AnyMethod | str = "tribe", **fields: Any) -> "Guard":
        """Return a guard for this network: `lean_half` from clean images (N, ...) of all classes, without labels.

        How far clean images are from the source's statistics differs between networks: 0.043 for ResNet-20, 0.015 for
        WRN-28-10. A few hundred tell it. Where the method's statistics share updates between classes, as TRIBE's do
        with more than 20, single images move them further: `lean_single` is then measured, too, one image at a time.
        """
        backbone = net if isinstance(net, Backbone) else Backbone(net)
        far = distance_of_images(backbone, images)
        built = create(method, classes=count_classes(backbone, None)) if isinstance(method, str) else method
        fields = {"lean_half": round(RATIO * far, 4), **fields}
        norm, half = getattr(Pipeline.of(built).method, "norm", None), fields["lean_half"]
        asked = half is not None and "lean_single" not in fields
        if asked and isinstance(norm, Balanced) and norm.gamma and norm.gamma_over == "present":
            single = distance_in_single_images(backbone, images, norm)
            fields["lean_single"] = max(half, round(RATIO * single, 4))
        return cls(**fields)

    def midpoint(self, state: Any) -> float | Tensor:
        """Return the squared distance at which predictions lean halfway: (S,), or one for all streams.

        It is that of `lean_half` for large batches, of `lean_single` for batches of one. Where a batch moves what all
        classes share, its images are averaged: their noise has a variance of 1 / B.
        """
        assert self.lean_half is not None
        if self.lean_single is None:
            return self.lean_half**2
        share: Tensor = state.key.clock / state.info.images.clamp_min(1)
        return share.mul_(self.lean_single**2 - self.lean_half**2).add_(self.lean_half**2)

    def lean(self, net: Backbone, method: Method, state: Any) -> Deployed:
        """Return the network that predicts: between the source and the adapted one, or with a mix of statistics.

        The distance is that of the statistics under the source's parameters, where a method keeps them: the adapted
        ones also move because the parameters do, in batches of one image as far as a change of the world would move
        them.
        """
        adapted = method.deployed(net, state)
        if not adapted.stats.mean.shape[-1] or adapted.weights is not None:
            return adapted  # it has no statistics, or weights that were adapted together with them
        if isinstance(adapted.norm, PerBatch):
            return replace(adapted, norm=MixedBatch(self.lean_batch)) if type(adapted.norm) is PerBatch else adapted
        if self.lean_half is None or method.followed(state) is not None:
            return adapted
        affine, stats = net.origin.state
        anchored = method.anchored(net, state)
        far = shift_weight(net, adapted.stats if anchored is None else anchored, self.midpoint(state))
        learned, share = far.square(), far if self.lean_most == 1 else self.lean_most * far
        return replace(
            adapted,
            affine=Affine(*(_between(s, t, learned) for s, t in zip(affine, adapted.affine, strict=True))),
            stats=Stats(*(_between(s, t, share) for s, t in zip(stats, adapted.stats, strict=True))),
        )

    def init(self, net: Backbone, method: Method, state: Any) -> GuardState:
        """Return the state before the first image, for the method's first state."""
        first = super().init(net, method, state)
        return first if self.good_every is None else first._replace(good=clone(state))

    def restrain(
        self,
        net: Backbone,
        method: Method,
        before: Any,
        moved: Any,
        old: GuardState,
        new: GuardState,
        idle: Tensor,
        due: Tensor,
    ) -> tuple[Any, GuardState]:
        """Shorten the step, skip it where frames teach nothing, and go back where something went wrong."""
        if self.speed is not None:
            moved = limit(moved, before, self.speed)
        per_batch, own_weights = _kind_of_prediction(net, method, before)
        if self.pull and per_batch:
            moved = pull_back(net, moved, self.pull * (due & (moved.key.clock > before.key.clock)))  # a step
        if not own_weights:  # else what predicts is a mean of many steps, not what was limited
            moved = moved._replace(info=moved.info._replace(distance=_distance(net, moved)))
        skipped = idle if self.skip else torch.zeros_like(idle)
        after = select_joined(skipped == 0, moved, before)
        after = after._replace(info=after.info._replace(skipped=after.info.skipped + skipped))
        new = new._replace(held=new.held + skipped)
        if self.lean_half is not None and method.followed(before) is None:
            after = self.let_go(net, method, after, new.watch, old.watch)
        return (after, new) if self.good_every is None else self.go_back(after, new, old.watch)

    def let_go(self, net: Backbone, method: Method, inner: Any, watch: WatchState, before: WatchState) -> Any:
        """Begin again at the source where a shift has ended: statistics would follow the images too slowly.

        On other devices than a CPU nothing happens: the host would wait for the answer.
        """
        ended = before.alarms.on[:, SHIFT] & ~watch.alarms.on[:, SHIFT]
        if ended.device.type != "cpu" or not ended.any():
            return inner
        return _mix(ended, method.init(net, len(ended))._replace(key=inner.key, info=inner.info), inner)

    def go_back(self, inner: Any, guard: GuardState, before: WatchState) -> tuple[Any, GuardState]:
        """Return to the last good state where something has gone wrong; keep the state where all is well."""
        assert self.good_every is not None
        now, then = (watch.alarms.on[:, GONE_WRONG] for watch in (guard.watch, before))
        wrong = (now & ~then).any(1)
        inner = _mix(wrong, guard.good._replace(key=inner.key, info=inner.info), inner)
        alarms = guard.watch.alarms
        images, suspected = alarms.images, alarms.collapse.evidence > 0  # an alarm comes some time after its cause
        doubted = alarms.on[:, FAULTY].any(1) | now.any(1) | suspected
        due = ~doubted & (images - guard.kept >= self.good_every)
        return inner, guard._replace(
            returned=guard.returned + wrong,
            kept=torch.where(due, images, guard.kept),
            good=_mix(due, inner, guard.good),
        )

    def follow(self, net: Backbone, state: Any, seen: Stats) -> Tensor:
        """Return the share of the adapted statistics in those that predict, (S,)."""
        if self.lean_half is None:
            return super().follow(net, state, seen)
        return self.lean_most * shift_weight(net, seen, self.midpoint(state))


def _differs(output: Tensor) -> Tensor:
    """Return which images (S, B) are not predicted uniformly, as bad ones are."""
    low, high = output.aminmax(dim=-1)
    return high > low


def _between(source: Tensor, adapted: Tensor, share: Tensor) -> Tensor:
    """``share`` (S,) of the way from the source's numbers (1, ...) to adapted ones (S, ...)."""
    weight = share.to(adapted.dtype).view(-1, *[1] * (adapted.dim() - 1))
    return torch.lerp(source, adapted, weight)


def _kind_of_prediction(net: Backbone, method: Method, state: Any) -> tuple[bool, bool]:
    """Return whether a method normalises with the batch's statistics, and whether it predicts with weights of its own.

    It is computed once for a network: `deployed` may pool many classes.
    """
    made = _kinds.setdefault(net, {})
    if method not in made:
        network = method.deployed(net, state)
        made[method] = isinstance(network.norm, PerBatch), network.weights is not None
    return made[method]


def resolve_guard(guard: Any, health: Any) -> Watch | None:
    """Return the guard of a pipeline from the arguments ``guard`` and ``health`` of `tribe.adapt`; None: no guard."""
    if not isinstance(guard, bool | Guard):
        raise TypeError(f"guard is True, False or a tribe.Guard; got {guard!r}")
    calibration = None if isinstance(health, bool) else health
    if guard is False:
        return None if health is False else Watch(calibration)
    made = Guard() if guard is True else guard
    return made if calibration is None else replace(made, calibration=calibration)


def _mix(chosen: Tensor, new: Any, old: Any) -> Any:
    """``new`` for the chosen streams (S,), ``old`` for the rest; what is new shares no memory with ``new``."""
    if chosen.device.type == "cpu":  # elsewhere this would synchronise
        if not chosen.any():
            return old
        if chosen.all():
            return clone(new)
    return select_joined(chosen, new, old)


@torch.no_grad()
def limit(new: Any, old: Any, speed: float) -> Any:
    """Shorten the move of affine parameters, anywhere in a state, to ``speed`` times their norm.

    The direction of a stream's move stays. An optimiser that diverges moves in every step as far as its learning rate
    lets it, so a limit on a step is also one on what a wrong learning rate can do.
    """
    streams = len(old.key.seed)

    def shorten(value: Affine, before: Affine) -> Affine:
        after, start = (torch.stack(pair).unflatten(1, (streams, -1)) for pair in (value, before))  # (2, S, n, C)
        moved = after - start
        norm, length = (torch.linalg.vector_norm(t, dim=(0, 2, 3), keepdim=True) for t in (start, moved))
        room = norm / length  # NaN where neither is above 0
        # NOTE: b + (v - b) is not v in floating point, and a stream that is not limited keeps its bits.
        short = torch.where(room * speed < 1, torch.addcmul(start, room, moved, value=speed), after)
        return Affine(*short.flatten(1, 2))

    return _on_parameters(shorten, new, old)


@torch.no_grad()
def pull_back(net: Backbone, state: Any, pull: Tensor) -> Any:
    """Take the affine parameters of each stream, anywhere in a state, a share ``pull`` (S,) of the way to the source's.

    Without a pull, entropy can fall until the network predicts one class.
    """
    source = net.source()[0]

    def towards(value: Affine, _: Affine) -> Affine:
        share = pull.repeat_interleave(len(value.weight) // len(pull)).unsqueeze(1).to(value.weight.dtype)
        return Affine(*(v + share * (s - v) for v, s in zip(value, source, strict=True)))

    return _on_parameters(towards, state, state)


def _distance(net: Backbone, state: Any) -> Tensor:
    """Return how far the affine parameters have moved, as `Info` reports it, after a guard has held them back: (S,)."""
    found = next(_parameters(state), None)
    if found is None:
        distance: Tensor = state.info.distance
        return distance
    streams = len(state.key.seed)
    return distance_of(net, Affine(*(per_stream(t, streams)[:, 0] for t in found)))  # those that predict come first


def _parameters(value: Any) -> Iterator[Affine]:
    """Return the affine parameters anywhere in a state; the moments of their gradients, of the same kind, are none."""
    if isinstance(value, Affine):
        yield value
    elif not isinstance(value, Tensor | optim.Adam):
        for part in value:
            yield from _parameters(part)


def _on_parameters(change: Callable[[Affine, Affine], Affine], value: Any, before: Any) -> Any:
    """Return a state whose affine parameters are changed; the moments of their gradients, of the same kind, stay."""
    if isinstance(value, Tensor | optim.Adam):
        return value
    if isinstance(value, Affine):
        return change(value, before)
    return type(value)(*(_on_parameters(change, v, b) for v, b in zip(value, before, strict=True)))
