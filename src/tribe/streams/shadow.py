"""Shadow mode: the source model answers for a stream, while the adapting one runs beside it and goes on learning.

It is a mode of an entry, not a method: the state after a batch is the same bit for bit in shadow and out of it, so a
stream is promoted and demoted at once, and loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.fields import require
from tribe.health.alarms import KINDS
from tribe.health.report import Event, Health, describe_alarm
from tribe.methods import AnyMethod, Pipeline
from tribe.streams.batching import EntryGroup, Runner
from tribe.streams.budget import Began
from tribe.streams.entries import Entry

WRONG = ("drift", "collapse", "scatter")  # alarms of adapting that goes wrong
OFTEN = 50  # images of a stream between two looks at its estimated accuracy
DEMOTED = "demoted"  # the kind of the event
Modes = tuple[bool, ...]  # which streams of an entry are in shadow


@dataclass(frozen=True)
class Shadow:
    """Settings: the streams that begin in shadow, and those that go back to it by themselves.

    ``tribe.adapt(net, shadow=True)`` is ``tribe.adapt(net, shadow=tribe.Shadow())``. A stream that was demoted stays in
    shadow until somebody promotes it.
    """

    begin: bool = True  # whether a new stream begins in shadow
    demote: bool = False  # whether adapting that goes wrong demotes a stream; needs guard= or health=
    alarms: tuple[str, ...] = WRONG  # that demote while they are on
    accuracy: bool = True  # whether an estimated accuracy below the source's demotes, too; needs a calibration

    def __post_init__(self) -> None:
        switches = self.begin, self.demote, self.accuracy
        whole = all(isinstance(value, bool) for value in switches)
        require(whole, "begin, demote and accuracy of a shadow are True or False", switches)
        fine = isinstance(self.alarms, tuple) and all(alarm in KINDS for alarm in self.alarms)
        require(fine, f"alarms of a shadow are some of {', '.join(KINDS)}", self.alarms)

    @classmethod
    def of(cls, shadow: "bool | Shadow | None") -> "Shadow":
        """Return the policy of an argument ``shadow``: True is the default one; None and False: streams are promoted.

        Raises:
            TypeError: it is none of these.
        """
        if not isinstance(shadow, cls | bool | None):
            raise TypeError(f"shadow is True, False or a tribe.Shadow; got {type(shadow).__name__}")
        return shadow if isinstance(shadow, cls) else cls(begin=bool(shadow))

    def check(self, method: AnyMethod) -> None:
        """Raise if nothing watches the streams that are to be demoted."""
        if self.demote and Pipeline.of(method).guard is None:
            raise ValueError("a stream is demoted by alarms, which need health=True or guard=True")

    def find_demotions(self, method: AnyMethod, net: Any, entry: Entry, before: Entry | None = None) -> list[Event]:
        """Return an event for each promoted stream of an entry that this policy demotes. Waits for the device.

        ``before`` is the entry before a batch: its estimated accuracy is looked at every `OFTEN` images. None: now.
        """
        promoted = [i for i, shadow in enumerate(entry.shadow) if not shadow]
        if not self.demote or not promoted:
            return []
        state, pipeline = entry.state, Pipeline.of(method)
        alarms, events = state.guard.watch.alarms, []
        on, images = alarms.on.tolist(), alarms.images.tolist()
        earlier = None if before is None else before.state.guard.watch.alarms.images.tolist()
        due = [i for i in promoted if earlier is None or images[i] // OFTEN > earlier[i] // OFTEN]
        healths: list[Health] = []
        if due and self.accuracy and pipeline.guard.calibration is not None:
            healths = pipeline.guard.read_health(net, pipeline.method, state.guard, state.info)
        for i in promoted:
            kinds = [kind for kind in self.alarms if on[i][KINDS.index(kind)]]
            if kinds:
                j = KINDS.index(kinds[0])
                (why, numbers), since = describe_alarm(kinds[0], alarms.numbers[i, j].tolist()), int(alarms.since[i, j])
            elif healths and i in due and (found := source_is_ahead(healths[i])) is not None:
                (why, numbers), since = found, images[i]
            else:
                continue
            words = f"the source answers from now on, and adapting goes on in shadow: {why}"
            events.append(Event(i, DEMOTED, images[i], since, words, numbers))
        return events


def source_is_ahead(health: Health) -> tuple[str, dict[str, float]] | None:
    """Return in words and numbers that the source is estimated to be more accurate than the adapted model; else None.

    Either estimate is outside the interval of the other: a difference that the intervals explain demotes no stream.
    """
    accuracy, high, source, low = health.accuracy, health.high, health.source_accuracy, health.source_low
    if accuracy is None or high is None or source is None or low is None or accuracy >= low or high >= source:
        return None
    words = f"the estimated accuracy is {accuracy:.0%}, and that of the source {source:.0%}"
    return words, {"accuracy": accuracy, "high": high, "source_accuracy": source, "source_low": low}


class ShadowAnswers(NamedTuple):
    """The answers of a group of entries."""

    logits: Tensor  # (R, B, K), the source's for rows in shadow
    counts: Tensor | None  # (n, 2) of the rows in shadow: answers that differ, and all; None: not counted
    seconds: float = 0.0  # that the source's pass took; 0 without a deadline


def answer_from_source(
    runner: Runner, group: EntryGroup, logits: Tensor, modes: Sequence[Modes], began: Began | None = None
) -> ShadowAnswers:
    """Return the answers of a group whose method returned ``logits``: only rows in shadow pass the source, too.

    ``modes`` are those of its entries; with a deadline, ``began`` is its batch.
    """
    rows = [i for i, shadow in enumerate(flag for entry in modes for flag in entry) if shadow]
    if not rows or not group.x.shape[1]:
        return ShadowAnswers(logits, None)
    since = None if began is None else began.seconds(group.x.device)
    some = group if len(rows) == len(group.x) else group.rows(rows)
    source = runner.predict_source(some.x, some.valid).to(logits.dtype)
    own, answers = logits, source
    if some is not group:
        own, answers = logits[rows], logits.index_copy(0, torch.tensor(rows, device=logits.device), source)
    seconds = 0.0 if began is None or since is None else began.seconds(group.x.device) - since
    if logits.dim() != 3:  # not logits of classes
        return ShadowAnswers(answers, None, seconds)
    low, high = source.aminmax(dim=2)
    seen = (high > low) if some.valid is None else (high > low) & some.valid  # bad images get equal logits
    differ = (own.argmax(2) != source.argmax(2)) & seen
    return ShadowAnswers(answers, torch.stack((differ, seen), 2).sum(1), seconds)


def count_differences(entries: Sequence[Entry], counts: Tensor | None) -> list[Entry]:
    """Return entries with the answers of a batch that differ, (n, 2) of rows in shadow: see `ShadowAnswers.counts`."""
    if counts is None:
        return list(entries)
    parts = counts.split([sum(entry.shadow) for entry in entries])
    return [entry.with_difference(own) if len(own) else entry for entry, own in zip(entries, parts, strict=True)]


def mode_of(name: str, entry: Entry, shadow: bool | Mapping[str, bool] | None) -> Modes:
    """Return which streams of an entry the source answers for: as ``shadow`` says, for all or by name, or as it is."""
    chosen = shadow.get(name) if isinstance(shadow, Mapping) else shadow
    return entry.shadow if chosen is None else (chosen,) * len(entry.shadow)


def shares_that_differ(entries: Sequence[Entry], watched: bool) -> list[float | None]:
    """Return `StreamInfo.differ` of each stream of some entries, read together."""
    sums: list[Tensor | None] = []
    for entry in entries:
        own = None
        if watched:
            agreed, probed = entry.state.guard.watch.agreement.unbind(1)
            own = torch.stack((probed - agreed, probed), 1)
        if any(entry.shadow):
            counted = entry.state.key.clock.new_zeros(len(entry.shadow), 2).float()
            counted = counted if entry.differ is None else entry.differ.to(counted.device)
            mode = torch.tensor(entry.shadow, device=counted.device).unsqueeze(1)
            own = torch.where(mode, counted, 0.0 if own is None else own)
        sums.append(own)
    known = [own for own in sums if own is not None]
    rows = iter(torch.cat(known).tolist() if known else ())
    pairs = [
        next(rows) if own is not None else (0.0, 0.0) for e, own in zip(entries, sums, strict=True) for _ in e.shadow
    ]
    return [differ / count if count > 0 else None for differ, count in pairs]
