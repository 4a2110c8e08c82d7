"""``tribe list``: list the components that can be chosen by name."""

import dataclasses
import inspect
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tribe import filters, methods, norms
from tribe.cli.commands import app
from tribe.cli.options import AsJson
from tribe.cli.output import fail, print_json
from tribe.data import corruptions, datasets, models, scenarios
from tribe.fields import printable
from tribe.registry import Registry, nearest

REGISTRIES: dict[str, Registry[Any]] = {
    "methods": methods.registry,
    "filters": filters.registry,
    "norms": norms.registry,
    "scenarios": scenarios.registry,
    "datasets": datasets.registry,
    "models": models.registry,
}


@app.command("list")
def list_components(
    kind: Annotated[str, typer.Argument(help="Kind of component: methods, filters, norms, corruptions, ...")],
    as_json: AsJson = False,
) -> None:
    """List the components of a kind: name, idea, paper, and fields with their defaults.

    For methods, also the variants (`method/variant`) and the source knowledge that `tribe source` must make first.
    """
    if kind == "corruptions":
        components = [describe_corruption(name) for name in corruptions.names()]
    elif kind in REGISTRIES:
        components = [describe(REGISTRIES[kind], name) for name in REGISTRIES[kind].names()]
    else:
        fail(f"unknown kind {kind!r}: {nearest(kind, [*REGISTRIES, 'corruptions'])}")
    if as_json:
        print_json(components)
    else:
        Console().print(table(components))


def describe(registry: Registry[Any], name: str) -> dict[str, Any]:
    """Return a component as plain data; a field without ``default`` is required."""
    cls = registry.get(name)
    return {
        "name": name,
        "summary": summary(cls, registry),
        "paper": getattr(cls, "paper", None),
        "fields": {
            field.name: {**_default(field), "type": inspect.formatannotation(field.type)}
            for field in dataclasses.fields(cls)
            if field.init
        },
        "presets": getattr(cls, "presets", {}),
        "variants": getattr(cls, "variants", {}) if registry is methods.registry else {},
        "needs": getattr(cls, "needs", None),
    }


def describe_corruption(name: str) -> dict[str, Any]:
    """Return a corruption, family/name, as the same plain data; its summary is from its function or its module."""
    family, _, short = name.partition("/")
    function = corruptions.function(short, family)
    text = inspect.getdoc(function) or inspect.getdoc(sys.modules[function.__module__]) or ""
    empty: dict[str, Any] = {"paper": None, "fields": {}, "presets": {}, "variants": {}, "needs": None}
    return {"name": name, "summary": text.partition("\n")[0], **empty}


def summary(cls: type, registry: Registry[Any]) -> str:
    """Return the idea in one line: of the module, or of the class if the module has several components."""
    neighbours = [name for name in registry.names() if registry.get(name).__module__ == cls.__module__]
    file = inspect.getdoc(sys.modules[cls.__module__]) if len(neighbours) == 1 else None
    return (file or inspect.getdoc(cls) or "").partition("\n")[0]


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    if field.default_factory is not dataclasses.MISSING:
        return {"default": field.default_factory()}
    return {} if field.default is dataclasses.MISSING else {"default": field.default}


def table(components: list[dict[str, Any]]) -> Table:
    """Return the components as a table."""
    papers, settings = (any(c[key] for c in components) for key in ("paper", "fields"))
    grid = Table("name", "idea", *["paper"] * papers, *["fields"] * settings, show_lines=True)
    for c in components:
        fields = "\n".join(_field_text(name, field) for name, field in c["fields"].items())
        cells = [_idea(c), *[c["paper"] or ""] * papers, *[fields] * settings]
        grid.add_row(
            Text(printable(c["name"]), "bold"), *(Text(printable(cell, keep="\n")) for cell in cells)
        )  # brackets in defaults are not markup
    return grid


def _idea(component: dict[str, Any]) -> str:
    """Return the idea, the source knowledge it needs, and the variants."""
    name, needs, variants = (component[key] for key in ("name", "needs", "variants"))
    notes = [f"needs {needs}: tribe source {name}"] if needs else []
    notes += [f"variants, as in {name}/{next(iter(variants))}: {', '.join(variants)}"] if variants else []
    return "\n\n".join((component["summary"], *notes))


def _field_text(name: str, field: dict[str, Any]) -> str:
    if "default" not in field:
        return name
    value = field["default"]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and value == type(value)():
        return f"{name} = {type(value).__name__}()"  # all its fields would be too long
    return f"{name} = {value!r}"
