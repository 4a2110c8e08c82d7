"""What an experiment will take: as long as others of its kind took here, else a rough guess."""

from collections.abc import Iterable
from typing import NamedTuple

from tribe.lab.experiment import Experiment
from tribe.lab.store import Result

# Seconds an image of one pass through a network, on an H200 and on one core: guesses until something was run.
PASS = {
    "cuda": {"wrn28_10": 6e-5, "resnext29": 5e-5, "torchvision/resnet50": 3e-4},
    "cpu": {
        "compact": 4e-4,
        "resnet18_mnist": 1.5e-2,
        "wrn28_10": 0.25,
        "resnext29": 0.06,
        "torchvision/resnet50": 0.2,
    },
}
OTHER_PASS = {"cuda": 6e-5, "cpu": 2e-2}
PASSES = {  # a step in units of a pass, learning included
    "source": 1,
    "bn": 1,
    "lame": 1,
    "pl": 2.5,
    "tent": 2.5,
    "eata": 2.5,
    "sar": 5,
    "roid": 5,
    "note": 4,
    "rotta": 4,
    "tribe": 6,
    "selftrain": 6,
    "ttac": 15,
    "cotta": 40,
    "petal": 40,
}
OTHER_PASSES = 6.0


class History(NamedTuple):
    """Seconds an image, by method, network, device and precision, of what was run before."""

    seconds: dict[tuple[str, str, str, str], float]

    def estimate(self, experiment: Experiment, images: int) -> tuple[float, bool]:
        """Seconds that an experiment of so many images will take, and whether that is known rather than guessed."""
        kind = _kind(experiment)
        if kind in self.seconds:
            return images * self.seconds[kind], True
        method, model, device, _ = kind
        one = PASS.get(device, {}).get(model, OTHER_PASS.get(device, OTHER_PASS["cpu"]))
        return images * one * PASSES.get(method, PASSES.get(method.partition("/")[0], OTHER_PASSES)), False


def history(results: Iterable[Result]) -> History:
    """What is known from results; the latest of a kind says it, since it ran on what there is now."""
    latest: dict[tuple[str, str, str, str], tuple[str, float]] = {}
    for result in results:
        values = result.values("seconds_per_image")
        told = str(result.environment.get("finished", "")), sum(values) / len(values)
        if told[1] == told[1]:
            latest[_kind(result.experiment)] = max(latest.get(_kind(result.experiment), ("", 0.0)), told)
    return History({kind: seconds for kind, (_, seconds) in latest.items()})


def _kind(experiment: Experiment) -> tuple[str, str, str, str]:
    return experiment.method.name, experiment.model.name, experiment.device, experiment.precision
