"""The cost of a method for runs in real time: measured once, kept beside the results, and replayed.

``costs.json`` in a folder of results has an entry for each method with its fields, network, data set, batch, precision,
device and threads. A cost is the mean time of a step on the first batches of the stream, learning on and on, divided by
the time of plain inference of the same batches: eager, in the layout of the network. All take turns, and the median
over the rounds counts. So a cost that varies from batch to batch is its mean.
"""

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.clock import Call, summary, time_in_turns, warm_up
from tribe.core.graphs import Steps
from tribe.core.precision import float32_precision
from tribe.experiments.bench.contenders import PLAIN, steps_period
from tribe.experiments.bench.measurement import BenchProgress
from tribe.experiments.experiment import Experiment
from tribe.experiments.provenance import machine
from tribe.experiments.runner import predictions
from tribe.experiments.spec import canonical
from tribe.experiments.workbench import in_precision
from tribe.io import json_files
from tribe.io.files import exclusive, write_atomically
from tribe.methods import AnyMethod

FILE = "costs.json"
BATCHES = 8  # of a timing, at least: some methods learn from every n-th batch only
ROUNDS = 7
COST = json_files.Where(float, lambda cost: 0 < cost < 1e9, "a number above 0")
MEASURED = {...: {"method": str, "cost": COST}}
IN_SUMMARY = {"spec": {"realtime": {"costs": {...: COST}}}}


def read_costs(path: Path, names: Sequence[str]) -> list[float]:
    """Return the cost of each method, from a file such as ``{"tribe": 7.25}`` or the summary of `tribe run --json`."""
    if not path.is_file():
        raise FileNotFoundError(f"no costs at {path}; without --costs they are measured")
    data = json_files.read(path, dict)
    json_files.check(data, IN_SUMMARY if "spec" in data else {...: COST}, str(path))
    costs = data["spec"]["realtime"]["costs"] if "spec" in data else data
    for name in costs.keys() - set(names):
        methods.get(name)  # raises with the names that are near
    if missing := [name for name in names if name not in costs]:
        raise ValueError(f"{path} has no cost of {', '.join(missing)}; add it, or measure all without --costs")
    return [float(costs[name]) for name in names]


def measured_costs(experiments: Sequence[Experiment], root: Path, progress: BenchProgress | None = None) -> list[float]:
    """Return the cost of the method of each experiment, from the folder of results, or measured and added to it.

    The experiments differ in nothing but the method.
    """
    keys, path = [_key(experiment) for experiment in experiments], root / FILE
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root / ".costs.lock", wait=True):  # two measurements at once would disturb each other
        advice = "Remove it to measure again"
        costs = dict(json_files.read(path, MEASURED, advice)) if path.exists() else {}
        if missing := {key: one for key, one in zip(keys, experiments, strict=True) if key not in costs}:
            costs |= dict(zip(missing, measure(list(missing.values()), progress), strict=True))
            write_atomically(path, json.dumps(costs, indent=1).encode() + b"\n")
    return [float(costs[key]["cost"]) for key in keys]


def _key(experiment: Experiment) -> str:
    """Return a hash of what a cost depends on: not the order of the images."""
    facts = {name: value for name, value in experiment.json().items() if name not in ("scenario", "realtime")}
    return hashlib.sha256(canonical(facts).encode()).hexdigest()[:16]


def measure(experiments: Sequence[Experiment], progress: BenchProgress | None = None) -> list[dict[str, Any]]:
    """Time the methods of experiments and plain inference in turns; return the entry of each in the file of costs."""
    first = experiments[0]
    assert first.parts is not None
    stream, device = first.parts.stream, first.parts.net.device
    with contextlib.ExitStack() as stack:
        stack.enter_context(float32_precision(first.precision))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(first.threads or torch.get_num_threads())
        images = [batch.x[:1, batch.valid[0]].to(device) for batch in itertools.islice(stream, BATCHES)]
        images = [x for x in images if x.shape[1] == images[0].shape[1]]
        calls: dict[str, Call] = {}
        periods = {PLAIN: BATCHES}
        for number, each in enumerate(experiments):
            assert each.parts is not None
            net, method = in_precision(each.parts.net, each.parts.method, each.precision)
            name = f"{number} {each.method.name}"
            calls.setdefault(PLAIN, _plain(net, images))
            calls[name] = _steps(net, method, images)
            period = steps_period(method, images[0].shape[1])
            periods[name] = period * math.ceil(BATCHES / period)
        done, total = itertools.count(1), len(calls) * (ROUNDS + 1)

        def advance(name: str) -> None:
            if progress is not None:
                progress(next(done), total, name.partition(" ")[2] or name)

        for name, call in calls.items():
            warm_up(call, device)
            advance(name)
        times = time_in_turns(calls, ROUNDS, device, periods=periods, on_timing=advance)
    plain, *others = times.values()
    computer, entries = machine(device), []
    for each, found in zip(experiments, others, strict=True):
        cost, spread = summary([one / other for one, other in zip(found, plain, strict=True)])
        entry = {"method": each.method.name, "cost": float(f"{cost:.4g}"), "spread": spread}
        entries.append(entry | {"seconds": summary(found)[0], "seconds_plain": summary(plain)[0], "machine": computer})
    return entries


def _plain(net: Backbone, images: Sequence[Tensor]) -> Call:
    """Return a call that predicts the next batch with the plain network."""
    model, batches = net.plain(*net.source()), itertools.cycle([x[0].to(net.dtype) for x in images])
    return torch.no_grad()(lambda: model(next(batches)))


def _steps(net: Backbone, method: AnyMethod, images: Sequence[Tensor]) -> Call:
    """Return a call that takes the next step, as a run does."""
    steps, batches = Steps(method, net, deterministic=net.device.type == "cuda"), itertools.cycle(images)
    state, retired = method.init(net), None

    def call() -> None:
        nonlocal state, retired
        old, (output, state) = state, steps(state, next(batches), None, retired)
        retired = old
        predictions(output)  # waits for the device

    return call
