"""The store: the results of experiments on disk.

A folder of results, such as ``runs`` or ``results``, holds

    <data set>-<device>.jsonl           the results, one line for each stream:
        {"id": Experiment.id, "seed": ..., "spec": Experiment.json(), "metrics": {...}, "environment": {...}}
        metrics: `tribe.experiments.metrics.scores` of the record
        environment: {"machine": provenance.machine(), "seconds_per_image", "finished": ISO time, "commit", "clean",
            "code": {"method": digest of its file, ...}, "command"}: what may differ between two computations
    <id>/record-<seed>.npz              the `tribe.Record` of each stream, unless only the numbers were kept
    <id>/checkpoint.safetensors         until its streams are done: where to resume

Lines are added at the end of a file, under a lock; of several lines of one stream the last counts. A line that is
damaged, such as one that a killed process did not finish, is left out with a warning, and computed again.
"""

import contextlib
import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from tribe import methods
from tribe.data import datasets, models, scenarios
from tribe.experiments.experiment import COMPONENTS, Experiment
from tribe.experiments.provenance import file_digest
from tribe.experiments.record import Record
from tribe.io import json_files
from tribe.io.files import exclusive, open_plain

PACK = ".jsonl"
CHECKPOINT = "checkpoint.safetensors"
CLASS_OF: dict[str, Callable[[str], Any]] = {
    "dataset": datasets.get,
    "model": lambda name: type(models.architecture(name)),
    "scenario": scenarios.get,
    "method": methods.get,
}

COUNT = json_files.Where(int, lambda count: 0 <= count < 2**53, "a number of images")
SHARE = json_files.Where(float, lambda share: -1e-6 <= share <= 1 + 1e-6, "a share, from 0 to 1")
SECONDS = json_files.Where(float, lambda seconds: 0 <= seconds < 1e12, "a time in seconds")
ERRORS = ("instance_error", "category_error", "category_error_absent_correct", "calibration_error")
LINE = {
    "id": str,
    "seed": int,
    "spec": dict,
    "metrics": {
        "images": COUNT,
        **dict.fromkeys(ERRORS, (SHARE, None)),
        "domain_error": {...: (SHARE, None)},
        "class_counts": {...: [COUNT]},
    },
    "environment": {
        "machine?": dict,
        "seconds_per_image?": (SECONDS, None),
        "finished?": str,
        "code?": {...: str},
        "command?": [str],
        "commit?": str,
    },
}


class StreamResult(NamedTuple):
    """The result of one stream of an experiment."""

    metrics: Mapping[str, Any]
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """The result of an experiment: one stream for each of its seeds."""

    experiment: Experiment
    root: Path
    streams: Mapping[int, StreamResult]  # by seed, in the order of the experiment's seeds
    memory: Mapping[int, Record] = field(default_factory=dict, compare=False, repr=False)  # records of this process

    @property
    def folder(self) -> Path:
        """The folder of its records."""
        return self.root / self.experiment.id

    @property
    def metrics(self) -> dict[int, Mapping[str, Any]]:
        """The metrics by seed."""
        return {seed: stream.metrics for seed, stream in self.streams.items()}

    @property
    def environment(self) -> Mapping[str, Any]:
        """The environment of its first stream."""
        return next(iter(self.streams.values())).environment

    @property
    def has_records(self) -> bool:
        """Whether there is a record of each stream, beside the metrics."""
        return all(seed in self.memory or record_path(self.folder, seed).exists() for seed in self.streams)

    def records(self) -> list[Record]:
        """Return the record of each stream, from memory or from its file."""
        records = []
        for seed in self.streams:
            record = self.memory.get(seed)
            if record is None:
                path = record_path(self.folder, seed)
                record = Record.load(path)
                if (record.spec.get("experiment"), record.spec.get("seed")) != (self.experiment.id, seed):
                    raise ValueError(f"{path} is the record of another experiment")
            records.append(record)
        return records

    def values(self, metric: str, domain: str | None = None) -> list[float]:
        """Return a metric, or "seconds_per_image", of each seed, NaN where there is none.

        "domain_error" needs the domain, with or without its severity.
        """
        numbers = []
        for stream in self.streams.values():
            value = (stream.environment if metric == "seconds_per_image" else stream.metrics).get(metric)
            if isinstance(value, Mapping):
                found = [error for name, error in value.items() if domain in (name, name.partition("@")[0])]
                value = found[0] if len(found) == 1 else None
            numbers.append(math.nan if value is None else float(value))
        return numbers

    def error(self) -> float:
        """Return the mean instance error over the seeds."""
        values = self.values("instance_error")
        return sum(values) / len(values)


def record_path(folder: Path, seed: int) -> Path:
    """Return the path of a seed's record."""
    return folder / f"record-{seed}.npz"


def changed(experiment: Experiment, code: Mapping[str, Any]) -> list[str]:
    """Return the components whose file has another digest today than in the "code" of an environment."""
    today = component_digests(experiment) if code else {}
    return [role for role, digest in today.items() if code.get(role, digest) != digest]


def component_digests(experiment: Experiment) -> dict[str, str]:
    """Return the digest of the file of each component that is part of tribe, by "method", "scenario" and so on."""
    digests: dict[str, str] = {}
    for role in COMPONENTS:
        component = getattr(experiment, role)
        with contextlib.suppress(ValueError, ImportError):  # a name that is unknown here
            if component.code is None:
                digest = file_digest(CLASS_OF[role](component.name))
                digests |= {} if digest is None else {role: digest}
    return digests


class ResultStore:
    """The results in a folder. It reads a file once, and after that only what was added."""

    def __init__(self, root: str | PathLike[str]) -> None:
        self.root = Path(root)
        self.damaged: list[tuple[Path, str]] = []  # files with lines that were left out, and why
        self._experiments: dict[str, Experiment] = {}
        self._streams: dict[str, dict[int, StreamResult]] = defaultdict(dict)
        self._read_to: dict[Path, tuple[int, int]] = {}  # by file: its inode, and the bytes that were read

    def find(self, experiment: Experiment) -> Result | None:
        """Return the result of an experiment, if all its streams are there."""
        streams = self.streams_of(experiment)
        if streams.keys() < set(experiment.seeds):
            return None
        return Result(experiment, self.root, {seed: streams[seed] for seed in experiment.seeds})

    def streams_of(self, experiment: Experiment) -> dict[int, StreamResult]:
        """Return the streams of an experiment that are there, by seed."""
        self.refresh()
        streams = self._streams.get(experiment.id, {})
        return {seed: streams[seed] for seed in experiment.seeds if seed in streams}

    def results(self) -> list[Result]:
        """Return all results, in the order of their ids, each with all its seeds."""
        self.refresh()
        results = []
        for name in sorted(self._experiments):
            streams = dict(sorted(self._streams[name].items()))
            results.append(Result(replace(self._experiments[name], seeds=tuple(streams)), self.root, streams))
        return results

    def add(self, result: Result) -> None:
        """Write a result, and the records that it holds in memory."""
        experiment = result.experiment
        for seed, record in result.memory.items():
            result.folder.mkdir(parents=True, exist_ok=True)
            record.save(record_path(result.folder, seed), outputs=record.outputs is not None)
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / pack_name(experiment)
        with exclusive(self.root / ".lock", wait=True), open(path, "ab+", opener=open_plain) as file:
            end = file.seek(0, os.SEEK_END)
            torn = end > 0 and (file.seek(end - 1), file.read(1))[1] != b"\n"
            lines = [encode(experiment, seed, stream) for seed, stream in result.streams.items()]
            file.write(b"\n" * torn + b"".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def refresh(self) -> None:
        """Read what was added to the files."""
        for path in sorted(self.root.glob(f"*{PACK}")):
            status = path.stat()
            inode, begin = self._read_to.get(path, (status.st_ino, 0))
            if inode != status.st_ino or status.st_size < begin:
                begin = 0  # the file was replaced
            if status.st_size == begin:
                continue
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read()
            for line in content.splitlines(keepends=True):
                if line.endswith(b"\n"):  # else another process is writing it
                    if line.strip():
                        self._read(line, path)
                    begin += len(line)
            self._read_to[path] = status.st_ino, begin

    def _read(self, line: bytes, path: Path) -> None:
        try:
            data = json_files.parse(line, LINE, str(path))
            experiment = Experiment.from_json(data["spec"], [data["seed"]])
            if experiment.id != data["id"]:
                raise ValueError(f"it was changed by hand: it holds {experiment.id}, not {data['id']:.40}")
        except ValueError as error:
            self.damaged.append((path, str(error)))
            warnings.warn(f"a line of {path} is left out: {error}", stacklevel=2)
        else:
            self._experiments.setdefault(experiment.id, experiment)
            self._streams[experiment.id][data["seed"]] = StreamResult(data["metrics"], data["environment"])


def finished(root: str | PathLike[str]) -> list[Result]:
    """Return all results in a folder, in the order of their ids, each with all its seeds."""
    return ResultStore(root).results()


def pack_name(experiment: Experiment) -> str:
    """Return the name of the file that holds the results of an experiment."""
    return f"{experiment.dataset.name.replace('/', '_')}-{experiment.device}{PACK}"


def encode(experiment: Experiment, seed: int, stream: StreamResult) -> bytes:
    """Return the line of a stream."""
    line = {"id": experiment.id, "seed": seed, "spec": experiment.json(), **stream._asdict()}
    return json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
