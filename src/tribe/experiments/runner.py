"""The loop: play a stream through a method, and record its predictions."""

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.kernels import Switch
from tribe.core.state import Info, clone, digest, leaves, rebuild, select, tree_map
from tribe.data.datasets import fingerprint, optional
from tribe.experiments import trace, watched
from tribe.experiments.outputs import OutputTable, predictions
from tribe.experiments.provenance import code_of, coded, is_own
from tribe.experiments.record import Record
from tribe.experiments.sources import digest_of
from tribe.experiments.spec import describe
from tribe.experiments.stream import Batch, Stream
from tribe.health.alarms import KINDS
from tribe.io import tensors as tensor_file
from tribe.io.files import check_file
from tribe.io.json_files import Where
from tribe.io.states import StateFileError
from tribe.methods import AnyMethod, Method, Pipeline, check_fits
from tribe.methods.encoding import encode_fields

CHECKPOINT = tensor_file.Kind(
    "tribe-run",
    1,
    {"step": Where(int, lambda step: step >= 0, "a number of batches"), "run": str},
    noun="checkpoint of a run",
    advice="Remove it, or name another",
    error=StateFileError,
)
AHEAD = 4  # batches that are read while a GPU computes: decoding takes turns with waiting for files
WATCHED = "watched."  # the names of columns of tribe.experiments.watched begin with it
TRACED = "trace."  # and those of tribe.experiments.trace with this
SLOW = 0.5  # seconds for a checkpoint that are too many to spend whenever they are due

Progress = Callable[[int, int, float | None], None]  # batches done, in all, error so far (None without labels)


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
) -> list[Record]:
    """Predict every stream, adapting on the way; return a record for each.

    Args:
        net: the frozen network, on its device.
        method: what adapts.
        stream: the images; labels go from its batches straight to the record.
        seed: seed of the first stream's augmentation; stream i has seed + i. Or a seed for each stream.
        spec: how this run is made, kept in the records: plain data, as JSON holds it. By default data set, network,
            scenario and method with all their fields, so that records of different runs can be distinguished.
        checkpoint: a file to resume from if it exists, and to write every ``every`` batches and on Ctrl-C; removed at
            the end.
        every: batches between checkpoints; more where writing one takes over half a second (methods that adapt all
            weights of a large network keep a gigabyte), so that it never costs a tenth of the time.
        keep_checkpoint: leave the last checkpoint at the end, for a caller who removes it once the records are written.
        keep_outputs: keep the logits in the records: `tribe.experiments.replay` plays time filters over it.
        progress: called after every batch.
        graphs: "auto" takes a step as one launch on a GPU where it can (see `tribe.core.graphs`); True insists on it.
        deterministic: the same bits every time on a GPU too, so that a resumed run equals one that never stopped.
    """
    _check_arguments(net, method, every)
    named = {"method": {"name": method.name}, **(spec or {})}
    _check_plain(named)
    check_fits(net, method)
    _check_classes(net, stream)
    seed = _first_or_all(seed, len(stream.seeds))
    source = _initial_state(net, method, len(stream.seeds), seed)
    words = named if spec is not None else _described(net, method, stream)
    outputs = OutputTable(stream, method.output) if keep_outputs else None
    file = None if checkpoint is None else _Checkpoint(checkpoint, _identity(net, method, stream, seed, named), outputs)
    table = _Table(len(stream.seeds), _look(method, net, source, 0))
    state, table, start = (clone(source), table, 0) if file is None else file.resume(source, table, len(stream))
    steps, retired = Steps(method, net, graphs, deterministic), None
    pin = net.device.type == "cuda"  # from pinned memory the copy does not hold up the host
    finished = state, table.rows(), start  # after the last batch that was finished
    try:
        for step, batch in enumerate(stream.starting_at(start, pin=pin, ahead=AHEAD if pin else 1), start + 1):
            begun = time.perf_counter()
            x, valid, reset = (t.to(net.device, non_blocking=pin) for t in (batch.x, batch.valid, batch.reset))
            if batch.reset.any():
                state, retired = select(reset, clone(source), state), None  # a copy: its memory will be reused
            old, (output, state) = state, steps(state, x, valid, retired)
            retired = old  # its memory serves the step after next
            confidence, prediction = predictions(output, method.output)  # waits for the device: the time is the whole
            seconds = (time.perf_counter() - begun) / max(int(batch.valid.sum()), 1)
            table.append(batch, prediction, confidence, seconds, _look(method, net, state, step))
            if outputs is not None:
                outputs.append(step, output, batch.valid)
            if progress is not None:
                progress(step, len(stream), table.error())
            finished = state, table.rows(), step
            if file is not None and step % every == 0:
                file.save_if_due(table, *finished)
    except KeyboardInterrupt:
        if file is not None and finished[2] > file.saved:
            file.save_or_warn(table, *finished)
        raise
    if file is not None and not keep_checkpoint:
        file.path.unlink(missing_ok=True)
    _warn_of_skipped(state, table.rows())
    records = table.records(stream, words)
    if outputs is None:
        return records
    return [record._replace(outputs=kept) for record, kept in zip(records, outputs.of_streams(), strict=True)]


def _check_arguments(net: Backbone, method: AnyMethod, every: int) -> None:
    for given, kinds, expected in (
        (net, Backbone, "a Backbone, such as tribe.Backbone(net)"),
        (method, Method | Pipeline, 'a Method, such as tribe.methods.create("tribe", classes=10)'),
    ):
        if not isinstance(given, kinds):
            raise TypeError(f"tribe.run takes {expected}; got {type(given).__name__}")
    if every < 1:
        raise ValueError(f"every is how many batches from one checkpoint to the next, at least 1; got {every}")


def _first_or_all(seed: int | Sequence[int], streams: int) -> int | list[int]:
    """The first seed if those of all streams are consecutive, else all."""
    if isinstance(seed, int):
        return seed
    if len(seed) != streams:
        raise ValueError(f"seed is one number, or one for each of {streams} streams; got {len(seed)}")
    return seed[0] if list(seed) == list(range(seed[0], seed[0] + streams)) else list(seed)


def _initial_state(net: Backbone, method: AnyMethod, streams: int, seed: int | Sequence[int]) -> Any:
    """The state before the first batch, with the seeds of all streams."""
    if isinstance(seed, int):
        return method.init(net, streams, seed)
    return tree_map(lambda *parts: torch.cat(parts), *(method.init(net, 1, one) for one in seed))


def _check_classes(net: Backbone, stream: Stream) -> None:
    """Refuse a data set with other classes than the network: its labels would mean other outputs."""
    known, outputs = len(stream.dataset.classes), optional(stream.dataset, "outputs")
    if net.dense:
        raise ValueError("a run compares predictions with labels, and this network may return no logits: dense=True")
    if not known and len(stream.domains) == net.classes:
        warnings.warn(
            f"no image has a label, and the data set has as many domains as the network has classes, {net.classes}, "
            f"such as {stream.domains[0]!r}: if they are classes, as in an ImageFolder, name the folder above them",
            stacklevel=3,
        )
    if known and net.classes is not None and known != net.classes:
        hint = "" if outputs is None else ". net.restricted_to(dataset.outputs) keeps the outputs that are its classes"
        raise ValueError(f"the network tells {net.classes} classes apart, but the data set has {known}{hint}")


def _described(net: Backbone, method: AnyMethod, stream: Stream) -> dict[str, Any]:
    """The spec of a run, with the fields of an experiment as far as they are known here."""
    code = code_of(*{type(m) for m in net.model.modules() if is_own(type(m))}, strict=False)
    data, scenario, adapting = (
        describe(getattr(part, "name", type(part).__name__), part, strict=False).json()
        for part in (stream.dataset, stream.scenario, method)
    )
    return {
        "dataset": data,
        "images": fingerprint(stream.dataset),
        "model": {"name": type(net.model).__name__, "fields": {}, **coded(code)},
        "weights": net.fingerprint(),
        "scenario": scenario,
        "method": adapting,
        "batch": stream.batch,
    }


def _check_plain(words: Mapping[str, Any]) -> None:
    """Refuse a spec that no record or checkpoint can hold, before the work."""
    for name, value in words.items():
        try:
            json.dumps({name: value}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"spec is kept in files as JSON, which cannot hold its {name!r} ({error}): give plain data, such as "
                "words, numbers, lists and dicts"
            ) from error


def _identity(
    net: Backbone, method: AnyMethod, stream: Stream, seed: int | Sequence[int], words: Mapping[str, Any]
) -> str:
    """All that a run depends on: the checkpoint of another run is refused."""
    facts = {
        **words,
        "fields": encode_fields(method),
        "seed": seed,
        "batch": stream.batch,
        "schedules": [digest(schedule) for schedule in stream.schedules],
        "images": fingerprint(stream.dataset),
        "network": net.fingerprint(),
        "code": digest_of(*map(type, Pipeline.of(method).parts), type(stream.scenario), type(stream.dataset)),
    }
    return json.dumps(facts, sort_keys=True)


def _look(method: AnyMethod, net: Backbone, state: Any, step: int) -> dict[str, Tensor]:
    """What is known of each stream after a step, (S,) each, by the names of columns."""
    parts = {WATCHED: watched.look(method, net, state), TRACED: trace.look(state, step)}
    return {f"{prefix}{name}": values for prefix, seen in parts.items() for name, values in (seen or {}).items()}


def _warn_of_skipped(state: Any, rows: Sequence[int]) -> None:
    """Say how many images a method could not use: their predictions are uniform, which shows as an error only."""
    info = getattr(state, "info", None)
    skipped = int(info.skipped.sum()) if isinstance(info, Info) else 0
    if skipped:
        warnings.warn(
            f"{skipped:,} of {sum(rows):,} images were skipped: their predictions, or what was learned from them, are "
            "not finite. Such predictions are uniform instead, and the method keeps its state",
            stacklevel=3,
        )


class _Table:
    """The columns of the records so far.

    Args:
        streams: how many records there will be.
        seen: a first look at the streams, whose columns the table has, too.
    """

    def __init__(self, streams: int, seen: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        whole, real = torch.empty(0, dtype=torch.int64), torch.empty(0)
        start = {"domain": whole, "label": whole, "prediction": whole, "confidence": real, "seconds": real}
        start |= {name: values[:0] for name, values in seen.items()}
        self.columns = [{name: [values] for name, values in start.items()} for _ in range(streams)]
        self._rows = [0] * streams
        self._wrong = self._labelled = 0

    @staticmethod
    def of(columns: Sequence[Mapping[str, Tensor]]) -> "_Table":
        """The table with these columns."""
        table = _Table(len(columns))
        table.columns = [{name: [values] for name, values in column.items()} for column in columns]
        table._rows = [len(column["label"]) for column in columns]
        for column in columns:
            table._count(column["label"], column["prediction"])
        return table

    def append(
        self,
        batch: Batch,
        prediction: Tensor,
        confidence: Tensor,
        seconds: float,
        seen: Mapping[str, Tensor],
    ) -> None:
        """Add the valid images of a batch, and what was ``seen`` of each stream after it, (S,) each."""
        for s, column in enumerate(self.columns):
            valid = batch.valid[s]
            times = torch.full(valid.shape, seconds)
            later = (values[s].expand(valid.shape) for values in seen.values())
            rows = (batch.domain[s], batch.y[s], prediction[s], confidence[s].float(), times, *later)
            for name, values in zip(column, rows, strict=True):
                column[name].append(values[valid])
            self._rows[s] += int(valid.sum())
        self._count(batch.y[batch.valid], prediction[batch.valid])

    def _count(self, label: Tensor, prediction: Tensor) -> None:
        known = label >= 0
        self._wrong += int((label != prediction)[known].sum())
        self._labelled += int(known.sum())

    def error(self) -> float | None:
        """The error so far; None without labels."""
        return self._wrong / self._labelled if self._labelled else None

    def rows(self) -> tuple[int, ...]:
        """The number of images of each stream."""
        return tuple(self._rows)

    def cut(self, rows: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """All columns by name, without what an interrupted batch added after these rows."""
        for s, column in enumerate(self.columns):
            for name, parts in column.items():
                parts[:] = [torch.cat(parts)[: rows[s]]]
                yield f"{s}.{name}", parts[0]

    def records(self, stream: Stream, spec: Mapping[str, Any]) -> list[Record]:
        """A record for each stream."""
        domains, classes = stream.domains, len(stream.dataset.classes)
        records = []
        for column, seed in zip(self.columns, stream.seeds, strict=True):
            whole = {name: torch.cat(parts) for name, parts in column.items()}
            seen, traced = (
                {name.removeprefix(prefix): whole.pop(name) for name in column if name.startswith(prefix)}
                for prefix in (WATCHED, TRACED)
            )
            record = Record(
                **cast(Any, whole),
                domains=domains,
                classes=classes,
                spec={**spec, "seed": seed},
                watched=watched.Watched(**seen, kinds=KINDS) if seen else None,
                trace=trace.Trace(**traced) if traced else None,
            )
            records.append(record)
        return records


class _Checkpoint:
    """The file that a run resumes from."""

    def __init__(self, path: str | PathLike[str], identity: str, outputs: OutputTable | None = None) -> None:
        check_file(path)  # before the work, not after it
        self.path, self._identity, self._outputs = Path(path), identity, outputs
        self.saved = 0  # batches in the file
        self._due = 0.0  # no checkpoint before this time

    def save_if_due(self, table: _Table, state: Any, rows: Sequence[int], step: int) -> None:
        """Save, unless the last save took long and was not long ago."""
        begun = time.perf_counter()
        if begun >= self._due:
            self.save(table, state, rows, step)
            took = time.perf_counter() - begun
            self._due = time.perf_counter() + 10 * took if took > SLOW else 0.0

    def save(self, table: _Table, state: Any, rows: Sequence[int], step: int) -> None:
        """Write the state, and the first rows of the table, atomically."""
        tensors = {f"state.{name}": t for name, t in leaves(state).items()}
        tensors |= {f"record.{name}": column for name, column in table.cut(rows)}
        if self._outputs is not None:
            tensors |= {f"outputs.{name}": kept for name, kept in self._outputs.cut(step)}
        tensor_file.write(self.path, CHECKPOINT, {"step": step, "run": self._identity}, tensors)
        self.saved = step

    def save_or_warn(self, table: _Table, state: Any, rows: Sequence[int], step: int) -> None:
        """Save; a full disk must not hide that the user stopped the run."""
        try:
            self.save(table, state, rows, step)
        except OSError as error:
            warnings.warn(f"{error}. The run goes on from batch {self.saved}, not {step}", stacklevel=3)

    def resume(self, source: Any, start: _Table, batches: int) -> tuple[Any, _Table, int]:
        """State, table and batches done of so many: those of the file or, without one, of the start."""
        if not self.path.exists():
            return clone(source), start, 0
        header, tensors = tensor_file.read(self.path, CHECKPOINT)
        if header["run"] != self._identity:
            raise StateFileError(
                f"{self.path} is the checkpoint of another run ({header['run']}); remove it or name another"
            )
        if header["step"] > batches:
            raise StateFileError(
                f"{self.path} is damaged: it says that {header['step']} of {batches} batches are done. "
                f"{CHECKPOINT.advice}"
            )
        outputs = {name.removeprefix("outputs."): t for name, t in tensors.items() if name.startswith("outputs.")}
        if self._outputs is not None and not outputs:
            raise StateFileError(
                f"{self.path} is of a run that did not keep what the method returned. {CHECKPOINT.advice}"
            )
        if self._outputs is None:  # a run that kept outputs may go on without
            tensors = {name: t for name, t in tensors.items() if not name.startswith("outputs.")}
        self._check(
            tensors, source, start, {} if self._outputs is None else self._outputs.like(header["step"], outputs)
        )
        if self._outputs is not None:
            self._outputs.resume(outputs)
        state = rebuild(source, {name: tensors[f"state.{name}"].to(t.device) for name, t in leaves(source).items()})
        rows = enumerate(start.columns)
        table = _Table.of([{name: tensors[f"record.{s}.{name}"] for name in column} for s, column in rows])
        self.saved = header["step"]
        return state, table, self.saved

    def _check(self, tensors: Mapping[str, Tensor], source: Any, start: _Table, outputs: Mapping[str, Tensor]) -> None:
        """Refuse tensors that are not a state like the source's, outputs, and columns of equal length."""
        like = {f"outputs.{name}": t for name, t in outputs.items()}
        like |= {f"state.{name}": t for name, t in leaves(source).items()}
        for s, columns in enumerate(start.columns):
            labels = tensors.get(f"record.{s}.label")
            rows = labels.shape if labels is not None and labels.dim() == 1 else (0,)
            like |= {f"record.{s}.{name}": empty.new_empty(rows) for name, (empty,) in columns.items()}
        tensor_file.check_like(self.path, CHECKPOINT, "the state and records of this run", tensors, like)
