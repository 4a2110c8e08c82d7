"""Versions of one model, side by side: a fleet for each, and the one that each stream is in.

A stream is in one version at a time. Which one follows from its state: a state file names its network by a fingerprint.
So a version may get another name, and a state goes to the version that it was adapted on.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.state import copy_like, leaves, rebuild
from tribe.fields import is_number, require
from tribe.health.prepared import Prepared
from tribe.io import states
from tribe.io.states import StateFileError
from tribe.methods import AnyMethod, Pipeline
from tribe.serve.errors import NotFound
from tribe.serve.jobs import Job
from tribe.streams import Fleet, fleet
from tribe.streams.core import Streams

FIRST = "1"  # the name of a version that was given none
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
# The largest relative change of a layer's weights with which a stream takes its state along: as it is, or what changed
# in it since the source. Measured, see docs/deploying.md.
NEAR, FAR = 0.15, 1.2
Model = nn.Module | Backbone | Fleet
Method = str | AnyMethod | Prepared | PathLike[str]
Start = Literal["auto", "carry", "relative", "source", "kept"]
STARTS: Mapping[str, str] = {  # how a stream starts in another version
    "auto": "carry, relative or source: the farther the networks are from each other, the less goes along",
    "carry": "with the state that it has",
    "relative": "with what changed in its state since the source",
    "source": "anew, from the source model",
    "kept": "with the state that it had there when it went back",
}


class VersionJobs(NamedTuple):
    """Requests that one version answers."""

    version: str
    fleet: Any  # a `Fleet`
    jobs: list[Job]
    source: bool  # the source model of this version predicts: their streams are in another one


class Versions:
    """The fleets of the versions of a model, by name; new streams start in the first, the ``default``.

    It has the methods of a fleet that concern single streams. They may be called from any thread; those that change a
    stream, from one at a time.
    """

    def __init__(self, fleets: Mapping[str, Any]) -> None:
        self.fleets = dict(fleets)
        self.default = next(iter(self.fleets))
        for name in self.fleets:
            check_version_name(name)
        self._of: dict[str, str] = {}  # the version of each stream that is in a fleet
        self.shares: dict[str, float] = {}  # the part of all streams that belongs in a version
        self._distances: dict[tuple[str, str], float | None] = {}
        if self.several:
            self._check_alike()

    @classmethod
    def of(cls, given: Any) -> "Versions":
        """Return the versions of a worker, which may be given one fleet."""
        return given if isinstance(given, cls) else cls({FIRST: given})

    def _check_alike(self) -> None:
        first, prints = self.fleets[self.default], dict[str, str]()
        for name, other in self.fleets.items():
            require(
                other.classes == first.classes,
                f"all versions have the same classes; version {self.default!r} has {first.classes} classes",
                f"{other.classes} classes in version {name!r}",
            )
            methods = [Pipeline.of(each.method) for each in (first, other)]
            parts = [(type(m.method), m.rare is None, m.filter is None, m.guard is None) for m in methods]
            require(parts[0] == parts[1], "all versions adapt in the same way: method, guard and filter", name)
            same = prints.setdefault(other.fingerprint, name)
            require(same == name, f"versions {same!r} and {name!r} have the same weights; expected one of them", name)

    # -- names --------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all versions."""
        return tuple(self.fleets)

    @property
    def several(self) -> bool:
        """Return whether there is more than one."""
        return len(self.fleets) > 1

    def check(self, name: str) -> str:
        """Return the name of a version, or raise `NotFound`."""
        if name not in self.fleets:
            raise NotFound(f"no version {name[:40]!r}; this server has {', '.join(map(repr, self.fleets))}")
        return name

    def version_of(self, stream: str) -> str:
        """Return the version of a stream; of one that is not here, that in which it would start."""
        return self._of.get(stream) or self.start_of(stream)

    def start_of(self, stream: str) -> str:
        """Return the version in which a new stream starts: the default, or that with a share that the name is in."""
        chosen = [name for name, share in self.shares.items() if is_in_share(stream, share)]
        return chosen[-1] if chosen else self.default

    def groups(self, jobs: Sequence[Job]) -> Iterator[VersionJobs]:
        """Group requests by the version that answers them.

        It is that of the stream, or the one that the request names. Another version than the stream's only predicts,
        with its source model.
        """
        if not self.several:
            yield VersionJobs(self.default, self.fleets[self.default], list(jobs), False)
            return
        found: dict[tuple[str, bool], list[Job]] = {}
        for job in jobs:
            own = self.default if job.stream is None or job.source else self.version_of(job.stream)
            version = job.version or own
            source = version != own
            found.setdefault((version, source), []).append(job)
        for (version, source), some in found.items():
            yield VersionJobs(version, self.fleets[version], some, source)

    # -- one stream: what a fleet does --------------------------------------------------------------------------------

    def fleet_of(self, stream: str) -> Any:
        """Return the fleet of a stream."""
        return self.fleets[self.version_of(stream)]

    def __contains__(self, stream: object) -> bool:
        return any(stream in each for each in self.fleets.values())

    def add(self, stream: str, version: str | None = None) -> None:
        """Add a stream that starts at the source model of a version."""
        version = version or self.start_of(stream)
        self.fleets[version].add(stream)
        self._of[stream] = version

    def drop(self, stream: str) -> None:
        """Forget a stream."""
        self.fleet_of(stream).drop(stream)
        self._of.pop(stream, None)

    def from_bytes(self, stream: str, data: bytes, shadow: bool | None = None) -> None:
        """Replace the state of a stream, or add one, by a state file; it is then in the version of the file.

        ``shadow``: whether it is in shadow then; None: as the file says.
        """
        self._go(stream, self.version_for(stream, data), lambda target: target.from_bytes(stream, data, shadow))

    def check_bytes(self, stream: str, data: bytes) -> None:
        """Raise what `from_bytes` raises; change nothing."""
        self.fleets[self.version_for(stream, data)].check_bytes(stream, data)

    def version_for(self, stream: str, data: bytes) -> str:
        """Return the version that a state file was adapted on."""
        if not self.several:
            return self.default
        fingerprint = states.decode(data, f"the state for stream {stream!r}").fingerprint
        for name, each in self.fleets.items():
            if each.fingerprint == fingerprint:
                return name
        names = ", ".join(map(repr, self.fleets))
        raise StateFileError(
            f"the state for stream {stream!r} is of another network than the versions that this server has ({names}): "
            "serve its network as a further version, and the stream goes on there"
        )

    def _go(self, stream: str, version: str, change: Any) -> None:
        """Change a stream in a version, and then drop it where it was: until then predictions come from there."""
        before = self._of.get(stream)
        change(self.fleets[version])
        self._of[stream] = version
        if before is not None and before != version:
            self.fleets[before].drop(stream)

    def restore(self, stream: str, snapshot: Any) -> None:
        """Return to a snapshot, which is of the stream's version."""
        self.fleet_of(stream).restore(stream, snapshot)

    def to_bytes(self, stream: str) -> bytes:
        """Return the bytes of a state file."""
        content: bytes = self.fleet_of(stream).to_bytes(stream)
        return content

    def snapshot(self, stream: str) -> Any:
        """Return a copy of a state for `restore`."""
        return self.fleet_of(stream).snapshot(stream)

    def reset(self, stream: str) -> None:
        """Return to the source model of the stream's version."""
        self.fleet_of(stream).reset(stream)

    def in_shadow(self, stream: str) -> bool:
        """Return whether the source model answers for a stream while it adapts."""
        return bool(self.fleet_of(stream).in_shadow(stream))

    def set_shadow(self, stream: str, shadow: bool) -> None:
        """Let the source model answer for a stream, or what adapts."""
        self.fleet_of(stream).set_shadow(stream, shadow)

    def freeze(self, stream: str) -> None:
        """Stop adapting."""
        self.fleet_of(stream).freeze(stream)

    def unfreeze(self, stream: str) -> None:
        """Adapt again."""
        self.fleet_of(stream).unfreeze(stream)

    def digest(self, stream: str) -> str:
        """Return a hash of the state of a stream."""
        return str(self.fleet_of(stream).digest(stream))

    def clock(self, stream: str) -> int:
        """Return how many steps a stream has taken."""
        return int(self.fleet_of(stream).clock(stream))

    def look(self, streams: Iterable[str]) -> None:
        """Read the alarms of these streams now."""
        for each, some in self._by_fleet(streams):
            each.look(some)

    def report_many(self, streams: Iterable[str]) -> dict[str, Any]:
        """Return reports on several streams."""
        return {
            name: report for each, some in self._by_fleet(streams) for name, report in each.report_many(some).items()
        }

    def _by_fleet(self, streams: Iterable[str]) -> list[tuple[Any, list[str]]]:
        found: dict[str, list[str]] = {}
        for stream in streams:
            found.setdefault(self.version_of(stream), []).append(stream)
        return [(self.fleets[version], some) for version, some in found.items()]

    @property
    def method(self) -> AnyMethod:
        """Return the method of the default version; those of the others differ in numbers alone."""
        method: AnyMethod = self.fleets[self.default].method
        return method

    # -- moving -------------------------------------------------------------------------------------------------------

    def move(self, stream: str, version: str, start: Start = "auto") -> Start:
        """Move a stream to another version, and return how it starts there."""
        before = self.version_of(stream)
        old, new = self.fleets[before], self.fleets[version]
        how = self.start_between(before, version) if start == "auto" else start
        state = None if how == "source" else carried(old, new, stream, how == "relative")
        if state is None and start not in ("auto", "source"):
            raise StateFileError(f"what stream {stream!r} has learned does not fit version {version!r}: start=source")
        frozen, shadow = old.entry(stream).frozen, old.in_shadow(stream)

        def enter(target: Any) -> None:
            if stream in target:
                target.drop(stream)
            target.add(stream)
            if state is not None:
                target.replace_state(stream, state)
            target.set_shadow(stream, shadow)
            if frozen:
                target.freeze(stream)

        self._go(stream, version, enter)
        return "source" if state is None else how

    def start_between(self, one: str, other: str) -> Start:
        """Return how a stream of one version starts in another, if the caller does not say."""
        pair = (min(one, other), max(one, other))
        if pair not in self._distances:
            self._distances[pair] = network_distance(self.fleets[one].net, self.fleets[other].net)
        distance = self._distances[pair]
        if distance is None or distance > FAR:
            return "source"
        return "carry" if distance <= NEAR else "relative"


def check_version_name(name: Any) -> str:
    """Return the name of a version, or raise."""
    fine = isinstance(name, str) and NAME.fullmatch(name) is not None
    require(fine, "a version has a name of 1 to 32 of A-Z a-z 0-9 . _ -, such as 2", name)
    return str(name)


def build_versions(given: Mapping[str, Model], method: Method, **options: Any) -> Versions:
    """Return the versions of a server, the default one first: networks, or fleets with a guard of their own."""
    require(len(given) > 0, "there is at least one version", given)
    networks = [name for name, each in given.items() if not isinstance(each, Fleet)]
    if len(given) > 1 and options.get("budget") is not None:
        raise ValueError("a budget is measured for one network: with versions, name what it gave (learn_every)")
    if len(networks) > 1 and (options.get("health") not in (None, False, True) or Prepared.of(method) is not None):
        words = "a calibration is of one network: each version has its own (--weights 2=FILE,HEALTH), or none has one"
        raise ValueError(f"{words}; versions {', '.join(networks)} would share one")
    fleets = dict[str, Fleet]()
    for name, each in given.items():
        made = each if isinstance(each, Fleet) else fleet(each, method, **options)
        fleets[check_version_name(name)] = made
        check_shapes(next(iter(fleets.values())).net, made.net, name)
    return Versions(fleets)


def network_of(model: Model) -> nn.Module:
    """Return the network of a version."""
    return model.net if isinstance(model, Fleet) else model


def check_shapes(first: Backbone, other: Backbone, name: str) -> None:
    """Raise unless a network is of the same design as the first: its layers have the same names and shapes."""
    shapes = [{n: tuple(t.shape) for n, t in net.model.state_dict().items()} for net in (first, other)]
    if wrong := sorted(n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n)):
        raise ValueError(
            f"version {name!r} has another design than the model: {', '.join(wrong[:4])} differ. Versions have the "
            "same layers, inputs and classes; serve another design as a model of its own"
        )


def is_in_share(stream: str, share: float) -> bool:
    """Return whether a stream is among a share of all, by a hash of its name: a larger share has all of a smaller one.

    >>> sum(is_in_share(f"cam{i}", 0.1) for i in range(1000))
    104
    """
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big") < share * 2**64


def check_share(share: Any) -> float:
    """Return a share of all streams, or raise."""
    require(is_number(share) and 0 <= share <= 1, "share is a part of all streams, 0 to 1", share)
    return float(share)


# -- what a stream takes with it ---------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def carried(old: Streams, new: Streams, stream: str, relative: bool = False) -> Any:
    """Return the state of a stream for another network: as it is, or what changed in it since the source.

    Of what changed, means and variances are counted in standard deviations of the source of each network.

    None: states of the two have other shapes, they hold weights of the whole network, or numbers without a difference.
    """
    state = old.state(stream)
    seed = int(state.key.seed[0])
    like, start = (each.method.init(each.net, each.streams, seed) for each in (new, old))
    now, first, second = leaves(state), leaves(start), leaves(like)
    if {n: (t.shape, t.dtype) for n, t in now.items()} != {n: (t.shape, t.dtype) for n, t in second.items()}:
        return None
    if new.method.deployed(new.net, like).weights is not None:
        return None
    if not relative:
        return copy_like(state, like)
    if any(t.dtype == torch.int8 for t in now.values()):  # packed statistics
        return None
    moved = dict[str, Tensor]()
    for name, after in second.items():
        value, before = now[name].to(after), first[name].to(after)
        change = value
        if value.is_floating_point() and name.endswith(".var"):
            change = value / before * after
        elif value.is_floating_point() and name.endswith(".mean") and (spread := f"{name[:-4]}var") in second:
            change = after + (value - before) * (second[spread] / first[spread].to(after)).sqrt()
        elif value.is_floating_point():
            change = after + (value - before)
        moved[name] = torch.where(after == before, value, change)  # most numbers do not come from the network
    return None if states.not_finite(moved) else rebuild(like, moved)


def network_distance(one: Backbone, other: Backbone) -> float | None:
    """Return the largest relative change of the weights of a layer before the last one; None: layers differ.

    The last layer has no statistics behind it: what a stream has learned is about the layers before.
    """
    weights = [
        [(n, m.weight) for n, m in net.model.named_modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
        for net in (one, other)
    ]
    if [(n, w.shape) for n, w in weights[0]] != [(n, w.shape) for n, w in weights[1]]:
        return None
    changes = [
        float((a - b.to(a)).norm() / a.norm().clamp_min(torch.finfo(a.dtype).tiny))
        for (_, a), (_, b) in zip(weights[0][:-1], weights[1][:-1], strict=True)
    ]
    return max(changes, default=0.0)
