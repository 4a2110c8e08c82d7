"""Print the tables of `tribe reproduce`: in the terminal, or into a file."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.table import Table as Grid

from reproduction.beyond import MARK
from reproduction.compare import Comparison, Judged
from reproduction.plan import Plan
from reproduction.render import FORMATS, VERDICTS, claims_json, claims_markdown, number, ours
from reproduction.tables import all_tables
from tribe.cli.output import shown
from tribe.cli.terminal import OutputTarget
from tribe.fields import printable


def list_tables(output: OutputTarget) -> None:
    """Print the names and titles of all tables and figures."""
    if output.style == "json":
        names = ("name", "label", "kind", "where", "title")
        output.write_json([{name: getattr(table, name) for name in names} for table in all_tables()])
        return
    grid = Grid("name", "what", "in the paper")
    grid.columns[0].no_wrap = True
    for table in all_tables():
        grid.add_row(table.name, table.title, f"{table.where}, {table.label}")
    output.draw(lambda console: console.print(grid))


def show_runs(plan: Plan, rows: Sequence[Mapping[str, Any]], output: OutputTarget) -> None:
    """Print the runs of a plan, whether they are done, and how long the others take."""
    left = sum(row["minutes"] for row in rows if not row["done"])
    if output.style == "json":
        missing = [{"reason": reason, "cells": cells} for reason, cells in plan.problems.items()]
        output.write_json({"artifact": plan.table.name, "runs": rows, "minutes_left": left, "missing": missing})
        return
    grid = Grid("id", "method", "network", "stream", "images", "minutes", "")
    for row in rows:
        minutes = f"{row['minutes']:.1f}" + ("" if row["measured"] else " ?")
        method = f"{row['method']} {MARK}" if row["beyond_paper"] else row["method"]
        names = row["id"], method, row["model"], row["stream"]
        grid.add_row(*map(shown, names), f"{row['images']:,}", minutes, "done" if row["done"] else "")
    done = sum(row["done"] for row in rows)
    text = f"{len(rows)} runs, {done} done; the others take about {left:.0f} minutes (?: a guess, not measured here)"
    text += f"; {MARK}: beyond the paper" if any(row["beyond_paper"] for row in rows) else ""
    output.draw(lambda console: console.print(grid, text))
    print_problems(plan.problems)


def show_claims(judgements: Sequence[Judged], output: OutputTarget) -> None:
    """Print claims with their verdicts."""
    if output.style == "json":
        output.write_json(claims_json(judgements))
    elif output.style == "markdown":
        output.write("\n".join(claims_markdown(judgements)) + "\n")
    elif output.style == "table":
        output.draw(lambda console: console.print(_claims_grid(judgements)))
    else:
        raise ValueError(f"claims come as table, markdown or json; got --format {output.style}")


def show_comparison(comparison: Comparison, judgements: Sequence[Judged], output: OutputTarget) -> None:
    """Print a comparison in the format of the output."""
    if output.style == "table":
        output.draw(lambda console: _print(comparison, judgements, console))
    else:
        output.write(FORMATS[output.style](comparison, judgements))


def _print(comparison: Comparison, judgements: Sequence[Judged], console: Console) -> None:
    console.print(
        f"[bold]{_safe(comparison.title)}[/] ({comparison.label}): ours, [dim]the {comparison.theirs}'s[/], difference"
    )
    grid = Grid("", *(Column(shown(name)) for name in comparison.columns), padding=(0, 1))
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in comparison.rows:
        grid.add_row(shown(comparison.name_of(row)), *(_cell(comparison, row, column) for column in comparison.columns))
    console.print(grid)
    for note in (*comparison.notes, *comparison.footnotes):
        console.print(f"  {printable(note)}", markup=False, highlight=False, soft_wrap=True)
    if judgements:
        console.print(_claims_grid(judgements))


def _cell(comparison: Comparison, row: str, column: str) -> str:
    entry = comparison.entries[row, column]
    text = _safe(ours(entry))
    lines = [f"[bold]{text}[/]" if comparison.is_best(row, column) else text]
    if entry.paper is not None:
        lines.append(f"[dim]{_safe(number(entry.paper, entry.unit))}[/]")
    if entry.difference is not None:
        lines.append(number(entry.difference, entry.unit, signed=True))
    return "\n".join(lines)


def _claims_grid(judgements: Sequence[Judged]) -> Grid:
    grid = Grid("the paper says", "on its own numbers", "on ours")
    for claim, *verdicts in judgements:
        grid.add_row(_safe(claim.says), *(_safe(f"{VERDICTS[v.holds]}: {v.why}") for v in verdicts))
    return grid


def _safe(text: str) -> str:
    return escape(printable(text))


def print_problems(problems: Mapping[str, Sequence[str]]) -> None:
    """Print why cells are missing, on stderr."""
    console = Console(stderr=True)
    for reason, cells in problems.items():
        some = "; ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")
        console.print(printable(f"missing: {some}: {reason}"), style="yellow", markup=False, soft_wrap=True)
