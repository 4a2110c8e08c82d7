"""What the released code of the paper's authors was measured to do, as data, and ours beside it."""

import json
import statistics
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


class Draws(NamedTuple):
    """Instance errors of one method over several draws of the corruptions' noise, all else the same.

    Where a method collapses, when it does is chance, and one stream says little.
    """

    ours: Sequence[float]
    textbook: Sequence[float]  # the method as one writes it first, on the same images


def beside(
    comparison: Comparison, times: Mapping[str, Times], draws: Mapping[tuple[str, str], Draws] | None = None
) -> list[str]:
    """Lines of Markdown: a table a data set, every method next to the released code and the paper.

    Args:
        comparison: of `Released.table`.
        times: by data set.
        draws: by data set and row, where a method was run more than once.
    """
    told = released()
    lines = ["### Next to the released code", "", f"The {told.source}. Ours: the same streams, our images.", ""]
    for dataset in dict.fromkeys(column.rpartition(" ")[0] for column in comparison.columns):
        mine = {row: drawn for (group, row), drawn in (draws or {}).items() if group == dataset}
        lines += [*_of_dataset(comparison, dataset, times[dataset], mine), ""]
    return lines


def _of_dataset(comparison: Comparison, dataset: str, times: Times, draws: Mapping[str, Draws]) -> list[str]:
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
        if row in draws:
            mean = entries["inst"]._replace(ours=statistics.mean(draws[row].ours))
            far = 0.0 if mean.difference is None else abs(mean.difference)
            verdict = "" if row not in held else "yes" if far <= told.points else "**no**"
            cells = list(_errors(dataset, row, "inst", mean))
            cells += [number(None, "%")] * (len(errors) - len(cells))
            name = f"{row}, mean of {len(draws[row].ours)} draws"
            lines.append(table_row([name, *cells, verdict, *[number(None, "ms")] * 3]))
    lacking = [row for row in held if not any(line.startswith(f"| {row} |") for line in lines)]
    close = f"Within {told.points:g} points of the released code ({', '.join(held)})"
    lines += ["", *_verdict(close, apart, lacking)]
    lines += [_spread(row, drawn) for row, drawn in draws.items() if row in comparison.rows]
    if limits := told.limits.get(dataset):
        words = ", ".join(f"{row} at most {limit:g} ms" for row, limit in limits.items())
        lines += _verdict(f"Time an image ({words})", slow, [row for row in limits if row not in times.alone])
    how = times.how or "not measured yet"
    return [*lines, f"- ms: {how}. Side by side: in the experiments, which may have shared the device: it says little."]


def _spread(row: str, drawn: Draws) -> str:
    """How far one stream is to be trusted."""
    between = [ours - theirs for ours, theirs in zip(drawn.ours, drawn.textbook, strict=True)]
    error = statistics.stdev(between) / len(between) ** 0.5
    ours, theirs = (
        f"{min(v):.2f} to {max(v):.2f}, {statistics.mean(v):.2f} ± {statistics.stdev(v):.2f}"
        for v in (drawn.ours, drawn.textbook)
    )
    return (
        f"- {row} over {len(between)} draws of the corruptions' noise, all else the same (mean ± standard deviation): "
        f"{ours}; as one writes it first, with torch's BatchNorm and torch.optim, on the same images: {theirs}. "
        f"Ours less the latter: {statistics.mean(between):+.2f}, standard error {error:.2f}. "
        f"The row of {row} is one more run. (`python -m benchmarks.textbook`)"
    )


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
