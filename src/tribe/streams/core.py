"""Named states on one frozen network: the core of adapters, fleets and the server.

Pure methods do the computation. `Streams` holds an immutable entry for each name, checks what goes in, and replaces the
entries of a step in one assignment, after the step has succeeded.

Threads: one at a time changes states, and holds `Streams.lock`. Whatever only reads takes the entry of the moment and
never waits for a step. A step of an adapter writes the next state into the memory of an earlier one. It first waits
until the predictions that read an earlier state have ended; those that begin meanwhile read the state of the moment.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.kernels import Switch
from tribe.core.state import clone, copy_like, count_bytes, digest, leaves, replace_stream
from tribe.core.validation import Checks
from tribe.fields import is_whole, require
from tribe.filters import FilterInfo
from tribe.health.history import History, Snapshot, Timeline, check_snapshot
from tribe.health.prepared import InputWatch
from tribe.health.report import AlarmLog, Event, Health, Listener, StreamInfo, describe_streams
from tribe.io import states
from tribe.io.states import Saved, StateFileError
from tribe.methods import AnyMethod, Deployed, Pipeline
from tribe.methods.building import check_network
from tribe.methods.encoding import check_settings, method_for_file, require_savable
from tribe.methods.pipeline import plain_network
from tribe.registry import nearest
from tribe.streams.batching import Arrived, EntryGroup, Runner, gather_deployed, group_entries
from tribe.streams.budget import Began, Pace
from tribe.streams.entries import Entry, EntryTable, Lock
from tribe.streams.histories import Histories
from tribe.streams.names import UnknownStream, check_name, stream_seed
from tribe.streams.shadow import DEMOTED, Shadow, answer_from_source, count_differences, mode_of, shares_that_differ

DEVICE_BYTES = 2**31  # of the states that stay on the device, if `rows` does not say how many
MIN_ROWS = 16
EXACT = "exact=True: each stream gets the bits that it gets alone"
OWN_WEIGHTS = "each stream has weights of its own, which cannot be batched"


class Streams(Histories):
    """Named states that adapt on one frozen network.

    Each entry has so many ``streams``. ``single`` is the name of an only entry, whose steps may write the next state
    into the memory of an earlier one; else entries are added by their names. Other arguments are as for `tribe.fleet`.
    """

    def __init__(
        self,
        net: Backbone,
        method: AnyMethod,
        *,
        single: str | None = None,
        streams: int = 1,
        seed: int = 0,
        classes: int | None = None,
        rows: int | None = None,
        history: History | bool | None = None,
        on_event: Listener | None = None,
        graphs: Switch = "auto",
        deterministic: bool = False,
        exact: bool = False,
        pace: Pace | None = None,
        shadow: Shadow | bool | None = None,
        inputs: InputWatch | None = None,
    ) -> None:
        require(is_whole(streams, least=1), "streams is how many independent streams adapt, at least 1", streams)
        require(rows is None or is_whole(rows, least=1), "rows is the most states on the device, at least 1", rows)
        require(isinstance(exact, bool), "exact is True or False", exact)
        check_seed(seed)
        if single is None:
            require_savable(method)  # its entries move to the host, into files and together through the network
        found = check_network(net, method, classes)
        self.net, self.method = net, method
        self.classes = found or 0  # 0: not known, of a network whose output may be something else than logits
        self.streams, self.seed = int(streams), int(seed)
        first = method.init(net, self.streams, self.seed)
        self._size = count_bytes(first)
        self._single, self._retired = single, None  # the state before the current one of a single entry
        self.unbatched_reason: str | None = None  # why entries go through the network one by one
        if single is None:
            own_weights = method.deployed(net, first).weights is not None
            self.unbatched_reason = OWN_WEIGHTS if own_weights else EXACT if exact else None
        # Each shape of a group may cost a recording on a GPU, so groups are padded to a few shapes.
        padded = single is None and not exact and net.device.type != "cpu"
        self._runner = Runner(method, net, self.classes, graphs, deterministic, padded, copies=single is None)
        self._inputs = inputs
        self.checks = Checks(net, found, getattr(Pipeline.of(method).guard, "skip", False))
        self._place = net.place  # device and precision of the states
        self._fingerprint: str | None = None  # of the network, computed for the first file
        self.table = EntryTable(net.device, rows or max(MIN_ROWS, DEVICE_BYTES // max(self._size, 1)))
        self.lock, self.pace = Lock(), pace or Pace(None, None)
        self.alarms, self.shadow = AlarmLog(method, on_event), Shadow.of(shadow)
        self.shadow.check(method)
        self._policy = History.resolve(history)
        if self._policy is not None:
            self._policy.check_memory(first)
        self._like = first if single is None else None  # for states from elsewhere: with its device and precision
        if single is not None:
            self.table.put({single: self._with_state(None, first)})

    # -- predicting and learning ------------------------------------------------------------------------------------

    def step(self, arrived: Mapping[str, Arrived]) -> dict[str, Tensor]:
        """Predict, then adapt the entries that have images; frozen ones only predict. Unknown names are added.

        Nothing is changed by an error, and nothing raises once the states are replaced.
        """
        with self.lock:
            self._check_place()
            old = {name: self.table.entries.get(name) or self.new_entry(name) for name in arrived}
            results: dict[str, Tensor] = {}
            new: dict[str, Entry] = {}
            events: list[Event] = []
            hurries = (began := self._begin(arrived, old)) is not None and began.hurries
            frozen = {name: entry.frozen or hurries for name, entry in old.items()}
            for group in group_entries(arrived, frozen, self._size, self._runner.padded, self.unbatched_reason is None):
                bad = self.checks.find_bad(group.x, group.valid)
                if self._inputs is not None:
                    self._inputs(group.x, group.unused(bad))
                before = [self.table.on_device(old[name]) for name in group.names]
                if self._single is not None and not group.frozen and self.table.lock.states:
                    self.table.lock.wait_for_older(before[0].state)
                logits, after = self._runner.step(group, [entry.state for entry in before], self._retired)
                self.checks.check_logits(logits, group.unused(bad))
                answers = answer_from_source(self._runner, group, logits, [entry.shadow for entry in before], began)
                before = count_differences(before, answers.counts)
                results |= group.split(answers.logits, arrived)
                marked = group.split_bad(bad, arrived)
                for i, name in enumerate(group.names):
                    if after is None:
                        new[name] = replace(old[name], bad=marked.get(name), differ=before[i].differ)
                        continue
                    new[name] = before[i].moved(after[i], bad=marked.get(name))
                    if not group.frozen and (self.alarms.watched or before[i].history is not None):
                        new[name] = self._observed(name, before[i], new[name], arrived[name], events)
            if began is not None:  # of the only entry
                new = {name: began.end(entry, *arrived[name][:3:2], answers.seconds) for name, entry in new.items()}
            retired, self._retired = self._retired, None  # the new state may lie in its memory
            self.table.put(new, keeps_modes=True)
            if self._single is not None:
                then = old[self._single].state
                self._retired = retired if new[self._single].state is then else then
            self._publish(events)
            return {name: own.as_given(results[name]) for name, own in arrived.items()}

    def _begin(self, arrived: Mapping[str, Arrived], old: Mapping[str, Entry]) -> Began | None:
        """Resolve the budget at the first batch; where there is a deadline, decide whether there is time to learn."""
        for name, own in arrived.items():
            if not old[name].frozen and own.x.shape[1]:
                given = self.table.on_device(old[name]).state, own.x, own.valid
                self._resolved(self.pace.resolve(self.net, self.method, *given))
                return self.pace.begin(self.net, self.method, *given)
        return None

    def _resolved(self, method: AnyMethod) -> None:
        """Go on with a method that learns as rarely as the budget says."""
        if method is not self.method:
            self.pace.budget, self.pace.unresolved, self.method = None, self.method, method
            self._runner.use(self.net, method)

    def _observed(self, name: str, before: Entry, after: Entry, arrived: Arrived, events: list[Event]) -> Entry:
        """The entry after a step, with its history and what its alarms say."""
        history, counts = before.history, before.alarms
        if history is not None:
            history = history.before_step(self.method, self.net, before.state)
            history = history.after_step(arrived.x.shape[1], arrived.valid)
        if self.alarms.is_due(after.state, after.version):
            began, counts = self.alarms.read(after.state, counts, None if self._single else name)
            events += began + self._demotions(name, after, before)
        return replace(after, history=history, alarms=counts)

    def _demotions(self, name: str, entry: Entry, before: Entry) -> list[Event]:
        found = self.shadow.find_demotions(self.method, self.net, entry, before)
        return found if self._single else [event._replace(stream=name) for event in found]

    def _publish(self, events: list[Event]) -> None:
        """Demote the streams whose events say so, then keep, log and send all events."""
        for event in events:
            if event.kind == DEMOTED:
                name, stream = (self._single, event.stream) if self._single else (event.stream, 0)
                self.set_shadow(str(name), True, int(stream))
        self.alarms.publish(events)

    def run_prediction(
        self, arrived: Mapping[str, Arrived], shadow: bool | Mapping[str, bool] | None = None
    ) -> dict[str, Tensor]:
        """Predict without adapting, with the states of the moment: a step in another thread is not waited for.

        ``shadow``: whether the source answers, for all entries or by name; None: for streams in shadow.
        """
        self._check_place()
        results: dict[str, Tensor] = {}
        marked: dict[str, Tensor] = {}
        with self.reading(*arrived) as known:
            entries = {name: self.table.use(name, entry) for name, entry in known.items()}
            modes = {name: mode_of(name, entry, shadow) for name, entry in entries.items()}
            apart = {name: all(mode) for name, mode in modes.items()}
            for group in group_entries(arrived, apart, self._size, self._runner.padded, self.unbatched_reason is None):
                bad = self.checks.find_bad(group.x, group.valid)
                if apart[group.names[0]]:
                    logits = self._runner.predict_source(group.x, group.valid)
                else:
                    own = [entries[name].state for name in group.names]
                    logits = self._runner.predict(group, own, partial(self._deployed, group, entries))
                    logits = answer_from_source(self._runner, group, logits, [modes[n] for n in group.names]).logits
                self.checks.check_logits(logits, group.unused(bad))
                results |= group.split(logits, arrived)
                marked |= group.split_bad(bad, arrived)
        for name in arrived:
            self.table.change(name, bad=marked.get(name))
        return {name: own.as_given(results[name]) for name, own in arrived.items()}

    def _deployed(self, group: EntryGroup, entries: Mapping[str, Entry]) -> Deployed:
        """The network that a group predicts with; that of an entry is made once for each state."""
        networks = []
        for name in group.names:
            network = entries[name].deployed
            if network is None:
                network = self.method.deployed(self.net, entries[name].state)
                self.table.swap(name, entries[name], replace(entries[name], deployed=network))
            networks.append(network)
        return gather_deployed([*networks, *[networks[0]] * (group.entries - len(networks))])

    def reading(self, *names: str) -> AbstractContextManager[dict[str, Entry]]:
        """Return a context with the entries of these names; no step writes into their memory in it."""
        return self.table.reading(lambda: {name: self.entry(name) for name in names})

    @property
    def capture_disabled_reason(self) -> str | None:
        """Why steps are not captured in CUDA graphs; None if they are."""
        return self._runner.unpadded.capture_disabled_reason

    # -- entries ------------------------------------------------------------------------------------------------------

    def entry(self, name: str) -> Entry:
        """Return the entry of a name."""
        check_name(name)
        if (entry := self.table.entries.get(name)) is None:
            known = nearest(name, sorted(self.table.entries)) if self.table.entries else "there is none"
            raise UnknownStream(f"no stream {name!r}", f": {known}. add({name!r}) adds it")
        return entry

    def new_entry(self, name: str, seed: int | None = None) -> Entry:
        """Return an entry that starts at the source model, with the seed of its name unless one is given."""
        seed = stream_seed(name, self.seed) if seed is None else int(seed)
        return self._with_state(None, self.method.init(self.net, self.streams, seed))

    def move_state(self, name: str, state: Any) -> None:
        """Replace a state by the same one on another device or in another precision."""
        with self.lock:
            self._retired = None
            self.table.put({name: self.entry(name).moved(state, bad=None)})

    def replace_state(
        self,
        name: str,
        state: Any,
        *,
        frozen: bool | None = None,
        history: Timeline | None = None,
        shadow: tuple[bool, ...] | None = None,
    ) -> None:
        """Replace a state by one that no step made, or add an entry with it; None: as the entry is."""
        with self.lock:
            self._retired, as_now = None, frozen is None and shadow is None
            entry = self._with_state(self.table.entries.get(name), state)
            frozen, history = entry.frozen if frozen is None else frozen, history or entry.history
            new = replace(entry, frozen=frozen, history=history, shadow=shadow or entry.shadow, differ=None)
            self.table.put({name: new}, keeps_modes=as_now)

    def _with_state(self, entry: Entry | None, state: Any) -> Entry:
        """The entry with a state that no step made: its alarms have been reported."""
        if entry is not None:
            return entry.moved(state, bad=None, alarms=self.alarms.counts(state))
        history = None if self._policy is None else Timeline(self._policy, self.streams)
        shadow = (self.shadow.begin,) * self.streams
        return Entry(state, alarms=self.alarms.counts(state), history=history, shadow=shadow)

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def freeze(self, name: str) -> Self:
        """Stop adapting: only predict. A time filter goes on."""
        self.entry(name)
        self.table.change(name, frozen=True)
        return self

    def unfreeze(self, name: str) -> Self:
        """Adapt again."""
        self.entry(name)
        self.table.change(name, frozen=False)
        return self

    @torch.inference_mode(False)
    def set_shadow(self, name: str, shadow: bool, stream: int | None = None) -> Self:
        """Let the source answer for all streams of an entry, or one; else what adapts. States stay as they are."""
        with self.table.lock:
            entry = self.entry(name).in_shadow(shadow, stream)
            self.table.change(name, shadow=entry.shadow, differ=entry.differ)
        return self

    @torch.inference_mode(False)
    def reset(self, name: str, stream: int | None = None) -> Self:
        """Return to the source model: all streams of an entry, or one."""
        with self.lock:
            entry = self.entry(name)
            fresh = self.method.init(self.net, self.streams, entry.seed)
            self.replace_state(name, fresh if stream is None else replace_stream(entry.state, stream, fresh))
        return self

    @torch.inference_mode(False)
    def snapshot(self, name: str) -> Snapshot:
        """Return a copy of a state for `restore`."""
        with self.reading(name) as entries:
            return Snapshot(self.method, clone(entries[name].state), self.net, entries[name].frozen)

    @torch.inference_mode(False)
    def restore(self, name: str, snapshot: Snapshot) -> Self:
        """Return to a snapshot, or add an entry with it; frozen if it was."""
        like = self._like_of(name)
        if isinstance(snapshot, Snapshot) and snapshot.method == self.pace.unresolved:
            snapshot = snapshot._replace(method=self.method)
        check_snapshot(snapshot, self.method, self.net, self.streams)
        self.replace_state(name, copy_like(snapshot.state, like), frozen=snapshot.frozen)
        return self

    def _like_of(self, name: str) -> Any:
        """A state with the device and precision of those of this entry."""
        check_name(name)
        entry = self.table.entries.get(name)
        return entry.state if entry is not None and entry.residence == "device" else self._like

    @torch.inference_mode(False)
    def state(self, name: str) -> Any:
        """Return a copy of a state, a named tuple of tensors."""
        with self.reading(name) as entries:
            return clone(entries[name].state)

    def digest(self, name: str) -> str:
        """Return a hash of a state: equal digests, equal states."""
        with self.reading(name) as entries:
            return digest(entries[name].state)

    @torch.inference_mode(False)
    def export(self, name: str, stream: int = 0) -> nn.Module:
        """Return a plain module that predicts for a stream as `predict` does, where there is one."""
        with self.reading(name) as entries:
            return plain_network(self.net, self.method, self.table.on_device(entries[name]).state, stream)

    # -- reports ------------------------------------------------------------------------------------------------------

    def infos(self, name: str) -> list[StreamInfo]:
        """Return what each stream of an entry has learned from."""
        with self.reading(name) as entries:
            state, entry = entries[name].state, entries[name]
            frozen, differ = [entry.frozen] * self.streams, shares_that_differ([entry], self.alarms.watched)
            more = entry.unlearned, entry.shadow, differ
            return describe_streams(state.info, state.key.clock, entry.bad_images(), frozen, *more)

    def healths(self, name: str) -> list[Health] | None:
        """Return how each stream of an entry does; None without ``health`` or ``guard``."""
        if not self.alarms.watched:
            return None
        pipeline = Pipeline.of(self.method)
        with self.reading(name) as entries:
            state = self.table.on_device(entries[name]).state
            return pipeline.guard.health(self.net, pipeline.method, state)  # type: ignore[no-any-return]

    def filters(self, name: str) -> list[FilterInfo] | None:
        """Return what the time filter does for each stream of an entry; None without one."""
        with self.reading(name) as entries:
            pipeline = Pipeline.of(self.method)
            return None if pipeline.filter is None else pipeline.filter.info(entries[name].state.filter)

    def look(self, names: Iterable[str]) -> None:
        """Read the alarms of these entries now. On a CPU every step does; on a GPU, which waits for it, every 50th."""
        if not self.alarms.watched:
            return
        with self.lock:
            for name in names:
                entry = self.entry(name)
                began, counts = self.alarms.read(entry.state, entry.alarms, None if self._single else name)
                self.table.change(name, alarms=counts)
                self._publish(began + self._demotions(name, entry, entry))

    @property
    def events(self) -> list[Event]:
        """The last alarms, the newest last; empty without ``health`` or ``guard``."""
        self.look(list(self.table.entries))
        return list(self.alarms.events)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, name: str, path: str | PathLike[str]) -> None:
        """Write a state file, as `tribe.Adapter.save` does."""
        with self.reading(name) as entries:
            states.write(path, self._saved(entries[name]))

    def load(self, name: str, path: str | PathLike[str]) -> Self:
        """Replace a state, or add an entry, by the content of a state file."""
        check_name(name)
        return self._resume(name, path, states.read(path))

    def to_bytes(self, name: str) -> bytes:
        """Return the bytes of a state file."""
        with self.reading(name) as entries:
            return states.encode(self._saved(entries[name]), f"the bytes of stream {name!r}")

    def from_bytes(self, name: str, data: bytes, shadow: bool | None = None) -> Self:
        """Replace a state, or add an entry, by the content of the bytes of a state file.

        ``shadow``: whether it is in shadow then; None: as the file says.
        """
        return self._resume(name, *_decode(name, data), shadow)

    @torch.inference_mode(False)
    def check_bytes(self, name: str, data: bytes) -> None:
        """Raise what `from_bytes` raises; change nothing."""
        self._state_of(*_decode(name, data), self._like_of(name))

    @torch.inference_mode(False)
    def _resume(self, name: str, source: str | PathLike[str], saved: Saved, shadow: bool | None = None) -> Self:
        state, method = self._state_of(source, saved, self._like_of(name))
        self._resolved(method)
        modes = saved.modes if shadow is None else (shadow,) * self.streams
        self.replace_state(name, state, frozen=saved.frozen, shadow=modes)
        return self

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the network, computed once."""
        self._fingerprint = self._fingerprint or self.net.fingerprint()
        return self._fingerprint

    def _saved(self, entry: Entry) -> Saved:
        self.pace.check_resolved()
        fields, tensors = method_for_file(self.method), leaves(entry.state)
        shadow = list(entry.shadow) if any(entry.shadow) else []
        return Saved(self.method.name, fields, self.streams, entry.frozen, self.fingerprint, tensors, shadow)

    def _state_of(self, source: str | PathLike[str], saved: Saved, like: Any) -> tuple[Any, AnyMethod]:
        """A copy of the state in a file, and its method; StateFileError says why it does not fit."""
        method = self.pace.adopt(self.method, saved.method, saved.fields)
        if saved.streams != self.streams:
            raise StateFileError(f"{source} holds {saved.streams} streams; expected {self.streams}")
        check_settings(source, saved.method, saved.fields, method)
        if saved.fingerprint != self.fingerprint:
            states.check_fingerprint(source, saved.fingerprint, self.net)
        return states.state_from(source, saved.tensors, like, self.classes), method

    # -- the network --------------------------------------------------------------------------------------------------

    def _check_place(self) -> None:
        """Raise if the network was moved or cast without these states."""
        if (place := self.net.place) != self._place:
            of_network, of_states = (f"on {device} in {dtype}" for device, dtype in (place, self._place))
            raise RuntimeError(
                f"the network is {of_network}, these states are {of_states}: the network, or an adapter that shares "
                "it, was moved or cast. Call .to() on this adapter, too; move a network before tribe.fleet(network)"
            )

    def use(self, net: Backbone) -> None:
        """Go on with this network, which may have moved, or may be another."""
        if net is not self.net:
            for name, entry in list(self.table.entries.items()):
                if entry.history is not None:  # its snapshots belong to the other network
                    self.table.change(name, history=replace(entry.history, records=()))
        self.net, self._retired, self._place, self._fingerprint = net, None, net.place, None
        self._runner.use(net)
        self.table.device = net.device


def check_seed(seed: Any) -> None:
    """Raise if this is not a seed."""
    if not is_whole(seed):
        raise TypeError(f"seed is an int; got {seed!r}")


def _decode(name: str, data: bytes) -> tuple[str, Saved]:
    """The source of a state file in memory, which messages name, and its content."""
    check_name(name)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"expected the bytes of a state file; got {type(data).__name__}")
    source = f"the state for stream {name!r}"
    return source, states.decode(bytes(data), source)
