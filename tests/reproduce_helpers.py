"""Calls of `tribe reproduce`, and results for it that nobody computed, for tests."""

import json
import re
from pathlib import Path

from commands import tribe_command
from reproduction import gather
from reproduction.compare import compare_plan
from reproduction.document import make_document
from tribe import methods
from tribe.data import datasets, scenarios
from tribe.experiments import bench
from tribe.experiments.experiment import Experiment
from tribe.experiments.spec import ComponentSpec, describe

EMBEDDED = ("--dataset", "live-mnist-c", "--model", "compact", "--device", "cpu")
SMALL = (*EMBEDDED, "--set", "dataset.corruptions=('impulse_noise',)")  # a domain of 1,000 to 10,000 images
MINE = """
from dataclasses import dataclass
from tribe.methods.bn import BN

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


def compared(plan, root="runs"):
    """Compare what lies in a folder with the paper."""
    return compare_plan(plan, gather.results_of(plan, root))


def rename(result, spec, root):
    """Results as if they were of another experiment."""
    experiment = Experiment.from_json(spec)
    seeds = [str(seed) for seed in experiment.seeds]
    metrics, environment = (json.loads((result.folder / f"{n}.json").read_text()) for n in ("metrics", "environment"))
    metrics["seeds"] = dict(zip(seeds, metrics["seeds"].values(), strict=True))
    environment["seconds_per_image"] = dict(zip(seeds, environment["seconds_per_image"].values(), strict=True))
    spec_file = {"format": "tribe-experiment", "schema": 2, "spec": spec}
    folder = root / experiment.id
    folder.mkdir(parents=True)
    for name, content in (("metrics", metrics), ("environment", environment), ("spec", spec_file)):
        (folder / f"{name}.json").write_text(json.dumps(content | {"id": experiment.id}))


def elsewhere(result, root, **changes):
    """A result as if it came from a machine with weights and a GPU."""
    spec = result.experiment.json() | {"device": "cuda", "threads": None, "precision": "tf32"} | changes
    rename(result, spec | {"model": {"name": "wrn28_10", "fields": {}}}, root)


def outdate(folder, error=0.99):
    """A result as an older version of its method left it: other errors, another digest of its code, no records."""
    for record in folder.glob("record-*.npz"):
        record.unlink()
    metrics, environment = (json.loads((folder / f"{n}.json").read_text()) for n in ("metrics", "environment"))
    for scores in metrics["seeds"].values():
        scores["instance_error"] = error
    environment["code"]["method"] = "0" * 16
    for name, content in (("metrics", metrics), ("environment", environment)):
        (folder / f"{name}.json").write_text(json.dumps(content))


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
        *(seeds, batch, "tf32", "cuda", None),
    )
    instance, category = (error / 100 for error in errors)
    scores = {"images": 10, "instance_error": instance, "calibration_error": None}
    scores |= {"category_error": category, "category_error_absent_correct": category}
    scores |= {
        "domain_error": dict.fromkeys(data.domains, instance),
        "class_counts": dict.fromkeys(data.domains, [0] * 10),
    }
    machine = {"device": "a GPU", "torch": "2.11", "tribe": "1"}
    environment = {"machine": machine, "seconds": 36.0, "finished": "2026-01-02T03:04:05+00:00"}
    environment["seconds_per_image"] = {str(seed): seconds for seed in seeds}
    files = {"metrics": {"seeds": {str(seed): scores for seed in seeds}}, "environment": environment}
    files["spec"] = {"format": "tribe-experiment", "spec": experiment.json()}
    folder = Path(root) / experiment.id
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content | {"schema": 2, "id": experiment.id}))


def page_of(root):
    """The document of results, with its long lines whole again."""
    whole = []
    for line in make_document(root).page.split("\n"):
        goes_on = (
            whole and line and whole[-1] and whole[-1][0] not in "|#" and not line.lstrip().startswith(("-", "|", "#"))
        )
        if goes_on:
            whole[-1] += f" {line.strip()}"
        else:
            whole.append(line)
    return "\n".join(whole)


def lines_of(page, heading):
    """The lines below a heading, up to the next."""
    (found,) = re.findall(rf"^###? {re.escape(heading)}[^\n]*\n(.*?)(?=^##|\Z)", page, re.M | re.S)
    return [line for line in found.splitlines() if line]


def measure(ms, precision="tf32"):
    """What `tribe bench` says of methods, beside the results."""
    setting = bench.Setting("wrn28_10", (3, 32, 32), 10, device="cuda", precision=precision)
    rows = tuple(bench.BenchRow(name, each, 0.0, {}, 1.0, 0.5, None, 0) for name, each in ms.items())
    measured = bench.BenchResult(setting, {"device": "a GPU"}, 5, 1.0, rows)
    Path("results/bench").mkdir(exist_ok=True)
    bench.write(f"results/bench/{precision}.json", bench.to_data(measured))


def draw(name, errors, textbook=(76.0, 79.0, 79.0), **changes):
    """What `python -m benchmarks.textbook` says of instance errors, beside the results."""
    drawn = {"dataset": "cifar10-c", "images": "e" * 32, "model": "wrn28_10", "weights": "f" * 32, "method": "tent"}
    drawn |= {"imbalance": 100.0, "seed": 425, "batch": 64, "precision": "tf32", "device": "cuda"}
    drawn["ours"] = {"inst": errors, "cat": [61.0] * len(errors)}
    drawn["textbook"] = {"inst": textbook, "cat": [60.0, 61.0, 62.0][: len(textbook)]}
    Path("results/draws").mkdir(exist_ok=True)
    Path(f"results/draws/{name}.json").write_text(json.dumps(drawn | changes))
