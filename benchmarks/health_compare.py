"""Compare variants of the estimate on the records of a study of health: ``python -m benchmarks.health_compare FILE``.

Variants differ in what stands for the confidence, in how far the images are from the source's, and in the penalty on
weights. For each kind of stream it prints the mean absolute error over methods, that for TRIBE alone and the mean error
with its sign, in points. Then it prints, for each method, the standard error of intervals and that on orders of streams
that were left out of the fit, and the share of windows in intervals made from the first (now) and from the larger one.
Choose on seeds 1 to 4, the default; the tables of docs/health.md are of others.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.health_pages import METHODS, STREAMS
from benchmarks.health_play import REHEARSAL, Columns, Records
from benchmarks.health_score import Known, gather, images_of, known_of, labelled, right_of
from tribe.health.estimate import WINDOW, Estimator, Features, Images, concentration, window_features
from tribe.health.fitting import (
    RIDGE,
    Measure,
    Windows,
    class_spread,
    cut,
    left_out_error,
    ridge,
    standard_error,
)

Read = Callable[[Columns, Known], Images]


def with_threshold(columns: Columns, known: Known) -> Images:
    """ATC's mark of each image instead of its confidence: the mean over a window is ATC's estimate."""
    return images_of(columns)._replace(confidence=(columns["tempered"] >= known.threshold).float())


def of_each_image(columns: Columns, known: Known) -> Images:
    """The distance of each probe's statistics instead of that of the last probes together."""
    near, middle, deep = columns["apart"].unbind(1)
    return images_of(columns)._replace(near=near, middle=middle, deep=deep)


def both(columns: Columns, known: Known) -> Images:
    """ATC's marks, and the distance of each probe."""
    return of_each_image(columns, known)._replace(confidence=with_threshold(columns, known).confidence)


def mean_logarithms(images: Images, filled: Tensor) -> Features:
    """As `window_features`, but means of the logarithms of distances: images that are very far count less."""
    distances = images.near, images.middle, images.deep
    known = [filled & (v > 0) for v in distances]
    logs = (
        torch.where(k, v.clamp_min(1e-6).log(), 0).sum(-1) / k.sum(-1) for v, k in zip(distances, known, strict=True)
    )
    return Features(*window_features(images, filled)[:2], *logs)


class Variant(NamedTuple):
    """One way to estimate."""

    read: Read
    measure: Measure = window_features
    penalty: float = RIDGE


VARIANTS = {
    "now": Variant(lambda columns, known: images_of(columns)),
    "penalty 30": Variant(lambda columns, known: images_of(columns), penalty=30.0),
    "penalty 100": Variant(lambda columns, known: images_of(columns), penalty=100.0),
    "ATC": Variant(with_threshold),
    "ATC, penalty 100": Variant(with_threshold, penalty=100.0),
    "each image": Variant(of_each_image, mean_logarithms),
    "each image, penalty 100": Variant(of_each_image, mean_logarithms, 100.0),
    "both, penalty 100": Variant(both, mean_logarithms, 100.0),
}


class Outcome(NamedTuple):
    """What a variant says of M windows of one method, in points."""

    error: Tensor  # (M,)
    widths: Tensor  # (2, M), half of the interval, as it is, and from the larger of both errors
    streams: list[str]  # of each window
    left_out: list[float]  # the standard errors of intervals, and on orders that were left out


def orders_left_out(windows: Windows) -> list[tuple[Tensor, Tensor]]:
    """For each stream of calibration: the windows of the others, and its own."""
    return [(windows.stream != place, windows.stream == place) for place in windows.stream.unique()]


def outcome(records: Records, method: str, seeds: list[int], variant: Variant) -> Outcome:
    """Fit a variant, and judge the streams of these seeds."""
    known = known_of(records)
    streams = labelled(records, method, lambda columns: variant.read(columns, known))
    windows = cut(streams, WINDOW, variant.measure)
    now = standard_error(windows, streams, WINDOW, variant.measure, variant.penalty)
    sigmas = [now, left_out_error(windows, WINDOW, orders_left_out(windows), variant.penalty)]
    fitted = ridge(windows, None, variant.penalty)
    models = [
        Estimator(known.classes, known.temperature, *fitted, sigma, class_spread(streams))
        for sigma in (now, max(sigmas))
    ]
    errors, widths, names = [], [], list[str]()
    for played in records.played.values():
        if played.method != method or played.seed not in seeds or played.stream.startswith(REHEARSAL):
            continue
        images = Images(*(t.unfold(0, WINDOW, WINDOW) for t in variant.read(played.columns, known)))
        filled = torch.ones_like(images.confidence, dtype=torch.bool)
        found = models[0].accuracy(variant.measure(images, filled))
        shown = concentration(images.predicted, filled, known.classes)
        errors.append(found - right_of(played).double().unfold(0, WINDOW, WINDOW).mean(-1))
        widths.append(torch.stack([model.half_width(found, torch.tensor(WINDOW), shown) for model in models]))
        names += [played.stream] * len(found)
    return Outcome(100 * torch.cat(errors), 100 * torch.cat(widths, 1), names, [100 * sigma for sigma in sigmas])


def compare(records: Records, seeds: list[int], names: list[str]) -> list[str]:
    """The lines to print."""
    lines = [f"{records.header['model']} on {records.header['dataset']}, seeds {seeds}"]
    methods = [m for m in METHODS if any(p.method == m and p.seed in seeds for p in records.played.values())]
    for name in names:
        found = {method: outcome(records, method, seeds, VARIANTS[name]) for method in methods}
        cells, means = [], []
        for stream in STREAMS:
            of = {m: torch.tensor([s == stream for s in o.streams]) for m, o in found.items()}
            error = {m: o.error[of[m]] for m, o in found.items() if of[m].any()}
            if not error:
                continue
            means.append(statistics.mean(float(e.abs().mean()) for e in error.values()))
            bias = statistics.mean(float(e.mean()) for e in error.values())
            alone = f" TRIBE {error['tribe'].abs().mean():.2f}" if "tribe" in error else ""
            inside = torch.cat([found[m].error[of[m]].abs() <= found[m].widths[:, of[m]] for m in error], 1)
            share = 100 * inside.double().mean(1)
            cells.append(f"{stream} {means[-1]:.2f}{alone} {bias:+.1f}, in {share[0]:.0f} {share[1]:.0f} %")
        lines.append(f"{name:24} {statistics.mean(means):.2f} | " + " | ".join(cells))
        left = " | ".join(f"{m} {o.left_out[0]:.1f} {o.left_out[1]:.1f}" for m, o in found.items())
        wide = torch.cat([o.widths for o in found.values()], 1).mean(1)
        lines.append(f"{'':24} left out: {left} | half width {wide[0]:.1f} {wide[1]:.1f}")
    return lines


def main(argv: list[str] | None = None) -> None:
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m benchmarks.health_compare", description=__doc__, formatter_class=style)
    p.add_argument("records", type=Path, nargs="+", help="files that benchmarks.health_study wrote")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    p.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    o = p.parse_args(argv)
    for records in gather(o.records):
        print("\n".join(compare(records, o.seeds, o.variants)), flush=True)


if __name__ == "__main__":
    main()
