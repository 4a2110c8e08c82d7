"""A schedule: a stream as plain data, one image of one domain per sample. Save it, hash it, plot it."""

import io
import math
from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tribe.io.files import write_atomically


class Schedule(NamedTuple):
    """One entry per sample, in the order of the stream."""

    domain: Tensor  # (T,) int64, a position in the scenario's domain_names
    index: Tensor  # type: ignore[assignment]  # hides tuple.index; (T,) int64, the image's place in its domain's files
    reset: Tensor  # (T,) bool, True: reset to the source model before this sample


def save(path: str | PathLike[str], schedule: Schedule) -> None:
    """Write a schedule as npz, which `numpy.load` reads; an interrupted write leaves the old file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **{k: t.cpu().numpy() for k, t in schedule._asdict().items()})
    write_atomically(path, buffer.getvalue())


def played_labels(schedule: Schedule, labels: Sequence[Tensor]) -> Tensor:
    """(T,) the class of every sample; ``labels``: one tensor per domain number (see ``Scenario.expand``)."""
    if len(schedule.domain) and int(schedule.domain.max()) >= len(labels):
        raise ValueError(f"the schedule plays domain {int(schedule.domain.max())}; there are labels of {len(labels)}")
    starts = torch.tensor([0, *(len(y) for y in labels)]).cumsum(0)
    if bool((schedule.index >= starts.diff()[schedule.domain]).any()):
        raise ValueError("the schedule plays images beyond these labels: it was made from other labels")
    return torch.cat([y.long() for y in labels])[starts[schedule.domain] + schedule.index]


def class_counts(schedule: Schedule, labels: Sequence[Tensor], classes: int | None = None) -> Tensor:
    """(D, K) how many samples of each class each domain plays, without those that have no label (-1)."""
    classes = classes or 1 + max(int(y.max()) for y in labels)
    y = played_labels(schedule, labels)
    cell = (schedule.domain * classes + y)[y >= 0]
    return torch.bincount(cell, minlength=len(labels) * classes).reshape(len(labels), classes)


def local_balance(schedule: Schedule, labels: Sequence[Tensor], window: int = 64, classes: int | None = None) -> Tensor:
    """(ceil(T / window),) evenness of the classes in each window of the stream, over time.

    This is the entropy of the class shares over the largest entropy that so many samples of K classes can have: 1 for
    the most even window (no class has two samples more than another), 0 for a single class, NaN without labels.
    """
    if window < 2:
        raise ValueError(f"window is a number of samples, at least 2; got {window}")
    y = played_labels(schedule, labels)
    classes = classes or 1 + max(int(t.max()) for t in labels)
    rows, windows = torch.arange(len(y)) // window, -(-len(y) // window)
    cell = (rows * classes + y)[y >= 0]
    counts = torch.bincount(cell, minlength=windows * classes).reshape(windows, classes)
    size = counts.sum(1)
    even = size[:, None] // classes + (torch.arange(classes) < size[:, None] % classes)
    entropy, most = (torch.special.entr(n.double() / size[:, None]).sum(1) for n in (counts, even))
    return torch.where(most > 0, entropy / most, 0.0).where(size > 0, math.nan)
