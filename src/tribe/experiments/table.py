"""The table of a run while it is played, and the checkpoint that it resumes from: state and table of some batch."""

import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tribe.core.state import clone, leaves, rebuild
from tribe.experiments.record import Kind, Outputs, Record, Trace, Watched
from tribe.experiments.stream import Batch, Stream
from tribe.health.alarms import KINDS
from tribe.io import tensors as tensor_file
from tribe.io.json_files import Where
from tribe.io.states import StateFileError

CHECKPOINT = tensor_file.Kind(
    "tribe-run",
    1,
    {"step": Where(int, lambda step: step >= 0, "a number of batches"), "run": str},
    noun="checkpoint of a run",
    advice="Remove it, or name another",
    error=StateFileError,
)
SLOW = 0.5  # seconds for a checkpoint that are too many to spend whenever they are due

Columns = Mapping[str, Tensor]  # of one stream; names such as "label", "trace.step" and "outputs.values"


@dataclass
class RunningError:
    """The error so far, over the images with labels."""

    wrong: int = 0
    labelled: int = 0

    def add(self, label: Tensor, prediction: Tensor) -> None:
        """Count the predictions of some images."""
        labelled = label >= 0
        self.wrong += int((label != prediction)[labelled].sum())
        self.labelled += int(labelled.sum())

    @property
    def share(self) -> float | None:
        """The error; None without labels."""
        return self.wrong / self.labelled if self.labelled else None


class RecordTable:
    """The columns of the records so far, from those after ``step`` batches on. It grows by whole batches."""

    def __init__(self, stream: Stream, start: Sequence[Columns], step: int = 0, outputs: Kind | None = None) -> None:
        self._stream, self._outputs = stream, outputs
        self._parts = [(step, start)]  # columns of each stream since the part before, and the step after them
        self.error = RunningError()
        for columns in start:
            self.error.add(columns["label"], columns["prediction"])

    def append(
        self,
        step: int,
        batch: Batch,
        output: Tensor,
        prediction: Tensor,
        confidence: Tensor,
        seconds: float,
        observed: Columns,
    ) -> None:
        """Add the valid images of a batch, the columns observed after it, (S,) each, and its outputs if they are kept.

        Outputs (S, B, K) are kept of all images of the batch.
        """
        rows: list[Columns] = []
        times = torch.full(batch.valid.shape[1:], seconds)
        for s, valid in enumerate(batch.valid):
            columns = {"domain": batch.domain[s], "label": batch.y[s], "prediction": prediction[s]}
            columns |= {"confidence": confidence[s].float(), "seconds": times}
            columns |= {name: values[s].expand(valid.shape) for name, values in observed.items()}
            row = {name: values[valid] for name, values in columns.items()}
            if self._outputs is not None:
                images = slice(0, _images(self._stream, s, step) - _images(self._stream, s, step - 1))
                row["outputs.values"] = output[s, images].to("cpu", copy=True)
                row["outputs.valid"] = valid[images]
            rows.append(row)
        held, new = (columns[0].get("outputs.values") for columns in (self._parts[-1][1], rows))
        if held is not None and new is not None and (held.shape[1:], held.dtype) != (new.shape[1:], new.dtype):
            raise StateFileError(
                f"the checkpoint holds outputs of {held.shape[1]} classes as {held.dtype}; this network gives "
                f"{new.shape[1]} as {new.dtype}: remove the checkpoint"
            )
        self._parts.append((step, rows))
        self.error.add(batch.y[batch.valid], prediction[batch.valid])

    def after(self, step: int) -> list[Columns]:
        """Return the columns of each stream after a step, without what an interrupted batch added."""
        done = [part for part in self._parts if part[0] <= step]
        columns: list[Columns] = []
        for tables in zip(*(tables for _, tables in done), strict=True):
            columns.append({name: torch.cat([t[name] for t in tables if name in t]) for name in tables[-1]})
        self._parts[: len(done)] = [(step, columns)]
        return columns

    def records(self, spec: Mapping[str, Any]) -> list[Record]:
        """Return a record for each stream."""
        records, stream = [], self._stream
        for s, columns in enumerate(self.after(len(stream))):
            parts: dict[str, dict[str, Any]] = defaultdict(dict)
            for name, values in columns.items():
                part, _, field = name.rpartition(".")
                parts[part][field] = values
            outputs = None
            if self._outputs is not None:
                cuts, reset = stream.cuts[s], stream.schedules[s].reset
                sizes = torch.tensor([cut.stop - cut.start for cut in cuts], dtype=torch.int64)
                resets = torch.tensor([bool(reset[cut.start]) for cut in cuts], dtype=torch.bool)
                outputs = Outputs(**parts["outputs"], sizes=sizes, reset=resets, kind=self._outputs)
            record = Record(
                **cast(Any, parts[""]),
                domains=stream.domains,
                classes=len(stream.dataset.classes),
                spec={**spec, "seed": stream.seeds[s]},
                outputs=outputs,
                watched=Watched(**parts["watched"], kinds=KINDS) if "watched" in parts else None,
                trace=Trace(**parts["trace"]) if "trace" in parts else None,
            )
            records.append(record)
        return records


def _images(stream: Stream, s: int, step: int) -> int:
    """Return the number of images of a stream after a step."""
    cuts = stream.cuts[s]
    return cuts[min(step, len(cuts)) - 1].stop if cuts and step else 0


@dataclass
class RunCheckpoint:
    """The file that a run resumes from."""

    path: Path
    identity: str  # a hash of all that the run depends on
    saved: int = 0  # batches in the file
    due: float = 0.0  # no checkpoint before this time

    def save_if_due(self, table: RecordTable, state: Any, step: int) -> None:
        """Save, unless the last save took long and was not long ago."""
        begun = time.perf_counter()
        if begun >= self.due:
            self.save(table, state, step)
            took = time.perf_counter() - begun
            self.due = time.perf_counter() + 10 * took if took > SLOW else 0.0

    def save(self, table: RecordTable, state: Any, step: int) -> None:
        """Write the state and the table after a step, atomically."""
        tensors = {f"state.{name}": t for name, t in leaves(state).items()}
        for s, columns in enumerate(table.after(step)):
            tensors |= {f"record.{s}.{name}": values for name, values in columns.items()}
        tensor_file.write(self.path, CHECKPOINT, {"step": step, "run": self.identity}, tensors)
        self.saved = step

    def save_or_warn(self, table: RecordTable, state: Any, step: int) -> None:
        """Save; a full disk must not hide that the user stopped the run."""
        try:
            self.save(table, state, step)
        except OSError as error:
            warnings.warn(f"{error}. The run goes on from batch {self.saved}, not {step}", stacklevel=3)

    def resume(
        self, source: Any, start: Sequence[Columns], stream: Stream, outputs: Kind | None
    ) -> tuple[Any, Sequence[Columns], int]:
        """Return state, columns of each stream and batches done, from the file; without one, those of the start."""
        if not self.path.exists():
            return clone(source), start, 0
        header, tensors = tensor_file.read(self.path, CHECKPOINT)
        step, batches = header["step"], len(stream)
        if header["run"] != self.identity:
            raise StateFileError(f"{self.path} is the checkpoint of another run. {CHECKPOINT.advice}")
        if step > batches:
            raise StateFileError(f"{self.path} is damaged: {step} of {batches} batches are done. {CHECKPOINT.advice}")
        if outputs is None:  # a run that kept outputs may go on without
            tensors = {name: t for name, t in tensors.items() if ".outputs." not in name}
        elif not any(".outputs." in name for name in tensors):
            raise StateFileError(f"{self.path} is of a run that did not keep outputs. {CHECKPOINT.advice}")
        like = {f"state.{name}": t for name, t in leaves(source).items()}
        for s, columns in enumerate(start):
            labels = tensors.get(f"record.{s}.label")
            rows = labels.shape if labels is not None and labels.dim() == 1 else (0,)
            like |= {f"record.{s}.{name}": empty.new_empty(rows) for name, empty in columns.items()}
            if outputs is not None:
                values = tensors.get("record.0.outputs.values", torch.empty(0, 0))  # of any precision, but all alike
                images = _images(stream, s, step)
                like[f"record.{s}.outputs.values"] = values.new_empty(images, *values.shape[1:])
                like[f"record.{s}.outputs.valid"] = torch.empty(images, dtype=torch.bool)
        tensor_file.check_like(self.path, CHECKPOINT, "the state and records of this run", tensors, like)
        state = rebuild(source, {name: tensors[f"state.{name}"].to(t.device) for name, t in leaves(source).items()})
        held: list[dict[str, Tensor]] = [{} for _ in start]
        for name, values in tensors.items():
            kind, _, place = name.partition(".")
            if kind == "record":
                number, _, column = place.partition(".")
                held[int(number)][column] = values
        self.saved = step
        return state, held, step
