"""The thin stateful shell: ``model = tribe.adapt(net); y = model(x)``.

Pure methods do the computation. The adapter holds the state, checks its input, and replaces the state in one place,
after a step has succeeded; an error leaves the state as it was. A lock lets one thread at a time use the state.
"""

import copy
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from tribe.core.backbone import Backbone
from tribe.core.calling import LogitsOutput, NetworkInterface, images_of
from tribe.core.graphs import Steps
from tribe.core.kernels import Switch
from tribe.core.model_copy import deepcopy_module
from tribe.core.state import StateModule, clone, digest, leaves, rebuild
from tribe.core.threads import Lock, locked
from tribe.core.validation import Checks, as_mask, as_order, as_streams, check_source, in_order, place_of
from tribe.fields import is_whole, require
from tribe.filters import FilterInfo, TimeFilter
from tribe.health.calibration import Calibration
from tribe.health.changes import Comparison, compare_states
from tribe.health.events import Event
from tribe.health.guard import Guard, resolve_guard
from tribe.health.history import History, Kept, RolledBack, as_history
from tribe.health.observer import Observer
from tribe.health.recorder import Recorder, put_stream
from tribe.health.snapshots import Snapshot, StreamInfo, check_snapshot, copy_like, describe_streams
from tribe.health.watch import Health
from tribe.io import states
from tribe.io.states import Saved
from tribe.methods import AnyMethod, Pipeline, predict_and_advance
from tribe.methods.building import backbone_for, build_method, check_network
from tribe.methods.encoding import method_for_file, method_from_file
from tribe.methods.exporting import plain_network


@torch.inference_mode(False)  # what is built here must be able to carry gradients
def adapt(
    model: nn.Module | Backbone,
    method: str | AnyMethod = "tribe",
    *,
    time: str | TimeFilter | None = None,
    guard: bool | Guard = False,
    health: bool | Calibration | str | PathLike[str] = False,
    on_event: Callable[[Event], object] | None = None,
    classes: int | None = None,
    streams: int = 1,
    seed: int = 0,
    history: History | bool | None = None,
    graphs: Switch = "auto",
    deterministic: bool = False,
    **fields: Any,
) -> "Adapter":
    """Make a trained classifier adapt while it predicts.

    Args:
        model: a classifier with normalisation layers; it is copied, never changed. It takes images in [0, 1] and
            normalises them itself (see `tribe.Normalize`). A `Backbone` is taken as it is.
        method: a name from ``tribe.methods.names()``, or a method.
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
        history: True, or a `tribe.History`, takes snapshots now and then for `Adapter.rollback`. None: nothing is kept.
        graphs: "auto" takes a step as one launch on a GPU where it can (see `tribe.core.graphs`: the first
            batch of a shape takes as long as eight); True insists on it, False takes one launch at a time.
        deterministic: the same bits every time on a GPU too, at some cost in speed; torch warns of an operation of the
            network for which it has no such algorithm.
        fields: the method's hyper-parameters.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    >>> adapter = adapt(net, streams=2)
    >>> adapter(torch.rand(2, 16, 3, 8, 8)).shape
    torch.Size([2, 16, 4])
    >>> adapter.info[1].images
    16
    """
    net = backbone_for(model, method, alone=time is None and not guard and not health)
    built = build_method(net, method, time, classes, fields, resolve_guard(guard, health))
    return Adapter(
        net,
        built,
        streams=streams,
        seed=seed,
        classes=classes,
        history=history,
        on_event=on_event,
        graphs=graphs,
        deterministic=deterministic,
    )


@torch.inference_mode(False)  # what is built here must be able to carry gradients
def load(
    path: str | PathLike[str],
    model: nn.Module | Backbone,
    *,
    history: History | bool | None = None,
    on_event: Callable[[Event], object] | None = None,
    graphs: Switch = "auto",
    deterministic: bool = False,
    **fields: Any,
) -> "Adapter":
    """Resume from a file written by `Adapter.save`, on the model it was saved from.

    A field that a file cannot hold (a custom ``augment=``) must be given again; source knowledge whose file has moved
    is given as ``knowledge=``, a calibration as ``calibration=``. ``history``, ``on_event``, ``graphs`` and
    ``deterministic`` are as for `adapt`: a file holds none.
    """
    saved = states.read(path)
    method = method_from_file(path, saved.method, saved.fields, fields)
    net = backbone_for(model, method)
    states.check_fingerprint(path, saved.fingerprint, net)
    options = {"history": history, "on_event": on_event, "graphs": graphs, "deterministic": deterministic}
    adapter = Adapter(net, method, streams=saved.streams, **options)  # type: ignore[arg-type]
    states.check_tensors(path, saved.tensors, leaves(adapter.state))
    adapter.adapted.load_state_dict(saved.tensors)
    adapter._observer.resume(method, adapter.state)
    if saved.frozen:
        adapter.freeze()
    return adapter


class Adapter(NetworkInterface):
    """A classifier that adapts while it predicts. Made by `adapt`.

    Calling it predicts, then adapts. Images are (B, ...) for one stream or (S, B, ...) for S; logits come back in the
    same layout. A bad image (not finite or far too large, see `tribe.core.validation`) gets equal logits (the uniform
    prediction) and changes nothing; `info` says where bad images were in the last batch and how many were skipped
    while learning. Calls from several threads run one after another.
    """

    def __init__(
        self,
        net: Backbone,
        method: AnyMethod,
        *,
        streams: int = 1,
        seed: int = 0,
        classes: int | None = None,
        history: History | bool | None = None,
        on_event: Callable[[Event], object] | None = None,
        graphs: Switch = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self._lock = Lock()
        require(is_whole(streams, least=1), "streams is how many independent streams adapt, at least 1", streams)
        if not is_whole(seed):
            raise TypeError(f"seed is an int; got {seed!r}")
        count, start = int(streams), int(seed)
        found = check_network(net, method, classes)
        self.net = net
        self.method = method
        self.streams = count
        self.classes = found or 0  # 0: not known, of a network whose output may be something else than logits
        self._frozen = False
        self._poisoned: Tensor | None = None  # (S, B), bad images of the last batch; None: there were none
        self._retired: Any = None  # the state before this one
        self._steps = Steps(method, net, graphs, deterministic)
        self._checks = Checks(net, found, method.output == "logits")
        self._place = place_of(net)  # device and precision of the state
        self.adapted = StateModule(method.init(net, count, start))
        self._recorder = Recorder(as_history(history), count)
        self._recorder.check_memory(self.state)
        self._observer = Observer(method, on_event)

    # -- predicting and learning ------------------------------------------------------------------------------------

    @locked
    def forward(
        self,
        x: Tensor | None = None,
        valid: Tensor | None = None,
        order: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
    ) -> Tensor | LogitsOutput:
        """Predict, then adapt (unless frozen).

        ``valid``, (B,) for one stream or (S, B) for S, is True for real images and False for padding, which fills up a
        stream that has fewer images than the others. Padding gets equal logits, changes nothing and is not counted.

        The order of the images in the batch is their order in time. ``order``, of the same shape as ``valid``, gives
        another: larger numbers are later. Answers come back in the order of ``x``. Padding needs no time: NaN will do.

        Images given as ``pixel_values``, as a Hugging Face pipeline does, come back as an object with ``.logits``.
        """
        logits = self._run(images_of(x, pixel_values), valid, learn=not self._frozen, order=order, follow=True)
        return logits if pixel_values is None else LogitsOutput(logits=logits)

    @locked
    def predict(self, x: Tensor, valid: Tensor | None = None, order: Tensor | None = None) -> Tensor:
        """Predict without adapting: the state stays as it is. ``valid`` and ``order`` are as for a call."""
        return self._run(x, valid, learn=False, order=order)

    def learn(self, x: Tensor, valid: Tensor | None = None, order: Tensor | None = None) -> None:
        """Adapt to images and return nothing. A frozen adapter learns nothing; its time filter goes on."""
        self(x, valid, order)

    def _run(
        self, x: Tensor, valid: Tensor | None, learn: bool, order: Tensor | None = None, follow: bool = False
    ) -> Tensor:
        # torch.inference_mode forbids the gradients that adaptation needs, even under enable_grad.
        with torch.inference_mode(False), torch.no_grad():
            images, squeeze = as_streams(x, self.net, self.streams)
            self._check_place()
            valid = None if valid is None else as_mask(valid, images, squeeze)
            ranks = None if order is None else as_order(order, images, squeeze, valid)
            if ranks is not None:
                images, valid = in_order(images, ranks), None if valid is None else in_order(valid, ranks)
            bad = self._checks.find_bad(images, valid)
            unused = bad if valid is None else ~valid if bad is None else bad | ~valid
            if images.shape[1] == 0:
                logits = images.new_zeros(self.streams, 0, self.classes)
            elif learn:
                old = self.state
                self._recorder.before_step(self.method, self.net, old)
                logits, state = self._steps(old, images, valid, self._retired)
                self._checks.check_logits(logits, unused)
                self._put(state)
                self._retired = old  # the next step may reuse its memory; a step that fails has changed no other
                self._recorder.after_step(images.shape[1], valid)
                self._observer.after_step(self.method, state)
            else:
                old = self.state
                logits, state = predict_and_advance(self.method, self.net, old, images, valid)
                self._checks.check_logits(logits, unused)
                if follow and state is not old:
                    self._put(state)
            if ranks is not None:
                back = ranks.argsort(1)
                logits = in_order(logits, back)
                bad, valid = (t if t is None else in_order(t, back) for t in (bad, valid))
            self._poisoned = bad if bad is None or valid is None else bad & valid
            return logits[0] if squeeze else logits

    def _put(self, state: Any) -> None:
        """Replace the state; nothing else does."""
        self._poisoned = self._retired = None  # first: the new state may lie in the memory of the retired one
        self.adapted.state = state

    def _replace(self, state: Any) -> None:
        """Replace the state by one that no step made: what it knows of alarms is not new."""
        self._put(state)
        self._observer.resume(self.method, state)

    # -- life cycle ---------------------------------------------------------------------------------------------------

    @property
    @locked
    def state(self) -> Any:
        """The method's state, a named tuple of tensors, valid until the next call; `snapshot` returns a copy."""
        return self.adapted.state

    @property
    def capture_disabled_reason(self) -> str | None:
        """Why steps are not captured in CUDA graphs; None if they are."""
        return self._steps.capture_disabled_reason

    @property
    @locked
    def info(self) -> list[StreamInfo]:
        """What each stream does: a `StreamInfo` a stream."""
        return describe_streams(self.state, self._poisoned, self._frozen)

    @property
    @locked
    def time(self) -> list[FilterInfo] | None:
        """What the time filter does for each stream; None without one."""
        return self.method.filter_info(self.state) if isinstance(self.method, Pipeline) else None

    @property
    @locked
    def health(self) -> list[Health] | None:
        """How each stream does: a `tribe.health.Health` a stream; None without ``health`` or ``guard``."""
        return self._observer.health(self.method, self.net, self.state)

    @property
    @locked
    def events(self) -> list[Event]:
        """The last alarms of all streams, the newest last; empty without ``health`` or ``guard``."""
        self._observer.look(self.method, self.state)
        return list(self._observer.log.events)

    @locked
    def freeze(self) -> "Adapter":
        """Stop adapting: only predict. A time filter goes on."""
        self._frozen = True
        return self

    @locked
    def unfreeze(self) -> "Adapter":
        """Adapt again."""
        self._frozen = False
        return self

    @locked
    @torch.inference_mode(False)
    def reset(self, stream: int | None = None) -> "Adapter":
        """Return all streams, or one, to the source model."""
        fresh = self.method.init(self.net, self.streams, int(self.state.key.seed[0]))
        if stream is not None:
            fresh = put_stream(fresh, self.state, self._stream(stream))
        self._replace(fresh)
        return self

    @locked
    @torch.inference_mode(False)
    def snapshot(self) -> Snapshot:
        """A copy of the state for `restore`."""
        return Snapshot(self.method, clone(self.state), self.net, self._frozen)

    @locked
    @torch.inference_mode(False)
    def restore(self, snapshot: Snapshot) -> "Adapter":
        """Return to a snapshot of this adapter, or of another with an equal method and network; frozen if it was."""
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"restore takes what snapshot() gave; got {type(snapshot).__name__}")
        check_snapshot(snapshot, self.method, self.net, self.streams)
        self._replace(copy_like(snapshot.state, self.state))
        self._frozen = snapshot.frozen
        return self

    @property
    @locked
    def history(self) -> list[Kept] | None:
        """The snapshots that the adapter has taken of itself, the newest first; None without a history."""
        return None if self._recorder.policy is None else self._recorder.kept()

    @locked
    @torch.inference_mode(False)
    def rollback(
        self,
        to: str | Snapshot | Kept | None = None,
        *,
        images: int | None = None,
        seconds: float | None = None,
        stream: int | None = None,
    ) -> RolledBack:
        """Return all streams, or one, to the newest snapshot that is at least so old: ``rollback("2h")``.

        An age is a text ("90 min", "500 images") or a number of images or seconds. It counts from now, so the same
        rollback twice goes back once. A snapshot may be given instead. Later snapshots are dropped; for one stream,
        they stay for the others. A frozen adapter stays frozen. An error changes nothing.
        """
        index = None if stream is None else self._stream(stream)
        snapshot, kept = self._recorder.look_up(to, index, images, seconds)
        check_snapshot(snapshot, self.method, self.net, self.streams)
        state, entries, report = self._recorder.go_back(snapshot, kept, self.state, index)
        self._replace(state)
        self._recorder.entries = entries
        return report

    @locked
    @torch.inference_mode(False)
    def compare(self, to: str | Snapshot | Kept | None = None, *, stream: int | None = None) -> Comparison:
        """Which layers and classes moved since a snapshot or an age such as "2h", and by how much; None: the source."""
        index = None if stream is None else self._stream(stream)
        if to is None:
            since, old = "the source", self.method.init(self.net, self.streams, int(self.state.key.seed[0]))
        else:
            snapshot, kept = self._recorder.look_up(to, index)
            check_snapshot(snapshot, self.method, self.net, self.streams)
            since, old = "a snapshot" if kept is None else kept.age, copy_like(snapshot.state, self.state)
        return compare_states(self.net, self.method, old, self.state, since, None if index is None else [index])

    @locked
    def digest(self) -> str:
        """A hash of the state: equal digests, equal states."""
        return digest(self.state)

    @locked
    def save(self, path: str | PathLike[str]) -> None:
        """Write the state, the method and a fingerprint of the source model to a safetensors file, atomically.

        A state that is not finite is refused, and an existing file stays as it is.
        """
        fields, fingerprint = method_for_file(self.method), self.net.fingerprint()
        states.write(path, Saved(self.method.name, fields, self.streams, self._frozen, fingerprint, leaves(self.state)))

    @locked
    @torch.inference_mode(False)
    def state_dict(self, /, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """As for any module, with a copy of the adapted state, because later steps reuse its memory."""
        named = super().state_dict(*args, prefix=prefix, **kwargs)
        named |= {name: t.clone() for name, t in named.items() if name.startswith(f"{prefix}adapted.")}
        return named

    @locked
    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module, but a state dict that does not fit or is not finite is refused before anything is copied.

        The adapted state is copied even with ``assign``, because later steps reuse its memory. If the weights differ
        from the network's, they go into a copy of the network, because other adapters may share it.
        """
        own = super().state_dict()
        wrong = sorted(own.keys() ^ state_dict.keys()) if strict else []
        shared = sorted(own.keys() & state_dict.keys())
        wrong += [k for k in shared if not isinstance(t := state_dict[k], Tensor) or t.shape != own[k].shape]
        if wrong:
            raise RuntimeError(
                f"the state dict is not of this network, method and number of streams: {', '.join(wrong[:4])} "
                "missing, unexpected, of another shape or no tensor. Nothing was loaded"
            )
        mine = "adapted."
        adapted = {k.removeprefix(mine): state_dict[k] for k in shared if k.startswith(mine)}
        if names := states.not_finite(adapted):
            raise RuntimeError(
                f"the state dict holds a state that is not finite ({', '.join(names[:4])}), which can predict nothing. "
                "Nothing was loaded"
            )
        theirs = "net."
        if any(not torch.equal(own[k], state_dict[k].to(own[k])) for k in shared if k.startswith(theirs)):
            weights = {k.removeprefix(theirs): t for k, t in state_dict.items() if k.startswith(theirs)}
            net = copy.deepcopy(self.net)
            net.load_state_dict(weights, strict, assign)
            check_source(net)
            self.method.init(net)  # refuses source knowledge of another network
            self.net, self._steps = net, Steps(self.method, net, self._steps.graphs, self._steps.deterministic)
            self._recorder.clear()
        self._replace(copy_like(rebuild(self.state, leaves(self.state) | adapted), self.state))
        return _IncompatibleKeys(sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys()))

    @locked
    @torch.inference_mode(False)
    def export(self, stream: int | None = None) -> nn.Module:
        """A plain module with ordinary normalisation layers that predicts for one stream as `predict` does.

        For methods that normalise each batch with its own statistics (bn, tent) its BatchNorm layers do the same.
        Methods that predict with more than a pass of a network (cotta, lame, petal, roid), or that normalise as no
        ordinary layer does (note), are refused.
        """
        if stream is None and self.streams > 1:
            raise ValueError(f"which of the {self.streams} streams? export(stream=0), say")
        return plain_network(self.net, self.method, self.state, self._stream(stream or 0))

    @locked
    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> "Adapter":
        return deepcopy_module(self, memo)

    @locked
    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Adapter":
        self._retired = None  # its device or precision is about to change
        self._steps.forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place = place_of(self.net)
        self._put(self.method.recast(self.net, self.state))
        return self

    def extra_repr(self) -> str:
        """The method and the number of streams."""
        return f"{self.method}, streams={self.streams}{', frozen' if self._frozen else ''}"

    # -- checks -------------------------------------------------------------------------------------------------------

    def _stream(self, index: int) -> int:
        number = index.item() if isinstance(index, Tensor) and index.numel() == 1 else index
        if not is_whole(number) or not -self.streams <= number < self.streams:
            raise IndexError(f"stream {index!r}: this adapter has streams 0 to {self.streams - 1}")
        return int(number) % self.streams

    def _check_place(self) -> None:
        """Refuse to run on a network that was moved or cast without this adapter's state."""
        if (place := place_of(self.net)) != self._place:
            of_network, of_state = (f"on {device} in {dtype}" for device, dtype in (place, self._place))
            raise RuntimeError(
                f"the network is {of_network}, the state of this adapter {of_state}: the network, or another adapter "
                "that shares it, was moved or cast. Call .to() on this one, too"
            )
