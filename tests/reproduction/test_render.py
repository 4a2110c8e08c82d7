"""A comparison in each format holds the same numbers."""

import csv
import io
from pathlib import Path

import pytest

from reproduce_helpers import call
from reproduction import render
from reproduction.beyond import MARK
from reproduction.compare import READING

pytestmark = [pytest.mark.usefixtures("nowhere"), pytest.mark.filterwarnings("ignore:an imbalance of")]


def test_formats_hold_the_same_numbers(played):
    options, _, parsed = played
    cells = {(cell["row"], cell["column"]): cell for cell in parsed["cells"]}
    ours, spread = cells["BN", "error"]["ours"], cells["BN", "error"]["deviation"]
    beside = f"{ours:.2f} ± {spread:.2f} (70.00, {ours - 70:+.2f})"
    markdown = call(*options, "--format", "markdown").stdout
    assert beside in markdown.replace("*", "")
    best = min(("TEST", "BN", "pl"), key=lambda row: cells[row, "error"]["ours"])
    assert f"| {best} | **{cells[best, 'error']['ours']:.2f} ±" in markdown
    latex = call(*options, "--format", "latex").stdout
    assert beside.replace("±", r"$\pm$") in latex.replace(r"\textbf{", "").replace("}", "")
    assert r"\textbf{" in latex
    rows = list(csv.DictReader(io.StringIO(call(*options, "--format", "csv").stdout)))
    assert [(r["row"], r["column"]) for r in rows] == list(cells)
    assert float(rows[2]["ours"]) == ours
    assert rows[4]["paper"] == ""
    table = call(*options).stdout
    for word in ("TEST", f"{ours:.2f}", "70.00", f"{ours - 70:+.2f}", "the paper says", "tab:wall_clock"):
        assert word in table
    assert call(*options, "--format", "markdown", "--out", "out.md").stdout == ""
    assert Path("out.md").read_text() == markdown
    call(*options, "--out", "out.txt")
    assert f"{ours:.2f}" in Path("out.txt").read_text()


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_plot_writes_a_chart(played, ending):
    pytest.importorskip("matplotlib")
    options, _, _ = played
    assert call(*options, "--plot", f"chart{ending}").exit_code == 0
    content = Path(f"chart{ending}").read_bytes()
    assert content.startswith(b"\x89PNG") if ending == ".png" else (b"pl</text>" in content and b"paper" in content)


def test_marks_of_rows_are_commands_in_latex():
    """A compiler that knows no such characters would leave them out, or stop."""
    assert render.as_latex(f"COFA {MARK}, MT* {READING}") == r"COFA $^\dagger$, MT* $^\ddagger$"
