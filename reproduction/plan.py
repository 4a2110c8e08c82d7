"""Find the experiment behind each cell of a table: build it to run it, or search for it among finished results.

    plan = build(tables.get("mnist"), Choices(dataset="live-mnist-c", model="compact"), Workbench())
    plan = search(tables.get("norms"), Choices(), read("results"), Workbench(device="cpu"))

`search` needs no data, no weights and no device: a result belongs to a cell if its spec matches. Results that differ in
their seeds only belong together: a cell has the mean of them all.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reproduction.tables import Cell, Table, matching
from tribe import methods
from tribe.core.precision import precision_on
from tribe.experiments.experiment import Experiment, difference
from tribe.experiments.parallel import error_message
from tribe.experiments.spec import ComponentSpec, describe
from tribe.experiments.store import Result
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Workbench, build_scenario, trained_on
from tribe.registry import nearest

FAILURES = (ValueError, TypeError, OSError, ImportError)  # data, weights, source knowledge or a library are missing
COMPONENTS = ("dataset", "model", "scenario")  # owners of overrides, besides methods
DERIVED = {  # fields that a spec has from elsewhere, by component: they do not identify the cell
    "model": ("code",),  # of a custom network, whose file need not be here; its weights are in every result
    "scenario": ("domains", "classes"),  # of the data set
    "method": ("knowledge", "classes", "room"),  # of the network, and of the size of the images
}


class MixedResults(ValueError):
    """Results that do not belong into one table."""


@dataclass(frozen=True)
class Choices:
    """How a reproduction differs from the paper. None runs the default of the paper's code, and finds any result."""

    dataset: str | None = None  # replaces the paper's
    model: str | None = None  # replaces the paper's
    rows: Sequence[str] = ()  # keys, patterns of keys or methods; +NAME adds a method; empty: all
    columns: Sequence[str] = ()  # patterns of keys, such as "F 100 *"; empty: all
    seeds: Sequence[int] | None = None  # (0,) to run
    batch: int | None = None  # images a step; 64 to run, as in the released code
    precision: str | None = None  # "tf32" to run
    device: str | None = None  # of results
    threads: int | None = None  # of results from a CPU
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # fields of COMPONENTS and of methods

    def specs(self, cell: Cell, classes: Callable[[], int]) -> tuple[ComponentSpec, ...]:
        """Return the specs of a cell's data set, network, scenario and method.

        Fields that the table sweeps win over overrides. Overrides of a method also hold for the method with a filter.
        """
        swept = {
            name: value["per_class"] * classes() if isinstance(value, dict) and "per_class" in value else value
            for name, value in cell.fields.items()
        }
        swept = {name: value * cell.scale.get(name, 1) for name, value in swept.items()}
        method, of = cell.method or "", self.overrides.get
        fields = {**of(methods.parse(method).unfiltered, {}), **of(method, {}), **swept}
        return (
            self.dataset_of(cell),
            ComponentSpec(self.model or cell.model or "", of("model", {})),
            self.scenario_of(cell),
            ComponentSpec(method, fields),
        )

    def dataset_of(self, cell: Cell) -> ComponentSpec:
        """Return the spec of a cell's data set."""
        fields = {**cell.dataset_fields, **self.overrides.get("dataset", {})}
        return ComponentSpec(self.dataset or cell.dataset or "", fields)

    def scenario_of(self, cell: Cell) -> ComponentSpec:
        """Return the spec of a cell's scenario."""
        return ComponentSpec(cell.scenario or "", {**cell.scenario_fields, **self.overrides.get("scenario", {})})

    def accepts(self, experiment: Experiment) -> bool:
        """Return whether a finished experiment has the precision, device, threads and batch that are wanted."""
        precision = self.precision and precision_on(torch.device(experiment.device), self.precision)
        threads = self.threads if experiment.device == "cpu" else None
        pairs = (
            (precision, experiment.precision),
            (self.device, experiment.device),
            (threads, experiment.threads),
            (self.batch, experiment.batch),
        )
        return all(wanted in (None, actual) for wanted, actual in pairs)


def select(result: Result, seeds: Sequence[int] | None) -> Result | None:
    """Return the result of some seeds, None: of all; None if it has none of them."""
    chosen = [seed for seed in seeds or result.streams if seed in result.streams]
    if not chosen:
        return None
    experiment = dataclasses.replace(result.experiment, seeds=tuple(chosen))
    return dataclasses.replace(result, experiment=experiment, streams={seed: result.streams[seed] for seed in chosen})


def settings_of(experiment: Experiment) -> str:
    """Return the settings that all cells of a table share, in words."""
    e = experiment
    threads = "" if e.threads is None else f", {e.threads} thread{'s' * (e.threads > 1)}"
    return f"{e.device}{threads}, {e.precision}, batch {e.batch}"


@dataclass(frozen=True)
class Planned:
    """A cell with its experiment and its results, or with the reason why it has none."""

    cell: Cell
    experiment: Experiment | None = None
    finished: Result | None = None
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

    def with_results(self, results: Mapping[str, Result | str]) -> "Plan":
        """Return the plan with the results of experiments by their ids, or with the reason why one failed."""
        cells = dict(self.cells)
        for place, planned in self.cells.items():
            outcome = None if planned.experiment is None else results.get(planned.experiment.id)
            if isinstance(outcome, str):
                cells[place] = dataclasses.replace(planned, experiment=None, problem=outcome)
            elif outcome is not None:
                cells[place] = dataclasses.replace(planned, finished=outcome)
        return dataclasses.replace(self, cells=cells)


def build(table: Table, choices: Choices, workbench: Workbench) -> Plan:
    """Plan every cell of a table to run it. A cell that cannot be run holds the reason."""

    def find(cell: Cell) -> Planned:
        specs = choices.specs(cell, lambda: len(workbench.dataset(choices.dataset_of(cell)).classes))
        experiment = Experiment.of(
            *specs,
            seeds=choices.seeds or (0,),
            batch=choices.batch or 64,
            precision=choices.precision or "tf32",
            workbench=workbench,
        )
        return Planned(cell, experiment)

    return _plan(table, choices, workbench, find)


def search(table: Table, choices: Choices, results: Sequence[Result], workbench: Workbench) -> Plan:
    """Plan a table with finished results.

    Raises:
        MixedResults: two results fit one cell, or the results of the cells do not belong into one table.
    """
    accepted = [found for found in results if choices.accepts(found.experiment)]
    described = [(found, _describe(found.experiment)) for found in accepted]

    def find(cell: Cell) -> Planned:
        names = cell.method, choices.dataset_of(cell).name, choices.model or cell.model
        alike = [
            (found, spec)
            for found, spec in described
            if names == tuple(getattr(found.experiment, part).name for part in ("method", "dataset", "model"))
        ]
        expected = _expected(cell, choices, workbench) if alike else {}  # it takes a while
        chosen = [select(found, choices.seeds) for found, spec in alike if _fits(spec, expected)]
        fitting = [found for found in chosen if found is not None]
        if not fitting:
            raise ValueError("no result fits")
        if len(fitting) > 1:
            one, other = (found.experiment for found in fitting[:2])
            raise MixedResults(
                f"{one.id} and {other.id} both fit a cell of {cell.method}: {'; '.join(difference(one, other))}. "
                "Select one with --device, --seeds or --set precision=, batch= or threads=, or move the other elsewhere"
            )
        return Planned(cell, fitting[0].experiment, fitting[0])

    plan = _plan(table, choices, workbench, find)
    _refuse_mixture(plan)
    return plan


def _plan(table: Table, choices: Choices, workbench: Workbench, find: Callable[[Cell], Planned]) -> Plan:
    """Plan the chosen rows and columns; cells that share an experiment are looked up once."""
    table = _choose_rows(_choose_columns(_replace_domains(table, choices, workbench), choices), choices)
    planned: dict[str, Planned] = {}
    cells = {}
    for place, cell in table.cells.items():
        key = repr(dataclasses.replace(cell, metric=None, domain=None, unit="", property=None))
        if key not in planned:
            planned[key] = _plan_cell(cell, choices, workbench, find)
        cells[place] = dataclasses.replace(planned[key], cell=cell)
    return Plan(table, cells, choices, workbench)


def _plan_cell(cell: Cell, choices: Choices, workbench: Workbench, find: Callable[[Cell], Planned]) -> Planned:
    if cell.mean_of or (cell.method is None and cell.dataset is None):
        return Planned(cell)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes without an image: the paper's tables have them
            if cell.method is not None:
                return find(cell)
            stream_of(cell, choices, workbench)
            return Planned(cell)
    except MixedResults:
        raise
    except FAILURES as error:
        return Planned(cell, problem=error_message(error))


def stream_of(cell: Cell, choices: Choices, workbench: Workbench) -> Stream:
    """Return the stream of a cell that needs nothing else: no method is run."""
    scenario = choices.scenario_of(cell)
    protocol = build_scenario(scenario.name, scenario.fields)
    return Stream(workbench.dataset(choices.dataset_of(cell)), protocol, (choices.seeds or (0,))[:1])


# -- which result belongs to a cell -----------------------------------------------------------------------------------


def _expected(cell: Cell, choices: Choices, workbench: Workbench) -> dict[str, Any]:
    """Describe a cell's experiment with every default filled in."""
    data = workbench.dataset(choices.dataset_of(cell))
    clean = trained_on(data)
    published: Mapping[str, Any] = methods.get(cell.method or "").presets.get(clean, {})
    tribes = methods.get("tribe").presets.get(clean, {})  # has all data sets of the paper: no file must be opened
    classes = tribes["classes"] if tribes else len(data.classes)
    dataset, model, scenario, method = choices.specs(cell, lambda: classes)
    protocol = build_scenario(scenario.name, scenario.fields)
    adapting = methods.create(method.name, **{**published, "classes": classes, **method.fields})
    specs = {
        "dataset": describe(dataset.name, data),
        "model": model,
        "scenario": describe(scenario.name, protocol),
        "method": describe(method.name, adapting),
    }
    expected = {part: _without(spec.json(), DERIVED.get(part, ())) for part, spec in specs.items()}
    if "room" in method.fields:  # it is overridden
        expected["room"] = specs["method"].fields["room"]
    return expected


def _describe(experiment: Experiment) -> dict[str, Any]:
    """Describe a finished experiment in the same way."""
    spec = experiment.json()
    described = {part: _without(spec[part], DERIVED.get(part, ())) for part in (*COMPONENTS, "method")}
    return described | {"room": spec["method"]["fields"].get("room")}


def _without(spec: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    fields = {name: value for name, value in spec.get("fields", {}).items() if name not in names}
    return {**{name: value for name, value in spec.items() if name not in names}, "fields": fields}


def _fits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(found[part] == value for part, value in expected.items())


def _refuse_mixture(plan: Plan) -> None:
    """Raise MixedResults if the cells differ in settings, images or weights."""
    shared: dict[tuple[str, ...], tuple[str, str]] = {}
    for (row, column), planned in plan.cells.items():
        if planned.finished is None:
            continue
        e = planned.finished.experiment
        for key, value in (
            (("settings",), settings_of(e)),
            (("images", repr(e.dataset)), e.images),
            (("weights", repr(e.model)), e.weights),
        ):
            place, first = shared.setdefault(key, (f"{row}, {column}", value))
            if first != value:
                raise MixedResults(
                    f"{place} and {row}, {column} do not belong into one table: {key[0]} {first} and {value}. Select "
                    "results with --device, --seeds or --set precision=, batch= or threads=; or leave out --columns"
                )


# -- rows and columns -------------------------------------------------------------------------------------------------


def _replace_domains(table: Table, choices: Choices, workbench: Workbench) -> Table:
    """Replace the columns of the paper's domains by those of another data set."""
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


def _choose_columns(table: Table, choices: Choices) -> Table:
    """Select the columns that match; a column of means needs all columns that it is the mean of."""
    for pattern in choices.columns:
        if not matching(pattern, table.column_keys):
            raise ValueError(f"{table.name} has no column {pattern!r}: {nearest(pattern, table.column_keys)}")
    keys = set(matching(choices.columns or "*", table.column_keys))
    chosen = [i for i, c in enumerate(table.columns) if c["key"] in keys and keys.issuperset(c.get("mean_of", ()))]
    return table.select(range(len(table.rows)), chosen)


def _choose_rows(table: Table, choices: Choices) -> Table:
    """Select the rows that match, and add a row for each +NAME: one a group, above the rows beyond the paper."""
    patterns = [word for word in choices.rows if not word.startswith("+")]
    added = [word[1:] for word in choices.rows if word.startswith("+")]
    names = [_names(row) for row in table.rows]
    for pattern in patterns:
        if not any(matching(pattern, known) for known in names):
            hint = nearest(pattern, {name for known in names for name in known})
            raise ValueError(f"{table.name} has no row {pattern!r}: {hint}. To add a method, write +{pattern}")
    whole = table
    if patterns:
        kept = [i for i, known in enumerate(names) if any(matching(pattern, known) for pattern in patterns)]
        table = table.select(kept, range(len(table.columns)))
    return _add_rows(table, whole, added) if added else table


def _add_rows(table: Table, whole: Table, added: Sequence[str]) -> Table:
    if not all(row.get("method") for row in whole.rows):
        raise ValueError(f"the rows of {table.name} are not methods: no method can be added")
    if swept := [column for column in table.columns if column.get("fields")]:
        raise ValueError(f"the columns of {table.name} set {', '.join(swept[0]['fields'])}: no method can be added")
    special = ("key", "method", "fields", "scale", "beyond", "reading")  # what rows of one group need not share
    shared = [{k: v for k, v in row.items() if k not in special} for row in whole.rows]
    groups = [group for i, group in enumerate(shared) if group not in shared[:i]]
    rows, values, place = list(table.rows), list(table.values), len(table.rows) - len(table.beyond)
    for name in added:
        methods.get(name)  # raises if the name is unknown
        keys = [f"{group['group']} {name}" if "group" in group else name for group in groups]
        rows[place:place] = [{**g, "key": k, "method": name} for g, k in zip(groups, keys, strict=True)]
        values[place:place] = [[None] * len(table.columns)] * len(groups)
        place += len(groups)
    return dataclasses.replace(table, rows=rows, values=values)


def _names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row: its key, its key without the group, its method."""
    key, group = str(row["key"]), f"{row.get('group')} "
    return [key, key.removeprefix(group), str(row.get("method") or key)]
