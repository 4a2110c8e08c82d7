"""The store: the results of experiments on disk, each under its experiment's id.

Layout of ``runs/<id>/``, where ``<id>`` is `Experiment.id`:

    spec.json               {"format": "tribe-experiment", "schema": 2, "id": ..., "spec": Experiment.json()}
    record-<seed>.npz       a `tribe.Record` for each seed; its ``spec`` is that of the experiment, with "seed" in place
                              of "seeds", and the id as "experiment"
    metrics.json            {"schema": 2, "id": ..., "seeds": {"<seed>": {...}}}, a function of the records alone:
                              images, instance_error, category_error, category_error_absent_correct,
                              calibration_error (shares; null without labels), domain_error {domain: share or null},
                              class_counts {domain: [images of each class]}
    environment.json        {"schema": 2, "id": ..., "machine": tribe.lab.provenance.machine(), "seconds": of all
                              streams together, "seconds_per_image": {"<seed>": ...}, "finished": ISO time}: what
                              differs between two computations of the same experiment
    checkpoint.safetensors  until the records are written: where to resume
    *.damaged-<n>           a damaged file that was set aside

Every file is written atomically: the records after environment.json, metrics.json last. ``runs/<id>/.lock`` is locked
by the process that writes there. The three JSON files are a result without its records: `keep` copies them alone.
"""

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tribe.lab import metrics
from tribe.lab.experiment import Experiment
from tribe.lab.record import Record
from tribe.storage.atomic import write_atomically
from tribe.storage.lock import exclusive

FORMAT, SCHEMA = "tribe-experiment", 2  # schema 1 had no fingerprint of the images
SPEC, METRICS, ENVIRONMENT = "spec.json", "metrics.json", "environment.json"
CHECKPOINT = "checkpoint.safetensors"


class NewerResults(ValueError):
    """Results that a newer version of tribe wrote."""


@dataclass(frozen=True)
class Result:
    """The result of an experiment."""

    experiment: Experiment
    folder: Path
    metrics: Mapping[str, Mapping[str, Any]]  # by seed, see the layout above
    environment: Mapping[str, Any]

    @property
    def has_records(self) -> bool:
        """Whether any record is beside the metrics."""
        return any((self.folder / record_name(seed)).exists() for seed in self.experiment.seeds)

    def records(self) -> list[Record]:
        """The record of each seed."""
        return [Record.load(self.folder / record_name(seed)) for seed in self.experiment.seeds]

    def values(self, metric: str, domain: str | None = None) -> list[float]:
        """A number for each seed, NaN where there is none; "domain_error" needs a domain, with or without severity."""
        seeds = [str(seed) for seed in self.experiment.seeds]
        if metric == "seconds_per_image":
            return [float(self.environment.get(metric, {}).get(seed, "nan")) for seed in seeds]
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
    """Read the result in a folder, or say why it cannot be used. Its metrics are trusted: see `verify`."""
    folder = Path(folder)
    experiment = read_spec(folder / SPEC)
    if experiment.id != folder.name:
        raise ValueError(f"{folder} holds the results of {experiment.id}: give the folder its name back")
    found, environment = read_json(folder / METRICS), read_json(folder / ENVIRONMENT)
    try:
        scores = found["seeds"]
        complete = found["id"] == experiment.id and {str(s) for s in experiment.seeds} == scores.keys()
    except (KeyError, AttributeError):
        complete = False
    if not complete:
        raise ValueError(f"{folder / METRICS} does not hold the metrics of {experiment.id}")
    return Result(experiment, folder, scores, environment)


def verify(result: Result) -> None:
    """Compute the metrics again from the records, and refuse a result where they differ; without records it passes."""
    if not result.has_records:
        return
    records = [load_record(result.folder, result.experiment, seed) for seed in result.experiment.seeds]
    if not _alike(result.metrics, scores_of(records)):
        raise ValueError(f"the records in {result.folder} are not those that its {METRICS} is of")


def find(experiment: Experiment, root: str | PathLike[str], *, verified: bool = False) -> Result | None:
    """The result of an experiment in ``root``, if it is complete: with all records or, if only JSON is kept, with none.

    ``verified``: one that does not pass `verify` counts as missing.
    """
    try:
        result = load(Path(root) / experiment.id)
        if verified:
            verify(result)
    except NewerResults:
        raise
    except (OSError, ValueError):
        return None
    return result


def survey(root: str | PathLike[str]) -> Iterator[Result | Damaged]:
    """All finished results in a folder, in the order of their names, damaged ones included."""
    for folder in sorted(Path(root).iterdir()) if Path(root).is_dir() else ():
        if (folder / METRICS).is_file():
            try:
                found: Result | Damaged = load(folder)
            except (OSError, ValueError) as error:
                found = Damaged(folder, _readable_spec(folder), error)
            yield found


def finished(root: str | PathLike[str], *, damaged: Literal["refuse", "skip"] = "refuse") -> Iterator[Result]:
    """All finished results in a folder, in the order of their names."""
    for found in survey(root):
        if isinstance(found, Result):
            yield found
        elif damaged == "refuse":
            raise found.error


def _readable_spec(folder: Path) -> Experiment | None:
    """The experiment of a folder, if its spec can be read and has the folder's name."""
    try:
        experiment = read_spec(folder / SPEC)
    except (OSError, ValueError):
        return None
    return experiment if experiment.id == folder.name else None


def read_spec(path: Path) -> Experiment:
    """The experiment of a spec.json."""
    return _experiment(read_json(path), path)


def _experiment(found: Mapping[str, Any], path: Path) -> Experiment:
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} is no specification of an experiment")
    if not isinstance(found.get("schema"), int) or found["schema"] > SCHEMA:
        raise NewerResults(
            f"{path.parent} was written by a newer version of tribe (schema {found.get('schema')}; this one knows "
            f"{SCHEMA}): upgrade tribe, or use another folder for results"
        )
    if found["schema"] < SCHEMA:
        raise ValueError(
            f"{path.parent} was written by an older version of tribe (schema {found['schema']}; this one writes "
            f"{SCHEMA}), which did not say on which images: move it out of the folder, and compute it again"
        )
    if not isinstance(found.get("spec"), dict):
        raise ValueError(f"{path} is damaged: it does not say of which experiment it is")
    experiment = Experiment.from_json(found["spec"])
    if experiment.id != found.get("id"):
        raise ValueError(f"{path} was changed by hand: it holds {experiment.id}, not {found.get('id')}")
    return experiment


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return found


def load_record(folder: Path, experiment: Experiment, seed: int) -> Record:
    """The record of a seed; one of another experiment is refused."""
    path = folder / record_name(seed)
    record = Record.load(path)
    if (record.spec.get("experiment"), record.spec.get("seed")) != (experiment.id, seed):
        raise ValueError(f"{path} is the record of another experiment")
    return record


def record_name(seed: int) -> str:
    """The file name of a seed's record."""
    return f"record-{seed}.npz"


# -- write ------------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, atomically."""
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def keep(
    root: str | PathLike[str], target: str | PathLike[str], *, damaged: Literal["refuse", "skip"] = "refuse"
) -> list[Result]:
    """Copy the JSON files of all finished results to another folder, and return all results there.

    A complete result of the same experiment that is there already stays: results do not change.
    """
    for result in finished(root, damaged=damaged):
        folder = Path(target) / result.folder.name
        if find(result.experiment, target, verified=True) is None:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (SPEC, ENVIRONMENT, METRICS):  # the last one marks the result as complete
                write_atomically(folder / name, (result.folder / name).read_bytes())
    return list(finished(target, damaged=damaged))


@contextlib.contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Make a folder and hold an exclusive lock on it. Where there are no locks, the last writer wins."""
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", wait=wait, busy=f"another process is computing {folder}") as is_locked:
        if not is_locked:
            warnings.warn(f"{folder} cannot be locked: let one process at a time write", stacklevel=3)
        yield


def set_aside(path: Path, reason: str) -> None:
    """Rename a file that cannot be used, so that nothing is lost, and warn."""
    number = 1
    while (renamed := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.replace(path, renamed)
    warnings.warn(f"{reason}. It was set aside as {renamed.name} and is computed again", stacklevel=3)


# -- numbers ----------------------------------------------------------------------------------------------------------


def scores_of(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The metrics of records, by seed."""
    return {str(record.spec["seed"]): _scores(record) for record in records}


def _scores(record: Record) -> dict[str, Any]:
    scores = {"images": len(record.label), **metrics.summary(record)}
    del scores["seconds_per_image"]  # it is in environment.json, as it is never the same twice
    if not bool((record.label >= 0).any()):
        return {**scores, "domain_error": {}, "class_counts": {}}
    errors = [None if math.isnan(error) else error for error in metrics.domain_error(record).tolist()]
    counts = metrics.class_counts(record).tolist()
    return {
        **scores,
        "domain_error": dict(zip(record.domains, errors, strict=True)),
        "class_counts": dict(zip(record.domains, counts, strict=True)),
    }


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
