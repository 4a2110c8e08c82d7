"""The pages of the API reference: which names each of them shows. Their texts are the docstrings of the code."""

import dataclasses
import importlib
import inspect
from typing import Any


@dataclasses.dataclass(frozen=True)
class Page:
    """One page of the reference."""

    name: str  # of its file
    title: str
    about: str  # one sentence
    names: tuple[str, ...] = ()  # dotted; a module shows its public members
    module: str | None = None  # whose registered components follow

    @property
    def place(self) -> str:
        """Its path on the site."""
        return f"reference/{self.name}.md"

    def components(self) -> list[tuple[str, str]]:
        """Name and dotted name of each registered component, without variants and families that share a class."""
        if self.module is None:
            return []
        registry = importlib.import_module(self.module).registry
        found: dict[str, str] = {}
        for name in registry.names():
            item = registry.get(name)
            if inspect.isclass(item):
                found.setdefault(f"{item.__module__}.{item.__qualname__}", name)
        return [(name, dotted) for dotted, name in found.items()]

    def text(self) -> str:
        """Its Markdown: a directive for each name, which mkdocstrings replaces."""
        parts = [f"# {self.title}", self.about, *(f"::: {name}" for name in self.names)]
        if components := self.components():
            parts.append("## Components")
            for name, dotted in components:
                parts += [f"### `{name}`", f"::: {dotted}\n    options:\n      heading_level: 4"]
        return "\n\n".join(parts) + "\n"


def _all_of(module: str) -> tuple[str, ...]:
    """The names that a module exports, functions first, without its submodules, constants and aliases."""
    found = importlib.import_module(module)
    shown = [name for name in found.__all__ if inspect.isclass(getattr(found, name)) or _is_function(found, name)]
    shown.sort(key=lambda name: inspect.isclass(getattr(found, name)))
    return tuple(f"{module}.{name}" for name in shown)


def _is_function(module: Any, name: str) -> bool:
    return inspect.isfunction(getattr(module, name))


def pages() -> list[Page]:
    """All pages, in the order of the menu."""
    bring = "To add one, see [Contributing](../project/contributing.md)."
    return [
        Page("tribe", "tribe", "What `import tribe` gives.", _all_of("tribe")),
        Page(
            "methods",
            "tribe.methods",
            f"How a classifier adapts: the protocol of a method, and every method with its fields. {bring}",
            ("tribe.methods.Method", "tribe.methods.screen", "tribe.methods.finish"),
            "tribe.methods",
        ),
        Page(
            "norms",
            "tribe.norms",
            f"Norm rules: from the moments of each image to the statistics that normalise. {bring}",
            ("tribe.core.rules.Norm",),
            "tribe.norms",
        ),
        Page(
            "time",
            "tribe.filters",
            f"Time filters use the order of the images; [Time](../time.md) derives them. {bring}",
            ("tribe.filters.TimeFilter", "tribe.filters.Filtered", "tribe.filters.FilterInfo"),
            "tribe.filters",
        ),
        Page(
            "scenarios",
            "tribe.scenarios",
            f"The order of a stream; [Scenarios](../scenarios.md) draws them. {bring}",
            _all_of("tribe.scenarios"),
            "tribe.scenarios",
        ),
        Page(
            "datasets",
            "tribe.datasets",
            f"Images and labels; [Data sets](../datasets.md) says where they are found. {bring}",
            ("tribe.datasets.Dataset",),
            "tribe.datasets",
        ),
        Page(
            "corruptions",
            "tribe.corruptions",
            f"What happens to images; [Corruptions](../corruptions.md) shows them. {bring}",
            _all_of("tribe.corruptions"),
        ),
        Page("models", "tribe.models", f"Networks and their weights. {bring}", _all_of("tribe.models")),
        Page(
            "health",
            "tribe.health",
            "Accuracy without labels, alarms, snapshots and the guard; see [Health](../health.md).",
            _all_of("tribe.health"),
        ),
        Page(
            "lab",
            "tribe.experiments",
            "Streams, runs, records, metrics, experiments and the store of their results.",
            tuple(f"tribe.experiments.{name}" for name in ("metrics", "statistics", "experiment", "store", "plots")),
        ),
        Page("report", "tribe.experiments.report", "Results as one HTML page.", _all_of("tribe.experiments.report")),
        Page(
            "serve",
            "tribe.serve",
            "One network for many streams, over the network; see [Serving](../serving.md).",
            (*_all_of("tribe.serve"), "tribe.serve.config"),
        ),
        Page(
            "testing",
            "tribe.testing",
            "The contract of components, for code outside the repository, too.",
            _all_of("tribe.testing"),
        ),
    ]


def overview() -> str:
    """The first page of the reference: a table of the others."""
    rows = "".join(f"| [`{page.title}`]({page.name}.md) | {page.about.partition(' To add')[0]} |\n" for page in pages())
    return f"# API reference\n\nFrom the docstrings of the code.\n\n| page | what |\n|---|---|\n{rows}"
