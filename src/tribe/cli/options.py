"""Options of several commands, and functions that turn their values into components."""

import re
from pathlib import Path
from typing import Annotated

import torch
import typer

import tribe
from tribe.cli.custom import load_custom_model, method_name
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
Seeds = Annotated[
    str | None,
    typer.Option(help="How many streams, side by side on one network, or seeds: 425,1,2 or 7,", show_default="1"),
]
DatasetName = Annotated[str, typer.Option(help="Data set, see `tribe list datasets`, or file.py:Class.")]
ScenarioName = Annotated[
    str, typer.Option(help="Protocol of the stream, see `tribe list scenarios`, or file.py:Class.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any field of a component: scenario.imbalance=10, dataset.severities=1,3, tribe.gamma=0.1, mine.rate=0.1 "
        "of the class Mine; or of the experiment: batch=64, precision=tf32, device=auto, threads=2. Repeatable.",
    ),
]
Out = Annotated[Path, typer.Option(help="Folder of results: what is there is not computed again.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the summary here too; - is stdout.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Return the seeds of --seeds: a number is how many, from 0 on; with a comma, it is a list of seeds.

    Example:
        >>> parse_seeds("2"), parse_seeds("425,1,2"), parse_seeds("7,"), parse_seeds(None)
        ((0, 1), (425, 1, 2), (7,), None)
    """
    if text is None:
        return None
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if "," not in text and len(numbers) == 1 and numbers[0] >= 1:
        return tuple(range(numbers[0]))
    if "," not in text or not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds is how many streams, at least 1, or different seeds such as 425,1,2; got {text}")
    return tuple(numbers)


def parse_severities(text: str) -> list[int]:
    """Return the severities in a text such as "5", "1-5" or "1,3".

    Example:
        >>> parse_severities("1,3-5")
        [1, 3, 4, 5]
    """
    severities: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-5])(?:-([1-5]))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"--severity is 1 to 5, such as 5, 1-5 or 1,3; got {text!r}")
        severities += range(int(match[1]), int(match[2] or match[1]) + 1)
    return severities


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape of an image from a text such as "3,32,32"."""
    if re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text) is None:
        raise ValueError(f"--shape is the shape of one image, such as 3,32,32; got {text!r}")
    return tuple(int(size) for size in text.split(","))


def custom_network(name: str, weights: Path | None) -> torch.nn.Module:
    """Return the network ``file.py:attribute``, with its own weights or those of a file."""
    built = load_custom_model(name)
    return built if weights is None else tribe.models.load(built, weights)


def method_names(text: str) -> list[str]:
    """Return the methods of a comma-separated list: names, `all`, `ablations` or ``file.py:Class``.

    A leading + is ignored. A name and a class may have a time filter: ``tribe+time``, ``file.py:Mine+time``.
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
