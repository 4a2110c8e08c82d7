"""Experiments within a budget of compute: how rarely their methods learn, from costs that are measured once."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tribe.experiments.bench.costs import measured_costs
from tribe.experiments.bench.measurement import BenchProgress
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import describe
from tribe.methods import AnyMethod, Pipeline, parse, with_fields
from tribe.streams.budget import MOST, Budget, StepCosts, rare_field


def within_budget(
    experiments: Sequence[Experiment], budget: Budget, root: Path, progress: BenchProgress | None = None
) -> list[Experiment]:
    """Return the experiments with the field that a budget sets; costs are in the folder of results, or added to it.

    The experiments differ in nothing but the method. Methods that never learn stay as they are.
    """
    pairs = {}
    for number, each in enumerate(experiments):
        assert each.parts is not None
        if Pipeline.of(each.parts.method).method.does_not_adapt is None:
            often = budget.prepare(each.parts.net, each.parts.method, {})
            seldom = with_fields(often, **{rare_field(often): MOST})
            pairs[number] = often, [_with_method(each, method) for method in (often, seldom)]
    costs = iter(measured_costs([one for _, both in pairs.values() for one in both], root, progress) if pairs else ())
    resolved = {
        number: _with_method(both[0], budget.resolve(often, StepCosts(next(costs), next(costs))))
        for number, (often, both) in pairs.items()
    }
    return [resolved.get(number, each) for number, each in enumerate(experiments)]


def _with_method(experiment: Experiment, method: AnyMethod) -> Experiment:
    """Return an experiment with the same method that learns rarely."""
    assert experiment.parts is not None
    parsed = parse(experiment.method.name)
    if isinstance(method, Pipeline) and method.rare is not None:
        parsed = parsed._replace(rare=method.rare.name)
    spec = describe(parsed.alone + parsed.suffix, method)
    return dataclasses.replace(experiment, method=spec, parts=experiment.parts._replace(method=method))
