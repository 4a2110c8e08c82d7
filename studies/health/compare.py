"""Compare variants of the estimate on the records of a study of health: ``python -m studies.health.compare FILE``.

Variants leave out features, or the curve of the regression. For each kind of stream it prints the mean absolute error
over methods, that for TRIBE alone, the mean error with its sign, in points, and the share of windows in intervals. Then
it prints, for each method, the mean error on corruptions that were left out of the fit, and the widening of intervals.
Choose on seeds 1 to 4, the default; the tables of docs/health.md are of others.
"""

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from studies.health.play import REHEARSAL, Records
from studies.health.score import gather, known_of, labelled, right_of, window_features_of
from studies.health.tables import METHODS, STREAMS
from tribe.health.estimate import WINDOW, Estimator, Features
from tribe.health.fitting import class_spread, cut, left_out, regress, widening
from tribe.health.regression import AMPLITUDE


class Variant(NamedTuple):
    """One way to estimate."""

    without: tuple[str, ...] = ()  # features
    amplitude: float = AMPLITUDE  # of the curve


VARIANTS = {
    "now": Variant(),
    "a line": Variant(amplitude=0.0),
    "a line, five features": Variant(("source", "concentration", "repeated"), amplitude=0.0),
    "without repeated": Variant(("repeated",)),
    "without source": Variant(("source",)),
    "without concentration": Variant(("concentration",)),
    "without agreement": Variant(("agreement",)),
    "without distances": Variant(("near", "middle", "deep")),
}


class Outcome(NamedTuple):
    """What a variant says of M windows of one method, in points."""

    error: Tensor  # (M,)
    half: Tensor  # (M,) half of the interval
    streams: list[str]  # of each window
    unseen: float  # the mean error on corruptions that were left out of the fit
    widening: float


def outcome(records: Records, method: str, seeds: list[int], variant: Variant) -> Outcome:
    """Fit a variant, and judge the streams of these seeds."""
    known = known_of(records)
    streams = labelled(records, method)
    windows = cut(streams, WINDOW, known.classes)
    hidden = torch.tensor([name in variant.without for name in Features._fields])
    windows = windows._replace(features=torch.where(hidden, torch.nan, windows.features))  # so the fit leaves them out
    wrong = left_out(windows, WINDOW, variant.amplitude)
    model = regress(windows, None, variant.amplitude)
    fitted = Estimator(known.classes, known.temperature, model, widening(wrong), class_spread(streams))
    errors, halves, names = [], [], list[str]()
    for played in records.played.values():
        if played.method != method or played.seed not in seeds or played.stream.startswith(REHEARSAL):
            continue
        features = window_features_of(played.columns, known.classes)
        errors.append(fitted.accuracy(features) - right_of(played).double().unfold(0, WINDOW, WINDOW).mean(-1))
        halves.append(fitted.half_width(features, torch.tensor(WINDOW)))
        names += [played.stream] * len(errors[-1])
    unseen = 100 * float(wrong.found.abs().mean())
    return Outcome(100 * torch.cat(errors), 100 * torch.cat(halves), names, unseen, fitted.widening)


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
            inside = torch.cat([error[m].abs() <= found[m].half[of[m]] for m in error]).double().mean()
            cells.append(f"{stream} {means[-1]:.2f}{alone} {bias:+.1f}, in {100 * inside:.0f} %")
        lines.append(f"{name:24} {statistics.mean(means):.2f} | " + " | ".join(cells))
        left = " | ".join(f"{m} {o.unseen:.1f} x {o.widening:.2f}" for m, o in found.items())
        half = torch.cat([o.half for o in found.values()]).mean()
        lines.append(f"{'':24} left out: {left} | half width {half:.1f}")
    return lines


def main(argv: list[str] | None = None) -> None:
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m studies.health.compare", description=__doc__, formatter_class=style)
    p.add_argument("records", type=Path, nargs="+", help="files that studies.health.run wrote")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    p.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    o = p.parse_args(argv)
    for records in gather(o.records):
        print("\n".join(compare(records, o.seeds, o.variants)), flush=True)


if __name__ == "__main__":
    main()
