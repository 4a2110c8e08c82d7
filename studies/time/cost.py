"""Measure what the time filter costs beside the step that it follows, for several numbers of classes, in turns.

``python -m studies.time.cost --model wrn28_10 --device cuda``

On a GPU a step is captured in a graph with the filter and without it, and the cost is the difference. On a CPU the
difference drowns in the noise of the machine; there the filter is also timed alone, in the same turns. The results go
to a JSON file in ``--out``; ``python -m studies.time.run --render`` writes them into studies/time/README.md.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tribe
from studies.play import Clock, add_cost_options, write
from tribe.core.clock import Call, summary, time_in_turns, warm_up
from tribe.core.precision import choose_device, float32_precision, precision_on
from tribe.experiments.bench.contenders import build, noise
from tribe.experiments.provenance import machine
from tribe.filters import create

FILTERS = {within: create("time", within=within) for within in ("past", "batch")}


def contenders(
    model: str, method: str, classes: int, batch: int, precision: str, place: torch.device
) -> dict[str, Call]:
    """A method's step, the same step with each filter and, on a CPU, each filter alone."""
    x = noise((batch, *tribe.models.architecture(model).shape), place)
    net = tribe.Backbone(build(model, classes, place))
    net = net.to(torch.bfloat16) if precision == "bf16" else net
    calls: dict[str, Call] = {"step": partial(tribe.adapt(net, method), x)}
    for within, rule in FILTERS.items():
        adapter = tribe.adapt(net, method, time=rule)
        calls[f"step+{within}"] = partial(adapter, x)
        if place.type == "cpu":
            logits = adapter(x).unsqueeze(0)
            state, valid = rule.init(1, classes, logits), torch.ones(1, batch, dtype=torch.bool)
            calls[within] = partial(rule.step, state, logits, valid)
    return calls


def measure(calls: dict[str, Call], rounds: int, place: torch.device) -> list[dict[str, Any]]:
    """Time the contenders in turns: a row for each filter."""
    for call in calls.values():
        warm_up(call, place)
    times = time_in_turns(calls, rounds, place)
    step, spread = summary(times["step"])
    rows = []
    for within in FILTERS:
        added = [with_filter - alone for with_filter, alone in zip(times[f"step+{within}"], times["step"], strict=True)]
        row = {"filter": within, "step_ms": 1e3 * step, "spread": spread, "added_ms": 1e3 * statistics.median(added)}
        row["alone_ms"] = 1e3 * summary(times[within])[0] if within in times else None
        cost = row["added_ms"] if row["alone_ms"] is None else row["alone_ms"]
        row["share"] = cost / row["step_ms"]
        rows.append({name: round(v, 5) if isinstance(v, float) else v for name, v in row.items()})
    return rows


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m studies.time.cost", description=__doc__, formatter_class=style)
    add_cost_options(p)
    p.set_defaults(out=Path(__file__).parent / "results")
    p.add_argument("--classes", default="10,100,1000", help="numbers of classes, with commas (default: %(default)s)")
    p.add_argument("--batch", type=int, default=64)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    place = choose_device(o.device)
    shared = {name: getattr(o, name) for name in ("model", "method", "batch", "rounds")}
    shared |= {"precision": precision_on(place, o.precision), "device": place.type, "machine": machine(place)}
    rows: list[dict[str, Any]] = []
    clock, path = Clock(), o.out / f"time_cost_{place.type}_{o.model}.json"
    with float32_precision(o.precision):
        for classes in map(int, o.classes.split(",")):
            calls = contenders(o.model, o.method, classes, o.batch, o.precision, place)
            rows += [{"classes": classes, **row} for row in measure(calls, o.rounds, place)]
            write(path, shared, rows)
            for row in rows[-len(FILTERS) :]:
                alone = "" if row["alone_ms"] is None else f", filter alone {row['alone_ms']:.3f} ms"
                took = f"step {row['step_ms']:.3f} ms, added {row['added_ms']:.3f} ms{alone}"
                clock.say(f"K = {classes}, {row['filter']}: {took}: {row['share']:.2%} of the step")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
