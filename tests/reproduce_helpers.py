"""Calls of `tribe reproduce` and results for it that were not computed, for tests."""

from pathlib import Path

from commands import tribe_command
from tribe import methods
from tribe.data import datasets, scenarios
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec, describe
from tribe.experiments.store import Result, ResultStore, StreamResult

EMBEDDED = ("--set", "dataset=live-mnist-c", "--set", "model=compact", "--device", "cpu")
SMALL = (*EMBEDDED, "--set", "dataset.corruptions=('impulse_noise',)")  # a domain of 1,000 to 10,000 images
MINE = """
from dataclasses import dataclass
from tribe.methods.source import BN

@dataclass(frozen=True)
class Mine(BN):
    '''Batch statistics again.'''
    broken: bool = False

    def init(self, net, streams=1, seed=0):
        print("not for stdout, which programs read")
        if self.broken:
            raise ValueError("mine is broken")
        return super().init(net, streams, seed)
"""


def call(*arguments):
    return tribe_command("reproduce", *arguments)


def outdate(result, error=0.99):
    """Store a result again as an older version of its method left it: other errors, another digest, no records."""
    streams = {}
    for seed, (metrics, environment) in result.streams.items():
        (result.folder / f"record-{seed}.npz").unlink(missing_ok=True)
        code = {**environment["code"], "method": "0" * 16}
        streams[seed] = StreamResult({**metrics, "instance_error": error}, {**environment, "code": code})
    ResultStore(result.root).add(Result(result.experiment, result.root, streams))


def fabricate(
    errors,
    root,
    *,
    method,
    imbalance=100,
    scenario="gli-f",
    seeds=(425,),
    batch=64,
    fields=None,
    seconds=0.001,
    images="e" * 32,
    weights="f" * 32,
    played=("cifar10-c", "wrn28_10"),
    **data_fields,
):
    """Results that nobody has computed, with these instance and category errors, in percent."""
    built = methods.create(
        method, **{**methods.get(method).presets.get("cifar10", {}), "classes": 10, **(fields or {})}
    )
    stream = scenarios.create(scenario, **({} if imbalance is None else {"imbalance": imbalance}))
    data = datasets.create(played[0], **data_fields)
    experiment = Experiment(
        describe(played[0], data),
        images,
        ComponentSpec(played[1]),
        weights,
        describe(scenario, stream.on(data.domains)),
        describe(method, built),
        *(batch, "tf32", "cuda", None, seeds),
    )
    instance, category = (error / 100 for error in errors)
    scores = {"images": 10, "instance_error": instance, "calibration_error": None}
    scores |= {"category_error": category, "category_error_absent_correct": category}
    scores |= {
        "domain_error": dict.fromkeys(data.domains, instance),
        "class_counts": dict.fromkeys(data.domains, [0] * 10),
    }
    machine = {"device": "a GPU", "torch": "2.11", "tribe": "1"}
    environment = {"machine": machine, "seconds_per_image": seconds, "finished": "2026-01-02T03:04:05+00:00"}
    streams = {seed: StreamResult(scores, environment) for seed in seeds}
    ResultStore(root).add(Result(experiment, Path(root), streams))
