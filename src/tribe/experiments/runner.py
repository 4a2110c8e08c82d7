"""The loop: play a stream through a method, and record its predictions."""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.graphs import Steps
from tribe.core.kernels import Switch
from tribe.core.state import Info, clone, digest, select, tree_map
from tribe.data.datasets import fingerprint, optional
from tribe.experiments.provenance import code_of, file_digest, is_custom
from tribe.experiments.record import FROM_INFO, Kind, Record
from tribe.experiments.spec import ComponentSpec, describe
from tribe.experiments.stream import Stream
from tribe.experiments.table import Columns, RecordTable, RunCheckpoint
from tribe.health.alarms import KINDS
from tribe.io.files import check_file
from tribe.methods import AnyMethod, Method, Pipeline, check_fits
from tribe.methods.encoding import encode_fields

AHEAD = 4  # batches that are read while a GPU computes: decoding takes turns with waiting for files

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
    """
    given = {"method": {"name": getattr(method, "name", None)}, **(spec or {})}
    _check(net, method, stream, every, given)
    seeds = [seed + i for i in range(len(stream.seeds))] if isinstance(seed, int) else list(seed)
    source = _initial_state(net, method, len(stream.seeds), seeds)
    outputs = method.output if keep_outputs else None
    whole, real = torch.empty(0, dtype=torch.int64), torch.empty(0)
    empty = {"domain": whole, "label": whole, "prediction": whole, "confidence": real, "seconds": real}
    empty |= {name: values[:0] for name, values in _observe(method, net, source, 0).items()}
    columns: Sequence[Columns] = [empty] * len(stream.seeds)
    file, state, start = None, clone(source), 0
    if checkpoint is not None:
        check_file(checkpoint)  # before the work, not after it
        file = RunCheckpoint(Path(checkpoint), _identity(net, method, stream, seeds, given))
        state, columns, start = file.resume(source, columns, stream, outputs)
    table = RecordTable(stream, columns, start, outputs)
    steps, retired = Steps(method, net, graphs, deterministic), None
    pin = net.device.type == "cuda"  # from pinned memory the copy does not hold up the host
    finished = state, start  # after the last batch that was finished
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
    records = table.records(given if spec is not None else _described(net, method, stream))
    _warn_of_skipped(state, sum(len(record.label) for record in records))
    return records


def predictions(output: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the largest probability (S, B) of a method's output (S, B, K), and its class; both on the CPU."""
    p = output if kind == "probabilities" else output.float().softmax(-1)
    confidence, prediction = (t.cpu() for t in p.max(-1))  # waits for the device
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
        read = watcher.estimator.read(watch.estimate)
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
