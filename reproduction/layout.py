"""The layout of the document: no line is too long to read, and long tables are files of their own."""

import csv
import io
import re
import textwrap
from collections.abc import Collection, Iterator

from reproduction.compare import Comparison
from reproduction.render import number
from reproduction.tables import Value

WIDTH = 126  # characters of a line of text
WIDEST = 300  # of any line; a wider table is cut into several


def wrapped(text: str) -> str:
    """Text in Markdown with short lines; tables, headings and code stay as they are.

    >>> print(wrapped("- " + "one two " * 20))  # doctest: +ELLIPSIS
    - one two ...
      ...one two
    """
    return "\n".join(part for line in text.split("\n") for part in _wrap(line))


def _wrap(line: str) -> Iterator[str]:
    if len(line) <= WIDTH or line.startswith(("|", "#", "    ")):
        yield line
        return
    start = re.match(r" *(- )?", line)
    indent = " " * len(start[0] if start else "")
    glued = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), line).replace(" - ", "\0-\0")
    fixed = {"break_long_words": False, "break_on_hyphens": False}
    yield from (part.replace("\0", " ") for part in textwrap.wrap(glued, WIDTH, subsequent_indent=indent, **fixed))  # type: ignore[arg-type]


def is_long(comparison: Comparison, domains: Collection[str]) -> bool:
    """Whether a table belongs into a file: one with the error of each corruption."""
    return any(column in domains for column in comparison.columns)


def as_file(comparison: Comparison) -> str:
    """A table as CSV: for each row our numbers, their standard deviations, the number of seeds, and the paper's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "what", *comparison.columns])
    for row in comparison.rows:
        entries = [comparison.entries[row, column] for column in comparison.columns]
        lines: dict[str, list[Value]] = {
            "ours": [e.ours for e in entries],
            "standard deviation": [e.deviation for e in entries],
            "seeds": [str(len(e.by_seed)) if e.by_seed else None for e in entries],
            comparison.theirs: [e.paper for e in entries],
        }
        for what, values in lines.items():
            if any(value is not None for value in values):
                cells = ("" if v is None else number(v, e.unit) for v, e in zip(values, entries, strict=True))
                writer.writerow([comparison.name_of(row), what, *cells])
    return text.getvalue()
