"""Report on streams to people: the images that each has learned from, its health, and its alarms."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tribe.core.state import Info
from tribe.health.alarms import KINDS, AlarmState
from tribe.methods import AnyMethod, Pipeline

logger = logging.getLogger("tribe.health")
KEEP = 1000  # events that a log keeps
READ_EVERY = 50  # steps between two readings on a GPU: reading waits for the device

Counts = list[list[int]] | None  # how often each alarm of each stream has begun; None: nothing watches


class StreamInfo(NamedTuple):
    """The images that a stream has learned from, and its last batch."""

    images: int  # images learned from so far, with those between the learning steps of a method that learns rarely
    skipped: int  # images that were bad or whose output was not finite, while learning; they changed nothing
    poisoned: tuple[int, ...]  # positions of bad images in the last batch, learned from or only predicted
    trusted: float  # share of the last batch that was trusted; 1 for methods that do not choose or do not learn
    entropy: float  # mean entropy of the last predictions, as a share of log K: 0 is certain, 1 is uniform
    distance: float  # how far the affine parameters that predict have moved, relative to the norm of the source's
    steps: int  # batches learned from, with those between
    frozen: bool  # whether the stream only predicts
    student_agreement: float  # share of the last batch that teacher and student classify alike; 1 without a student
    anchor_agreement: float  # the same of the teacher and the anchor, which keeps the source's parameters
    unlearned: int = 0  # images that were only predicted, because a deadline left no time to learn from them
    shadow: bool = False  # whether the stream is in shadow: the source answers, and the method goes on learning
    # Share of about the last 500 images that source and adapted model answer differently: in shadow of all images, else
    # of those that a guard or health also asks the source about. None: not known.
    differ: float | None = None


class Health(NamedTuple):
    """The health of a stream."""

    images: int  # images that came, learned from or not
    accuracy: float | None  # estimate for the last 500 answers, after a time filter; None without a calibration
    low: float | None  # lower end of its 90 % interval
    high: float | None  # upper end of its 90 % interval
    overall: float | None  # estimate for the whole stream
    source_accuracy: float | None  # estimate of the source network's accuracy on the same 500 images
    source_low: float | None  # lower end of its 90 % interval
    source_high: float | None  # upper end
    familiar: bool | None  # whether calibration saw such windows; False: the accuracy is not known, within 0 and 1
    calibrated: bool  # whether a calibration was given: estimates and alarms of a shift need one
    alarms: tuple[str, ...]  # the alarms that are on now
    entropy: float  # mean entropy of about the last 500 predictions, as a share of log K
    trusted: float  # share of about the last 500 images that was trusted; 1 for methods that do not choose
    distance: float  # how far the affine parameters have moved, relative to the norm of the source's
    statistics: float | None  # how far the statistics have moved, in standard deviations; None: none are kept
    followed: float | None  # share of the adapted statistics in those that predict; None: none are kept
    source_agreement: float | None  # share of the last images on which the source agrees, of those it predicted too
    predicted: tuple[int, ...]  # how often each class was predicted, before a time filter
    held: int  # images that a guard did not let the method learn from
    returned: int  # how often a guard returned the stream to its last good state


class StreamReport(NamedTuple):
    """All reports on a stream."""

    info: StreamInfo
    health: Health | None = None  # None without ``health`` or ``guard``


def describe_streams(
    info: Info,
    steps: Tensor,
    poisoned: Sequence[tuple[int, ...]],
    frozen: Sequence[bool],
    unlearned: Sequence[int] | None = None,
    shadow: Sequence[bool] | None = None,
    differ: Sequence[float | None] | None = None,
) -> list[StreamInfo]:
    """Return a report on each stream; ``poisoned`` are the positions of bad images in its last batch."""
    columns = {name: t.tolist() for name, t in info._asdict().items()}
    columns |= {"steps": steps.tolist(), "poisoned": poisoned, "frozen": frozen}
    columns |= {"unlearned": unlearned or [0] * len(frozen), "shadow": shadow or [False] * len(frozen)}
    columns |= {"differ": differ or [None] * len(frozen)}
    return [StreamInfo(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


# -- alarms ------------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An alarm that began."""

    stream: int | str  # the number of the stream; in a fleet its name
    kind: str  # one word: "black", "frozen", "shift", "drift", "collapse", ...
    image: int  # how many images the stream had seen when the alarm was raised
    since: int  # after how many images its cause began, as far as can be determined
    words: str  # what happened and why
    numbers: dict[str, float]  # the numbers behind the words

    def __str__(self) -> str:
        return f"stream {self.stream}, image {self.image:,}: {self.words}"


Listener = Callable[[Event], object]


class AlarmLog:
    """Turn new alarms in states into events, keep the last ones, log them to ``tribe.health`` and call listeners."""

    def __init__(self, method: AnyMethod, listener: Listener | None = None) -> None:
        self.watched = isinstance(method, Pipeline) and method.guard is not None
        if listener is not None and not callable(listener):
            raise TypeError(f"on_event is a function that takes an event; got {listener!r}")
        if listener is not None and not self.watched:
            raise ValueError("on_event is called with alarms, which need health=True or guard=True")
        self.listeners: list[Listener] = [] if listener is None else [listener]
        self.events: deque[Event] = deque(maxlen=KEEP)  # the newest last

    def counts(self, state: Any) -> Counts:
        """Return how often each alarm has begun: give it to `read` to read later ones only."""
        return state.guard.watch.alarms.times.tolist() if self.watched else None

    def is_due(self, state: Any, step: int) -> bool:
        """Return whether to read after this step: after each on a CPU; seldom on a GPU, which reading waits for."""
        return self.watched and (state.key.seed.device.type == "cpu" or step % READ_EVERY == 0)

    def read(self, state: Any, since: Counts, stream: str | None = None) -> tuple[list[Event], Counts]:
        """Return the alarms that began since these counts, and the counts now; ``stream``: its name in a fleet."""
        events, counts = read_alarms(state.guard.watch.alarms, since)
        return events if stream is None else [event._replace(stream=stream) for event in events], counts

    def publish(self, events: list[Event]) -> None:
        """Keep events, log them and call the listeners; never raise."""
        for event in events:
            self.events.append(event)
            logger.warning("%s", event, extra={"stream": event.stream, "kind": event.kind, "numbers": event.numbers})
            for listener in list(self.listeners):
                try:
                    listener(event)
                except Exception:  # a camera must not stop because its dashboard is down
                    logger.exception("a listener failed for: %s", event)


_FAULT = ("share", "grey")
WORDINGS: dict[str, tuple[str, tuple[str, ...]]] = {  # the text of an alarm, and the names of the numbers in it
    "black": ("the camera is black: {0:.0%} of the last frames, mean grey {1:.2f}", _FAULT),
    "white": ("the camera is white: {0:.0%} of the last frames, mean grey {1:.2f}", _FAULT),
    "flat": ("the camera shows one grey: {0:.0%} of the last frames, mean grey {1:.2f}", _FAULT),
    "noise": ("the camera shows noise without structure, as a covered lens does: {0:.0%} of the last frames", _FAULT),
    "outside": (
        "values are far outside [0, 1], as 0 to 255 or normalised images are: {0:.0%} of the last frames, mean {1:.2f}",
        _FAULT,
    ),
    "frozen": ("the camera is frozen: {0:.0%} of the last frames equal the one before", _FAULT),
    "blurred": ("the camera is blurred: {0:.0%} of the last frames are hardly more than a gradient", _FAULT),
    "shift": (
        "the images differ from the source's: the mean rank of {1:.0f} entropies is {0:.2f}, normal is 0.50",
        ("mean_rank", "ranks"),
    ),
    "accuracy": (
        "the estimated accuracy is {0:.2f} ({1:.2f} to {2:.2f}); clean images had {3:.2f}",
        ("accuracy", "low", "high", "clean"),
    ),
    "drift": ("the parameters run away: they moved by {0:.3f} of their norm in {1:.0f} steps", ("distance", "steps")),
    "collapse": (
        "predictions collapse: {0:.0%} of the last ones are class {1:.0f}, which the source does not confirm",
        ("share", "class"),
    ),
    "scatter": (
        "predictions do not follow the stream: neighbours share their class by {0:.2f} more than chance, according to "
        "the source by {1:.2f}",
        ("order", "source_order"),
    ),
}


def describe_alarm(kind: str, numbers: Sequence[float]) -> tuple[str, dict[str, float]]:
    """Return the words of an alarm, and its numbers by name; ``numbers`` are those of its state, and zeros."""
    text, names = WORDINGS[kind]
    return text.format(*numbers), dict(zip(names, numbers, strict=False))


def read_alarms(state: AlarmState, since: Counts = None) -> tuple[list[Event], list[list[int]]]:
    """Return the alarms that began since these counts, the oldest first, and the counts now. Waits for the device.

    An alarm that began twice in between is one event, the last.
    """
    counts: list[list[int]] = state.times.tolist()
    before = [[0] * len(KINDS) for _ in counts] if since is None else since
    fresh = [
        (i, j)
        for i, row in enumerate(counts)
        for j, count in enumerate(row)
        if count > (before[i][j] if count >= before[i][j] else 0)  # a stream that was reset counts from 0
    ]
    if not fresh:
        return [], counts
    image, first, numbers = state.image.tolist(), state.since.tolist(), state.numbers.tolist()
    events = []
    for i, j in fresh:
        text, named = describe_alarm(KINDS[j], numbers[i][j])
        words = f"{text}; since image {first[i][j]:,}"
        events.append(Event(i, KINDS[j], image[i][j], first[i][j], words, named))
    return sorted(events, key=lambda event: event.image), counts
