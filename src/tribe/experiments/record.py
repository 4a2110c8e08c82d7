"""The record of a stream: a table with a row for each image, and the spec of the run. Plain data on disk."""

import importlib
import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tribe.io import json_files
from tribe.io.files import write_atomically

FORMAT, SCHEMA = "tribe-record", 2
COLUMNS = {"domain": "i", "label": "i", "prediction": "i", "confidence": "f", "seconds": "f"}  # kinds of numbers
WATCHED = {"accuracy": "f", "low": "f", "high": "f", "alarms": "i"}
FROM_INFO = ("entropy", "trusted", "distance", "student_agreement", "anchor_agreement")  # fields of tribe's Info
TRACED = {"step": "i", **dict.fromkeys(FROM_INFO, "f")}
OUTPUTS = {"values": "f", "valid": "b", "sizes": "i", "reset": "b"}
MOST_KINDS = 62  # of alarms: a bit each
MOST_CLASSES = 2**16  # also the most domains
MOST_CELLS = 2**22  # domains times classes: some metrics have a number for each pair
HEADER = {
    "format": {FORMAT},
    "schema": {SCHEMA},
    "domains": json_files.Where([str], lambda names: len(names) <= MOST_CLASSES, f"at most {MOST_CLASSES} domains"),
    "classes": json_files.Where(int, lambda count: 0 <= count <= MOST_CLASSES, f"an integer from 0 to {MOST_CLASSES}"),
    "spec": dict,
    "alarms?": [str],
    "trace?": [str],
    "outputs?": {
        "classes": json_files.Where(int, lambda n: 1 <= n <= MOST_CLASSES, f"an integer from 1 to {MOST_CLASSES}"),
    },
}
UNREADABLE = (ValueError, KeyError, TypeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error)


class Watched(NamedTuple):
    """Estimates and alarms of a watched or guarded method: a value for each image, of when its batch was done."""

    accuracy: Tensor  # (T,) float32, the estimated accuracy of the last 500 images; NaN without a calibration
    low: Tensor  # (T,) float32, the lower end of its 90 % interval
    high: Tensor  # (T,) float32, its upper end
    alarms: Tensor  # (T,) int64, which alarms were on: a bit for each of `kinds`
    kinds: tuple[str, ...]  # the names of the alarms

    def beginnings(self) -> list[tuple[int, str]]:
        """Return image and kind of every alarm that began."""
        began = []
        for bit, kind in enumerate(self.kinds):
            on = self.alarms >> bit & 1
            begins = on.diff(prepend=on.new_zeros(1)) == 1
            began += [(image, kind) for image in begins.nonzero()[:, 0].tolist()]
        return sorted(began)


class Trace(NamedTuple):
    """Reports of the method's state: a value for each image, after the step in which the image came."""

    step: Tensor  # (T,) int64, the batch that the image came in, from 1
    entropy: Tensor  # (T,) float32, the mean entropy of the batch's predictions, as a share of log K
    trusted: Tensor  # (T,) float32, the share of the batch that the method learned from
    distance: Tensor  # (T,) float32, how far the affine parameters have moved, relative to the norm of the source's
    student_agreement: Tensor  # (T,) float32, the share of images that teacher and student classify the same; else 1
    anchor_agreement: Tensor  # (T,) float32, the same of teacher and anchor

    def steps(self) -> "Trace":
        """Return one row for each step."""
        last = torch.ones_like(self.step, dtype=torch.bool)
        last[:-1] = self.step[1:] != self.step[:-1]
        return Trace(*(column[last] for column in self))


class Outputs(NamedTuple):
    """The logits of a method for the images of one stream, in order, and how they were cut into batches."""

    values: Tensor  # (N, K) in the precision of the network; images that could not be read have a row, too
    valid: Tensor  # (N,) False: an image that could not be read, which the record leaves out
    sizes: Tensor  # (steps,) int64, images of each batch; sums to N
    reset: Tensor  # (steps,) True: the stream went back to the source before this batch


class Record(NamedTuple):
    """One stream as it was predicted, image by image, in order."""

    domain: Tensor  # (T,) int64, into `domains`
    label: Tensor  # (T,) int64, which no method gets; -1 where unknown
    prediction: Tensor  # (T,) int64
    confidence: Tensor  # (T,) float32, the largest probability
    seconds: Tensor  # (T,) float32, of predicting and adapting, shared evenly by the images of a batch
    domains: tuple[str, ...]
    classes: int
    spec: Mapping[str, Any]  # of the run: `Experiment.json` with the seed, and the id as "experiment"
    outputs: Outputs | None = None  # of the method, if the run kept them; `save(outputs=True)` writes them
    watched: Watched | None = None  # of methods that are watched or guarded: estimated accuracy, and alarms
    trace: Trace | None = None  # reports of the method's state after each step

    def save(self, path: str | PathLike[str], *, outputs: bool = False) -> None:
        """Write the table and the spec (as JSON) to one npz file, atomically; with ``outputs``, also the logits."""
        header: dict[str, Any] = {"format": FORMAT, "schema": SCHEMA, "domains": self.domains, "classes": self.classes}
        header["spec"] = dict(self.spec)
        columns = {name: getattr(self, name) for name in COLUMNS}
        if self.watched is not None:
            header["alarms"] = self.watched.kinds
            columns |= {f"watched_{name}": getattr(self.watched, name) for name in WATCHED}
        if self.trace is not None:
            header["trace"] = list(TRACED)
            columns |= {f"trace_{name}": getattr(self.trace, name) for name in TRACED}
        if outputs:
            if self.outputs is None:
                raise ValueError("this record holds no outputs to save: tribe.run(..., keep_outputs=True) keeps them")
            header["outputs"] = {"classes": self.outputs.values.shape[1]}
            parts = self.outputs._replace(values=self.outputs.values.float().flatten())  # numpy has no bfloat16
            columns |= {f"output_{name}": getattr(parts, name) for name in OUTPUTS}
        buffer = io.BytesIO()
        arrays = {name: column.numpy() for name, column in columns.items()}
        np.savez_compressed(buffer, allow_pickle=False, words=np.array(json.dumps(header)), **arrays)
        write_atomically(path, buffer.getvalue())

    @staticmethod
    def load(path: str | PathLike[str]) -> "Record":
        """Read a file of `save`; raise ValueError if it is not a record, or is damaged."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no record at {path}")
        try:
            with np.load(path, allow_pickle=False) as file:
                record = _decode(file)
        except UNREADABLE as error:
            reason = f"{path} is not a record, or it is damaged ({error})"
            raise ValueError(f"{reason}; expected a file of Record.save") from error
        if why := record.damage():
            raise ValueError(f"{path} is damaged: {why}")
        return record

    def to_pandas(self) -> Any:
        """Return the table as a pandas.DataFrame with a row for each image; ``attrs["spec"]`` is the spec.

        ``domain`` is a categorical column of names, ``correct`` is missing where the label is. The columns of the
        trace and of health follow, as far as the record has them, then one for each class of the outputs: ``logits_0``.
        Needs pandas, the extra `pandas`.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("a table needs pandas: pip install 'tribe-tta[pandas]'", name="pandas") from error
        names = np.array(self.domains, dtype=object)[self.domain.numpy()]
        columns: dict[str, Any] = {"domain": pandas.Categorical(names, list(dict.fromkeys(self.domains)))}
        columns |= {name: getattr(self, name).numpy() for name in COLUMNS if name != "domain"}
        right = pandas.array((self.prediction == self.label).numpy(), dtype="boolean")
        right[(self.label < 0).numpy()] = pandas.NA
        columns["correct"] = right
        for table in (self.trace, self.watched):
            tensors = {} if table is None else table._asdict()
            columns |= {name: t.numpy() for name, t in tensors.items() if isinstance(t, Tensor)}
        if self.outputs is not None:
            values = self.outputs.values[self.outputs.valid].float().numpy()
            columns |= {f"logits_{k}": values[:, k] for k in range(values.shape[1])}
        frame = pandas.DataFrame(columns)
        frame.attrs["spec"] = dict(self.spec)
        return frame

    def damage(self) -> str | None:
        """Return why no run has written such a record; None for a sound one. Metrics rely on it."""
        if len(self.domains) * self.classes > MOST_CELLS:
            pairs = f"{len(self.domains):,} domains times {self.classes:,} classes"
            return f"it claims {pairs}; expected at most {MOST_CELLS:,} pairs"
        images = len(self.label)
        if any(len(getattr(self, name)) != images for name in COLUMNS):
            return "its columns differ in length"
        predicted = self.classes or MOST_CLASSES  # images without labels have no classes
        for name, low, high in (
            ("domain", 0, len(self.domains) - 1),
            ("label", -1, self.classes - 1),
            ("prediction", 0, predicted - 1),
            ("confidence", 0.0, 1.001),  # softmax may round up
            ("seconds", 0.0, math.inf),
        ):
            column = getattr(self, name)
            if bool((column < low).any() | (column > high).any() | column.isinf().any()):
                return f"its column {name} holds {column.min()} to {column.max()}; expected {low} to {high}"
        return _damage_of_parts(self, images)


def _damage_of_parts(record: Record, images: int) -> str | None:
    """Return why the trace, the columns of health or the outputs cannot be of so many images."""
    trace, watched, outputs = record.trace, record.watched, record.outputs
    if trace is not None and {len(column) for column in trace} != {images}:
        return f"its trace does not have {images} rows in each column"
    if watched is not None:
        if {len(getattr(watched, name)) for name in WATCHED} != {images}:
            return f"its columns of health do not have {images} rows each"
        for name in ("accuracy", "low", "high"):
            column = getattr(watched, name)
            if bool((column < 0).any() | (column > 1).any()):
                return f"its column {name} holds {column.min()} to {column.max()}; expected shares"
        bits = len(watched.kinds)
        if bits > MOST_KINDS or bool((watched.alarms < 0).any() | (watched.alarms >= 2**bits).any()):
            return f"its column alarms does not hold a bit for each kind of at most {MOST_KINDS}"
    if outputs is not None:
        held, rows = int(outputs.valid.sum()), int(outputs.sizes.sum())
        if held != images or len(outputs.values) != len(outputs.valid):
            return f"its outputs are of {held:,} images; expected {images:,}"
        if len(outputs.sizes) != len(outputs.reset) or (outputs.sizes < 0).any() or rows != len(outputs.valid):
            return f"its batches hold {rows:,} images; expected {len(outputs.valid):,}"
    return None


def _decode(file: Mapping[str, Any]) -> Record:
    """Return the record in an open npz file."""
    header = json_files.parse(file["words"].item(), HEADER, "its header")
    columns: dict[str, Any] = _columns(file, COLUMNS)
    if "alarms" in header:
        columns["watched"] = Watched(**_columns(file, WATCHED, "watched_"), kinds=tuple(header["alarms"]))
    if "trace" in header:
        columns["trace"] = Trace(**_columns(file, TRACED, "trace_"))
    if (about := header.get("outputs")) is not None:
        parts = _columns(file, OUTPUTS, "output_")
        parts["values"] = parts["values"].view(-1, about["classes"])
        columns["outputs"] = Outputs(**parts)
    return Record(**columns, domains=tuple(header["domains"]), classes=header["classes"], spec=header["spec"])


def _columns(file: Mapping[str, Any], kinds: Mapping[str, str], prefix: str = "") -> dict[str, Tensor]:
    """Return columns of these kinds of numbers by name."""
    columns = {}
    for name, kind in kinds.items():
        array = file[f"{prefix}{name}"]
        if array.ndim != 1 or array.dtype.kind != kind:
            raise ValueError(f"its column {prefix}{name} is {array.dtype} of shape {array.shape}")
        columns[name] = torch.from_numpy(array)
    return columns
