"""Measure the peak memory of methods beside plain inference, each in a process of its own.

``python -m benchmarks.peak --methods bank,bank-tribe,tribe``

Two numbers: what torch allocates during a step, which is the same in every run, and how far the resident memory of the
process rises above that with the network and the images, which also counts what libraries take. The state counts as
part of the peak. Plain inference is the network in channels-last layout.
"""

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

import tribe
from tribe.core.clock import Call, peak_memory
from tribe.core.state import count_bytes
from tribe.experiments.bench.contenders import CHANNELS_LAST, build, noise
from tribe.experiments.bench.results import size, table

CALLS = 6  # steps: rare learning is among them


def allocated(call: Call) -> int:
    """Return the most bytes that torch holds at a time during a call, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(name: str, model: str, classes: int, batch: int) -> dict[str, int | None]:
    """Return the peaks of a contender in this process."""
    torch.set_num_threads(1)
    net, x = build(model, classes), noise((batch, *tribe.models.architecture(model).shape))
    state = 0
    if name == CHANNELS_LAST:
        net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        call: Call = torch.no_grad()(partial(net, x))
    else:
        adapter = tribe.adapt(net, name)
        state, call = count_bytes(adapter.state), partial(adapter, x)
    with peak_memory(torch.device("cpu")) as peak:
        for _ in range(CALLS):
            call()
    return {"allocated": state + max(allocated(call) for _ in range(CALLS)), "resident": peak.bytes, "state": state}


def in_own_process(options: argparse.Namespace, name: str) -> dict[str, int | None]:
    """Return the peaks of a contender in a process that does nothing else; of the resident memory the median."""
    words = ["--model", options.model, "--classes", str(options.classes), "--batch", str(options.batch)]
    command = [sys.executable, "-m", "benchmarks.peak", *words, "--alone", name]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(options.runs)]
    found = [run["resident"] for run in runs if run["resident"] is not None]
    return {**runs[0], "resident": round(statistics.median(found)) if found else None}


def show(peaks: dict[str, dict[str, int | None]]) -> str:
    """Return the table; the first row is what the others are compared with."""
    first, rows = next(iter(peaks.values())), []
    for name, own in peaks.items():
        cells = [name]
        for key in ("allocated", "resident"):
            mine, other = own[key], first[key]
            cells += ["unknown", ""] if mine is None or not other else [size(mine), f"{mine / other:.2f}"]
        rows.append((*cells, size(own["state"])))
    return table(("", "allocated", "x", "resident", "x", "state"), rows)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m benchmarks.peak", description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="resnet20")
    p.add_argument("--methods", default="source,bank,bank-tribe,tent,tribe")
    p.add_argument("--classes", type=int, default=10)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--runs", type=int, default=3, help="processes for each method")
    p.add_argument("--alone", help="measure this one in this process, and print JSON")
    options = p.parse_args(argv)
    if options.alone:
        print(json.dumps(measure(options.alone, options.model, options.classes, options.batch)))
    else:
        print(show({name: in_own_process(options, name) for name in (CHANNELS_LAST, *options.methods.split(","))}))


if __name__ == "__main__":
    main()
