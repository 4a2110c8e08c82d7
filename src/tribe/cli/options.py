"""Options of several commands, and functions that turn their values into components."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tribe
from tribe.cli.custom import load_custom_model, method_name
from tribe.core.backbone import Backbone
from tribe.data.datasets import Dataset
from tribe.experiments import workbench
from tribe.methods import registry

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Precision = Annotated[
    str, typer.Option(help="tf32 (float32 on a CPU), float32 (IEEE's), or bf16: a network of bfloat16.")
]
Model = Annotated[
    str,
    typer.Option(
        help="Network: a name (`tribe list models`), timm/NAME, torchvision/NAME, or file.py:attribute, a module or a "
        "tribe.Backbone."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(help="Weights of the network.", show_default="in the package, or where `tribe train` writes them"),
]
DataRoot = Annotated[
    Path | None, typer.Option(help="Root of the data sets.", show_default="$TRIBE_DATA or the cache directory")
]
Imbalance = Annotated[
    float | None,
    typer.Option(help="How many times rarer the rarest class is.", show_default="the scenario's"),
]
Seeds = Annotated[
    str | None,
    typer.Option(help="How many streams, side by side on one network, or their seeds: 425,1,2.", show_default="1"),
]
Severity = Annotated[
    str | None, typer.Option(help="Severities of the corruptions: 5, or 1,3 or 1-5.", show_default="5")
]
DatasetName = Annotated[str, typer.Option(help="Data set, see `tribe list datasets`, or file.py:Class.")]
ScenarioName = Annotated[
    str, typer.Option(help="Protocol of the stream, see `tribe list scenarios`, or file.py:Class.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any field of a component: scenario.sigma=0.01, dataset.seed=1, tribe.gamma=0.1, mine.rate=0.1 of the "
        "class Mine. Repeatable.",
    ),
]
Out = Annotated[Path, typer.Option(help="Folder of results: what is there is not computed again.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the summary here too; - is stdout.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def build_dataset(name: str, data: Path | None, severity: str | None, fields: dict[str, Any]) -> Dataset:
    """The data set of ``--dataset``, ``--data``, ``--severity`` and overrides of its fields."""
    return workbench.build_dataset(name, data, with_severity(fields, severity))


def with_severity(fields: Mapping[str, Any], severity: str | None) -> dict[str, Any]:
    """The fields of a data set with those of ``--severity``."""
    severities = None if severity is None else tuple(parse_severities(severity))
    return _with_option(fields, "--severity", "dataset", "severities", severities)


def with_imbalance(fields: Mapping[str, Any], imbalance: float | None) -> dict[str, Any]:
    """The fields of a scenario with that of ``--imbalance``."""
    return _with_option(fields, "--imbalance", "scenario", "imbalance", imbalance)


def _with_option(fields: Mapping[str, Any], option: str, owner: str, field: str, value: Any) -> dict[str, Any]:
    """Add the field that an option sets. The option together with an override of the field is refused."""
    if value is None:
        return dict(fields)
    if field in fields:
        raise ValueError(f"{option} and {owner}.{field} are the same setting: give one of them")
    return {**fields, field: value}


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
    if ":" in name:
        built = custom_network(name, weights)
    else:
        built = workbench.build_model(workbench.Request(dataset, name, weights, root), data, fields)
    built = built.to(device)
    return workbench.restrict(built if isinstance(built, Backbone) else Backbone(built), data)


def parse_seeds(seed: int | None, seeds: str | None) -> tuple[int, ...] | None:
    """The seeds of --seed and --seeds: a number is how many, from the first on; several are the seeds themselves.

    >>> parse_seeds(3, "2"), parse_seeds(None, "425,1,2"), parse_seeds(7, None), parse_seeds(None, None)
    ((3, 4), (425, 1, 2), (7,), None)
    """
    if seeds is None:
        return None if seed is None else (seed,)
    try:
        numbers = [int(word) for word in seeds.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if "," not in seeds:
        if len(numbers) != 1 or numbers[0] < 1:
            raise ValueError(f"--seeds is how many streams, at least 1, or seeds such as 425,1,2; got {seeds}")
        return tuple(range(seed or 0, (seed or 0) + numbers[0]))
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds names different seeds, such as 425,1,2; got {seeds}")
    if seed is not None:
        raise ValueError("--seeds names the seeds already: leave out --seed, or give a number of streams")
    return tuple(numbers)


def parse_severities(text: str) -> list[int]:
    """Severities from a text such as "5", "1-5" or "1,3".

    >>> parse_severities("1,3-5")
    [1, 3, 4, 5]
    """
    severities: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-5])(?:-([1-5]))?\s*", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"--severity is 1 to 5, such as 5, 1-5 or 1,3; got {text!r}")
        severities += range(int(found[1]), int(found[2] or found[1]) + 1)
    return severities


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape of an image from a text such as "3,32,32"."""
    if re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text) is None:
        raise ValueError(f"--shape is the shape of one image, such as 3,32,32; got {text!r}")
    return tuple(int(size) for size in text.split(","))


def custom_network(name: str, weights: Path | None) -> torch.nn.Module:
    """The network ``file.py:attribute``, with its own weights or those of a file."""
    built = load_custom_model(name)
    return built if weights is None else tribe.models.load(built, weights)


def method_names(text: str) -> list[str]:
    """The methods of a comma-separated list: names, `all`, `ablations` or ``file.py:Class``; a leading + is ignored.

    A name and a class may have a time filter: ``tribe+time``, ``file.py:Mine+time``.
    """
    words = [word.strip().removeprefix("+") for word in text.split(",")]
    return list(dict.fromkeys(name for word in words if word for name in _method_names(word)))


def _method_names(word: str) -> list[str]:
    if word == "ablations":
        return tribe.methods.variants()
    if word == "all":  # not a method that has variants: `ablations` lists these. The source model comes first
        names = [name for name in registry.names() if not registry.get(name).variants]
        return sorted(names, key=lambda name: (name != "source", name))
    return [method_name(word)]
