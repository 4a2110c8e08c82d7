"""Experiments from the options of a command: one for each method of `tribe run`, or each point of `tribe sweep`."""

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tribe.cli.custom import DATASET, SCENARIO, component_name, custom_network, norm_text
from tribe.cli.options import parse_overrides, parse_seeds
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec, same_for_all_seeds
from tribe.experiments.workbench import MissingKnowledge, Workbench

COMPONENTS = ("dataset", "scenario", "model")  # whose fields can be set, besides those of methods
OWN = {"batch": 64, "precision": "tf32", "device": "auto", "threads": None}  # fields of the experiment itself


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
