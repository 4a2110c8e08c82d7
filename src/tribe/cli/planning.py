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
from tribe.experiments.workbench import Workbench

COMPONENTS = ("dataset", "scenario", "model")  # whose fields can be set, besides those of methods
OWN = {"batch": 64, "precision": "tf32", "device": "auto", "threads": None}  # fields of the experiment itself


class Planner:
    """Builds the experiments of a command on one workbench; the arguments are its options."""

    def __init__(
        self,
        dataset: str,
        model: str,
        weights: Path | None,
        scenario: str,
        methods: Sequence[str],
        seeds: str | None,
        settings: Sequence[str] | None,
        data: Path | None,
    ) -> None:
        self.fields = parse_overrides(settings, (*COMPONENTS, *methods), OWN)
        own = {**OWN, **self.fields.pop("")}
        self._dataset, self._scenario = component_name(DATASET, dataset), component_name(SCENARIO, scenario)
        self._model, self.seeds = model, (0,) if seeds is None else parse_seeds(seeds)
        self._batch, self._precision = own["batch"], str(own["precision"])
        self.workbench = make_workbench(model, weights, data, str(own["device"]), own["threads"])

    def experiment(self, method: str, point: Mapping[str, Any] | None = None) -> Experiment:
        """Return the experiment of a method, with the fields of a point of a sweep by their place."""
        fields = {name: dict(values) for name, values in self.fields.items()}
        own = {"batch": self._batch, "precision": self._precision}
        for place, value in (point or {}).items():
            owner, dot, field = place.partition(".")
            (fields[owner] if dot else own)[field or owner] = value
        scenario = ComponentSpec(self._scenario, fields["scenario"])
        if len(self.seeds) > 1 and (why := same_for_all_seeds(scenario.json())):
            again = f"{len(self.seeds)} seeds play the same images in the same order, and do not reduce uncertainty"
            warnings.warn(f"scenario {scenario.name}: {why}. The {again}: --seeds 1 is enough", stacklevel=2)
        rule = fields[method].get("rule")
        if isinstance(rule, str) and ":" in rule:  # a norm rule from a file is registered, and has a name
            fields[method]["rule"] = norm_text(rule)
        return Experiment.of(
            ComponentSpec(self._dataset, fields["dataset"]),
            ComponentSpec(self._model, fields["model"]),
            scenario,
            ComponentSpec(method, fields[method]),
            seeds=self.seeds,
            workbench=self.workbench,
            **own,
        )


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
