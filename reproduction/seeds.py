"""Add the seeds that studies played to our numbers: every seed of a stream counts, and says its precision.

Studies keep errors and no records, so tables of single corruptions stay as they are.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from reproduction.compare import Comparison, Entry
from tribe.experiments import statistics

ROOT = Path(__file__).parents[1]
RESULTS, STUDIES = ROOT / "results", ROOT / "studies"  # of the same networks and images
ROWS = {("tribe", "none"): "TRIBE", ("tribe", "past"): "TRIBE + time"}  # method and filter of a study: row of a table
ROWS |= {("tribe", "batch"): "TRIBE + time within the batch", ("tribe", "cofa"): "COFA"}
COLUMN = re.compile(r"([FV]) (\d+) (inst|cat)")
SEEDS_HEAD = ("artifact", "row", "column", "seed", "precision", "error")


class Run(NamedTuple):
    """The errors of one stream, in percent."""

    precision: str
    inst: float
    cat: float


Place = tuple[str, str, str, str]  # data set, network, row, stream
Studied = Mapping[Place, Mapping[int, Run]]


def studied(root: Path = STUDIES) -> Studied:
    """Return the runs of whole streams of the paper, by place and seed."""
    found: dict[Place, dict[int, Run]] = {}
    for place, seed, run in studied_runs(root):
        found.setdefault(place, {}).setdefault(seed, run)
    return found


def studied_runs(root: Path = STUDIES) -> Iterator[tuple[Place, int, Run]]:
    """Yield every run of a whole stream of the paper; two studies may have played the same."""
    for path in sorted(root.glob("*/results/*.json")):
        data = json.loads(path.read_text())
        settings: dict[str, Any] = data.get("settings", {})
        for row in data.get("rows", ()):
            name = ROWS.get((str(row.get("method")), row.get("filter", "none")))
            if name is None or settings.get("limit") is not None or not {"cell", "inst", "cat"} <= row.keys():
                continue
            dataset = settings["dataset"].removesuffix("-c") + "-c"
            runs = [(row["seed"], row)] if "seed" in row else zip(settings["seeds"], row["each"], strict=True)
            for seed, errors in runs:
                run = Run(settings["precision"], errors["inst"], errors["cat"])
                yield (dataset, settings["model"], name, row["cell"]), seed, run


def with_seeds(comparison: Comparison, runs: Studied) -> Comparison:
    """Return a comparison whose numbers are means over the seeds of studies, too. What it has already stays."""
    entries = {place: _with_seeds(entry, *place, runs) for place, entry in comparison.entries.items()}
    return replace(comparison, entries=entries)


def _with_seeds(entry: Entry, row: str, column: str, runs: Studied) -> Entry:
    match, experiment = COLUMN.fullmatch(column), entry.experiment
    if match is None or experiment is None:
        return entry
    letter, imbalance, kind = match.groups()
    stream = "F1" if imbalance == "1" else letter + imbalance  # of balanced classes F and V are one stream
    there = runs.get((experiment.dataset.name, experiment.model.name, row, stream), {})
    more = {seed: run for seed, run in sorted(there.items()) if seed not in entry.by_seed}
    if not more:
        return entry
    by_seed = {**entry.by_seed, **{seed: getattr(run, kind) for seed, run in more.items()}}
    precisions = {seed: run.precision for seed, run in more.items()}
    return entry._replace(ours=statistics.spread([*by_seed.values()]).mean, by_seed=by_seed, precisions=precisions)


def seed_rows(comparison: Comparison) -> list[list[object]]:
    """Return a line for each seed of the cells that have several, under SEEDS_HEAD."""
    return [
        [comparison.name, comparison.name_of(row), column, seed, entry.precision_of(seed), round(error, 3)]
        for (row, column), entry in comparison.entries.items()
        if len(entry.by_seed) > 1
        for seed, error in entry.by_seed.items()
    ]
