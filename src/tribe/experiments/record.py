"""The record of a stream: a table with a row for each image, and the spec of the run. Plain data on disk."""

import importlib
import io
import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tribe.experiments.outputs import Outputs
from tribe.experiments.trace import COLUMNS as TRACED
from tribe.experiments.trace import Trace
from tribe.experiments.watched import COLUMNS as WATCHED
from tribe.experiments.watched import Watched
from tribe.fields import is_whole
from tribe.io import json_files
from tribe.io.arrays import read_npz
from tribe.io.files import write_atomically

FORMAT, SCHEMA = "tribe-record", 2
COLUMNS = {"domain": "i", "label": "i", "prediction": "i", "confidence": "f", "seconds": "f"}  # kinds of numbers
OUTPUT_COLUMNS = {"output_values": "f", "output_valid": "b", "output_sizes": "i", "output_reset": "b"}
MOST_CLASSES = 2**16  # also the most domains
MOST_CELLS = 2**22  # domains times classes: some metrics have a number for each pair
HEADER = {
    "domains": json_files.Where([str], lambda names: len(names) <= MOST_CLASSES, f"at most {MOST_CLASSES} domains"),
    "classes": json_files.Where(int, lambda count: 0 <= count <= MOST_CLASSES, f"an integer from 0 to {MOST_CLASSES}"),
    "spec": dict,
}
OUTPUTS = {
    "kind": json_files.Where(str, lambda kind: kind in ("logits", "probabilities"), "logits or probabilities"),
    "classes": json_files.Where(int, lambda count: 1 <= count <= MOST_CLASSES, f"an integer from 1 to {MOST_CLASSES}"),
}


class Record(NamedTuple):
    """One stream as it was predicted, image by image, in order."""

    domain: Tensor  # (T,) int64, into `domains`
    label: Tensor  # (T,) int64, never seen by the method; -1 where unknown
    prediction: Tensor  # (T,) int64
    confidence: Tensor  # (T,) float32, the largest probability
    seconds: Tensor  # (T,) float32, what predicting and adapting took, shared evenly by the images of a batch
    domains: tuple[str, ...]
    classes: int
    spec: Mapping[
        str, Any
    ]  # of the run: dataset, model, scenario, method, seed, ... as in tribe.experiments.experiment
    outputs: Outputs | None = None  # what the method returned, if the run kept it; `save(outputs=True)` writes it
    watched: Watched | None = None  # of methods that are watched or guarded: estimated accuracy, and alarms
    trace: Trace | None = None  # what the method's state said after each step; None in older records

    def save(self, path: str | PathLike[str], *, outputs: bool = False) -> None:
        """Write the table and the spec (as JSON) to one npz file, atomically.

        ``outputs``: also what the method returned, such as logits, which `run` keeps with ``keep_outputs=True``.
        """
        words: dict[str, Any] = {
            "format": FORMAT,
            "schema": SCHEMA,
            "domains": self.domains,
            "classes": self.classes,
            "spec": dict(self.spec),
        }
        buffer = io.BytesIO()
        columns = {name: getattr(self, name).numpy() for name in COLUMNS}
        if self.watched is not None:
            words["alarms"] = self.watched.kinds
            columns |= {f"watched_{name}": getattr(self.watched, name).numpy() for name in WATCHED}
        if self.trace is not None:
            words["trace"] = list(TRACED)
            columns |= {f"trace_{name}": getattr(self.trace, name).numpy() for name in TRACED}
        if outputs:
            if self.outputs is None:
                raise ValueError("this record holds no outputs to save: tribe.run(..., keep_outputs=True) keeps them")
            words["outputs"] = {"kind": self.outputs.kind, "classes": self.outputs.values.shape[1]}
            parts = self.outputs.values.float().flatten(), *self.outputs[1:4]  # numpy has no bfloat16
            columns |= {name: part.numpy() for name, part in zip(OUTPUT_COLUMNS, parts, strict=True)}
        np.savez_compressed(buffer, words=np.array(json.dumps(words)), **columns)
        write_atomically(path, buffer.getvalue())

    def to_pandas(self) -> Any:
        """The table as a pandas.DataFrame with a row for each image; ``attrs["spec"]`` is the spec.

        ``domain`` is a categorical column of names, ``correct`` is missing where there is no label. The columns of the
        trace and of health follow, as far as the record has them, then one for each class of the outputs: ``logits_0``.
        Needs pandas, the extra `pandas`.
        """
        pandas = _pandas()
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
            columns |= {f"{self.outputs.kind}_{k}": values[:, k] for k in range(values.shape[1])}
        frame = pandas.DataFrame(columns)
        frame.attrs["spec"] = dict(self.spec)
        return frame

    @staticmethod
    def load(path: str | PathLike[str]) -> "Record":
        """Read what `save` wrote, or say why it cannot be read."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no record at {path}")
        words = _read_header(path)
        try:
            columns: dict[str, Any] = {name: torch.from_numpy(array) for name, array in read_npz(path, COLUMNS).items()}
            watched, trace = _read_watched(path, words), _read_trace(path, words)
            outputs = _read_outputs(path, words)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); expected a file of Record.save") from error
        spec = words["spec"] if words["schema"] == SCHEMA else _from_schema_1(words["spec"])
        record = Record(**columns, domains=tuple(words["domains"]), classes=words["classes"], spec=spec)
        record = record._replace(watched=watched, trace=trace, outputs=outputs)
        if why := record.damage():
            raise ValueError(f"{path} is damaged: {why}")
        return record

    def damage(self) -> str | None:
        """Why no run has written such a record; None for a sound one. Metrics rely on it."""
        if len(self.domains) * self.classes > MOST_CELLS:
            pairs = f"{len(self.domains):,} domains times {self.classes:,} classes"
            return f"it claims {pairs}; expected at most {MOST_CELLS:,} pairs"
        predicted = self.classes or MOST_CLASSES  # images without labels have no classes of their own
        ranges = {"domain": (0, len(self.domains)), "label": (-1, self.classes), "prediction": (0, predicted)}
        for name, (low, high) in ranges.items():
            column = getattr(self, name)
            if len(column) and (column.min() < low or column.max() >= high):
                return f"its column {name} holds {column.min()} to {column.max()}; expected {low} to {high - 1}"
        for name, most in {"confidence": 1.001, "seconds": math.inf}.items():  # softmax may round up
            column = getattr(self, name)
            if bool((column < 0).any() | (column > most).any() | column.isinf().any()):
                expected = "shares" if name == "confidence" else "times"
                return f"its column {name} holds {column.min()} to {column.max()}; expected {expected}"
        if self.watched is not None and len(self.watched.alarms) != len(self.label):
            return f"its columns of health have {len(self.watched.alarms)} rows; expected {len(self.label)}"
        if self.trace is not None and (why := self.trace.damage(len(self.label))):
            return why
        if self.outputs is not None and (why := self.outputs.damage(len(self.label))):
            return why
        return None if self.watched is None else self.watched.damage()


def _read_header(path: str | PathLike[str]) -> dict[str, Any]:
    """The domains, classes and spec of a record; it is read first, as the columns of a newer version may differ."""
    try:
        text = read_npz(path, {"words": "U"})["words"].item()
        words: dict[str, Any] = json_files.parse(text, dict, "its header", finite=False)
    except ValueError as error:
        raise ValueError(f"{path} is not a record, or it is damaged ({error}); expected one of Record.save") from error
    if words.get("format") != FORMAT or not is_whole(words.get("schema")) or words["schema"] > SCHEMA:
        given = f"{words.get('format')!s:.40} {words.get('schema')!s:.40}"
        raise ValueError(f"{path} is of format {given}; this reads {FORMAT} {SCHEMA}")
    json_files.check(words, HEADER, str(path))
    return words


def _read_watched(path: str | PathLike[str], words: Mapping[str, Any]) -> Watched | None:
    """What a watched method knew; None if nothing watched. ValueError: why it cannot be read."""
    if "alarms" not in words:
        return None
    kinds = json_files.check(words["alarms"], [str], "its list of alarms")
    found = read_npz(path, {f"watched_{name}": kind for name, kind in WATCHED.items()})
    return Watched(**{name: torch.from_numpy(found[f"watched_{name}"]) for name in WATCHED}, kinds=tuple(kinds))


def _read_trace(path: str | PathLike[str], words: Mapping[str, Any]) -> Trace | None:
    """The trace of a record; None if it was not kept. A later version may have more columns, which are left out."""
    if "trace" not in words:
        return None
    names = json_files.check(words["trace"], [str], "its list of columns of the trace")
    if lacking := TRACED.keys() - set(names):
        raise ValueError(f"its trace lacks {', '.join(sorted(lacking))}")
    found = read_npz(path, {f"trace_{name}": kind for name, kind in TRACED.items()})
    return Trace(**{name: torch.from_numpy(found[f"trace_{name}"]) for name in TRACED})


def _read_outputs(path: str | PathLike[str], words: Mapping[str, Any]) -> Outputs | None:
    """What the method returned; None if it was not saved. Values of images and of batches have their own lengths."""
    if "outputs" not in words:
        return None
    said = json_files.check(words["outputs"], OUTPUTS, "its entry on outputs")
    columns = (read_npz(path, {name: kind})[name] for name, kind in OUTPUT_COLUMNS.items())
    values, valid, sizes, reset = map(torch.from_numpy, columns)
    if len(values) != len(valid) * said["classes"]:
        raise ValueError(f"it holds {len(values):,} outputs; expected {len(valid):,} times {said['classes']}")
    return Outputs(values.view(len(valid), said["classes"]), valid, sizes, reset, said["kind"])


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a table needs pandas: pip install 'tribe-tta[pandas]' (or pip install pandas)", name=error.name
        ) from error


def _from_schema_1(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of an older record: fields and code stood beside the method's name, fingerprints in the components."""
    new = {name: value for name, value in spec.items() if name not in ("fields", "code")}
    if isinstance(spec.get("method"), str):
        new["method"] = {"name": spec["method"], **{key: spec[key] for key in ("fields", "code") if key in spec}}
    for component, name in (("dataset", "images"), ("model", "weights")):
        if isinstance(part := spec.get(component), Mapping) and "fingerprint" in part:
            new[component] = {key: value for key, value in part.items() if key != "fingerprint"}
            new[name] = part["fingerprint"]
    return new
