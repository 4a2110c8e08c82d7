"""Rows beyond the paper, below its own rows in its tables of methods: time filters, and methods later than the paper.

    table = extend(tables.get("cifar10"))          # with the rows "TRIBE + time", "RoTTA + time", "COFA" and the like
    table.cell("TRIBE + time", "F 100 inst")       # as TRIBE's cell, with the method "tribe+time"
    extend(tables.get("cifar10"), later=True)      # and with the rows "DeYO", "PeTTA" and the like

The paper has no numbers for them, and its claims are judged without them: `tables.get` returns the paper's rows alone.
See docs/time.md, docs/methods.md, and docs/decisions/0023-time-beside-the-paper.md for the tables that have them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from reproduction.tables import Table
from tribe import methods

MARK = "†"  # of rows beyond the paper, wherever they are shown


class RowBeyond(NamedTuple):
    """A method beyond the paper. It has a row wherever the paper has one of the same method without the filter.

    A method later than the paper has a row wherever the paper has one of the source model.
    """

    key: str
    method: str
    fields: Mapping[str, Any]
    note: str  # what it is, for a footnote


FILTER = "“+ time”: a hidden Markov model over classes filters the predictions, with the image and those before it."
ROWS = (
    RowBeyond("TRIBE + time", "tribe+time", {}, FILTER),
    RowBeyond(
        "TRIBE + time within the batch",
        "tribe+time",
        {"within": "batch"},
        "“within the batch”: also with the later images of the same batch.",
    ),
    RowBeyond("RoTTA + time", "rotta+time", {}, FILTER),
    RowBeyond("TEST + time", "source+time", {}, FILTER),
    RowBeyond(
        "COFA",
        "tribe+cofa",
        {},
        "“COFA” (UniTTA, 2024): TRIBE's logits, averaged with those of the image before where this is more confident.",
    ),
)
LATER_PAGE = "docs/methods.md"
LATER = tuple(
    RowBeyond(key, method, {}, f"“{key}” ({venue}) is later than the paper: {LATER_PAGE}.")
    for key, method, venue in (
        ("DELTA", "delta", "ICLR 2023"),
        ("SoTTA", "sotta", "NeurIPS 2023"),
        ("CMF", "cmf", "ICLR 2024"),
        ("DeYO", "deyo", "ICLR 2024"),
        ("PeTTA", "petta", "NeurIPS 2024"),
        ("BDN", "bdn", "UniTTA, 2024"),
    )
)
TABLES = (
    *("cifar10", "cifar10-fixed", "cifar10-varying", "cifar10-ptta"),
    *("cifar100", "cifar100-fixed", "cifar100-varying", "cifar100-ptta"),
    *("mnist", "imagenet", "domains", "gradual", "imbalance", "local-imbalance"),
)


OF_ALL_METHODS = TABLES[: TABLES.index("domains")]  # tables that have rows of methods later than the paper


def extend(table: Table, later: bool = False) -> Table:
    """The table with the rows beyond the paper at its end; a table that has none is returned as it is.

    ``later``: with rows of methods later than the paper, too.
    """
    if table.name not in TABLES:
        return table
    beyond = [(row, methods.parse(row.method).unfiltered) for row in ROWS]
    if later and table.name in OF_ALL_METHODS:
        beyond += [(row, "source") for row in LATER]
    rows = [
        {**alone, "key": f"{group} {row.key}" if group else row.key, "method": row.method}
        | {"fields": {**alone.get("fields", {}), **row.fields}, "beyond": row.note}
        for group in dict.fromkeys(row.get("group") for row in table.rows)
        for row, beside in beyond
        for alone in table.rows
        if alone.get("group") == group and alone["method"] == beside
    ]
    empty = [[None] * len(table.columns) for _ in rows]
    return dataclasses.replace(table, rows=[*table.rows, *rows], values=[*table.values, *empty])
