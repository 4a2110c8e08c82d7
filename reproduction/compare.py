"""Compare our results with the paper: each cell, the claims of the paper, and which differences are significant."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import NamedTuple

from reproduction import tables
from reproduction.beyond import LATER_PAGE, MARK
from reproduction.claims import Claim, Measured, Verdict, claims, judge, of_paper
from reproduction.gather import SELECTING, measured_alone
from reproduction.plan import Plan, Planned, stream_of
from reproduction.tables import Cell, Table, Value
from tribe import methods
from tribe.data import scenarios
from tribe.data.scenarios import Scenario, class_counts
from tribe.data.scenarios.sampling import LongTail, Natural, Shuffled
from tribe.experiments import statistics
from tribe.experiments.experiment import Experiment, MixedResults, refuse_mixture
from tribe.experiments.spec import same_for_all_seeds
from tribe.experiments.store import Result, stale

ALONE = "seconds are those of `tribe bench` with nothing else running"
TRIBE = "tribe"  # the method that added methods are compared with
APART = 1.5  # points: larger differences from the paper are counted
READING = "‡"  # of rows that the paper leaves open


class Entry(NamedTuple):
    """Our number and the paper's, in the unit of the cell."""

    ours: Value  # the mean over seeds
    deviation: float | None  # between seeds
    paper: Value
    unit: str
    experiment: str | None = None  # its id
    by_seed: Mapping[int, float] = {}  # our number of each seed

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
    notes: Sequence[str]
    missing: Mapping[str, Sequence[str]]  # why cells are empty: each reason with its cells
    groups: Mapping[str, str]  # of the methods that compete, those that the paper describes: by streams
    theirs: str = "paper"  # who published the other numbers
    experiments: Mapping[str, Experiment] = field(default_factory=dict)  # by id
    beyond: Mapping[str, str] = field(default_factory=dict)  # rows beyond the paper, and what they are
    readings: Mapping[str, str] = field(default_factory=dict)  # rows that the paper leaves open, and what it lacks
    usual: float = 0.0  # the spread of an error that was measured with one seed, see `usual_spread`

    def name_of(self, row: str) -> str:
        """The name of a row as it is shown, with a mark if it is beyond the paper, or our reading of it."""
        return f"{row} {MARK}" if row in self.beyond else f"{row} {READING}" if row in self.readings else row

    def spread_of(self, entry: "Entry") -> float:
        """The spread of one of its errors."""
        return (self.usual if entry.unit == "%" else 0.0) if entry.deviation is None else entry.deviation

    def is_apart(self, entry: "Entry") -> bool:
        """Whether ours differs from the paper's number by more than the spread."""
        return entry.difference is not None and abs(entry.difference) > self.spread_of(entry)

    @property
    def footnotes(self) -> list[str]:
        """What the mark means, if a row has it."""
        notes = dict.fromkeys(self.beyond[row] for row in self.rows if row in self.beyond)
        what = f"{MARK} Beyond the paper, which has no such rows; its claims are judged without them."
        if any(LATER_PAGE not in note for note in notes):  # time filters
            what += " See docs/time.md."
        open_rows = {row: why for row, why in self.readings.items() if row in self.rows}
        words = "; ".join(
            f"{why} ({', '.join(r for r in open_rows if open_rows[r] == why)})"
            for why in dict.fromkeys(open_rows.values())
        )
        reading = [f"{READING} Our reading: {words}. Such a row settles no claim."] if open_rows else []
        return [*([" ".join([what, *notes])] if notes else []), *reading]

    def is_best(self, row: str, column: str) -> bool:
        """Whether ours is the lowest number of the methods that had the same stream, without rows beyond the paper."""
        rivals = [other for other in self.rows if row in self.groups and self.groups.get(other) == self.groups[row]]
        numbers = [value for other in rivals if isinstance(value := self.entries[other, column].ours, float)]
        return len(numbers) > 1 and self.entries[row, column].ours == min(numbers)

    @property
    def error_columns(self) -> list[str]:
        """The columns of errors."""
        return [c for c in self.columns if any(self.entries[row, c].unit == "%" for row in self.rows)]

    def rivals(self) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
        """The methods that had the same stream, two or more: the column, and ours and the paper's error of each."""
        for column in self.error_columns:
            for group in dict.fromkeys(self.groups.values()):
                entries = {r: self.entries[r, column] for r in self.rows if self.groups.get(r) == group}
                errors = {
                    row: (entry.ours, entry.paper)
                    for row, entry in entries.items()
                    if isinstance(entry.ours, float) and isinstance(entry.paper, float)
                }
                if len(errors) > 1:
                    yield column, errors


def compare_plan(plan: Plan, results: Mapping[str, Result]) -> Comparison:
    """Compare results, given by the ids of their experiments, with the paper; results that do not fit are refused."""
    check(plan)
    table, counts = plan.table, _class_counts(plan)
    entries = {
        (row, column): _entry(planned, results, counts.get(column, {}), table.value(row, column))
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
        notes=[
            *(*table.notes, *_settings(plan, results), *_departures(plan), *_other_length(plan, results)),
            *(*_stale(results), *_duels(plan, results)),
        ],
        missing=plan.problems,
        groups={
            row["key"]: str(row.get("group"))
            for row in table.rows
            if row.get("method") and not {"beyond", "reading"} & row.keys()
        },
        theirs=table.theirs,
        experiments={experiment.id: experiment for experiment in plan.experiments},
        beyond=table.beyond,
        readings=table.readings,
    )


def _entry(planned: Planned, results: Mapping[str, Result], counts: Mapping[int | None, int], paper: Value) -> Entry:
    cell, experiment = planned.cell, planned.experiment
    if cell.metric == "class_count":
        images = counts.get(cell.number)
        return Entry(None if images is None else float(images), None, paper, "images")
    if cell.metric == "protocol":
        return Entry(_protocol(cell), None, paper, "")
    if experiment is None or experiment.id not in results:
        return Entry(None, None, paper, cell.unit)
    scale = 100 if cell.unit == "%" else 1
    values = [scale * value for value in results[experiment.id].values(cell.metric or "", cell.domain)]
    if any(value != value for value in values):
        return Entry(None, None, paper, cell.unit, experiment.id)
    spread, by_seed = statistics.spread(values), dict(zip(experiment.seeds, values, strict=True))
    return Entry(spread.mean, spread.deviation, paper, cell.unit, experiment.id, by_seed)


def _mean(entries: Sequence[Entry], paper: Value, unit: str) -> Entry:
    """The mean of several columns: of each seed that all of them have."""
    shared = [s for s in entries[0].by_seed if all(s in entry.by_seed for entry in entries)]
    values = [sum(entry.by_seed[s] for entry in entries) / len(entries) for s in shared]
    if not values:
        return Entry(None, None, paper, unit)
    spread = statistics.spread(values)
    return Entry(spread.mean, spread.deviation, paper, unit, None, dict(zip(shared, values, strict=True)))


def _class_counts(plan: Plan) -> dict[str, dict[int | None, int]]:
    """By column: the number of images of each class in the first domain of the stream."""
    found: dict[str, dict[int | None, int]] = {}
    for column in plan.table.column_keys:
        planned = plan.cells[plan.table.row_keys[0], column]
        if planned.cell.metric == "class_count" and planned.problem is None:
            stream = stream_of(planned.cell, plan.choices, plan.workbench)
            classes = len(stream.dataset.classes)
            found[column] = dict(enumerate(class_counts(stream.schedules[0], stream.labels, classes)[0].tolist()))
    return found


def _protocol(cell: Cell) -> str:
    """A property of a scenario, in the terms of the paper's table."""
    scenario: Scenario = scenarios.create(cell.scenario or "")
    if cell.property == "domain":
        return "stationary" if scenario.resets else "shifting"
    if cell.property == "local":
        return "balanced" if isinstance(scenario.local, Shuffled) else "imbalanced"
    profile = scenario.profile
    if isinstance(profile, Natural):
        return "balanced"
    return f"imbalanced, {'varying' if isinstance(profile, LongTail) and profile.varying else 'fixed'}"


# -- which results may share a table ----------------------------------------------------------------------------------


def check(plan: Plan) -> None:
    """Raise MixedResults if experiments differ in more than the table is about, naming the field."""
    cells = {f"{row}, {column}": p.experiment for (row, column), p in plan.cells.items() if p.experiment is not None}
    try:
        refuse_mixture(cells, varying=("seeds", "method", "scenario", "dataset", "images", "model", "weights"))
        for dataset in dict.fromkeys(repr(e.dataset) for e in cells.values()):
            alike = {place: e for place, e in cells.items() if repr(e.dataset) == dataset}
            refuse_mixture(alike, varying=("seeds", "method", "scenario", "model", "weights"))
        for group in _groups(plan):
            refuse_mixture(group, varying=("seeds", "method"))
    except MixedResults as error:
        raise MixedResults(
            f"{error}. With --no-run, {SELECTING} select results; --columns and --rows leave cells out"
        ) from error


def _groups(plan: Plan) -> Iterator[dict[str, Experiment]]:
    """The experiments of each column that had the same stream, by row."""
    group_of = {row["key"]: row.get("group") for row in plan.table.rows}
    for column in plan.table.column_keys:
        groups: dict[object, dict[str, Experiment]] = {}
        for row in plan.table.row_keys:
            experiment = plan.cells[row, column].experiment
            if experiment is not None:
                groups.setdefault(group_of[row], {})[row] = experiment
        yield from groups.values()


# -- notes ------------------------------------------------------------------------------------------------------------


def _settings(plan: Plan, results: Mapping[str, Result]) -> list[str]:
    """The batch and the fields of methods that ours was run with, where the table asks for this note."""
    played = {row: p.experiment for (row, _), p in plan.cells.items() if p.experiment and p.experiment.id in results}
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
    """How our experiments differ from the paper's."""
    pairs = {(p.experiment.dataset.name, p.experiment.model.name) for p in plan.cells.values() if p.experiment}
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


def _stale(results: Mapping[str, Result]) -> list[str]:
    """Which results were computed with other source code than today's."""
    found: dict[str, list[str]] = {}
    for id, result in results.items():
        for role in stale(result):
            found.setdefault(f"the {role} {getattr(result.experiment, role).name}", []).append(id)
    return [
        f"Stale: the code of {what} has changed since {len(ids)} result{'s' * (len(ids) > 1)} "
        f"({', '.join(ids[:3])}{', ...' * (len(ids) > 3)}) {'were' if len(ids) > 1 else 'was'} computed; "
        f"`tribe reproduce` computes {'them' if len(ids) > 1 else 'it'} again."
        for what, ids in found.items()
    ]


def _other_length(plan: Plan, results: Mapping[str, Result]) -> list[str]:
    """How many images of each domain ours plays, where the paper plays another part of the data set."""
    scores = [scores for e in plan.experiments if e.id in results for scores in results[e.id].metrics.values()]
    counts = {round(s["images"] / max(1, len(s["domain_error"]))) for s in scores}
    if plan.table.images is None or not counts - {plan.table.images}:
        return []
    ours = " and ".join(f"{count:,}" for count in sorted(counts))
    return [f"Ours plays {ours} images of each corruption, the {plan.table.theirs} {plan.table.images:,}."]


def _duels(plan: Plan, results: Mapping[str, Result]) -> list[str]:
    """For each cell: is the best method significantly better than the second, and do added methods beat TRIBE?

    This is judged over the seeds that both have; with one seed, only for its stream, from the records. A row beyond the
    paper is compared with the same method without the time filter.
    """
    notes, seen = [], set()
    for group in _groups(plan):
        row_of = {e.id: row for row, e in reversed(group.items()) if e.id in results}  # once, if two rows are the same
        finished = {row_of[name]: results[name] for name in reversed(row_of)}
        if len(finished) < 2 or frozenset(row_of) in seen:
            continue
        seen.add(frozenset(row_of))
        for a, b in _opponents(plan, finished):
            if (verdict := _verdict(finished[a], finished[b])) is not None:
                notes.append(f"{stream_name(finished[a].experiment)}: {a} against {b}: {verdict}")
    return notes


def _verdict(one: Result, other: Result) -> statistics.Paired | statistics.Duel | None:
    """The difference between two methods on the same streams, over seeds if there are several streams."""
    seeds = [seed for seed in one.experiment.seeds if seed in other.experiment.seeds]
    if len(seeds) > 1 and not same_for_all_seeds(one.experiment.scenario.json()):
        errors = [[100 * result.metrics[str(s)]["instance_error"] for s in seeds] for result in (one, other)]
        return statistics.paired(*errors)
    if not seeds or not (one.has_records and other.has_records):
        return None
    records = [[r for r in result.records() if r.spec["seed"] == seeds[0]] for result in (one, other)]
    return statistics.duel(*records)


def _opponents(plan: Plan, results: Mapping[str, Result]) -> list[tuple[str, str]]:
    """The pairs of rows to compare on one stream."""
    method_of = {row["key"]: str(row.get("method")) for row in plan.table.rows}
    papers = [row for row in results if row not in plan.table.beyond]
    best = sorted(papers, key=lambda row: results[row].error())[:2]
    added = [row for row in papers if method_of[row] in plan.choices.added and method_of[row] != TRIBE]
    against = [(row, other) for row in added for other in papers if method_of[other] == TRIBE]
    against += [
        (row, other)
        for row in results
        for other in papers
        if row in plan.table.beyond and method_of[other] == methods.parse(method_of[row]).unfiltered
    ]
    first = [(best[0], best[1])] if len(best) > 1 else []
    return [*first, *(pair for pair in against if set(pair) != set(best))]


def stream_name(experiment: Experiment) -> str:
    """The scenario of an experiment, with its main fields."""
    scenario = experiment.scenario
    fields = {name: scenario.fields.get(name) for name in ("imbalance", "sigma")}
    words = ", ".join(f"{name} {value:g}" for name, value in fields.items() if value is not None)
    return f"{scenario.name} ({words})" if words else scenario.name


# -- claims -----------------------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """A claim with its verdicts on the paper's numbers and on ours."""

    claim: Claim
    paper: Verdict
    ours: Verdict


def judge_claims(
    compare_table: Callable[[Table], Comparison],
    root: str | PathLike[str],
    known: Sequence[Comparison] = (),
    table: str | None = None,
) -> list[Judged]:
    """Judge the paper's claims on its own numbers and on ours.

    Args:
        compare_table: returns the comparison of a table that is not in ``known``.
        root: the folder of results, with the times of `tribe bench`.
        known: tables that were compared already.
        table: judge the claims about this table; None: all claims.
    """
    compared = {comparison.name: comparison for comparison in known}
    usual = usual_spread(known)

    def ours(name: str, row: str, column: str) -> Measured | None:
        if name not in compared:
            compared[name] = compare_table(tables.get(name))
        entry = compared[name].entries.get((row, column))
        if entry is None or not isinstance(entry.ours, float):
            return None
        if entry.unit != "s":
            return Measured(entry.ours, entry.by_seed, usual if entry.deviation is None else entry.deviation)
        experiment = compared[name].experiments[entry.experiment or ""]
        ms = measured_alone(root, experiment, experiment.model.name).ms.get(experiment.method.name)
        return None if ms is None else Measured(ms / 1e3)

    def judge_ours(claim: Claim) -> Verdict:
        verdict = judge(claim, ours)
        return verdict._replace(why=f"{verdict.why} ({ALONE})") if _is_about_time(claim) else verdict

    about = [claim for claim in claims() if table is None or table in claim.tables]
    return [Judged(claim, judge(claim, of_paper), judge_ours(claim)) for claim in about]


def usual_spread(comparisons: Iterable[Comparison]) -> float:
    """The spread of an error that was measured with one seed: that of those with several, their root mean square.

    It is 0 if no error has several seeds. Errors of single corruptions, and rows beyond the paper, do not count.
    """
    by_domain = {c["key"] for name in tables.names() for c in tables.get(name).columns if "domain" in c}
    found = {
        (entry.experiment, entry.ours): entry.deviation
        for comparison in comparisons
        for (row, column), entry in comparison.entries.items()
        if entry.deviation is not None and entry.unit == "%" and entry.experiment
        if row not in comparison.beyond and column not in by_domain
    }
    squares = [deviation**2 for deviation in found.values()]
    return (sum(squares) / len(squares)) ** 0.5 if squares else 0.0


def _is_about_time(claim: Claim) -> bool:
    columns = (column for name in claim.tables for column in tables.get(name).columns)
    return any(column["key"] == claim.arguments.get("column") and column.get("unit") == "s" for column in columns)
