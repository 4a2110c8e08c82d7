"""Render a comparison as Markdown, LaTeX, CSV or JSON: our number, the paper's, and the difference."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from reproduction.beyond import MARK
from reproduction.compare import READING, Comparison, Entry, Judged
from tribe.fields import printable

VERDICTS = {True: "holds", False: "fails", None: "not judged"}
DECIMALS = {"s": 5, "ms": 3, "images": 0}  # others: 2
ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "%_&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    | {MARK: r"$^\dagger$", READING: r"$^\ddagger$"}
)
BOLD = "\x02{}\x03"  # in LaTeX, until its characters are escaped; no printable text holds these


def number(value: float | str | None, unit: str, signed: bool = False) -> str:
    """Format a number of a table.

    >>> number(19.528, "%"), number(0.0043, "s"), number(None, "%"), number(2.5, "%", signed=True)
    ('19.53', '0.00430', '–', '+2.50')
    >>> number(-0.001, "%"), number(-0.001, "%", signed=True)
    ('0.00', '+0.00')
    """
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:{'+' * signed}z.{DECIMALS.get(unit, 2)}f}"


def ours(entry: Entry) -> str:
    """Our number, with its standard deviation if there are several seeds."""
    mean = number(entry.ours, entry.unit)
    return mean if entry.deviation is None else f"{mean} ± {number(entry.deviation, entry.unit)}"


def table_row(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(as_markdown(cell).replace("|", r"\|") for cell in cells) + " |"


def as_markdown(text: str) -> str:
    """Text as it is, in one line: a name must not become an HTML element."""
    return printable(text).replace("<", "&lt;")


def as_latex(text: str) -> str:
    """Text as it is, in one line, without the characters that are commands."""
    return printable(text, keep="\x02\x03").translate(ESCAPES)


def table_head(names: Sequence[str], align: str) -> list[str]:
    """The two lines above the rows of a table; ``align`` has a letter per column, l or r."""
    return [table_row(names), table_row(["---:" if letter == "r" else "---" for letter in align])]


def markdown(
    comparison: Comparison, judgements: Sequence[Judged] = (), level: int = 2, widest: int | None = None
) -> str:
    """Our number, in brackets the paper's and the difference; our lowest number of a column is bold.

    ``widest``: the most characters of a line; a table that is wider is cut into several, side by side in the order of
    its columns.
    """
    lines = [f"{'#' * level} {as_markdown(comparison.title)}", "", _legend(comparison), ""]
    for columns in _parts(comparison, widest):
        lines += table_head(["", *columns], "l" + "r" * len(columns))
        for row in comparison.rows:
            lines.append(table_row([comparison.name_of(row), *(_cell(comparison, row, c, "**{}**") for c in columns)]))
        lines.append("")
    lines += [*(f"- {as_markdown(note)}" for note in (*comparison.notes, *comparison.footnotes))]
    lines += [
        f"- Missing: {len(cells)} cell{'s' * (len(cells) > 1)}, the first is {as_markdown(f'{cells[0]}: {reason}')}"
        for reason, cells in comparison.missing.items()
    ]
    return "\n".join([*lines, *([""] if judgements else []), *claims_markdown(judgements)]) + "\n"


def _parts(comparison: Comparison, widest: int | None) -> list[list[str]]:
    """The columns of each part of a table, so that no line is wider; instance and category errors are apart then."""
    rows, columns = comparison.rows, list(comparison.columns)
    width = {c: 3 + max(len(_cell(comparison, row, c, "**{}**")) for row in rows) for c in columns} if rows else {}
    names = 4 + max((len(comparison.name_of(row)) for row in rows), default=0)
    if widest is None or names + sum(width.values()) <= widest:
        return [columns]
    parts: list[list[str]] = []
    for kind in (" inst", " cat", ""):
        alike = [c for c in columns if c.endswith(kind) and not any(c in part for part in parts)]
        for column in alike:
            if (
                not parts
                or not parts[-1][-1].endswith(kind)
                or names + sum(width[c] for c in (*parts[-1], column)) > widest
            ):
                parts.append([])
            parts[-1].append(column)
    return parts


def latex(comparison: Comparison, judgements: Sequence[Judged] = ()) -> str:
    """A tabular that needs the package booktabs."""
    lines = [
        f"% {_legend(comparison).replace('`', '')}",
        rf"\begin{{tabular}}{{l{'r' * len(comparison.columns)}}}",
        r"\toprule",
        " & ".join(["", *map(as_latex, comparison.columns)]) + r" \\",
        r"\midrule",
    ]
    for row in comparison.rows:
        cells = [_cell(comparison, row, column, BOLD) for column in comparison.columns]
        line = " & ".join(map(as_latex, [printable(comparison.name_of(row)), *cells])) + r" \\"
        lines.append(line.replace("\x02", r"\textbf{").replace("\x03", "}"))
    notes = (f"% {printable(note)}" for note in (*comparison.notes, *comparison.footnotes))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]) + "\n"


def as_csv(comparison: Comparison, judgements: Sequence[Judged] = ()) -> str:
    """A line per cell, in full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["artifact", "row", "column", "ours", "deviation", "paper", "difference", "unit", "experiment"]
    writer.writerow([*head, "beyond_paper"])
    for row in comparison.rows:
        for column in comparison.columns:
            e = comparison.entries[row, column]
            beyond = "yes" if row in comparison.beyond else "no"
            values = [e.ours, e.deviation, e.paper, e.difference, e.unit, e.experiment, beyond]
            writer.writerow([comparison.name, row, column, *("" if value is None else value for value in values)])
    return text.getvalue()


def as_json(comparison: Comparison, judgements: Sequence[Judged] = ()) -> str:
    """All of it, for programs."""
    cells = [
        {"row": row, "column": column, **e._asdict(), "difference": e.difference}
        | {"beyond_paper": row in comparison.beyond}
        for row in comparison.rows
        for column in comparison.columns
        for e in [comparison.entries[row, column]]
    ]
    data: dict[str, Any] = {
        "artifact": comparison.name,
        "label": comparison.label,
        "title": comparison.title,
        "cells": cells,
        "notes": [*comparison.notes, *comparison.footnotes],
        "missing": [{"reason": reason, "cells": list(cells)} for reason, cells in comparison.missing.items()],
        "claims": claims_json(judgements),
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def claims_markdown(judgements: Sequence[Judged]) -> list[str]:
    """The lines of a table of claims, of any width."""
    if not judgements:
        return []
    rows = [[j.claim.says, *(f"{VERDICTS[v.holds]}: {v.why}" for v in (j.paper, j.ours))] for j in judgements]
    return [*table_head(["the paper says", "on its own numbers", "on ours"], "lll"), *map(table_row, rows)]


def claims_json(judgements: Sequence[Judged]) -> list[dict[str, Any]]:
    """Claims as plain data."""
    return [
        {name: getattr(claim, name) for name in ("name", "says", "where", "tables")}
        | {"paper": paper._asdict(), "ours": ours._asdict()}
        for claim, paper, ours in judgements
    ]


def _legend(comparison: Comparison) -> str:
    entries = [entry for entry in comparison.entries.values() if entry.difference is not None]
    equal = ", or = within the spread of the seeds" if any(map(comparison.spread_of, entries)) else ""
    return f"`{comparison.label}`: ours ({comparison.theirs}'s, difference{equal})"


def _cell(comparison: Comparison, row: str, column: str, best: str) -> str:
    entry = comparison.entries[row, column]
    text = ours(entry)
    if comparison.is_best(row, column):
        text = best.format(text)
    if entry.paper is None:
        return text
    paper = number(entry.paper, entry.unit)
    if entry.difference is not None:
        apart = comparison.is_apart(entry) or not comparison.spread_of(entry)
        paper += f", {number(entry.difference, entry.unit, signed=True)}" if apart else ", ="
    return f"{text} ({paper})"


FORMATS = {"markdown": markdown, "latex": latex, "csv": as_csv, "json": as_json}
