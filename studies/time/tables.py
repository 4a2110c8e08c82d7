"""The tables of README.md, made from the results."""

import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from studies.pages import table
from studies.play import read

FILTERS = {"none": "without", "past": "causal", "batch": "within the batch", "cofa": "COFA"}
OVER = "none", "past", "batch"
STRETCHES = "bursts", "iid", "bursts again"
SURE = "below 0.5", "0.5 to 0.7", "0.7 to 0.9", "0.9 to 0.99", "above 0.99"
LENGTHS = "1", "2 to 3", "4 to 7", "8 to 15", "16 to 31", "32 and more"
COUNTS = "1 to 3", "4 to 10", "11 to 30", "31 to 100", "101 to 300", "more than 300"

Row = dict[str, Any]
Rows = list[Row]


def _captioned(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a paragraph above it."""
    return f"{textwrap.fill(caption + ':', 120)}\n\n{table(header, rows)}"


def _spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation of several values."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def _groups(rows: Rows, *names: str) -> Iterator[tuple[tuple[Any, ...], Rows]]:
    """The rows with the same values of these fields, in the order of the files."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from groups.items()


def _seeds(rows: Rows) -> str:
    """The seeds in each precision, in words."""
    found = {precision: sorted({row["seed"] for row in of}) for (precision,), of in _groups(rows, "precision")}
    words = "; ".join(
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} in {precision}"
        for precision, seeds in found.items()
    )
    return words + (f", first {rows[0]['limit']:,} images" if rows[0]["limit"] else "")


def _once(rows: Rows) -> Rows:
    """One row for each seed; of several precisions not bf16."""
    chosen: dict[tuple[Any, ...], Row] = {}
    names = "part", "dataset", "model", "method", "cell", "filter", "seed", "switch", "stretch"
    for row in sorted(rows, key=lambda row: row["precision"] == "bf16"):
        chosen.setdefault(tuple(row.get(name) for name in names), row)
    return list(chosen.values())


# -- the study ---------------------------------------------------------------------------------------------------------


def study(folder: Path) -> str:
    """The tables of all parts that were measured, part by part."""
    rows = [row for row in read("time_*.json", folder) if "part" in row]
    texts = []
    for part, write in PARTS.items():
        here = [row for row in rows if row["part"] == part]
        apart = ("dataset", "model") if part == "b" else ("dataset", "model", "method")  # one table for all methods
        texts += [write(of, *names) for names, of in _groups(here, *apart)]
    return "\n".join(texts) or "Nothing was measured yet.\n"


def _errors(rows: Rows, title: str) -> str:
    """Instance / category error, a line for each stream, a column for each filter."""
    rows = _once(rows)
    columns = {name: words for name, words in FILTERS.items() if any(row["filter"] == name for row in rows)}
    lines = []
    for (cell,), of in sorted(_groups(rows, "cell"), key=lambda group: _place(group[0][0])):
        values = {name: [row for row in of if row["filter"] == name] for name in columns}
        cells = (" / ".join(_spread([row[kind] for row in v]) for kind in ("inst", "cat")) for v in values.values())
        lines.append([cell, *cells])
    return _captioned(f"{title}, {_seeds(rows)}", ["", *columns.values()], lines)


def _place(cell: str) -> tuple[str, int]:
    """Sorts F before V and by imbalance; other streams stay in their order."""
    return (cell[0], int(cell[1:])) if cell[1:].isdigit() else ("", 0)


def _paper_streams(rows: Rows, dataset: str, model: str, method: str) -> str:
    return _errors(rows, f"**The streams of the paper**, {dataset}, {model}, `{method}`: instance / category error")


def _not_sticky(rows: Rows, dataset: str, model: str) -> str:
    rows = _once(rows)
    lines = []
    for (method, cell), of in _groups(rows, "method", "cell"):
        values = {name: statistics.mean(row["inst"] for row in of if row["filter"] == name) for name in OVER}
        added = (f"{values[name] - values['none']:+.2f}" for name in ("past", "batch"))
        lines.append([f"`{method}`", cell, f"{values['none']:.2f}", *added])
    title = f"**Streams whose neighbours share nothing**, {dataset}, {model}: instance error, and what the filter adds"
    header = ["method", "stream", *(FILTERS[name] for name in OVER)]
    return _captioned(f"{title}, {_seeds(rows)}", header, lines)


def _local(rows: Rows, dataset: str, model: str, method: str) -> str:
    title = f"**Local imbalance**, PTTA, {dataset}, {model}, `{method}`: instance / category error"
    return _errors(rows, title)


def _turning(rows: Rows, dataset: str, model: str, method: str) -> str:
    rows = _once(rows)
    lines = []
    for (within, switch), of in _groups(rows, "filter", "switch"):
        if switch == "off" and within != "past":
            continue
        word = "off" if switch == "off" else f"{FILTERS[within]}, {'always on' if switch == 'on' else 'as it decides'}"
        errors = ([row["inst"] for row in of if row["stretch"] == number] for number in range(3))
        lines.append([word, *(f"{statistics.mean(values):.2f}" for values in errors)])
    n = f"{rows[0]['length']:,}"
    title = f"**A stream that turns**: {n} images in bursts, {n} iid, {n} in bursts; instance error in each"
    head = f"{title} after its first 500 images, {dataset}, {model}, `{method}`, {_seeds(rows)}"
    return _captioned(head, ["filter", *STRETCHES], lines)


def _most_seeds(rows: Rows) -> Rows:
    """The rows of the file with the most seeds: those of several files cannot be added up."""
    _, best = max(_groups(rows, "file"), key=lambda group: len(group[1][0]["seeds"]))
    return best


def _delays(rows: Rows, dataset: str, model: str, method: str) -> str:
    rows = _most_seeds(rows)
    of = f"{dataset}, {model}, `{method}`, seeds {', '.join(map(str, rows[0]['seeds']))}"
    first = (
        f"**Delay after a change of class**, {of}: images until the answer follows, median / 95th percentile, by the "
    )
    first += "network's confidence in the first image of a burst of at least 8 images"
    second = f"**Bursts whose class is never answered**, {of}: share in %, by length"
    return "\n".join(
        _captioned(caption, ["stream", word, "bursts", *(FILTERS[f] for f in OVER)], _by_bin(rows, name, bins, show))
        for caption, word, name, bins, show in (
            (first, "confidence", "sure", SURE, _percentiles),
            (second, "images", "length", LENGTHS, _never),
        )
    )


def _by_bin(rows: Rows, name: str, bins: Sequence[str], show: Callable[[Row], str]) -> Iterator[list[str]]:
    """A line for each stream and bin."""
    for (cell, number), of in _groups([row for row in rows if name in row], "cell", name):
        by = {row["filter"]: row for row in of}
        yield [cell, bins[number], f"{of[0]['bursts']:,}", *(show(by[f]) for f in OVER)]


def _never(row: Row) -> str:
    return f"{row['never']:.1f}"


def _percentiles(row: Row) -> str:
    return " / ".join("never" if row[name] is None else str(row[name]) for name in ("p50", "p95"))


def _rare(rows: Rows, dataset: str, model: str, method: str) -> str:
    rows = _most_seeds(rows)
    lines = []
    for (cell, number), of in _groups(rows, "cell", "count"):
        by = {row["filter"]: row for row in of}
        shown = (f"{by[f]['inst']:.1f}" for f in OVER)
        lines.append([cell, COUNTS[number], f"{of[0]['images']:,}", *shown])
    header = ["stream", "images of the class in the domain", "images", *(FILTERS[f] for f in OVER)]
    seeds = ", ".join(map(str, rows[0]["seeds"]))
    title = f"**Rare classes**, {dataset}, {model}, `{method}`, seeds {seeds}: instance error"
    return _captioned(title, header, lines)


PARTS: dict[str, Callable[..., str]] = {
    "a": _paper_streams,
    "b": _not_sticky,
    "c": _local,
    "d": _turning,
    "e": _delays,
    "f": _rare,
}


# -- cost --------------------------------------------------------------------------------------------------------------


def cost(folder: Path) -> str:
    """What the filter costs, for each machine."""
    lines = []
    for row in read("time_cost_*.json", folder):
        took = row["added_ms"] if row["alone_ms"] is None else row["alone_ms"]
        place = f"{row['machine']['device']}, {row['model']}, batch {row['batch']}, {row['precision']}"
        times = f"{row['step_ms']:.4g}", f"{row['spread']:.0%}", f"{took:.3g}", f"{row['share']:.2%}"
        lines.append([place, str(row["classes"]), FILTERS[row["filter"]], *times])
    header = ["", "K", "filter", "TRIBE's step, ms", "spread", "the filter, ms", "share"]
    return table(header, lines) if lines else "Nothing was measured yet.\n"


# -- learning ----------------------------------------------------------------------------------------------------------


def learning(folder: Path) -> str:
    """The errors of all variants that learn from the filter."""
    rows = read("time_learning*.json", folder)
    if not rows:
        return "Nothing was measured yet.\n"
    at, cells = rows[0], list(dict.fromkeys(row["cell"] for row in rows))
    kinds = [(cell, kind) for cell in cells for kind in ("raw", "filtered")]
    lines = []
    for (variant,), of in _groups(rows, "variant"):
        by = {row["cell"]: row for row in of}
        lines.append([variant, *(" / ".join(f"{value:.1f}" for value in by[cell][kind]) for cell, kind in kinds)])
    seeds = ", ".join(map(str, at["seeds"]))
    caption = f"Instance / category error, {at['dataset']}, {at['model']}, mean of seeds {seeds}, with {at['filter']}. "
    caption += f"Category error is {at['category']}"
    return _captioned(caption, ["what TRIBE learns from", *(f"{cell}, {kind}" for cell, kind in kinds)], lines)


BLOCKS: dict[str, Callable[[Path], str]] = {"study": study, "cost": cost, "learning": learning}
