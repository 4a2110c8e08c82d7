"""What was reproduced, as a page that is written from results alone: it says no more than they do.

Results that were computed alike (seeds, batch, precision, device) are a series, and a table is of one series. Beside
the results, their folder may hold

    bench/*.json              what `tribe bench --json` measured, with nothing else running
    draws/*.json              what `python -m benchmarks.textbook --json` measured: one method, many times
    data/<folder>/made.json   how corrupted images were made, as `tribe corrupt` recorded it
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from tribe import datasets, methods
from tribe.datasets.made import read_made
from tribe.lab.experiment import Experiment
from tribe.lab.store import Result, finished
from tribe.lab.workbench import Workbench
from tribe.paper import tables as paper
from tribe.paper.alone import measured_alone
from tribe.paper.beside import Times, beside, near_the_released, released
from tribe.paper.comparison import Comparison, compare, judged
from tribe.paper.draws import LIVE, Draws, read_draws
from tribe.paper.findings import differences, in_every_cell, in_short, judged_claims, other_than_the_paper
from tribe.paper.gathering import Origin, gather_from
from tribe.paper.plans import Plan, Wishes, artifacts
from tribe.paper.render import markdown, table_row
from tribe.paper.tables import Cell, Table

COMMAND = "tribe reproduce document --runs results --out docs/reproduction.md"
DATA, DRAWS = "data", "draws"
WITH_LATER = ("mnist", "cifar10", "cifar100")  # tables of all methods: those that came later are rows of them, too
IN_EVERY_CELL = "cifar10"  # the table in which TRIBE is to be best throughout


class Series(NamedTuple):
    """Results that were computed alike."""

    results: Sequence[Result]
    root: Path
    workbench: Workbench

    @property
    def first(self) -> Experiment:
        """One of its experiments, for what all of them share."""
        return self.results[0].experiment

    @property
    def title(self) -> str:
        """How they were computed."""
        e = self.first
        threads = "" if e.threads is None else f", {e.threads} thread{'s' * (e.threads > 1)}"
        seeds = f"seed {e.seeds[0]}" if len(e.seeds) == 1 else f"seeds {e.seeds[0]} to {e.seeds[-1]}"
        return f"{_machines(self.results, 'device')}{threads}, {e.precision}, {seeds}, batch {e.batch}"

    @property
    def is_of_released(self) -> bool:
        """Whether they met the stream that the released code was measured on."""
        return self.first.seeds == (released().seed,)

    def plan(self, table: Table, wishes: Wishes | None = None) -> Plan:
        """A table with what is here."""
        return gather_from(table, wishes or Wishes(), [result.experiment for result in self.results], self.workbench)

    def compare(self, table: Table, wishes: Wishes | None = None) -> Comparison | None:
        """A table, ours and the paper's, without rows and columns that are empty; None if nothing of it was run."""
        plan = self.plan(table, wishes)
        return _filled(compare(plan, self.root)) if plan.experiments else None


def document(root: str | PathLike[str], origin: Origin | None = None) -> str:
    """The page, in Markdown, of results that were made in one way, or in any; without those that `damaged` names."""
    root, here, made = Path(root), Workbench(device="cpu"), origin or Origin()
    results = [result for result in finished(root, damaged="skip") if not made.otherwise(result.experiment)]
    series = [Series(alike, root, here) for alike in _alike(results)]
    lines = [
        "# Reproduction",
        "",
        "The paper's tables and figures, computed with this library, next to the paper's own.",
    ]
    lines += [f"Written by `{COMMAND}` from the results in that folder, not by hand.", ""]
    done: dict[str, int] = {}  # cells, by table
    short, body = list[str](), list[str]()
    for one in series:
        own, others = _compared(one)
        for c in own:
            rows = paper.get(c.name).row_keys
            there = sum(entry.ours is not None for (row, _), entry in c.entries.items() if row in rows)
            done[c.name] = max(done.get(c.name, 0), there)
        first, findings = _findings(one, own)
        short = short or ([f"On {one.title}:", "", *first, ""] if first else [])
        body += [f"## {one.title}", "", *findings, *(markdown(c, level=3) for c in own)]
        for comparison in others:
            body += [markdown(comparison, level=3), *other_than_the_paper(comparison)]
        body += _left_over(one, (*own, *others))
    lines += ["## In short", "", *short] if short else []
    return "\n".join([*lines, *_what_was_run(series), *body, *_not_run(done)]).rstrip() + "\n"


def _alike(results: Iterable[Result]) -> list[list[Result]]:
    """Series, those from a GPU first, where the paper's networks run, then the largest."""
    found: dict[str, list[Result]] = {}
    for result in results:
        e = result.experiment
        found.setdefault(repr((e.device, e.precision, e.seeds, e.batch, e.threads)), []).append(result)
    return sorted(found.values(), key=lambda alike: (alike[0].experiment.device != "cuda", -len(alike)))


def _compared(series: Series) -> tuple[list[Comparison], list[Comparison]]:
    """Tables on the paper's own data and network, and on others that stand in for them."""
    own, others = [], []
    for table in artifacts():
        wishes = Wishes(added=_later(series, table), called=_called())
        if (comparison := series.compare(table, wishes)) is not None:
            own.append(comparison)
        for dataset, model in _stand_ins(series, table):
            stand_in = dataclasses.replace(wishes, dataset=dataset, model=model)
            if (comparison := series.compare(table, stand_in)) is not None:
                others.append(comparison)
    return own, others


def _later(series: Series, table: Table) -> list[str]:
    """Methods with results that are not among the paper's."""
    if table.name not in WITH_LATER:
        return []
    rows = {row.get("method") for row in table.rows}
    run = {result.experiment.method.name for result in series.results}
    return sorted(name for name in run - rows if name in methods.names() and not methods.get(name).variants)


def _called() -> dict[str, str]:
    """The rows of methods with their default settings, in all tables by the same names."""
    return {str(row["method"]): str(row["key"]) for row in released().table.rows if not row.get("fields")}


def _stand_ins(series: Series, table: Table) -> list[tuple[str, str]]:
    """Data sets of the same clean images, with networks, that were played in place of a table's."""
    meant = {(cell.dataset, cell.model) for cell in _cells(table) if cell.method is not None}
    if len(meant) != 1:
        return []
    ((dataset, model),) = meant
    played = {(r.experiment.dataset.name, r.experiment.model.name) for r in series.results} - {(dataset, model)}
    return sorted(pair for pair in played if _of(pair[0], "clean_name") == _of(dataset or "", "clean_name"))


def _of(dataset: str, name: str) -> str:
    """What a data set says of itself: the clean one it is made from, the folder it lies in."""
    return str(getattr(datasets.get(dataset), name, dataset))


def _cells(table: Table) -> Iterator[Cell]:
    return (table.cell(row, column) for row in table.row_keys for column in table.column_keys)


def _left_over(series: Series, comparisons: Iterable[Comparison]) -> list[str]:
    """Results that are in none of the tables, so that none is passed over in silence."""
    beside_it = series.compare(released().table) if series.is_of_released else None
    shown = {e.experiment for c in (*comparisons, *([beside_it] if beside_it else [])) for e in c.entries.values()}
    rest = [r.experiment for r in series.results if r.experiment.id not in shown]
    told = ", ".join(f"{e.method.name} ({e.id})" for e in rest)
    return [f"In none of these tables: {told}.", ""] if rest else []


def _filled(comparison: Comparison) -> Comparison:
    """Without rows and columns of which nothing was run."""
    there = {place for place, entry in comparison.entries.items() if entry.ours is not None}
    rows = [row for row in comparison.rows if any(row == r for r, _ in there)]
    columns = [column for column in comparison.columns if any(column == c for _, c in there)]
    shown = {f"{row}, {column}" for row in rows for column in columns}
    seen = {reason: [cell for cell in cells if cell in shown] for reason, cells in comparison.missing.items()}
    missing = {reason: cells for reason, cells in seen.items() if cells}
    return dataclasses.replace(comparison, rows=rows, columns=columns, missing=missing)


# -- what was found ---------------------------------------------------------------------------------------------------


def _findings(series: Series, own: Sequence[Comparison]) -> tuple[list[str], list[str]]:
    """In a few sentences, and in full."""
    if not own:
        return [], []
    judgements = judged(series.plan, series.root, own)
    short = in_short(own, judgements, IN_EVERY_CELL)
    lines = [line for c in own if c.name == IN_EVERY_CELL for line in in_every_cell(c)]
    if series.is_of_released and (comparison := series.compare(released().table)) is not None:
        draws = _draws(series, comparison)
        short.insert(0, near_the_released(comparison, draws))
        lines += beside(comparison, _times(series, comparison), draws)
    return short, [*lines, *differences(own, judgements), *judged_claims(judgements)]


def _times(series: Series, comparison: Comparison) -> dict[str, Times]:
    """What the methods took, by data set."""
    seconds = {r.experiment.id: sum(v := r.values("seconds_per_image")) / len(v) for r in series.results}
    table, times = released().table, {}
    for column in table.columns:
        used = {row: comparison.entries[row, column["key"]].experiment for row in comparison.rows}
        known, how = measured_alone(series.root, series.first, str(column["model"]))
        times[str(column["group"])] = Times(
            {row: 1e3 * seconds[name] for row, name in used.items() if name is not None},
            {row: known[method] for method, row in _called().items() if method in known},
            how,
        )
    return times


def _draws(series: Series, comparison: Comparison) -> dict[tuple[str, str], list[Draws]]:
    """What was drawn of the experiments of a comparison with the released code, by data set and row."""
    known = {result.experiment.id: result.experiment for result in series.results}
    drawn = [read_draws(path) for path in sorted((series.root / DRAWS).glob("*.json"))]
    found: dict[tuple[str, str], list[Draws]] = {}
    for group in dict.fromkeys(str(column["group"]) for column in released().table.columns):
        for row in _called().values():
            one = comparison.entries[row, f"{group} inst"].experiment
            if one is not None and (several := [draws for draws in drawn if draws.are_of(known[one])]):
                found[group, row] = several
    return found


# -- what was run -----------------------------------------------------------------------------------------------------


def _what_was_run(series: Sequence[Series]) -> list[str]:
    lines = ["## What was run", ""]
    if not series:
        return [*lines, "Nothing yet.", ""]
    lines += [table_row(["computed on", "experiments", "images", "hours", "torch", "tribe", "finished"])]
    lines += [table_row(["---", *["---:"] * 3, *["---"] * 3])]
    for one in series:
        images = sum(scores["images"] for result in one.results for scores in result.metrics.values())
        hours = sum(float(result.environment.get("seconds", 0)) for result in one.results) / 3600
        days = sorted({str(result.environment.get("finished", ""))[:10] for result in one.results})
        versions = [_machines(one.results, name) for name in ("torch", "tribe")]
        span = " to ".join(dict.fromkeys((days[0], days[-1])))
        lines.append(table_row([one.title, str(len(one.results)), f"{images:,}", f"{hours:.2f}", *versions, span]))
    lines += ["", "Hours add up those of all experiments, several of which may have shared a device.", ""]
    return [*lines, *_data(series), *_weights(series), ""]


def _machines(results: Sequence[Result], name: str) -> str:
    told = {str(result.environment.get("machine", {}).get(name, "unknown")) for result in results}
    return " and ".join(sorted(told))


def _data(series: Sequence[Series]) -> Iterator[str]:
    """Which images were played, and what is known of their making."""
    root = series[0].root
    for name in sorted({r.experiment.dataset.name for one in series for r in one.results}):
        folder = _of(name, "folder")
        played = [r.experiment for one in series for r in one.results if r.experiment.dataset.name == name]
        marks = sorted({(_severities(e), f"fingerprint {e.images}") for e in played})
        words = f"- Data `{name}` ({'; '.join(': '.join(filter(None, mark)) for mark in marks)})"
        if name.startswith(LIVE):
            yield f"{words}: that of the clean test images, corrupted by `tribe.corruptions` as they are read."
        elif (made := read_made(root / DATA / folder)) is not None:
            places = sorted({f"{block.device} with torch {block.torch}" for block in made.blocks.values()})
            yield (
                f"{words}: not the published archive but our corruptions of the {made.images:,} clean test "
                f"images of {made.dataset} (sha256 {made.clean}), made by `tribe corrupt` with seed {made.seed} on "
                f"{' and '.join(places)}. The sha256 of each of its {len(made.blocks)} parts is in "
                f"`{root.name}/{DATA}/{folder}/made.json`."
            )
        else:
            yield f"{words}: how its images were made is not recorded beside the results."


def _severities(experiment: Experiment) -> str:
    """Those of the corruptions, where a data set has some."""
    told = experiment.dataset.fields.get("severities", ())
    return f"severit{'y' if len(told) == 1 else 'ies'} {', '.join(map(str, told))}" if told else ""


def _weights(series: Sequence[Series]) -> list[str]:
    found = {(e.model.name, e.weights) for one in series for e in (r.experiment for r in one.results)}
    return [f"- Network `{model}`: the weights with fingerprint {weights}." for model, weights in sorted(found)]


def _not_run(done: Mapping[str, int]) -> list[str]:
    """Tables that are not full, with the command that runs them; those that need no run are told apart."""
    free = [table for table in artifacts() if all(cell.method is None for cell in _cells(table))]
    lines = ["## Not run, or not in full", ""]
    for table in (t for t in artifacts() if t not in free):
        there, cells = done.get(table.name, 0), len(table.row_keys) * len(table.column_keys)
        some = f", {there} of {cells} cells are there" if there else ""
        if there < cells:
            lines.append(f"- {table.title} (`{table.label}`): `tribe reproduce {table.name} --seed 425`{some}")
    lines += ["", "These follow from labels and definitions, and need no results:", ""]
    return [*lines, *(f"- {table.title} (`{table.label}`): `tribe reproduce {table.name}`" for table in free)]
