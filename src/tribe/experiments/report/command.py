"""The command that computes a result again: `tribe run` with the options of a spec, and notes on what it cannot set."""

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tribe import methods, norms
from tribe.core.backbone import Backbone
from tribe.data import datasets, models, scenarios
from tribe.fields import is_number
from tribe.methods.encoding import decode_value, encode_fields
from tribe.registry import Registry

Fields = Mapping[str, Any]
FOUND = ("classes", "knowledge")  # fields of a method that `tribe run` sets by itself
ROOM = "room"  # a field that `tribe run` raises for larger images
REGISTRIES: Mapping[str, Registry[Any]] = {
    "dataset": datasets.registry,
    "scenario": scenarios.registry,
    "method": methods.registry,
}
FILE_NAME = re.compile(r"[\w.+-]+")
UNKNOWN_FILE = "FILE.py:CLASS"  # of a custom component, where the result does not say it


class Command(NamedTuple):
    """A command line for every run of consecutive seeds, and notes to read before."""

    lines: tuple[str, ...]
    notes: tuple[str, ...]


def is_known(method: str | None) -> bool:
    """Whether this is a method, or a variant of one, that is registered here; with a time filter or without."""
    return method is not None and methods.parse(method).method in methods.names()


def component(value: Any) -> tuple[str | None, Fields]:
    """Name and fields of a component in a spec; (None, {}) where its form is unknown."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        fields = value.get("fields")
        return value["name"], fields if isinstance(fields, Mapping) else {}
    return None, {}


def departures(spec: Fields) -> dict[str, Any]:
    """The fields in which a spec's method differs from what `tribe run` chooses for the data set.

    Fields that follow from others, as TRIBE's details follow from its convention, are left out.
    """
    (name, fields), (data, _) = component(spec.get("method")), component(spec.get("dataset"))
    known = {key: value for key, value in fields.items() if key not in FOUND}
    usual = _built(name, data, fields, {})
    if ROOM in usual and is_number(known.get(ROOM)) and known[ROOM] >= usual[ROOM]:
        del known[ROOM]
    overrides = _differing(known, usual)
    for key in list(overrides):
        others = {other: value for other, value in overrides.items() if other != key}
        if _differing(known, _built(name, data, fields, others)).keys() <= _nested(others):
            overrides = others
    return overrides


def _built(name: str | None, data: str | None, fields: Fields, overrides: Fields) -> dict[str, Any]:
    """The fields of a method with some overrides; none if it cannot be built here."""
    if name is None or not is_known(name):
        return {}
    clean = datasets.optional(_class(datasets.registry, data), "clean_name") or data
    given = {**methods.get(name).presets.get(str(clean), {}), "classes": fields.get("classes"), **overrides}
    try:
        method = methods.create(name, **{k: decode_value(v) for k, v in given.items() if not isinstance(v, Mapping)})
    except (ValueError, TypeError, AttributeError, ArithmeticError):  # no run has had such fields
        return {}
    return dict(_plain(encode_fields(method)))


def _nested(fields: Fields) -> set[str]:
    """The fields whose values have fields themselves, which no command line can set."""
    return {key for key, value in fields.items() if isinstance(value, Mapping)}


def command(spec: Fields, seeds: Sequence[int], files: Any = None) -> Command:
    """The command that computes a spec again, for some seeds.

    ``files``: of custom components by their role, such as {"method": "mine.py:Mine"}, as environment.json has them.
    """
    (data, data_fields), (model, model_fields) = component(spec.get("dataset")), component(spec.get("model"))
    (protocol, protocol_fields), (method, method_fields) = (
        component(spec.get("scenario")),
        component(spec.get("method")),
    )
    if data is None or model is None or protocol is None or method is None:
        missing = [k for k in ("dataset", "model", "scenario", "method") if component(spec.get(k))[0] is None]
        return Command((), (f"no command: the record does not say its {', '.join(missing)}",))
    places = _places(spec, files)
    adapting = places["method"] + methods.parse(method).suffix if "method" in places else method
    words = ["tribe", "run", "--dataset", places.get("dataset", data), "--model", model]
    words += ["--scenario", places.get("scenario", protocol), "--methods", adapting]
    if protocol_fields.get("imbalance") is not None:
        words += ["--set", f"scenario.imbalance={_literal(protocol_fields['imbalance']).removesuffix('.0')}"]
    words += [
        word for key in ("batch", "precision", "device") if key in spec for word in ("--set", f"{key}={spec[key]}")
    ]
    overrides = {
        "dataset": _differing(data_fields, _defaults(datasets.registry, data)),
        "model": model_fields,
        "scenario": _settings_of(protocol, protocol_fields, data_fields),
        method: departures(spec),
    }
    if "rule" in places:
        overrides[method] = {**overrides[method], "rule": places["rule"]}
    unset = [f"{owner}.{field}" for owner, fields in overrides.items() for field in sorted(_nested(fields))]
    notes = [f"{field} cannot be set on the command line: see the spec" for field in unset]
    notes += _notes_on_code(spec, places)
    if (why := _other_weights(spec, model, data)) is not None:
        words += ["--weights", "FILE"]
        notes.append(why)
    if method_fields.get("knowledge") is not None:
        notes.append("it needs the source knowledge that the spec names; `tribe source` makes it")
    if data == "folder":
        words += ["--data", "IMAGES"]
        notes.append("IMAGES is the folder of the pictures, which a record does not keep")
    for owner, fields in overrides.items():
        plain = [(key, value) for key, value in fields.items() if key not in _nested(fields)]
        words += [word for key, value in plain for word in ("--set", f"{owner}.{key}={_literal(value)}")]
    words += ["--seeds", "".join(f"{seed}," for seed in sorted(set(seeds))), "--out", "again"]
    threads = f"OMP_NUM_THREADS={spec['threads']} " if isinstance(spec.get("threads"), int) else ""
    return Command((threads + shlex.join(words),), tuple(notes))


def _places(spec: Fields, files: Any) -> dict[str, str]:
    """File and class of each custom component by its role; "rule": of the method's norm rule."""
    known = (
        {role: place for role, place in files.items() if isinstance(place, str)} if isinstance(files, Mapping) else {}
    )
    custom = [
        role
        for role, registry in REGISTRIES.items()
        if _code(spec, role) is not None and not _is_ours(registry, component(spec.get(role))[0])
    ]
    found = {role: known.get(role, UNKNOWN_FILE) for role in custom}
    rule = component(spec.get("method"))[1].get("rule")
    if _code(spec, "method") is not None and isinstance(rule, str):
        name, bracket, rest = rule.partition("(")
        if not _is_ours(norms.registry, name.strip()):
            found["rule"] = known.get("rule", UNKNOWN_FILE) + bracket + rest
    return found


def _notes_on_code(spec: Fields, places: Mapping[str, str]) -> list[str]:
    """A note on each component with custom code."""
    notes = []
    for role in ("dataset", "model", "scenario", "method"):
        if (code := _code(spec, role)) is not None:
            name = component(spec.get(role))[0]
            place = places.get(role) or (places.get("rule") if role == "method" else None)
            what = f"the {role} {name}" + (f", {place}," if place else "")
            weights = f" and weights with the fingerprint {spec.get('weights')}" if role == "model" else ""
            notes.append(f"{what} is custom code with the digest {code}{weights}, which a result does not keep")
    return notes


def _code(spec: Fields, role: str) -> str | None:
    """The digest of a component's custom code; None: it is part of tribe, or of a library."""
    value = spec.get(role)
    code = value.get("code") if isinstance(value, Mapping) else None
    return code if isinstance(code, str) else None


def _is_ours(registry: Registry[Any], name: str | None) -> bool:
    """Whether a component is part of tribe."""
    cls = _class(registry, None if name is None else methods.parse(name).method)
    return cls is not None and cls.__module__.partition(".")[0] == "tribe"


def _other_weights(spec: Fields, model: str, data: str) -> str | None:
    """A note on the weights, if `tribe run` would find others or none; None: it finds the same, or cannot tell."""
    mark, (_, fields) = spec.get("weights"), component(spec.get("model"))
    if not isinstance(mark, str) or model not in models.names():
        return None  # those of a library would have to be downloaded, those of a custom network come with its code
    clean = datasets.optional(_class(datasets.registry, data), "clean_name") or data
    try:
        path = models.find(model, clean if FILE_NAME.fullmatch(clean) else "")
        given = tuple((name, decode_value(value)) for name, value in sorted(fields.items()))
        found = _fingerprint(model, path, path.stat().st_mtime_ns, given)
        here = f"those that are found here have {found}"
    except OSError:
        found, here = None, "none are found here"
    except (ValueError, TypeError):
        found, here = None, "those that are found here do not fit"
    return None if found == mark else f"FILE holds weights of {model} with the fingerprint {mark}; {here}"


@functools.lru_cache(maxsize=64)
def _fingerprint(model: str, path: Path, changed: int, fields: tuple[tuple[str, Any], ...]) -> str:
    """The fingerprint of a network with weights from a file that was changed at a time; it takes a while."""
    return Backbone(models.load(model, path, **dict(fields))).fingerprint()


def _settings_of(name: str, fields: Fields, data_fields: Fields) -> dict[str, Any]:
    """The fields to set of a scenario; not its domains where they are those of the data set."""
    differing = _differing(fields, _defaults(scenarios.registry, name))
    corruptions, severities = data_fields.get("corruptions"), data_fields.get("severities")
    if isinstance(corruptions, list) and isinstance(severities, list):
        given = [f"{corruption}@{severity}" for corruption in corruptions for severity in severities]
        differing = _differing(differing, {"domains": given})
    return {key: value for key, value in differing.items() if key != "imbalance" or value is None}


def _literal(value: Any) -> str:
    """A value as `--set` reads it: a Python literal, with quotes that a shell leaves alone.

    >>> _literal(["fog", 5]), _literal(None)
    ('("fog", 5)', 'None')
    """
    if isinstance(value, list):
        return f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _differing(fields: Fields, usual: Fields) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in usual or usual[key] != value}


def _defaults(registry: Registry[Any], name: str | None) -> dict[str, Any]:
    """The defaults of a registered component as a spec holds them; none if it is unknown here."""
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
