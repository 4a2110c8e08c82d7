"""Errors on a corrupted stream: ``python -m benchmarks.accuracy cifar10 --weights wrn28_10_cifar10.safetensors``.

Takes a clean test set in its published format, corrupts it on the fly at severity 5, plays the 15 corruptions as
GLI-TTA-F (or another scenario) and prints instance and category error and time per image of each method.
"""

import argparse
import json
import sys

import torch

import tribe
from benchmarks.measure import float32_precision, machine
from tribe.atomic import write_atomically
from tribe.datasets.corrupted import Corrupted

NETWORKS = {"cifar10": "wrn28_10", "cifar100": "resnext29", "mnist": "resnet18_mnist"}


def main(argv: list[str] | None = None) -> None:
    options = parser().parse_args(argv)
    data = tribe.datasets.create(options.dataset, data=options.data)
    names = tribe.scenarios.MNIST_C if options.dataset == "mnist" else tribe.scenarios.CIFAR_C
    fields = {"imbalance": options.imbalance} if options.scenario.startswith("gli") else {}
    scenario = tribe.scenarios.create(options.scenario, **fields)
    stream = tribe.Stream(Corrupted(data, names), scenario, options.seed or [425], options.batch)
    network = options.network or NETWORKS[options.dataset]
    net = tribe.Backbone(tribe.models.load(network, options.weights).to(options.device))
    results = []
    with float32_precision(options.precision):
        for name in options.method or ["source", "tribe"]:
            method = tribe.methods.create(name, classes=len(data.classes))
            for record in tribe.run(net, method, stream, spec={"network": network}, progress=show(name)):
                results.append(row := score(name, record))
                print(
                    f"{name:8} seed {row['seed']}: instance {row['instance']:.2f} category {row['category']:.2f} "
                    f"({row['ms']:.3f} ms) " + " ".join(f"{v:.1f}" for v in row["domains"]),
                    flush=True,
                )
    if options.json:
        facts = {"machine": machine(torch.device(options.device)), "options": vars(options), "results": results}
        write_atomically(options.json, json.dumps(facts, indent=1, default=str).encode())


def score(name: str, record: tribe.Record) -> dict[str, object]:
    return {
        "method": name,
        "seed": record.spec["seed"],
        "instance": 100 * tribe.metrics.instance_error(record).item(),
        "category": 100 * tribe.metrics.category_error(record).item(),
        "ms": 1e3 * tribe.metrics.seconds_per_image(record).item(),
        "domains": (100 * tribe.metrics.domain_error(record)).tolist(),
    }


def show(name: str):
    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{name}: {done}/{of}\033[K", end="\r" if done == of else "", file=sys.stderr, flush=True)

    return progress


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m benchmarks.accuracy", description=__doc__.partition("\n")[0])
    p.add_argument("dataset", choices=sorted(NETWORKS))
    p.add_argument("--weights", required=True, help="safetensors of the source network")
    p.add_argument("--data", help="root of the data sets; default: $TRIBE_DATA or the cache directory")
    p.add_argument("--network", help="default: the paper's for the data set")
    p.add_argument("--method", choices=tribe.methods.names(), action="append", help="default: source and tribe")
    p.add_argument("--scenario", choices=tribe.scenarios.names(), default="gli-f")
    p.add_argument("--imbalance", type=float, default=100.0)
    p.add_argument("--seed", type=int, action="append", help="repeatable: a stream each; default 425")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--precision", choices=("float32", "tf32"), default="float32", help="float32 is IEEE's")
    p.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    return p


if __name__ == "__main__":
    main()
