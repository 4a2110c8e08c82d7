"""Measure the cost of more classes: steps on one network with heads of different sizes, interleaved.

``python -m benchmarks.classes --model resnet50 --classes 10,1000``
"""

import argparse
import copy
from functools import partial

import torch
from torch import nn

import tribe
from tribe.core.clock import Call, summary, time_in_turns, warm_up
from tribe.core.precision import float32_precision
from tribe.experiments.bench.contenders import build, noise
from tribe.experiments.bench.results import milliseconds, table


def contenders(model: str, methods: list[str], counts: list[int], batch: int, place: torch.device) -> dict[str, Call]:
    """Return each method's step for each number of classes, on the same body."""
    design = tribe.models.architecture(model)
    body, x = build(model, counts[0], place), noise((batch, *design.shape), place)
    calls: dict[str, Call] = {}
    for count in counts:
        net = copy.deepcopy(body)
        parent, _, child = design.head.rpartition(".")
        width = net.get_submodule(design.head).in_features
        setattr(net.get_submodule(parent), child, nn.Linear(width, count, device=place))
        for method in methods:
            calls[f"{method}, {count} classes"] = partial(tribe.adapt(net, method), x)
    return calls


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m benchmarks.classes", description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="resnet50")
    p.add_argument("--methods", default="tribe")
    p.add_argument("--classes", default="10,1000")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = p.parse_args(argv)
    place, methods = torch.device(o.device), o.methods.split(",")
    with float32_precision("tf32"):
        calls = contenders(o.model, methods, [int(n) for n in o.classes.split(",")], o.batch, place)
        for call in calls.values():
            warm_up(call, place)
        took = {name: summary(times) for name, times in time_in_turns(calls, o.repeats, place).items()}
    firsts = {name.partition(",")[0]: took[name][0] for name in reversed(took)}
    cells = [
        (name, milliseconds(1e3 * median), f"{spread:.0%}", f"{median / firsts[name.partition(',')[0]]:.3f}")
        for name, (median, spread) in took.items()
    ]
    print(f"{o.model}, batch {o.batch}\n\n{table(('', 'ms/step', 'spread', 'ratio'), cells)}")


if __name__ == "__main__":
    main()
