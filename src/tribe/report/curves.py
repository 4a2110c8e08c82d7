"""Charts of errors: per domain, over time, against confidence, against cost. Each has its numbers beside it."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tribe.lab import metrics
from tribe.lab.record import Record
from tribe.report.charts import Axis, Line, Point, axis, lines, log_axis, scatter
from tribe.report.collect import Group, Row
from tribe.report.elements import Series, figure, legend, numbers, table
from tribe.report.markup import Markup
from tribe.report.scores import CALIBRATION, COST, INSTANCE, score

POINTS = 160  # of a curve over time: more cannot be told apart on a screen
WINDOW = 500  # images over which the error over time is averaged, at most
BINS = 15  # of confidence, as in metrics.calibration_error
FEWEST = 20  # images of a bin that is drawn
MOST_NAMES = 16  # of domains along an axis


def per_domain(group: Group, rows: Sequence[Row], series: Series) -> Markup:
    """Instance error in each domain."""
    errors = {row.label: _mean([100 * metrics.domain_error(record) for record in row.judged]) for row in rows}
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
    picture = lines(title, _extremes(errors, group.domains), drawn, x, _error_axis(errors.values()))
    plain = table(["domain", *errors], _transposed(group.domains, errors), f"{title}, %")
    words = "Instance error in each domain, mean over seeds."
    return figure(title, words, picture, legend({label: label for label in errors}, series), numbers(plain))


def over_time(rows: Sequence[Row], series: Series) -> Markup:
    """The prequential curve: the error over the images just seen."""
    records = [record for row in rows for record in row.judged]
    length = min(int((record.label >= 0).sum()) for record in records)
    window = max(1, min(WINDOW, length // 10))
    places = torch.linspace(window - 1, length - 1, POINTS).long().unique()
    curves = {row.label: _mean([100 * metrics.online_error(r, window)[places] for r in row.judged]) for row in rows}
    seen = (places + 1).tolist()
    drawn = [Line(series[label], list(zip(seen, curve, strict=True))) for label, curve in curves.items()]
    whole = axis(length, "image of the stream")
    x = whole._replace(high=float(length), ticks=[tick for tick in whole.ticks if tick[0] <= length])
    borders = [border for border in _borders(records) if border <= length]
    names = [f"image {place:,}" for place in seen]
    title = "Error over time"
    picture = lines(title, _extremes(curves, names), drawn, x, _error_axis(curves.values()), borders)
    some = slice(None, None, max(1, len(seen) // 10))
    sampled = _transposed([f"{place:,}" for place in seen[some]], {label: c[some] for label, c in curves.items()})
    words = f"Prequential: the error over the last {window} images, mean over seeds."
    words += " Vertical lines: the next domain begins." if borders else ""
    plain = table(["image", *curves], sampled, f"{title}, %")
    return figure(title, words, picture, legend({label: label for label in curves}, series), numbers(plain))


def calibration(rows: Sequence[Row], series: Series) -> Markup:
    """Whether 80 % sure means right 8 times in 10."""
    bins = {row.label: _reliability(row.judged) for row in rows}
    drawn = []
    for label, found in bins.items():
        many = [(sure, right, count) for sure, right, count in found if count >= FEWEST]
        told = [f"{label}: {sure:.0f} % sure, {right:.0f} % right, {count:,} images" for sure, right, count in many]
        drawn.append(Line(series[label], [(sure, right) for sure, right, _ in many], told))
    errors = {row.label: f"{row.label}: ECE {score(row, CALIBRATION).words} %" for row in rows}
    both = axis(100, "confidence, %"), axis(100, "right, %")
    picture = lines("Reliability diagram", "; ".join(errors.values()), drawn, *both, diagonal=True)
    edges = [f"{100 * i / BINS:.0f} to {100 * (i + 1) / BINS:.0f} %" for i in range(BINS)]
    cells = {label: [f"{right:.0f} % of {n:,}" if n else "–" for _, right, n in found] for label, found in bins.items()}
    by_bin = [[edge, *(cells[label][i] for label in cells)] for i, edge in enumerate(edges)]
    plain = table(["confidence", *bins], by_bin, "Right of how many, by confidence")
    words = "How often predictions of a given confidence are right: on the dashed line a method is as good as it "
    words += f"believes. Bins of fewer than {FEWEST} images are not drawn."
    return figure("Calibration", words, picture, legend(errors, series), numbers(plain))


def cost(rows: Sequence[Row], series: Series) -> Markup:
    """What an image costs, against how often it is wrong. The numbers are those of the results."""
    found = {row.label: (max(score(row, COST).mean, 1e-6), score(row, INSTANCE).mean) for row in rows}
    points = [Point(series[label], ms, error, label) for label, (ms, error) in found.items()]
    x = log_axis([point.x for point in points], "ms per image (logarithmic)")
    said = "; ".join(f"{label}: {ms:.2f} ms, {error:.1f} %" for label, (ms, error) in found.items())
    words = "Time to predict and adapt, against instance error: low and left is better."
    title = "Cost against error"
    return figure(title, words, scatter(title, said, points, x, _error_axis([[point.y for point in points]])))


def _mean(values: Iterable[Tensor]) -> list[float]:
    """Over seeds, of what is known."""
    mean: list[float] = torch.stack(list(values)).nanmean(0).tolist()
    return mean


def _error_axis(curves: Iterable[Sequence[float]]) -> Axis:
    highest = max((value for curve in curves for value in curve if math.isfinite(value)), default=0.0)
    return axis(max(highest, 1.0), "instance error, %")


def _without_severity(domains: Sequence[str]) -> tuple[list[str], str]:
    """Names without the severity that all of them share, and that severity.

    >>> _without_severity(["fog@5", "snow@5"]), _without_severity(["fog@1", "snow@5"])
    ((['fog', 'snow'], ', severity 5'), (['fog@1', 'snow@5'], ''))
    """
    endings = {name.rpartition("@")[2] if "@" in name else "" for name in domains}
    ending = endings.pop() if len(endings) == 1 else ""
    return ([name.rpartition("@")[0] for name in domains], f", severity {ending}") if ending else (list(domains), "")


def _borders(records: Sequence[Record]) -> list[int]:
    """Where the domain changes, if it does so in the same places in every stream, and not all the time."""
    found = []
    for record in records:
        domain = record.domain[record.label >= 0]
        found.append(((domain[1:] != domain[:-1]).nonzero().flatten() + 1).tolist())
    alike = all(other == found[0] for other in found)
    return found[0] if alike and len(found[0]) <= 4 * len(records[0].domains) else []


def _reliability(records: Sequence[Record]) -> list[tuple[float, float, int]]:
    """Mean confidence, accuracy (both in %) and images of each bin."""
    sums = torch.zeros(3, BINS, dtype=torch.float64)
    for record in records:
        known = (record.label >= 0) & record.confidence.isfinite()
        sure, right = record.confidence[known].double(), (record.prediction == record.label)[known].double()
        sums.index_add_(1, (sure * BINS).long().clamp(0, BINS - 1), torch.stack((sure, right, torch.ones_like(sure))))
    confidence, accuracy = (100 * sums[:2] / sums[2].clamp_min(1)).tolist()
    return list(zip(confidence, accuracy, sums[2].long().tolist(), strict=True))


def _extremes(curves: Mapping[str, Sequence[float]], places: Sequence[str]) -> str:
    """A chart for those who cannot see it: how low and how high each curve goes, and where."""
    words = []
    for label, values in curves.items():
        known = [(value, place) for value, place in zip(values, places, strict=True) if math.isfinite(value)]
        if known:
            (low, low_at), (high, high_at) = min(known), max(known)
            words.append(f"{label}: from {low:.1f} % ({low_at}) to {high:.1f} % ({high_at})")
    return "; ".join(words)


def _transposed(names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """A row for each name, with the number of every column there."""
    return [[name, *(_two(column[i]) for column in columns.values())] for i, name in enumerate(names)]


def _two(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "–"
