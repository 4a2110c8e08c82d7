"""Render a comparison in the terminal, or as Markdown, LaTeX, CSV or JSON: ours, the paper's, and the difference."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from reproduction.beyond import MARK
from reproduction.claims import Verdict
from reproduction.compare import READING, Comparison, Entry
from tribe.fields import printable

DECIMALS = {"s": 5, "ms": 3, "images": 0}  # others: 2
ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "%_&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    | {MARK: r"$^\dagger$", READING: r"$^\ddagger$"}
)


def number(value: float | str | None, unit: str = "%", signed: bool = False) -> str:
    """Format a number of a table.

    >>> number(19.528), number(0.0043, "s"), number(None), number(2.5, signed=True), number(-0.001)
    ('19.53', '0.00430', '–', '+2.50', '0.00')
    """
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:{'+' * signed}z.{DECIMALS.get(unit, 2)}f}"


def ours(entry: Entry) -> str:
    """Format our number, with its standard deviation if there are several seeds."""
    mean = number(entry.ours, entry.unit)
    return mean if entry.deviation is None else f"{mean} ± {number(entry.deviation, entry.unit)}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; the first column is on the left, the others are on the right."""
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(printable(cell).replace("<", "&lt;").replace("|", r"\|") for cell in cells) + " |"


def markdown(comparison: Comparison, verdicts: Sequence[Verdict] = ()) -> str:
    """Return our number, in brackets the paper's and the difference; our lowest number of a column is bold."""
    rows = [
        [comparison.name_of(r), *(_cell(comparison, r, c, "**{}**") for c in comparison.columns)]
        for r in comparison.rows
    ]
    title = printable(comparison.title).replace("<", "&lt;")
    text = f"## {title}\n\n{_legend(comparison)}\n\n{markdown_table(['', *comparison.columns], rows)}\n"
    text += "".join(f"- {printable(note).replace('<', '&lt;')}\n" for note in _notes(comparison))
    return text + (f"\n{claims_markdown(verdicts)}" if verdicts else "")


def latex(comparison: Comparison, verdicts: Sequence[Verdict] = ()) -> str:
    """Return a tabular that needs the package booktabs."""
    bold = "\x02{}\x03"  # until its characters are escaped; no printable text holds these
    lines = [
        f"% {printable(_legend(comparison))}",
        rf"\begin{{tabular}}{{l{'r' * len(comparison.columns)}}}",
        r"\toprule",
        " & ".join(["", *map(_escaped, comparison.columns)]) + r" \\",
        r"\midrule",
    ]
    for row in comparison.rows:
        cells = [comparison.name_of(row), *(_cell(comparison, row, column, bold) for column in comparison.columns)]
        line = " & ".join(map(_escaped, cells)) + r" \\"
        lines.append(line.replace("\x02", r"\textbf{").replace("\x03", "}"))
    notes = (f"% {printable(note)}" for note in _notes(comparison))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]) + "\n"


def _escaped(text: str) -> str:
    return printable(text, keep="\x02\x03").translate(ESCAPES)


CSV_HEAD = (
    *("artifact", "row", "column", "ours", "deviation", "seeds", "paper", "difference", "unit"),
    *("dataset", "model", "device", "precision", "batch", "experiment"),
)


def as_csv(comparison: Comparison, verdicts: Sequence[Verdict] = ()) -> str:
    """Return a line per cell."""
    return csv_lines([CSV_HEAD, *csv_rows(comparison)])


def csv_lines(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def csv_rows(comparison: Comparison) -> list[list[object]]:
    """Return the lines of a comparison under CSV_HEAD."""
    rows = []
    for row in comparison.rows:
        for column in comparison.columns:
            e, name = comparison.entries[row, column], comparison.name_of(row)
            x = e.experiment
            values = [e.ours, e.deviation, e.seeds, e.paper, e.difference]
            shown = [round(v, 6) if isinstance(v, float) else "" if v is None else v for v in values]
            spec = [] if x is None else [x.dataset.name, x.model.name, x.device, x.precision, x.batch, x.id]
            rows.append([comparison.name, name, column, *shown, e.unit, *(spec or [""] * 6)])
    return rows


def as_json(comparison: Comparison, verdicts: Sequence[Verdict] = ()) -> str:
    """Return all of it, for programs."""
    cells = []
    for row in comparison.rows:
        for column in comparison.columns:
            e = comparison.entries[row, column]
            cell: dict[str, object] = {"row": row, "column": column, "ours": e.ours, "deviation": e.deviation}
            cell |= {"paper": e.paper, "difference": e.difference, "unit": e.unit, "by_seed": dict(e.by_seed)}
            cell |= {"experiment": e.experiment and e.experiment.id, "beyond_paper": row in comparison.beyond}
            cells.append(cell)
    data = {
        "artifact": comparison.name,
        "label": comparison.label,
        "title": comparison.title,
        "cells": cells,
        "notes": comparison.all_notes,
        "missing": [{"reason": reason, "cells": list(found)} for reason, found in comparison.missing.items()],
        "claims": [verdict.json() for verdict in verdicts],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def claims_markdown(verdicts: Sequence[Verdict]) -> str:
    """Return the claims with their numbers as a table."""
    return markdown_table(CLAIMS_HEAD, map(claim_cells, verdicts))


CLAIMS_HEAD = ("the paper says", "number", "threshold", "on the paper's numbers", "", "on ours", "")


def claim_cells(verdict: Verdict) -> list[str]:
    """Return a row of the table of claims."""
    paper, mine = verdict.paper, verdict.ours
    spread = "" if not mine.deviation else f" ± {mine.deviation:.2f}"
    return [
        verdict.says,
        verdict.claim.number,
        verdict.claim.threshold,
        number(paper.number),
        paper.verdict,
        number(mine.number) + spread,
        mine.verdict,
    ]


def draw(comparison: Comparison, verdicts: Sequence[Verdict], console: Console) -> None:
    """Print a comparison in the terminal."""
    console.print(
        f"[bold]{_safe(comparison.title)}[/] ({_safe(comparison.label)}): ours, [dim]{comparison.theirs}[/], difference"
    )
    grid = Grid("", padding=(0, 1))
    for column in comparison.columns:
        grid.add_column(_safe(column), justify="right")
    for row in comparison.rows:
        grid.add_row(_safe(comparison.name_of(row)), *(_terminal_cell(comparison, row, c) for c in comparison.columns))
    console.print(grid)
    for note in comparison.all_notes:
        console.print(f"  {printable(note)}", markup=False, highlight=False, soft_wrap=True)
    if verdicts:
        console.print(claims_grid(verdicts))


def claims_grid(verdicts: Sequence[Verdict]) -> Grid:
    """Return the claims with their numbers as a table of the terminal."""
    grid = Grid(*CLAIMS_HEAD)
    for verdict in verdicts:
        grid.add_row(*map(_safe, claim_cells(verdict)))
    return grid


def _terminal_cell(comparison: Comparison, row: str, column: str) -> str:
    entry = comparison.entries[row, column]
    text = _safe(ours(entry))
    lines = [f"[bold]{text}[/]" if comparison.is_best(row, column) else text]
    if entry.paper is not None:
        lines.append(f"[dim]{_safe(number(entry.paper, entry.unit))}[/]")
    if entry.difference is not None:
        lines.append(number(entry.difference, entry.unit, signed=True))
    return "\n".join(lines)


def _safe(text: str) -> str:
    return escape(printable(text))


def _legend(comparison: Comparison) -> str:
    return f"`{comparison.label}`: ours ({comparison.theirs}, difference)"


def _notes(comparison: Comparison) -> list[str]:
    missing = [f"Missing: {len(cells)}, first {cells[0]}: {why}" for why, cells in comparison.missing.items()]
    return [*comparison.all_notes, *missing]


def _cell(comparison: Comparison, row: str, column: str, best: str) -> str:
    entry = comparison.entries[row, column]
    text = ours(entry)
    if comparison.is_best(row, column):
        text = best.format(text)
    if entry.paper is None:
        return text
    difference = "" if entry.difference is None else f", {number(entry.difference, entry.unit, signed=True)}"
    return f"{text} ({number(entry.paper, entry.unit)}{difference})"


FORMATS: Mapping[str, Callable[[Comparison, Sequence[Verdict]], str]] = {
    "markdown": markdown,
    "latex": latex,
    "csv": as_csv,
    "json": as_json,
}
