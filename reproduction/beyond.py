"""Rows beyond the paper, below its own rows in its tables of methods: time filters, and methods that it lacks.

    table = extend(tables.get("cifar10"))          # with the rows "TRIBE + time", "RoTTA + time", "COFA" and the like
    table.cell("TRIBE + time", "F 100 inst")       # as TRIBE's cell, with the method "tribe+time"
    extend(tables.get("cifar10"), later=True)      # and with the rows "DeYO", "SAR" and the like

The paper has no numbers for them, and its claims are judged without them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from reproduction.tables import Table

MARK = "†"  # of rows beyond the paper, wherever they are shown
FILTER = "“+ time”: a hidden Markov model over classes filters the predictions (docs/time.md)."


class RowBeyond(NamedTuple):
    """A method beyond the paper. It has a row wherever the paper has one of the method that it is compared with."""

    key: str
    method: str
    note: str  # what it is, for a footnote
    fields: Mapping[str, Any] = {}
    beside: str = "source"  # the method that it is compared with


ROWS = (
    RowBeyond("TRIBE + time", "tribe+time", FILTER, beside="tribe"),
    RowBeyond(
        "TRIBE + time within the batch",
        "tribe+time",
        "“within the batch”: also with the later images of the same batch.",
        {"within": "batch"},
        beside="tribe",
    ),
    RowBeyond("RoTTA + time", "rotta+time", FILTER, beside="rotta"),
    RowBeyond("TEST + time", "source+time", FILTER),
    RowBeyond(
        "COFA",
        "tribe+cofa",
        "“COFA” (UniTTA, 2024): TRIBE's logits, averaged with those of the image before where this is more confident.",
        beside="tribe",
    ),
)
LATER = tuple(
    RowBeyond(key, method, f"“{key}” ({venue}) is not in the paper's tables: docs/methods.md.", fields)
    for key, method, venue, fields in (
        ("EATA", "eata", "ICML 2022", {"fisher": "sum"}),
        ("SAR", "sar", "ICLR 2023", {"frozen_tail": 0.25}),  # as it was played; its preset now freezes no layer
        ("DELTA", "delta", "ICLR 2023", {}),
        ("SoTTA", "sotta", "NeurIPS 2023", {}),
        ("ROID", "roid", "WACV 2024", {}),
        ("CMF", "cmf", "ICLR 2024", {}),
        ("DeYO", "deyo", "ICLR 2024", {}),
        ("PeTTA", "petta", "NeurIPS 2024", {}),
        ("BDN", "bdn", "UniTTA, 2024", {}),
    )
)
OF_ALL_METHODS = (  # tables with a row for each method of the paper
    *("cifar10", "cifar10-fixed", "cifar10-varying", "cifar10-ptta"),
    *("cifar100", "cifar100-fixed", "cifar100-varying", "cifar100-ptta"),
    *("mnist", "imagenet"),
)
TABLES = (*OF_ALL_METHODS, "domains", "gradual", "imbalance", "local-imbalance")


def extend(table: Table, later: bool = False) -> Table:
    """Return the table with the rows beyond the paper at its end; a table that has none is returned as it is.

    Args:
        table: a table of the paper.
        later: add the rows of methods that the paper's tables lack, too.
    """
    if table.name not in TABLES:
        return table
    beyond = [*ROWS, *(LATER if later and table.name in OF_ALL_METHODS else ())]
    rows = [
        {**alone, "key": f"{group} {row.key}" if group else row.key, "method": row.method}
        | {"fields": {**alone.get("fields", {}), **row.fields}, "beyond": row.note}
        for group in dict.fromkeys(row.get("group") for row in table.rows)
        for row in beyond
        for alone in table.rows
        if alone.get("group") == group and alone["method"] == row.beside
    ]
    empty = [[None] * len(table.columns) for _ in rows]
    return dataclasses.replace(table, rows=[*table.rows, *rows], values=[*table.values, *empty])
