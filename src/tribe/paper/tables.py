"""The paper's numbers as data: every table, with the experiment behind each cell, and what its sentences claim of them.

    table = tribe.paper.tables.get("cifar10")      # or by its label in the paper, "tab:global_imbalance_cifar10"
    table.value("TRIBE", "F 100 inst")             # 19.53
    table.cell("TRIBE", "F 100 inst")              # the data set, network, scenario, method and metric that it is of

A table is one file, ``data/<name>.json``: rows and columns with their keys, and what they say of their cells; a cell
is what table (``common``), column and row say together. Su et al., Towards Real-World Test-Time Adaptation: Tri-net
Self-Training with Balanced Normalization, AAAI 2024; numbers are percent where no unit is given.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tribe.registry import nearest

FOLDER = Path(__file__).parent / "data"
NESTED = ("dataset_fields", "scenario_fields", "fields")  # parts of a cell to which table, column and row each add

Value = float | str | None  # a number, a word, or nothing: a figure of which the paper gives no numbers


@dataclass(frozen=True)
class Cell:
    """What a number is of: an experiment, and what is looked at in its result."""

    dataset: str | None = None  # None: no data are needed
    dataset_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str | None = None
    scenario: str | None = None
    scenario_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | None = None  # None: nothing is run
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the method; {"per_class": x} is x times K
    scale: Mapping[str, float] = dataclasses.field(default_factory=dict)  # factors on such fields
    metric: str | None = None
    domain: str | None = None  # of "domain_error"
    unit: str = "%"
    property: str | None = None  # of "protocol"
    number: int | None = None  # the class, of "class_count"
    mean_of: Sequence[str] = ()  # columns of which this is the mean


@dataclass(frozen=True)
class Table:
    """A table of the paper, or a figure as the table of what it shows."""

    name: str
    label: str  # in the paper's source
    kind: str  # "table" or "figure"
    where: str  # "main" or "supplement"
    title: str
    notes: Sequence[str]
    common: Mapping[str, Any]
    columns: Sequence[Mapping[str, Any]]  # with a "key", perhaps a "group", and fields of Cell
    rows: Sequence[Mapping[str, Any]]
    values: Sequence[Sequence[Value]]
    theirs: str = "paper"  # whose numbers they are

    @property
    def row_keys(self) -> list[str]:
        """The names of the rows."""
        return [row["key"] for row in self.rows]

    @property
    def column_keys(self) -> list[str]:
        """The names of the columns."""
        return [column["key"] for column in self.columns]

    def value(self, row: str, column: str) -> Value:
        """What the paper says."""
        return self.values[_place(row, self.row_keys, "row")][_place(column, self.column_keys, "column")]

    def cell(self, row: str, column: str) -> Cell:
        """What it says it of."""
        said = [
            self.common,
            self.columns[_place(column, self.column_keys, "column")],
            self.rows[_place(row, self.row_keys, "row")],
        ]
        merged: dict[str, Any] = {}
        for part in said:
            merged |= {k: {**merged.get(k, {}), **v} if k in NESTED else v for k, v in part.items()}
        known = {field.name for field in dataclasses.fields(Cell)}
        return Cell(**{name: value for name, value in merged.items() if name in known})


def names() -> list[str]:
    """The names of all tables and figures, the paper's order aside."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def get(name: str) -> Table:
    """A table by its name, or by its label in the paper."""
    if name not in names():
        for other in names():
            if get(other).label == name:
                return get(other)
        raise ValueError(f"the paper has no table or figure {name!r}: {nearest(name, names())}")
    return Table(**json.loads((FOLDER / f"{name}.json").read_text()))


def _place(key: str, keys: Sequence[str], what: str) -> int:
    if key not in keys:
        raise ValueError(f"there is no {what} {key!r}: {nearest(key, keys)}")
    return keys.index(key)
