"""A comparison as a picture: ours as lines or bars, the paper's as hollow marks of the same colour."""

from typing import TYPE_CHECKING, Any

from tribe.lab.plots import COLOURS, MARKERS
from tribe.paper.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 12  # rows beyond which a legend says nothing


def chart(comparison: Comparison) -> "Figure":
    """Rows as lines over the columns, or, with one column, as bars. Category errors are left to the table."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("charts need matplotlib: pip install 'tribe-tta[plots]'", name=error.name) from error
    columns = [c for c in comparison.columns if not c.endswith((" cat", "Cat.Avg.")) and _numbers(comparison, c)]
    if not columns:
        raise ValueError(f"there is nothing to draw of {comparison.name} yet: it holds no numbers")
    units = {comparison.entries[comparison.rows[0], column].unit for column in columns}
    if len(units) > 1:  # say errors and seconds
        columns = [c for c in columns if comparison.entries[comparison.rows[0], c].unit == "%"]
    if comparison.entries[comparison.rows[0], columns[0]].unit == "images":
        return _over_classes(comparison, columns, Figure(figsize=(7, 4), layout="constrained"))
    figure = Figure(figsize=(max(6.0, 2 + 0.6 * len(columns)), 4.8), layout="constrained")
    axes = figure.subplots()
    if len(columns) == 1:
        _bars(axes, comparison, columns[0])
    else:
        _lines(axes, comparison, columns)
    axes.set_title(comparison.title, fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    return figure


def _numbers(comparison: Comparison, column: str) -> bool:
    return any(isinstance(comparison.entries[row, column].ours, float) for row in comparison.rows)


def _lines(axes: Any, comparison: Comparison, columns: list[str]) -> None:
    for i, row in enumerate(comparison.rows):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
        entries = [comparison.entries[row, column] for column in columns]
        axes.plot(range(len(columns)), [_value(e.ours) for e in entries], label=row, linewidth=1.2, **style)
        hollow = {**style, "markerfacecolor": "none", "linestyle": "none"}
        axes.plot(range(len(columns)), [_value(e.paper) for e in entries], **hollow)
    axes.set(ylabel="error, % (hollow: paper)", ylim=(0, None), xticks=range(len(columns)))
    axes.set_xticklabels(columns, rotation=40, ha="right", fontsize="small")
    if len(comparison.rows) <= FEW:
        axes.legend(fontsize="small", ncols=2)


def _bars(axes: Any, comparison: Comparison, column: str) -> None:
    entries = [comparison.entries[row, column] for row in comparison.rows]
    place = range(len(entries))
    axes.bar(place, [_value(e.ours) for e in entries], color=COLOURS[1], label="ours")
    axes.plot(place, [_value(e.paper) for e in entries], "o", color="black", markerfacecolor="none", label="paper")
    axes.set(ylabel="error, %", ylim=(0, None), xticks=place)
    axes.set_xticklabels(comparison.rows, rotation=40, ha="right", fontsize="small")
    axes.legend(fontsize="small")


def _over_classes(comparison: Comparison, columns: list[str], figure: "Figure") -> "Figure":
    axes = figure.subplots()
    for i, column in enumerate(columns):
        images = [_value(comparison.entries[row, column].ours) for row in comparison.rows]
        axes.plot(range(len(images)), images, color=COLOURS[i % len(COLOURS)], label=f"imbalance {column}")
    axes.set(xlabel="class", ylabel="images in a domain", ylim=(0, None), title=comparison.title)
    axes.legend(fontsize="small")
    return figure


def _value(value: object) -> float:
    return value if isinstance(value, float) else float("nan")
