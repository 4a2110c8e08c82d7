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
    lines = ["### Next to the released code", "", f"The {told.source}. Ours: the same streams, our images."]
    lines += ["How near the errors and how short the times are to be are aims of this project.", ""]
    for dataset in _datasets(comparison):
        mine = {row: drawn for (group, row), drawn in (draws or {}).items() if group == dataset}
        lines += [*_of_dataset(comparison, dataset, times[dataset], mine), ""]
    return lines


def _datasets(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(column.rpartition(" ")[0] for column in comparison.columns))


def _of_dataset(comparison: Comparison, dataset: str, times: Times, draws: Mapping[str, Draws]) -> list[str]:
    told = released()
    errors = [word for kind in KINDS.values() for word in (f"{kind} error", "released", "Δ", "paper", "Δ")]
    head = [dataset, *errors, f"within {told.points:g}", "ms", "ms, side by side", "ms, released"]
    lines = [table_row(head), table_row(["---", *["---:"] * len(errors), "---", *["---:"] * 3])]
    held, distances, slow = _held(dataset), _distances(comparison, dataset), []
    for row, far in distances.items():
        entries = {kind: comparison.entries[row, f"{dataset} {kind}"] for kind in KINDS}
        verdict = "" if row not in held else "yes" if far <= told.points else "**no**"
        alone, limit = times.alone.get(row), told.limits.get(dataset, {}).get(row)
        slow += [f"{row} {alone:.3f} ms"] if alone and limit and alone > limit else []
        cells = [cell for kind, entry in entries.items() for cell in _errors(dataset, row, kind, entry)]
        running = number(times.running.get(row), "ms")
        lines.append(table_row([row, *cells, verdict, number(alone, "ms"), running, _released_ms(dataset, row)]))
        if row in draws:
            mean = entries["inst"]._replace(ours=statistics.mean(draws[row].ours))
            near = mean.difference is not None and abs(mean.difference) <= told.points
            verdict = "" if row not in held else "yes" if near else "**no**"
            cells = list(_errors(dataset, row, "inst", mean))
            cells += [number(None, "%")] * (len(errors) - len(cells))
            name = f"{row}, mean of {len(draws[row].ours)} draws"
            lines.append(table_row([name, *cells, verdict, *[number(None, "ms")] * 3]))
    lacking = [row for row in held if row not in distances]
    apart = [f"{row} by {distances[row]:.2f}" for row in _apart(comparison, dataset)]
    close = f"Within {told.points:g} points of the released code ({', '.join(held)})"
    lines += ["", *_verdict(close, apart, lacking)]
    lines += [_spread(row, drawn) for row, drawn in draws.items() if row in comparison.rows]
    if limits := told.limits.get(dataset):
        words = ", ".join(f"{row} at most {limit:g} ms" for row, limit in limits.items())
        lines += _verdict(f"Time an image ({words})", slow, [row for row in limits if row not in times.alone])
    how = times.how or "not measured yet"
    return [*lines, f"- ms: {how}. Side by side: in the experiments, which may have shared the device: it says little."]


def _held(dataset: str) -> list[str]:
    """The rows that are to be as near, as far as the released code was measured there."""
    told = released()
    return [row for row in told.held if told.table.value(row, f"{dataset} inst") is not None]


def _distances(comparison: Comparison, dataset: str) -> dict[str, float]:
    """How far ours are from the released code's errors, in points, by row; 0 where that was not measured."""
    found = {}
    for row in comparison.rows:
        entries = [comparison.entries[row, f"{dataset} {kind}"] for kind in KINDS]
        if all(isinstance(entry.ours, float) for entry in entries):
            found[row] = max((abs(e.difference) for e in entries if e.difference is not None), default=0.0)
    return found


def _apart(comparison: Comparison, dataset: str) -> list[str]:
    """The rows that are not as near as they are to be."""
    distances = _distances(comparison, dataset)
    return [row for row in _held(dataset) if distances.get(row, 0.0) > released().points]


def near_the_released(comparison: Comparison, draws: Mapping[tuple[str, str], Draws]) -> str:
    """How near all of it is, in a sentence."""
    told, words = released(), []
    for dataset in _datasets(comparison):
        run, apart = [row for row in _held(dataset) if row in _distances(comparison, dataset)], []
        for row in _apart(comparison, dataset):
            mean = statistics.mean(draws[dataset, row].ours) if (dataset, row) in draws else None
            theirs = told.table.value(row, f"{dataset} inst")
            assert isinstance(theirs, float)
            near = mean is not None and abs(mean - theirs) <= told.points
            apart.append(f"{row}, whose mean over {len(draws[dataset, row].ours)} draws is" if near else row)
        no = f" (not {'; not '.join(apart)})" if apart else ""
        words.append(f"{len(run) - len(apart)} of {len(run)} methods on {dataset}{no}")
    return f"- Within {told.points:g} points of the released code, both errors: {', '.join(words)}."


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
