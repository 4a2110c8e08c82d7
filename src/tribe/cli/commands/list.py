"""``tribe list``: list the components that can be chosen by name."""

import dataclasses
import inspect
import sys
from typing import Annotated, Any, get_type_hints

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
    alone = sum(registry.get(other).__module__ == cls.__module__ for other in registry.names()) == 1
    text = (inspect.getdoc(sys.modules[cls.__module__]) if alone else None) or inspect.getdoc(cls) or ""
    fields: dict[str, dict[str, Any]] = {}
    types = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            fields[field.name] = {"type": inspect.formatannotation(types[field.name])}
            if field.default_factory is not dataclasses.MISSING:
                fields[field.name]["default"] = field.default_factory()
            elif field.default is not dataclasses.MISSING:
                fields[field.name]["default"] = field.default
    return {
        "name": name,
        "summary": text.partition("\n")[0],  # of its file, or of the class where a file has several components
        "paper": getattr(cls, "paper", None),
        "fields": fields,
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


def table(components: list[dict[str, Any]]) -> Table:
    """Return the components as a table."""
    papers, settings = (any(c[key] for c in components) for key in ("paper", "fields"))
    grid = Table("name", "idea", *["paper"] * papers, *["fields"] * settings, show_lines=True)
    for c in components:
        fields = "\n".join(_field_text(name, field) for name, field in c["fields"].items())
        idea = [c["summary"]]
        if c["needs"]:
            idea.append(f"needs {c['needs']}: tribe source {c['name']}")
        if c["variants"]:
            idea.append(f"variants, as in {c['name']}/{next(iter(c['variants']))}: {', '.join(c['variants'])}")
        cells = ["\n\n".join(idea), *[c["paper"] or ""] * papers, *[fields] * settings]
        grid.add_row(
            Text(printable(c["name"]), "bold"), *(Text(printable(cell, keep="\n")) for cell in cells)
        )  # brackets in defaults are not markup
    return grid


def _field_text(name: str, field: dict[str, Any]) -> str:
    if "default" not in field:
        return name
    value = field["default"]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and value == type(value)():
        return f"{name} = {type(value).__name__}()"  # all its fields would be too long
    return f"{name} = {value!r}"
