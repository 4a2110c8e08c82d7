"""From a table of the paper to the experiments behind its cells: what must be run, what can be, and what cannot."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from tribe import datasets, methods, models, scenarios
from tribe.datasets import Dataset
from tribe.lab.experiment import Experiment
from tribe.lab.ray import Failure, Follow, in_words, run_all
from tribe.lab.spec import ComponentSpec
from tribe.lab.store import Result, finished
from tribe.lab.stream import Stream
from tribe.lab.workbench import Workbench
from tribe.paper import tables as paper
from tribe.paper.claims import matching
from tribe.paper.costs import history
from tribe.paper.tables import Cell, Table
from tribe.registry import nearest

FAILURES = (
    ValueError,
    TypeError,
    OSError,
    ImportError,
)  # of building: data, weights, knowledge or a library are missing

CHOICE = "--seed, --seeds, --precision, --device and --threads"  # by which one of several results is chosen


@dataclass(frozen=True)
class Wishes:
    """In what a reproduction departs from the paper."""

    dataset: str | None = None  # played in place of the paper's
    model: str | None = None  # used in place of the paper's
    only: Sequence[str] = ()  # rows, by their key or method; none: all
    added: Sequence[str] = ()  # methods that become rows
    called: Mapping[str, str] = field(default_factory=dict)  # how such rows are called, other than the methods
    rows: Sequence[str] = ()  # patterns of the keys of rows, such as "100 *"; none: all
    columns: Sequence[str] = ()  # patterns of the keys of columns, such as "F 100 *"; none: all
    seeds: Sequence[int] = (0,)
    precision: str = "tf32"
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of dataset, model, scenario, METHOD

    @property
    def of_any_table(self) -> "Wishes":
        """Without what concerns the rows and columns of one table."""
        own = {name: fields for name, fields in self.settings.items() if name in ("dataset", "model", "scenario")}
        return dataclasses.replace(self, only=(), added=(), rows=(), columns=(), settings=own)


@dataclass(frozen=True)
class Planned:
    """A cell, and the experiment it is of, or why there is none."""

    cell: Cell
    experiment: Experiment | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Plan:
    """A table with its cells planned, by the keys of row and column."""

    table: Table
    cells: Mapping[tuple[str, str], Planned]
    wishes: Wishes
    workbench: Workbench

    @property
    def experiments(self) -> list[Experiment]:
        """What is to be run: each once, in the order of the rows."""
        return list(dict.fromkeys(p.experiment for p in self.cells.values() if p.experiment is not None))

    @property
    def problems(self) -> dict[str, list[str]]:
        """What stands against some cells, and which."""
        found: dict[str, list[str]] = {}
        for (row, column), planned in self.cells.items():
            if planned.problem is not None:
                found.setdefault(planned.problem, []).append(f"{row}, {column}")
        return found

    def without(self, failed: Mapping[str, str]) -> "Plan":
        """The plan with experiments taken out that failed, by id, with the reason."""
        cells = {
            place: dataclasses.replace(p, experiment=None, problem=failed[p.experiment.id])
            if p.experiment is not None and p.experiment.id in failed
            else p
            for place, p in self.cells.items()
        }
        return dataclasses.replace(self, cells=cells)


def plan(table: Table, wishes: Wishes, workbench: Workbench) -> Plan:
    """Plan every cell of a table; what cannot be done is noted in its cell, what was asked wrongly is refused."""
    return planned_by(table, wishes, workbench, lambda cell: _planned(cell, wishes, workbench))


def planned_by(table: Table, wishes: Wishes, workbench: Workbench, planning: Callable[[Cell], Planned]) -> Plan:
    """The rows and columns that are wished for, and for each cell what ``planning`` says; once for each experiment."""
    table = _with_rows(_chosen(_with_domains(table, wishes, workbench), wishes), wishes)
    unknown = wishes.settings.keys() - {"dataset", "model", "scenario", *(row.get("method") for row in table.rows)}
    unknown -= {table.common.get("method")}
    if unknown:
        name = sorted(unknown)[0]
        taking = sorted({str(row["method"]) for row in table.rows if row.get("method")})
        raise ValueError(f"{name!r} takes no part in {table.name}: {nearest(name, taking)}")
    known: dict[str, Planned] = {}
    cells = {}
    for row in table.row_keys:
        for column in table.column_keys:
            cell = table.cell(row, column)
            asked = repr(dataclasses.replace(cell, metric=None, domain=None, unit="", property=None))
            if asked not in known:
                known[asked] = planning(cell)
            cells[row, column] = dataclasses.replace(known[asked], cell=cell)
    return Plan(table, cells, wishes, workbench)


def run(
    plan: Plan,
    root: str | PathLike[str],
    workbench: Workbench,
    *,
    ray: str | None = None,
    workers: int | None = None,
    progress: Follow | None = None,
    done: Callable[[Experiment, Result | Failure], None] | None = None,
) -> Plan:
    """Run what is missing, the longest first; what fails is noted in the plan that comes back, and the rest goes on.

    Args:
        plan: of a table.
        root: the folder of results.
        workbench: where they are computed.
        ray: None runs them here; see `tribe.lab.ray.run_all` for this and the others.
        workers: cores of a cluster that is started here.
        progress: follows the experiments, batch by batch.
        done: called after each, with its result or with why there is none.
    """
    retries = 0 if ray is None else 2  # another worker may have what one lacks; this process has not
    order = longest_first(plan.experiments, root, workbench)
    outcomes = run_all(
        order, root, ray=ray, workers=workers, workbench=workbench, retries=retries, progress=progress, done=done
    )
    return plan.without({failed.experiment.id: failed.reason for failed in outcomes if isinstance(failed, Failure)})


def longest_first(
    experiments: Sequence[Experiment], root: str | PathLike[str], workbench: Workbench
) -> list[Experiment]:
    """In the order in which several that share the work are done soonest: none begins a long one when others end."""
    known = history(finished(root, damaged="skip"))
    return sorted(experiments, key=lambda e: -known.estimate(e, e.length(workbench))[0])


def refuse_unknown_fields(tables: Sequence[Table], wishes: Wishes) -> None:
    """Refuse to set a field that none of the components has, rather than to find all cells of tables impossible."""
    cells = [table.cell(row, column) for table in tables for row in table.row_keys for column in table.column_keys]
    taking = {
        "dataset": {named_dataset(cell, wishes).name for cell in cells if cell.dataset},
        "model": {named_model(cell, wishes).name for cell in cells if cell.model},
        "scenario": {named_scenario(cell, wishes).name for cell in cells if cell.scenario},
    }
    for owner, fields in wishes.settings.items():
        try:
            known = {name for component in taking.get(owner, {owner}) for name in _fields(owner, component)}
        except FAILURES:  # there is no such component: told with the cells that miss it
            continue
        for name in fields:
            if known and name not in known:
                raise ValueError(f"{owner} has no field {name!r}: {nearest(name, known)}")


def _fields(owner: str, component: str) -> set[str]:
    """The fields that a component takes."""
    if owner == "model":
        cls: type[Any] = type(models.architecture(component))
    else:
        cls = {"dataset": datasets.get, "scenario": scenarios.get}.get(owner, methods.get)(component)
    return {field.name for field in dataclasses.fields(cls) if field.init}


# -- rows and columns -------------------------------------------------------------------------------------------------


def _with_domains(table: Table, wishes: Wishes, workbench: Workbench) -> Table:
    """Where another data set is played: columns of its domains in place of the paper's, which say nothing of it."""
    if wishes.dataset is None or not any("domain" in column for column in table.columns):
        return table
    names = _dataset(Cell(dataset=wishes.dataset), wishes, workbench).domains
    own = [
        {"key": name, "metric": "domain_error", "domain": name}
        for name in dict.fromkeys(name.partition("@")[0] for name in names)
    ]
    kept = [i for i, column in enumerate(table.columns) if "domain" not in column]
    return dataclasses.replace(
        table,
        columns=[*own, *(table.columns[i] for i in kept)],
        values=[[None] * len(own) + [row[i] for i in kept] for row in table.values],
    )


def _chosen(table: Table, wishes: Wishes) -> Table:
    """The rows and columns that patterns choose; a mean goes with what it is of."""
    rows = _matching(wishes.rows, table.row_keys, f"{table.name} has no row")
    chosen = _matching(wishes.columns, table.column_keys, f"{table.name} has no column")
    keys = {table.column_keys[i] for i in chosen}
    columns = [i for i in chosen if keys.issuperset(table.columns[i].get("mean_of", ()))]
    return dataclasses.replace(
        table,
        rows=[table.rows[i] for i in rows],
        columns=[table.columns[i] for i in columns],
        values=[[table.values[i][j] for j in columns] for i in rows],
    )


def _matching(patterns: Sequence[str], keys: Sequence[str], lack: str) -> list[int]:
    for pattern in patterns:
        if not matching(pattern, keys):
            raise ValueError(f"{lack} {pattern!r}: {nearest(pattern, keys)}")
    wanted = matching(patterns or "*", keys)
    return [i for i, key in enumerate(keys) if key in wanted]


def _with_rows(table: Table, wishes: Wishes) -> Table:
    """The rows that are wanted, and those of further methods."""
    rows, values = list(table.rows), list(table.values)
    by_method = all(row.get("method") for row in rows)
    if not by_method and (wishes.only or wishes.added):
        raise ValueError(f"the rows of {table.name} are not methods: none can be chosen or added")
    for name in wishes.only:
        if not any(name in _names(row) for row in rows):
            known = {name for row in rows for name in _names(row)}
            raise ValueError(
                f"{table.name} has no row {name!r}: {nearest(name, known)}. To add a method, write +{name}"
            )
    if wishes.only:
        kept = [i for i, row in enumerate(rows) if not _names(row).isdisjoint(wishes.only)]
        rows, values = [rows[i] for i in kept], [values[i] for i in kept]
    swept = [column for column in table.columns if column.get("fields")]
    if wishes.added and swept:
        raise ValueError(f"the columns of {table.name} set {', '.join(swept[0]['fields'])}: no method can be added")
    own = ("key", "method", "fields", "scale")
    grouped = [{k: v for k, v in row.items() if k not in own} for row in table.rows]
    groups = [group for i, group in enumerate(grouped) if group not in grouped[:i]]
    for name in wishes.added:
        methods.get(name)  # an unknown one is refused
        key = wishes.called.get(name, name)
        rows += [{**g, "key": f"{g['group']} {key}" if "group" in g else key, "method": name} for g in groups]
        values += [[None] * len(table.columns)] * len(groups)
    return dataclasses.replace(table, rows=rows, values=values)


def _names(row: Mapping[str, Any]) -> set[str]:
    """What a row may be called: by its key, without its group, or by its method."""
    key, group = str(row["key"]), f"{row.get('group')} "
    return {key, key.removeprefix(group), str(row["method"])}


# -- cells ------------------------------------------------------------------------------------------------------------


def _planned(cell: Cell, wishes: Wishes, workbench: Workbench) -> Planned:
    if cell.mean_of or (cell.method is None and cell.dataset is None):
        return Planned(cell)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes without an image: the paper's tables have them
            if cell.method is None:
                played(cell, wishes, workbench)
                return Planned(cell)
            experiment = Experiment.of(
                named_dataset(cell, wishes),
                named_model(cell, wishes),
                named_scenario(cell, wishes),
                ComponentSpec(
                    cell.method, method_settings(cell, wishes, lambda: len(_dataset(cell, wishes, workbench).classes))
                ),
                seeds=wishes.seeds,
                precision=wishes.precision,
                workbench=workbench,
            )
            experiment.stream(workbench)  # data that are not there are missed here
    except FAILURES as error:
        return Planned(cell, problem=in_words(error))
    return Planned(cell, experiment)


def played(cell: Cell, wishes: Wishes, workbench: Workbench) -> Stream:
    """The stream of a cell of which nothing but that is looked at."""
    return workbench.stream(named_dataset(cell, wishes), named_scenario(cell, wishes), wishes.seeds[:1])


def named_model(cell: Cell, wishes: Wishes) -> ComponentSpec:
    """The network of a cell, as wished."""
    return ComponentSpec(wishes.model or cell.model or "", wishes.settings.get("model", {}))


def named_scenario(cell: Cell, wishes: Wishes) -> ComponentSpec:
    """The protocol of a cell, as wished."""
    return ComponentSpec(cell.scenario or "", {**cell.scenario_fields, **wishes.settings.get("scenario", {})})


def method_settings(cell: Cell, wishes: Wishes, classes: Callable[[], int]) -> dict[str, Any]:
    """The fields that are wished for and, before them, those that the table sweeps, worked out."""
    swept = dict(cell.fields)
    for name, value in swept.items():
        if isinstance(value, dict) and "per_class" in value:
            swept[name] = value["per_class"] * classes()
    swept = {name: value * cell.scale.get(name, 1) for name, value in swept.items()}
    return {**wishes.settings.get(cell.method or "", {}), **swept}


def named_dataset(cell: Cell, wishes: Wishes) -> ComponentSpec:
    """The data set of a cell, as wished."""
    return ComponentSpec(
        wishes.dataset or cell.dataset or "", {**cell.dataset_fields, **wishes.settings.get("dataset", {})}
    )


def _dataset(cell: Cell, wishes: Wishes, workbench: Workbench) -> Dataset:
    return workbench.dataset(named_dataset(cell, wishes))


def artifacts() -> list[Table]:
    """Everything that can be reproduced, the main text first."""
    return sorted((paper.get(name) for name in paper.names()), key=lambda t: (t.where, t.kind != "table", t.name))
