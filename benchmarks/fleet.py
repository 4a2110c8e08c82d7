"""Measure a fleet on this machine's CPU: ratios within one run, each contender in turns with the others.

``python -m benchmarks.fleet`` writes ``benchmarks/results/fleet_cpu.json``. Times are processor time of this process,
so that other work on the machine counts less; predictions during a step and moves of states are in wall-clock time.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tribe
from tribe.bench.networks import build
from tribe.datasets.embedded import mnist_test
from tribe.engine.state import digest
from tribe.fleet.batching import gather, scatter
from tribe.health.recorder import count_bytes
from tribe.lab.provenance import machine

RESULTS = Path(__file__).parent / "results" / "fleet_cpu.json"
Call = Callable[[], Any]


def in_turns(calls: dict[str, Call], rounds: int, clock: Callable[[], float] = time.process_time) -> dict[str, float]:
    """The median seconds of each call; the calls take turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            call()
            if turn:
                times[name].append(clock() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def digits() -> Tensor:
    """The embedded digits, (10000, 1, 28, 28) in [0, 1]."""
    return torch.from_numpy(mnist_test()[0].copy()).float().unsqueeze(1) / 255


def compact() -> tribe.Backbone:
    """The embedded network."""
    return tribe.Backbone(tribe.models.load("compact", tribe.models.find("compact", "mnist", "data")))


def throughput(streams: int, rounds: int) -> dict[str, Any]:
    """One image of each stream in turn: a fleet, a fleet without exact bits, and separate adapters one by one."""
    net, pixels = compact(), digits()
    fleets = {"fleet": tribe.fleet(net), "not exact": tribe.fleet(net, exact=False)}
    names = [f"cam{i}" for i in range(streams)]
    adapters = [tribe.adapt(net, seed=i) for i in range(streams)]
    given = {name: pixels[i : i + 1] for i, name in enumerate(names)}
    calls: dict[str, Call] = {name: lambda fleet=fleet: fleet(given) for name, fleet in fleets.items()}
    calls["adapters"] = lambda: [adapter(x) for adapter, x in zip(adapters, given.values(), strict=True)]
    seconds = in_turns(calls, rounds)
    method, same = fleets["fleet"].method, 0
    for name in names[:: max(streams // 8, 1)]:  # the oracle: the same images through the method's own step
        state = method.init(net, 1, int(fleets["fleet"].state(name).key.seed[0]))
        for _ in range(fleets["fleet"].clock(name)):
            _, state = method.step(net, state, given[name].unsqueeze(0))
        assert digest(state) == fleets["fleet"].digest(name), "a stream of the fleet differs from the stream alone"
        same += 1
    return {
        "streams": streams,
        "images_per_second": {name: round(streams / s, 1) for name, s in seconds.items()},
        "fleet_over_adapters": round(seconds["adapters"] / seconds["fleet"], 2),
        "not_exact_over_adapters": round(seconds["adapters"] / seconds["not exact"], 2),
        "streams_compared_bit_for_bit": same,
    }


def few_of_many(model: str, rounds: int) -> dict[str, Any]:
    """One frame of 12 streams, all twelve frames, and a lone adapter; and an adapter of 12 streams with one valid."""
    net = tribe.Backbone(build(model, 10, torch.device("cpu")))
    x = torch.rand(12, *tribe.models.architecture(model).shape)
    fleet, lone, padded = tribe.fleet(net), tribe.adapt(net), tribe.adapt(net, streams=12)
    valid = torch.zeros(12, 1, dtype=torch.bool)
    valid[3] = True
    fleet({f"cam{i}": x[i : i + 1] for i in range(12)})
    calls: dict[str, Call] = {
        "one of 12": lambda: fleet({"cam3": x[3:4]}),
        "all 12": lambda: fleet({f"cam{i}": x[i : i + 1] for i in range(12)}),
        "lone adapter": lambda: lone(x[3:4]),
        "adapter of 12 streams, one valid": lambda: padded(x.unsqueeze(1), valid),
    }
    return {"model": model, "milliseconds": _milliseconds(in_turns(calls, rounds))}


def during_a_step(rounds: int) -> dict[str, Any]:
    """Predictions of one image while another thread steps 256 streams: how long they take, beside those in peace."""
    net, pixels = compact(), digits()
    fleet, adapter = tribe.fleet(net), tribe.adapt(net, streams=256)
    given = {f"cam{i}": pixels[i : i + 1] for i in range(256)}
    fleet(given)
    adapter(pixels[:256].unsqueeze(1))
    one = {"cam0": pixels[:1]}
    many = pixels[:256].unsqueeze(1)
    found: dict[str, Any] = {}
    for name, learn, predict in (
        ("fleet", lambda: fleet(given), lambda: fleet.predict(one)),
        ("adapter", lambda: adapter(many), lambda: adapter.predict(many)),
    ):
        quiet = in_turns({"x": predict}, rounds, time.perf_counter)["x"]
        times, stop = [], threading.Event()

        def work(learn: Call = learn, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                learn()

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(rounds):
            start = time.perf_counter()
            predict()
            times.append(time.perf_counter() - start)
        stop.set()
        thread.join()
        busy = {"median": statistics.median(times), "longest": max(times)}
        alone = in_turns({"x": learn}, 2, time.perf_counter)["x"]
        found[name] = _milliseconds({"step": alone, "predict in peace": quiet, **busy})
    return found


def kept_statistics(model: str, classes: int, rounds: int) -> dict[str, Any]:
    """A prediction of one image with class statistics of many classes: a fleet, an adapter, and the plain network."""
    plain = build(model, classes, torch.device("cpu")).eval()
    net = tribe.Backbone(plain)
    x = torch.rand(1, *tribe.models.architecture(model).shape)
    fleet, adapter = tribe.fleet(net).add("cam"), tribe.adapt(net)
    with torch.no_grad():
        calls: dict[str, Call] = {
            "plain network": lambda: plain(x),
            "fleet.predict": lambda: fleet.predict({"cam": x}),
            "Adapter.predict": lambda: adapter.predict(x),
        }
        seconds = in_turns(calls, rounds)
    size = count_bytes(adapter.state) / 2**20
    return {"model": model, "classes": classes, "state_mb": round(size, 1), "milliseconds": _milliseconds(seconds)}


def moving_states(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds for each state to gather, scatter, write to a file and read it back, by the size of a state."""
    rows = []
    for model, classes in (("compact", 10), ("resnet18", 10), ("resnet18", 100), ("resnet50", 100), ("resnet50", 1000)):
        net = tribe.Backbone(build(model, classes, torch.device("cpu")))
        method = tribe.methods.create("tribe", classes=classes)
        size = count_bytes(method.init(net))
        count = max(2, min(8, 2**28 // size))  # at most 256 MB of states, but two
        states = [method.init(net, 1, i) for i in range(count)]
        together = gather(states)
        with tempfile.TemporaryDirectory() as folder:
            fleet = tribe.fleet(net, method).put("cam", states[0])
            calls: dict[str, Call] = {
                "gather": lambda states=states: gather(states),
                "scatter": lambda t=together, n=count: scatter(t, n, n, copy=False),
                "page out to a file": lambda f=fleet, p=folder: f.save("cam", f"{p}/cam"),
                "page in from a file": lambda f=fleet, p=folder: f._files.read(f"{p}/cam"),
            }
            fleet.save("cam", f"{folder}/cam")
            seconds = in_turns(calls, rounds if size < 2**27 else 1, time.perf_counter)
        each = {name: s / count if name in ("gather", "scatter") else s for name, s in seconds.items()}
        rows.append({"model": model, "classes": classes, "state_mb": round(size / 2**20, 2)} | _milliseconds(each))
        del states, together, fleet, calls
    return rows


def _milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * s, 3) for name, s in seconds.items()}


def main() -> None:
    """Measure all, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(torch.device("cpu")), "threads": 1}
    for name, measure in {
        "throughput": lambda: throughput(given.streams, given.rounds),
        "few_of_many": lambda: few_of_many("resnet20", 5 * given.rounds),
        "during_a_step": lambda: during_a_step(10 * given.rounds),
        "kept_statistics": lambda: kept_statistics("resnet50", 1000, given.rounds),
        "moving_states": lambda: moving_states(given.rounds),
    }.items():
        found[name] = measure()
        print(name, json.dumps(found[name]), flush=True)
    given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
