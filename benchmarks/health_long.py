"""The estimate of accuracy over whole streams: ``python -m benchmarks.health_long CALIBRATION RUNS [RUNS ...]``.

The streams of `benchmarks.health_study` are short: a window of 500 images shows four corruptions or more. In a whole
stream it shows one. Make the runs with the calibration and with logits, which the other estimates need:

    tribe source health --model compact --dataset mnist --method tribe --out health.safetensors
    tribe run --methods tribe+watch --set tribe+watch.calibration=health.safetensors --seed 5 --logits --out R
    python -m benchmarks.health_long health.safetensors R
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from tribe.engine.losses import probabilities
from tribe.health.calibration import Calibration
from tribe.health.estimate import WINDOW
from tribe.lab.record import Record

HEAD = ("network", "stream", "images", "tribe", "its bias", "with temperature", "ATC", "in the interval, %", "±")


def windows(values: Tensor) -> Tensor:
    """The means of windows of images that do not overlap."""
    return values.double().unfold(0, WINDOW, WINDOW).mean(-1)


def score(record: Record, calibration: Calibration) -> list[str]:
    """A row: mean absolute errors over windows, in points, and how the intervals did."""
    if record.watched is None or record.outputs is None:
        raise SystemExit("a record lacks estimates or logits: play tribe+watch with a calibration and --logits")
    true = windows(record.prediction == record.label)
    last = torch.arange(WINDOW - 1, len(record.label), WINDOW)[: len(true)]
    found, low, high = (t[last].double() for t in record.watched[:3])
    tempered = probabilities(
        record.outputs.values[record.outputs.valid].float() / calibration.estimator.temperature
    ).amax(-1)
    others = windows(tempered), windows(tempered >= calibration.threshold)
    errors = [found - true, *(other - true for other in others)]
    inside = ((true >= low) & (true <= high)).double().mean()
    points = [errors[0].abs(), errors[0], *(e.abs() for e in errors[1:])]
    numbers = [f"{100 * float(e.mean()):.1f}" for e in points]
    facts = str(record.spec["model"]["name"]), str(record.spec["scenario"]["name"]), f"{len(record.label):,}"
    return [*facts, *numbers, f"{100 * float(inside):.0f}", f"{50 * float((high - low).mean()):.1f}"]


def main() -> None:
    """Print a table of all records in the folders."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("calibration", type=Path)
    p.add_argument("runs", type=Path, nargs="+")
    o = p.parse_args()
    calibration = Calibration.load(o.calibration)
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    for path in sorted(file for folder in o.runs for file in folder.rglob("record-*.npz")):
        print(f"| {' | '.join(score(Record.load(path), calibration))} |")


if __name__ == "__main__":
    main()
