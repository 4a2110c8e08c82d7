"""A table from results alone: no data, no weights, no device. What fits a cell by its specification is its number.

So that results can be looked at where they were not made. Seeds, device, weights and the like may be any, or those of
an `Origin`, as long as all cells share them: a table is never made of results that differ in more than it is about.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tribe import methods
from tribe.engine.precision import precision_on
from tribe.lab import workbench as build
from tribe.lab.experiment import Experiment, MixedResults, difference
from tribe.lab.ray import in_words
from tribe.lab.spec import decode_fields, describe
from tribe.lab.store import Damaged, find, load, survey
from tribe.lab.workbench import Workbench
from tribe.paper.plans import (
    CHOICE,
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
from tribe.paper.tables import Cell, Table

UNTOLD = ("domains", "classes")  # fields of a scenario that the data set decides
MADE = "knowledge"  # a method's field that depends on the network
NOTHING = "no result fits"
REMEDY = "Where it can be run, `tribe reproduce` without --no-run computes it again; else move its folder away"


@dataclass(frozen=True)
class Origin:
    """How results must have been made to be taken; None: in any way, as long as all share it."""

    seed: int | None = None  # the first
    seeds: int | None = None  # how many
    precision: str | None = None  # as it comes to on the device of the result
    device: str | None = None
    threads: int | None = None  # of results from a CPU

    def otherwise(self, experiment: Experiment) -> list[str]:
        """In what an experiment was made otherwise."""
        on_cpu = experiment.device == "cpu"
        precision = self.precision and precision_on(torch.device(experiment.device), self.precision)
        made: list[tuple[str, Any, Any]] = [
            ("its first seed", experiment.seeds[0], self.seed),
            ("the number of its seeds", len(experiment.seeds), self.seeds),
            ("its precision", experiment.precision, precision),
            ("its device", experiment.device, self.device),
            ("the number of its threads", experiment.threads, self.threads if on_cpu else None),
        ]
        return [f"{what} is {has}, not {wanted}" for what, has, wanted in made if wanted not in (None, has)]


def gather(
    table: Table, wishes: Wishes, root: str | PathLike[str], workbench: Workbench, origin: Origin | None = None
) -> Plan:
    """Plan a table with what lies in ``root``; where two results fit a cell, refuse, naming where they differ.

    A result of which a file is damaged is no result: that stands in its cells. Where nobody knows which these are, it
    stands in all that are empty.
    """
    there = list(survey(root))
    known = [found.experiment for found in there if found.experiment is not None]
    plan = gather_from(table, wishes, known, workbench, origin)
    plan = plan.without({e.id: why for e in plan.experiments if (why := damage(e, root)) is not None})
    unknown = [in_words(found.error) for found in there if isinstance(found, Damaged) and found.experiment is None]
    return _doubted(plan, unknown) if unknown else plan


def _doubted(plan: Plan, unknown: Sequence[str]) -> Plan:
    """The plan with a word on what might have been the result of a cell that is empty."""
    problem = f"{NOTHING}, unless it is one of these: {'; '.join(unknown)}. {REMEDY}"
    cells = {
        place: dataclasses.replace(p, problem=problem) if p.problem == NOTHING else p for place, p in plan.cells.items()
    }
    return dataclasses.replace(plan, cells=cells)


def damaged(root: str | PathLike[str]) -> dict[str, str]:
    """All results in ``root`` that are finished and cannot be used: the name of each folder, and why."""
    reasons = {}
    for found in survey(root):
        if isinstance(found, Damaged):
            reasons[found.folder.name] = f"{in_words(found.error)}. {REMEDY}"
        elif (why := damage(found.experiment, root)) is not None:
            reasons[found.folder.name] = why
    return reasons


def damage(experiment: Experiment, root: str | PathLike[str]) -> str | None:
    """Why what a finished experiment left in ``root`` cannot be used, naming the file; None: it can."""
    if find(experiment, root, verified=True) is not None:
        return None
    folder = Path(root) / experiment.id
    try:
        load(folder).records()
        why = f"the records in {folder} are not those that its metrics.json is of"
    except (OSError, ValueError) as error:
        why = in_words(error)
    return f"{why}. {REMEDY}"


def gather_from(
    table: Table, wishes: Wishes, experiments: Sequence[Experiment], workbench: Workbench, origin: Origin | None = None
) -> Plan:
    """Plan a table with some finished experiments."""
    told = [(experiment, _told(experiment)) for experiment in experiments]
    return planned_by(
        table, wishes, workbench, lambda cell: _gathered(cell, wishes, told, workbench, origin or Origin())
    )


def _gathered(
    cell: Cell, wishes: Wishes, told: Sequence[tuple[Experiment, dict[str, Any]]], workbench: Workbench, origin: Origin
) -> Planned:
    if cell.mean_of or (cell.method is None and cell.dataset is None):
        return Planned(cell)
    try:
        if cell.method is None:
            played(cell, wishes, workbench)
            return Planned(cell)
        expected = _expected(cell, wishes, workbench)
    except FAILURES as error:
        return Planned(cell, problem=in_words(error))
    there = [experiment for experiment, words in told if words == expected]
    fitting = [experiment for experiment in there if not origin.otherwise(experiment)]
    if len(fitting) > 1:
        apart = "; ".join(difference(*fitting[:2]))
        raise MixedResults(
            f"{fitting[0].id} and {fitting[1].id} both fit a cell of {cell.method}: {apart}. A table holds one of "
            f"them: keep others in a folder of their own; by {CHOICE} it can be chosen"
        )
    if there and not fitting:
        return Planned(cell, problem=f"{NOTHING}: {'; '.join(origin.otherwise(there[0]))}")
    return Planned(cell, fitting[0]) if fitting else Planned(cell, problem=NOTHING)


def _expected(cell: Cell, wishes: Wishes, workbench: Workbench) -> dict[str, Any]:
    """What a cell says of its experiment, every default filled in."""
    dataset, scenario, model = named_dataset(cell, wishes), named_scenario(cell, wishes), named_model(cell, wishes)
    data, name = workbench.dataset(dataset), cell.method or ""
    learned = build.trained_on(data, dataset.name)
    published: Mapping[str, Any] = methods.get(name).presets.get(learned, {})
    known = methods.get("tribe").presets.get(learned, {})  # it has one for each of the paper's: no file need be opened
    classes = known["classes"] if known else len(data.classes)
    fields = {**published, "classes": classes, **method_settings(cell, wishes, lambda: classes)}
    protocol = describe(scenario.name, build.build_scenario(scenario.name, None, decode_fields(scenario.fields)))
    method = describe(name, methods.create(name, **fields))
    return {
        "dataset": describe(dataset.name, data).json(),
        "model": dataclasses.replace(model, code=build.model_code(model.name)).json(),
        "scenario": (protocol.name, _without(protocol.fields, UNTOLD), protocol.code),
        "method": (name, _without(method.fields, (MADE,)), method.code),
    }


def _told(experiment: Experiment) -> dict[str, Any]:
    """What an experiment says of the same."""
    told = experiment.json()
    return {
        "dataset": told["dataset"],
        "model": told["model"],
        "scenario": (experiment.scenario.name, _without(told["scenario"]["fields"], UNTOLD), experiment.scenario.code),
        "method": (experiment.method.name, _without(told["method"]["fields"], (MADE,)), experiment.method.code),
    }


def _without(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
