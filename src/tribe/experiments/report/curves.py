"""Charts of errors: per domain, over time, calibration and cost, each with a table of its numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tribe.experiments import metrics
from tribe.experiments.record import Record
from tribe.experiments.report.charts import Axis, Line, Point, axis, lines, log_axis, scatter
from tribe.experiments.report.collect import Group, Played, Row
from tribe.experiments.report.elements import Series, figure, folded_table, legend, table
from tribe.experiments.report.markup import Markup
from tribe.experiments.report.scores import CALIBRATION, COST, INSTANCE, score

POINTS = 160  # of a curve over time: more cannot be seen on a screen
WINDOW = 500  # images over which the error over time is averaged, at most
BINS = 15  # of confidence, as in metrics.calibration_error
FEWEST = 20  # images in a bin that is drawn
MOST_NAMES = 16  # domains named on an axis


def per_domain(group: Group, rows: Sequence[Row], series: Series) -> Markup:
    """Instance error in each domain."""
    errors = {row.label: mean_over_seeds([_domain_errors(played) for played in row.labelled]) for row in rows}
    names, shared = _without_severity(group.domains)
    drawn = [
        Line(
            series[label],
            list(enumerate(values)),
            [f"{label}, {d}: {v:.1f} %" for d, v in zip(group.domains, values, strict=True)],
        )
        for label, values in errors.items()
    ]
    ticks = [(float(i), name) for i, name in enumerate(names) if i % math.ceil(len(names) / MOST_NAMES) == 0]
    x = Axis(-0.4, len(names) - 0.6, ticks, f"domain{shared}")
    title = "Error per domain"
    picture = lines(title, describe_extremes(errors, group.domains), drawn, x, _error_axis(errors.values()))
    plain = table(["domain", *errors], table_rows(group.domains, errors), f"{title}, %")
    caption = "Instance error in each domain, mean over seeds."
    return figure(title, caption, picture, legend({label: label for label in errors}, series), folded_table(plain))


def over_time(rows: Sequence[Row], series: Series) -> Markup:
    """The prequential curve: the error over the last images, along the stream."""
    records = [record for row in rows for record in row.judged]
    length = min(int((record.label >= 0).sum()) for record in records)
    window = max(1, min(WINDOW, length // 10))
    places = torch.linspace(window - 1, length - 1, POINTS).long().unique()
    curves = {
        row.label: mean_over_seeds([100 * metrics.online_error(r, window)[places] for r in row.judged]) for row in rows
    }
    seen = (places + 1).tolist()
    drawn = [Line(series[label], list(zip(seen, curve, strict=True))) for label, curve in curves.items()]
    x = image_axis(length)
    borders = [border for border in domain_borders(records) if border <= length]
    names = [f"image {place:,}" for place in seen]
    title = "Error over time"
    picture = lines(title, describe_extremes(curves, names), drawn, x, _error_axis(curves.values()), borders)
    some = slice(None, None, max(1, len(seen) // 10))
    sampled = table_rows([f"{place:,}" for place in seen[some]], {label: c[some] for label, c in curves.items()})
    caption = f"Prequential: the error over the last {window} images, mean over seeds."
    caption += " A vertical line marks the start of a domain." if borders else ""
    plain = table(["image", *curves], sampled, f"{title}, %")
    return figure(title, caption, picture, legend({label: label for label in curves}, series), folded_table(plain))


def image_axis(length: int) -> Axis:
    """An axis of the images of a stream."""
    rounded = axis(length, "image of the stream")
    return rounded._replace(high=float(length), ticks=[tick for tick in rounded.ticks if tick[0] <= length])


def calibration(rows: Sequence[Row], series: Series) -> Markup:
    """The reliability diagram: accuracy against confidence."""
    bins = {row.label: _reliability(row.judged) for row in rows}
    drawn = []
    for label, found in bins.items():
        full = [(sure, right, count) for sure, right, count in found if count >= FEWEST]
        titles = [f"{label}: {sure:.0f} % sure, {right:.0f} % correct, {count:,} images" for sure, right, count in full]
        drawn.append(Line(series[label], [(sure, right) for sure, right, _ in full], titles))
    errors = {row.label: f"{row.label}: ECE {score(row, CALIBRATION).text_with_spread} %" for row in rows}
    both = axis(100, "confidence, %"), axis(100, "accuracy, %")
    picture = lines("Reliability diagram", "; ".join(errors.values()), drawn, *both, diagonal=True)
    edges = [f"{100 * i / BINS:.0f} to {100 * (i + 1) / BINS:.0f} %" for i in range(BINS)]
    cells = {label: [f"{right:.0f} % of {n:,}" if n else "–" for _, right, n in found] for label, found in bins.items()}
    by_bin = [[edge, *(cells[label][i] for label in cells)] for i, edge in enumerate(edges)]
    plain = table(["confidence", *bins], by_bin, "Accuracy and images, by confidence")
    caption = "Accuracy of predictions by confidence: on the dashed line they are equal. "
    caption += f"Bins of fewer than {FEWEST} images are not drawn."
    return figure("Calibration", caption, picture, legend(errors, series), folded_table(plain))


def cost(rows: Sequence[Row], series: Series) -> Markup:
    """Time an image against error, of the rows that have a time; the numbers are in the table of results."""
    found = {row.label: (max(score(row, COST).mean, 1e-6), score(row, INSTANCE).mean) for row in rows}
    found = {label: pair for label, pair in found.items() if math.isfinite(pair[0])}
    points = [Point(series[label], ms, error, label) for label, (ms, error) in found.items()]
    x = log_axis([point.x for point in points], "ms per image (logarithmic)")
    description = "; ".join(f"{label}: {ms:.2f} ms, {error:.1f} %" for label, (ms, error) in found.items())
    caption = "Time to predict and adapt, against instance error. Lower left is better."
    title = "Cost against error"
    return figure(title, caption, scatter(title, description, points, x, _error_axis([[point.y for point in points]])))


def mean_over_seeds(values: Iterable[Tensor]) -> list[float]:
    """The mean over seeds, without NaN."""
    mean: list[float] = torch.stack(list(values)).nanmean(0).tolist()
    return mean


def _error_axis(curves: Iterable[Sequence[float]]) -> Axis:
    highest = max((value for curve in curves for value in curve if math.isfinite(value)), default=0.0)
    return axis(max(highest, 1.0), "instance error, %")


def _without_severity(domains: Sequence[str]) -> tuple[list[str], str]:
    """The names without the severity that all of them share, and that severity.

    >>> _without_severity(["fog@5", "snow@5"]), _without_severity(["fog@1", "snow@5"])
    ((['fog', 'snow'], ', severity 5'), (['fog@1', 'snow@5'], ''))
    """
    endings = {name.rpartition("@")[2] if "@" in name else "" for name in domains}
    ending = endings.pop() if len(endings) == 1 else ""
    return ([name.rpartition("@")[0] for name in domains], f", severity {ending}") if ending else (list(domains), "")


def _domain_errors(played: Played) -> Tensor:
    """(D,) in percent; NaN where a domain has no labels."""
    errors = [played.scores["domain_error"][name] for name in played.domains]
    return 100 * torch.tensor([math.nan if error is None else error for error in errors], dtype=torch.float64)


def domain_borders(records: Sequence[Record]) -> list[int]:
    """The images where the domain changes, if they are the same in every stream and not too many."""
    changes = []
    for record in records:
        domain = record.domain[record.label >= 0]
        changes.append(((domain[1:] != domain[:-1]).nonzero().flatten() + 1).tolist())
    same = all(other == changes[0] for other in changes)
    return changes[0] if same and len(changes[0]) <= 4 * len(records[0].domains) else []


def _reliability(records: Sequence[Record]) -> list[tuple[float, float, int]]:
    """Mean confidence, accuracy (both in %) and number of images of each bin."""
    sums = torch.zeros(3, BINS, dtype=torch.float64)
    for record in records:
        valid = (record.label >= 0) & record.confidence.isfinite()
        sure, right = record.confidence[valid].double(), (record.prediction == record.label)[valid].double()
        sums.index_add_(1, (sure * BINS).long().clamp(0, BINS - 1), torch.stack((sure, right, torch.ones_like(sure))))
    confidence, accuracy = (100 * sums[:2] / sums[2].clamp_min(1)).tolist()
    return list(zip(confidence, accuracy, sums[2].long().tolist(), strict=True))


def describe_extremes(curves: Mapping[str, Sequence[float]], places: Sequence[str]) -> str:
    """The lowest and highest value of each curve, as a description for screen readers."""
    texts = []
    for label, values in curves.items():
        finite = [(value, place) for value, place in zip(values, places, strict=True) if math.isfinite(value)]
        if finite:
            (low, low_at), (high, high_at) = min(finite), max(finite)
            texts.append(f"{label}: from {low:.1f} % ({low_at}) to {high:.1f} % ({high_at})")
    return "; ".join(texts)


def table_rows(names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """A row for each name, with its number in every column."""
    return [[name, *(_two_digits(column[i]) for column in columns.values())] for i, name in enumerate(names)]


def _two_digits(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "–"
