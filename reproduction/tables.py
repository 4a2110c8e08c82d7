"""The paper's tables as data: every number, with the experiment that it was measured in.

    table = reproduction.tables.get("cifar10")      # or by its label in the paper, "tab:global_imbalance_cifar10"
    table.value("TRIBE", "F 100 inst")             # 19.53
    table.cell("TRIBE", "F 100 inst")              # its data set, network, scenario, method and metric

Each table is one file, ``data/<name>.json``. The fields of a cell come from the table (``common``), its column and its
row, in this order. Numbers are percent where no unit is given. The paper: Su et al., Towards Real-World Test-Time
Adaptation: Tri-net Self-Training with Balanced Normalization, AAAI 2024. `released` has the same cells, with the
numbers of the code that the authors released.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tribe.registry import nearest

FOLDER = Path(__file__).parent / "data"
NESTED = ("dataset_fields", "scenario_fields", "fields")  # merged field by field from table, column and row

Value = float | str | None  # a number, a word, or None: the paper shows a figure without numbers


@dataclass(frozen=True)
class Cell:
    """The experiment behind a number, and the metric that is read from its result."""

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
    mean_of: Sequence[str] = ()  # the columns whose mean this is


@dataclass(frozen=True)
class Table:
    """A table of the paper, or a figure as the table of the numbers that it shows."""

    name: str
    label: str  # in the paper's LaTeX
    kind: str  # "table" or "figure"
    where: str  # "main" or "supplement"
    title: str
    notes: Sequence[str]
    common: Mapping[str, Any]
    columns: Sequence[Mapping[str, Any]]  # a "key", an optional "group", and fields of Cell
    rows: Sequence[Mapping[str, Any]]
    values: Sequence[Sequence[Value]]
    theirs: str = "paper"  # who published the numbers
    images: int | None = None  # of each domain, where they play a part of the data set
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # fields of methods whose values a note says

    @property
    def row_keys(self) -> list[str]:
        """The names of the rows."""
        return [row["key"] for row in self.rows]

    @property
    def column_keys(self) -> list[str]:
        """The names of the columns."""
        return [column["key"] for column in self.columns]

    @property
    def beyond(self) -> dict[str, str]:
        """The rows that `reproduction.beyond` added, and what they are."""
        return {row["key"]: row["beyond"] for row in self.rows if "beyond" in row}

    @property
    def readings(self) -> dict[str, str]:
        """The rows that the paper leaves open, and what it does not say: they show our reading of it."""
        return {row["key"]: row["reading"] for row in self.rows if "reading" in row}

    def value(self, row: str, column: str) -> Value:
        """Return the published number."""
        return self.values[_position(row, self.row_keys, "row")][_position(column, self.column_keys, "column")]

    def cell(self, row: str, column: str) -> Cell:
        """Return the experiment and the metric behind a number."""
        merged: dict[str, Any] = {}
        for fields in (
            self.common,
            self.columns[_position(column, self.column_keys, "column")],
            self.rows[_position(row, self.row_keys, "row")],
        ):
            merged |= {k: {**merged.get(k, {}), **v} if k in NESTED else v for k, v in fields.items()}
        return Cell(**{field.name: merged[field.name] for field in dataclasses.fields(Cell) if field.name in merged})

    @cached_property
    def cells(self) -> dict[tuple[str, str], Cell]:
        """All cells, by the keys of row and column."""
        return {(row, column): self.cell(row, column) for row in self.row_keys for column in self.column_keys}

    def select(self, rows: Sequence[int], columns: Sequence[int]) -> "Table":
        """Return the table with these rows and columns only."""
        return dataclasses.replace(
            self,
            rows=[self.rows[i] for i in rows],
            columns=[self.columns[i] for i in columns],
            values=[[self.values[i][j] for j in columns] for i in rows],
        )


def names() -> list[str]:
    """Return the names of all tables and figures, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def get(name: str) -> Table:
    """Return a table by its name, or by its label in the paper."""
    if name not in names():
        for other in names():
            if get(other).label == name:
                return get(other)
        raise ValueError(f"the paper has no table or figure {name!r}: {nearest(name, names())}")
    return _read(FOLDER / f"{name}.json")


def all_tables() -> list[Table]:
    """Return all tables and figures: the main text first, tables before figures."""
    return sorted((get(name) for name in names()), key=lambda t: (t.where, t.kind != "table", t.name))


@cache
def released() -> Table:
    """Return the errors of the code that the paper's authors released, in place of the paper's."""
    return _read(Path(__file__).with_name("released.json"))


def matching(patterns: str | Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the keys that match a pattern such as "100 *", or one of several."""
    wanted = [patterns] if isinstance(patterns, str) else patterns
    return [key for key in keys if any(key == p or fnmatch.fnmatchcase(key, p) for p in wanted)]


def _read(path: Path) -> Table:
    return Table(**json.loads(path.read_text()))


def _position(key: str, keys: Sequence[str], kind: str) -> int:
    if key not in keys:
        raise ValueError(f"there is no {kind} {key!r}: {nearest(key, keys)}")
    return keys.index(key)
