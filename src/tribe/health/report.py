"""Reports on streams, in plain numbers: what each has learned, how it does, and what its time filter does."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tribe.core.state import Info
from tribe.filters import FilterInfo


class StreamInfo(NamedTuple):
    """The images that a stream has learned from, and its last batch."""

    images: int  # images learned from so far
    skipped: int  # images that were bad or whose output was not finite, while learning; they changed nothing
    poisoned: tuple[int, ...]  # positions of bad images in the last batch, learned from or only predicted
    trusted: float  # share of the last batch that was trusted; 1 for methods that do not choose or do not learn
    entropy: float  # mean entropy of the last predictions, as a share of log K: 0 is certain, 1 is uniform
    distance: float  # how far the affine parameters that predict have moved, relative to the norm of the source's
    steps: int  # batches learned from
    frozen: bool  # whether the stream only predicts
    student_agreement: float  # share of the last batch that teacher and student classify alike; 1 without a student
    anchor_agreement: float  # the same of the teacher and the anchor, which keeps the source's parameters


class Health(NamedTuple):
    """The health of a stream."""

    images: int  # images that came, learned from or not
    accuracy: float | None  # estimate for the last 500 images, before the time filter; None without a calibration
    low: float | None  # lower end of its 90 % interval
    high: float | None  # upper end of its 90 % interval
    overall: float | None  # estimate for the whole stream
    calibrated: bool  # whether a calibration was given: estimates and alarms of a shift need one
    alarms: tuple[str, ...]  # the alarms that are on now
    entropy: float  # mean entropy of about the last 500 predictions, as a share of log K
    trusted: float  # share of about the last 500 images that was trusted; 1 for methods that do not choose
    distance: float  # how far the affine parameters have moved, relative to the norm of the source's
    statistics: float | None  # how far the statistics have moved, in standard deviations; None: none are kept
    followed: float | None  # share of the adapted statistics in those that predict; None: none are kept
    source_agreement: float | None  # share of the last images on which the source agrees, of those it predicted too
    predicted: tuple[int, ...]  # how often each class was predicted, before the time filter
    held: int  # images that a guard did not let the method learn from
    returned: int  # how often a guard returned the stream to its last good state

    def json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**self._asdict(), "alarms": list(self.alarms), "predicted": list(self.predicted)}


class StreamReport(NamedTuple):
    """All reports on a stream."""

    info: StreamInfo
    health: Health | None = None  # None without ``health`` or ``guard``
    filter: FilterInfo | None = None  # None without a time filter


def describe_streams(info: Info, steps: Tensor, poisoned: Sequence[tuple[int, ...]], frozen: bool) -> list[StreamInfo]:
    """Return a report on each stream.

    Args:
        info: what a state reports.
        steps: (S,), the clocks.
        poisoned: the positions of bad images in the last batch of each stream.
        frozen: whether the streams only predict.
    """
    columns = [t.tolist() for t in info]
    return [
        StreamInfo(images, skipped, poisoned[i], trusted, entropy, distance, clock, frozen, *agreement)
        for i, (clock, images, skipped, trusted, entropy, distance, *agreement) in enumerate(
            zip(steps.tolist(), *columns, strict=True)
        )
    ]
