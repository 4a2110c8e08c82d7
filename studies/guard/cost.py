"""Measure what watching and guarding cost beside the step of the method alone, in turns.

``python -m studies.guard.cost --model wrn28_10 --device cuda --precision bf16``

Every contender is the method's step over the same images: alone, watched and guarded, captured in CUDA graphs on a GPU.
The guard leans, as a fitted one does. The share is the median over rounds of the ratio to the method alone in the same
round. The results go to a JSON file in ``--out``.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tribe
from studies.play import Clock, add_cost_options, write
from tribe.core.clock import Call, peak_memory, summary, time_in_turns, warm_up
from tribe.core.precision import choose_device, float32_precision, precision_on
from tribe.experiments.bench.contenders import build, noise
from tribe.experiments.provenance import machine


def pictures(shape: tuple[int, ...], place: torch.device) -> torch.Tensor:
    """Images with structure, which a guard lets pass: smoothed noise over a gradient."""
    smooth = nn.functional.avg_pool2d(noise(shape, place), 3, 1, 1)
    return (smooth + torch.linspace(0, 0.3, shape[-1], device=place)).clamp(0, 1)


def measure(
    model: str,
    method: str,
    batch: int,
    rounds: int,
    precision: str,
    place: torch.device,
    settings: dict[str, float],
) -> list[Any]:
    """A row for each contender, the method alone first; ``settings`` are the guard's."""
    architecture = tribe.models.architecture(model)
    x = pictures((batch, *architecture.shape), place)
    net = tribe.Backbone(build(model, architecture.classes, place))
    net = net.to(torch.bfloat16) if precision == "bf16" else net
    calls: dict[str, Call] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in (method, f"{method}+watch", f"{method}+guard"):
        with peak_memory(place) as peak:
            adapter = tribe.adapt(net, name, **(settings if "+guard" in name else {}))
            calls[name] = partial(adapter, x)
            warm_up(calls[name], place)
        held = adapter.health[0].held if adapter.health else 0
        found[name] = {
            "eager": adapter.capture_disabled_reason,
            "held": held,
            "peak_mb": peak.bytes and peak.bytes / 2**20,
        }
    times = time_in_turns(calls, rounds, place)
    rows = []
    for name, taken in times.items():
        ratio = statistics.median(own / alone for own, alone in zip(taken, times[method], strict=True))
        row = {"method": name, "step_ms": 1e3 * summary(taken)[0], "spread": summary(taken)[1], "share": ratio - 1}
        rows.append({key: round(v, 5) if isinstance(v, float) else v for key, v in {**row, **found[name]}.items()})
    return rows


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m studies.guard.cost", description=__doc__, formatter_class=style)
    add_cost_options(p)
    p.set_defaults(out=Path(__file__).parent / "results")
    p.add_argument("--batches", type=int, nargs="+", default=[64])
    p.add_argument("--guard", nargs="*", default=["lean_half=0.05"], help="settings of the guard, such as probe=0")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    place = choose_device(o.device)
    precision = precision_on(place, o.precision)
    shared = {"model": o.model, "rounds": o.rounds, "precision": precision, "machine": machine(place)}
    settings = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in o.guard)}
    rows: list[dict[str, Any]] = []
    clock, path = Clock(), o.out / f"guard_cost_{place.type}_{o.model}_{precision}.json"
    with float32_precision(o.precision):
        for batch in o.batches:
            found = measure(o.model, o.method, batch, o.rounds, precision, place, settings)
            rows += [{"batch": batch, **row} for row in found]
            write(path, shared, rows)
            for row in rows[-3:]:
                clock.say(f"batch {batch}, {row['method']}: step {row['step_ms']:.3f} ms, {row['share']:+.2%}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
