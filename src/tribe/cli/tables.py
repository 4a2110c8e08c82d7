"""Tables of results in the terminal: text columns to the left, columns of numbers to the right."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tribe.cli.output import print_json, shown
from tribe.experiments.spec import plain
from tribe.experiments.statistics import spread
from tribe.experiments.store import Result
from tribe.io.files import write_atomically

WIDE = 240  # columns of a table that does not go to a terminal
ERRORS = ("instance_error", "category_error")
HEADER = ("instance error, %", "category error, %", "ms / image")


def make_table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table with columns of text and columns of numbers; no cell is read as markup."""
    right = (Column(shown(name), justify="right") for name in numbers)
    table = Table(*(Column(shown(name)) for name in texts), *right)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else shown(cell) for cell in row))
    return table


def method_table(results: Mapping[str, Result]) -> Table:
    """Return the table of errors of some methods on one stream; the lowest are bold."""
    means = {name: [_mean(result.values(key)) for key in ERRORS] for name, result in results.items()}
    lowest = [min(column) for column in zip(*means.values(), strict=True)]
    rows = []
    for name, result in results.items():
        cells = result_cells(result)
        for i, mean in enumerate(means[name]):
            if len(results) > 1 and mean == lowest[i]:
                cells[i].stylize("bold")
        rows.append([shown(name), *cells])
    return make_table(["method"], HEADER, rows)


def result_cells(result: Result) -> list[Text]:
    """Return the cells of `HEADER` for a result."""
    time = 1e3 * _mean(result.values("seconds_per_image"))
    return [*(Text(percent(result.values(key))) for key in ERRORS), Text(f"{time:.2f}")]


def percent(shares: Sequence[float]) -> str:
    """Return the errors of some seeds as the text of a cell.

    Example:
        >>> percent([0.25]), percent([0.1, 0.3]), percent([float("nan")])
        ('25.00', '20.00 ± 14.14', 'no labels')
    """
    return "no labels" if any(map(math.isnan, shares)) else str(spread([100 * share for share in shares]))


def wide_console() -> Console:
    """Return a console for tables: as wide as the terminal, or wide where stdout is not one."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def write_summary(report: Mapping[str, Any], path: Path, json_file: str | None) -> None:
    """Write a summary to its file, and to ``--json FILE``, where - is stdout."""
    content = json.dumps(plain(report), indent=1).encode()
    for file in (path, *([] if json_file in (None, "-") else [Path(str(json_file))])):
        write_atomically(file, content)
    if json_file == "-":
        print_json(report)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
