"""Charts of streams and of the errors on them. They need matplotlib, the extra `plots`.

figure = tribe.lab.plots.errors(records)               # per-domain errors of some runs, and the classes they met
figure = tribe.lab.plots.schedule(schedule, labels)    # class counts per domain, local balance over time
tribe.lab.plots.save(figure, "chart.svg")
"""

import io
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tribe.fields import printable
from tribe.lab import metrics
from tribe.lab.record import Record
from tribe.scenarios.schedules import Schedule, class_counts, local_balance
from tribe.storage.atomic import check_file, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colour-blind readers can distinguish them (Okabe and Ito); darkest first.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^v<>pX*"
FORMATS = (".svg", ".png", ".pdf")


def errors(records: Mapping[str, Sequence[Record]], title: str = "") -> "Figure":
    """Instance error per domain of each method, mean over its records, above the classes each domain played.

    Args:
        records: by method, one for each seed; all of the same stream.
        title: of the chart.
    """
    first = next(iter(records.values()))[0]
    figure, (above, below) = _figure((max(6.0, 1.5 + 0.55 * len(first.domains)), 6.4), heights=(3, 2))
    place = range(len(first.domains))
    for i, (name, runs) in enumerate(records.items()):
        error = 100 * torch.stack([metrics.domain_error(record) for record in runs]).nanmean(0)
        mean = 100 * torch.stack([metrics.instance_error(record) for record in runs]).mean()
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
        above.plot(place, error.numpy(), label=plain_label(f"{name}: {mean:.1f} %"), linewidth=1.2, **style)
    above.set(
        ylabel="instance error, %",
        ylim=(0, None),
        xlim=(-0.5, len(place) - 0.5),
        xticks=place,
        title=plain_label(title),
    )
    above.tick_params(labelbottom=False)
    above.grid(axis="y", alpha=0.3)
    above.legend(title="method: all domains", fontsize="small", ncols=2)
    counts = torch.stack([metrics.class_counts(record) for record in next(iter(records.values()))]).double().mean(0)
    _counts(below, counts, first.domains)
    return figure


def schedule(plan: Schedule, labels: Sequence[Tensor], domains: Sequence[str] = (), window: int = 64) -> "Figure":
    """Class counts per domain, and how balanced the classes are in each window of the stream.

    Args:
        plan: the stream.
        labels: one tensor per domain number, see ``Scenario.expand``.
        domains: their names.
        window: images in a window, such as a batch.
    """
    names = tuple(domains) or tuple(str(d) for d in range(len(labels)))
    figure, (above, below) = _figure((max(6.0, 1.5 + 0.55 * len(names)), 6.0), heights=(3, 2))
    _counts(above, class_counts(plan, labels), names)
    balance = local_balance(plan, labels, window)
    below.plot(window * torch.arange(len(balance)).numpy(), balance.numpy(), color=COLOURS[1], linewidth=0.8)
    starts = torch.cat((torch.ones(1, dtype=torch.bool), plan.domain.diff() != 0)).nonzero().flatten()
    if len(starts) <= 4 * len(names):  # a mixed stream changes its domain all the time
        for start in starts.tolist():
            below.axvline(start, color="#999999", linewidth=0.5)
    below.set(xlabel="image of the stream", ylabel=f"balance in {window}", ylim=(0, 1.02), xlim=(0, len(plan.index)))
    return figure


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


def _figure(size: tuple[float, float], heights: tuple[float, float]) -> tuple["Figure", Any]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("charts need matplotlib: pip install 'tribe-tta[plots]'", name=error.name) from error
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(2, 1, height_ratios=heights)


def _counts(axes: Any, counts: Tensor, domains: Sequence[str]) -> None:
    """A map of class counts (D, K): domains across, classes upwards; darker is more."""
    shown = axes.imshow(counts.T.log1p().numpy(), aspect="auto", cmap="Greys", vmin=0, origin="lower")
    ticks = [t for t in (1, 10, 100, 1000, 10000) if t <= max(float(counts.max()), 1.0)]
    bar = axes.figure.colorbar(shown, ax=axes, ticks=torch.tensor(ticks).log1p().tolist(), label="images")
    bar.ax.set_yticklabels([str(t) for t in ticks])
    axes.set(ylabel="class", xticks=range(len(domains)))
    if counts.shape[1] <= 20:
        axes.set_yticks(range(counts.shape[1]))
    axes.set_xticklabels([plain_label(name) for name in domains], rotation=40, ha="right", fontsize="small")
