"""Compare our results with the paper's numbers, cell by cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reproduction.beyond import MARK
from reproduction.keep import stale
from reproduction.plan import Plan, Planned, stream_of
from reproduction.tables import Cell, Value
from tribe.data import scenarios
from tribe.data.scenarios import Scenario, class_counts
from tribe.data.scenarios.sampling import LongTail, Natural, Shuffled
from tribe.experiments import statistics
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import same_for_all_seeds
from tribe.experiments.store import Result

READING = "‡"  # of rows that the paper leaves open


class Entry(NamedTuple):
    """Our number and the paper's, in the unit of the cell."""

    ours: Value  # the mean over seeds
    paper: Value
    unit: str
    by_seed: Mapping[int, float] = {}  # our number of each seed
    experiment: Experiment | None = None
    precisions: Mapping[int, str] = {}  # of seeds that were played in another run than the experiment's

    def precision_of(self, seed: int) -> str:
        """Return the precision that a seed was played in."""
        return self.precisions.get(seed) or (self.experiment.precision if self.experiment else "")

    @property
    def seeds(self) -> str:
        """The seeds; where they were played in several precisions, with these."""
        found: dict[str, list[int]] = {}
        for seed in self.by_seed:
            found.setdefault(self.precision_of(seed), []).append(seed)
        words = {name: " ".join(map(str, seeds)) for name, seeds in found.items()}
        return ", ".join(f"{seeds} ({name})" if len(words) > 1 else seeds for name, seeds in words.items())

    @property
    def deviation(self) -> float | None:
        """Our standard deviation between seeds; None for one seed."""
        return statistics.spread([*self.by_seed.values()]).deviation if self.by_seed else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        if isinstance(self.ours, float) and isinstance(self.paper, float):
            return self.ours - self.paper
        return None


@dataclass(frozen=True)
class Comparison:
    """A table with our numbers and the paper's."""

    name: str
    label: str
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    entries: Mapping[tuple[str, str], Entry]
    notes: Sequence[str] = ()
    missing: Mapping[str, Sequence[str]] = field(default_factory=dict)  # why cells are empty: each reason, its cells
    groups: Mapping[str, str] = field(default_factory=dict)  # by row of the paper: its stream; such rows compete
    theirs: str = "paper"  # who published the other numbers
    beyond: Mapping[str, str] = field(default_factory=dict)  # rows beyond the paper, and what they are
    readings: Mapping[str, str] = field(default_factory=dict)  # rows that the paper leaves open, and what it lacks
    stand_in: str = ""  # the data set and the network that were played, where they are not the paper's

    def name_of(self, row: str) -> str:
        """Return the name of a row as it is shown, with a mark if it is beyond the paper, or our reading of it."""
        return f"{row} {MARK}" if row in self.beyond else f"{row} {READING}" if row in self.readings else row

    def is_best(self, row: str, column: str) -> bool:
        """Return whether ours is the lowest number of the methods that had the same stream."""
        rivals = [other for other in self.rows if row in self.groups and self.groups.get(other) == self.groups[row]]
        numbers = [value for other in rivals if isinstance(value := self.entries[other, column].ours, float)]
        return len(numbers) > 1 and self.entries[row, column].ours == min(numbers)

    @property
    def has_spread(self) -> bool:
        """Whether a number was played with several seeds."""
        return any(len(entry.by_seed) > 1 for entry in self.entries.values())

    @property
    def all_notes(self) -> list[str]:
        """The notes, and what the marks of rows mean."""
        marks = {self.beyond[row]: MARK for row in self.rows if row in self.beyond}
        marks |= {f"our reading: {self.readings[row]}.": READING for row in self.rows if row in self.readings}
        return [*self.notes, *(f"{mark} {note}" for note, mark in marks.items())]

    def without_empty(self) -> "Comparison | None":
        """Return the comparison without empty rows and columns; None if nothing was run."""
        filled = {place for place, entry in self.entries.items() if entry.by_seed}
        if not filled:
            return None
        rows = [row for row in self.rows if any(row == r for r, _ in filled)]
        columns = [column for column in self.columns if any(column == c for _, c in filled)]
        shown = {f"{row}, {column}" for row in rows for column in columns}
        missing = {reason: [cell for cell in cells if cell in shown] for reason, cells in self.missing.items()}
        missing = {reason: cells for reason, cells in missing.items() if cells}
        return Comparison(**{**vars(self), "rows": rows, "columns": columns, "missing": missing})


def compare(plan: Plan) -> Comparison:
    """Compare the results of a plan with the paper."""
    table, counts = plan.table, _class_counts(plan)
    entries = {
        (row, column): _entry(planned, counts.get(column, {}), table.value(row, column))
        for (row, column), planned in plan.cells.items()
    }
    for (row, column), planned in plan.cells.items():
        if parts := planned.cell.mean_of:
            entries[row, column] = _mean([entries[row, p] for p in parts], table.value(row, column), planned.cell.unit)
    replaced = ", ".join(name for name in (plan.choices.dataset, plan.choices.model) if name)
    return Comparison(
        table.name,
        table.label,
        table.title + (f" (ours: {replaced})" if replaced else ""),
        table.row_keys,
        table.column_keys,
        entries,
        notes=[*table.notes, *_settings(plan), *_departures(plan), *_length(plan), *_stale(plan), *_duels(plan)],
        missing=plan.problems,
        groups={
            row["key"]: str(row.get("group"))
            for row in table.rows
            if row.get("method") and not {"beyond", "reading"} & row.keys()
        },
        theirs=table.theirs,
        beyond=table.beyond,
        readings=table.readings,
        stand_in=_stand_in(plan),
    )


def _stand_in(plan: Plan) -> str:
    """Return the data set and the network that were played in place of the paper's; "" where they are the paper's."""
    cells, choices = plan.cells.values(), plan.choices
    papers = {p.cell.dataset for p in cells} | {p.cell.model for p in cells}
    return ", ".join(name for name in (choices.dataset, choices.model) if name and name not in papers)


def stream_name(experiment: Experiment) -> str:
    """Return the scenario of an experiment, with its main fields."""
    scenario = experiment.scenario
    fields = {name: scenario.fields.get(name) for name in ("imbalance", "sigma")}
    words = ", ".join(f"{name} {value:g}" for name, value in fields.items() if value is not None)
    return f"{scenario.name} ({words})" if words else scenario.name


def _entry(planned: Planned, counts: Mapping[int | None, int], paper: Value) -> Entry:
    cell, found = planned.cell, planned.finished
    if cell.metric == "class_count":
        images = counts.get(cell.number)
        return Entry(None if images is None else float(images), paper, "images")
    if cell.metric == "protocol":
        return Entry(_protocol(cell), paper, "")
    if found is None:
        return Entry(None, paper, cell.unit)
    scale = 100 if cell.unit == "%" else 1
    numbers = (scale * value for value in found.values(cell.metric or "", cell.domain))
    by_seed = dict(zip(found.streams, numbers, strict=True))
    if any(value != value for value in by_seed.values()):
        return Entry(None, paper, cell.unit)
    return Entry(statistics.spread([*by_seed.values()]).mean, paper, cell.unit, by_seed, found.experiment)


def _mean(entries: Sequence[Entry], paper: Value, unit: str) -> Entry:
    """Return the mean of several columns: of each seed that all of them have."""
    shared = [s for s in entries[0].by_seed if all(s in entry.by_seed for entry in entries)]
    by_seed = {s: sum(entry.by_seed[s] for entry in entries) / len(entries) for s in shared}
    if not by_seed:
        return Entry(None, paper, unit)
    return Entry(statistics.spread([*by_seed.values()]).mean, paper, unit, by_seed, entries[0].experiment)


def _class_counts(plan: Plan) -> dict[str, dict[int | None, int]]:
    """Return by column: the number of images of each class in the first domain of the stream."""
    found: dict[str, dict[int | None, int]] = {}
    for column in plan.table.column_keys:
        planned = plan.cells[plan.table.row_keys[0], column]
        if planned.cell.metric == "class_count" and planned.problem is None:
            stream = stream_of(planned.cell, plan.choices, plan.workbench)
            classes = len(stream.dataset.classes)
            found[column] = dict(enumerate(class_counts(stream.schedules[0], stream.labels, classes)[0].tolist()))
    return found


def _protocol(cell: Cell) -> str:
    """Return a property of a scenario, in the terms of the paper's table."""
    scenario: Scenario = scenarios.create(cell.scenario or "")
    if cell.property == "domain":
        return "stationary" if scenario.resets else "shifting"
    if cell.property == "local":
        return "balanced" if isinstance(scenario.local, Shuffled) else "imbalanced"
    profile = scenario.profile
    if isinstance(profile, Natural):
        return "balanced"
    return f"imbalanced, {'varying' if isinstance(profile, LongTail) and profile.varying else 'fixed'}"


# -- notes ------------------------------------------------------------------------------------------------------------


def _played(plan: Plan) -> dict[tuple[str, str], Result]:
    return {place: planned.finished for place, planned in plan.cells.items() if planned.finished is not None}


def _settings(plan: Plan) -> list[str]:
    """Return the batch and the fields of methods that ours was run with, where the table asks for this note."""
    played = {row: found.experiment for (row, _), found in _played(plan).items()}
    if not plan.table.settings or not played:
        return []
    words = [f"batches of {' and '.join(str(n) for n in sorted({e.batch for e in played.values()}))}"]
    for name, meaning in plan.table.settings.items():
        rows: dict[object, list[str]] = {}
        for row, experiment in played.items():
            if name in experiment.method.fields:
                rows.setdefault(experiment.method.fields[name], []).append(row)
        if rows:
            words.append(f"{meaning} " + ", ".join(f"{value} ({', '.join(alike)})" for value, alike in rows.items()))
    return [f"Ours uses {'; '.join(words)}."]


def _departures(plan: Plan) -> list[str]:
    """Return how our experiments differ from the paper's."""
    pairs = {(e.dataset.name, e.model.name) for e in plan.experiments}
    papers = {(p.cell.dataset, p.cell.model) for p in plan.cells.values() if p.cell.method is not None}
    notes = []
    if not pairs <= papers:
        ours, theirs = (
            " and ".join(", ".join(map(str, pair)) for pair in sorted(some, key=str)) for some in (pairs, papers)
        )
        notes.append(f"Ours uses {ours}; the paper uses {theirs}: the numbers are not comparable.")
    overrides = [
        f"{owner}.{name}={value}" for owner, fields in plan.choices.overrides.items() for name, value in fields.items()
    ]
    return notes + ([f"Ours differs from the paper: {', '.join(overrides)}."] if overrides else [])


def _length(plan: Plan) -> list[str]:
    """Return how many images of each domain ours plays, where the paper plays another part of the data set."""
    scores = [scores for found in _played(plan).values() for scores in found.metrics.values()]
    counts = {round(s["images"] / max(1, len(s["domain_error"]))) for s in scores}
    if plan.table.images is None or not counts - {plan.table.images}:
        return []
    ours = " and ".join(f"{count:,}" for count in sorted(counts))
    return [f"Ours plays {ours} images of each corruption, the {plan.table.theirs} {plan.table.images:,}."]


def _stale(plan: Plan) -> list[str]:
    """Return which components have changed since the results were computed."""
    results = _played(plan).values()
    changed = {f"the {role} {getattr(r.experiment, role).name}" for r in results for role in stale(r)}
    if not changed:
        return []
    return [f"Stale: the code of {', '.join(sorted(changed))} has changed; `tribe reproduce` computes these again."]


def _duels(plan: Plan) -> list[str]:
    """Return for each stream whether the best method is significantly better than the second, over seeds."""
    notes, seen = [], set()
    groups = {row["key"]: row.get("group") for row in plan.table.rows if "beyond" not in row}
    for column in plan.table.column_keys:
        for group in dict.fromkeys(groups.values()):
            cells = {row: plan.cells[row, column].finished for row in groups if groups[row] == group}
            streams = {row: found for row, found in cells.items() if found is not None and len(found.streams) > 1}
            names = frozenset(found.experiment.id for found in streams.values())
            if len(names) < 2 or names in seen or same_for_all_seeds(_any(streams).experiment.scenario.json()):
                continue
            seen.add(names)
            errors = {
                row: dict(zip(found.streams, found.values("instance_error"), strict=True))
                for row, found in streams.items()
            }
            one, other = sorted(errors, key=lambda row: statistics.spread([*errors[row].values()]).mean)[:2]
            seeds = [seed for seed in errors[one] if seed in errors[other]]
            if len(seeds) > 1:
                verdict = statistics.paired(*([100 * errors[row][s] for s in seeds] for row in (one, other)))
                notes.append(f"{stream_name(_any(streams).experiment)}: {one} against {other}: {verdict}")
    return notes


def _any(streams: Mapping[str, Result]) -> Result:
    return next(iter(streams.values()))
