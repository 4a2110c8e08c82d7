"""Options of several commands, the parsers of their values, and the experiments that they describe."""

import ast
import hashlib
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import tribe
from tribe.cli.custom import DATASET, SCENARIO, component_name, custom_network, method_name, norm_text
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec, same_for_all_seeds
from tribe.experiments.workbench import MissingKnowledge, Workbench
from tribe.methods import registry
from tribe.registry import nearest

COMPONENTS = ("dataset", "scenario", "model")  # whose fields can be set, besides those of methods
OWN = {"batch": 64, "precision": "tf32", "device": "auto", "threads": None}  # fields of the experiment itself

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

    >>> parse_overrides(["scenario.sigma=0.01", "tent.optimizer=sgd"], ["scenario", "tent", "bn"])
    {'scenario': {'sigma': 0.01}, 'tent': {'optimizer': 'sgd'}, 'bn': {}}
    >>> parse_overrides(["batch=32", "limits.open=true"], ["limits"], ["batch"])
    {'limits': {'open': True}, '': {'batch': 32}}
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
    """Return a Python literal, true and false among them, or else the text itself: "false" would count as true.

    >>> _value("false"), _value("0.5"), _value("sgd")
    (False, 0.5, 'sgd')
    """
    if text.strip() in ("true", "false"):
        return text.strip() == "true"
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


def _split(text: str) -> list[str]:
    """Split at commas that are in no bracket and no quotes."""
    words: list[str] = []
    for part in text.split(","):
        last = words[-1] if words else ""
        is_open = sum(map(last.count, "([{")) > sum(map(last.count, ")]}"))
        if is_open or last.count("'") % 2 or last.count('"') % 2:
            words[-1] += f",{part}"
        else:
            words.append(part)
    return words


def plan_experiments(
    points: Sequence[tuple[str, Mapping[str, Any]]],
    dataset: str,
    model: str,
    weights: Path | None,
    scenario: str,
    seeds: str | None,
    settings: Sequence[str] | None,
    data: Path | None,
) -> tuple[list[Experiment], Workbench]:
    """Return the experiment of each point, and the workbench that has built them; other arguments are options.

    A point is a method, and fields by their place, which a sweep varies. Methods that lack their source knowledge make
    one error.
    """
    given = parse_overrides(settings, (*COMPONENTS, *(method for method, _ in points)), OWN)
    own = {**OWN, **given.pop("")}
    dataset, scenario = component_name(DATASET, dataset), component_name(SCENARIO, scenario)
    streams = (0,) if seeds is None else parse_seeds(seeds)
    workbench = make_workbench(model, weights, data, str(own["device"]), own["threads"])
    experiments: list[Experiment] = []
    missing: list[MissingKnowledge] = []
    for method, point in points:
        fields = {name: dict(values) for name, values in given.items()}
        fields[""] = {"batch": own["batch"], "precision": str(own["precision"])}
        for place, value in point.items():
            component, _, field = place.partition(".") if "." in place else ("", "", place)
            if field in given.get(component, {}):
                raise ValueError(f"{place} is set and swept: leave out --set {place}")
            fields[component][field] = value
        rule = fields[method].get("rule")
        if isinstance(rule, str) and ":" in rule:  # a norm rule from a file is registered, and has a name
            fields[method]["rule"] = norm_text(rule)
        protocol = ComponentSpec(scenario, fields["scenario"])
        if len(streams) > 1 and (why := same_for_all_seeds(protocol.json())):
            again = f"{len(streams)} seeds play the same images in the same order, and do not reduce uncertainty"
            warnings.warn(f"scenario {scenario}: {why}. The {again}: --seeds 1 is enough", stacklevel=2)
        parts = (
            ComponentSpec(dataset, fields["dataset"]),
            ComponentSpec(model, fields["model"]),
            protocol,
            ComponentSpec(method, fields[method]),
        )
        try:
            experiments.append(Experiment.of(*parts, seeds=streams, workbench=workbench, **fields[""]))
        except MissingKnowledge as error:
            missing.append(error)
    if missing:
        raise MissingKnowledge.of_all(missing)
    return experiments, workbench


def make_workbench(
    model: str, weights: Path | None, data: Path | None, device: str, threads: int | None = None
) -> Workbench:
    """Return a workbench with the network of --model and --weights; an empty text: that of each experiment."""
    networks = {model: custom_network(model, weights)} if ":" in model else {}
    return Workbench(data, device, {} if weights is None else {model: weights}, threads, networks)


def file_name(prefix: str, experiments: Sequence[Experiment]) -> str:
    """Return the name of a summary or chart, without an ending: the same experiments, the same name."""
    first, ids = experiments[0], "".join(f"{e.id}{e.seeds}" for e in experiments)
    name = f"{prefix}{first.dataset.name}-{first.model.name}-{first.scenario.name}"
    return f"{re.sub(r'[^A-Za-z0-9._@+-]', '_', name)}-{hashlib.sha256(ids.encode()).hexdigest()[:8]}"
