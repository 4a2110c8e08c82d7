"""Many streams by name on one frozen network: ``fleet = tribe.fleet(net); logits = fleet({"cam1": images})``."""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.kernels import Switch
from tribe.filters import TimeFilter
from tribe.health.calibration import Calibration
from tribe.health.guard import Guard, resolve_guard
from tribe.health.history import History
from tribe.health.prepared import InputWatch, Prepared, check_alone
from tribe.health.report import Health, Listener, StreamInfo, StreamReport, describe_streams
from tribe.methods import AnyMethod, EmptyState, Pipeline
from tribe.methods.building import build_method
from tribe.streams.batching import Arrived, gather
from tribe.streams.budget import Budget, Pace, choose_method
from tribe.streams.core import Streams, check_seed
from tribe.streams.inputs import Images
from tribe.streams.names import check_name
from tribe.streams.shadow import Shadow, shares_that_differ


@torch.inference_mode(False)  # what is built here must be able to carry gradients
def fleet(
    model: nn.Module | Backbone,
    method: str | AnyMethod | Prepared | PathLike[str] | None = None,
    *,
    time: str | TimeFilter | None = None,
    guard: bool | Guard = False,
    health: bool | Calibration | str | PathLike[str] = False,
    on_event: Listener | None = None,
    classes: int | None = None,
    rows: int | None = None,
    seed: int = 0,
    history: History | bool | None = None,
    graphs: Switch = "auto",
    deterministic: bool = False,
    exact: bool = False,
    budget: float | Budget | None = None,
    shadow: bool | Shadow = False,
    **fields: Any,
) -> "Fleet":
    """Make a trained classifier adapt to many streams (cameras), each with a name.

    Args:
        on_event: called with every alarm; `Event.stream` is the name of the stream.
        rows: the most states on the network's device; the least recently used others move to host memory. None: as
            many as fit in 2 GiB.
        seed: the seed of a stream is a hash of this number and of the stream's name; see `stream_seed`.
        exact: step streams one by one, so that each gets the bits that it gets alone; slower. False: streams go through
            the network together, and agree with single ones to rounding.
        fields: the method's hyper-parameters.

    The other arguments are as for `tribe.adapt`; a history is one of each stream.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
        >>> cameras = fleet(net)
        >>> logits = cameras({"door": torch.rand(2, 3, 8, 8), "gate": torch.rand(5, 3, 8, 8)})
        >>> logits["gate"].shape, cameras.info("door").images
        (torch.Size([5, 4]), 2)
    """
    net = model if isinstance(model, Backbone) else Backbone(model)
    if net.dense:
        raise ValueError("a fleet returns logits, and this network may return something else: dense=True")
    if (prepared := Prepared.of(method)) is not None:
        check_alone(time=time, guard=guard, health=health, classes=classes, budget=budget, **fields)
        method = prepared.build(net)
    assert not isinstance(method, Prepared | PathLike)
    built = build_method(net, choose_method(method, net, budget), time, classes, fields, resolve_guard(guard, health))
    pace = Pace(Budget.of(budget), None)
    return Fleet(
        net,
        pace.prepare(net, built, fields),
        on_event=on_event,
        classes=classes,
        rows=rows,
        seed=seed,
        history=history,
        graphs=graphs,
        deterministic=deterministic,
        exact=exact,
        pace=pace,
        shadow=shadow,
        inputs=None if prepared is None else InputWatch(prepared.inputs),
    )


class Fleet(Streams):
    """Streams by name that adapt on one frozen network. Made by `fleet`.

    Calling it predicts, then adapts, the streams that have images; an unknown name is a new stream. Images are
    (B, ...) for each stream, and B may differ; arrays, pictures, bytes and one image without the axis B
    are taken as by `tribe.Adapter`. Bad images are treated as by it. A step that fails leaves
    every stream as it was. Several threads may use it: one at a time takes a step, the others wait; `predict` and
    whatever else only reads does not wait for a step.
    """

    # -- predicting and learning ------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # which forbids the gradients that adaptation needs, even under enable_grad
    @torch.no_grad()
    def __call__(self, images: Mapping[str, Images]) -> dict[str, Tensor]:
        """Predict, then adapt, the streams that have images; frozen ones only predict. Unknown streams are added."""
        return self.step(self._arrived(images))

    def learn(self, images: Mapping[str, Images]) -> None:
        """Adapt to images and return nothing. A frozen stream learns nothing."""
        self(images)

    @torch.inference_mode(False)
    @torch.no_grad()
    def predict(
        self, images: Mapping[str, Images], *, shadow: bool | Mapping[str, bool] | None = None
    ) -> dict[str, Tensor]:
        """Predict without adapting, with the last states: a step in another thread is not waited for.

        ``shadow``, for all streams or by name: True asks the source, False what adapts; None answers as a call does.
        """
        return self.run_prediction(self._arrived(images), shadow)

    @torch.inference_mode(False)
    @torch.no_grad()
    def predict_source(self, x: Images) -> Tensor:
        """Predict images (B, ...) with the source model."""
        own = self._arrived({"source": x})["source"]
        self.checks.find_bad(own.x, None)
        logits = self._runner.predict_source(own.x)
        return own.as_given(logits)

    def _arrived(self, images: Mapping[str, Images]) -> dict[str, Arrived]:
        if not isinstance(images, Mapping):
            raise TypeError(f"expected images by the name of their stream, {{'cam1': x}}; got {type(images).__name__}")
        arrived = {}
        for name, x in images.items():
            check_name(name)
            try:
                arrived[name] = Arrived.of(x, self.net, 1)
            except (TypeError, ValueError) as error:
                raise type(error)(f"stream {name!r}: {error}") from error
        return arrived

    # -- names --------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def add(self, name: str, seed: int | None = None) -> Self:
        """Add a stream that starts at the source model. Its seed is `stream_seed` of its name, unless one is given."""
        check_name(name)
        if seed is not None:
            check_seed(seed)
        entry = self.new_entry(name, seed)
        with self.lock:
            if name in self:
                raise ValueError(f"there is a stream {name!r} already: reset({name!r}) starts it anew")
            self.table.put({name: entry})
        return self

    def drop(self, name: str) -> Self:
        """Forget a stream."""
        with self.lock, self.table.lock:
            self.entry(name)
            del self.table.entries[name]
        return self

    @property
    def names(self) -> list[str]:
        """The names of all streams, sorted."""
        with self.table.lock:
            return sorted(self.table.entries)

    def __len__(self) -> int:
        return len(self.table.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.table.entries

    # -- shadow -------------------------------------------------------------------------------------------------------

    def promote(self, name: str | None = None) -> Self:
        """Let what adapts answer from the next call on, for one stream or all. Their states stay as they are."""
        return self._set_all(name, False)

    def demote(self, name: str | None = None) -> Self:
        """Let the source answer from the next call on, for one stream or all; they go on learning in shadow."""
        return self._set_all(name, True)

    def _set_all(self, name: str | None, shadow: bool) -> Self:
        with self.table.lock:
            for each in self.names if name is None else [name]:
                self.set_shadow(each, shadow)
        return self

    def in_shadow(self, name: str) -> bool:
        """Return whether the source answers for a stream."""
        return self.entry(name).shadow[0]

    # -- reports ------------------------------------------------------------------------------------------------------

    def info(self, name: str) -> StreamInfo:
        """Return what a stream has learned from."""
        return self.infos(name)[0]

    def health(self, name: str) -> Health | None:
        """Return how a stream does; None without ``health`` or ``guard``."""
        healths = self.healths(name)
        return None if healths is None else healths[0]

    def info_many(self, names: Iterable[str]) -> dict[str, StreamInfo]:
        """Return `info` of several streams, read together: each reading of a GPU waits for it."""
        entries = {name: self.table.on_device(self.entry(name)) for name in names}
        if not entries:
            return {}
        states = [entry.state for entry in entries.values()]
        steps = torch.cat([state.key.clock for state in states])
        bad, frozen = ([entry.bad_images()[0] for entry in entries.values()], [e.frozen for e in entries.values()])
        modes = [entry.shadow[0] for entry in entries.values()]
        differ = shares_that_differ(list(entries.values()), self.alarms.watched)
        infos = describe_streams(gather([state.info for state in states]), steps, bad, frozen, None, modes, differ)
        return dict(zip(entries, infos, strict=True))

    def report_many(self, names: Iterable[str]) -> dict[str, StreamReport]:
        """Return reports on several streams, read together, without those of a time filter.

        They have no `Health.statistics` and no `Health.followed`, which take a look at all statistics.
        """
        infos, pipeline = self.info_many(names), Pipeline.of(self.method)
        if not self.alarms.watched or not infos:
            return {name: StreamReport(info) for name, info in infos.items()}
        states = [self.table.on_device(self.entry(name)).state for name in infos]
        guards = gather([state.guard._replace(good=EmptyState()) for state in states])
        healths = pipeline.guard.read_health(self.net, pipeline.method, guards, gather([s.info for s in states]))
        return {name: StreamReport(infos[name], own) for name, own in zip(infos, healths, strict=True)}

    @property
    def listeners(self) -> list[Listener]:
        """The functions that are called with every alarm, in the thread that took the step: add to it, and remove."""
        return self.alarms.listeners

    def clock(self, name: str) -> int:
        """Return how many steps a stream has taken."""
        return int(self.entry(name).state.key.clock[0])

    def __repr__(self) -> str:
        return f"Fleet({self.method}, streams={len(self)})"
