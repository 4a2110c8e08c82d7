"""Find records in a folder tree, and put side by side only what was made on the same stream with the same network.

A record's spec says where it belongs: everything in it but the method, its fields and the seed makes a *group*; within
a group, a method with its fields is a *row*, whose records differ by nothing but their seed.
"""

import json
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tribe.fields import is_whole
from tribe.lab.record import Record
from tribe.lab.spec import by_place
from tribe.report.command import component, departures, is_known, method_of

OF_A_ROW = ("method", "fields", "code", "seed", "experiment")  # what may differ within a group
MOST_CLASSES = 2**16  # a record that claims more is damaged, and would only exhaust the memory
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, EOFError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)  # what numpy, zip, json and a record's own checks raise on bytes that are not what they should be


class Played(NamedTuple):
    """A record, where it lay, and the words about it."""

    path: str  # relative to the folder
    record: Record
    spec: Mapping[str, Any]
    machine: Mapping[str, Any]  # what it ran on, where that is known

    @property
    def seed(self) -> Any:
        """Of the stream."""
        return self.spec.get("seed")


class Row(NamedTuple):
    """A method with its fields, on the streams of a group."""

    label: str  # the method, and the fields in which it departs from what is published for the data set
    played: tuple[Played, ...]  # by seed

    @property
    def records(self) -> list[Record]:
        """All of them."""
        return [played.record for played in self.played]

    @property
    def judged(self) -> list[Record]:
        """Those with labels to be judged by."""
        return [record for record in self.records if bool((record.label >= 0).any())]


class Group(NamedTuple):
    """Rows that can be compared."""

    facts: tuple[str, ...]  # what it is: data set, scenario, imbalance, network, and what else tells it from others
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Its facts in a line."""
        return ", ".join(self.facts)

    @property
    def domains(self) -> tuple[str, ...]:
        """Those of its streams."""
        return self.rows[0].played[0].record.domains

    @property
    def classes(self) -> int:
        """How many the network tells apart."""
        return self.rows[0].played[0].record.classes


class Runs(NamedTuple):
    """What lies in a folder."""

    groups: tuple[Group, ...]
    damaged: tuple[tuple[str, str], ...]  # path, reason
    repeated: tuple[tuple[str, str], ...]  # path, and what was found to say the same, or to contradict it

    @property
    def labels(self) -> list[str]:
        """Of all rows, the source network first."""
        return sorted({row.label for group in self.groups for row in group.rows}, key=_source_first)


def collect(folder: str | PathLike[str]) -> Runs:
    """Read all records under a folder."""
    root = Path(folder)
    if not root.is_dir():
        raise NotADirectoryError(f"there is no folder {folder}; expected one with records, such as `tribe run` leaves")
    found: list[Played] = []
    damaged: list[tuple[str, str]] = []
    for file in sorted(file for file in root.rglob("*.npz") if file.is_file()):
        path = file.relative_to(root).as_posix()
        try:
            if not _is_another(file):
                found.append(_read(file, path))
        except UNREADABLE as error:
            damaged.append((path, f"{error}".replace(str(file), "the file") or type(error).__name__))
    if not found and not damaged:
        if any(root.rglob("metrics.json")):
            raise FileNotFoundError(
                f"{folder} holds results without their records, as `tribe reproduce --keep` copies them; a report "
                f"draws records: give it the folder they were run in, or make a page of the numbers with `tribe "
                f"reproduce document --runs {folder}`"
            )
        raise FileNotFoundError(
            f"there is no record under {folder}; expected *.npz of tribe.Record.save: make some with `tribe run --out "
            f"{folder}`"
        )
    single, repeated = _without_repeats(found)
    return Runs(_grouped(single), tuple(damaged), tuple(repeated))


# -- one file ---------------------------------------------------------------------------------------------------------


def _is_another(file: Path) -> bool:
    """Whether this is a sound npz of something else, such as a schedule."""
    try:
        with zipfile.ZipFile(file) as inside:
            return "words.npy" not in inside.namelist()
    except UNREADABLE:
        return False


def _read(file: Path, path: str) -> Played:
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not an npz file, or it was cut short")
    record = Record.load(file)
    _check(record)
    return Played(path, record, record.spec, _machine(file.parent, record.spec))


def _check(record: Record) -> None:
    """Refuse what no run writes, so that all that follows can rely on it."""
    if not isinstance(record.spec, Mapping) or not all(isinstance(name, str) for name in record.domains):
        raise ValueError("its words are damaged: expected a spec and the names of domains")
    if not is_whole(record.classes, least=1) or record.classes > MOST_CLASSES:
        raise ValueError(f"it is said to have {record.classes} classes; expected 1 to {MOST_CLASSES}")
    if not len(record.label):
        raise ValueError("it is empty: not one image was predicted")
    ranges = {"domain": (0, len(record.domains)), "label": (-1, record.classes), "prediction": (0, record.classes)}
    for name, (low, high) in ranges.items():
        column = getattr(record, name)
        if column.dtype != torch.int64 or column.ndim != 1 or column.min() < low or column.max() >= high:
            raise ValueError(f"its column {name} is damaged: expected integers from {low} to {high - 1}")
    for name in ("confidence", "seconds"):
        column = getattr(record, name)
        sound = column.is_floating_point() and column.ndim == 1 and not bool((column < 0).any() | column.isinf().any())
        if not sound or (name == "confidence" and bool((column > 1.001).any())):  # softmax may round up
            raise ValueError(f"its column {name} is damaged: expected {'shares' if name == 'confidence' else 'times'}")


def _machine(folder: Path, spec: Mapping[str, Any]) -> dict[str, Any]:
    """What the record was made on, if a file beside it says so and is about this record."""
    try:
        if "experiment" in spec:
            return dict(json.loads((folder / "environment.json").read_text())["machine"])
        words = json.loads((folder / "summary.json").read_text())
        mine = all(spec.get(key) == value for key, value in words["spec"].items())
        return dict(words["machine"]) if mine else {}
    except UNREADABLE:
        return {}


# -- many -------------------------------------------------------------------------------------------------------------


def _without_repeats(found: list[Played]) -> tuple[list[Played], list[tuple[str, str]]]:
    """One record for each spec and seed: a copy would count twice in every mean."""
    kept: dict[str, Played] = {}
    repeated: list[tuple[str, str]] = []
    for played in found:
        told = {key: value for key, value in played.spec.items() if key != "experiment"}  # seed 0 alone, and beside 1
        first = kept.setdefault(_canonical([told, played.record.domains, played.record.classes]), played)
        if first is not played:
            same = len(first.record.prediction) == len(played.record.prediction) and all(
                torch.equal(getattr(first.record, column), getattr(played.record, column))
                for column in ("domain", "label", "prediction")
            )
            word = "predicts the same as" if same else "has the same spec and seed but PREDICTS OTHERWISE than"
            repeated.append((played.path, f"{word} {first.path}, which is the one shown"))
    return list(kept.values()), repeated


def _grouped(found: list[Played]) -> tuple[Group, ...]:
    groups: dict[str, dict[str, list[Played]]] = defaultdict(lambda: defaultdict(list))
    for played in found:
        shared = {key: value for key, value in played.spec.items() if key not in OF_A_ROW}
        group = groups[_canonical([shared, played.record.domains, played.record.classes])]
        group[_canonical([method_of(played.spec), played.spec.get("code")])].append(played)
    told = sorted(_facts(list(groups)), key=lambda pair: (_natural(" ".join(pair[1])), pair[0]))
    labels = _labels([played.spec for played in found])
    return tuple(Group(facts, _rows(groups[key], labels)) for key, facts in told)


def _rows(rows: Mapping[str, list[Played]], named: Mapping[str, str]) -> tuple[Row, ...]:
    labels: dict[str, list[str]] = defaultdict(list)
    for key in sorted(rows):
        labels[named[_canonical(rows[key][0].spec)]].append(key)
    made = [
        Row(
            label + (f" ({i})" if i > 1 else ""),
            tuple(sorted(rows[key], key=lambda played: _natural(str(played.seed)))),
        )
        for label, keys in labels.items()
        for i, key in enumerate(keys, 1)
    ]
    return tuple(sorted(made, key=lambda row: _source_first(row.label)))


def _labels(specs: list[Mapping[str, Any]]) -> dict[str, str]:
    """For each spec its method's name, with the fields in which it departs from what is published for the data set.

    What is usual for a method that is unknown here cannot be known: there it is the fields that differ between records.
    """
    values: dict[str | None, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for spec in specs:
        name, fields = method_of(spec)
        for key, value in by_place(fields).items():
            values[name][key].add(_canonical(value))
    labels = {}
    for spec in specs:
        name, fields = method_of(spec)
        differing = {key: value for key, value in by_place(fields).items() if len(values[name][key]) > 1}
        told = by_place(departures(spec)) if is_known(name) else differing
        labels[_canonical(spec)] = ", ".join(
            (name or "no method named", *(f"{k} {_short(v)}" for k, v in told.items()))
        )
    return labels


def _facts(keys: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """What each group is, in a few words; those that would share them get what they differ in."""
    words = {key: json.loads(key) for key in keys}
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key in sorted(keys):
        alike[_main_facts(words[key][0])].append(key)
    told = []
    for facts, same in alike.items():
        flat = {key: by_place(words[key][0]) for key in same}
        telling = _telling(flat)
        if not telling:  # only the tables themselves know
            flat = {key: {"domains": words[key][1], "classes": words[key][2]} for key in same}
            telling = _telling(flat)
        for key in same:
            more = (f"{field.replace('.fields', '')} {_short(flat[key].get(field, 'not said'))}" for field in telling)
            told.append((key, (*facts, *more)))
    return told


def _telling(flat: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The fields in which some differ."""
    fields = sorted({field for found in flat.values() for field in found})
    return [field for field in fields if len({_canonical(found.get(field)) for found in flat.values()}) > 1]


def _main_facts(spec: Mapping[str, Any]) -> tuple[str, ...]:
    (data, _), (model, _) = component(spec.get("dataset")), component(spec.get("model"))
    scenario, fields = component(spec.get("scenario"))
    imbalance = fields.get("imbalance")
    rare = f"imbalance {_short(imbalance)}" if imbalance is not None else None
    return tuple(fact for fact in (data or "no data set named", scenario, rare, model) if fact)


def _short(value: Any) -> str:
    """A value in a few characters; long lists by their ends and length."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        shown = ", ".join(map(_short, value if len(value) <= 3 else [value[0], "…", value[-1]]))
        return f"({shown})" + (f" of {len(value)}" if len(value) > 3 else "")
    return str(value) if len(str(value)) <= 40 else f"{str(value)[:39]}…"


def _canonical(value: Any) -> str:
    """Text that is the same for what is the same, as 100 and 100.0 are."""
    return json.dumps(_whole(value), sort_keys=True, default=repr)


def _whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _whole(field) for key, field in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _natural(words: str) -> list[tuple[bool, float, str]]:
    """A key by which "imbalance 10" comes before "imbalance 100".

    >>> sorted(["imbalance 100", "imbalance 10", "iid"], key=_natural)
    ['iid', 'imbalance 10', 'imbalance 100']
    """
    numbers = {word: float(word) for word in words.split() if NUMBER.fullmatch(word)}
    return [(word not in numbers, numbers.get(word, 0.0), word) for word in words.split()]


def _source_first(label: str) -> tuple[bool, str]:
    return label != "source", label
