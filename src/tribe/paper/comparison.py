"""Ours next to the paper's: every cell with its spread over seeds and the difference, and who beats whom for sure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from tribe import scenarios
from tribe.lab import statistics
from tribe.lab.experiment import Experiment, MixedResults, refuse_mixture
from tribe.lab.store import Result, find, load
from tribe.paper import tables as paper
from tribe.paper.alone import measured_alone
from tribe.paper.claims import Claim, Verdict, claims, judge, of_paper
from tribe.paper.plans import CHOICE, Plan, played
from tribe.paper.tables import Cell
from tribe.scenarios import Scenario, class_counts
from tribe.scenarios.sampling import LongTail, Natural, Shuffled

ALONE = "of seconds those count that `tribe bench` measured with nothing else running"
TRIBE = "tribe"  # the method that added ones are measured against


class Entry(NamedTuple):
    """A cell: ours, the paper's, and where ours comes from. Numbers are in the cell's unit."""

    ours: float | str | None
    deviation: float | None  # between seeds
    paper: float | str | None
    unit: str
    experiment: str | None = None  # its id

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        if isinstance(self.ours, float) and isinstance(self.paper, float):
            return self.ours - self.paper
        return None


@dataclass(frozen=True)
class Comparison:
    """A table, ours and the paper's."""

    name: str
    label: str
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    entries: Mapping[tuple[str, str], Entry]
    notes: Sequence[str]
    missing: Mapping[str, Sequence[str]]  # why there is nothing in some cells, and in which
    groups: Mapping[str, str]  # of rows that are methods: those that met the same streams
    theirs: str = "paper"  # whose numbers stand beside ours

    def is_best(self, row: str, column: str) -> bool:
        """Whether ours is the lowest number of the methods that met the same stream."""
        rivals = [other for other in self.rows if row in self.groups and self.groups.get(other) == self.groups[row]]
        numbers = [value for other in rivals if isinstance(value := self.entries[other, column].ours, float)]
        return len(numbers) > 1 and self.entries[row, column].ours == min(numbers)


class Judged(NamedTuple):
    """A claim, judged on the paper's numbers and on ours."""

    claim: Claim
    paper: Verdict
    ours: Verdict


def compare(plan: Plan, root: str | PathLike[str]) -> Comparison:
    """Compare with the paper what lies in ``root``; nothing is run. Results that do not fit together are refused."""
    results = {e.id: found for e in plan.experiments if (found := find(e, root, verified=True)) is not None}
    check(plan)
    table, counts = plan.table, _class_counts(plan)
    entries: dict[tuple[str, str], Entry] = {}
    for (row, column), planned in plan.cells.items():
        said = table.value(row, column)
        cell, experiment = planned.cell, planned.experiment
        if cell.metric == "class_count":
            images = counts.get(column, {}).get(cell.number)
            entries[row, column] = Entry(None if images is None else float(images), None, said, "images")
        elif cell.metric == "protocol":
            entries[row, column] = Entry(_protocol(cell), None, said, "")
        elif experiment is None or experiment.id not in results:
            entries[row, column] = Entry(None, None, said, cell.unit)
        else:
            entries[row, column] = _entry(
                results[experiment.id], planned.cell.metric or "", cell.domain, cell.unit, said
            )
    for (row, column), planned in plan.cells.items():
        if parts := planned.cell.mean_of:
            values = [entries[row, part].ours for part in parts]
            numbers = [value for value in values if isinstance(value, float)]
            mean = sum(numbers) / len(numbers) if len(numbers) == len(parts) else None
            entries[row, column] = Entry(mean, None, table.value(row, column), planned.cell.unit)
    notes = [*table.notes, *_departures(plan), *_duels(plan, results)]
    instead = ", ".join(name for name in (plan.wishes.dataset, plan.wishes.model) if name)
    groups = {row["key"]: str(row.get("group")) for row in table.rows if row.get("method")}
    title = table.title + (f" (ours: {instead})" if instead else "")
    return Comparison(
        table.name,
        table.label,
        title,
        table.row_keys,
        table.column_keys,
        entries,
        notes,
        plan.problems,
        groups,
        table.theirs,
    )


def check(plan: Plan) -> None:
    """Refuse to put results side by side that differ in more than the table is about, naming the field."""
    try:
        _check(plan)
    except MixedResults as error:
        raise MixedResults(
            f"{error}. With --no-run, {CHOICE} choose among results; --columns and --rows leave cells out"
        ) from error


def _check(plan: Plan) -> None:
    experiments = {
        f"{row}, {column}": p.experiment for (row, column), p in plan.cells.items() if p.experiment is not None
    }
    refuse_mixture(experiments, varying=("method", "scenario", "dataset", "images", "model", "weights"))
    for dataset in dict.fromkeys(repr(e.dataset) for e in experiments.values()):
        alike = {place: e for place, e in experiments.items() if repr(e.dataset) == dataset}
        refuse_mixture(alike, varying=("method", "scenario", "model", "weights"))
    for group in _groups(plan):
        refuse_mixture(group, varying=("method",))


def judged(
    planning: Callable[[paper.Table], Plan],
    root: str | PathLike[str],
    known: Sequence[Comparison] = (),
    table: str | None = None,
) -> list[Judged]:
    """The paper's claims, judged on its own numbers and on what lies in ``root``.

    Args:
        planning: how tables are planned.
        root: the folder of results; nothing is run.
        known: tables that were compared already.
        table: whose claims; None: all of them.
    """
    compared = {comparison.name: comparison for comparison in known}

    def ours(table: str, row: str, column: str) -> float | None:
        if table not in compared:
            compared[table] = compare(planning(paper.get(table)), root)
        entry = compared[table].entries.get((row, column))
        if entry is None or not isinstance(entry.ours, float):
            return None
        return entry.ours if entry.unit != "s" else _alone(entry, root)

    def judge_ours(claim: Claim) -> Verdict:
        verdict = judge(claim, ours)
        return verdict._replace(why=f"{verdict.why} ({ALONE})") if _is_of_time(claim) else verdict

    about = [claim for claim in claims() if table is None or table in claim.tables]
    return [Judged(claim, judge(claim, of_paper), judge_ours(claim)) for claim in about]


def _is_of_time(claim: Claim) -> bool:
    columns = (column for table in claim.tables for column in paper.get(table).columns)
    return any(column["key"] == claim.arguments.get("column") and column.get("unit") == "s" for column in columns)


def _alone(entry: Entry, root: str | PathLike[str]) -> float | None:
    """Seconds an image of a method by itself; those of experiments that shared a device say little."""
    if entry.experiment is None:
        return None
    experiment = load(Path(root) / entry.experiment).experiment
    ms = measured_alone(root, experiment, experiment.model.name).ms.get(experiment.method.name)
    return None if ms is None else ms / 1e3


def _entry(result: Result, metric: str, domain: str | None, unit: str, said: float | str | None) -> Entry:
    scale = 100 if unit == "%" else 1
    values = [scale * value for value in result.values(metric, domain)]
    if any(value != value for value in values):
        return Entry(None, None, said, unit, result.experiment.id)
    told = statistics.spread(values)
    return Entry(told.mean, told.deviation, said, unit, result.experiment.id)


def _departures(plan: Plan) -> list[str]:
    """In what ours was made otherwise than the paper's."""
    given = [
        f"{owner}.{name}={value}" for owner, fields in plan.wishes.settings.items() for name, value in fields.items()
    ]
    return _stand_in(plan) + ([f"Ours departs from the paper: {', '.join(given)}."] if given else [])


def _stand_in(plan: Plan) -> list[str]:
    used = {
        (p.experiment.dataset.name, p.experiment.model.name) for p in plan.cells.values() if p.experiment is not None
    }
    meant = {(p.cell.dataset, p.cell.model) for p in plan.cells.values() if p.cell.method is not None}
    if not used or used <= meant:
        return []
    told = [" and ".join(", ".join(map(str, pair)) for pair in sorted(pairs, key=str)) for pairs in (used, meant)]
    return [f"Ours is {told[0]}; the paper's is {told[1]}: differences say little."]


def _groups(plan: Plan) -> Iterator[dict[str, Experiment]]:
    """The experiments of each column that met the same stream, by row."""
    group_of = {row["key"]: row.get("group") for row in plan.table.rows}
    for column in plan.table.column_keys:
        groups: dict[object, dict[str, Experiment]] = {}
        for row in plan.table.row_keys:
            experiment = plan.cells[row, column].experiment
            if experiment is not None:
                groups.setdefault(group_of[row], {})[row] = experiment
        yield from groups.values()


def _duels(plan: Plan, results: Mapping[str, Result]) -> list[str]:
    """Whether the best of each stream beats the next for sure, and whether the methods that were added beat TRIBE."""
    notes, seen = [], set()
    for group in _groups(plan):
        row_of = {e.id: row for row, e in reversed(group.items()) if e.id in results}  # once, if two rows are the same
        there = {row_of[name]: results[name] for name in reversed(row_of)}
        if len(there) < 2 or frozenset(row_of) in seen:
            continue
        seen.add(frozenset(row_of))
        for a, b in _opponents(plan, there):
            one, other = there[a], there[b]
            if one.has_records and other.has_records:
                told = statistics.duel(one.records(), other.records())
                notes.append(f"{_stream(one.experiment)}: {a} against {b}: {told}")
    return notes


def _opponents(plan: Plan, there: Mapping[str, Result]) -> list[tuple[str, str]]:
    """The rows of a stream that are to be told apart, each pair once."""
    best, second = sorted(there, key=lambda row: there[row].error())[:2]
    method_of = {row["key"]: row.get("method") for row in plan.table.rows}
    added = [row for row in there if method_of[row] in plan.wishes.added and method_of[row] != TRIBE]
    against = [(row, other) for row in added for other in there if method_of[other] == TRIBE]
    return [(best, second), *(pair for pair in against if set(pair) != {best, second})]


def _stream(experiment: Experiment) -> str:
    scenario = experiment.scenario
    fields = {name: scenario.fields.get(name) for name in ("imbalance", "sigma")}
    words = ", ".join(f"{name} {value:g}" for name, value in fields.items() if value is not None)
    return f"{scenario.name} ({words})" if words else scenario.name


def _class_counts(plan: Plan) -> dict[str, dict[int | None, int]]:
    """By column: images of each class in the first domain of the stream."""
    found: dict[str, dict[int | None, int]] = {}
    for column in plan.table.column_keys:
        planned = plan.cells[plan.table.row_keys[0], column]
        if planned.cell.metric == "class_count" and planned.problem is None:
            stream = played(planned.cell, plan.wishes, plan.workbench)
            classes = len(stream.dataset.classes)
            found[column] = dict(enumerate(class_counts(stream.schedules[0], stream.labels, classes)[0].tolist()))
    return found


def _protocol(cell: Cell) -> str:
    """What a scenario does, in the words of the paper's table."""
    scenario: Scenario = scenarios.create(cell.scenario or "")
    if cell.property == "domain":
        return "stationary" if scenario.resets else "shifting"
    if cell.property == "local":
        return "balanced" if isinstance(scenario.local, Shuffled) else "imbalanced"
    profile = scenario.profile
    if isinstance(profile, Natural):
        return "balanced"
    return f"imbalanced, {'varying' if isinstance(profile, LongTail) and profile.varying else 'fixed'}"
