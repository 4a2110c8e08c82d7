"""Experiments from the options of a command: one for each method of `tribe run`, or each point of `tribe sweep`."""

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tribe.cli.custom import DATASET, SCENARIO, component_name, norm_text
from tribe.cli.options import custom_network, with_imbalance, with_severity
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec, same_for_all_seeds
from tribe.experiments.workbench import Workbench

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
        played = ComponentSpec(self._dataset, with_severity(overrides.get("dataset", {}), request.severity))
        protocol = ComponentSpec(self._scenario, with_imbalance(overrides.get("scenario", {}), request.imbalance))
        _warn_of_one_stream(protocol, request.seeds)
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


def _warn_of_one_stream(scenario: ComponentSpec, seeds: Sequence[int]) -> None:
    """Warn of several seeds for a scenario that ignores them."""
    if len(seeds) > 1 and (why := same_for_all_seeds(scenario.json())):
        again = f"{len(seeds)} seeds play the same images in the same order, and make no comparison surer"
        warnings.warn(f"scenario {scenario.name}: {why}. The {again}: --seeds 1 is enough", stacklevel=3)


def _with_rule(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a method; a norm rule from a file is registered, and has its registered name."""
    rule = fields.get("rule")
    return {**fields, "rule": norm_text(rule)} if isinstance(rule, str) and ":" in rule else fields
