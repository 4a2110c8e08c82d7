"""What the released code of the paper's authors was measured to do, as data, and ours beside it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tribe.lab import statistics
from tribe.paper import tables as paper
from tribe.paper.comparison import Comparison, Entry
from tribe.paper.draws import KINDS, Draws
from tribe.paper.findings import APART
from tribe.paper.render import number, table_row
from tribe.paper.tables import Table


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


class _Nearness(NamedTuple):
    """How near the errors on a data set are to the released code's."""

    held: list[str]  # rows that are to be near, as far as the released code was measured there
    distances: dict[str, float]  # the larger of both kinds, in points, of rows that were run; 0: nothing to compare

    @property
    def apart(self) -> list[str]:
        """Rows that are not as near as they are to be."""
        return [row for row in self.held if self.distances.get(row, 0.0) > released().points]

    def word(self, row: str, distance: float) -> str:
        """Whether a row that is held is near."""
        return "" if row not in self.held else "yes" if distance <= released().points else "**no**"


def beside(
    comparison: Comparison,
    times: Mapping[str, Times],
    draws: Mapping[tuple[str, str], Sequence[Draws]] | None = None,
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


def near_the_released(comparison: Comparison, draws: Mapping[tuple[str, str], Sequence[Draws]]) -> str:
    """How near all of it is, in a sentence."""
    words = []
    for dataset in _datasets(comparison):
        near = _nearness(comparison, dataset)
        run = [row for row in near.held if row in near.distances]
        apart = [_apart(comparison, dataset, row, draws.get((dataset, row), ())) for row in near.apart]
        no = f" (not {'; not '.join(apart)})" if apart else ""
        words.append(f"{len(run) - len(near.apart)} of {len(run)} methods on {dataset}{no}")
    return f"- Within {released().points:g} points of the released code, both errors: {', '.join(words)}."


def _apart(comparison: Comparison, dataset: str, row: str, draws: Sequence[Draws]) -> str:
    """A row that is not near: by how much, in one run and in means of many, and whether plain PyTorch does the same."""
    entries = {kind: comparison.entries[row, f"{dataset} {kind}"] for kind in KINDS}
    by = f"{row}: one run by {_distance(entries.values()):.2f}"
    if draws:
        times = " and ".join(dict.fromkeys(str(drawn.times) for drawn in draws))
        means = " and ".join(f"{_distance(_means(entries, drawn).values()):.2f}" for drawn in draws)
        by += f", the mean{'s' * (len(draws) > 1)} of {times} run{'s' * (times != '1')} by {means}"
    known = [drawn.agree for drawn in draws if drawn.agree is not None]
    word = "agrees" if all(known) else "does not agree"
    return by + (f"; plain PyTorch's {row} {word} with ours" if known else "")


def _means(entries: Mapping[str, Entry], draws: Draws) -> dict[str, Entry]:
    """Errors with the mean of many draws in the place of one."""
    return {kind: entry._replace(ours=draws.mean(kind)) for kind, entry in entries.items()}


def _datasets(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(column.rpartition(" ")[0] for column in comparison.columns))


def _nearness(comparison: Comparison, dataset: str) -> _Nearness:
    told, distances = released(), {}
    for row in comparison.rows:
        entries = [comparison.entries[row, f"{dataset} {kind}"] for kind in KINDS]
        if all(isinstance(entry.ours, float) for entry in entries):
            distances[row] = _distance(entries)
    held = [row for row in told.held if told.table.value(row, f"{dataset} inst") is not None]
    return _Nearness(held, distances)


def _distance(entries: Iterable[Entry]) -> float:
    return max((abs(entry.difference) for entry in entries if entry.difference is not None), default=0.0)


def _of_dataset(comparison: Comparison, dataset: str, times: Times, draws: Mapping[str, Sequence[Draws]]) -> list[str]:
    told, near = released(), _nearness(comparison, dataset)
    errors = [word for kind in KINDS.values() for word in (f"{kind} error", "released", "Δ", "paper", "Δ")]
    head = [dataset, *errors, f"within {told.points:g}", "ms", "ms, side by side", "ms, released"]
    lines, slow = [table_row(head), table_row(["---", *["---:"] * len(errors), "---", *["---:"] * 3])], []
    for row, far in near.distances.items():
        entries = {kind: comparison.entries[row, f"{dataset} {kind}"] for kind in KINDS}
        alone, limit = times.alone.get(row), told.limits.get(dataset, {}).get(row)
        slow += [f"{row} {alone:.3f} ms"] if alone and limit and alone > limit else []
        took = [number(alone, "ms"), number(times.running.get(row), "ms"), _released_ms(dataset, row)]
        lines.append(table_row([row, *_errors(dataset, row, entries), near.word(row, far), *took]))
        for drawn in draws.get(row, ()):
            means = _means(entries, drawn)
            word, name = near.word(row, _distance(means.values())), f"{row}, mean of {drawn.times}: {drawn.what}"
            lines.append(table_row([name, *_errors(dataset, row, means), word, *[number(None, "ms")] * 3]))
    apart = [f"{row} by {near.distances[row]:.2f}" for row in near.apart]
    close = f"Within {told.points:g} points of the released code ({', '.join(near.held)})"
    lines += ["", *_verdict(close, apart, [row for row in near.held if row not in near.distances])]
    lines += _with_the_released(comparison, dataset)
    if limits := told.limits.get(dataset):
        words = ", ".join(f"{row} at most {limit:g} ms" for row, limit in limits.items())
        lines += _verdict(f"Time an image ({words})", slow, [row for row in limits if row not in times.alone])
    how = times.how or "not measured yet"
    lines += [f"- ms: {how}. Side by side: in the experiments, which may have shared the device: it says little."]
    played = {row: several for row, several in draws.items() if row in near.distances}
    return [*lines, "", *_spread(played)] if played else lines


def _with_the_released(comparison: Comparison, dataset: str) -> list[str]:
    """Errors that are not the paper's, but are the released code's."""
    rows: dict[str, list[str]] = {}
    for row in comparison.rows:
        for kind, word in KINDS.items():
            entry, said = comparison.entries[row, f"{dataset} {kind}"], _said(dataset, row, kind)
            near, far = entry.difference, entry._replace(paper=said).difference
            if near is not None and far is not None and abs(near) <= released().points and abs(far) > APART:
                numbers = ", ".join(number(value, "%") for value in (entry.paper, said))
                rows.setdefault(row, []).append(f"{word} {number(entry.ours, '%')} ({numbers})")
    told = "; ".join(f"{row} {', '.join(words)}" for row, words in rows.items())
    what = f"Within {released().points:g} points of the released code, yet more than {APART:g} from the paper"
    return [f"- {what}, ours (released, paper): {told}."] if told else []


def _spread(draws: Mapping[str, Sequence[Draws]]) -> list[str]:
    """How far one stream is to be trusted."""
    lines = ["One method many times, mean ± standard deviation. Plain PyTorch: torch's BatchNorm and torch.optim,"]
    lines[0] += " on the same images (`python -m benchmarks.textbook`):"
    head = [word for kind in KINDS.values() for word in (f"{kind} error", "plain PyTorch", "difference")]
    lines += ["", table_row(["", "times", *head]), table_row(["---", *["---:"] * (1 + len(head))])]
    for row, several in draws.items():
        for drawn in several:
            cells = [f"{row}: {drawn.what}", str(drawn.times)]
            for kind in KINDS:
                mean, error = drawn.difference(kind)
                cells += [str(statistics.spread(errors[kind])) for errors in (drawn.ours, drawn.textbook)]
                cells.append(
                    number(mean, "%", signed=True) + ("" if error is None else f", standard error {error:.2f}")
                )
            lines.append(table_row(cells))
    return lines


def _verdict(what: str, against: Sequence[str], lacking: Sequence[str]) -> list[str]:
    said = f"no: {'; '.join(against)}" if against else "not shown" if lacking else "yes"
    return [f"- {what}: {said}" + (f". Not measured: {', '.join(lacking)}." if lacking else ".")]


def _errors(dataset: str, row: str, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Of both kinds: ours; the released code's with the difference; the paper's with the difference."""
    for kind, entry in entries.items():
        yield number(entry.ours, "%")
        for theirs in (entry.paper, _said(dataset, row, kind)):
            yield number(theirs, "%")
            yield number(entry._replace(paper=theirs).difference, "%", signed=True)


def _said(dataset: str, row: str, kind: str) -> float | str | None:
    """What the paper says of the same stream."""
    table = paper.get(dataset.lower().removesuffix("-c"))
    return table.value(row, f"F 100 {kind}") if row in table.row_keys else None


def _released_ms(dataset: str, row: str) -> str:
    return released().ms.get(dataset, {}).get(row, number(None, "ms"))
