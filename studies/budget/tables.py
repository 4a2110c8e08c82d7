"""The tables and the picture of the study of a budget, from its files of results."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from studies.pages import table
from studies.play import read
from tribe.experiments.plots import error_against_cost, save

PICTURE = Path(__file__).parents[2] / "docs/pictures/budget.svg"
Row = Mapping[str, Any]


def errors(folder: Path) -> str:
    """A table for each file: cells in rows, methods in columns."""
    files: dict[str, list[Row]] = defaultdict(list)
    for row in read("budget_*.json", folder):
        files[row["file"]].append(row)
    return "\n".join(_errors(rows, folder) for rows in files.values())


def _errors(rows: list[Row], folder: Path) -> str:
    first = rows[0]
    names = _ordered(row["method"] for row in rows)
    found = {(row["cell"], row["method"]): row for row in rows}
    words = f"{_what(first)}; error in %, in brackets the most above the source in 1,000 images; last, the mean cost"
    lines = []
    for cell in _ordered(row["cell"] for row in rows):
        line = [cell]
        for name in names:
            if row := found.get((cell, name)):
                worst = "" if name == names[0] else f" ({max(row['above']):+.1f})"
                line.append(f"{statistics.mean(row['error']):.1f}{worst}")
            else:
                line.append("")
        lines.append(line)
    costs = {row["method"]: row for row in read(f"costs_{first['dataset']}_{first['model']}.json", folder)}
    means = [f"{costs[name]['cost']:.2f} x" if name in costs else "" for name in names]
    return f"{words} in plain inference:\n\n{table(['cell', *names], [*lines, ['cost', *means]])}"


def peers(folder: Path) -> str:
    """A table for each network: methods at their budgets in rows, cells in columns; the lowest of a budget is bold."""
    return "\n".join(_peers(rows) for rows in _networks("peers*_*.json", folder))


def _peers(rows: list[Row]) -> str:
    found = {(row["method"], row.get("cell")): row for row in rows}
    cells = _ordered(row["cell"] for row in rows if "cell" in row)
    budgets: dict[str, list[str]] = defaultdict(list)
    for name in _ordered(row["method"] for row in rows):
        budgets[name.partition("@")[2]].append(name)
    lines = []
    for budget, names in sorted(budgets.items(), key=lambda pair: float(pair[0] or 0)):
        low = {cell: min((_error(found.get((name, cell))) for name in names), default=0.0) for cell in cells}
        for name in names:
            if (name, None) in found:  # it was refused
                lines.append([budget, name.partition("@")[0], "", "more", *[""] * len(cells)])
                continue
            one = next(found[name, cell] for cell in cells if (name, cell) in found)
            shown = [_bold(_error(found.get((name, cell))), low[cell] if budget else None) for cell in cells]
            lines.append([budget or "–", name.partition("@")[0], str(one["every"]), f"{one['cost']:.2f} x", *shown])
    words = f"{_what(rows[0])}; error in %, the lowest of a budget is bold"
    return f"{words}:\n\n{table(['budget', 'method', 'learns from one batch in', 'cost', *cells], lines)}"


def realtime(folder: Path) -> str:
    """A table for each network: methods in rows, cells and speeds in columns; the lowest of a column is bold."""
    return "\n".join(_realtime(rows) for rows in _networks("realtime*_*.json", folder))


def _realtime(rows: list[Row]) -> str:
    found = {(row["method"], row["cell"], row["speed"]): row for row in rows}
    columns = _ordered((row["cell"], row["speed"]) for row in rows)
    names = _ordered(row["method"] for row in rows)
    lines = []
    low = {key: min(_error(found.get((name, *key))) for name in names) for key in columns}
    for name in names:
        shown = [_bold(_error(found.get((name, *key))), low[key]) for key in columns]
        cost = next(row["cost"] for row in rows if row["method"] == name)
        lines.append([name, f"{cost:.2f} x", *shown])
    words = f"{_what(rows[0])}; error in %, the lowest of a column is bold"
    head = ["method", "cost", *(f"{cell}, {speed:g} x" for cell, speed in columns)]
    return f"{words}:\n\n{table(head, lines)}"


def draw(folder: Path, path: Path = PICTURE) -> None:
    """Draw error against cost: a panel for each cell, a line through the budgets of each method."""
    rows = max(_networks("peers*_*.json", folder), key=len)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "cell" in row:
            name = row["method"].partition("@")[0].partition(":")[0]
            panels[row["cell"]][name].append((row["cost"], _error(row)))
    save(error_against_cost(panels), path)


def _networks(pattern: str, folder: Path) -> list[list[Row]]:
    """Return the rows of each data set, network and number of images, of all files that match."""
    networks: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in read(pattern, folder):
        networks[row["dataset"], row["model"], row["most"]].append(row)
    return list(networks.values())


def _error(row: Row | None) -> float:
    """Return the mean error over seeds; infinite if there is none."""
    return float("inf") if row is None else statistics.mean(row["error"])


def _bold(error: float, lowest: float | None) -> str:
    text = "" if error == float("inf") else f"{error:.1f}"
    return f"**{text}**" if text and lowest is not None and text == f"{lowest:.1f}" else text


def _ordered(values: Iterable[Any]) -> list[Any]:
    """Return each value once, in the order in which they came."""
    return list(dict.fromkeys(values))


def _what(row: Row) -> str:
    seeds = ", ".join(map(str, row["seeds"]))
    words = f"**{row['model']}, {row['dataset']}**, {len(row['corruptions'])} corruptions, at most "
    return words + f"{row['most']:,} images of each, seed{'s' * (len(row['seeds']) > 1)} {seeds}"


BLOCKS = {"errors": errors, "peers": peers, "realtime": realtime}
