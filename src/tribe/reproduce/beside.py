"""What the released code of the paper's authors was measured to do, as data, and ours beside it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tribe import paper
from tribe.paper import Table
from tribe.reproduce.comparison import Comparison, Entry
from tribe.reproduce.render import number, table_row

KINDS = {"inst": "instance", "cat": "category"}


class Released(NamedTuple):
    """Its numbers, and how close ours are to be."""

    source: str  # where they come from
    seed: int
    points: float  # within which the errors of
    held: Sequence[str]  # these rows are to be reproduced
    ms: Mapping[str, Mapping[str, str]]  # milliseconds an image, by data set and row, as they were measured
    limits: Mapping[str, Mapping[str, float]]  # milliseconds that ours are to stay within, likewise
    table: Table  # errors; the released code's stand in the paper's place


@cache
def released() -> Released:
    """All of it."""
    told: dict[str, Any] = json.loads(Path(__file__).with_name("released.json").read_text())
    return Released(**{**told, "table": Table(**told["table"])})


class Times(NamedTuple):
    """Milliseconds an image by row: in the experiments, and measured with nothing beside them."""

    running: Mapping[str, float]
    alone: Mapping[str, float]
    how: str  # the latter were measured


def beside(comparison: Comparison, times: Mapping[str, Times]) -> list[str]:
    """Lines of Markdown: a table a data set, every method next to the released code and the paper.

    Args:
        comparison: of `Released.table`.
        times: by data set.
    """
    told = released()
    lines = ["### Next to the released code", "", f"The {told.source}. Ours: the same streams, our images.", ""]
    for dataset in dict.fromkeys(column.rpartition(" ")[0] for column in comparison.columns):
        lines += [*_of_dataset(comparison, dataset, times[dataset]), ""]
    return lines


def _of_dataset(comparison: Comparison, dataset: str, times: Times) -> list[str]:
    told = released()
    errors = [word for kind in KINDS.values() for word in (f"{kind} error", "released", "Δ", "paper", "Δ")]
    head = [dataset, *errors, f"within {told.points:g}", "ms", "ms, side by side", "ms, released"]
    lines = [table_row(head), table_row(["---", *["---:"] * len(errors), "---", *["---:"] * 3])]
    held = [row for row in told.held if told.table.value(row, f"{dataset} inst") is not None]
    apart, slow = [], []
    for row in comparison.rows:
        entries = {kind: comparison.entries[row, f"{dataset} {kind}"] for kind in KINDS}
        if not all(isinstance(entry.ours, float) for entry in entries.values()):
            continue
        far = max((abs(e.difference) for e in entries.values() if e.difference is not None), default=0.0)
        verdict = "" if row not in held else "yes" if far <= told.points else "**no**"
        apart += [f"{row} by {far:.2f}"] * (verdict == "**no**")
        alone, limit = times.alone.get(row), told.limits.get(dataset, {}).get(row)
        slow += [f"{row} {alone:.3f} ms"] if alone and limit and alone > limit else []
        cells = [cell for kind, entry in entries.items() for cell in _errors(dataset, row, kind, entry)]
        running = number(times.running.get(row), "ms")
        lines.append(table_row([row, *cells, verdict, number(alone, "ms"), running, _released_ms(dataset, row)]))
    lacking = [row for row in held if not any(line.startswith(f"| {row} |") for line in lines)]
    close = f"Within {told.points:g} points of the released code ({', '.join(held)})"
    lines += ["", *_verdict(close, apart, lacking)]
    if limits := told.limits.get(dataset):
        words = ", ".join(f"{row} at most {limit:g} ms" for row, limit in limits.items())
        lines += _verdict(f"Time an image ({words})", slow, [row for row in limits if row not in times.alone])
    how = times.how or "not measured yet"
    return [*lines, f"- ms: {how}. Side by side: in the experiments, which may have shared the device: it says little."]


def _verdict(what: str, against: Sequence[str], lacking: Sequence[str]) -> list[str]:
    said = f"no: {'; '.join(against)}" if against else "not shown" if lacking else "yes"
    return [f"- {what}: {said}" + (f". Not measured: {', '.join(lacking)}." if lacking else ".")]


def _errors(dataset: str, row: str, kind: str, entry: Entry) -> Iterator[str]:
    """Ours; the released code's with the difference; the paper's with the difference."""
    yield number(entry.ours, "%")
    table = paper.get(dataset.lower().removesuffix("-c"))
    said = table.value(row, f"F 100 {kind}") if row in table.row_keys else None
    for theirs in (entry.paper, said):
        yield number(theirs, "%")
        yield number(entry._replace(paper=theirs).difference, "%", signed=True)


def _released_ms(dataset: str, row: str) -> str:
    return released().ms.get(dataset, {}).get(row, number(None, "ms"))
