"""Study how well accuracy is estimated without labels: TRIBE and four other methods on five kinds of stream.

``python -m benchmarks.health_study --data data --model resnet20 --weights FILE --out benchmarks/results``

Each method is calibrated on the first 2,000 test images and plays streams of the others. What it predicts is kept in
``--records``, so that estimators can be compared without playing again; a study that is stopped goes on there. Every
window of 500 images gives the true accuracy and the estimates. Results go to a JSON file in ``--out``, after every
stream. ``--render`` writes the tables of docs/health.md from the files in benchmarks/results.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import health_pages
from benchmarks.health_play import HELD_OUT, Played, load, path_of, play, save
from benchmarks.time_play import Bench, Clock, add_options, open_bench, settings, write
from tribe.engine.precision import float32_precision
from tribe.health import baselines
from tribe.health.calibration import Calibration, calibrate
from tribe.health.estimate import Estimate, Estimator
from tribe.health.records import Signals
from tribe.lab.spec import ComponentSpec
from tribe.lab.workbench import Workbench, trained_on

METHODS = "tribe", "rotta", "tent", "bn", "source"
STREAMS = "iid", "continual", "ptta", "gli-f", "gli-v"
SEEDS = 5, 6  # not those that anything was chosen with: 1 and 2

Row = dict[str, Any]


def estimates(signals: Signals, known: Calibration) -> dict[str, Tensor]:
    """What every baseline says of each image; the mean over a window is its estimate."""
    t = known.estimator.temperature
    found = {
        "confidence": baselines.mean_confidence(signals),
        "temperature": baselines.mean_confidence(signals, t),
        "atc": baselines.atc(signals, t, known.threshold),
        "doc": baselines.doc(signals, t, known.accuracy, known.confidence),
        "gde": baselines.gde(signals),
        "aetta": baselines.aetta(signals),
    }
    return {name: values for name, values in found.items() if values is not None}


def follow(estimator: Estimator, signals: Signals) -> list[Estimate]:
    """Our estimate at the end of every window, from the state that a stream would have."""
    state, found = estimator.init(), list[Estimate]()
    for start in range(0, len(signals.batch) - estimator.window + 1, estimator.window):
        window = slice(start, start + estimator.window)
        numbers = signals.batch[window]
        for number in numbers.unique_consecutive():
            here = torch.arange(start, start + estimator.window)[numbers == number]
            share = None if signals.student is None else signals.student[here[:1]]
            valid = torch.ones(1, len(here), dtype=torch.bool)
            state = estimator.observe(state, signals.logits[here].unsqueeze(0), valid, share)
        found.append(estimator.read(state))
    return found


def score(played: Played, known: Calibration) -> Row:
    """The true accuracy of every window and all estimates of it, in %."""
    right = (played.signals.logits.argmax(-1) == played.label).double()
    if played.method == "source":  # it agrees with itself
        played = played._replace(signals=played.signals._replace(source=None))
    size = known.estimator.window

    def windows(values: Tensor) -> list[float]:
        means = values.double().unfold(0, size, size).mean(-1)
        return [round(100 * mean, 2) for mean in means.tolist()]

    ours = follow(known.estimator, played.signals)
    columns = {name: windows(values) for name, values in estimates(played.signals, known).items()}
    ends = {name: [round(100 * float(getattr(e, name)), 2) for e in ours] for name in ("accuracy", "low", "high")}
    return {
        **{"method": played.method, "stream": played.stream, "seed": played.seed, "images": len(played.label)},
        **{"true": windows(right), "overall": round(100 * float(ours[-1].overall), 2)},
        **{"low": ends["low"], "high": ends["high"], "estimates": {"ours": ends["accuracy"], **columns}},
    }


def calibration_of(bench: Bench, method: str, o: argparse.Namespace) -> Calibration:
    """Calibrate a method on held-out clean images, once."""
    path = o.records / f"calibration_{method}.safetensors"
    if not path.exists():
        net, built = bench.method(method)
        clean = ComponentSpec(trained_on(bench.data.dataset, o.dataset), {"split": "test"})
        data = Workbench(o.clean or o.data, o.device).dataset(clean)
        index, domain = torch.arange(HELD_OUT), data.domains[0]
        calibrate(net, data.images(domain, index), data.labels(domain)[index], method=built).save(path)
    return Calibration.load(path)


def study(bench: Bench, o: argparse.Namespace) -> Path:
    """Calibrate, play what has not been played, and score."""
    clock, rows = Clock(), list[Row]()
    path = o.out / f"health_{o.dataset}_{o.model}.json"
    o.records.mkdir(parents=True, exist_ok=True)
    for method in o.methods:
        known = calibration_of(bench, method, o)
        clock.say(f"{method}: calibrated, standard error {100 * known.estimator.sigma:.1f} points")
        for stream in o.streams:
            files = [path_of(o.records, method, stream, seed) for seed in o.seeds]
            if not all(file.exists() for file in files):
                for played in play(bench, method, stream, o.seeds, o.per):
                    save(o.records, played)
            found = [score(load(file), known) for file in files]
            rows += found
            shared = {**settings(o, bench.device), "per": o.per, "corruptions": list(known.corruptions)}
            write(path, shared, rows)
            clock.say(f"{method}, {stream}: {_short(found)}")
    return path


def _short(rows: list[Row]) -> str:
    """Mean absolute errors in a line."""
    errors: Mapping[str, float] = health_pages.mean_errors(rows)
    return ", ".join(f"{name} {value:.1f}" for name, value in errors.items())


# -- command line ------------------------------------------------------------------------------------------------------


def words(text: str) -> tuple[str, ...]:
    """Split at commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m benchmarks.health_study", description=__doc__, formatter_class=style)
    add_options(p)
    p.add_argument("--clean", type=Path, help="root of the clean data set (default: --data)")
    p.add_argument("--methods", type=words, default=METHODS, help="with commas (default: %(default)s)")
    p.add_argument("--streams", type=words, default=STREAMS, help="with commas (default: %(default)s)")
    p.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the streams (default: %(default)s)")
    p.add_argument("--per", type=int, default=200, help="images of each domain (default: %(default)s)")
    p.add_argument("--records", type=Path, default=Path("runs/health"), help="where predictions are kept")
    p.add_argument("--render", action="store_true", help="write the tables of docs/health.md, and play nothing")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    if o.render:
        health_pages.render()
        return
    with float32_precision(o.precision):
        print(f"written to {study(open_bench(o), o)}")


if __name__ == "__main__":
    main()
