"""Draw a comparison: ours as lines or bars, the paper's as hollow marks of the same colour.

Rows beyond the paper are dashed or hatched, and drawn only if they have numbers.
"""

from typing import TYPE_CHECKING, Any

from reproduction.beyond import MARK
from reproduction.compare import Comparison
from reproduction.tables import Value
from tribe.experiments.plots import COLOURS, line_style, name_columns, new_figure, plain_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND_ROWS = 17  # with more rows there is no legend


def draw_chart(comparison: Comparison) -> "Figure":
    """Draw rows as lines over the columns or, if there is one column, as bars. Category errors are left out."""
    columns = [c for c in comparison.columns if not c.endswith((" cat", "Cat.Avg.")) and _has_numbers(comparison, c)]
    if not columns:
        raise ValueError(f"there is nothing to draw of {comparison.name} yet: it holds no numbers")
    units = {column: comparison.entries[comparison.rows[0], column].unit for column in columns}
    if len(set(units.values())) > 1:  # errors and seconds
        columns = [column for column in columns if units[column] == "%"]
    rows = [row for row in comparison.rows if row not in comparison.beyond or _drawn(comparison, row, columns)]
    figure = new_figure((max(6.0, 2 + 0.6 * len(columns)), 4.8))
    axes = figure.subplots()
    if units[columns[0]] == "images":
        _class_lines(axes, comparison, columns)
    elif len(columns) == 1:
        _bars(axes, comparison, rows, columns[0])
    else:
        _lines(axes, comparison, rows, columns)
    axes.set_title(plain_label(comparison.title), fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    if any(row in comparison.beyond for row in rows):
        figure.supxlabel(f"{MARK} beyond the paper", fontsize="small")
    if len(rows) <= LEGEND_ROWS or units[columns[0]] == "images":
        figure.legend(fontsize="small", loc="outside right upper")
    return figure


def _has_numbers(comparison: Comparison, column: str) -> bool:
    return any(isinstance(comparison.entries[row, column].ours, float) for row in comparison.rows)


def _drawn(comparison: Comparison, row: str, columns: list[str]) -> bool:
    return any(isinstance(comparison.entries[row, column].ours, float) for column in columns)


def _lines(axes: Any, comparison: Comparison, rows: list[str], columns: list[str]) -> None:
    for i, row in enumerate(rows):
        style = line_style(i)
        line = {"label": plain_label(comparison.name_of(row)), "linestyle": "--" if row in comparison.beyond else "-"}
        entries = [comparison.entries[row, column] for column in columns]
        axes.plot(range(len(columns)), [_value(e.ours) for e in entries], **line, **style)
        hollow = {**style, "markerfacecolor": "none", "linestyle": "none"}
        axes.plot(range(len(columns)), [_value(e.paper) for e in entries], **hollow)
    axes.set(ylabel="error, % (hollow: paper)", ylim=(0, None))
    name_columns(axes, columns)


def _bars(axes: Any, comparison: Comparison, rows: list[str], column: str) -> None:
    entries, place = [comparison.entries[row, column] for row in rows], range(len(rows))
    hatches = ["//" if row in comparison.beyond else "" for row in rows]
    axes.bar(place, [_value(e.ours) for e in entries], color=COLOURS[1], edgecolor="white", hatch=hatches, label="ours")
    axes.plot(place, [_value(e.paper) for e in entries], "o", color="black", markerfacecolor="none", label="paper")
    axes.set(ylabel="error, %", ylim=(0, None))
    name_columns(axes, [comparison.name_of(row) for row in rows])


def _class_lines(axes: Any, comparison: Comparison, columns: list[str]) -> None:
    for i, column in enumerate(columns):
        images = [_value(comparison.entries[row, column].ours) for row in comparison.rows]
        axes.plot(range(len(images)), images, color=COLOURS[i % len(COLOURS)], label=plain_label(f"imbalance {column}"))
    axes.set(xlabel="class", ylabel="images in a domain", ylim=(0, None))


def _value(value: Value) -> float:
    return value if isinstance(value, float) else float("nan")
