"""Options of several commands, and the parsers of their values."""

import ast
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import tribe
from tribe.cli.custom import method_name
from tribe.methods import registry
from tribe.registry import nearest

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
    typer.Option(
        help="Weights of the network, safetensors or a state dict.",
        show_default="in the package, or where `tribe train` writes them; a custom network has its own",
    ),
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


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of --seeds: a number is how many, from 0 on; with a comma, it is a list of seeds.

    Example:
        >>> parse_seeds("2"), parse_seeds("425,1,2"), parse_seeds("7,")
        ((0, 1), (425, 1, 2), (7,))
    """
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


def method_names(text: str) -> list[str]:
    """Return the methods of a comma-separated list: names, `all`, `ablations` or ``file.py:Class``.

    A leading + is ignored. A name and a class may have a time filter: ``tribe+time``, ``file.py:Mine+time``.
    """
    names: list[str] = []
    for word in (word.strip().removeprefix("+") for word in text.split(",")):
        if word == "ablations":
            names += tribe.methods.variants()
        elif word == "all":  # not a method that has variants: `ablations` lists these. The source model comes first
            plain = [name for name in registry.names() if not registry.get(name).variants]
            names += sorted(plain, key=lambda name: (name != "source", name))
        elif word:
            names.append(method_name(word))
    return list(dict.fromkeys(names))


Overrides = dict[str, dict[str, Any]]  # component -> field -> value


def parse_overrides(texts: Sequence[str] | None, components: Sequence[str], plain: Collection[str] = ()) -> Overrides:
    """Return the fields of each component. A value is a Python literal; what is not a literal is a string.

    Names without a dot that may be set, such as ``batch``, are in ``plain``; they are fields of the component "".

    Example:
        >>> parse_overrides(["scenario.sigma=0.01", "tent.optimizer=sgd"], ["scenario", "tent", "bn"])
        {'scenario': {'sigma': 0.01}, 'tent': {'optimizer': 'sgd'}, 'bn': {}}
        >>> parse_overrides(["batch=32"], ["tent"], ["batch"])
        {'tent': {}, '': {'batch': 32}}
    """
    overrides: Overrides = {component: {} for component in components}
    overrides |= {"": {}} if plain else {}
    for text in texts or ():
        place, equals, value = text.partition("=")
        component, dot, field = place.partition(".")
        if equals and place in plain:
            component, field = "", place
        elif not (equals and dot and field):
            raise ValueError(f"--set takes COMPONENT.FIELD=VALUE, such as scenario.sigma=0.01; got {text!r}")
        if component not in overrides:
            raise ValueError(f"--set {text}: {component!r} takes no part in this run: {nearest(component, overrides)}")
        overrides[component][field] = _value(value)
    return overrides


def parse_lists(texts: Sequence[str] | None, option: str) -> dict[str, list[Any]]:
    """Return the values of each field, from ``tribe.lr=1e-4,1e-3``; commas in brackets and quotes do not count.

    >>> parse_lists(["tribe.lr=1e-4,1e-3", "dataset.corruptions=('fog','snow'),fog", "batch="], "--grid")
    {'tribe.lr': [0.0001, 0.001], 'dataset.corruptions': [('fog', 'snow'), 'fog'], 'batch': []}
    """
    lists: dict[str, list[Any]] = {}
    for text in texts or ():
        place, equals, values = text.partition("=")
        if not (equals and place.strip()):
            raise ValueError(f"{option} takes COMPONENT.FIELD=VALUE,VALUE, such as tribe.lr=1e-4,1e-3; got {text!r}")
        if place in lists:
            raise ValueError(f"{option} names {place} twice: give all its values at once, separated by commas")
        lists[place] = [_value(word) for word in _split(values) if word.strip()]
    return lists


def _value(text: str) -> Any:
    """Return a Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


def _split(text: str) -> list[str]:
    """Split at commas that are in no bracket and no quotes."""
    words, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            words.append("")
            continue
        words[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
    return words
