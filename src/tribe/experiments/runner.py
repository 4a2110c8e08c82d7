"""The loop: play a stream through a method, and record its predictions.

The records grow in a `RecordTable`. With the state of the method, it is the checkpoint that a run resumes from.
"""

import hashlib
import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.kernels import Switch
from tribe.core.state import Info, clone, digest, leaves, rebuild, select, tree_map
from tribe.data.datasets import fingerprint, optional
from tribe.experiments.provenance import code_of, file_digest, is_custom
from tribe.experiments.realtime import ClockedSteps, Realtime
from tribe.experiments.record import FROM_INFO, Outputs, Record, Trace, Watched
from tribe.experiments.spec import ComponentSpec, describe
from tribe.experiments.stream import Batch, Stream
from tribe.health.alarms import KINDS
from tribe.io import tensors as tensor_file
from tribe.io.files import check_file
from tribe.io.json_files import Where
from tribe.io.states import StateFileError
from tribe.methods import AnyMethod, Method, Pipeline, check_fits
from tribe.methods.encoding import encode_fields, require_savable

AHEAD = 4  # batches that are read while a GPU computes: decoding takes turns with waiting for files

Progress = Callable[[int, int, float | None], None]  # batches done, in all, error so far (None without labels)
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


def run(
    net: Backbone,
    method: AnyMethod,
    stream: Stream,
    *,
    seed: int | Sequence[int] = 0,
    spec: Mapping[str, Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: int = 50,
    keep_checkpoint: bool = False,
    keep_outputs: bool = False,
    progress: Progress | None = None,
    graphs: Switch = "auto",
    deterministic: bool = False,
    realtime: Realtime | None = None,
) -> list[Record]:
    """Predict every stream, adapting on the way; return a record for each.

    Args:
        net: The frozen network, on its device.
        method: The method.
        stream: The images; labels go from its batches straight to the record.
        seed: Seed of the first stream's augmentation; stream i has seed + i. Or a seed for each stream.
        spec: All that this run depends on, as the records keep it: plain data, as JSON holds it. By default data set,
            network, scenario and method with all their fields, so that records of different runs can be distinguished.
        checkpoint: A file to resume from if it exists, and to write every ``every`` batches and on Ctrl-C; removed at
            the end.
        every: Batches between checkpoints; more where writing one takes over half a second (methods that adapt all
            weights of a large network keep a gigabyte), so that it never costs a tenth of the time.
        keep_checkpoint: Leave the last checkpoint at the end, for a caller who removes it once the records are written.
        keep_outputs: Keep the logits in the records: `tribe.experiments.replay` plays time filters over them.
        progress: Called after every batch.
        graphs: "auto" takes a step as one launch on a GPU where it can (see `tribe.core.graphs`); True insists on it.
        deterministic: The same bits every time on a GPU too, so that a resumed run equals one that never stopped.
        realtime: The stream does not wait: see `tribe.experiments.realtime`.
    """
    clock = {} if realtime is None else {"realtime": realtime.json()}
    given = {"method": {"name": getattr(method, "name", None)}, **(spec or {}), **clock}
    _check(net, method, stream, every, given)
    seeds = [seed + i for i in range(len(stream.seeds))] if isinstance(seed, int) else list(seed)
    source = _initial_state(net, method, len(stream.seeds), seeds)
    whole, real = torch.empty(0, dtype=torch.int64), torch.empty(0)
    empty = {"domain": whole, "label": whole, "prediction": whole, "confidence": real, "seconds": real}
    empty |= {name: values[:0] for name, values in _observe(method, net, source, 0).items()}
    columns: Sequence[Columns] = [empty] * len(stream.seeds)
    file, state, start = None, clone(source), 0
    if checkpoint is not None:
        require_savable(method)
        check_file(checkpoint)  # before the work, not after it
        file = RunCheckpoint(Path(checkpoint), _identity(net, method, stream, seeds, given))
        state, columns, start = file.resume(source, columns, stream, keep_outputs)
    table = RecordTable(stream, columns, start, keep_outputs)
    steps, retired = ClockedSteps(Steps(method, net, graphs, deterministic), stream, realtime), None
    pin = net.device.type == "cuda"  # from pinned memory the copy does not hold up the host
    finished = state, start  # after the last batch that was finished
    try:
        for step, batch in enumerate(stream.starting_at(start, pin=pin, ahead=AHEAD if pin else 1), start + 1):
            begun = time.perf_counter()
            x, valid, reset = (t.to(net.device, non_blocking=pin) for t in (batch.x, batch.valid, batch.reset))
            if batch.reset.any():
                state, retired = select(reset, clone(source), state), None  # a copy: its memory will be reused
            output, state, retired = steps(step - 1, state, x, valid, retired)  # retired memory serves the next step
            confidence, prediction = predictions(output)  # waits for the device: the time is the whole
            seconds = (time.perf_counter() - begun) / max(int(batch.valid.sum()), 1)
            table.append(step, batch, output, prediction, confidence, seconds, _observe(method, net, state, step))
            if progress is not None:
                progress(step, len(stream), table.error.share)
            finished = state, step
            if file is not None and step % every == 0:
                file.save_if_due(table, *finished)
    except KeyboardInterrupt:
        if file is not None and finished[1] > file.saved:
            file.save_or_warn(table, *finished)
        raise
    if file is not None and not keep_checkpoint:
        file.path.unlink(missing_ok=True)
    records = table.records(given if spec is not None else _described(net, method, stream) | clock)
    _warn_of_skipped(state, sum(len(record.label) for record in records))
    return records


def predictions(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest probability (S, B) of logits (S, B, K), and its class; both on the CPU."""
    confidence, prediction = (t.cpu() for t in logits.float().softmax(-1).max(-1))  # waits for the device
    return confidence, prediction


def _check(net: Backbone, method: AnyMethod, stream: Stream, every: int, spec: Mapping[str, Any]) -> None:
    """Refuse before the work what would fail during it, or what would mean other numbers."""
    for given, kinds, expected in (
        (net, Backbone, "a Backbone, such as tribe.Backbone(net)"),
        (method, Method | Pipeline, 'a Method, such as tribe.methods.create("tribe", classes=10)'),
    ):
        if not isinstance(given, kinds):
            raise TypeError(f"tribe.run takes {expected}; got {type(given).__name__}")
    if every < 1:
        raise ValueError(f"every is how many batches from one checkpoint to the next, at least 1; got {every}")
    for name, value in spec.items():
        try:
            json.dumps({name: value}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"spec is written as JSON, which cannot hold its {name!r} ({error}): give words, numbers, lists, dicts"
            ) from error
    check_fits(net, method)
    count, outputs = len(stream.dataset.classes), optional(stream.dataset, "outputs")
    if net.dense:
        raise ValueError("a run compares predictions with labels, and this network may return no logits: dense=True")
    if not count and len(stream.domains) == net.classes:
        warnings.warn(
            f"no image has a label, and the data set has as many domains as the network has classes, {net.classes}, "
            f"such as {stream.domains[0]!r}: if they are classes, as in an ImageFolder, name the folder above them",
            stacklevel=3,
        )
    if count and net.classes is not None and count != net.classes:  # its labels would mean other outputs
        hint = "" if outputs is None else ". net.restricted_to(dataset.outputs) keeps the outputs that are its classes"
        raise ValueError(f"the network has {net.classes} classes, but the data set has {count}{hint}")


def _initial_state(net: Backbone, method: AnyMethod, streams: int, seeds: Sequence[int]) -> Any:
    """Return the state before the first batch."""
    if len(seeds) != streams:
        raise ValueError(f"seed is one number, or one for each of {streams} streams; got {len(seeds)}")
    if list(seeds) == list(range(seeds[0], seeds[0] + streams)):
        return method.init(net, streams, seeds[0])
    return tree_map(lambda *parts: torch.cat(parts), *(method.init(net, 1, seed) for seed in seeds))


def _described(net: Backbone, method: AnyMethod, stream: Stream) -> dict[str, Any]:
    """Return the spec of a run, with the fields of an experiment as far as they can be read from its components."""
    code = code_of(*{type(m) for m in net.model.modules() if is_custom(type(m))}, strict=False)
    data, scenario, adapting = (
        describe(getattr(part, "name", type(part).__name__), part, strict=False).json()
        for part in (stream.dataset, stream.scenario, method)
    )
    return {
        "dataset": data,
        "images": fingerprint(stream.dataset),
        "model": ComponentSpec(type(net.model).__name__, {}, code).json(),
        "weights": net.fingerprint(),
        "scenario": scenario,
        "method": adapting,
        "batch": stream.batch,
    }


def _identity(net: Backbone, method: AnyMethod, stream: Stream, seeds: Sequence[int], spec: Mapping[str, Any]) -> str:
    """Return a hash of all that a run depends on: the checkpoint of another run is refused."""
    facts = {
        "images": spec["images"] if "images" in spec else fingerprint(stream.dataset),
        "weights": spec["weights"] if "weights" in spec else net.fingerprint(),
        "precision": str(net.dtype),
        "method": [method.name, encode_fields(method)],
        "code": [file_digest(type(part)) for part in (*Pipeline.of(method).parts, stream.scenario, stream.dataset)],
        "seeds": seeds,
        "batch": stream.batch,
        "schedules": [digest(schedule) for schedule in stream.schedules],
        "spec": spec,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _observe(method: AnyMethod, net: Backbone, state: Any, step: int) -> dict[str, Tensor]:
    """Return the columns of `Watched` and `Trace` after a step, (S,) each, as far as there are any."""
    columns: dict[str, Tensor] = {}
    if isinstance(method, Pipeline) and method.guard is not None:
        watcher, watch = method.guard.watcher(net, method.method), state.guard.watch
        read = watcher.read(watch)
        shares = torch.stack((read.accuracy, read.low, read.high)).float().cpu()
        if watcher.normal is None:  # an estimate needs a calibration
            shares = torch.full_like(shares, math.nan)
        alarms = (watch.alarms.on.cpu() * 2 ** torch.arange(len(KINDS))).sum(1)
        names = ("accuracy", "low", "high", "alarms")
        columns |= {f"watched.{name}": values for name, values in zip(names, (*shares, alarms), strict=True)}
    if isinstance(info := getattr(state, "info", None), Info):
        values = torch.stack([getattr(info, name).float() for name in FROM_INFO]).cpu()  # one copy from the device
        columns["trace.step"] = torch.full(values.shape[1:], step)
        columns |= {f"trace.{name}": column for name, column in zip(FROM_INFO, values, strict=True)}
    return columns


def _warn_of_skipped(state: Any, images: int) -> None:
    """Warn of images that the method could not use: their predictions are uniform, which shows as an error only."""
    info = getattr(state, "info", None)
    skipped = int(info.skipped.sum()) if isinstance(info, Info) else 0
    if skipped:
        warnings.warn(
            f"{skipped:,} of {images:,} images were skipped: their predictions, or what was learned from them, are "
            "not finite. Such predictions are uniform instead, and the method keeps its state",
            stacklevel=3,
        )


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

    def __init__(self, stream: Stream, start: Sequence[Columns], step: int = 0, keep_outputs: bool = False) -> None:
        self._stream, self._keeps = stream, keep_outputs
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
            if self._keeps:
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
            if self._keeps:
                cuts, reset = stream.cuts[s], stream.schedules[s].reset
                sizes = torch.tensor([cut.stop - cut.start for cut in cuts], dtype=torch.int64)
                resets = torch.tensor([bool(reset[cut.start]) for cut in cuts], dtype=torch.bool)
                outputs = Outputs(**parts["outputs"], sizes=sizes, reset=resets)
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
        self, source: Any, start: Sequence[Columns], stream: Stream, keep_outputs: bool
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
        if not keep_outputs:  # a run that kept outputs may go on without
            tensors = {name: t for name, t in tensors.items() if ".outputs." not in name}
        elif not any(".outputs." in name for name in tensors):
            raise StateFileError(f"{self.path} is of a run that did not keep outputs. {CHECKPOINT.advice}")
        like = {f"state.{name}": t for name, t in leaves(source).items()}
        for s, columns in enumerate(start):
            labels = tensors.get(f"record.{s}.label")
            rows = labels.shape if labels is not None and labels.dim() == 1 else (0,)
            like |= {f"record.{s}.{name}": empty.new_empty(rows) for name, empty in columns.items()}
            if keep_outputs:
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
