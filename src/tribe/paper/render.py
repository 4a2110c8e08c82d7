"""A comparison as text: Markdown, LaTeX, CSV or JSON; ours first, then the paper's and the difference."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from tribe.paper.comparison import Comparison, Entry, Judged

WORDS = {True: "holds", False: "fails", None: "not judged"}
ESCAPES = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "±": r"$\pm$"}


def number(value: float | str | None, unit: str, signed: bool = False) -> str:
    """A number as a table shows it.

    >>> number(19.528, "%"), number(0.0043, "s"), number(None, "%"), number(2.5, "%", signed=True)
    ('19.53', '0.00430', '–', '+2.50')
    >>> number(-0.001, "%"), number(-0.001, "%", signed=True)
    ('0.00', '+0.00')
    """
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    places = {"s": 5, "ms": 3, "images": 0}.get(unit, 2)
    return f"{value:+z.{places}f}" if signed else f"{value:z.{places}f}"


def ours(entry: Entry) -> str:
    """Our number, with its spread if there are several seeds."""
    told = number(entry.ours, entry.unit)
    return told if entry.deviation is None else f"{told} ± {number(entry.deviation, entry.unit)}"


def markdown(comparison: Comparison, judgements: Sequence[Judged] = (), level: int = 2) -> str:
    """Ours, the paper's in brackets, and the difference; our lowest number of a column in bold."""
    head = f"`{comparison.label}`: ours ({comparison.theirs}'s, difference)"
    lines = [f"{'#' * level} {comparison.title}", "", head, ""]
    lines += [table_row(["", *comparison.columns]), table_row(["---", *["---:"] * len(comparison.columns)])]
    for row in comparison.rows:
        cells = [_marked(comparison, row, column, "**{}**") for column in comparison.columns]
        lines.append(table_row([row, *cells]))
    lines += ["", *(f"- {note}" for note in comparison.notes)]
    lines += [
        f"- Missing, {len(cells)} cell{'s' * (len(cells) > 1)} from {cells[0]}: {reason}"
        for reason, cells in comparison.missing.items()
    ]
    return "\n".join([*lines, *([""] if judgements else []), *claims_markdown(judgements)]) + "\n"


def claims_markdown(judgements: Sequence[Judged]) -> list[str]:
    """The lines of a table of claims."""
    if not judgements:
        return []
    lines = ["| the paper says | on its own numbers | on ours |", "| --- | --- | --- |"]
    for claim, own, mine in judgements:
        lines.append(table_row([claim.says, f"{WORDS[own.holds]}: {own.why}", f"{WORDS[mine.holds]}: {mine.why}"]))
    return lines


def claims_json(judgements: Sequence[Judged]) -> list[dict[str, Any]]:
    """Claims as plain data."""
    return [
        {
            "name": c.name,
            "says": c.says,
            "where": c.where,
            "tables": c.tables,
            "paper": p._asdict(),
            "ours": o._asdict(),
        }
        for c, p, o in judgements
    ]


def latex(comparison: Comparison, judgements: Sequence[Judged] = ()) -> str:
    """A tabular of booktabs."""
    head = " & ".join(["", *map(_tex, comparison.columns)])
    lines = [
        f"% {comparison.label}: ours ({comparison.theirs}'s, difference)",
        rf"\begin{{tabular}}{{l{'r' * len(comparison.columns)}}}",
    ]
    lines += [r"\toprule", head + r" \\", r"\midrule"]
    for row in comparison.rows:
        cells = [_tex(_marked(comparison, row, column, "<<{}>>")) for column in comparison.columns]
        lines.append(" & ".join([_tex(row), *cells]).replace("<<", r"\textbf{").replace(">>", "}") + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in comparison.notes)]) + "\n"


def as_csv(comparison: Comparison, judgements: Sequence[Judged] = ()) -> str:
    """A line a cell, in full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["artifact", "row", "column", "ours", "deviation", "paper", "difference", "unit", "experiment"])
    for row in comparison.rows:
        for column in comparison.columns:
            e = comparison.entries[row, column]
            values = [e.ours, e.deviation, e.paper, e.difference, e.unit, e.experiment]
            writer.writerow([comparison.name, row, column, *("" if value is None else value for value in values)])
    return text.getvalue()


def as_json(comparison: Comparison, judgements: Sequence[Judged] = ()) -> str:
    """All of it, for programs."""
    cells = [
        {"row": row, "column": column, **e._asdict(), "difference": e.difference}
        for row in comparison.rows
        for column in comparison.columns
        for e in [comparison.entries[row, column]]
    ]
    told: dict[str, Any] = {
        "artifact": comparison.name,
        "label": comparison.label,
        "title": comparison.title,
        "cells": cells,
        "notes": list(comparison.notes),
        "missing": [{"reason": reason, "cells": list(cells)} for reason, cells in comparison.missing.items()],
        "claims": claims_json(judgements),
    }
    return json.dumps(told, indent=1, allow_nan=False) + "\n"


def _marked(comparison: Comparison, row: str, column: str, best: str) -> str:
    entry = comparison.entries[row, column]
    told = ours(entry)
    if comparison.is_best(row, column):
        told = best.format(told)
    if entry.paper is None:
        return told
    beside = number(entry.paper, entry.unit)
    if entry.difference is not None:
        beside += f", {number(entry.difference, entry.unit, signed=True)}"
    return f"{told} ({beside})"


def table_row(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _tex(text: str) -> str:
    return "".join(ESCAPES.get(letter, letter) for letter in text)


FORMATS = {"markdown": markdown, "latex": latex, "csv": as_csv, "json": as_json}
