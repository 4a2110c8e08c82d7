"""Charts of streams and of the errors on them. They need matplotlib, the extra `plots`.

tribe.experiments.plots.save(tribe.experiments.plots.errors(records), "chart.svg")
"""

import io
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tribe.data.scenarios.schedules import Schedule, class_counts, local_balance
from tribe.experiments import metrics
from tribe.experiments.record import Record
from tribe.fields import printable
from tribe.io.files import check_file, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colour-blind readers can distinguish them (Okabe and Ito); darkest first.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^v<>pX*"
MARKS = ("#D55E00", "#CC79A7")
MOST_CELLS = 400  # of a map whose cells show their numbers
INSIDE = 4  # methods that a legend inside of a chart names; more would hide lines
WINDOW = 64  # images of a stream whose balance is one point
COSTS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100)  # that an axis names
FORMATS = (".svg", ".png", ".pdf")
NEEDS = "charts need matplotlib: pip install 'tribe-tta[plots]'"


def errors(records: Mapping[str, Sequence[Record]], title: str = "") -> "Figure":
    """Draw the error per domain of each method, mean over its records, above the classes that each domain played."""
    first = next(iter(records.values()))[0]
    figure, (above, below) = _panels((max(6.0, 1.5 + 0.55 * len(first.domains)), 6.4), heights=(3, 2))
    place = range(len(first.domains))
    for i, (name, runs) in enumerate(records.items()):
        error = 100 * torch.stack([metrics.domain_error(record) for record in runs]).nanmean(0)
        mean = 100 * torch.stack([metrics.instance_error(record) for record in runs]).mean()
        above.plot(place, error.numpy(), label=plain_label(f"{name}: {mean:.1f} %"), **line_style(i))
    above.set(ylabel="instance error, %", ylim=(0, None), xlim=(-0.5, len(place) - 0.5), xticks=place)
    above.set_title(plain_label(title))
    above.tick_params(labelbottom=False)
    above.grid(axis="y", alpha=0.3)
    place_of = {"loc": "outside upper center", "ncols": 4} if len(records) > INSIDE else {"ncols": 2}
    (figure if len(records) > INSIDE else above).legend(title="method: all domains", fontsize="small", **place_of)
    counts = torch.stack([metrics.class_counts(record) for record in next(iter(records.values()))]).double().mean(0)
    _counts(below, counts, first.domains)
    return figure


def schedule(plan: Schedule, labels: Sequence[Tensor], domains: Sequence[str]) -> "Figure":
    """Draw class counts per domain, and how balanced the classes are in each window of the stream."""
    figure, (above, below) = _panels((max(6.0, 1.5 + 0.55 * len(domains)), 6.0), heights=(3, 2))
    _counts(above, class_counts(plan, labels), domains)
    balance = local_balance(plan, labels, WINDOW)
    below.plot(WINDOW * torch.arange(len(balance)).numpy(), balance.numpy(), color=COLOURS[1], linewidth=0.8)
    starts = torch.cat((torch.ones(1, dtype=torch.bool), plan.domain.diff() != 0)).nonzero().flatten()
    if len(starts) <= 4 * len(domains):  # a mixed stream changes its domain all the time
        for start in starts.tolist():
            below.axvline(start, color="#999999", linewidth=0.5)
    below.set(xlabel="image of the stream", ylabel=f"balance in {WINDOW}", ylim=(0, 1.02), xlim=(0, len(plan.index)))
    return figure


def error_against_cost(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> "Figure":
    """Draw error in % against cost in multiples of plain inference: a panel each, a line for each method.

    A line joins the points (cost, error) of a method: its budgets. Lower left is better.
    """
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    rows = 1 + (len(panels) > 3)
    columns = max(1, math.ceil(len(panels) / rows))
    figure, drawn = _panels((1.0 + 3.4 * columns, 1.2 + 3.0 * rows), (1,) * rows, columns=columns)
    for axes in drawn[len(panels) :]:
        axes.remove()
    for axes, (title, lines) in zip(drawn, panels.items(), strict=False):
        for name, points in lines.items():
            cost, error = zip(*sorted(points), strict=True)
            axes.plot(cost, error, label=plain_label(name), **line_style(names.index(name)))
        axes.set(title=plain_label(title), xlabel="cost, x plain inference", ylabel="instance error, %", xscale="log")
        spread = [cost for points in lines.values() for cost, _ in points]
        ticks = [tick for tick in COSTS if min(spread) <= 1.1 * tick and tick <= 1.1 * max(spread)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    if panels:
        labels = {
            label: handle for axes in drawn for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, fontsize="small")
    return figure


def heat_maps(
    maps: Mapping[str, Tensor],
    across: Sequence[str],
    downwards: Sequence[str],
    names: tuple[str, str],
    marks: Mapping[str, tuple[int, int]],
) -> "Figure":
    """Draw tables of numbers as maps, side by side; NaN stays white, and ``marks`` put a frame around cells."""
    wide = max(3.2, 1.4 + max(0.75, 0.09 * max(map(len, across))) * len(across))
    size = (wide * max(len(maps), 1) + 0.08 * max(map(len, downwards)), max(2.4, 1.6 + 0.42 * len(downwards)))
    figure, panels = _panels(size, (1,), columns=max(len(maps), 1))
    from matplotlib.patches import Rectangle

    for axes, (title, numbers) in zip(panels, maps.items(), strict=False):
        shown = axes.imshow(numbers.numpy(), aspect="auto", cmap="viridis")
        axes.figure.colorbar(shown, ax=axes)
        _cell_numbers(axes, numbers)
        for i, (name, (row, column)) in enumerate(marks.items()):
            inset = 0.42 - 0.07 * i  # a cell may have two frames
            frame = Rectangle((column - inset, row - inset), 2 * inset, 2 * inset, fill=False, linewidth=2.2)
            frame.set(edgecolor=MARKS[i % len(MARKS)], label=plain_label(name))
            axes.add_patch(frame)
        axes.set(title=plain_label(title), xlabel=plain_label(names[0]), ylabel=plain_label(names[1]))
        name_columns(axes, across)
        axes.set_yticks(range(len(downwards)), [plain_label(text) for text in downwards], fontsize="small")
    if marks and maps:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _cell_numbers(axes: Any, numbers: Tensor) -> None:
    """Write the number into each cell, if there is room for it."""
    known = numbers[~numbers.isnan()]
    if numbers.numel() > MOST_CELLS or not len(known):
        return
    middle, digits = (known.min() + known.max()) / 2, 2 if known.abs().max() >= 2 else 4
    for row, column in (~numbers.isnan()).nonzero().tolist():
        value = float(numbers[row, column])
        colour = "black" if value > middle else "white"  # viridis ends in a bright yellow
        axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize="x-small", color=colour)


def check_path(path: str | PathLike[str]) -> None:
    """Raise an error if a chart cannot be written to this path: before the work, not after it."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"a chart ends in {', '.join(FORMATS)}; got {path}")
    check_file(path)


def save(figure: "Figure", path: str | PathLike[str]) -> None:
    """Write a chart, atomically; the ending decides the format."""
    check_path(path)
    from matplotlib import rc_context

    ending = Path(path).suffix.lower()
    buffer = io.BytesIO()
    still = {"Creator": None, "Date": None} if ending == ".svg" else None  # the same bytes for the same picture
    with rc_context({"svg.hashsalt": "tribe", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=ending[1:], metadata=still, dpi=150)
    write_atomically(path, buffer.getvalue())


def plain_label(text: str) -> str:
    r"""Text as matplotlib draws it as it is: a pair of dollars would make it a formula.

    >>> print(plain_label("fog, 5 $"))
    fog, 5 \$
    """
    return printable(text).replace("$", r"\$")


def new_figure(size: tuple[float, float], layout: str | None = "constrained", needs: str = NEEDS) -> "Figure":
    """Return an empty figure; ``needs`` is the error message without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs, name=error.name) from error
    return Figure(figsize=size, layout=layout)  # type: ignore[arg-type]


def line_style(number: int) -> dict[str, Any]:
    """Return the colour, marker and width of a line."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2}


def name_columns(axes: Any, names: Sequence[str], step: int = 1) -> None:
    """Name every ``step``-th column below the axes."""
    shown = [plain_label(name) for name in names[::step]]
    axes.set_xticks(range(0, len(names), step), shown, rotation=40, ha="right", fontsize="small")


def _panels(size: tuple[float, float], heights: Sequence[float], columns: int = 1) -> tuple["Figure", Any]:
    """Return a figure, and its panels: one for each height, or as many columns."""
    figure = new_figure(size)
    return figure, figure.subplots(len(heights), columns, height_ratios=heights, squeeze=False).flatten()


def _counts(axes: Any, counts: Tensor, domains: Sequence[str]) -> None:
    """A map of class counts (D, K): domains across, classes upwards; darker is more."""
    shown = axes.imshow(counts.T.log1p().numpy(), aspect="auto", cmap="Greys", vmin=0, origin="lower")
    ticks = [t for t in (1, 10, 100, 1000, 10000) if t <= max(float(counts.max()), 1.0)]
    bar = axes.figure.colorbar(shown, ax=axes, ticks=torch.tensor(ticks).log1p().tolist(), label="images")
    bar.ax.set_yticklabels([str(t) for t in ticks])
    axes.set(ylabel="class")
    name_columns(axes, domains)
    if counts.shape[1] <= 20:
        axes.set_yticks(range(counts.shape[1]))
