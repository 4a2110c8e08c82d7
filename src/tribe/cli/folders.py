"""A folder holds results of one set of settings: it is named for them, and results of others are refused, not mixed in.

What may differ within one is the method and the seed, which the names of its records say: ``tribe-seed0.npz``.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tribe
from tribe.lab.record import Record
from tribe.lab.spec import differences

LONG = 120  # letters of a name, beyond which a hash stands for what was set
SHORT_NAMES = {"scenario.imbalance": "imbalance", "dataset.severities": "severity"}  # these have options of their own
PLACES = ("data", "root")  # of data sets
OF_A_RECORD = ("method", "fields", "code", "seed")  # in its spec, beside what the folder is about

Records = dict[str, list[Record]]  # by method, one a seed


class Left(NamedTuple):
    """What earlier runs left in a folder."""

    records: Records
    damaged: list[str]  # in words: files by the name of records that cannot be read


def folder_name(base: str, departures: Sequence[str]) -> str:
    """A name for results: what was played and, where that is not all by default, in what it departs."""
    name = file_name("-".join((base, *departures)))
    if len(name) <= LONG:
        return name
    return f"{file_name(base)}-{hashlib.sha256(repr(departures).encode()).hexdigest()[:8]}"


def departures(components: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In what a run is not the default: fields of components that are built, and those that others were given."""
    told: dict[str, Any] = {}
    for owner, component in components.items():
        for field in dataclasses.fields(component):
            value = getattr(component, field.name)
            if field.name not in PLACES and value != field.default:
                told[f"{owner}.{field.name}"] = value
    told |= {f"{owner}.{name}": value for owner, fields in given.items() for name, value in fields.items()}
    return [f"{SHORT_NAMES.get(place, place)}={_value(value)}" for place, value in told.items()]


def record_file(folder: Path, method: str, seed: int) -> Path:
    """Where the record of a method and a seed lies."""
    return folder / f"{file_name(method)}-seed{seed}.npz"


def earlier(folder: Path, specs: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> Left:
    """The records that earlier runs, or others meanwhile, left in a folder; refused if they are of other settings.

    Args:
        folder: of results; it may not be there yet.
        specs: of the methods that will be run, as their records will say it but for the seed.
        seeds: that will be run.
    """
    targets = {record_file(folder, method, seed) for method in specs for seed in seeds}
    known = {file_name(name): name for name in (*tribe.methods.names(), *tribe.methods.variants())}
    found: Records = {}
    damaged: list[str] = []
    for path in sorted(folder.glob("*-seed*.npz")):
        try:
            record = Record.load(path)
        except ValueError as error:
            if path in targets:
                raise ValueError(f"{error}. It would be lost: move it away, or say --out ANOTHER") from error
            damaged.append(str(error))  # in nobody's way
            continue
        name = path.stem.rpartition("-seed")[0]
        name = known.get(name, name)
        _refuse_others(path, record, specs, name)
        found.setdefault(name, []).append(record)
    return Left(found, damaged)


def together(before: Records, now: Records) -> Records:
    """What lies in a folder after a run: what was there, less what was made again."""
    both: Records = {}
    for name in (*now, *(name for name in before if name not in now)):
        by_seed = {record.spec["seed"]: record for record in (*before.get(name, ()), *now.get(name, ()))}
        both[name] = [by_seed[seed] for seed in sorted(by_seed)]
    return both


def file_name(text: str) -> str:
    """A text as a name that every file system takes."""
    return "".join(c if c.isalnum() or c in "-_.@=," else "_" for c in text)


def _refuse_others(path: Path, record: Record, specs: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Refuse a record whose spec is another; the fields of a method that is not run again may be any."""
    free = ("method", "seed") if name in specs else OF_A_RECORD
    there, here = (
        {key: value for key, value in spec.items() if key not in free}
        for spec in (record.spec, specs.get(name) or next(iter(specs.values())))
    )
    # A field that is None may be younger than the record.
    if apart := [f"{place} is {a!r} there and {b!r} here" for place, a, b in differences(there, here) if a != b]:
        more = f", and {len(apart) - 3} more" if len(apart) > 3 else ""
        raise ValueError(
            f"{path} is of other settings, which must not be mixed with these: {'; '.join(apart[:3])}{more}. Say "
            f"--out ANOTHER to keep both, or move {path.parent} away"
        )


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return ",".join(map(_value, value)) if isinstance(value, list | tuple) else str(value)
