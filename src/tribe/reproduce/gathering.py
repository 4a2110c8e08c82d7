"""A table from results alone: no data, no weights, no device. What fits a cell by its specification is its number.

So that results can be looked at where they were not made. Seeds, device, weights and the like may be any, as long as
all cells share them: a table is never made of results that differ in more than it is about.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from tribe import build, methods, scenarios
from tribe.experiment import Bench, Experiment, MixedResults, difference, finished, method_fields, named, revived
from tribe.paper import Cell, Table
from tribe.reproduce.plans import (
    FAILURES,
    Plan,
    Planned,
    Wishes,
    method_settings,
    named_dataset,
    named_model,
    named_scenario,
    planned_by,
    played,
)

UNTOLD = ("domains", "classes")  # fields of a scenario that the data set decides
MADE = "knowledge"  # a method's field that depends on the network


def gather(table: Table, wishes: Wishes, root: str | PathLike[str], bench: Bench) -> Plan:
    """Plan a table with what lies in ``root``; where two results fit a cell, refuse, naming where they differ."""
    return gather_from(table, wishes, [result.experiment for result in finished(root)], bench)


def gather_from(table: Table, wishes: Wishes, experiments: Sequence[Experiment], bench: Bench) -> Plan:
    """Plan a table with some finished experiments."""
    told = [(experiment, _told(experiment)) for experiment in experiments]
    return planned_by(table, wishes, bench, lambda cell: _gathered(cell, wishes, told, bench))


def _gathered(cell: Cell, wishes: Wishes, told: Sequence[tuple[Experiment, dict[str, Any]]], bench: Bench) -> Planned:
    if cell.mean_of or (cell.method is None and cell.dataset is None):
        return Planned(cell)
    try:
        if cell.method is None:
            played(cell, wishes, bench)
            return Planned(cell)
        expected = _expected(cell, wishes, bench)
    except FAILURES as error:
        return Planned(cell, problem=" ".join(str(error).split()))
    fitting = [experiment for experiment, words in told if words == expected]
    if len(fitting) > 1:
        apart = "; ".join(difference(*fitting[:2]))
        raise MixedResults(
            f"{fitting[0].id} and {fitting[1].id} both fit a cell of {cell.method}: {apart}. A table holds one of "
            "them: keep others in a folder of their own"
        )
    return Planned(cell, fitting[0]) if fitting else Planned(cell, problem="no result fits")


def _expected(cell: Cell, wishes: Wishes, bench: Bench) -> dict[str, Any]:
    """What a cell says of its experiment, every default filled in."""
    dataset, scenario, model = named_dataset(cell, wishes), named_scenario(cell, wishes), named_model(cell, wishes)
    data, name = bench.dataset(dataset), cell.method or ""
    learned = build.trained_on(data, dataset.name)
    published: Mapping[str, Any] = methods.get(name).presets.get(learned, {})
    known = methods.get("tribe").presets.get(learned, {})  # it has one for each of the paper's: no file need be opened
    classes = known["classes"] if known else len(data.classes)
    fields = {**published, "classes": classes, **method_settings(cell, wishes, lambda: classes)}
    protocol = named(scenario.name, scenarios.create(scenario.name, **revived(scenario.fields)))
    return {
        "dataset": named(dataset.name, data).json(),
        "model": model.json(),
        "scenario": (protocol.name, _without(protocol.fields, UNTOLD)),
        "method": (name, _without(method_fields(methods.create(name, **fields)), (MADE,))),
    }


def _told(experiment: Experiment) -> dict[str, Any]:
    """What an experiment says of the same."""
    told = experiment.json()
    return {
        "dataset": told["dataset"],
        "model": told["model"],
        "scenario": (experiment.scenario.name, _without(told["scenario"]["fields"], UNTOLD)),
        "method": (experiment.method.name, _without(told["method"]["fields"], (MADE,))),
    }


def _without(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
