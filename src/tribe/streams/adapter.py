"""The stateful shell: ``model = tribe.adapt(net); y = model(x)``, an `nn.Module` view of one entry of `Streams`."""

import copy
from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from tribe.core.backbone import Backbone
from tribe.core.calling import LogitsOutput
from tribe.core.compiling import uncompiled
from tribe.core.kernels import Switch
from tribe.core.placement import deepcopy_module
from tribe.core.state import StateModule, copy_like, leaves, rebuild
from tribe.core.validation import check_source
from tribe.fields import is_whole
from tribe.filters import FilterInfo, TimeFilter
from tribe.health.calibration import Calibration
from tribe.health.changes import Comparison
from tribe.health.guard import Guard, resolve_guard
from tribe.health.history import History, Kept, Past, RolledBack, Snapshot
from tribe.health.prepared import InputWatch, Prepared, check_alone
from tribe.health.report import Event, Health, Listener, StreamInfo
from tribe.io import states
from tribe.methods import AnyMethod, Pipeline
from tribe.methods.building import backbone_for, build_method
from tribe.methods.encoding import method_from_file
from tribe.streams.batching import Arrived
from tribe.streams.budget import Budget, Deadline, Pace, choose_method
from tribe.streams.core import Streams
from tribe.streams.inputs import Images
from tribe.streams.shadow import Shadow

NAME = "adapter"  # of the only entry


@torch.inference_mode(False)  # what is built here must be able to carry gradients
def adapt(
    model: nn.Module | Backbone,
    method: str | AnyMethod | Prepared | PathLike[str] | None = None,
    *,
    time: str | TimeFilter | None = None,
    guard: bool | Guard = False,
    health: bool | Calibration | str | PathLike[str] = False,
    on_event: Listener | None = None,
    classes: int | None = None,
    streams: int = 1,
    seed: int = 0,
    history: History | bool | None = None,
    graphs: Switch = "auto",
    deterministic: bool = False,
    budget: float | Budget | None = None,
    deadline_ms: float | Deadline | None = None,
    shadow: bool | Shadow = False,
    **fields: Any,
) -> "Adapter":
    """Make a trained classifier adapt while it predicts.

    Args:
        model: a classifier with normalisation layers; it is copied, never changed. It takes images in [0, 1] and
            normalises them itself (see `tribe.Normalize`). A `Backbone` is used as it is.
        method: a prepared file, "net.tribe", which says how the network adapts, guard, filter and health included (see
            `tribe.prepare`); or a name from ``tribe.methods.names()``, or a method. None: "tribe"; with a budget
            "bank-tribe", if the network has BatchNorm.
        time: "auto" also uses the order of the images, where neighbours share their class: see `tribe.filters`. A name
            from ``tribe.filters.names()``, or a filter. None: every image is predicted as if it stood alone.
        guard: True, or a `tribe.Guard`, skips frames that teach nothing, limits every step, and goes back. One of
            `tribe.Guard.fitted` also leans on the source where little has changed: see docs/health.md. It watches, too,
            as with ``health``.
        health: True watches every stream: `Adapter.health` and `Adapter.events`. What `tribe.calibrate` returns, or its
            file, adds the estimated accuracy.
        on_event: called with every alarm, a `tribe.health.Event`.
        classes: the number of classes; read from the last Linear layer if not given.
        streams: how many independent streams (cameras) adapt on this one network.
        seed: seed of the first stream; stream i has seed + i.
        history: True, or a `tribe.History`, takes snapshots now and then for `Adapter.rollback`. None: nothing is kept,
            but with a prepared file as many as fit.
        graphs: "auto" takes a step as one launch on a GPU where it can (see `tribe.core.graphs`: the first
            batch of a shape takes as long as eight); True insists on it, False takes one launch at a time.
        deterministic: the same bits every time on a GPU too, at some cost in speed; torch warns of an operation of the
            network for which it has no such algorithm.
        budget: the most that a batch may cost on average, as a multiple of plain inference on this machine: 1.5, or a
            `tribe.Budget`. The first batch measures it and sets how rarely the method learns, ``learn_every``.
        deadline_ms: the milliseconds that a call may take. A batch whose learning is not expected to end in time is
            only predicted, and counted in `info`.
        shadow: True, or a `tribe.Shadow`: the source answers, and the method learns beside it, until
            `Adapter.promote`; see docs/deploying.md.
        fields: the method's hyper-parameters.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
        >>> adapter = adapt(net, streams=2)
        >>> adapter(torch.rand(2, 16, 3, 8, 8)).shape
        torch.Size([2, 16, 4])
        >>> adapter.info[1].images
        16
    """
    if (prepared := Prepared.of(method)) is not None:
        check_alone(time=time, guard=guard, health=health, classes=classes, budget=budget, **fields)
        model = model if isinstance(model, Backbone) else Backbone(model)
        method = prepared.build(model)
        history = History.that_fits(method.init(model, streams)) if history is None else history
    assert not isinstance(method, Prepared | PathLike)
    net = backbone_for(model, method or "tribe", alone=time is None and not guard and not health)
    built = build_method(net, choose_method(method, net, budget), time, classes, fields, resolve_guard(guard, health))
    pace = Pace(Budget.of(budget), Deadline.of(deadline_ms))
    core = Streams(
        net,
        pace.prepare(net, built, fields),
        single=NAME,
        streams=streams,
        seed=seed,
        classes=classes,
        history=history,
        on_event=on_event,
        graphs=graphs,
        deterministic=deterministic,
        pace=pace,
        shadow=shadow,
        inputs=None if prepared is None else InputWatch(prepared.inputs),
    )
    return Adapter(core)


@torch.inference_mode(False)  # what is built here must be able to carry gradients
def load(
    path: str | PathLike[str],
    model: nn.Module | Backbone,
    *,
    history: History | bool | None = None,
    on_event: Listener | None = None,
    graphs: Switch = "auto",
    deterministic: bool = False,
    deadline_ms: float | Deadline | None = None,
    shadow: Shadow | None = None,
    prepared: Prepared | str | PathLike[str] | None = None,
    **fields: Any,
) -> "Adapter":
    """Resume from a file written by `Adapter.save`, on the model it was saved from.

    A field that a file cannot hold (a custom ``augment=``) must be given again. So must source knowledge,
    ``knowledge=``, and a calibration, ``calibration=``: nothing that a file names is opened. ``history``,
    ``on_event``, ``graphs``, ``deterministic`` and ``deadline_ms`` are as for `adapt`: a file holds none. What a budget
    set is in the file, and is not measured again. The file says which streams are in shadow; ``shadow`` says what
    demotes the others. ``prepared`` is the prepared file of an adapter that was made with one: it holds the
    calibration.
    """
    saved = states.read(path)
    if (known := Prepared.of(prepared)) is not None and known.calibration is not None:
        fields = {"calibration": known.calibration.knowledge(), **fields}
    method = method_from_file(path, saved.method, saved.fields, fields)
    net = backbone_for(model, method)
    states.check_fingerprint(path, saved.fingerprint, net)
    core = Streams(
        net,
        method,
        single=NAME,
        streams=saved.streams,
        history=history,
        on_event=on_event,
        graphs=graphs,
        deterministic=deterministic,
        pace=Pace(None, Deadline.of(deadline_ms)),
        shadow=shadow,
        inputs=None if known is None else InputWatch(known.inputs),
    )
    state = states.state_from(path, saved.tensors, core.entry(NAME).state, core.classes)
    core.replace_state(NAME, state, frozen=saved.frozen, shadow=saved.modes)
    return Adapter(core)


class AdaptedState(StateModule):
    """The state of an adapter as a child module: a view of the entry, made on demand."""

    def __init__(self, core: Streams) -> None:
        nn.Module.__init__(self)
        self._core = core

    @property
    def state(self) -> Any:
        """The state of the moment."""
        return self._core.entry(NAME).state

    @state.setter
    def state(self, state: Any) -> None:
        self._core.move_state(NAME, state)


class Adapter(nn.Module):
    """A classifier that adapts while it predicts. Made by `adapt`.

    Calling it predicts, then adapts. Images are (B, ...) for one stream or (S, B, ...) for S; logits come back in the
    same layout. One image (...), or one of each stream (S, ...), gives logits without the axis of the batch. Images are
    tensors, NumPy arrays, pictures of Pillow or lists of these: floating point in [0, 1], or uint8, which is divided by
    255. A bad image (not finite or far too large, see `tribe.core.validation`) gets equal logits (the uniform
    prediction) and changes nothing; `info` says where bad images were in the last batch and how many were skipped
    while learning. Several threads may use it: calls that learn run one after another, and `predict` does not wait.
    A Hugging Face pipeline reads ``device``, ``dtype`` and ``config``: ``pipe.model = tribe.adapt(pipe.model)``.
    """

    compile_told = False  # whether a warning said that torch.compile changes nothing

    def __init__(self, core: Streams) -> None:
        super().__init__()
        self.net, self.streams, self._core = core.net, core.streams, core
        self.adapted = AdaptedState(core)

    if TYPE_CHECKING:  # torch says nothing of what a module takes and returns

        @overload
        def __call__(self, x: Images, valid: Tensor | None = None, order: Tensor | None = None) -> Tensor: ...

        @overload
        def __call__(self, *, pixel_values: Tensor) -> LogitsOutput: ...

        def __call__(self, *args: Any, **named: Any) -> Any:
            """Call `forward`."""

    # -- predicting and learning ------------------------------------------------------------------------------------

    @uncompiled
    @torch.inference_mode(False)  # which forbids the gradients that adaptation needs, even under enable_grad
    @torch.no_grad()
    def forward(
        self,
        x: Images | None = None,
        valid: Tensor | None = None,
        order: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
    ) -> Tensor | LogitsOutput:
        """Predict, then adapt (unless frozen). `torch.compile` changes neither answers nor speed.

        Args:
            x: the images.
            valid: (B,) for one stream or (S, B) for S: True for real images and False for padding, which fills up a
                stream that has fewer images than the others. Padding gets equal logits, changes nothing and is not
                counted.
            order: of the same shape: the times of the images, larger numbers are later. None: they are in order.
                Logits come back in the order of ``x``. Padding needs no time: NaN will do.
            pixel_values: images as a Hugging Face pipeline gives them; they come back as an object with ``.logits``.
        """
        given = [images for images in (x, pixel_values) if images is not None]
        if len(given) != 1:
            raise TypeError("give images once: model(images), or model(pixel_values=images) for an output with .logits")
        arrived = Arrived.of(given[0], self.net, self.streams, valid, order)
        logits = self._core.step({NAME: arrived})[NAME]
        return logits if pixel_values is None else LogitsOutput(logits=logits)

    @torch.inference_mode(False)
    @torch.no_grad()
    def predict(
        self, x: Images, valid: Tensor | None = None, order: Tensor | None = None, *, shadow: bool | None = None
    ) -> Tensor:
        """Predict without adapting: the state stays as it is. ``valid`` and ``order`` are as for a call.

        ``shadow``: True asks the source, False what adapts; None answers as a call does.
        """
        return self._core.run_prediction({NAME: Arrived.of(x, self.net, self.streams, valid, order)}, shadow)[NAME]

    def learn(self, x: Images, valid: Tensor | None = None, order: Tensor | None = None) -> None:
        """Adapt to images and return nothing. A frozen adapter learns nothing; its time filter goes on."""
        self(x, valid, order)

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def method(self) -> AnyMethod:
        """The method, or the pipeline; a budget changes it at the first batch."""
        return self._core.method

    @property
    def device(self) -> torch.device:
        """Return the device of the network, which images must be on."""
        return self.net.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of the network's weights; images may have another."""
        return self.net.dtype

    @property
    def config(self) -> Any:
        """Return the configuration of a Hugging Face model, also inside a wrapper; None if the network has none."""
        return next((m.config for m in self.net.model.modules() if hasattr(m, "config")), None)

    @property
    def state(self) -> Any:
        """The method's state, a named tuple of tensors, valid until the next call; `snapshot` returns a copy."""
        return self._core.entry(NAME).state

    @property
    def classes(self) -> int:
        """The number of classes; 0: not known, of a network whose output may be something else than logits."""
        return self._core.classes

    @property
    def capture_disabled_reason(self) -> str | None:
        """Why steps are not captured in CUDA graphs; None if they are."""
        return self._core.capture_disabled_reason

    @property
    def info(self) -> list[StreamInfo]:
        """The images that each stream has learned from: a `StreamInfo` a stream."""
        return self._core.infos(NAME)

    @property
    def time(self) -> list[FilterInfo] | None:
        """The report of the time filter on each stream; None without one."""
        return self._core.filters(NAME)

    @property
    def health(self) -> list[Health] | None:
        """The health of each stream: a `tribe.health.Health` a stream; None without ``health`` or ``guard``."""
        return self._core.healths(NAME)

    @property
    def events(self) -> list[Event]:
        """The last alarms of all streams, the newest last; empty without ``health`` or ``guard``."""
        return self._core.events

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def freeze(self) -> Self:
        """Stop adapting: only predict. A time filter goes on."""
        self._core.freeze(NAME)
        return self

    def unfreeze(self) -> Self:
        """Adapt again."""
        self._core.unfreeze(NAME)
        return self

    def promote(self, stream: int | None = None) -> Self:
        """Let what adapts answer from the next call on, for all streams or one. Their states stay as they are."""
        self._core.set_shadow(NAME, False, self._index(stream))
        return self

    def demote(self, stream: int | None = None) -> Self:
        """Let the source answer from the next call on, for all streams or one; they go on learning in shadow."""
        self._core.set_shadow(NAME, True, self._index(stream))
        return self

    def reset(self, stream: int | None = None) -> Self:
        """Return all streams, or one, to the source model."""
        self._core.reset(NAME, self._index(stream))
        return self

    def snapshot(self) -> Snapshot:
        """Return a copy of the state for `restore`."""
        return self._core.snapshot(NAME)

    def restore(self, snapshot: Snapshot) -> Self:
        """Return to a snapshot of this adapter, or of another with an equal method and network; frozen if it was.

        Streams in shadow stay there, and others out of it.
        """
        self._core.restore(NAME, snapshot)
        return self

    @property
    def history(self) -> list[Kept] | None:
        """The snapshots that the adapter has taken of itself, the newest first; None without a history."""
        return self._core.history(NAME)

    def rollback(
        self, to: Past = None, *, seconds: float | None = None, images: int | None = None, stream: int | None = None
    ) -> RolledBack:
        """Return all streams, or one, to the newest snapshot that is at least so old: ``rollback(images=500)``.

        An age counts from now, so the same rollback twice goes back once. A snapshot may be given instead. Later
        snapshots are dropped; for one stream, they stay for the others. A frozen adapter stays frozen, and a stream in
        shadow there. An error changes nothing.
        """
        return self._core.rollback(NAME, to, seconds=seconds, images=images, stream=self._index(stream))

    def compare(
        self, to: Past = None, *, seconds: float | None = None, images: int | None = None, stream: int | None = None
    ) -> Comparison:
        """Return which layers and classes moved since a snapshot, and by how much; without one since the source."""
        return self._core.compare(NAME, to, seconds=seconds, images=images, stream=self._index(stream))

    def digest(self) -> str:
        """Return a hash of the state: equal digests, equal states."""
        return self._core.digest(NAME)

    def export(self, stream: int | None = None) -> nn.Module:
        """Return a plain module with ordinary normalisation layers that predicts for one stream as `predict` does.

        For methods that normalise each batch with its own statistics (bn, tent) its BatchNorm layers do the same.

        Raises:
            ValueError: the method predicts with more than a pass of a network (cotta, lame, petal, roid), or normalises
                as no ordinary layer does (note).
        """
        if stream is None and self.streams > 1:
            raise ValueError(f"export takes one of the {self.streams} streams: export(stream=0)")
        return self._core.export(NAME, self._index(stream) or 0)

    def _index(self, stream: int | None) -> int | None:
        if stream is None:
            return None
        number = stream.item() if isinstance(stream, Tensor) and stream.numel() == 1 else stream
        if not is_whole(number) or not -self.streams <= number < self.streams:
            raise IndexError(f"stream {stream!r}: this adapter has streams 0 to {self.streams - 1}")
        return int(number) % self.streams

    # -- files, state dicts, copies ---------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state, the method and a fingerprint of the source model to a safetensors file, atomically.

        A state that is not finite is refused, and an existing file stays as it is.
        """
        self._core.save(NAME, path)

    @torch.inference_mode(False)
    def state_dict(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the weights of the network and a copy of the adapted state, because later steps reuse its memory."""
        with self._core.lock:
            return super().state_dict(*args, **kwargs)

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module, but a state dict that does not fit or is not finite is refused before anything is copied.

        The adapted state is copied even with ``assign``, because later steps reuse its memory. If the weights differ
        from the network's, they go into a copy of the network, because other adapters may share it.
        """
        with self._core.lock:
            own = super().state_dict()
            shared = sorted(own.keys() & state_dict.keys())
            wrong = sorted(own.keys() ^ state_dict.keys()) if strict else []
            wrong += [k for k in shared if not isinstance(t := state_dict[k], Tensor) or t.shape != own[k].shape]
            if wrong:
                raise RuntimeError(
                    f"the state dict is not of this network, method and number of streams: {', '.join(wrong[:4])} "
                    "missing, unexpected, of another shape or no tensor. Nothing was loaded"
                )
            adapted, weights = (
                {k.removeprefix(p): state_dict[k] for k in shared if k.startswith(p)} for p in ("adapted.", "net.")
            )
            if names := states.not_finite(adapted):
                raise RuntimeError(
                    f"the state dict holds a state that is not finite ({', '.join(names[:4])}), which can predict "
                    "nothing. Nothing was loaded"
                )
            if any(not torch.equal(own[f"net.{k}"], t.to(own[f"net.{k}"])) for k, t in weights.items()):
                net = copy.deepcopy(self.net)
                net.load_state_dict(weights, strict, assign)
                check_source(net)
                self.method.init(net)  # refuses source knowledge of another network
                self.net = net
                self._core.use(net)
            self._core.replace_state(NAME, copy_like(rebuild(self.state, leaves(self.state) | adapted), self.state))
            return _IncompatibleKeys(sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys()))

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> "Adapter":
        with self._core.lock:
            return deepcopy_module(self, memo)

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with self._core.lock:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self._core.use(self.net)
            state, pipeline = self.state, Pipeline.of(self.method)
            if pipeline.guard is not None:
                state = state._replace(guard=pipeline.guard.recast(self.net, pipeline.method, state.guard))
            self._core.move_state(NAME, state)
            return self

    def extra_repr(self) -> str:
        """The method and the number of streams."""
        entry, deadline = self._core.entry(NAME), self._core.pace.deadline
        shadow = [i for i, hidden in enumerate(entry.shadow) if hidden]
        beside = ", in shadow" if all(entry.shadow) else f", in shadow={shadow}" if shadow else ""
        words = f"{self.method}, streams={self.streams}{', frozen' if entry.frozen else ''}{beside}"
        if deadline is not None:
            words += f", deadline_ms={deadline.ms:g}, images without time to learn={sum(entry.unlearned or ())}"
        return words
