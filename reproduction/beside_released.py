"""A section of the document: our errors and times next to those of the code that the paper's authors released."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from reproduction import tables
from reproduction.compare import APART, Comparison, Entry
from reproduction.gather import KINDS, Draws
from reproduction.render import number, table_head, table_row
from reproduction.tables import Value, released
from tribe.experiments import statistics


class Times(NamedTuple):
    """Milliseconds per image, by row."""

    running: Mapping[str, float]  # in the experiments
    alone: Mapping[str, float]  # with nothing else running
    how: str  # the latter were measured


@dataclass(frozen=True)
class BesideReleased:
    """Our errors on one data set next to those of the released code."""

    comparison: Comparison  # of Released.table
    dataset: str
    draws: Mapping[str, Sequence[Draws]]  # by row, where a method was run more than once

    @cached_property
    def entries(self) -> dict[str, dict[str, Entry]]:
        """Both errors of each row that was run."""
        entries = {row: {k: self.comparison.entries[row, f"{self.dataset} {k}"] for k in KINDS} for row in self.rows}
        return {row: both for row, both in entries.items() if all(isinstance(e.ours, float) for e in both.values())}

    @property
    def rows(self) -> Sequence[str]:
        """All rows."""
        return self.comparison.rows

    @property
    def held(self) -> list[str]:
        """Rows that should be close, if the released code was measured there."""
        return [row for row in released().held if released().table.value(row, f"{self.dataset} inst") is not None]

    @property
    def apart(self) -> list[str]:
        """Rows that should be close, and are not."""
        return [row for row in self.held if row in self.entries and distance(self.entries[row]) > released().points]

    def means(self, row: str, draws: Draws) -> dict[str, Entry]:
        """The errors of a row, with the mean of many draws in place of one run."""
        return {kind: entry._replace(ours=draws.mean(kind)) for kind, entry in self.entries[row].items()}

    def sentence(self) -> str:
        """How many rows are close, and which are not."""
        run = [row for row in self.held if row in self.entries]
        no = f" (not for {'; not for '.join(map(self._gap, self.apart))})" if self.apart else ""
        return f"{len(run) - len(self.apart)} of {len(run)} methods on {self.dataset}{no}"

    def _gap(self, row: str) -> str:
        """How far a row is from the released code, in one run and in means, and whether plain PyTorch agrees."""
        draws = self.draws.get(row, ())
        text = f"{row}: one run differs by {distance(self.entries[row]):.2f}"
        if draws:
            times = " and ".join(dict.fromkeys(str(drawn.times) for drawn in draws))
            means = " and ".join(f"{distance(self.means(row, drawn)):.2f}" for drawn in draws)
            text += f", the mean{'s' * (len(draws) > 1)} of {times} run{'s' * (times != '1')} by {means}"
        verdicts = [drawn.agree for drawn in draws if drawn.agree is not None]
        agrees = "agrees" if all(verdicts) else "does not agree"
        return text + (f"; {row} in plain PyTorch {agrees} with ours" if verdicts else "")

    def section(self, times: Times) -> list[str]:
        """A table of all rows, and what it shows."""
        goal, dataset = released(), self.dataset
        limits = goal.limits.get(dataset, {})
        slow = [
            f"{row} {ms:.3f} ms" for row, ms in times.alone.items() if row in self.entries and ms > limits.get(row, ms)
        ]
        gaps = [f"{row} by {distance(self.entries[row]):.2f}" for row in self.apart]
        close = f"Within {goal.points:g} points of the released code ({', '.join(self.held)})"
        lines = [*self._table(times), "", *_verdict(close, gaps, [row for row in self.held if row not in self.entries])]
        lines += self._unlike_the_paper()
        if limits:
            words = ", ".join(f"{row} at most {limit:g} ms" for row, limit in limits.items())
            lines += _verdict(f"Time per image ({words})", slow, [row for row in limits if row not in times.alone])
        how = times.how or "not measured yet"
        lines += [f"- ms: {how}. ms, in experiments: not comparable, since experiments may share the device."]
        draws = {row: several for row, several in self.draws.items() if row in self.entries}
        return [*lines, "", *_draws_table(draws), ""] if draws else [*lines, ""]

    def _table(self, times: Times) -> Iterator[str]:
        errors = [word for kind in KINDS.values() for word in (f"{kind} error", "released", "Δ", "paper", "Δ")]
        head = [self.dataset, *errors, f"within {released().points:g}", "ms", "ms, in experiments", "ms, released"]
        yield from table_head(head, "l" + "r" * len(errors) + "lrrr")
        nothing = number(None, "ms")
        for row in self.entries:
            theirs = released().ms.get(self.dataset, {}).get(row, nothing)
            took = [number(times.alone.get(row), "ms"), number(times.running.get(row), "ms"), theirs]
            yield table_row([row, *self._cells(row, self.entries[row]), *took])
            for drawn in self.draws.get(row, ()):
                name = f"{row}, mean of {drawn.times}: {drawn.what}"
                yield table_row([name, *self._cells(row, self.means(row, drawn)), *[nothing] * 3])

    def _cells(self, row: str, entries: Mapping[str, Entry]) -> Iterator[str]:
        """Our errors, the released code's and the paper's with the differences, and whether a row is close enough."""
        for kind, entry in entries.items():
            yield number(entry.ours, "%")
            for theirs in (entry.paper, self._paper(row, kind)):
                yield number(theirs, "%")
                yield number(entry._replace(paper=theirs).difference, "%", signed=True)
        yield "" if row not in self.held else "yes" if distance(entries) <= released().points else "**no**"

    def _paper(self, row: str, kind: str) -> Value:
        """The paper's number for the same stream."""
        table = tables.get(self.dataset.lower().removesuffix("-c"))
        return table.value(row, f"F 100 {kind}") if row in table.row_keys else None

    def _unlike_the_paper(self) -> list[str]:
        """Errors that are close to the released code's, but not to the paper's."""
        rows: dict[str, list[str]] = {}
        for row, entries in self.entries.items():
            for kind, entry in entries.items():
                paper = self._paper(row, kind)
                near, far = entry.difference, entry._replace(paper=paper).difference
                if near is not None and far is not None and abs(near) <= released().points and abs(far) > APART:
                    numbers = ", ".join(number(value, "%") for value in (entry.paper, paper))
                    rows.setdefault(row, []).append(f"{KINDS[kind]} {number(entry.ours, '%')} ({numbers})")
        found = "; ".join(f"{row} {', '.join(words)}" for row, words in rows.items())
        what = (
            f"Within {released().points:g} points of the released code, but more than {APART:g} points from the paper"
        )
        return [f"- {what}; ours (released, paper): {found}."] if found else []


def distance(entries: Mapping[str, Entry]) -> float:
    """The larger difference of both errors, in points; 0 if there is nothing to compare."""
    return max((abs(e.difference) for e in entries.values() if e.difference is not None), default=0.0)


def _verdict(what: str, against: Sequence[str], lacking: Sequence[str]) -> list[str]:
    verdict = f"no: {'; '.join(against)}" if against else "not shown" if lacking else "yes"
    return [f"- {what}: {verdict}" + (f". Not measured: {', '.join(lacking)}." if lacking else ".")]


def _draws_table(draws: Mapping[str, Sequence[Draws]]) -> list[str]:
    """The spread of methods that were run many times."""
    lines = [
        "Repeated runs, mean ± standard deviation. Plain PyTorch is torch's BatchNorm and torch.optim, on the "
        "same images (`python -m benchmarks.textbook`):",
        "",
    ]
    head = [word for kind in KINDS.values() for word in (f"{kind} error", "plain PyTorch", "difference")]
    lines += table_head(["", "runs", *head], "lr" + "r" * len(head))
    for row, several in draws.items():
        for drawn in several:
            cells = [f"{row}: {drawn.what}", str(drawn.times)]
            for kind in KINDS:
                mean, error = drawn.difference(kind)
                cells += [str(statistics.spread(errors[kind])) for errors in (drawn.ours, drawn.textbook)]
                gap = number(mean, "%", signed=True)
                cells.append(gap if error is None else f"{gap}, standard error {error:.2f}")
            lines.append(table_row(cells))
    return lines
