"""The result of a trial: both predictions of every frame, what they cost, and what labels say; a folder holds it."""

import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tribe.data.datasets.files import read_npz
from tribe.health.report import Event
from tribe.io import json_files
from tribe.io.files import write_atomically
from tribe.io.json_files import Where
from tribe.trial.verdict import ERROR, MATTERS, GainVerdict, decide

NEITHER = -1  # the label of a frame that shows another class than both predictions, or that nobody can name
CANDIDATES = 9  # classes that are offered for a frame, one for each key
SUMMARY, TABLE = "trial.json", "predictions.npz"  # files in the folder of a trial
ADVICE = "Play it again: --force, or another --out"


class EstimatedAccuracy(NamedTuple):
    """An accuracy that was estimated without labels, and its 90 % interval."""

    accuracy: float
    low: float
    high: float


class EstimatedWindow(NamedTuple):
    """The estimates of the last frames before ``end``."""

    end: int  # frames that had been played
    adapted: EstimatedAccuracy | None
    source: EstimatedAccuracy | None


class Columns(NamedTuple):
    """The predictions, frame by frame."""

    source: NDArray[np.int32]  # (N,) classes
    adapted: NDArray[np.int32]
    source_confidence: NDArray[np.float32]  # (N,) probability of the predicted class
    adapted_confidence: NDArray[np.float32]
    readable: NDArray[np.bool_]  # (N,)
    candidates: NDArray[np.int32]  # (D, at most 9) of frames that differ: likely classes, first both predictions
    times: NDArray[np.int64]  # (N,) of the frames of a video, in units of its time base; else empty


@dataclass(frozen=True)
class Trial:
    """Recorded frames, played through a network and through the model that adapts it."""

    recording: Mapping[str, Any]  # where it is, the digest of its frames, how they were read
    network: str  # fingerprint
    method: str
    settings: str  # of the method, as text
    classes: tuple[str, ...]  # names; numbers if none are known
    columns: Columns = field(repr=False)
    windows: tuple[EstimatedWindow, ...]  # estimates, every 500 frames
    events: tuple[Event, ...]  # alarms
    seconds: tuple[float, float]  # of a frame: source, adapted
    remarks: tuple[str, ...] = ()  # what was not as expected, such as a video that ends in the middle
    labels: Mapping[int, int] = field(default_factory=dict)  # frame -> class, or `NEITHER`
    seed: int = 0  # of the draw
    error: float = ERROR  # see `decide`
    matters: float = MATTERS

    @property
    def frames(self) -> int:
        """The number of frames."""
        return len(self.columns.source)

    @cached_property
    def differing(self) -> NDArray[np.int64]:
        """The frames on which the two predict different classes."""
        return np.flatnonzero((self.columns.source != self.columns.adapted) & self.columns.readable)

    @cached_property
    def draw(self) -> NDArray[np.int64]:
        """The frames that differ in random order: labels count for the verdict in this order, up to a gap.

        Every frame has its number of the lottery, whatever the models are: of the same recording, labels for one method
        serve another, too.
        """
        numbers = np.random.default_rng(self.seed).random(self.frames)
        return self.differing[np.argsort(numbers[self.differing], kind="stable")]

    @cached_property
    def telling(self) -> NDArray[np.int64]:
        """The frames that differ, those first on which both are confident."""
        c = self.columns
        least = np.minimum(c.source_confidence[self.differing], c.adapted_confidence[self.differing])
        return self.differing[np.argsort(-least, kind="stable")]

    @cached_property
    def counted(self) -> int:
        """The number of labels that count: frames of the draw before the first one without a label."""
        return next((i for i, frame in enumerate(self.draw.tolist()) if frame not in self.labels), len(self.draw))

    @cached_property
    def verdict(self) -> GainVerdict:
        """The verdict by the labels: does adapting help?"""
        drawn, c = self.draw[: self.counted], self.columns
        given = np.array([self.labels[frame] for frame in drawn.tolist()], np.int64)
        gains = (given == c.adapted[drawn]).astype(int) - (given == c.source[drawn])
        return decide(gains, len(self.differing), self.frames, error=self.error, matters=self.matters)

    @property
    def ratio(self) -> float:
        """The cost of the adapting model, as a multiple of the source's."""
        return self.seconds[1] / self.seconds[0] if self.seconds[0] > 0 else 1.0

    def estimate(self, which: str) -> EstimatedAccuracy | None:
        """Return the estimated accuracy of "source" or "adapted" on all frames; None without a calibration.

        It is the mean over windows, and so are the ends of the interval: windows may all be wrong in the same way.
        """
        known, start = [], 0
        for window in self.windows:
            if (one := getattr(window, which)) is not None:
                known.append((window.end - start, one))
            start = window.end
        total = sum(weight for weight, _ in known)
        if not total:
            return None
        return EstimatedAccuracy(*(sum(weight * one[i] for weight, one in known) / total for i in range(3)))

    def labelled(self, labels: Mapping[int, int]) -> "Trial":
        """Return the trial with these labels, frame -> class or `NEITHER`, and with no others."""
        for frame, label in labels.items():
            check_label(frame, label, self.frames, self.classes)
        return dataclasses.replace(self, labels=dict(sorted(labels.items())))

    def json(self) -> dict[str, Any]:
        """Return what the trial found, as plain data."""
        estimates = {name: self.estimate(name) for name in ("source", "adapted")}
        return {
            "verdict": self.verdict.json(),
            "frames": self.frames,
            "differing": len(self.differing),
            "estimates": {name: None if one is None else one._asdict() for name, one in estimates.items()},
            "cost": {"source": self.seconds[0], "adapted": self.seconds[1], "ratio": self.ratio},
            "alarms": [_plain(event) for event in self.events],
            "remarks": list(self.remarks),
            "labels": len(self.labels),
            "recording": dict(self.recording),
            "network": self.network,
            "method": self.method,
            "settings": self.settings,
        }

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the folder of the trial; labels have their own file, see `tribe.trial.labels`."""
        target, buffer = Path(folder), io.BytesIO()
        target.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = self.columns._asdict()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        table = buffer.getvalue()
        held = {
            "table": hashlib.sha256(table).hexdigest(),
            "classes": list(self.classes),
            "windows": [list(window) for window in self.windows],
            "seed": self.seed,
            "error": self.error,
            "matters": self.matters,
        }
        write_atomically(target / TABLE, table)
        write_atomically(target / SUMMARY, json.dumps({**self.json(), **held}, indent=1).encode())

    @staticmethod
    def load(folder: str | PathLike[str]) -> "Trial":
        """Read a folder of `save`, without labels; ValueError or OSError if it holds no trial, or a damaged one."""
        place = Path(folder) / SUMMARY
        if not place.is_file():
            raise FileNotFoundError(f"no trial in {folder}: it holds no {SUMMARY}")
        known = json_files.read(place, SCHEMA, ADVICE)
        table = Path(folder) / TABLE
        content = table.read_bytes() if table.is_file() else b""
        if hashlib.sha256(content).hexdigest() != known["table"]:
            raise ValueError(f"{table} is not the table of {place}: missing, damaged or another trial's. {ADVICE}")
        columns = Columns(**read_npz(table))
        return Trial(
            **{name: known[name] for name in KEPT},
            classes=tuple(known["classes"]),
            columns=columns,
            windows=tuple(EstimatedWindow(end, _as_estimate(a), _as_estimate(s)) for end, a, s in known["windows"]),
            events=tuple(Event(**event) for event in known["alarms"]),
            seconds=(known["cost"]["source"], known["cost"]["adapted"]),
            remarks=tuple(known["remarks"]),
        )


def check_label(frame: int, label: int, frames: int, classes: Sequence[str]) -> None:
    """Raise if there is no such frame or class."""
    if not 0 <= frame < frames:
        raise ValueError(f"there is no frame {frame}: the recording has frames 0 to {frames - 1}")
    if label != NEITHER and not 0 <= label < len(classes):
        raise ValueError(f"frame {frame}: there is no class {label}; expected 0 to {len(classes) - 1}")


def _plain(event: Event) -> dict[str, Any]:
    numbers = {name: value for name, value in event.numbers.items() if math.isfinite(value)}
    return {**event._asdict(), "numbers": numbers}


def _as_estimate(numbers: Sequence[float] | None) -> EstimatedAccuracy | None:
    return None if numbers is None else EstimatedAccuracy(*numbers)


def _is_window(window: Any) -> bool:
    parts: Iterator[Any] = iter(window[1:])
    return len(window) == 3 and all(
        part is None or (isinstance(part, list) and len(part) == 3 and all(isinstance(x, int | float) for x in part))
        for part in parts
    )


KEPT = ("recording", "network", "method", "settings", "seed", "error", "matters")
SCHEMA: dict[str, Any] = {
    "recording": {"place": str, "digest": str, ...: object},
    "network": str,
    "method": str,
    "settings": str,
    "table": str,
    "classes": [str],
    "windows": [Where(list, _is_window, "the end of a window and two estimates")],
    "alarms": [{"stream": (int, str), "kind": str, "image": int, "since": int, "words": str, "numbers": {...: float}}],
    "cost": {"source": float, "adapted": float},
    "remarks": [str],
    "seed": int,
    "error": float,
    "matters": float,
}
