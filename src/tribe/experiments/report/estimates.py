"""The chart of streams that were watched: their accuracy as it was estimated without labels, beside the true one."""

import math
from collections.abc import Sequence

import torch

from tribe.experiments import metrics
from tribe.experiments.record import Record
from tribe.experiments.report.charts import Line, Mark, axis, lines
from tribe.experiments.report.collect import Row
from tribe.experiments.report.curves import POINTS, WINDOW, describe_extremes, image_axis, mean_over_seeds, table_rows
from tribe.experiments.report.elements import Series, figure, folded_table, legend, plural, table
from tribe.experiments.report.markup import Markup

MOST_EVENTS = 200  # marks in a chart


def over_time(rows: Sequence[Row], series: Series) -> Markup:
    """Estimated and true accuracy over the last images, along the stream, with a mark where an alarm began."""
    length = min(int((record.label >= 0).sum()) for row in rows for record in row.watched)
    window = max(1, min(WINDOW, length // 2))
    places = torch.linspace(window - 1, length - 1, POINTS).long().unique()
    true = {
        r.label: mean_over_seeds(100 - 100 * metrics.online_error(w, window)[places] for w in r.watched) for r in rows
    }
    guessed = {r.label: mean_over_seeds(_estimates(w)[places] for w in r.watched) for r in rows}
    seen = (places + 1).tolist()
    drawn = [Line(series[label], list(zip(seen, curve, strict=True))) for label, curve in true.items()]
    drawn += [
        Line(series[label], list(zip(seen, guess, strict=True)), style="guess") for label, guess in guessed.items()
    ]
    alarms = {row.label: _alarms(row) for row in rows}
    events = [
        Mark(series[label], min(image + 1, length), 100.0, f"{label}: alarm {kind}, image {image + 1:,}")
        for label, found in alarms.items()
        for image, kind in found
    ][:MOST_EVENTS]
    title = "Accuracy, estimated and true"
    names = [f"image {place:,}" for place in seen]
    y = axis(100, f"accuracy over {window} images, %")
    picture = lines(title, describe_extremes(true, names), drawn, image_axis(length), y, events=events)
    caption = f"Accuracy over the last {window} images, mean over seeds; dotted: as it was estimated, without labels."
    caption += " A mark at the top is an alarm." if events else " There was no alarm."
    texts = {
        label: f"{label}: {_difference(true[label], guessed[label])}, {plural(len(alarms[label]), 'alarm')}"
        for label in true
    }
    some = slice(None, None, max(1, len(seen) // 10))
    columns = {
        f"{label}, {what}": of[label][some] for label in true for what, of in (("true", true), ("estimated", guessed))
    }
    plain = table(["image", *columns], table_rows([f"{place:,}" for place in seen[some]], columns), f"{title}, %")
    return figure(title, caption, picture, legend(texts, series), folded_table(plain))


def _estimates(record: Record) -> torch.Tensor:
    """In %, of the images with labels; NaN without a calibration."""
    assert record.watched is not None
    return 100 * record.watched.accuracy[record.label >= 0].double()


def _alarms(row: Row) -> list[tuple[int, str]]:
    """Image, among those with labels, and kind of every alarm of a row's streams."""
    found = []
    for record in row.watched:
        assert record.watched is not None
        rank = (record.label >= 0).cumsum(0) - 1
        found += [(max(int(rank[image]), 0), kind) for image, kind in record.watched.beginnings()]
    return sorted(found)


def _difference(true: Sequence[float], guessed: Sequence[float]) -> str:
    gaps = [abs(a - b) for a, b in zip(true, guessed, strict=True) if math.isfinite(a) and math.isfinite(b)]
    return f"{sum(gaps) / len(gaps):.1f} points apart" if gaps else "not calibrated"
