"""The store: the results of experiments on disk, each under its experiment's id.

Layout of ``runs/<id>/``, where ``<id>`` is `Experiment.id`:

    spec.json               {"format": "tribe-experiment", "schema": 2, "id": ..., "spec": Experiment.json()}
    record-<seed>.npz       a `tribe.Record` for each seed; its ``spec`` is that of the experiment, with "seed" in place
                              of "seeds", and the id as "experiment"
    metrics.json            {"schema": 2, "id": ..., "seeds": {"<seed>": {...}}}, a function of the records alone:
                              images, instance_error, category_error, category_error_absent_correct,
                              calibration_error (shares; null without labels), domain_error {domain: share or null},
                              class_counts {domain: [images of each class]}
    environment.json        {"schema": 2, "id", "machine": tribe.experiments.provenance.machine(), "seconds": of all
                              streams together, "seconds_per_image": {"<seed>": ...}, "finished": ISO time,
                              "code": {"commit": ..., "clean": whether the checkout was as committed, "method": digest,
                              "scenario": ..., "files": of custom components, such as {"method": "mine.py:Mine"}},
                              see experiments.sources}: what differs between two computations of the same experiment
    checkpoint.safetensors  until the records are written: where to resume
    *.damaged-<n>           a damaged file that was set aside

Every file is written atomically: the records after environment.json, metrics.json last. ``runs/<id>/.lock`` is locked
by the process that writes there. The seeds of an experiment may be in several folders: `find` puts them together.

A *pack* is a file of results without their records, as `keep` writes them: ``<data set>-<device>.jsonl`` beside the
folders, a line for each result, in the order of their ids:

    {"id": ..., "format": "tribe-experiment", "schema": 2, "spec": ..., "metrics": {"<seed>": ...}, "environment": ...}

All functions here read a packed result as they read a folder.
"""

import contextlib
import functools
import json
import math
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tribe.experiments.experiment import Experiment
from tribe.experiments.record import Record
from tribe.experiments.scores import SCORES, SECONDS, scores_of
from tribe.experiments.sources import changed
from tribe.io import json_files
from tribe.io.files import exclusive, write_atomically

FORMAT, SCHEMA = "tribe-experiment", 2  # schema 1 had no fingerprint of the images
SPEC, METRICS, ENVIRONMENT = "spec.json", "metrics.json", "environment.json"
CHECKPOINT = "checkpoint.safetensors"
PACK = ".jsonl"


METRICS_SCHEMA = {"id": str, "seeds": {...: SCORES}}
ENVIRONMENT_SCHEMA = {
    "machine?": dict,
    "seconds?": SECONDS,
    "seconds_per_image?": {...: (SECONDS, None)},
    "finished?": str,
    "code?": dict,
}


class NewerResults(ValueError):
    """Results that a newer version of tribe wrote."""


@dataclass(frozen=True)
class Result:
    """The result of an experiment."""

    experiment: Experiment
    folder: Path  # root/<id>, which is not there if the result is in a pack
    metrics: Mapping[str, Mapping[str, Any]]  # by seed, see the layout above
    environment: Mapping[str, Any]
    parts: tuple["Result", ...] = ()  # the results on disk that it is put together from, see `combine`

    @property
    def has_records(self) -> bool:
        """Whether any record is beside the metrics; in a result of several parts, beside those of each part."""
        if self.parts:
            return all(part.has_records for part in self.parts)
        return any(self._record(seed).exists() for seed in self.experiment.seeds)

    def records(self) -> list[Record]:
        """The record of each seed."""
        return [Record.load(self._record(seed)) for seed in self.experiment.seeds]

    def part_of(self, seed: int) -> "Result":
        """The result on disk that holds the stream of a seed."""
        return next((part for part in self.parts if seed in part.experiment.seeds), self)

    def _record(self, seed: int) -> Path:
        return self.part_of(seed).folder / record_name(seed)

    def values(self, metric: str, domain: str | None = None) -> list[float]:
        """A number for each seed, NaN where there is none; "domain_error" needs a domain, with or without severity."""
        seeds = [str(seed) for seed in self.experiment.seeds]
        if metric == "seconds_per_image":
            return [_number(self.environment.get(metric, {}).get(seed)) for seed in seeds]
        if metric != "domain_error":
            return [_number(self.metrics[seed][metric]) for seed in seeds]
        return [_number(_of_domain(self.metrics[seed]["domain_error"], domain)) for seed in seeds]

    def error(self) -> float:
        """Mean instance error over the seeds."""
        values = self.values("instance_error")
        return sum(values) / len(values)


class Damaged(NamedTuple):
    """A finished result with a JSON file that cannot be read."""

    folder: Path
    experiment: Experiment | None  # None: its spec cannot be read either
    error: OSError | ValueError


# -- read -------------------------------------------------------------------------------------------------------------


def load(folder: str | PathLike[str]) -> Result:
    """Read the result in ``root/<id>``, or of that id in a pack of ``root``; or say why it cannot be used.

    Its metrics are trusted: see `verify`.
    """
    folder = Path(folder)
    packed = None if (folder / METRICS).is_file() else _packed(folder.parent).get(folder.name)
    if packed is None:
        return _load_folder(folder)
    if isinstance(packed, Damaged):
        raise packed.error
    return packed


def verify(result: Result) -> None:
    """Compute the metrics again from the records, and refuse a result where they differ; without records it passes."""
    for part in result.parts:
        verify(part)
    if result.parts or not result.has_records:
        return
    records = [load_record(result.folder, result.experiment, seed) for seed in result.experiment.seeds]
    if not _alike(result.metrics, scores_of(records)):
        raise ValueError(f"the records in {result.folder} are not those that its {METRICS} is of")


def find(
    experiment: Experiment, root: str | PathLike[str], *, verified: bool = False, current: bool = False
) -> Result | None:
    """The result of an experiment in ``root``, if it is complete: with all records or, if only JSON is kept, with none.

    Its seeds may be spread over several results of the same family, see `combine`. A stale result counts only for the
    seeds that no other result has, see `stale`.

    ``verified``: one that does not pass `verify` counts as missing. ``current``: one of other source code than today's
    counts as missing, see `stale`.
    """
    whole = _find_whole(experiment, Path(root), verified, current)
    if whole is not None and not stale(whole):
        return whole
    return _find_parts(experiment, Path(root), verified, current) or whole


def stale(result: Result) -> list[str]:
    """The components whose source code has changed since the result was computed: "method", "scenario" and so on.

    None where the result does not say which code it is of.
    """
    found = (
        role for part in result.parts or (result,) for role in changed(part.environment.get("code"), part.experiment)
    )
    return list(dict.fromkeys(found))


def missing_seeds(experiment: Experiment, root: str | PathLike[str]) -> tuple[int, ...]:
    """The seeds of an experiment that no sound and current result in ``root`` has."""
    if _find_whole(experiment, Path(root), True, True) is not None:
        return ()
    found = {seed for part in _family(experiment, Path(root), True, True) for seed in part.experiment.seeds}
    return tuple(seed for seed in experiment.seeds if seed not in found)


def combine(results: Sequence[Result], seeds: Sequence[int] | None = None) -> Result:
    """The result of one family with all seeds, or with those named, from results that have some each.

    A stream does not depend on the streams beside it. So it does not matter how seeds were played: together, or one by
    one. Where two results have the same seed, one that is not `stale` counts, and of such the one with more seeds.
    """
    ranked = sorted(results, key=_rank)
    home = {seed: result.part_of(seed) for result in reversed(ranked) for seed in result.experiment.seeds}
    chosen = tuple(sorted(home)) if seeds is None else tuple(seeds)
    parts = tuple({home[seed].experiment.id: home[seed] for seed in chosen}.values())
    if len(parts) == 1 and parts[0].experiment.seeds == chosen:
        return parts[0]
    experiment = ranked[0].experiment.with_seeds(chosen)
    environment = dict(parts[0].environment)
    times = {str(seed): home[seed].environment.get("seconds_per_image", {}).get(str(seed)) for seed in chosen}
    metrics = {str(seed): home[seed].metrics[str(seed)] for seed in chosen}
    environment |= {
        "seconds_per_image": times,
        "seconds": sum(metrics[seed]["images"] * (time or 0.0) for seed, time in times.items()),
        "finished": max(str(part.environment.get("finished", "")) for part in parts),
    }
    return Result(experiment, parts[0].folder.parent / experiment.id, metrics, environment, parts)


def _rank(result: Result) -> tuple[bool, int, str]:
    """The order in which results of one family count: stale ones last."""
    return bool(stale(result)), -len(result.experiment.seeds), result.experiment.id


def _find_whole(experiment: Experiment, root: Path, verified: bool, current: bool) -> Result | None:
    """The result under the id of an experiment."""
    try:
        result = load(root / experiment.id)
        if current and stale(result):
            return None
        if verified:
            verify(result)
    except NewerResults:
        raise
    except (OSError, ValueError):
        return None
    return result


def _find_parts(experiment: Experiment, root: Path, verified: bool, current: bool) -> Result | None:
    """The result of an experiment, put together from others of its family."""
    parts = _family(experiment, root, verified, current)
    there = {seed for part in parts for seed in part.experiment.seeds}
    return combine(parts, experiment.seeds) if there.issuperset(experiment.seeds) else None


def _family(experiment: Experiment, root: Path, verified: bool, current: bool) -> list[Result]:
    """The sound results in ``root`` that differ from an experiment in their seeds only, and share some."""
    packed = (found.experiment for found in _packed(root).values() if isinstance(found, Result))
    specs = sorted(root.glob(f"*/{SPEC}")) if root.is_dir() else []
    folders = (_spec_at(path, stat.st_mtime_ns, stat.st_size) for path, stat in ((p, p.stat()) for p in specs))
    alike = {e.id: e for e in (*packed, *folders) if e is not None and e.family == experiment.family}
    some = [e for e in alike.values() if not set(e.seeds).isdisjoint(experiment.seeds)]
    found = (_find_whole(e, root, verified, current) for e in some)
    return [result for result in found if result is not None]


@functools.lru_cache(maxsize=4096)
def _spec_at(path: Path, changed: int, size: int) -> Experiment | None:
    """The experiment of a spec.json that was changed at a time; None if it cannot be read."""
    try:
        return read_spec(path)
    except (OSError, ValueError):
        return None


def survey(root: str | PathLike[str]) -> Iterator[Result | Damaged]:
    """All finished results in a folder, in the order of their ids, damaged ones included."""
    root = Path(root)
    if not root.is_dir():
        return
    packed = _packed(root)
    folders = {path.name for path in root.iterdir() if (path / METRICS).is_file()}
    for name in sorted(packed.keys() | folders):
        yield survey_folder(root / name) if name in folders else packed[name]


def finished(root: str | PathLike[str], *, damaged: Literal["refuse", "skip"] = "refuse") -> Iterator[Result]:
    """All finished results in a folder, in the order of their ids."""
    for found in survey(root):
        if isinstance(found, Result):
            yield found
        elif damaged == "refuse":
            raise found.error


def load_record(folder: Path, experiment: Experiment, seed: int) -> Record:
    """The record of a seed; one of another experiment is refused."""
    path = folder / record_name(seed)
    record = Record.load(path)
    if (record.spec.get("experiment"), record.spec.get("seed")) != (experiment.id, seed):
        raise ValueError(f"{path} is the record of another experiment")
    return record


def record_spec(experiment: Experiment) -> dict[str, Any]:
    """The spec of its records but for the seed, which `run` adds."""
    spec = experiment.json() | {"experiment": experiment.id}
    del spec["seeds"]
    return spec


def record_name(seed: int) -> str:
    """The file name of a seed's record."""
    return f"record-{seed}.npz"


def read_spec(path: Path) -> Experiment:
    """The experiment of a spec.json."""
    return _experiment(json_files.read(path, dict), str(path), path.parent)


def read_environment(path: Path) -> dict[str, Any]:
    """The content of an environment.json."""
    found: dict[str, Any] = json_files.read(path, ENVIRONMENT_SCHEMA)
    return found


def _load_folder(folder: Path) -> Result:
    experiment = read_spec(folder / SPEC)
    if experiment.id != folder.name:
        raise ValueError(f"{folder} holds the results of {experiment.id}: give the folder its name back")
    found = json_files.read(folder / METRICS, METRICS_SCHEMA)
    scores = found["seeds"] if found["id"] == experiment.id else {}
    return _result(experiment, folder, scores, read_environment(folder / ENVIRONMENT), str(folder / METRICS))


def survey_folder(folder: Path) -> Result | Damaged:
    """The finished result in a folder, or why it cannot be used."""
    try:
        return _load_folder(folder)
    except (OSError, ValueError) as error:
        found = error
    try:
        experiment = read_spec(folder / SPEC)
    except (OSError, ValueError):
        return Damaged(folder, None, found)
    return Damaged(folder, experiment if experiment.id == folder.name else None, found)


def _result(
    experiment: Experiment, folder: Path, scores: Mapping[str, Any], environment: Mapping[str, Any], place: str
) -> Result:
    if {str(seed) for seed in experiment.seeds} != scores.keys():
        raise ValueError(f"{place} does not hold the metrics of {experiment.id}")
    return Result(experiment, folder, scores, environment)


def _experiment(found: Mapping[str, Any], place: str, folder: Path) -> Experiment:
    """The experiment of a JSON object that was read at a place."""
    if found.get("format") != FORMAT:
        raise ValueError(f"{place} is no specification of an experiment")
    if not isinstance(found.get("schema"), int) or found["schema"] > SCHEMA:
        raise NewerResults(
            f"{folder} was written by a newer version of tribe (schema {found.get('schema')}; this one knows "
            f"{SCHEMA}): upgrade tribe, or use another folder for results"
        )
    if found["schema"] < SCHEMA:
        raise ValueError(
            f"{folder} was written by an older version of tribe (schema {found['schema']}; this one writes "
            f"{SCHEMA}), which did not say on which images: move it out of the folder, and compute it again"
        )
    if not isinstance(found.get("spec"), dict):
        raise ValueError(f"{place} is damaged: it does not say of which experiment it is")
    try:
        experiment = Experiment.from_json(found["spec"])
    except ValueError as error:
        raise ValueError(f"{place} is damaged: {error}") from error
    if experiment.id != found.get("id"):
        raise ValueError(f"{place} was changed by hand: it holds {experiment.id}, not {found.get('id')}")
    return experiment


# -- packs ------------------------------------------------------------------------------------------------------------


def _packed(root: Path) -> Mapping[str, Result | Damaged]:
    """The packed results of a folder by id; a damaged line without one is named by its place."""
    stamps = [(path, path.stat()) for path in sorted(root.glob(f"*{PACK}"))]
    return _read_packs(tuple((path, stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in stamps))


@functools.lru_cache(maxsize=16)
def _read_packs(stamps: tuple[tuple[Path, int, int, int], ...]) -> Mapping[str, Result | Damaged]:
    return {result.folder.name: result for path, *_ in stamps for result in read_pack(path)}


def read_pack(path: Path) -> list[Result | Damaged]:
    """All results of a pack; one that cannot be read at all counts as one damaged result."""
    try:
        lines = json_files.read_lines(path)
    except (OSError, ValueError) as error:
        return [Damaged(path, None, error)]
    return [_read_line(line, path, number) for number, line in enumerate(lines, 1)]


def _read_line(line: bytes, path: Path, number: int) -> Result | Damaged:
    place, experiment = f"{path}, line {number}", None
    folder = path.parent / (_id_of(line) or f"{path.name}, line {number}")
    try:
        found = json_files.parse(line, dict, place)
        experiment = _experiment(found, place, path)
        json_files.check(found, {"metrics": {...: SCORES}, "environment": ENVIRONMENT_SCHEMA}, place)
        return _result(experiment, path.parent / experiment.id, found["metrics"], found["environment"], place)
    except ValueError as error:
        return Damaged(folder, experiment, error)


def _id_of(line: bytes) -> str | None:
    """The id at the start of a line, which may be damaged further on."""
    match = re.match(rb'\{"id":"([0-9a-f]{16})"', line)
    return match[1].decode() if match else None


def _write_pack(path: Path, results: Sequence[Result]) -> None:
    """Add results to a pack. A line of the same id is replaced."""
    old = json_files.read_lines(path) if path.exists() else []
    lines: dict[str, bytes] = {_id_of(line) or f"~{number}": line for number, line in enumerate(old)}
    for result in results:
        content = {
            "id": result.experiment.id,
            "format": FORMAT,
            "schema": SCHEMA,
            "spec": result.experiment.json(),
            "metrics": result.metrics,
            "environment": {k: v for k, v in result.environment.items() if k not in ("schema", "id")},
        }
        lines[result.experiment.id] = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    write_atomically(path, b"".join(lines[key] + b"\n" for key in sorted(lines)))


def keep(
    root: str | PathLike[str], target: str | PathLike[str], *, damaged: Literal["refuse", "skip"] = "refuse"
) -> list[Result]:
    """Pack all finished results of ``root`` into another folder, without their records; return all results there.

    A complete result of the same experiment that is there already stays: results do not change. Unless it is `stale`,
    and the new one is not.
    """
    with locked(Path(target), wait=True):
        packs: dict[str, list[Result]] = defaultdict(list)
        for result in finished(root, damaged=damaged):
            there = find(result.experiment, target, verified=True)
            if there is None or (stale(there) and not stale(result)):
                packs[f"{result.experiment.dataset.name}-{result.experiment.device}{PACK}"].append(result)
        for name, results in packs.items():
            _write_pack(Path(target) / name, results)
    return list(finished(target, damaged=damaged))


# -- write ------------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, atomically."""
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


@contextlib.contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Make a folder and hold an exclusive lock on it."""
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", wait=wait, busy=f"another process is computing {folder}"):
        yield


def set_aside(path: Path, reason: str) -> None:
    """Rename a file that cannot be used, so that nothing is lost, and warn."""
    number = 1
    while (renamed := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.replace(path, renamed)
    warnings.warn(f"{reason}. It was set aside as {renamed.name} and is computed again", stacklevel=3)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _alike(one: Any, other: Any) -> bool:
    """Equal but for the rounding of sums, which differs between processors."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return bool(one == other)


def _of_domain(errors: Mapping[str, float | None], domain: str | None) -> float | None:
    named = [error for name, error in errors.items() if domain in (name, name.partition("@")[0])]
    return named[0] if len(named) == 1 else None


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
