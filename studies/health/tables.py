"""The tables of README.md, made from the results."""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from studies.pages import table
from studies.play import read

NAMES = {
    "ours": "tribe",
    "confidence": "confidence",
    "temperature": "with temperature",
    "atc": "ATC",
    "doc": "DoC",
    "gde": "GDE",
    "aetta": "AETTA",
}

TODAY = "gaussian process"  # the model of accuracy; files without it are of a linear one
METHODS = ("tribe", "rotta", "tent", "bn", "source")
STREAMS = ("iid", "continual", "ptta", "gli-f", "gli-v")

Row = dict[str, Any]
Rows = list[Row]


def differences(rows: Rows, name: str) -> list[float]:
    """Estimate less accuracy of every window, in points."""
    pairs = (zip(row["estimates"][name], row["true"], strict=True) for row in rows if name in row["estimates"])
    return [estimate - accuracy for pair in pairs for estimate, accuracy in pair]


def mean_errors(rows: Rows) -> dict[str, float]:
    """The mean absolute error of every estimator over all windows, in points."""
    found = {name: differences(rows, name) for name in NAMES}
    return {name: statistics.mean(map(abs, values)) for name, values in found.items() if values}


def covered(rows: Rows) -> float:
    """The share of windows whose accuracy lies in our interval, in %."""
    inside = [low <= t <= high for r in rows for low, t, high in zip(r["low"], r["true"], r["high"], strict=True)]
    return 100 * statistics.mean(inside)


def half_width(rows: Rows) -> float:
    """Half of the mean width of our intervals, in points."""
    return statistics.mean((high - low) / 2 for r in rows for low, high in zip(r["low"], r["high"], strict=True))


def errors(folder: Path) -> str:
    """Mean absolute errors of all estimators, methods and streams, one table for each network."""
    texts = []
    for (dataset, model), rows in _groups(_rows(folder), "dataset", "model"):
        lines = []
        for (stream,), of_stream in _groups(rows, "stream"):
            found = [(method, of) for (method,), of in _groups(of_stream, "method")]
            lines += [_line(stream, method, of) for method, of in found]
            lines.append(_mean_line(stream, [of for _, of in found]))
        header = ["stream", "method", "right, %", *NAMES.values(), "in the interval, %"]
        texts.append(f"{_caption(dataset, model, rows)}\n\n{table(header, lines)}")
    return "\n".join(texts)


def _line(stream: str, method: str, rows: Rows) -> list[str]:
    found = mean_errors(rows)
    right = statistics.mean(t for row in rows for t in row["true"])
    cells = [f"{found[name]:.1f}" if name in found else "" for name in NAMES]
    return [stream, method, f"{right:.1f}", *cells, f"{covered(rows):.0f}"]


def _means(methods: list[Rows]) -> dict[str, float]:
    """The mean over methods of each estimator's error; infinity if no method has it."""
    means = {}
    for name in NAMES:
        values = [mean_errors(rows)[name] for rows in methods if name in mean_errors(rows)]
        means[name] = statistics.mean(values) if values else float("inf")
    return means


def _mean_line(stream: str, methods: list[Rows]) -> list[str]:
    """The mean over methods; the lowest is bold."""
    means = _means(methods)
    least = min(means.values())
    cells = [f"**{v:.1f}**" if v == least else "" if v == float("inf") else f"{v:.1f}" for v in means.values()]
    return [stream, "mean", "", *cells, f"{statistics.mean(covered(rows) for rows in methods):.0f}"]


def _caption(dataset: str, model: str, rows: Rows) -> str:
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    windows = sum(len(row["true"]) for row in rows)
    images = sorted({row["images"] for row in rows})
    return (
        f"{model} on {dataset}, {rows[0]['precision']}, {rows[0]['machine']['device']}; streams of {images[0]:,} to "
        f"{images[-1]:,} images, seeds {seeds}, {windows} windows:"
    )


def summary(folder: Path) -> str:
    """For each network and kind of stream: our error, that of the best baseline, that for TRIBE, and intervals."""
    return _summary(_rows(folder))


def older(folder: Path) -> str:
    """The same for networks that were measured with the linear model, on short streams."""
    return _summary(_rows(folder, of_today=False))


def _summary(all_rows: Rows) -> str:
    lines = []
    for (dataset, model, stream), rows in _groups(all_rows, "dataset", "model", "stream"):
        found = [of for _, of in _groups(rows, "method")]
        means = _means(found)
        ours, others = means.pop("ours"), {name: value for name, value in means.items() if value < float("inf")}
        best = min(others, key=others.__getitem__)
        alone = mean_errors([row for row in rows if row["method"] == "tribe"]).get("ours")
        cells = [f"{ours:.1f}", f"{others[best]:.1f} ({NAMES[best]})", "" if alone is None else f"{alone:.1f}"]
        lines.append([f"{model} on {dataset}", stream, *cells, f"{covered(rows):.0f}", f"{half_width(rows):.1f}"])
    head = ["network", "stream", "tribe", "best baseline", "tribe, for TRIBE alone", "in the interval, %", "±"]
    return table(head, lines)


def left_out(folder: Path) -> str:
    """The error of the fit on a corruption that it did not see, for each network and method."""
    lines = []
    for (dataset, model), rows in _groups(_rows(folder), "dataset", "model"):
        found = {row["method"]: row["left_out"] for row in rows}
        lines.append([f"{model} on {dataset}", *(f"{found[name]:.1f}" if name in found else "" for name in METHODS)])
    return table(["network", *METHODS], lines)


def bias(folder: Path) -> str:
    """What AETTA and our estimator say on average beside the accuracy, where classes come mixed and in bursts."""
    lines = []
    for (dataset, model, stream), rows in _groups(_rows(folder), "dataset", "model", "stream"):
        cells = [f"{statistics.mean(differences(rows, name)):+.1f}" for name in ("ours", "atc", "aetta")]
        lines.append([f"{model} on {dataset}", stream, *cells])
    return table(["network", "stream", "tribe", "ATC", "AETTA"], lines)


def _rows(folder: Path, of_today: bool = True) -> Rows:
    rows = [row for row in read("health_*.json", folder) if (row.get("model_of_accuracy") == TODAY) == of_today]
    places = [*STREAMS, *METHODS]
    return sorted(rows, key=lambda row: (row["file"], places.index(row["stream"]), places.index(row["method"])))


def _groups(rows: Rows, *names: str) -> Iterator[tuple[tuple[Any, ...], Rows]]:
    """The rows with the same values of these fields, in the order of the files."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from groups.items()


BLOCKS: dict[str, Callable[[Path], str]] = {
    **{"summary": summary, "older": older, "left-out": left_out},
    **{"errors": errors, "bias": bias},
}
