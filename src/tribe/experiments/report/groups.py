"""Find the results in a folder tree, and group those of the same stream and network.

All of a spec but the method and the seed makes a *group*. In a group, a method with its fields is a *row*, whose
results differ in nothing but the seed.
"""

import json
import math
import re
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tribe import methods
from tribe.data import datasets
from tribe.experiments import metrics
from tribe.experiments.experiment import Experiment
from tribe.experiments.record import UNREADABLE, Record, Watched
from tribe.experiments.spec import by_place, plain, with_whole_numbers
from tribe.experiments.statistics import Spread, spread
from tribe.experiments.store import PACK, Result, ResultStore, changed, record_path
from tribe.fields import is_number
from tribe.methods.encoding import decode_value, encode_fields

CLOCK, REAL_TIME = "realtime", "real time x"  # the field of a spec for runs in real time, and what its fact begins with
OF_A_ROW = ("method", "seed", "experiment", CLOCK)  # what may differ within a group; of the clock, the cost
CHOSEN = ("classes", "knowledge")  # fields of a method that `tribe run` sets by itself
ROOM = "room"  # a field that `tribe run` raises for larger images
MOST_DOMAINS = 2**13  # of a record: each has a column, and a page of more takes minutes to write and to show
Fields = Mapping[str, Any]
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
DIGEST = re.compile(r"[0-9a-f]{32,}")


class Column(NamedTuple):
    """A metric that every row of a table shows."""

    name: str
    short: str
    key: str  # among the scores of a stream
    scale: float
    needs_labels: bool = True
    spread: bool = True  # whether to show the standard deviation over seeds
    best: bool = True  # whether to mark the lowest


INSTANCE = Column("instance error, %", "instance", "instance_error", 100)
CATEGORY = Column("category error, %", "category", "category_error", 100)
CALIBRATION = Column("ECE, %", "ECE", "calibration_error", 100)
CONFIDENCE = Column("confidence, %", "confidence", "confidence", 100, needs_labels=False, best=False)
COST = Column("ms per image", "ms", "seconds_per_image", 1000, needs_labels=False, spread=False)
SHORT = (INSTANCE, CATEGORY, COST)
LONG = (INSTANCE, CATEGORY, CALIBRATION, CONFIDENCE, COST)


def mean_text(score: Spread) -> str:
    """Return the mean, as printed; a dash where there is none."""
    return "–" if math.isnan(score.mean) else f"{score.mean:.2f}"


def best(scores: Sequence[Spread]) -> str | None:
    """Return the lowest mean, as printed; several scores may have it. None if fewer than two have a mean."""
    known = [score for score in scores if not math.isnan(score.mean)]
    return mean_text(min(known, key=lambda score: score.mean)) if len(known) > 1 else None


class PlayedStream(NamedTuple):
    """The result of one stream: its metrics and, unless only these were kept, its record."""

    path: str  # relative to the folder
    spec: Mapping[str, Any]
    environment: Mapping[str, Any]  # see tribe.experiments.store; empty: unknown
    scores: Mapping[str, Any]  # of tribe.experiments.metrics; "seconds_per_image" and, of a record, "confidence"
    domains: tuple[str, ...]
    classes: int
    record: Record | None

    @property
    def seed(self) -> Any:
        """Of the stream."""
        return self.spec.get("seed")


class MethodRow(NamedTuple):
    """A method with its fields, on the streams of a group."""

    label: str  # the method, and the fields in which it departs from the published ones for the data set
    played: tuple[PlayedStream, ...]  # by seed

    @property
    def inferences(self) -> float:
        """The cost of the method in real time, relative to plain inference; NaN where the stream waited."""
        return _clock(self.played[0].spec).get("cost", math.nan)

    @property
    def records(self) -> list[Record]:
        """The records, as far as they were kept."""
        return [played.record for played in self.played if played.record is not None]

    @property
    def labelled(self) -> list[PlayedStream]:
        """The streams with labels."""
        return [played for played in self.played if played.scores.get("instance_error") is not None]

    @property
    def judged(self) -> list[Record]:
        """The records with labels."""
        return [record for record in self.records if bool((record.label >= 0).any())]

    @property
    def watched(self) -> list[tuple[Record, Watched]]:
        """The records with labels of streams that were watched or guarded, and what was watched."""
        return [(record, record.watched) for record in self.judged if record.watched is not None]

    def score(self, column: Column) -> Spread:
        """Return the mean over seeds, NaN where there is none, and the standard deviation if the column shows it."""
        found = [played.scores.get(column.key) for played in (self.labelled if column.needs_labels else self.played)]
        score = spread([math.nan if value is None else column.scale * value for value in found] or [math.nan])
        return score if column.spread else score._replace(deviation=None)


class ResultGroup(NamedTuple):
    """Rows that can be compared."""

    facts: tuple[str, ...]  # data set, scenario, imbalance, network, and what else distinguishes it from other groups
    rows: tuple[MethodRow, ...]
    stream: str = ""  # a text that groups have in common if they differ in their speed only

    @property
    def speed(self) -> float | None:
        """The speed of a stream that does not wait, relative to plain inference; None: it waits."""
        return _clock(self.rows[0].played[0].spec).get("speed")

    @property
    def title(self) -> str:
        """The facts in one line."""
        return ", ".join(self.facts)

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of its streams."""
        return self.rows[0].played[0].domains

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.rows[0].played[0].classes


class Runs(NamedTuple):
    """All results in a folder."""

    groups: tuple[ResultGroup, ...]
    damaged: tuple[tuple[str, str], ...]  # path, reason
    repeated: tuple[tuple[str, str], ...]  # path, and the result that says the same or contradicts it

    @property
    def labels(self) -> list[str]:
        """The labels of all rows, the source network first."""
        return sorted({row.label for group in self.groups for row in group.rows}, key=_source_first)


def collect(folder: str | PathLike[str]) -> Runs:
    """Read all records under a folder, and all results that were kept without records."""
    root = Path(folder)
    if not root.is_dir():
        raise NotADirectoryError(f"no folder {folder}; expected one with results, such as `tribe run` leaves")
    found: list[PlayedStream] = []
    stores = [ResultStore(folder) for folder in sorted({pack.parent for pack in root.rglob(f"*{PACK}")})]
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the page names damaged lines
        results = [result for one in stores for result in one.results()]
    damaged = [(file.relative_to(root).as_posix(), reason) for one in stores for file, reason in one.damaged]
    environments = {
        record_path(result.folder, seed): stream.environment
        for result in results
        for seed, stream in result.streams.items()
    }
    for file in sorted(file for file in root.rglob("*.npz") if file.is_file()):
        path = file.relative_to(root).as_posix()
        try:
            found += _read(file, path, environments)
        except (*UNREADABLE, MemoryError) as error:
            damaged.append((path, f"{error}".replace(str(file), "the file") or type(error).__name__))
    for result in results:
        found += _without_record(result, root, damaged)
    if not found and not damaged:
        raise FileNotFoundError(
            f"no record or result under {folder}; expected what `tribe run` or tribe.Record.save leaves: make "
            f"some with `tribe run --out {folder}`"
        )
    single, repeated = _without_repeats(found)
    return Runs(_grouped(single), tuple(damaged), tuple(repeated))


def _without_record(result: Result, root: Path, damaged: list[tuple[str, str]]) -> Iterator[PlayedStream]:
    """Yield the streams of a result without a record; append those whose metrics contradict each other to damaged."""
    for seed, stream in result.streams.items():
        if record_path(result.folder, seed).exists():
            continue
        scores = {**stream.metrics, "seconds_per_image": stream.environment.get("seconds_per_image")}
        counts = scores["class_counts"]
        domains = tuple(counts or result.experiment.scenario.fields.get("domains") or ())
        if counts.keys() != scores["domain_error"].keys():
            damaged.append((result.folder.relative_to(root).as_posix(), "the metrics are damaged: domains differ"))
            continue
        classes = len(next(iter(counts.values()))) if counts else int(result.experiment.method.fields["classes"] or 0)
        path = result.folder.relative_to(root).as_posix()
        spec = {**result.experiment.json(), "experiment": result.experiment.id, "seed": seed}
        yield PlayedStream(path, spec, stream.environment, scores, domains, classes, None)


def _read(file: Path, path: str, environments: Mapping[Path, Mapping[str, Any]]) -> list[PlayedStream]:
    """Return the record in a file; none if it is an npz file of another kind, such as a schedule."""
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not an npz file, or it was cut short")
    with zipfile.ZipFile(file) as inside:
        if "words.npy" not in inside.namelist():
            return []
    record = Record.load(file)
    if not len(record.label):
        raise ValueError("it is empty: not one image was predicted")
    if len(record.domains) > MOST_DOMAINS:
        raise ValueError(f"it has {len(record.domains):,} domains; a page shows at most {MOST_DOMAINS:,}")
    scores = metrics.scores(record) | {
        "seconds_per_image": metrics.seconds_per_image(record).item(),
        "confidence": record.confidence.double().mean().item(),
    }
    return [PlayedStream(path, record.spec, environments.get(file, {}), scores, record.domains, record.classes, record)]


def _without_repeats(found: list[PlayedStream]) -> tuple[list[PlayedStream], list[tuple[str, str]]]:
    """Return one result for each spec and seed: a copy would count twice in every mean.

    A result of other source code than today's counts last. Of the others, those with records come first.
    """
    kept: dict[str, PlayedStream] = {}
    repeated: list[tuple[str, str]] = []
    for played in sorted(found, key=_is_stale):
        spec = {key: value for key, value in played.spec.items() if key != "experiment"}  # seed 0 alone, and beside 1
        first = kept.setdefault(_canonical([spec, played.domains, played.classes]), played)
        if first is not played:
            other = "has the same spec and seed but PREDICTS OTHERWISE than"
            relation = "predicts the same as" if _same(first, played) else other
            repeated.append((played.path, f"{relation} {first.path}, which is the one shown"))
    return list(kept.values()), repeated


def _is_stale(played: PlayedStream) -> bool:
    """Whether the source code has changed since a stream was played; see `tribe.experiments.store.changed`."""
    spec = {key: value for key, value in played.spec.items() if key not in ("seed", "experiment")}
    code = played.environment.get("code", {})
    try:
        return bool(code) and bool(changed(Experiment.from_json(spec, [played.seed]), code))
    except (ValueError, KeyError, TypeError, AttributeError):  # the spec of no experiment
        return False


def _same(one: PlayedStream, other: PlayedStream) -> bool:
    if one.record is None or other.record is None:
        return all(one.scores.get(key) == other.scores.get(key) for key in ("images", "instance_error", "domain_error"))
    pairs = zip(one.record[:3], other.record[:3], strict=True)  # domain, label, prediction
    return all(torch.equal(a, b) for a, b in pairs)


def _grouped(found: list[PlayedStream]) -> tuple[ResultGroup, ...]:
    groups: dict[str, dict[str, list[PlayedStream]]] = defaultdict(lambda: defaultdict(list))
    for played in found:
        shared = {key: value for key, value in played.spec.items() if key not in OF_A_ROW}
        clock = _clock(played.spec)
        shared |= {CLOCK: clock["speed"]} if clock else {}
        group = groups[_canonical([shared, played.domains, played.classes])]
        group[_canonical([played.spec.get("method"), clock.get("cost")])].append(played)
    facts = sorted(_facts(list(groups)), key=lambda pair: (_natural(" ".join(pair[1])), pair[0]))
    return tuple(ResultGroup(texts, _rows(groups[key]), _without_clock(key)) for key, texts in facts)


def _clock(spec: Fields) -> dict[str, float]:
    """Return speed and cost of a spec in real time; nothing if it is in none, or damaged."""
    clock = spec.get(CLOCK)
    if not isinstance(clock, Mapping) or not all(is_number(clock.get(name)) for name in ("speed", "cost")):
        return {}
    return {name: float(clock[name]) for name in ("speed", "cost")}


def _without_clock(key: str) -> str:
    """Return the key of a group without its speed."""
    shared, *tables = json.loads(key)
    return _canonical([{name: value for name, value in shared.items() if name != CLOCK}, *tables])


def _rows(rows: Mapping[str, list[PlayedStream]]) -> tuple[MethodRow, ...]:
    counts: Counter[str] = Counter()
    made = []
    for key in sorted(rows):
        label = _label(rows[key][0].spec)
        counts[label] += 1
        number = f" ({counts[label]})" if counts[label] > 1 else ""
        made.append(MethodRow(label + number, tuple(sorted(rows[key], key=lambda p: _natural(str(p.seed))))))
    return tuple(sorted(made, key=lambda row: _source_first(row.label)))


def _label(spec: Mapping[str, Any]) -> str:
    """Return the name of a spec's method, with the fields that differ from the published ones."""
    name = component(spec.get("method"))[0] or "no method named"
    return ", ".join((name, *(_field(place, value) for place, value in by_place(departures(spec)).items())))


def _facts(keys: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the main facts of each group; groups with equal facts also get the fields in which they differ."""
    specs = {key: json.loads(key) for key in keys}
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key in sorted(keys):
        alike[_main_facts(specs[key][0])].append(key)
    found = []
    for facts, same in alike.items():
        shared, *tables = zip(*(specs[key] for key in same), strict=True)  # only the tables differ if no spec does
        flat = [by_place(spec) for spec in shared]
        if not (fields := _distinguishing(flat)):
            flat = [{"domains": domains, "classes": classes} for domains, classes in zip(*tables, strict=True)]
            fields = _distinguishing(flat)
        for key, values in zip(same, flat, strict=True):
            more = (_field(field.replace(".fields", ""), values.get(field, "unknown")) for field in fields)
            found.append((key, (*facts, *more)))
    return found


def _distinguishing(flat: Sequence[Fields]) -> list[str]:
    """Return the fields in which some differ."""
    fields = sorted({field for found in flat for field in found})
    return [field for field in fields if len({_canonical(found.get(field)) for found in flat}) > 1]


def _main_facts(spec: Mapping[str, Any]) -> tuple[str, ...]:
    (data, _), (model, _) = component(spec.get("dataset")), component(spec.get("model"))
    scenario, fields = component(spec.get("scenario"))
    imbalance = fields.get("imbalance")
    rare = f"imbalance {_short(imbalance)}" if imbalance is not None else None
    clock = f"{REAL_TIME} {_short(spec[CLOCK])}" if CLOCK in spec else None
    return tuple(fact for fact in (data or "no data set named", scenario, rare, model, clock) if fact)


def _field(place: str, value: Any) -> str:
    """Return a field of a spec in a few characters; of source knowledge, the beginning of its digest."""
    name = place.removesuffix(".knowledge")
    return f"{place} {_short(value)}" if name == place else f"{name} {str(value)[:8]}"


def _short(value: Any) -> str:
    """Return a value in a few characters; a long list by its ends and length, a digest by its beginning."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        shown = ", ".join(map(_short, value if len(value) <= 3 else [value[0], "…", value[-1]]))
        return f"({shown})" + (f" of {len(value)}" if len(value) > 3 else "")
    if DIGEST.fullmatch(str(value)):
        return str(value)[:8]
    return str(value) if len(str(value)) <= 40 else f"{str(value)[:39]}…"


def _canonical(value: Any) -> str:
    """Return the same text for equal values, such as 100 and 100.0."""
    return json.dumps(with_whole_numbers(value), sort_keys=True, default=repr)


def _natural(text: str) -> list[tuple[bool, float, str]]:
    """Return a key by which "imbalance 10" comes before "imbalance 100".

    >>> sorted(["imbalance 100", "imbalance 10", "iid"], key=_natural)
    ['iid', 'imbalance 10', 'imbalance 100']
    """
    numbers = {word: float(word) for word in text.split() if NUMBER.fullmatch(word)}
    return [(word not in numbers, numbers.get(word, 0.0), word) for word in text.split()]


def _source_first(label: str) -> tuple[bool, str]:
    return label != "source", label


def component(value: Any) -> tuple[str | None, Fields]:
    """Return name and fields of a component in a spec; (None, {}) where its form is unknown."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        fields = value.get("fields")
        return value["name"], fields if isinstance(fields, Mapping) else {}
    return None, {}


def departures(spec: Fields) -> dict[str, Any]:
    """Return the fields in which a spec's method differs from what `tribe run` chooses for the data set.

    Fields that follow from others, as TRIBE's details follow from its convention, are left out. Of a method that is
    not registered here, these are all its fields.
    """
    (name, fields), (data, _) = component(spec.get("method")), component(spec.get("dataset"))
    given = {key: value for key, value in fields.items() if key not in CHOSEN}
    usual = _built(name, data, fields, {})
    if ROOM in usual and is_number(given.get(ROOM)) and given[ROOM] >= usual[ROOM]:
        del given[ROOM]
    overrides = _differing(given, usual)
    for key in list(overrides):
        others = {other: value for other, value in overrides.items() if other != key}
        nested = {other for other, value in others.items() if isinstance(value, Mapping)}  # no command sets these
        if _differing(given, _built(name, data, fields, others)).keys() <= nested:
            overrides = others
    return overrides


def _built(name: str | None, data: str | None, fields: Fields, overrides: Fields) -> dict[str, Any]:
    """Return the fields of a method with some overrides; none if it is not registered or cannot be built here."""
    if name is None or methods.parse(name).method not in methods.names():
        return {}
    dataset = datasets.get(data) if data in datasets.names() else None
    clean = datasets.optional(dataset, "clean_name") or data
    given = {**methods.get(name).presets.get(str(clean), {}), "classes": fields.get("classes"), **overrides}
    try:
        method = methods.create(name, **{k: decode_value(v) for k, v in given.items() if not isinstance(v, Mapping)})
    except (ValueError, TypeError, AttributeError, ArithmeticError):  # no run has had such fields
        return {}
    return dict(plain(encode_fields(method)))


def _differing(fields: Fields, usual: Fields) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in usual or usual[key] != value}
