"""Experiments from the options of a command: one for each method of `tribe run`, or each point of `tribe sweep`."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tribe.cli.custom import DATASET, SCENARIO, component_name, norm_text
from tribe.cli.options import custom_network, parse_severities
from tribe.lab.experiment import Experiment
from tribe.lab.spec import ComponentSpec
from tribe.lab.workbench import Workbench

COMPONENTS = ("dataset", "scenario", "model")  # whose fields can be set, besides those of methods


class Request(NamedTuple):
    """The options that decide what is played, except methods and fields."""

    dataset: str
    model: str
    weights: Path | None
    scenario: str
    imbalance: float | None
    severity: str | None
    seeds: Sequence[int]
    batch: int
    data: Path | None
    device: str
    precision: str
    threads: int | None = None


class Planner:
    """Builds experiments, all on one workbench."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._dataset = component_name(DATASET, request.dataset)
        self._scenario = component_name(SCENARIO, request.scenario)
        weights = {} if request.weights is None else {request.model: request.weights}
        networks = {request.model: custom_network(request.model, request.weights)} if ":" in request.model else {}
        self.workbench = Workbench(request.data, request.device, weights, request.threads, networks)

    def experiment(
        self, method: str, overrides: Mapping[str, Mapping[str, Any]], batch: int | None = None
    ) -> Experiment:
        """The experiment of a method with overrides of fields, by component; ``batch``: in place of the option's."""
        request, size = self._request, self._request.batch if batch is None else batch
        severity = request.severity
        severities = {} if severity is None else {"severities": parse_severities(severity)}
        played = ComponentSpec(self._dataset, {**overrides.get("dataset", {}), **severities})
        imbalance = {} if request.imbalance is None else {"imbalance": request.imbalance}
        protocol = ComponentSpec(self._scenario, {**imbalance, **overrides.get("scenario", {})})
        self.workbench.stream(played, protocol, request.seeds, size)  # refuses missing data before the weights
        network = ComponentSpec(request.model, overrides.get("model", {}))
        adapting = ComponentSpec(method, _with_rule(overrides.get(method, {})))
        return Experiment.of(
            *(played, network, protocol, adapting),
            seeds=request.seeds,
            batch=size,
            precision=request.precision,
            workbench=self.workbench,
        )


def file_name(prefix: str, experiments: Sequence[Experiment]) -> str:
    """The name of a summary or chart, without an ending: the same experiments, the same name."""
    first, ids = experiments[0], "".join(experiment.id for experiment in experiments)
    name = f"{prefix}{first.dataset.name}-{first.model.name}-{first.scenario.name}"
    return f"{re.sub(r'[^A-Za-z0-9._@+-]', '_', name)}-{hashlib.sha256(ids.encode()).hexdigest()[:8]}"


def _with_rule(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a method; a norm rule from a file is registered, and has its registered name."""
    rule = fields.get("rule")
    return {**fields, "rule": norm_text(rule)} if isinstance(rule, str) and ":" in rule else fields
