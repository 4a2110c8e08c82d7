"""Say of every method what its implementation and its numbers were checked against; read from tests and results."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from reproduction import tables
from reproduction.compare import Comparison
from reproduction.render import number
from tribe import methods

TESTS = Path(__file__).parents[1] / "tests"
HEAD = ("method", "recording of released code", "plain loop", "released number", "published number")
NEVER = "never"
USUAL = ("F 100 inst", "CIFAR10-C inst")  # the columns that are shown where they have a number: GLI-F 100 of CIFAR10-C
OURS = {"bank": "ours", "bank-tribe": "ours"}  # methods without a publication
EQUAL = {"selftrain": "equals `tribe`"}  # in tests/methods/test_selftrain.py


def rows(comparisons: Mapping[str, Comparison]) -> list[list[str]]:
    """Return a row for each registered method; numbers are ours and, in brackets, theirs."""
    recordings, loops = recorded(), looped()
    released = numbers([comparisons["released"]] if "released" in comparisons else [])
    published = numbers([c for name, c in comparisons.items() if name != "released"])
    return [
        [
            f"`{name}`",
            "yes" if name in recordings else "–",
            "yes" if name in loops else EQUAL.get(name, "–"),
            released.get(name, "–"),
            published.get(name, OURS.get(name, NEVER)),
        ]
        for name in methods.names()
    ]


def recorded() -> set[str]:
    """Return the methods that are replayed against recordings of released code."""
    files = _assigned(TESTS / "recordings.py", "RECORDED").values
    pairs = [pair for file in files if isinstance(file, ast.Dict) for pair in file.values]
    return {_text(pair.elts[0]) for pair in pairs if isinstance(pair, ast.Tuple)}


def looped() -> set[str]:
    """Return the methods that equal a plain loop, written from the equations of their papers."""
    return {_text(key) for key in _assigned(TESTS / "methods/test_equations.py", "SETTINGS").keys}


def numbers(comparisons: list[Comparison]) -> dict[str, str]:
    """Return by method the first error that both have, ours and theirs; with its place if it is not of USUAL."""
    found: dict[str, str] = {}
    for name, text in _numbers(comparisons):
        found.setdefault(name, text)
    return found


def _numbers(comparisons: list[Comparison]) -> Iterator[tuple[str, str]]:
    order = sorted(comparisons, key=lambda c: (c.name != "cifar10", c.name))
    for comparison in order:
        table = tables.released() if comparison.name == "released" else tables.get(comparison.name)
        first = [column for column in comparison.columns if column in USUAL]
        for column in [*first, *comparison.columns]:
            for row in comparison.rows:
                entry = comparison.entries[row, column]
                if entry.difference is None or row in comparison.beyond or row in comparison.readings:
                    continue
                if (method := table.cell(row, column).method) is not None:
                    place = "" if column in USUAL else f"{comparison.name}, {column}: "
                    yield method.partition("/")[0], f"{place}{number(entry.ours)} ({number(entry.paper)})"


def _assigned(path: Path, name: str) -> ast.Dict:
    """Return the dictionary that a file assigns to a name; the file is not run."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise ValueError(f"{path} assigns no dictionary to {name}")


def _text(node: ast.expr | None) -> str:
    value = ast.literal_eval(node) if node is not None else None
    return str(value)
