"""Many streams by name on one frozen network: ``fleet = tribe.fleet(net); logits = fleet({"cam1": images})``.

Pure methods do the computation. The fleet holds a state for each stream, checks its input, and replaces the states of a
step all at once, after the step has succeeded. One thread at a time takes steps; others predict meanwhile, with the
states from before the step.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.kernels import Switch
from tribe.core.state import clone, digest
from tribe.core.threads import Lock, locked
from tribe.core.validation import Checks, place_of
from tribe.fields import is_whole, require
from tribe.filters import TimeFilter
from tribe.health.calibration import Calibration
from tribe.health.events import Event
from tribe.health.guard import Guard, resolve_guard
from tribe.health.recorder import count_bytes
from tribe.health.snapshots import Snapshot, StreamInfo, check_snapshot, copy_like
from tribe.health.watch import Health
from tribe.io import states
from tribe.io.states import Saved
from tribe.methods import AnyMethod, Deployed
from tribe.methods.building import build_method, check_network
from tribe.methods.exporting import plain_network
from tribe.methods.source import Source
from tribe.registry import nearest
from tribe.streams.batching import (
    Arrived,
    Group,
    answers,
    check_images,
    check_name,
    count_padding,
    group_streams,
    marked_bad,
)
from tribe.streams.files import StateFiles, decode_bytes
from tribe.streams.pool import Entry, Pool, check_place, describe_entries
from tribe.streams.running import OWN_WEIGHTS, Runner, predict
from tribe.streams.watching import Listener, Seen, Watching

ROWS_BYTES = 2**31  # the states that stay on the device, if `rows` does not say how many
LEAST_ROWS = 16
SOURCE = Source()


@torch.inference_mode(False)  # what is built here must be able to carry gradients
def fleet(
    model: nn.Module | Backbone,
    method: str | AnyMethod = "tribe",
    *,
    time: str | TimeFilter | None = None,
    guard: bool | Guard = False,
    health: bool | Calibration | str | PathLike[str] = False,
    on_event: Listener | None = None,
    classes: int | None = None,
    rows: int | None = None,
    seed: int = 0,
    graphs: Switch = "auto",
    deterministic: bool = False,
    exact: bool = False,
    **fields: Any,
) -> "Fleet":
    """Make a trained classifier adapt to many streams (cameras), each known by a name.

    Args:
        model: as for `tribe.adapt`.
        method: as for `tribe.adapt`.
        time: as for `tribe.adapt`.
        guard: as for `tribe.adapt`.
        health: as for `tribe.adapt`: `Fleet.health` and `Fleet.events`.
        on_event: as for `tribe.adapt`; `Event.stream` is the name of the stream.
        classes: as for `tribe.adapt`.
        rows: the most states on the network's device; the least recently used others move to host memory. None: as
            many as fit in 2 GiB.
        seed: the seed of a stream is a hash of this number and of the stream's name; see `stream_seed`.
        graphs: as for `tribe.adapt`.
        deterministic: as for `tribe.adapt`.
        exact: step streams one by one, so that each gets the bits that it gets alone; slower. False: streams go through
            the network together, and agree with single ones to rounding.
        fields: the method's hyper-parameters.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    >>> cameras = fleet(net)
    >>> logits = cameras({"door": torch.rand(2, 3, 8, 8), "gate": torch.rand(5, 3, 8, 8)})
    >>> logits["gate"].shape, cameras.info("door").images
    (torch.Size([5, 4]), 2)
    """
    net = model if isinstance(model, Backbone) else Backbone(model)
    built = build_method(net, method, time, classes, fields, resolve_guard(guard, health))
    return Fleet(
        net,
        built,
        on_event=on_event,
        classes=classes,
        rows=rows,
        seed=seed,
        graphs=graphs,
        deterministic=deterministic,
        exact=exact,
    )


def stream_seed(name: str, seed: int = 0) -> int:
    """The seed of a stream: a hash (BLAKE2b) of the fleet's seed and the stream's name, from 0 to 2**62 - 1.

    So it depends neither on the order in which streams are added nor on the process.

    >>> stream_seed("cam1") == stream_seed("cam1"), stream_seed("cam1") == stream_seed("cam2")
    (True, False)
    """
    text = f"{int(seed)}\n{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


class Fleet:
    """Streams by name that adapt on one frozen network. Made by `fleet`.

    Calling it predicts, then adapts, the streams that have images; a name that it does not know is a new stream. Images
    are (B, ...) for each stream, and B may differ. Bad images are treated as by `tribe.Adapter`. A step that fails
    leaves every stream as it was. It may be used from several threads: one at a time takes a step, the others wait;
    `predict` does not wait for a step.
    """

    def __init__(
        self,
        net: Backbone,
        method: AnyMethod,
        *,
        on_event: Listener | None = None,
        classes: int | None = None,
        rows: int | None = None,
        seed: int = 0,
        graphs: Switch = "auto",
        deterministic: bool = False,
        exact: bool = False,
    ) -> None:
        self._lock = Lock()  # of what replaces states
        require(rows is None or is_whole(rows, least=1), "rows is the most states on the device, at least 1", rows)
        if not is_whole(seed):
            raise TypeError(f"seed is an int; got {seed!r}")
        require(isinstance(exact, bool), "exact is True or False", exact)
        if net.dense:
            raise ValueError("a fleet returns logits, and this network may return something else: dense=True")
        self.net, self.method, self.seed = net, method, int(seed)
        self.classes = check_network(net, method, classes) or 0
        self._runner = Runner(method, net, graphs, deterministic, exact)
        self._checks = Checks(net, self.classes, method.output == "logits")
        self._place = place_of(net)
        self._like = method.init(net)  # a state of one stream
        if method.deployed(net, self._like).weights is not None:
            self._runner.alone = OWN_WEIGHTS
        self._size = count_bytes(self._like)
        most = int(rows) if rows is not None else max(LEAST_ROWS, ROWS_BYTES // max(self._size, 1))
        self._files = StateFiles(method, net, self._like)
        self._pool = Pool(net.device, most)
        self._source: Deployed | None = None
        self._watching = Watching(method, net, on_event)

    # -- predicting and learning ------------------------------------------------------------------------------------

    def __call__(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Predict, then adapt, the streams that have images; frozen ones only predict. Unknown streams are added."""
        # torch.inference_mode forbids the gradients that adaptation needs, even under enable_grad.
        with torch.inference_mode(False), torch.no_grad():
            arrived = check_images(images, self.net)
            with self._lock:
                check_place(self.net, self._place)
                return self._step(arrived)

    def learn(self, images: Mapping[str, Tensor]) -> None:
        """Adapt to images and return nothing. A frozen stream learns nothing."""
        self(images)

    def predict(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Predict without adapting, with the last states: a step that another thread takes is not waited for."""
        with torch.inference_mode(False), torch.no_grad():
            arrived = check_images(images, self.net)
            check_place(self.net, self._place)
            entries = {name: self._fetch(name) for name in arrived}
            results: dict[str, Tensor] = {}
            marked: dict[str, Tensor | None] = {}
            for _, group in self._groups(arrived, dict.fromkeys(arrived)):
                chosen = [entries[name] for name in group.names]
                networks = [self._deployed(name, entries[name]) for name in group.names]
                bad = self._checks.find_bad(group.x, group.valid)
                if group.x.shape[1]:
                    logits = self._runner.predict(group, [entry.state for entry in chosen], networks)
                    self._checks.check_logits(logits, count_padding(bad, group))
                else:
                    logits = group.x.new_zeros(len(group.x), 0, self.classes)
                results |= answers(group, logits, arrived)
                marked |= marked_bad(group, bad)
            for name, own in marked.items():
                self._pool.change(name, bad=own)
            return {name: results[name] for name in arrived}

    def predict_source(self, x: Tensor) -> Tensor:
        """Predict images (B, ...) with the source model."""
        with torch.inference_mode(False), torch.no_grad():
            arrived = check_images({"source": x}, self.net)["source"]
            if self._source is None:
                self._source = Deployed.frozen(self.net, self.net.source()[0])
            self._checks.find_bad(arrived.x, None)
            if not arrived.x.shape[1]:
                logits = arrived.x.new_zeros(1, 0, self.classes)
            else:
                logits = predict(SOURCE, self.net, [], self._source, arrived.x, None)
            return logits[0] if arrived.added else logits

    def _step(self, arrived: Mapping[str, Arrived]) -> dict[str, Tensor]:
        known = {name: self._pool.get(name) for name in arrived}
        fresh = {name: self._new(name) for name, entry in known.items() if entry is None}
        kinds = {name: entry is not None and entry.frozen for name, entry in known.items()}
        results: dict[str, Tensor] = {}
        after: dict[str, Any] = {}
        marked: dict[str, Tensor | None] = {}
        for frozen, group in self._groups(arrived, kinds):
            old = [(fresh.get(name) or self._fetch(name)).state for name in group.names]
            bad = self._checks.find_bad(group.x, group.valid)
            new: list[Any] | None = None
            if not group.x.shape[1]:
                logits = group.x.new_zeros(len(group.x), 0, self.classes)
            elif frozen:
                logits, new = self._runner.follow(group, old)
            else:
                logits, new = self._runner.step(group, old)
            if group.x.shape[1]:
                self._checks.check_logits(logits, count_padding(bad, group))
            results |= answers(group, logits, arrived)
            marked |= marked_bad(group, bad)
            after |= dict(zip(group.names, new, strict=True)) if new is not None else {}
        began, seen = self._watching.after_step({name: fresh.get(name) or self._entry(name) for name in after}, after)
        self._commit(fresh, after, marked, seen)
        self._watching.log.add(*began)
        self._pool.page_out()
        return {name: results[name] for name in arrived}

    def _commit(
        self, fresh: Mapping[str, Entry], after: Mapping[str, Any], marked: Mapping[str, Any], seen: Seen
    ) -> None:
        """Replace the states of a step, all at once; nothing else of a step changes anything."""
        with self._pool.lock:
            entries = {}
            for name, bad in marked.items():
                entry = fresh.get(name) or self._pool.entries[name]  # it may have been frozen meanwhile
                if name in after:
                    entry = replace(entry.moved(after[name]), seen=seen.get(name, entry.seen))
                entries[name] = replace(entry, bad=bad)
            self._pool.put_entries(entries)

    def _groups(self, arrived: Mapping[str, Arrived], kinds: Mapping[str, Any]) -> Iterable[tuple[Any, Group]]:
        runner = self._runner
        return group_streams(arrived, kinds, self._size, runner.padded, together=runner.alone is None)

    def _deployed(self, name: str, entry: Entry) -> Deployed:
        """The network that a stream predicts with, made once for each state."""
        if entry.deployed is not None:
            return entry.deployed
        deployed = self.method.deployed(self.net, entry.state)
        self._pool.remember(name, entry, deployed)
        return deployed

    # -- streams ------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def add(self, name: str, seed: int | None = None) -> "Fleet":
        """Add a stream that starts at the source model. Its seed is `stream_seed` of its name, unless one is given."""
        check_name(name)
        if seed is not None and not is_whole(seed):
            raise TypeError(f"seed is an int; got {seed!r}")
        entry = self._new(name, seed)
        with self._lock:
            if name in self:
                raise ValueError(f"the fleet has a stream {name!r} already: reset({name!r}) starts it anew")
            self._pool.put({name: entry})
        return self

    @locked
    def drop(self, name: str) -> "Fleet":
        """Forget a stream."""
        self._entry(name)
        self._pool.drop(name)
        return self

    @property
    def names(self) -> list[str]:
        """The names of all streams, sorted."""
        with self._pool.lock:
            return sorted(self._pool.entries)

    def __len__(self) -> int:
        return len(self._pool.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._pool.entries

    def info(self, name: str) -> StreamInfo:
        """What a stream does, in plain numbers."""
        return self._entry(name).describe()

    def info_many(self, names: Iterable[str]) -> dict[str, StreamInfo]:
        """As `info`, of several streams, read together."""
        return describe_entries({name: self._entry(name) for name in names})

    def health(self, name: str) -> Health | None:
        """How a stream does; None without ``health`` or ``guard``."""
        return self._watching.health(self._entry(name).state)

    def health_many(self, names: Iterable[str]) -> dict[str, Health | None]:
        """As `health`, of several streams, read together; without `Health.statistics` and `Health.followed`."""
        chosen = list(names)
        return dict(zip(chosen, self._watching.health_many([self._fetch(name).state for name in chosen]), strict=True))

    @property
    @locked
    def events(self) -> list[Event]:
        """The last alarms of all streams, the newest last; empty without ``health`` or ``guard``."""
        self.look(self.names)
        return list(self._watching.log.events)

    @locked
    def look(self, names: Iterable[str]) -> None:
        """Read the alarms of streams now. On a CPU every step does; on a GPU, which it waits for, every 50th."""
        if not self._watching.guarded or self.net.device.type == "cpu":
            return
        entries = {name: self._entry(name) for name in names}
        began, seen = self._watching.look({name: (entry.state, entry.seen) for name, entry in entries.items()})
        for name, counts in seen.items():
            self._pool.change(name, seen=counts)
        self._watching.log.add(*began)

    @property
    def listeners(self) -> list[Listener]:
        """What is called with every alarm, in the thread that took the step: add to it, and remove."""
        return self._watching.listeners

    def clock(self, name: str) -> int:
        """How many steps a stream has taken."""
        return self._entry(name).describe().steps

    def version(self, name: str) -> int:
        """How often the state of a stream was replaced, since it was added here."""
        return self._entry(name).version

    def freeze(self, name: str) -> "Fleet":
        """Stop adapting a stream: only predict. A time filter goes on."""
        self._set_frozen(name, True)
        return self

    def unfreeze(self, name: str) -> "Fleet":
        """Adapt a stream again."""
        self._set_frozen(name, False)
        return self

    @locked
    @torch.inference_mode(False)
    def reset(self, name: str) -> "Fleet":
        """Return a stream to the source model."""
        return self._replace(name, self.method.init(self.net, 1, self._entry(name).find_seed()))

    @torch.inference_mode(False)
    def snapshot(self, name: str) -> Snapshot:
        """A copy of a stream's state for `restore`."""
        entry = self._entry(name)
        return Snapshot(self.method, clone(entry.state), self.net, entry.frozen)

    @locked
    @torch.inference_mode(False)
    def restore(self, name: str, snapshot: Snapshot) -> "Fleet":
        """Return a stream to a snapshot of a single stream, or add one with it; frozen if it was."""
        check_name(name)
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"restore takes what snapshot() gave; got {type(snapshot).__name__}")
        check_snapshot(snapshot, self.method, self.net, 1)
        return self._replace(name, copy_like(snapshot.state, self._like), snapshot.frozen)

    @torch.inference_mode(False)
    def state(self, name: str) -> Any:
        """A copy of a stream's state, a named tuple of tensors."""
        return clone(self._entry(name).state)

    @locked
    @torch.inference_mode(False)
    def put(self, name: str, state: Any) -> "Fleet":
        """Replace the state of a stream by a copy of this one, or add a stream with it."""
        check_name(name)
        self._files.check(state)
        return self._replace(name, copy_like(state, self._like))

    def digest(self, name: str) -> str:
        """A hash of a stream's state: equal digests, equal states."""
        return digest(self._entry(name).state)

    @torch.inference_mode(False)
    def export(self, name: str) -> nn.Module:
        """A plain module that predicts for a stream as `predict` does, where there is one: see `Adapter.export`."""
        return plain_network(self.net, self.method, copy_like(self._entry(name).state, self._like), 0)

    @property
    def unbatched_reason(self) -> str | None:
        """Why streams go through the network one by one; None: they go together."""
        return self._runner.alone

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, name: str, path: str | PathLike[str]) -> None:
        """Write a stream to a state file, which `tribe.load` opens too, atomically."""
        states.write(path, self._files.saved(self._entry(name)))

    @torch.inference_mode(False)
    def load(self, name: str, path: str | PathLike[str]) -> "Fleet":
        """Replace a stream, or add one, by what a state file of a single stream holds."""
        check_name(name)
        return self._take(name, path, states.read(path))

    def to_bytes(self, name: str) -> bytes:
        """The bytes of a stream's state file."""
        return states.encode(self._files.saved(self._entry(name)), f"the bytes of stream {name!r}")

    @torch.inference_mode(False)
    def from_bytes(self, name: str, data: bytes) -> "Fleet":
        """Replace a stream, or add one, by what the bytes of a state file hold."""
        check_name(name)
        return self._take(name, *decode_bytes(name, data))

    @torch.inference_mode(False)
    def check_bytes(self, name: str, data: bytes) -> None:
        """Refuse what `from_bytes` refuses; change nothing."""
        check_name(name)
        self._files.state(*decode_bytes(name, data))

    def _take(self, name: str, source: str | PathLike[str], saved: Saved) -> "Fleet":
        state = self._files.state(source, saved)
        with self._lock:
            return self._replace(name, state, saved.frozen)

    # -- entries ------------------------------------------------------------------------------------------------------

    def _new(self, name: str, seed: int | None = None) -> Entry:
        number = stream_seed(name, self.seed) if seed is None else int(seed)
        state = self.method.init(self.net, 1, number)
        return Entry(state, seen=self._watching.seen(state))

    def _replace(self, name: str, state: Any, frozen: bool | None = None) -> "Fleet":
        entry = self._pool.get(name)
        moved = Entry(state) if entry is None else replace(entry.moved(state), bad=None)
        moved = replace(moved, seen=self._watching.seen(state))  # what it has reported is not reported again
        self._pool.put({name: moved if frozen is None else replace(moved, frozen=frozen)})
        return self

    def _set_frozen(self, name: str, frozen: bool) -> None:
        self._entry(name)
        self._pool.change(name, frozen=frozen)

    def _entry(self, name: str) -> Entry:
        return self._found(name, self._pool.get)

    def _fetch(self, name: str) -> Entry:
        return self._found(name, self._pool.fetch)

    def _found(self, name: str, look_up: Callable[[str], Entry | None]) -> Entry:
        check_name(name)
        if (entry := look_up(name)) is None:
            known = nearest(name, self.names) if len(self) else "it has none"
            raise UnknownStream(f"the fleet has no stream {name!r}: {known}. add({name!r}) adds it")
        return entry

    def __repr__(self) -> str:
        return f"Fleet({self.method}, streams={len(self)})"


class UnknownStream(LookupError):
    """A stream that a fleet does not have."""
