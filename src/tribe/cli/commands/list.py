"""``tribe list``: what can be chosen by name, read from the registries."""

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tribe
from tribe import corruptions
from tribe.cli.app import app
from tribe.cli.output import fail, print_json
from tribe.registry import Registry, nearest


@app.command("list")
def list_components(
    kind: Annotated[str, typer.Argument(help="Kind of component: methods, norms, corruptions, ...")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the components of a kind: name, idea, paper, and fields with their defaults.

    Of methods also the variants, which are named `method/variant`, and what must be known of the source data first,
    which `tribe source` takes.
    """
    kinds = registries()
    if kind == "corruptions":
        components = [describe_corruption(name) for name in corruptions.names()]
    elif kind in kinds:
        components = [describe(kinds[kind], name) for name in kinds[kind].names()]
    else:
        fail(f"unknown kind {kind!r}: {nearest(kind, [*kinds, 'corruptions'])}")
    if as_json:
        print_json(components)
    else:
        Console().print(table(components))


def registries() -> dict[str, Registry[Any]]:
    """Every kind of component there is: the subpackages of tribe that hold a registry."""
    packages = [m.name for m in pkgutil.iter_modules(tribe.__path__) if m.ispkg and m.name != "cli"]
    found = {name: getattr(importlib.import_module(f"tribe.{name}"), "registry", None) for name in packages}
    return {name: registry for name, registry in found.items() if isinstance(registry, Registry)}


def describe(registry: Registry[Any], name: str) -> dict[str, Any]:
    """One component in plain data; a field without ``default`` is one that must be given."""
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
        "variants": getattr(cls, "variants", {}) if registry is tribe.methods.registry else {},
        "needs": getattr(cls, "needs", None),
    }


def describe_corruption(name: str) -> dict[str, Any]:
    """A corruption, family/name, in the same plain data; it is a function, in whose stead its file may speak."""
    family, _, own = name.partition("/")
    function = corruptions.function(own, family)
    words = inspect.getdoc(function) or inspect.getdoc(sys.modules[function.__module__]) or ""
    nothing: dict[str, Any] = {"paper": None, "fields": {}, "presets": {}, "variants": {}, "needs": None}
    return {"name": name, "summary": words.partition("\n")[0], **nothing}


def summary(cls: type, registry: Registry[Any]) -> str:
    """The idea in one line. A file opens with it; only where several share a file does the class speak for itself."""
    neighbours = [name for name in registry.names() if registry.get(name).__module__ == cls.__module__]
    file = inspect.getdoc(sys.modules[cls.__module__]) if len(neighbours) == 1 else None
    return (file or inspect.getdoc(cls) or "").partition("\n")[0]


def _default(field: dataclasses.Field[Any]) -> dict[str, Any]:
    if field.default_factory is not dataclasses.MISSING:
        return {"default": field.default_factory()}
    return {} if field.default is dataclasses.MISSING else {"default": field.default}


def table(components: list[dict[str, Any]]) -> Table:
    """What `describe` found, for people."""
    papers, settings = (any(c[key] for c in components) for key in ("paper", "fields"))
    grid = Table("name", "idea", *["paper"] * papers, *["fields"] * settings, show_lines=True)
    for c in components:
        fields = "\n".join(_shown(name, field) for name, field in c["fields"].items())
        cells = [_idea(c), *[c["paper"] or ""] * papers, *[fields] * settings]
        grid.add_row(Text(c["name"], "bold"), *map(Text, cells))  # Text: a bracket in a default is no markup
    return grid


def _idea(component: dict[str, Any]) -> str:
    """The idea, and what else is to be known before a component is chosen."""
    name, needs, variants = (component[key] for key in ("name", "needs", "variants"))
    told = [f"needs {needs}: tribe source {name}"] if needs else []
    told += [f"variants, as in {name}/{next(iter(variants))}: {', '.join(variants)}"] if variants else []
    return "\n\n".join((component["summary"], *told))


def _shown(name: str, field: dict[str, Any]) -> str:
    if "default" not in field:
        return name
    value = field["default"]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and value == type(value)():
        return f"{name} = {type(value).__name__}()"  # its own defaults would fill a page
    return f"{name} = {value!r}"
