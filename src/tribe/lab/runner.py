"""The loop: play a stream through a method and write down what it said."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tribe.datasets.fingerprint import fingerprint
from tribe.engine.backbone import Backbone
from tribe.engine.graphs import Steps, Switch
from tribe.engine.state import clone, digest, leaves, rebuild, select
from tribe.lab.provenance import code_of, coded, is_own
from tribe.lab.record import Record
from tribe.lab.spec import describe
from tribe.lab.stream import Stream
from tribe.methods import Method, check_fits
from tribe.methods.encoding import encode_fields
from tribe.storage import tensors as tensor_file
from tribe.storage.states import StateFileError

CHECKPOINT = tensor_file.Kind(
    "tribe-run",
    1,
    {"step": int, "run": str},
    noun="checkpoint of a run",
    advice="Remove it, or name another",
    error=StateFileError,
)
SLOW = 0.5  # seconds for a checkpoint that are too many to spend whenever they are due

Progress = Callable[[int, int, float | None], None]  # batches done, in all, error so far (None without labels)


def run(
    net: Backbone,
    method: Method,
    stream: Stream,
    *,
    seed: int = 0,
    spec: Mapping[str, Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every: int = 50,
    keep_checkpoint: bool = False,
    progress: Progress | None = None,
    graphs: Switch = "auto",
    deterministic: bool = False,
) -> list[Record]:
    """Predict every stream, adapting on the way: a record each.

    Args:
        net: the frozen network, on its device.
        method: what adapts.
        stream: the images; labels go from its batches straight to the record.
        seed: seed of the first stream's augmentation; stream i has seed + i.
        spec: words about how this was made, kept in the records: plain data, as JSON holds it. By default data set,
            network, scenario and method with all their fields, so that records of different runs can be told apart.
        checkpoint: a file to go on from if it exists, and to write every ``every`` batches, and when the run is stopped
            by hand (Ctrl-C); removed at the end.
        every: batches between checkpoints; more where writing one takes over half a second (methods that adapt all
            weights of a large network keep a gigabyte), so that it never costs a tenth of the time.
        keep_checkpoint: leave the last checkpoint there at the end, for who removes it once the records are written.
        progress: called after every batch.
        graphs: "auto" takes a step as one launch on a GPU where it can (see `tribe.engine.graphs`); True insists on it.
        deterministic: the same bits every time on a GPU too, so that a resumed run equals one that never stopped.
    """
    for given, kind, how in (
        (net, Backbone, "tribe.Backbone(net)"),
        (method, Method, 'tribe.methods.create("tribe", classes=10)'),
    ):
        if not isinstance(given, kind):
            raise TypeError(f"tribe.run takes a {kind.__name__}, such as {how}; got {type(given).__name__}")
    if every < 1:
        raise ValueError(f"every is how many batches from one checkpoint to the next, at least 1; got {every}")
    named = {"method": method.name, **(spec or {})}
    _check_plain(named)
    streams = len(stream.seeds)
    check_fits(net, method)
    source = method.init(net, streams, seed)
    words = named if spec is not None else named | _described(net, method, stream)
    identity = _identity(net, method, stream, seed, named) if checkpoint is not None else ""
    state, columns, start = clone(source), _nothing(streams), 0
    steps, retired = Steps(method, net, graphs, deterministic), None
    if checkpoint is not None and Path(checkpoint).exists():
        state, columns, start = _resume(checkpoint, source, identity)
    wrong, judged = _tally((column["label"][0], column["prediction"][0]) for column in columns)
    due = 0.0  # no checkpoint before this time
    pin = net.device.type == "cuda"  # from pinned memory the copy does not hold up the host
    written = [sum(map(len, column["label"])) for column in columns]  # rows of each record
    whole, saved = (state, written, start), start  # after the last batch that was finished; and what is on the disk
    try:
        for step, batch in enumerate(stream.starting_at(start, pin=pin), start):
            begun = time.perf_counter()
            x, valid, reset = (t.to(net.device, non_blocking=pin) for t in (batch.x, batch.valid, batch.reset))
            if batch.reset.any():
                state, retired = select(reset, clone(source), state), None  # a copy: its memory will be reused
            old, (output, state) = state, steps(state, x, valid, retired)
            retired = old  # its memory serves the step after next
            p = output if method.output == "probabilities" else output.float().softmax(-1)
            confidence, prediction = (t.cpu() for t in p.max(-1))  # waits for the device, so that the time is the whole
            seconds = (time.perf_counter() - begun) / max(int(batch.valid.sum()), 1)
            for s, column in enumerate(columns):
                here = batch.valid[s]
                times = torch.full(here.shape, seconds)
                rows = (batch.domain[s], batch.y[s], prediction[s], confidence[s].float(), times)
                for name, values in zip(column, rows, strict=True):
                    column[name].append(values[here])
            if progress is not None:
                tally = _tally([(batch.y[batch.valid], prediction[batch.valid])])
                wrong, judged = wrong + tally[0], judged + tally[1]
                progress(step + 1, len(stream), wrong / judged if judged else None)
            written = [n + int(here.sum()) for n, here in zip(written, batch.valid, strict=True)]
            whole = state, written, step + 1
            if checkpoint is not None and (step + 1) % every == 0 and time.perf_counter() >= due:
                asked = time.perf_counter()
                _save(checkpoint, columns, *whole, identity)
                saved = step + 1
                took = time.perf_counter() - asked
                due = time.perf_counter() + 10 * took if took > SLOW else 0.0
    except KeyboardInterrupt:
        if checkpoint is not None and whole[2] > saved:
            _save(checkpoint, columns, *whole, identity)
        raise
    if checkpoint is not None and not keep_checkpoint:
        Path(checkpoint).unlink(missing_ok=True)
    domains, classes = stream.domains, len(stream.dataset.classes)
    return [
        Record(
            **{n: torch.cat(v) for n, v in column.items()}, domains=domains, classes=classes, spec=words | {"seed": s}
        )
        for column, s in zip(columns, stream.seeds, strict=True)
    ]


def _described(net: Backbone, method: Method, stream: Stream) -> dict[str, Any]:
    """How a run is made, in the words of `tribe run`."""
    code = code_of(*{type(m) for m in net.model.modules() if is_own(type(m))}, strict=False)
    data, scenario = (
        describe(getattr(part, "name", type(part).__name__), part, strict=False).json()
        for part in (stream.dataset, stream.scenario)
    )
    fields = describe(method.name, method, strict=False).json()
    del fields["name"]
    return {
        "dataset": data | {"fingerprint": fingerprint(stream.dataset)},
        "model": {"name": type(net.model).__name__, "fields": {}, **coded(code), "fingerprint": net.fingerprint()},
        "scenario": scenario,
        "batch": stream.batch,
        **fields,
    }


def _check_plain(words: Mapping[str, Any]) -> None:
    """Refuse before the work words that neither a record nor a checkpoint could be written with."""
    for name, value in words.items():
        try:
            json.dumps({name: value}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"spec is kept in files as JSON, which cannot hold its {name!r} ({error}): give plain data, such as "
                "words, numbers, lists and dicts"
            ) from error


def _tally(rows: Iterable[tuple[Tensor, Tensor]]) -> tuple[int, int]:
    """Of labels and predictions: how many are wrong, and how many can be judged."""
    pairs = [(label[label >= 0], prediction[label >= 0]) for label, prediction in rows]
    return sum(int((y != p).sum()) for y, p in pairs), sum(len(y) for y, _ in pairs)


Columns = list[dict[str, list[Tensor]]]  # per stream, per column of the record, per batch


def _nothing(streams: int) -> Columns:
    integers, reals = torch.empty(0, dtype=torch.int64), torch.empty(0)
    start = {"domain": integers, "label": integers, "prediction": integers, "confidence": reals, "seconds": reals}
    return [{name: [values] for name, values in start.items()} for _ in range(streams)]


def _identity(net: Backbone, method: Method, stream: Stream, seed: int, words: Mapping[str, Any]) -> str:
    """All that makes a run what it is, so that a checkpoint of another is never taken for its own."""
    facts = {
        **words,
        "fields": encode_fields(method),
        "seed": seed,
        "batch": stream.batch,
        "schedules": [digest(schedule) for schedule in stream.schedules],
        "images": fingerprint(stream.dataset),
        "network": net.fingerprint(),
    }
    return json.dumps(facts, sort_keys=True)


def _save(
    path: str | PathLike[str], columns: Columns, state: Any, rows: Sequence[int], step: int, identity: str
) -> None:
    """Write a checkpoint; of the columns only these rows, as a batch that was interrupted may have added some."""
    tensors = {f"state.{name}": t for name, t in leaves(state).items()}
    for s, column in enumerate(columns):
        for name, parts in column.items():
            parts[:] = [torch.cat(parts)[: rows[s]]]
            tensors[f"record.{s}.{name}"] = parts[0]
    tensor_file.write(path, CHECKPOINT, {"step": step, "run": identity}, tensors)


def _resume(path: str | PathLike[str], like: Any, identity: str) -> tuple[Any, Columns, int]:
    header, tensors = tensor_file.read(path, CHECKPOINT)
    if header["run"] != identity:
        raise StateFileError(f"{path} is the checkpoint of another run ({header['run']}); remove it or name another")
    named = {name: tensors[f"state.{name}"].to(t.device) for name, t in leaves(like).items()}
    streams = len(like.key.seed)
    columns = [{n: [tensors[f"record.{s}.{n}"]] for n in _nothing(1)[0]} for s in range(streams)]
    return rebuild(like, named), columns, header["step"]
