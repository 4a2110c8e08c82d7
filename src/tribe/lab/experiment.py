"""An experiment is plain data with a name of its own, and its results lie under that name: nothing is computed twice.

    experiment = Experiment.of("live-mnist-c", "compact", "gli-f", "tribe", seeds=(0, 1))
    result = experiment.run("runs")                # or, if it was run before, what it left
    result.error()                                 # mean instance error over its seeds

Layout of ``runs/<id>/``, where ``<id>`` is `Experiment.id`, 16 hexadecimal digits of the hash of its canonical JSON:

    spec.json               {"format": "tribe-experiment", "schema": 2, "id": ..., "spec": Experiment.json()}
    record-<seed>.npz       a `tribe.Record` a seed; its ``spec`` says what `tribe run` says of its records (dataset,
                              model, scenario, batch, precision, method, fields, seed), and "experiment", the id
    metrics.json            {"schema": 2, "id": ..., "seeds": {"<seed>": {...}}}, a function of the records alone:
                              images, instance_error, category_error, category_error_absent_correct,
                              calibration_error (shares; null without labels), domain_error {domain: share or null},
                              class_counts {domain: [images of each class]}
    environment.json        {"schema": 2, "id": ..., "machine": tribe.engine.precision.machine(), "seconds": all streams
                              together, "seconds_per_image": {"<seed>": ...}, "finished": ISO time}: what differs from
                              one computation of the same experiment to the next
    checkpoint.safetensors  until the records are there: where to go on
    *.damaged-<n>           what was found damaged and set aside

Every file is written whole or not at all, the records after environment.json, and metrics.json, which can be made from
them, last. ``runs/<id>/.lock`` is held by the one process that writes there. The three JSON files are small and tell a
result without its records: `keep` copies them alone.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tribe import methods
from tribe.datasets import Dataset
from tribe.datasets.fingerprint import fingerprint
from tribe.engine.augment import Augment
from tribe.engine.backbone import Backbone
from tribe.engine.precision import check_precision, choose_device, float32_precision, precision_on
from tribe.knowledge import Knowledge
from tribe.lab import components as build
from tribe.lab import metrics
from tribe.lab.provenance import code_of, coded, machine
from tribe.lab.record import Record
from tribe.lab.runner import Progress, run
from tribe.lab.spec import differences
from tribe.lab.stream import Stream
from tribe.methods import Method
from tribe.methods.encoding import method_to_json
from tribe.registry import nearest
from tribe.scenarios import Scenario
from tribe.storage.atomic import write_atomically
from tribe.storage.lock import exclusive
from tribe.storage.states import StateFileError

FORMAT, SCHEMA = "tribe-experiment", 2  # 1 did not say which images
EVERY = 50  # batches between checkpoints
CHECKPOINT = "checkpoint.safetensors"
INCIDENTAL = ("workers",)  # fields of data sets that no number depends on


class NewerResults(ValueError):
    """Results that a newer version of tribe wrote."""


class MixedResults(ValueError):
    """Results that do not belong into one table, and the field in which they differ."""


@dataclass(frozen=True)
class Named:
    """A component: its name in the registry, and its fields in plain data."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None  # of one that is not tribe's: see tribe.code

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "fields": self.fields, **coded(self.code)}

    @staticmethod
    def of(given: "str | Named") -> "Named":
        """A name alone stands for the component with nothing set."""
        return given if isinstance(given, Named) else Named(given)


# -- what an experiment is --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Experiment:
    """All that a result depends on, in plain data; make one with `of`, which fills in every default.

    ``threads`` is None on a GPU: there no sum depends on it.
    """

    dataset: Named
    images: str  # fingerprint of what lay on the disk under that name
    model: Named
    weights: str  # Backbone.fingerprint of the network, before it is rounded to a lower precision
    scenario: Named
    method: Named
    seeds: tuple[int, ...]  # one stream each, side by side
    batch: int
    precision: str  # of tribe.engine.precision.PRECISIONS
    device: str  # "cpu" or "cuda"
    threads: int | None

    @staticmethod
    def of(
        dataset: str | Named,
        model: str | Named,
        scenario: str | Named,
        method: str | Named,
        *,
        seeds: Sequence[int] = (0,),
        batch: int = 64,
        precision: str = "float32",
        bench: "Bench | None" = None,
    ) -> "Experiment":
        """The experiment that these names mean here: with the bench's data, weights, device and threads."""
        bench = bench or Bench()
        parts = bench.prepare(Named.of(dataset), Named.of(model), Named.of(scenario), Named.of(method))
        settled = precision_on(bench.device, precision)
        return parts.described(seeds, batch, settled, bench.device.type, bench.threads)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if not self.seeds or list(self.seeds) != list(range(self.seeds[0], self.seeds[0] + len(self.seeds))):
            raise ValueError(f"seeds are consecutive numbers, at least one, such as 0, 1, 2; got {list(self.seeds)}")
        check_precision(self.precision)

    def json(self) -> dict[str, Any]:
        """The experiment as plain data."""
        told = {name: getattr(self, name) for name in self.__dataclass_fields__}
        parts = {name: value.json() if isinstance(value, Named) else value for name, value in told.items()}
        plain: dict[str, Any] = json.loads(_canonical(parts))
        return plain

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Experiment":
        """The experiment that `json` described; a field that is not known here is refused."""
        known = Experiment.__dataclass_fields__.keys()
        for name in data:
            if name not in known:
                raise ValueError(f"an experiment has no field {name!r}: {nearest(name, known)}")
        try:
            named = {part: Named(**data[part]) for part in ("dataset", "model", "scenario", "method")}
            return Experiment(**{**data, **named})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no experiment ({error}); expected what Experiment.json gives") from error

    @cached_property
    def id(self) -> str:
        """Its name: a hash of all of it."""
        return hashlib.sha256(_canonical(self.json()).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Experiment) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    # -- its results --------------------------------------------------------------------------------------------------

    def run(
        self,
        root: str | PathLike[str],
        *,
        bench: "Bench | None" = None,
        progress: Progress | None = None,
        every: int = EVERY,
        wait: bool = True,
    ) -> "Result":
        """The results, which lie in ``root`` afterwards: found there, or computed, from the last checkpoint on.

        Args:
            root: the folder of all results.
            bench: where data and weights come from; what it builds must be what the experiment says.
            progress: called after every batch.
            every: batches between checkpoints.
            wait: for another process that computes the same; else `Busy` is raised.
        """
        folder = Path(root) / self.id
        if (found := self.found(root)) is not None:
            return found
        with _held(folder, wait):
            if (found := self.found(root)) is not None:  # the one that was waited for
                return found
            self._claim(folder)
            records = self._sound(folder)
            if records is None:
                records = self._play(folder, bench or Bench(device=self.device), progress, every)
            (folder / CHECKPOINT).unlink(missing_ok=True)  # not before the records are safe
            self._repair(folder, records)
            _write(folder / "metrics.json", {"schema": SCHEMA, "id": self.id, "seeds": _scores(records)})
            return load(folder)

    def found(self, root: str | PathLike[str]) -> "Result | None":
        """What lies in ``root``, if it is whole; with all records or, where only JSON is kept, with none."""
        folder = Path(root) / self.id
        try:
            result = load(folder)
            if result.has_records and not _alike(result.metrics, _scores(self._records(folder))):
                return None
        except NewerResults:
            raise
        except (OSError, ValueError):
            return None
        return result

    def _records(self, folder: Path) -> list[Record]:
        return [self._record(folder / f"record-{seed}.npz", seed) for seed in self.seeds]

    def _record(self, path: Path, seed: int) -> Record:
        record = _record(path)
        if (record.spec.get("experiment"), record.spec.get("seed")) != (self.id, seed):
            raise ValueError(f"{path} is the record of another experiment")
        return record

    def _claim(self, folder: Path) -> None:
        """Leave the specification in the folder, and refuse one that is not for this version."""
        path = folder / "spec.json"
        try:
            if _spec(path) == self:
                return
            _set_aside(path, "it is of another experiment")
        except FileNotFoundError:
            pass
        except NewerResults:
            raise
        except ValueError as error:
            _set_aside(path, str(error))
        _write(path, {"format": FORMAT, "schema": SCHEMA, "id": self.id, "spec": self.json()})

    def _sound(self, folder: Path) -> list[Record] | None:
        """The records, if all are there and whole; damaged ones are set aside."""
        found = []
        for seed in self.seeds:
            path = folder / f"record-{seed}.npz"
            try:
                found.append(self._record(path, seed))
            except FileNotFoundError:
                pass
            except ValueError as error:
                (folder / "metrics.json").unlink(missing_ok=True)  # without records it would pass for whole
                _set_aside(path, str(error))
        return found if len(found) == len(self.seeds) else None

    def _repair(self, folder: Path, records: Sequence[Record]) -> None:
        """Where environment.json was lost, say at least what the records know."""
        path = folder / "environment.json"
        try:
            _read(path)
            return
        except FileNotFoundError:
            pass
        except ValueError as error:
            _set_aside(path, str(error))
        _write(path, self._environment(records, {}))

    def _words(self) -> dict[str, Any]:
        """What its records say of themselves, in the words of `tribe run`."""
        told = self.json()
        named = {"dataset": self.images, "model": self.weights}
        marked = {name: {**told[name], "fingerprint": mark} for name, mark in named.items()}
        same = {name: told[name] for name in ("scenario", "batch", "precision", "device", "threads")}
        method = {"method": self.method.name, "fields": self.method.fields}
        return {**marked, **same, "experiment": self.id, **method, **coded(self.method.code)}

    def _play(self, folder: Path, bench: "Bench", progress: Progress | None, every: int) -> list[Record]:
        parts = bench.prepare(self.dataset, self.model, self.scenario, self.method)
        here = parts.described(self.seeds, self.batch, self.precision, bench.device.type, self.threads)
        if here != self:
            told = "; ".join(difference(self, here))
            raise ValueError(f"experiment {self.id} cannot be computed here, where something differs: {told}")
        checkpoint = folder / CHECKPOINT
        net, method = build.in_precision(parts.net, parts.method, self.precision)
        with float32_precision(self.precision), _threads(self.threads):
            play = partial(
                run,
                net,
                method,
                bench.stream(self),
                seed=self.seeds[0],
                spec=self._words(),
                checkpoint=checkpoint,
                every=every,
                keep_checkpoint=True,  # a disk that is full now must not cost the whole run
                progress=progress,
                deterministic=bench.device.type == "cuda",  # a resumed stream must end with the same bits there, too
            )
            try:
                records = play()
            except StateFileError as error:
                _set_aside(checkpoint, str(error))
                records = play()
            computer = machine(bench.device)
        _write(folder / "environment.json", self._environment(records, computer))  # first: sound records have one
        for record in records:
            record.save(folder / f"record-{record.spec['seed']}.npz")
        return records

    def _environment(self, records: Sequence[Record], computer: Mapping[str, Any]) -> dict[str, Any]:
        took = {str(record.spec["seed"]): record.seconds.double() for record in records}
        return {
            "schema": SCHEMA,
            "id": self.id,
            "machine": computer,
            "seconds": sum(float(seconds.sum()) for seconds in took.values()),
            "seconds_per_image": {seed: float(seconds.mean()) for seed, seconds in took.items()},
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }


@dataclass(frozen=True)
class Result:
    """What an experiment left."""

    experiment: Experiment
    folder: Path
    metrics: Mapping[str, Mapping[str, Any]]  # by seed, see the layout above
    environment: Mapping[str, Any]

    @property
    def has_records(self) -> bool:
        """Whether any record lies beside the metrics."""
        return any((self.folder / f"record-{seed}.npz").exists() for seed in self.experiment.seeds)

    def records(self) -> list[Record]:
        """Image by image, a record a seed."""
        return [_record(self.folder / f"record-{seed}.npz") for seed in self.experiment.seeds]

    def values(self, metric: str, domain: str | None = None) -> list[float]:
        """A number a seed; NaN where there is none. ``domain``, with or without its severity, for "domain_error"."""
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


def load(folder: str | PathLike[str]) -> Result:
    """Read the results in a folder, or say why they cannot be used."""
    folder = Path(folder)
    experiment = _spec(folder / "spec.json")
    if experiment.id != folder.name:
        raise ValueError(f"{folder} holds the results of {experiment.id}: give the folder its name back")
    told = {name: _read(folder / f"{name}.json") for name in ("metrics", "environment")}
    try:
        scores = told["metrics"]["seeds"]
        complete = told["metrics"]["id"] == experiment.id and {str(s) for s in experiment.seeds} == scores.keys()
    except (KeyError, AttributeError):
        complete = False
    if not complete:
        raise ValueError(f"{folder / 'metrics.json'} does not hold the metrics of {experiment.id}")
    return Result(experiment, folder, scores, told["environment"])


class Damaged(NamedTuple):
    """Results that were finished, and of which a JSON file cannot be read."""

    folder: Path
    experiment: Experiment | None  # None: what they were of cannot be read either
    error: OSError | ValueError


def survey(root: str | PathLike[str]) -> Iterator[Result | Damaged]:
    """All results in a folder that are finished, in the order of their names, those that are damaged among them."""
    for folder in sorted(Path(root).iterdir()) if Path(root).is_dir() else ():
        if (folder / "metrics.json").is_file():
            try:
                found: Result | Damaged = load(folder)
            except (OSError, ValueError) as error:
                found = Damaged(folder, _readable_spec(folder), error)
            yield found


def _readable_spec(folder: Path) -> Experiment | None:
    """The experiment that a folder is of by its specification and its name."""
    try:
        experiment = _spec(folder / "spec.json")
    except (OSError, ValueError):
        return None
    return experiment if experiment.id == folder.name else None


def finished(root: str | PathLike[str], *, damaged: Literal["refuse", "skip"] = "refuse") -> Iterator[Result]:
    """All results in a folder that are finished, in the order of their names; what is not is passed over."""
    for found in survey(root):
        if isinstance(found, Result):
            yield found
        elif damaged == "refuse":
            raise found.error


def keep(
    root: str | PathLike[str], target: str | PathLike[str], *, damaged: Literal["refuse", "skip"] = "refuse"
) -> list[Result]:
    """Copy the JSON files of all finished results to another folder, for where space matters, and give what is there.

    What the folder already has of the same experiment stays if it is whole: results do not change.
    """
    for result in finished(root, damaged=damaged):
        folder = Path(target) / result.folder.name
        if result.experiment.found(target) is None:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("spec.json", "environment.json", "metrics.json"):  # the last one says "whole"
                write_atomically(folder / name, (result.folder / name).read_bytes())
    return list(finished(target, damaged=damaged))


def difference(one: Experiment, other: Experiment) -> list[str]:
    """The fields in which two experiments differ, with both values."""
    return [f"{place} is {a!r} and {b!r}" for place, a, b in differences(one.json(), other.json())]


def refuse_mixture(experiments: Mapping[str, Experiment], varying: Collection[str] = ("method",)) -> None:
    """Refuse results that differ in anything but what a table is about.

    Args:
        experiments: by the name of their row or column.
        varying: fields that may differ, such as "method" or "scenario.fields.imbalance", with all below them.
    """
    rows = list(experiments.items())
    for name, experiment in rows[1:]:
        for told in difference(rows[0][1], experiment):
            place = told.partition(" ")[0]
            if not any(place == free or place.startswith(f"{free}.") for free in varying):
                raise MixedResults(f"{rows[0][0]} and {name} do not belong into one table: {told}")


# -- what it is built from --------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """An experiment's components, built."""

    dataset: Dataset
    net: Backbone
    scenario: Scenario
    method: Method
    images: str  # the data set's fingerprint
    weights: str  # the network's
    names: tuple[str, Named, str, str]  # as they were asked for

    def described(
        self, seeds: Sequence[int], batch: int, precision: str, device: str, threads: int | None
    ) -> Experiment:
        """The experiment that plays them."""
        dataset, model, scenario, method = self.names
        model = dataclasses.replace(model, code=build.model_code(model.name))
        return Experiment(
            dataset=named(dataset, self.dataset),
            images=self.images,
            model=model,
            weights=self.weights,
            scenario=named(scenario, self.scenario),
            method=Named(method, method_fields(self.method), code_of(type(self.method))),
            seeds=tuple(seeds),
            batch=batch,
            precision=precision,
            device=device,
            threads=threads if device == "cpu" else None,
        )


class Bench:
    """Where experiments are computed: a device, the place of data and weights, and what was built from there before.

    Args:
        data: root of the data sets; None: $TRIBE_DATA or the cache directory.
        device: auto, cpu, cuda or cuda:1.
        weights: files of weights by the name of the network; others lie where `tribe train` puts them.
        threads: that a CPU computes with; None: as many as torch takes now.
    """

    def __init__(
        self,
        data: str | PathLike[str] | None = None,
        device: str = "auto",
        weights: Mapping[str, str | PathLike[str]] | None = None,
        threads: int | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads is how many a CPU computes with, at least 1; got {threads}")
        self.data = None if data is None else Path(data)
        self.device = choose_device(device)
        self.threads = threads or torch.get_num_threads()
        self.weights = {name: Path(path) for name, path in (weights or {}).items()}
        self._datasets: dict[str, Dataset] = {}
        self._images: dict[str, str] = {}
        self._nets: dict[str, tuple[Backbone, str]] = {}
        self._methods: dict[tuple[object, ...], Method] = {}
        self._streams: dict[str, Stream] = {}

    def prepare(self, dataset: Named, model: Named, scenario: Named, method: Named) -> Parts:
        """Build the components of an experiment, or say why it cannot be done."""
        try:
            data = self.dataset(dataset)
            asked = build.Asked(dataset.name, model.name, self.weights.get(model.name), self.data)
            net, weights = self.net(asked, data, model)
            protocol = build.scenario(scenario.name, None, revived(scenario.fields))
            protocol = protocol if protocol.domains is not None else protocol.on(data.domains)
            names = dataset.name, model, scenario.name, method.name
            built = self.method(asked, data, net, model, method)
            return Parts(data, net, protocol, built, self.fingerprint(dataset), weights, names)
        except TypeError as error:  # a field that a component does not have
            raise ValueError(str(error)) from error

    def dataset(self, named: Named) -> Dataset:
        """A data set, opened once."""
        key = _canonical([named.name, named.fields])
        if key not in self._datasets:
            self._datasets[key] = build.dataset(named.name, self.data, revived(named.fields))
        return self._datasets[key]

    def fingerprint(self, named: Named) -> str:
        """Which images a data set holds, looked at once."""
        key = _canonical([named.name, named.fields])
        if key not in self._images:
            self._images[key] = fingerprint(self.dataset(named))
        return self._images[key]

    def net(self, asked: build.Asked, data: Dataset, named: Named) -> tuple[Backbone, str]:
        """A network on the device, read once, and its fingerprint, which takes a while."""
        key = _canonical([named.name, named.fields, build.trained_on(data, asked.dataset)])
        if key not in self._nets:
            net = Backbone(build.model(asked, data, revived(named.fields)).to(self.device))
            self._nets[key] = net, net.fingerprint()
        return self._nets[key]

    def method(self, asked: build.Asked, data: Dataset, net: Backbone, model: Named, named: Named) -> Method:
        """A method, built once: to read what it knows of the source, and whether that fits the network, takes long."""
        fields = {k: v for k, v in revived(named.fields).items() if not isinstance(v, _Digest)}
        told = {k: v for k, v in named.fields.items() if k in fields}
        key = id(data), _canonical(model.json()), methods.get(named.name), _canonical([named.name, told])
        if key not in self._methods:
            self._methods[key] = build.method(named.name, net, data, asked, fields)
        return self._methods[key]

    def stream(self, experiment: Experiment) -> Stream:
        """The streams of an experiment."""
        return self.play(experiment.dataset, experiment.scenario, experiment.seeds, experiment.batch)

    def play(self, dataset: Named, scenario: Named, seeds: Sequence[int] = (0,), batch: int = 64) -> Stream:
        """Streams of a data set, made once: experiments with the same data, protocol and seeds share them."""
        key = _canonical([dataset.json(), scenario.json(), list(seeds), batch])
        if key not in self._streams:
            protocol = build.scenario(scenario.name, None, revived(scenario.fields))
            self._streams[key] = Stream(self.dataset(dataset), protocol, seeds, batch)
        return self._streams[key]

    def images(self, experiment: Experiment) -> int:
        """How many images all streams of an experiment play."""
        return sum(len(schedule.index) for schedule in self.stream(experiment).schedules)


class _Digest(str):
    """Source knowledge that is found by its place, and known by this hash."""


def revived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as components take them, from plain data."""
    return {name: _revive(value) for name, value in fields.items()}


def _revive(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_revive(v) for v in value)
    if isinstance(value, dict) and value.keys() == {"knowledge"}:
        return _Digest(value["knowledge"])
    if isinstance(value, dict) and value.keys() == {"augment"}:
        return Augment(**revived(value["augment"]))
    return value


def named(name: str, component: Any) -> Named:
    """A data set or scenario in plain data."""
    told = build.described(name, component)
    fields = {k: v for k, v in told["fields"].items() if k not in INCIDENTAL}
    return Named(name, json.loads(_canonical(fields)), told.get("code"))


def method_fields(method: Method) -> dict[str, Any]:
    """A method's fields in plain data; source knowledge is its hash."""
    fields = method_to_json(method)
    for name, value in fields.items():
        own = getattr(method, name)
        if isinstance(own, Knowledge):
            fields[name] = {"knowledge": own.digest}
        elif isinstance(value, dict) and "callable" in value:
            raise ValueError(
                f"{method.name}.{name} is {value['callable']}, which no file can hold; an experiment is data"
            )
    plain: dict[str, Any] = json.loads(_canonical(fields))
    return plain


# -- files ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _held(folder: Path, wait: bool) -> Iterator[None]:
    """Make a folder and hold an exclusive lock on it. Where there are no locks, the last writer wins."""
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", wait=wait, busy=f"another process is computing {folder}") as locked:
        if not locked:
            warnings.warn(f"{folder} cannot be locked: let one process at a time write", stacklevel=3)
        yield


def _set_aside(path: Path, reason: str) -> None:
    """Rename a file that cannot be used, so that nothing is lost, and say so."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.replace(path, aside)
    warnings.warn(f"{reason}. It was set aside as {aside.name} and is computed again", stacklevel=3)


def _spec(path: Path) -> Experiment:
    told = _read(path)
    if told.get("format") != FORMAT:
        raise ValueError(f"{path} is no specification of an experiment")
    if not isinstance(told.get("schema"), int) or told["schema"] > SCHEMA:
        raise NewerResults(
            f"{path.parent} was written by a newer version of tribe (schema {told.get('schema')}; this one knows "
            f"{SCHEMA}): upgrade tribe, or use another folder for results"
        )
    if told["schema"] < SCHEMA:
        raise ValueError(
            f"{path.parent} was written by an older version of tribe (schema {told['schema']}; this one writes "
            f"{SCHEMA}), which did not say on which images: move it out of the folder, and compute it again"
        )
    if not isinstance(told.get("spec"), dict):
        raise ValueError(f"{path} is damaged: it does not say of which experiment it is")
    experiment = Experiment.from_json(told["spec"])
    if experiment.id != told.get("id"):
        raise ValueError(f"{path} was changed by hand: it holds {experiment.id}, not {told.get('id')}")
    return experiment


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if not isinstance(told, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return told


def _record(path: Path) -> Record:
    try:
        return Record.load(path)
    except (OSError, ValueError):
        raise
    except Exception as error:  # damaged bytes make numpy, zip and zlib fail in any way
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _write(path: Path, told: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(told, indent=1, allow_nan=False) + "\n").encode())


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# -- numbers ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _scores(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """What metrics.json holds of each seed."""
    return {str(record.spec["seed"]): _score(record) for record in records}


def _score(record: Record) -> dict[str, Any]:
    scores = {"images": len(record.label), **metrics.summary(record)}
    del scores["seconds_per_image"]  # of the environment, and never the same twice
    if not bool((record.label >= 0).any()):
        return {**scores, "domain_error": {}, "class_counts": {}}
    errors = [None if error != error else error for error in metrics.domain_error(record).tolist()]
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
