"""Write the document ``docs/reproduction.md`` from results alone.

Results with the same batch, precision, device and threads form a series; a table holds results of one series.
Next to the results, their folder may hold

    bench/*.json              times that `tribe bench --json` measured, with nothing else running
    draws/*.json              errors that `python -m benchmarks.textbook --json` measured: one method, many times
    data/<folder>/made.json   how `tribe corrupt` made the images
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from reproduction import tables
from reproduction.beside_released import BesideReleased, Times
from reproduction.beyond import extend
from reproduction.compare import Comparison, compare_plan, judge_claims, usual_spread
from reproduction.findings import (
    SAME_STREAM,
    best_methods,
    by_domain,
    certainty,
    disagreement,
    in_every_cell,
    in_short,
    judged_claims,
    lowest_elsewhere,
    other_order,
    weaker_on_noise,
)
from reproduction.gather import LIVE, Draws, Origin, damage, measured_alone, plan_from_experiments, read_draws
from reproduction.layout import WIDEST, as_file, is_long, wrapped
from reproduction.plan import Choices
from reproduction.render import markdown, table_head, table_row
from reproduction.tables import Table, all_tables, released
from tribe import methods
from tribe.data import datasets
from tribe.data.datasets.manifest import read_manifest
from tribe.experiments.experiment import Experiment
from tribe.experiments.store import Result, combine, finished
from tribe.experiments.workbench import Workbench

COMMAND = "tribe reproduce document --runs results --out docs/reproduction.md"
DATA = "data"
WITH_LATER = ("mnist", "cifar10", "cifar100")  # tables of all methods: methods that the paper lacks are added as rows
IN_EVERY_CELL = "cifar10"  # the table in which TRIBE should be best everywhere
FOLDER = "reproduction"  # of files beside the page
SETTINGS = ("device", "precision", "batch", "threads")  # that results of one series share
REPEATED = {  # tables whose errors of whole streams are in another
    *(f"{name}-{kind}" for name in ("cifar10", "cifar100") for kind in ("fixed", "varying", "ptta")),
    "domains",
}


@dataclass(frozen=True)
class Series:
    """Results that were computed with the same settings."""

    results: Mapping[str, Result]  # by the ids of their experiments
    root: Path
    workbench: Workbench
    draws: Sequence[Draws]  # all in the folder

    @cached_property
    def experiments(self) -> list[Experiment]:
        """Their experiments."""
        return [result.experiment for result in self.results.values()]

    @property
    def title(self) -> str:
        """The settings that all of them share."""
        e = self.experiments[0]
        threads = "" if e.threads is None else f", {e.threads} thread{'s' * (e.threads > 1)}"
        return f"{self.machine('device')}{threads}, {e.precision}, {self.seeds}, batch {e.batch}"

    @property
    def seeds(self) -> str:
        """All their seeds; not every result has each."""
        found = sorted({seed for e in self.experiments for seed in e.seeds})
        first, last = found[0], found[-1]
        some = f"{first} to {last}" if found == [*range(first, last + 1)] else ", ".join(map(str, found))
        return f"seed {first}" if len(found) == 1 else f"seeds {some}"

    def machine(self, field: str) -> str:
        """A fact about the machines that computed them."""
        machines = [result.environment.get("machine", {}) for result in self.results.values()]
        return " and ".join(sorted({str(machine.get(field, "unknown")) for machine in machines}))

    def compare(self, table: Table, choices: Choices | None = None, origin: Origin | None = None) -> Comparison:
        """A table with these results."""
        plan = plan_from_experiments(table, choices or Choices(), self.experiments, self.workbench, origin)
        by_family = {result.experiment.family: result for result in self.results.values()}
        results = {e.id: combine([by_family[e.family]], e.seeds) for e in plan.experiments}
        return compare_plan(plan, results)

    @cached_property
    def beside_released(self) -> Comparison | None:
        """The table of the released code, if it was measured with the same seed, and something of it was run here."""
        return _without_empty(self.compare(released().table, origin=Origin(seeds=(released().seed,))))

    @cached_property
    def tables(self) -> tuple[list[Comparison], list[Comparison]]:
        """Tables on the paper's own data and network, and tables on others that replace them."""
        own, replaced = list[Comparison | None](), list[Comparison | None]()
        for table in all_tables():
            choices = Choices(
                added=self._later_methods(table),
                row_names={method: row["key"] for method, row in self.usual_rows.items()},
                row_fields={method: row.get("fields", {}) for method, row in self.usual_rows.items()},
            )
            own.append(_without_empty(self.compare(extend(table, later=True), choices)))
            for dataset, model in self._replacements(table):
                other = dataclasses.replace(choices, dataset=dataset, model=model)
                replaced.append(_without_empty(self.compare(extend(table, later=True), other)))
        usual = usual_spread([c for c in own if c is not None])
        return (
            [dataclasses.replace(c, usual=usual) for c in own if c is not None],
            [c for c in replaced if c is not None],
        )

    @cached_property
    def usual_rows(self) -> dict[str, Mapping[str, Any]]:
        """The row of each method, the same in all tables: of those beside the released code with results, the first
        with the fewest settings."""
        rows = sorted(released().table.rows, key=lambda row: len(row.get("fields", {})))
        run = [
            row
            for row in rows
            for method in (e.method for e in self.experiments)
            if method.name == row["method"] and row.get("fields", {}).items() <= method.fields.items()
        ]
        return {str(row["method"]): row for row in reversed([*run, *rows])}

    def _later_methods(self, table: Table) -> list[str]:
        """Methods with results that the paper lacks, and that have no row beyond it."""
        if table.name not in WITH_LATER:
            return []
        rows = extend(table, later=True).rows
        later = {e.method.name for e in self.experiments} - {row.get("method") for row in rows}
        return sorted(name for name in later if name in methods.names() and not methods.get(name).variants)

    def _replacements(self, table: Table) -> list[tuple[str, str]]:
        """Data sets of the same clean images, with their networks, that were played in place of a table's."""
        papers = {(cell.dataset, cell.model) for cell in table.cells.values() if cell.method is not None}
        if len(papers) != 1:
            return []
        played = {(e.dataset.name, e.model.name) for e in self.experiments} - papers
        ((dataset, _),) = papers
        return sorted(
            pair for pair in played if _attribute(pair[0], "clean_name") == _attribute(dataset or "", "clean_name")
        )


class Document(NamedTuple):
    """A page in Markdown, and the files that it names: tables of single corruptions, as CSV, by their names."""

    page: str
    files: dict[str, str]


def make_document(root: str | PathLike[str], origin: Origin | None = None, folder: str = FOLDER) -> Document:
    """The document. Only results of ``origin`` are shown, with its seeds alone, and no damaged ones.

    ``folder``: where its files will be, as the page names it.
    """
    root, workbench, origin = Path(root), Workbench(device="cpu"), origin or Origin()
    draws = read_draws(root)  # first: it raises if a file is damaged
    results = [
        result
        for result in finished(root, damaged="skip")
        if damage(result) is None and not origin.mismatches(result.experiment)
    ]
    combined = [[combine(family, _seeds_of(family, origin)) for family in _families(s)] for s in _alike(results)]
    series = [Series({r.experiment.id: r for r in whole}, root, workbench, draws) for whole in combined]
    lines = [
        "# Reproduction",
        "",
        "The paper's tables and figures, computed with this library, next to the paper's own.",
        f"Written by `{COMMAND}` from the results in that folder, not by hand.",
        "",
    ]
    short, body, files = list[str](), list[str](), dict[str, str]()
    for one in series:
        own, replaced = one.tables
        settings = _settings(one.experiments[0], series[0].experiments[0])
        findings, sections = _findings(one, own, replaced)
        short = short or findings
        body += [f"## {one.title}", "", *sections]
        for comparison in own:
            body += [*_table(comparison, files, folder, settings), *other_order(comparison), ""]
        for comparison in replaced:
            body += [*_table(comparison, files, folder, settings), *best_methods(comparison)]
        body += _left_over(one)
    page = "\n".join([*lines, *short, *_what_was_run(series), *body, *_not_run(series)]).rstrip() + "\n"
    return Document(wrapped(re.sub(r"\n{3,}", "\n\n", page)), files)


def _table(comparison: Comparison, files: dict[str, str], folder: str, settings: str) -> list[str]:
    """A table, or the name of its file if it has the error of each corruption.

    ``settings``: of the series, for the name of a file where an earlier table has the name of this one.
    """
    domains = by_domain()
    if not is_long(comparison, domains):
        repeated = [c for c, other in SAME_STREAM.items() if other in comparison.columns]
        shown = dataclasses.replace(comparison, columns=[c for c in comparison.columns if c not in repeated])
        return [markdown(shown, level=3, widest=WIDEST)]
    name = _file_name(comparison, settings, files)
    files[name] = as_file(comparison)
    place = f"Each corruption, ours and the paper's: [{name}]({folder}/{name})."
    whole = [c for c in comparison.columns if c not in domains]
    if not whole or comparison.name in REPEATED:
        return [f"### {comparison.title}", "", f"`{comparison.label}`. {place}", ""]
    return [markdown(dataclasses.replace(comparison, columns=whole), level=3, widest=WIDEST), place, ""]


def _file_name(comparison: Comparison, settings: str, taken: Collection[str]) -> str:
    """The name of the table; if it is taken, with the settings of its series, and then with data and network."""
    played = next(iter(comparison.experiments.values()))
    on = re.sub(r"[^A-Za-z0-9._]+", "-", f"-{played.dataset.name}-{played.model.name}")
    names = (f"{comparison.name}{words}.csv" for words in ("", settings, settings + on))
    return next(name for name in names if name not in taken)


def _settings(experiment: Experiment, first: Experiment) -> str:
    """The settings in which a series differs from the first, as part of a file's name: "-batch-48"."""
    words = {name: f"-{name}-{getattr(experiment, name)}" for name in SETTINGS}
    return "".join(word for name, word in words.items() if getattr(experiment, name) != getattr(first, name))


def _alike(results: Iterable[Result]) -> list[list[Result]]:
    """Series: first those from a GPU, which ran the paper's networks, then the largest."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(repr([getattr(result.experiment, name) for name in SETTINGS]), []).append(result)
    return sorted(found.values(), key=lambda alike: (alike[0].experiment.device != "cuda", -len(alike)))


def _families(results: Iterable[Result]) -> list[list[Result]]:
    """Results that differ in their seeds only, together."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.experiment.family, []).append(result)
    return list(found.values())


def _seeds_of(family: Iterable[Result], origin: Origin) -> list[int]:
    """The seeds of a family that are shown."""
    found = {seed for result in family for seed in result.experiment.seeds}
    return sorted(found) if origin.seeds is None else [seed for seed in origin.seeds if seed in found]


def _attribute(dataset: str, name: str) -> str:
    """An attribute of a data set's class, such as the clean set behind it; by default the name of the data set."""
    return datasets.optional(datasets.get(dataset), name) or dataset


def _without_empty(comparison: Comparison) -> Comparison | None:
    """The comparison without empty rows and columns; None if all are empty."""
    filled = {place for place, entry in comparison.entries.items() if entry.ours is not None}
    if not comparison.experiments:
        return None
    rows = [row for row in comparison.rows if any(row == r for r, _ in filled)]
    columns = [column for column in comparison.columns if any(column == c for _, c in filled)]
    shown = {f"{row}, {column}" for row in rows for column in columns}
    missing = {reason: [cell for cell in cells if cell in shown] for reason, cells in comparison.missing.items()}
    missing = {reason: cells for reason, cells in missing.items() if cells}
    return dataclasses.replace(comparison, rows=rows, columns=columns, missing=missing)


# -- what was found ---------------------------------------------------------------------------------------------------


def _findings(series: Series, own: Sequence[Comparison], replaced: Sequence[Comparison]) -> tuple[list[str], list[str]]:
    """The findings in a few sentences, and in full."""
    if not own:
        return [], []
    judgements = judge_claims(series.compare, series.root, own)
    sentences = [*in_short(own, judgements, IN_EVERY_CELL), *lowest_elsewhere(replaced)]
    doubt = [*disagreement(own, judgements), ""]
    sure = ["## How sure", "", *certainty(own, series.seeds), ""]
    lines = [line for c in own if c.name == IN_EVERY_CELL for line in in_every_cell(c)]
    if (comparison := series.beside_released) is not None:
        goal, sections = released(), list(_beside_released(series, comparison))
        close = ", ".join(section.sentence() for section in sections)
        sentences.insert(0, f"- Both errors are within {goal.points:g} points of the released code for {close}.")
        lines += ["### Next to the released code", "", f"The {goal.source}. Ours has the same streams and our images."]
        lines += ["The limits for differences and times are aims of this project.", ""]
        for section in sections:
            lines += section.section(_times(series, comparison, section.dataset))
    short = ["## In short", "", f"On {series.title}:", "", *sentences, "", "## What does not agree", "", *doubt, *sure]
    return short, [*lines, *judged_claims(judgements)]


def _beside_released(series: Series, comparison: Comparison) -> Iterator[BesideReleased]:
    """A section per data set, with the draws that are of its experiments."""
    for dataset in dict.fromkeys(column.rpartition(" ")[0] for column in comparison.columns):
        draws = {}
        for row in (str(row["key"]) for row in series.usual_rows.values()):
            id = comparison.entries[row, f"{dataset} inst"].experiment
            if id is not None and (found := [d for d in series.draws if d.are_of(comparison.experiments[id])]):
                draws[row] = found
        yield BesideReleased(comparison, dataset, draws)


def _times(series: Series, comparison: Comparison, dataset: str) -> Times:
    """The milliseconds per image of all rows on a data set."""
    model = next(str(column["model"]) for column in released().table.columns if column["group"] == dataset)
    used = {row: comparison.entries[row, f"{dataset} inst"].experiment for row in comparison.rows}
    families = {result.experiment.family: result for result in series.results.values()}
    of = {row: families[comparison.experiments[id].family] for row, id in used.items() if id is not None}
    seconds = {row: result.values("seconds_per_image") for row, result in of.items()}
    alone = measured_alone(series.root, series.experiments[0], model)
    return Times(
        {row: 1e3 * (sum(values) / len(values)) for row, values in seconds.items()},
        {str(row["key"]): alone.ms[method] for method, row in series.usual_rows.items() if method in alone.ms},
        alone.how,
    )


def _left_over(series: Series) -> list[str]:
    """Results that are in none of the tables."""
    own, replaced = series.tables
    shown = [*own, *replaced, *([series.beside_released] if series.beside_released else [])]
    families = {e.family for comparison in shown for e in comparison.experiments.values()}
    rest = ", ".join(f"{e.method.name} ({e.id})" for e in series.experiments if e.family not in families)
    return [f"Results that are in none of these tables: {rest}.", ""] if rest else []


# -- what was run -----------------------------------------------------------------------------------------------------


def _what_was_run(series: Sequence[Series]) -> list[str]:
    lines = ["## What was run", ""]
    if not series:
        return [*lines, "Nothing yet.", ""]
    lines += table_head(["computed on", "experiments", "images", "hours", "torch", "tribe", "finished"], "lrrrlll")
    for one in series:
        results = one.results.values()
        images = sum(scores["images"] for result in results for scores in result.metrics.values())
        hours = sum(float(result.environment.get("seconds", 0)) for result in results) / 3600
        days = sorted({str(result.environment.get("finished", ""))[:10] for result in results})
        versions = one.machine("torch"), one.machine("tribe"), " to ".join(dict.fromkeys((days[0], days[-1])))
        lines.append(table_row([one.title, str(len(results)), f"{images:,}", f"{hours:.2f}", *versions]))
    lines += ["", "Hours are the sum over all experiments; several may have shared a device.", ""]
    experiments = [e for one in series for e in one.experiments]
    return [*lines, *_networks(series), "### Images", "", *_data(experiments, series[0].root), ""]


def _networks(series: Sequence[Series]) -> list[str]:
    """The source networks: how they were trained, how good they are, and how they differ from the paper's."""
    played = sorted({(e.model.name, e.weights) for one in series for e in one.experiments})
    facts = (fact for fact in _facts("networks") if "weights" not in fact or (fact["model"], fact["weights"]) in played)
    known = {fact["model"]: fact for fact in facts}
    lines = ["### Source networks", ""]
    lines += table_head(["network", "trained on", "clean error", "training", "the paper's", "ours is"], "llrlll")
    for model in dict.fromkeys(model for model, _ in played):
        fact = known.get(model, {"name": "not described"})
        words = (str(fact.get(name, "")) for name in ("data", "clean_error", "training", "paper", "differs"))
        lines.append(table_row([f"`{model}`: {fact['name']}", *words]))
    lines += ["", *(f"- Weights of `{model}`: fingerprint {weights}." for model, weights in played)]
    for one in series:
        lines += [line for comparison in one.tables[0] for line in weaker_on_noise(comparison)]
    return [*lines, ""]


def _facts(about: str) -> list[dict[str, str]]:
    """What was written down by hand of "networks" or "images", as results do not record it."""
    found: list[dict[str, str]] = json.loads(Path(__file__).with_name(f"{about}.json").read_text())
    return found


def _data(experiments: Sequence[Experiment], root: Path) -> Iterator[str]:
    """The data sets that were played, and how their images were made."""
    described = {(fact["dataset"], fact["images"]): fact["words"] for fact in _facts("images")}
    for name in sorted({e.dataset.name for e in experiments}):
        alike = [e for e in experiments if e.dataset.name == name]
        for words in dict.fromkeys(described.get((name, e.images)) for e in alike):
            same = [e for e in alike if described.get((name, e.images)) == words]
            marks = sorted({(_severities(e), f"fingerprint {e.images}") for e in same})
            what = f"- Data `{name}` ({'; '.join(': '.join(filter(None, mark)) for mark in marks)})"
            yield f"{what}: {words or _how_made(name, root)}."


def _how_made(name: str, root: Path) -> str:
    """How the images of a data set were made, if it is not written down by hand."""
    folder = _attribute(name, "folder")
    if name.startswith(LIVE):
        return "clean test images, which `tribe.corruptions` corrupts as they are read"
    if (made := read_manifest(root / DATA / folder)) is None:
        return "the results do not record how its images were made"
    places = sorted({f"{block.device} with torch {block.torch}" for block in made.blocks.values()})
    return (
        f"not the published archive, but our corruptions of the {made.images:,} clean test images of {made.dataset} "
        f"(sha256 {made.clean}), made by `tribe corrupt` with seed {made.seed} on {' and '.join(places)}. The sha256 "
        f"of each of its {len(made.blocks)} parts is in `{root.name}/{DATA}/{folder}/made.json`"
    )


def _severities(experiment: Experiment) -> str:
    """The severities of the corruptions, if the data set has some."""
    severities = experiment.dataset.fields.get("severities", ())
    return f"severit{'y' if len(severities) == 1 else 'ies'} {', '.join(map(str, severities))}" if severities else ""


def _not_run(series: Sequence[Series]) -> list[str]:
    """Tables that are incomplete, with the command that runs them; then the tables that need no run."""
    done: dict[str, int] = {}  # cells, by table
    for comparison in (comparison for one in series for comparison in one.tables[0]):
        rows = tables.get(comparison.name).row_keys
        cells = sum(entry.ours is not None for (row, _), entry in comparison.entries.items() if row in rows)
        done[comparison.name] = max(done.get(comparison.name, 0), cells)
    free = [table for table in all_tables() if all(cell.method is None for cell in table.cells.values())]
    lines = ["## Incomplete tables", ""]
    for table in (table for table in all_tables() if table not in free):
        cells, of = done.get(table.name, 0), len(table.cells)
        some = f" ({cells} of {of} cells are done)" if cells else ""
        if cells < of:
            lines.append(f"- {table.title} (`{table.label}`): `tribe reproduce {table.name} --seed 425`{some}")
    lines += ["", "These need no results, since they follow from labels and definitions:", ""]
    return [*lines, *(f"- {table.title} (`{table.label}`): `tribe reproduce {table.name}`" for table in free)]
