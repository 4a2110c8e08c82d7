"""The charts of a report, drawn by matplotlib as SVG that takes its colours from the page.

Colours of the page differ between light and dark mode, so a chart is drawn in stand-ins, which are replaced by the
variables of the page's style. Lines and marks of a method have its class, so that the page can hide them.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tribe.experiments import metrics
from tribe.experiments.plots import name_columns, new_figure, plain_label
from tribe.experiments.record import Record
from tribe.experiments.report.groups import CALIBRATION, COST, INSTANCE, MethodRow, PlayedStream, ResultGroup
from tribe.fields import printable

if TYPE_CHECKING:
    from markupsafe import Markup

POINTS = 160  # of a curve over time: more cannot be seen on a screen
WINDOW = 500  # images over which the error over time is averaged, at most
BINS = 15  # of confidence, as in metrics.calibration_error
FEWEST = 20  # images in a bin that is drawn
MOST_NAMES = 16  # domains named on an axis
MOST_BORDERS = 60  # starts of domains that are drawn
MOST_CELLS = 100  # columns of a map of classes; with more classes, neighbours share a cell
SIZE = (6.0, 3.4)  # inches
NEEDS = "a report needs matplotlib: pip install 'tribe-tta[report]'"
HUES = 8  # colours of methods in the style of the page
MARKERS, DASHES = "osD^vP*X", ("-", "--", ":", "-.")
TEXT, GRID, TINT = "#fd0000", "#fd0100", (0.36, 0.56, 0.88)
VARIABLES = {TEXT: "var(--soft)", GRID: "var(--rule)", **{f"#fe{i:02x}00": f"var(--c{i})" for i in range(HUES)}}
UNUSED = re.compile(r'<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>| id="[A-Za-z0-9.]*_\d+"', re.S)

Series = Mapping[str, int]  # label of a row -> number of its colour and marker


class Chart(NamedTuple):
    """A chart and its numbers."""

    title: str
    caption: str
    picture: "Markup"
    legend: Mapping[str, str] = {}  # the text of each method
    head: Sequence[str] = ()  # of the table of its numbers
    rows: Sequence[Sequence[str]] = ()


def swatch(series: int) -> Mapping[str, Any]:
    """Return the colour, dash and marker of a method, as matplotlib takes them."""
    return {
        "color": f"#fe{series % HUES:02x}00",
        "linestyle": DASHES[series // HUES % len(DASHES)],
        "marker": MARKERS[(series + series // HUES) % len(MARKERS)],
    }


def domain_errors(group: ResultGroup, rows: Sequence[MethodRow], series: Series) -> Chart:
    """Draw the instance error in each domain."""
    errors = {row.label: _mean([_domain_errors(played) for played in row.labelled]) for row in rows}
    figure, axes = _axes("domain", "instance error, %", fitted=True)
    for label, values in errors.items():
        _curve(axes, range(len(values)), values, series[label], markers=True)
    name_columns(axes, group.domains, math.ceil(len(group.domains) / MOST_NAMES))
    axes.set_ylim(bottom=0)
    caption = "Instance error in each domain, mean over seeds."
    table = ("domain", *errors), _lines(group.domains, errors)
    return _chart(figure, group, "Error per domain", caption, {label: label for label in errors}, table)


def error_over_time(group: ResultGroup, rows: Sequence[MethodRow], series: Series) -> Chart:
    """Draw the prequential curve: the error over the last images, along the stream."""
    records = [record for row in rows for record in row.judged]
    length = min(int((record.label >= 0).sum()) for record in records)
    window = max(1, min(WINDOW, length // 10))
    places = torch.linspace(window - 1, length - 1, POINTS).long().unique()
    curves = {row.label: _mean(100 * metrics.online_error(r, window)[places] for r in row.judged) for row in rows}
    figure, axes = _axes("image of the stream", "instance error, %")
    borders = [border for border in _borders(records) if border <= length]
    for border in borders:
        axes.axvline(border, color=GRID, linewidth=0.8)
    for label, curve in curves.items():
        _curve(axes, (places + 1).tolist(), curve, series[label])
    axes.set_ylim(bottom=0)
    caption = f"Prequential: the error over the last {window} images, mean over seeds."
    caption += " A vertical line marks the start of a domain." if borders else ""
    legend = {label: label for label in curves}
    return _chart(figure, group, "Error over time", caption, legend)


def calibration(group: ResultGroup, rows: Sequence[MethodRow], series: Series) -> Chart:
    """Draw the reliability diagram: accuracy against confidence."""
    bins = {row.label: _reliability(row.judged) for row in rows}
    figure, axes = _axes("confidence, %", "accuracy, %")
    axes.plot((0, 100), (0, 100), color=GRID, linestyle="--", linewidth=1)
    for label, values in bins.items():
        full = [(sure, right) for sure, right, count in values if count >= FEWEST]
        _curve(axes, [sure for sure, _ in full], [right for _, right in full], series[label], markers=True)
    edges = [f"{100 * i / BINS:.0f} to {100 * (i + 1) / BINS:.0f} %" for i in range(BINS)]
    cells = {label: [f"{right:.0f} % of {n:,}" if n else "–" for _, right, n in found] for label, found in bins.items()}
    caption = "Accuracy of predictions by confidence: on the dashed line they are equal. "
    caption += f"Bins of fewer than {FEWEST} images are not drawn."
    scores = {row.label: row.score(CALIBRATION) for row in rows}
    legend = {label: f"{label}: ECE {s if math.isfinite(s.mean) else '–'} %" for label, s in scores.items()}
    body = [(edge, *(cells[label][i] for label in cells)) for i, edge in enumerate(edges)]
    return _chart(figure, group, "Calibration", caption, legend, (("confidence", *bins), body))


def cost(group: ResultGroup, rows: Sequence[MethodRow], series: Series) -> Chart:
    """Draw the cost against the error: the time of an image or, in real time, the cost that the clock counts."""
    clocked, unit = group.speed is not None, "x inference" if group.speed is not None else "ms"
    both = {row.label: (row.inferences if clocked else row.score(COST).mean, row.score(INSTANCE).mean) for row in rows}
    both = {label: (max(cost, 1e-6), error) for label, (cost, error) in both.items() if math.isfinite(cost)}
    figure, axes = _axes(f"{unit if clocked else 'ms per image'} (logarithmic)", "instance error, %")
    axes.set_xscale("log")
    for label, (cost, error) in both.items():
        axes.plot([cost], [error], gid=f"series-{series[label]}", markersize=7, **swatch(series[label]))
    axes.set_ylim(bottom=0)
    legend = {label: f"{label}: {cost:.2f} {unit}, {error:.1f} %" for label, (cost, error) in both.items()}
    caption = "Time to predict and adapt, against instance error. Lower left is better."
    return _chart(figure, group, "Cost against error", caption, legend)


def estimates(group: ResultGroup, rows: Sequence[MethodRow], series: Series) -> Chart:
    """Draw estimated and true accuracy of watched streams, with a mark where an alarm began."""
    length = min(int((record.label >= 0).sum()) for row in rows for record, _ in row.watched)
    window = max(1, min(WINDOW, length // 2))
    places = torch.linspace(window - 1, length - 1, POINTS).long().unique()
    true, guessed = {}, {}
    for row in rows:
        true[row.label] = _mean(100 - 100 * metrics.online_error(record, window)[places] for record, _ in row.watched)
        estimated = (watched.accuracy[record.label >= 0].double()[places] for record, watched in row.watched)
        guessed[row.label] = _mean(100 * share for share in estimated)
    alarms = {row.label: _alarms(row) for row in rows}
    figure, axes = _axes("image of the stream", f"accuracy over {window} images, %")
    for label, number in ((row.label, series[row.label]) for row in rows):
        _curve(axes, (places + 1).tolist(), true[label], number)
        axes.plot((places + 1).tolist(), guessed[label], ":", gid=f"series-{number}", color=swatch(number)["color"])
        for image, _ in alarms[label]:
            axes.plot([min(image + 1, length)], [100], "v", gid=f"series-{number}", color=swatch(number)["color"])
    axes.set_ylim(0, 102)
    found = [f"{label}: alarm {kind}, image {image + 1:,}" for label, of in alarms.items() for image, kind in of]
    legend = {}
    for label in true:
        count = len(alarms[label])
        gaps = [abs(a - b) for a, b in zip(true[label], guessed[label], strict=True) if math.isfinite(a - b)]
        apart = f"{sum(gaps) / len(gaps):.1f} points apart" if gaps else "not calibrated"
        legend[label] = f"{label}: {apart}, {count} alarm{'s' * (count != 1)}"
    caption = f"Accuracy over the last {window} images, mean over seeds; dotted: as it was estimated, without labels."
    caption += " A mark at the top is an alarm." if found else " There was no alarm."
    return _chart(figure, group, "Accuracy, estimated and true", caption, legend, description=found)


def class_map(group: ResultGroup, title: str, shares: Tensor, down: str, names: Sequence[str] = ()) -> "Markup":
    """Draw shares (rows, classes) as a map; ``names``: of the rows."""
    each = math.ceil(shares.shape[1] / MOST_CELLS)
    merged = torch.stack([part.amax(1) for part in shares.split(each, 1)], 1)
    if not names and len(shares) > MOST_CELLS:  # classes in both directions
        merged = torch.stack([part.amax(0) for part in merged.split(each, 0)])
    figure, axes = _axes(f"{'predicted ' * (not names)}class" + f" ({each} a cell)" * (each > 1), down, fitted=True)
    axes.grid(False)
    image = torch.tensor(TINT).expand(*merged.shape, 3)
    axes.imshow(torch.cat((image, merged.nan_to_num(0)[..., None].float()), -1).numpy(), aspect="auto")
    if names:
        step = math.ceil(len(names) / MOST_NAMES)
        axes.set_yticks(range(0, len(names), step), [plain_label(name) for name in names[::step]])
    return _svg(figure, group, title, names)


def _mean(values: Iterable[Tensor]) -> list[float]:
    """Return the mean over seeds, without NaN."""
    mean: list[float] = torch.stack(list(values)).nanmean(0).tolist()
    return mean


def _domain_errors(played: PlayedStream) -> Tensor:
    """(D,) in percent; NaN where a domain has no labels."""
    errors = [played.scores["domain_error"][name] for name in played.domains]
    return 100 * torch.tensor([math.nan if error is None else error for error in errors], dtype=torch.float64)


def _borders(records: Sequence[Record]) -> list[int]:
    """Return the images where the domain changes, if they are the same in every stream and not too many."""
    changes = []
    for record in records:
        domain = record.domain[record.label >= 0]
        changes.append(((domain[1:] != domain[:-1]).nonzero().flatten() + 1).tolist())
    same = all(change == changes[0] for change in changes)
    return changes[0] if same and len(changes[0]) <= MOST_BORDERS else []


def _reliability(records: Sequence[Record]) -> list[tuple[float, float, int]]:
    """Return mean confidence and accuracy in %, and the number of images, of each bin of confidence."""
    sure = torch.cat([record.confidence[record.label >= 0] for record in records]).double()
    right = torch.cat([(record.prediction == record.label)[record.label >= 0] for record in records]).double()
    bins = (sure.nan_to_num(0) * BINS).long().clamp(0, BINS - 1)
    counts = torch.bincount(bins, minlength=BINS)
    means = [100 * torch.bincount(bins, values.nan_to_num(0), BINS) / counts for values in (sure, right)]
    return list(zip(*(mean.tolist() for mean in means), counts.tolist(), strict=True))


def _alarms(row: MethodRow) -> list[tuple[int, str]]:
    """Return image, among those with labels, and kind of every alarm of a row's streams."""
    alarms = []
    for record, watched in row.watched:
        rank = (record.label >= 0).cumsum(0) - 1
        alarms += [(max(int(rank[image]), 0), kind) for image, kind in watched.beginnings()]
    return sorted(alarms)


def _lines(names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    cells = {
        label: ["–" if math.isnan(value) else f"{value:.2f}" for value in values] for label, values in columns.items()
    }
    return [(name, *(column[i] for column in cells.values())) for i, name in enumerate(names)]


def _axes(across: str, up: str, *, fitted: bool = False) -> tuple[Any, Any]:
    figure = new_figure(SIZE, "constrained" if fitted else None, NEEDS)  # fitted to long names, which takes time
    axes = figure.subplots()
    if not fitted:
        figure.subplots_adjust(left=0.1, right=0.98, top=0.97, bottom=0.15)
    axes.set_xlabel(plain_label(across), color=TEXT)
    axes.set_ylabel(plain_label(up), color=TEXT)
    axes.tick_params(color=GRID, labelcolor=TEXT, labelsize="small")
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    return figure, axes


def _curve(axes: Any, x: Sequence[float], y: Sequence[float], series: int, *, markers: bool = False) -> None:
    style = {**swatch(series), **({} if markers else {"marker": ""})}
    axes.plot(x, y, gid=f"series-{series}", linewidth=1.3, markersize=4, **style)


def _chart(
    figure: Any,
    group: ResultGroup,
    title: str,
    caption: str,
    legend: Mapping[str, str],
    table: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ()),
    description: Sequence[str] = (),
) -> Chart:
    """Return a chart with its numbers; it is described by its legend, unless there is a ``description``."""
    return Chart(title, caption, _svg(figure, group, title, description or legend.values()), legend, *table)


def _svg(figure: Any, group: ResultGroup, title: str, description: Iterable[str]) -> "Markup":
    """Return a chart as an element of the page; title and description serve screen readers."""
    from markupsafe import Markup, escape
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context(
        {"svg.hashsalt": printable(f"{group.title} {title}"), "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = drawn.getvalue()
    start = text.index("<svg")
    inside = UNUSED.sub("", text[text.index(">", start) + 1 :])
    inside = re.sub(r' id="series-(\d+)"', r' class="m\1"', inside)
    inside = re.sub("|".join(VARIABLES), lambda colour: VARIABLES[colour[0]], inside)
    size = re.search(r'viewBox="([^"]*)"', text[start:])
    words = escape(printable(title)), escape(printable("; ".join(description)))
    named = Markup("<title>{}</title><desc>{}</desc>").format(*words)
    return Markup(f'<svg class="chart" role="img" viewBox="{size[1] if size else ""}">{named}{inside}')
