"""The command behind a number: what `tribe run` must be told to play a spec again, and what it cannot be told."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tribe import datasets, methods, scenarios
from tribe.registry import Registry

Fields = Mapping[str, Any]
FOUND = ("classes", "knowledge")  # fields of a method that `tribe run` finds by itself


class Command(NamedTuple):
    """What to type, a line for every stretch of consecutive seeds; and what to know before."""

    lines: tuple[str, ...]
    notes: tuple[str, ...]


def is_known(method: str | None) -> bool:
    """Whether this is a method, or a variant of one, that is registered here."""
    return method is not None and method.partition("/")[0] in methods.names()


def component(value: Any) -> tuple[str | None, Fields]:
    """Name and fields of a part of a spec; (None, {}) where it is of no known form."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        fields = value.get("fields")
        return value["name"], fields if isinstance(fields, Mapping) else {}
    return None, {}


def method_of(spec: Fields) -> tuple[str | None, Fields]:
    """Name and fields of a spec's method, whose fields may lie beside its name."""
    name, fields = component(spec.get("method"))
    beside = spec.get("fields")
    return name, beside if isinstance(beside, Mapping) else fields


def departures(spec: Fields) -> dict[str, Any]:
    """The fields in which a spec's method must be told to differ from what `tribe run` chooses for the data set.

    Fields that follow from others, as TRIBE's details follow from its convention, are not among them.
    """
    (name, fields), (data, _) = method_of(spec), component(spec.get("dataset"))
    told = {key: _bare(value) for key, value in fields.items() if key not in FOUND}
    usual = _built(name, data, fields, {})
    asked = _differing(told, usual)
    for key in list(asked):
        without = {other: value for other, value in asked.items() if other != key}
        if _differing(told, _built(name, data, fields, without)).keys() <= _nested(without):
            asked = without
    return asked


def _built(name: str | None, data: str | None, fields: Fields, asked: Fields) -> dict[str, Any]:
    """The fields that a method has if it is asked for some; nothing of one that cannot be built here."""
    if name is None or not is_known(name):
        return {}
    learned = datasets.optional(_class(datasets.registry, data), "clean_name") or data
    given = {**methods.get(name).presets.get(str(learned), {}), "classes": fields.get("classes"), **asked}
    try:
        made = methods.create(name, **{k: _frozen(v) for k, v in given.items() if not isinstance(v, Mapping)})
    except (ValueError, TypeError, AttributeError, ArithmeticError):  # fields that no run has had
        return {}
    return dict(_plain({field.name: getattr(made, field.name) for field in dataclasses.fields(made)}))


def _bare(value: Any) -> Any:
    """A value without the word that experiments put around augmentations."""
    return value["augment"] if isinstance(value, Mapping) and value.keys() == {"augment"} else value


def _nested(fields: Fields) -> set[str]:
    """Those whose values have fields of their own, which no command line can set."""
    return {key for key, value in fields.items() if isinstance(value, Mapping)}


def command(spec: Fields, seeds: Sequence[int]) -> Command:
    """The command that makes the records of a spec, for some seeds."""
    (data, data_fields), (model, model_fields) = component(spec.get("dataset")), component(spec.get("model"))
    (protocol, protocol_fields), (method, _) = component(spec.get("scenario")), method_of(spec)
    if data is None or model is None or protocol is None or method is None:
        lacking = [k for k in ("dataset", "model", "scenario", "method") if component(spec.get(k))[0] is None]
        return Command((), (f"no command: the record does not say its {', '.join(lacking)}",))
    words = ["tribe", "run", "--dataset", data, "--model", model, "--scenario", protocol, "--methods", method]
    if protocol_fields.get("imbalance") is not None:
        words += ["--imbalance", _said(protocol_fields["imbalance"]).removesuffix(".0")]
    options = {"batch": "--batch", "precision": "--precision", "device": "--device"}
    words += [word for key, option in options.items() if key in spec for word in (option, str(spec[key]))]
    asked = {
        "dataset": _differing(data_fields, _defaults(datasets.registry, data)),
        "model": model_fields,
        "scenario": _settings_of(protocol, protocol_fields, data_fields),
        method: departures(spec),
    }
    untold = [f"{owner}.{field}" for owner, fields in asked.items() for field in sorted(_nested(fields))]
    notes = [f"{field} cannot be told on the command line: see the spec" for field in untold]
    if method_of(spec)[1].get("knowledge") is not None:
        notes.append("it needs the source knowledge that the spec names; `tribe source` makes it")
    if data == "folder":
        words += ["--data", "IMAGES"]
        notes.append("IMAGES is the folder of the pictures, which a record does not keep")
    for owner, fields in asked.items():
        told = [(key, value) for key, value in fields.items() if key not in _nested(fields)]
        words += [word for key, value in told for word in ("--set", f"{owner}.{key}={_said(value)}")]
    starts = [["--seed", str(first), "--seeds", str(count), "--out", "again"] for first, count in _stretches(seeds)]
    threads = f"OMP_NUM_THREADS={spec['threads']} " if isinstance(spec.get("threads"), int) else ""
    return Command(tuple(threads + shlex.join(words + start) for start in starts), tuple(notes))


def _settings_of(name: str, fields: Fields, data_fields: Fields) -> dict[str, Any]:
    """What a scenario must be told; not its domains where they are simply those of the data set."""
    differing = _differing(fields, _defaults(scenarios.registry, name))
    corruptions, severities = data_fields.get("corruptions"), data_fields.get("severities")
    if isinstance(corruptions, list) and isinstance(severities, list):
        given = [f"{corruption}@{severity}" for corruption in corruptions for severity in severities]
        differing = _differing(differing, {"domains": given})
    return {key: value for key, value in differing.items() if key != "imbalance" or value is None}


def _said(value: Any) -> str:
    """A value as `--set` reads it: a Python literal, with the quotes that a shell leaves alone.

    >>> _said(["fog", 5]), _said(None)
    ('("fog", 5)', 'None')
    """
    if isinstance(value, list):
        return f"({', '.join(map(_said, value))}{',' * (len(value) == 1)})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _stretches(seeds: Sequence[int]) -> list[tuple[int, int]]:
    """Seeds as (first, how many) of consecutive ones.

    >>> _stretches([4, 0, 1])
    [(0, 2), (4, 1)]
    """
    found: list[tuple[int, int]] = []
    for seed in sorted(set(seeds)):
        if found and seed == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((seed, 1))
    return found


def _differing(fields: Fields, usual: Fields) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in usual or usual[key] != value}


def _defaults(registry: Registry[Any], name: str | None) -> dict[str, Any]:
    """A registered component's defaults as a spec would hold them; nothing of one that is unknown here."""
    cls = _class(registry, name)
    if cls is None:
        return {}
    found = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return dict(_plain(found))


def _class(registry: Registry[Any], name: str | None) -> type[Any] | None:
    return registry.get(name) if name is not None and name in registry.names() else None


def _plain(value: Any) -> Any:
    """A value as it comes back from JSON."""
    return json.loads(json.dumps(value, default=_fields_of))


def _fields_of(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else repr(value)
