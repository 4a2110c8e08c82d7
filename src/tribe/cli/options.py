"""Options that several commands take, and the components that their values stand for."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tribe
from tribe.cli.custom import METHOD, component_name, load_custom_model
from tribe.datasets import Dataset
from tribe.engine.backbone import Backbone
from tribe.lab import workbench
from tribe.methods import registry

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Precision = Annotated[
    str, typer.Option(help="tf32 (float32 on a CPU), float32 (IEEE's), or bf16: a network of bfloat16.")
]
DataRoot = Annotated[
    Path | None, typer.Option(help="Root of the data sets.", show_default="$TRIBE_DATA or the cache directory")
]
Imbalance = Annotated[
    float | None,
    typer.Option(help="How many times rarer the rarest class is.", show_default="the scenario's"),
]
Severity = Annotated[str | None, typer.Option(help="Severities of the corruptions: 5, or 1,3,5.", show_default="5")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def build_dataset(name: str, data: Path | None, severity: str | None, fields: dict[str, Any]) -> Dataset:
    """The data set of ``--dataset``, ``--data``, ``--severity`` and overrides of its fields."""
    given = dict(fields)
    if severity is not None:
        try:
            given["severities"] = tuple(int(s) for s in severity.split(","))
        except ValueError:
            raise ValueError(f"--severity is a number from 1 to 5, or several: 1,3,5; got {severity!r}") from None
    return workbench.build_dataset(name, data, given)


def build_network(
    name: str,
    weights: Path | None,
    data: Dataset,
    dataset: str,
    root: Path | None,
    fields: dict[str, Any],
    device: torch.device,
) -> Backbone:
    """The network of ``--model``: a name, or ``file.py:attribute``, a module or a `Backbone`."""
    if ":" not in name:
        built = workbench.build_model(workbench.Request(dataset, name, weights, root), data, fields)
    else:
        built = load_custom_model(name)
        built = built if weights is None else tribe.models.load(built, weights)
    built = built.to(device)
    return built if isinstance(built, Backbone) else Backbone(built)


def method_names(text: str) -> list[str]:
    """The methods of a comma-separated list: names, `all`, `ablations` or ``file.py:Class``; a leading + is ignored."""
    words = [word.strip().removeprefix("+") for word in text.split(",")]
    return list(dict.fromkeys(name for word in words if word for name in _method_names(word)))


def _method_names(word: str) -> list[str]:
    if word == "ablations":
        return tribe.methods.variants()
    if word == "all":  # not a method that has variants: `ablations` lists these. The source model comes first
        names = [name for name in registry.names() if not registry.get(name).variants]
        return sorted(names, key=lambda name: (name != "source", name))
    return [component_name(METHOD, word)]
