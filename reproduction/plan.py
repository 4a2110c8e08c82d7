"""Plan a table of the paper: the experiment behind each cell, or why it cannot be run, and how long it will take.

plan = make_plan(tables.get("mnist"), Choices(dataset="live-mnist-c", model="compact"), workbench)
plan = gather.run(plan, "runs")
print(render.markdown(compare.compare_plan(plan, gather.results_of(plan, "runs"))))
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reproduction.claims import matching
from reproduction.tables import Cell, Table
from tribe import methods
from tribe.data import datasets, models, scenarios
from tribe.experiments.experiment import Experiment, MixedResults
from tribe.experiments.jobs import error_message
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import Result
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Workbench
from tribe.registry import nearest

FAILURES = (ValueError, TypeError, OSError, ImportError)  # data, weights, source knowledge or a library are missing
BATCH = 64  # of the released code
COMPONENTS = ("dataset", "model", "scenario")  # owners of overrides, besides methods


@dataclass(frozen=True)
class Choices:
    """How a reproduction differs from the paper: its components, rows, columns, seeds and fields."""

    dataset: str | None = None  # replaces the paper's
    model: str | None = None  # replaces the paper's
    only: Sequence[str] = ()  # rows to keep, by key or method; empty: all
    added: Sequence[str] = ()  # methods to add as rows
    row_names: Mapping[str, str] = field(default_factory=dict)  # of added methods; the default is the method's name
    row_fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of added methods, if not the defaults
    rows: Sequence[str] = ()  # patterns of row keys, such as "100 *"; empty: all
    columns: Sequence[str] = ()  # patterns of column keys, such as "F 100 *"; empty: all
    seeds: Sequence[int] = (0,)
    precision: str = "tf32"
    batch: int = BATCH  # images a step
    overrides: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # fields of dataset, model, scenario, METHOD

    @property
    def for_any_table(self) -> "Choices":
        """Without the choices that concern rows, columns or methods of one table."""
        overrides = {owner: fields for owner, fields in self.overrides.items() if owner in COMPONENTS}
        return dataclasses.replace(self, only=(), added=(), rows=(), columns=(), overrides=overrides)

    def dataset_of(self, cell: Cell) -> ComponentSpec:
        """The spec of a cell's data set."""
        fields = {**cell.dataset_fields, **self.overrides.get("dataset", {})}
        return ComponentSpec(self.dataset or cell.dataset or "", fields)

    def model_of(self, cell: Cell) -> ComponentSpec:
        """The spec of a cell's network."""
        return ComponentSpec(self.model or cell.model or "", self.overrides.get("model", {}))

    def scenario_of(self, cell: Cell) -> ComponentSpec:
        """The spec of a cell's scenario."""
        return ComponentSpec(cell.scenario or "", {**cell.scenario_fields, **self.overrides.get("scenario", {})})

    def method_fields_of(self, cell: Cell, classes: Callable[[], int]) -> dict[str, Any]:
        """The fields of a cell's method. Fields that the table sweeps win over overrides.

        Overrides of a method also hold for the method with a time filter: "TRIBE + time" is the same TRIBE.
        """
        swept = dict(cell.fields)
        for name, value in swept.items():
            if isinstance(value, dict) and "per_class" in value:
                swept[name] = value["per_class"] * classes()
        swept = {name: value * cell.scale.get(name, 1) for name, value in swept.items()}
        method = cell.method or ""
        return {**self.overrides.get(methods.parse(method).unfiltered, {}), **self.overrides.get(method, {}), **swept}


@dataclass(frozen=True)
class Planned:
    """A cell with its experiment, or with the reason why it has none."""

    cell: Cell
    experiment: Experiment | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Plan:
    """A table with its cells planned, by the keys of row and column."""

    table: Table
    cells: Mapping[tuple[str, str], Planned]
    choices: Choices
    workbench: Workbench

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments to run: each once, in the order of the rows."""
        return list(dict.fromkeys(p.experiment for p in self.cells.values() if p.experiment is not None))

    @property
    def problems(self) -> dict[str, list[str]]:
        """Why cells have no experiment: each reason with its cells."""
        found: dict[str, list[str]] = {}
        for (row, column), planned in self.cells.items():
            if planned.problem is not None:
                found.setdefault(planned.problem, []).append(f"{row}, {column}")
        return found

    def without(self, failed: Mapping[str, str]) -> "Plan":
        """The plan without experiments that failed; ``failed`` maps their ids to the reasons."""
        cells = {
            place: dataclasses.replace(p, experiment=None, problem=failed[p.experiment.id])
            if p.experiment is not None and p.experiment.id in failed
            else p
            for place, p in self.cells.items()
        }
        return dataclasses.replace(self, cells=cells)


def make_plan(table: Table, choices: Choices, workbench: Workbench) -> Plan:
    """Plan every cell of a table. A cell that cannot be run holds the reason; invalid choices raise ValueError."""

    def build(cell: Cell) -> Experiment:
        dataset = choices.dataset_of(cell)
        fields = choices.method_fields_of(cell, lambda: len(workbench.dataset(dataset).classes))
        experiment = Experiment.of(
            dataset,
            choices.model_of(cell),
            choices.scenario_of(cell),
            ComponentSpec(cell.method or "", fields),
            seeds=choices.seeds,
            batch=choices.batch,
            precision=choices.precision,
            workbench=workbench,
        )
        experiment.stream(workbench)  # raises if data are missing
        return experiment

    return plan_with(table, choices, workbench, build)


def plan_with(table: Table, choices: Choices, workbench: Workbench, find: Callable[[Cell], Experiment]) -> Plan:
    """Plan the chosen rows and columns.

    ``find`` returns the experiment of a cell, or raises one of `FAILURES`; cells that share it are looked up once.
    """
    table = _add_rows(_select(_replace_domains(table, choices, workbench), choices), choices)
    known_methods = {row.get("method", table.common.get("method")) for row in table.rows} - {None}
    known_methods |= {methods.parse(name).unfiltered for name in known_methods}
    if unknown := sorted(choices.overrides.keys() - {*COMPONENTS, *known_methods, table.common.get("method")}):
        raise ValueError(f"{unknown[0]!r} takes no part in {table.name}: {nearest(unknown[0], known_methods)}")
    planned: dict[str, Planned] = {}
    cells = {}
    for place, cell in table.cells.items():
        key = repr(dataclasses.replace(cell, metric=None, domain=None, unit="", property=None))
        if key not in planned:
            planned[key] = _plan_cell(cell, choices, workbench, find)
        cells[place] = dataclasses.replace(planned[key], cell=cell)
    return Plan(table, cells, choices, workbench)


def _plan_cell(cell: Cell, choices: Choices, workbench: Workbench, find: Callable[[Cell], Experiment]) -> Planned:
    if cell.mean_of or (cell.method is None and cell.dataset is None):
        return Planned(cell)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes without an image: the paper's tables have them
            if cell.method is None:
                stream_of(cell, choices, workbench)
                return Planned(cell)
            return Planned(cell, find(cell))
    except MixedResults:
        raise
    except FAILURES as error:
        return Planned(cell, problem=error_message(error))


def stream_of(cell: Cell, choices: Choices, workbench: Workbench) -> Stream:
    """The stream of a cell that needs nothing else: no method is run."""
    return workbench.stream(choices.dataset_of(cell), choices.scenario_of(cell), choices.seeds[:1])


# -- rows and columns -------------------------------------------------------------------------------------------------


def _replace_domains(table: Table, choices: Choices, workbench: Workbench) -> Table:
    """If the data set is replaced, replace the columns of the paper's domains by those of its domains."""
    papers = choices.dataset in (None, table.common.get("dataset"))
    if papers or not any("domain" in column for column in table.columns):
        return table
    names = workbench.dataset(choices.dataset_of(Cell())).domains
    replaced = [
        {"key": name, "metric": "domain_error", "domain": name}
        for name in dict.fromkeys(name.partition("@")[0] for name in names)
    ]
    rest = table.select(range(len(table.rows)), [i for i, c in enumerate(table.columns) if "domain" not in c])
    values = [[None] * len(replaced) + list(row) for row in rest.values]
    return dataclasses.replace(rest, columns=[*replaced, *rest.columns], values=values)


def _select(table: Table, choices: Choices) -> Table:
    """The rows and columns that the patterns match; a column of means needs all columns that it is the mean of."""
    rows = _matches(choices.rows, table.row_keys, f"{table.name} has no row")
    columns = _matches(choices.columns, table.column_keys, f"{table.name} has no column")
    keys = {table.column_keys[i] for i in columns}
    return table.select(rows, [i for i in columns if keys.issuperset(table.columns[i].get("mean_of", ()))])


def _matches(patterns: Sequence[str], keys: Sequence[str], complaint: str) -> list[int]:
    for pattern in patterns:
        if not matching(pattern, keys):
            raise ValueError(f"{complaint} {pattern!r}: {nearest(pattern, keys)}")
    chosen = matching(patterns or "*", keys)
    return [i for i, key in enumerate(keys) if key in chosen]


def _add_rows(table: Table, choices: Choices) -> Table:
    """The rows to keep by method, and new rows for added methods: one a group, above the rows beyond the paper."""
    if not (choices.only or choices.added):
        return table
    if not all(row.get("method") for row in table.rows):
        raise ValueError(f"the rows of {table.name} are not methods: none can be chosen or added")
    aliases = [_aliases(row) for row in table.rows]
    for name in choices.only:
        if not any(name in known for known in aliases):
            hint = nearest(name, {alias for known in aliases for alias in known})
            raise ValueError(f"{table.name} has no row {name!r}: {hint}. To add a method, write +{name}")
    swept = [column for column in table.columns if column.get("fields")]
    if choices.added and swept:
        raise ValueError(f"the columns of {table.name} set {', '.join(swept[0]['fields'])}: no method can be added")
    special = ("key", "method", "fields", "scale", "beyond", "reading")  # what rows of one group need not share
    shared = [{k: v for k, v in row.items() if k not in special} for row in table.rows]
    groups = [group for i, group in enumerate(shared) if group not in shared[:i]]
    if choices.only:
        kept = [i for i, known in enumerate(aliases) if not known.isdisjoint(choices.only)]
        table = table.select(kept, range(len(table.columns)))
    rows, values, place = list(table.rows), list(table.values), len(table.rows) - len(table.beyond)
    for name in choices.added:
        methods.get(name)  # raises if the name is unknown
        key = choices.row_names.get(name, name)
        names = [f"{group['group']} {key}" if "group" in group else key for group in groups]
        added = {"method": name, "fields": choices.row_fields.get(name, {})}
        rows[place:place] = [{**g, "key": k, **added} for g, k in zip(groups, names, strict=True)]
        values[place:place] = [[None] * len(table.columns)] * len(groups)
        place += len(groups)
    return dataclasses.replace(table, rows=rows, values=values)


def _aliases(row: Mapping[str, Any]) -> set[str]:
    """The names of a row: its key, its key without the group, its method."""
    key, group = str(row["key"]), f"{row.get('group')} "
    return {key, key.removeprefix(group), str(row["method"])}


# -- overrides --------------------------------------------------------------------------------------------------------


def refuse_unknown_fields(tables: Sequence[Table], choices: Choices) -> None:
    """Raise ValueError if an override names a field that no component of these tables has."""
    cells = [cell for table in tables for cell in table.cells.values()]
    components = {
        "dataset": {choices.dataset_of(cell).name for cell in cells if cell.dataset},
        "model": {choices.model_of(cell).name for cell in cells if cell.model},
        "scenario": {choices.scenario_of(cell).name for cell in cells if cell.scenario},
    }
    for owner, fields in choices.overrides.items():
        try:
            known = {name for component in components.get(owner, {owner}) for name in _fields(owner, component)}
        except FAILURES:  # there is no such component: its cells will say so
            continue
        for name in fields:
            if known and name not in known:
                raise ValueError(f"{owner} has no field {name!r}: {nearest(name, known)}")


def _fields(owner: str, component: str) -> set[str]:
    """The fields of a component."""
    if owner == "model":
        cls: type[Any] = type(models.architecture(component))
    else:
        cls = {"dataset": datasets.get, "scenario": scenarios.get}.get(owner, methods.get)(component)
    return {field.name for field in dataclasses.fields(cls) if field.init}


# -- time -------------------------------------------------------------------------------------------------------------

# Seconds per image of one forward pass, on an H200 and on one CPU core: guesses for what was never run here.
FORWARD_SECONDS = {
    "cuda": {"wrn28_10": 6e-5, "resnext29": 5e-5, "torchvision/resnet50": 3e-4},
    "cpu": {
        "compact": 4e-4,
        "resnet18_mnist": 1.5e-2,
        "wrn28_10": 0.25,
        "resnext29": 0.06,
        "torchvision/resnet50": 0.2,
    },
}
OTHER_FORWARD_SECONDS = {"cuda": 6e-5, "cpu": 2e-2}
STEP_COST = {  # a step in units of a forward pass, learning included
    **dict.fromkeys(("source", "bn", "lame"), 1.0),
    **dict.fromkeys(("pl", "tent", "eata", "delta"), 2.5),
    "bdn": 3.5,
    **dict.fromkeys(("note", "rotta", "deyo"), 4.0),
    **dict.fromkeys(("sar", "roid", "cmf", "sotta"), 5.0),
    **dict.fromkeys(("tribe", "selftrain"), 6.0),
    "ttac": 15.0,
    **dict.fromkeys(("cotta", "petal"), 40.0),
}
OTHER_STEP_COST = 6.0


class Costs(NamedTuple):
    """Measured seconds per image, by method, network, device and precision."""

    seconds: dict[tuple[str, str, str, str], float]

    @staticmethod
    def of(results: Iterable[Result]) -> "Costs":
        """The costs that results report; of several results of a kind, the latest counts."""
        latest: dict[tuple[str, str, str, str], tuple[str, float]] = {}
        for result in results:
            values, kind = result.values("seconds_per_image"), _kind(result.experiment)
            measured = str(result.environment.get("finished", "")), sum(values) / len(values)
            if measured[1] == measured[1]:  # not NaN
                latest[kind] = max(latest.get(kind, ("", 0.0)), measured)
        return Costs({kind: seconds for kind, (_, seconds) in latest.items()})

    def estimate(self, experiment: Experiment, images: int) -> tuple[float, bool]:
        """The seconds that an experiment with so many images takes, and whether they were measured, not guessed.

        A time filter costs next to nothing: until it is measured, a method with one takes as long as without.
        """
        kind = _kind(experiment)
        if kind in self.seconds:
            return images * self.seconds[kind], True
        method, model, device, precision = methods.parse(kind[0]).unfiltered, *kind[1:]
        if (method, model, device, precision) in self.seconds:
            return images * self.seconds[method, model, device, precision], False
        forward = FORWARD_SECONDS.get(device, {}).get(
            model, OTHER_FORWARD_SECONDS.get(device, OTHER_FORWARD_SECONDS["cpu"])
        )
        return images * forward * STEP_COST.get(method, STEP_COST.get(method.partition("/")[0], OTHER_STEP_COST)), False


def _kind(experiment: Experiment) -> tuple[str, str, str, str]:
    return experiment.method.name, experiment.model.name, experiment.device, experiment.precision
