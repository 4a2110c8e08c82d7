"""Write the generated parts of docs/reproduction.md, and all tables beside it as CSV files.

Text between ``<!-- begin NAME -->`` and ``<!-- end -->`` is generated; the rest of the page is written by hand.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path

from reproduction import checked, tables
from reproduction.beyond import extend
from reproduction.claims import Verdict, claims, judge
from reproduction.compare import Comparison, Entry, compare
from reproduction.plan import Choices, search, settings_of
from reproduction.render import CLAIMS_HEAD, CSV_HEAD, claim_cells, csv_lines, csv_rows, markdown_table, number, ours
from reproduction.seeds import RESULTS, SEEDS_HEAD, seed_rows, studied, with_seeds
from reproduction.tables import Table
from tribe.data import datasets
from tribe.experiments.store import Result, finished
from tribe.experiments.workbench import Workbench
from tribe.io.files import write_atomically

SUMMARY = {  # columns of the summary: table, column
    "CIFAR10-C, fixed": ("cifar10", "F 100 inst"),
    "CIFAR10-C, varying": ("cifar10", "V 100 inst"),
    "CIFAR100-C, fixed": ("cifar100", "F 100 inst"),
    "CIFAR100-C, varying": ("cifar100", "V 100 inst"),
}
GENERATED = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end -->)", re.S)


def write_document(root: str | PathLike[str], page: Path) -> None:
    """Replace the generated parts of a page, and write the CSV files into the folder with its name."""
    series = by_settings(finished(root))
    runs = studied() if Path(root).resolve() == RESULTS else {}
    compared = [[with_seeds(c, runs) for c in all_comparisons(results)] for results in series.values()]
    main = {c.name: c for c in next(iter(compared), []) if "(ours:" not in c.title}
    verdicts = [judge(claim, main) for claim in claims()]
    files: dict[str, list[Sequence[object]]] = {}
    for comparison in (c for found in compared for c in found):
        files.setdefault(comparison.name, [CSV_HEAD]).extend(csv_rows(comparison))
    several = [c for found in compared for c in found if c.has_spread]
    files["seeds"] = [SEEDS_HEAD, *(row for c in several for row in seed_rows(c))]
    files["claims"] = [CLAIMS_HEAD, *map(claim_cells, verdicts)]
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        write_atomically(folder / f"{name}.csv", csv_lines(rows).encode())
    for path in folder.glob("*.csv"):
        if path.stem not in files:
            path.unlink()
    blocks = {
        "summary": _summary(main),
        "claims": _claims(verdicts),
        "tables": _tables(files, {c.name for c in several}, folder.name),
        "seeds": _seeds(several),
        "checked": markdown_table(checked.HEAD, checked.rows(main)),
        "runs": _runs(series),
    }
    write_atomically(page, fill(page.read_text(), blocks).encode())


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Return a page with the text of its generated parts replaced.

    >>> fill("<!-- begin sum -->\\nold\\n<!-- end -->\\n", {"sum": "new\\n"})
    '<!-- begin sum -->\\nnew\\n<!-- end -->\\n'
    """
    return GENERATED.sub(lambda match: match[1] + blocks[match[2]] + match[3], text)


def by_settings(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results by the settings that a table shares: first those from a GPU, then the most."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(settings_of(result.experiment), []).append(result)
    order = sorted(found, key=lambda name: (found[name][0].experiment.device != "cuda", -len(found[name])))
    return {name: found[name] for name in order}


def all_comparisons(results: Sequence[Result]) -> list[Comparison]:
    """Compare all tables with results of the same settings: on the paper's data and networks, and on others."""
    workbench, found = Workbench(device="cpu"), list[Comparison | None]()
    for table in [*tables.all_tables(), tables.released()]:
        for dataset, model in [(None, None), *_replacements(table, results)]:
            seeds = (425,) if table.name == "released" else None
            choices = Choices(dataset, model, seeds=seeds)
            plan = search(extend(table, later=True), choices, results, workbench)
            found.append(compare(plan).without_empty())
    return [comparison for comparison in found if comparison is not None]


def _replacements(table: Table, results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return data sets of the same clean images, with their networks, that were played in place of a table's."""
    papers = {(cell.dataset, cell.model) for cell in table.cells.values() if cell.method is not None}
    if len(papers) != 1:
        return []
    ((dataset, _),) = papers
    played = {(r.experiment.dataset.name, r.experiment.model.name) for r in results} - papers
    return sorted(pair for pair in played if _clean(pair[0]) == _clean(dataset or ""))


def _clean(dataset: str) -> str:
    return datasets.optional(datasets.get(dataset), "clean_name") or dataset


def _summary(compared: Mapping[str, Comparison]) -> str:
    rows = []
    for row in tables.get("cifar10").row_keys:
        entries = [
            compared[table].entries.get((row, column)) if table in compared else None
            for table, column in SUMMARY.values()
        ]
        rows.append([row, *map(_pair, entries)])
    return markdown_table(["", *SUMMARY], rows)


def _pair(entry: Entry | None) -> str:
    if entry is None or entry.ours is None:
        return "–"
    return f"{ours(entry)} ({number(entry.paper)})"


def _claims(verdicts: Sequence[Verdict]) -> str:
    """Return the claims that fail on ours but not on the paper's own numbers; the others are in the CSV file."""
    failed = [v for v in verdicts if v.ours.verdict == "fails" and v.paper.verdict != "fails"]
    counts = [
        [word, *(str(sum(getattr(v, part).verdict == word for v in verdicts)) for part in ("paper", "ours"))]
        for word in ("holds", "fails", "too close", "incomplete")
    ]
    rows = [[v.says, v.claim.threshold, number(v.paper.number), number(v.ours.number)] for v in failed]
    return (
        markdown_table(["claims", "on the paper's numbers", "on ours"], counts)
        + "\nClaims that fail on ours alone:\n\n"
        + markdown_table(["the paper says", "threshold, points", "paper's number", "ours"], rows)
    )


def _tables(names: Iterable[str], several: Collection[str], folder: str) -> str:
    """Return links to all files: those of several seeds first."""
    links = {name: f"[{name}]({folder}/{name}.csv)" for name in sorted(names)}
    others = ("claims", "seeds")
    parts = {"Several seeds": several, "One seed": links.keys() - {*several, *others}, "Beside": others}
    return "".join(f"- {head}: {', '.join(links[n] for n in links if n in part)}.\n" for head, part in parts.items())


def _seeds(comparisons: Sequence[Comparison]) -> str:
    """Return mean and spread of every cell of the paper that was played with several seeds, by their precisions."""
    rows: dict[str, list[list[str]]] = {}
    for comparison in comparisons:
        for (row, column), entry in comparison.entries.items():
            stream = column.removesuffix(" inst")
            if len(entry.by_seed) < 2 or entry.paper is None or stream in (column, "V 1"):
                continue
            name = f"{comparison.name}, {stream}" + f", {row}" * (row != "TRIBE")
            category = comparison.entries[row, f"{stream} cat"]
            rows.setdefault(entry.seeds, []).append([name, _pair(entry), _pair(category)])
    head = ["instance error", "category error"]
    return "\n".join(markdown_table([f"seeds {seeds}", *head], found) for seeds, found in rows.items())


def _runs(series: Mapping[str, Sequence[Result]]) -> str:
    rows = []
    for settings, results in series.items():
        images = sum(scores["images"] for run in results for scores in run.metrics.values())
        hours = sum(_seconds(run) for run in results) / 3600
        machines = sorted({str(run.environment.get("machine", {}).get("device", "")) for run in results})
        seeds = sorted({seed for run in results for seed in run.streams})
        rows.append([settings, " and ".join(machines), ", ".join(map(str, seeds)), str(len(results))])
        rows[-1] += [f"{images:,}", f"{hours:.2f}"]
    return markdown_table(["settings", "machine", "seeds", "experiments", "images", "hours"], rows)


def _seconds(result: Result) -> float:
    """Return the time that all streams took."""
    images = [stream.metrics["images"] for stream in result.streams.values()]
    pairs = zip(images, result.values("seconds_per_image"), strict=True)
    return math.fsum(float(count * each) for count, each in pairs if math.isfinite(each))
