"""Measure a fleet: ratios within one run, each contender in turns with the others.

``python -m benchmarks.fleet`` measures on this machine's CPU and writes ``benchmarks/results/fleet_cpu.json``. Times
are processor time of this process, so that other work on the machine counts less; predictions during a step and moves
of states are in wall-clock time.

``python -m benchmarks.fleet --device cuda --model wrn28_10 --streams 64`` measures one thing on a GPU: one image of
each stream in one step, beside the same images one by one. It needs nothing but torch, numpy and safetensors. Results
go to a JSON file in ``--out``, named after the device and the network.
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
from tribe.core.clock import peak_memory, summary, time_in_turns, warm_up
from tribe.core.precision import PRECISIONS, choose_device, float32_precision, precision_on
from tribe.core.state import count_bytes, digest
from tribe.data.datasets.files import mnist_test
from tribe.experiments.bench.contenders import build, noise
from tribe.experiments.provenance import machine
from tribe.health import Snapshot
from tribe.streams.batching import gather, scatter

RESULTS = Path(__file__).parent / "results"
ALONE = 8  # streams that are measured one by one: each has recordings of its own, which take a second to make
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
    """One image of each stream in turn: a fleet, a fleet with exact bits, and separate adapters one by one."""
    net, pixels = compact(), digits()
    fleets = {"exact": tribe.fleet(net, exact=True), "fleet": tribe.fleet(net)}
    names = [f"cam{i}" for i in range(streams)]
    adapters = [tribe.adapt(net, seed=i) for i in range(streams)]
    given = {name: pixels[i : i + 1] for i, name in enumerate(names)}
    calls: dict[str, Call] = {name: lambda fleet=fleet: fleet(given) for name, fleet in fleets.items()}
    calls["adapters"] = lambda: [adapter(x) for adapter, x in zip(adapters, given.values(), strict=True)]
    seconds = in_turns(calls, rounds)
    method, same = fleets["exact"].method, 0
    for name in names[:: max(streams // 8, 1)]:  # the oracle: the same images through the method's own step
        state = method.init(net, 1, int(fleets["exact"].state(name).key.seed[0]))
        for _ in range(fleets["exact"].clock(name)):
            _, state = method.step(net, state, given[name].unsqueeze(0))
        assert digest(state) == fleets["exact"].digest(name), "a stream of the fleet differs from the stream alone"
        same += 1
    return {
        "streams": streams,
        "images_per_second": {name: round(streams / s, 1) for name, s in seconds.items()},
        "fleet_over_adapters": round(seconds["adapters"] / seconds["fleet"], 2),
        "exact_over_adapters": round(seconds["adapters"] / seconds["exact"], 2),
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
            fleet = tribe.fleet(net, method).restore("cam", Snapshot(method, states[0], net, frozen=False))
            calls: dict[str, Call] = {
                "gather": lambda states=states: gather(states),
                "scatter": lambda t=together, n=count: scatter(t, n, n, copy=False),
                "save": lambda f=fleet, p=folder: f.save("cam", f"{p}/cam"),
                "load": lambda f=fleet, p=folder: f.load("cam", f"{p}/cam"),
            }
            fleet.save("cam", f"{folder}/cam")
            seconds = in_turns(calls, rounds if size < 2**27 else 1, time.perf_counter)
        each = {name: s / count if name in ("gather", "scatter") else s for name, s in seconds.items()}
        rows.append({"model": model, "classes": classes, "state_mb": round(size / 2**20, 2)} | _milliseconds(each))
        del states, together, fleet, calls
    return rows


def one_by_one(model: str, streams: int, rounds: int, precision: str, place: torch.device) -> dict[str, Any]:
    """One image of each stream: one step of a fleet, a fleet stream by stream, and adapters one by one.

    Steps are captured in CUDA graphs where that is possible. The contenders that go one by one take `ALONE` streams.
    """
    net = tribe.Backbone(build(model, 10, place))
    net = net.to(torch.bfloat16) if precision == "bf16" else net
    x = noise((streams, 1, *tribe.models.architecture(model).shape), place)
    given = {f"cam{i}": own for i, own in enumerate(x)}
    few = dict(list(given.items())[:ALONE])
    together, apart = tribe.fleet(net), tribe.fleet(net)
    adapters = [tribe.adapt(net, seed=i) for i in range(len(few))]
    calls: dict[str, Call] = {
        "fleet": lambda: together(given),
        "fleet, stream by stream": lambda: [apart({name: own}) for name, own in few.items()],
        "adapters": lambda: [adapter(own) for adapter, own in zip(adapters, few.values(), strict=True)],
    }
    images = {"fleet": streams, "fleet, stream by stream": len(few), "adapters": len(few)}
    with peak_memory(place) as peak:
        for call in calls.values():
            warm_up(call, place)
        times = time_in_turns(calls, rounds, place, block=0.25)
    each = {name: summary(found)[0] / images[name] for name, found in times.items()}
    return {
        "model": model,
        "streams": streams,
        "precision": precision,
        "unbatched_reason": together.unbatched_reason,
        "adapters_not_captured_because": adapters[0].capture_disabled_reason,
        "peak_mb": None if peak.bytes is None else round(peak.bytes / 2**20),
        "milliseconds_an_image": _milliseconds(each),
        "spread": {name: round(summary(found)[1], 4) for name, found in times.items()},
        "fleet_over_adapters": round(each["adapters"] / each["fleet"], 2),
        "fleet_over_stream_by_stream": round(each["fleet, stream by stream"] / each["fleet"], 2),
    }


def _milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * s, 3) for name, s in seconds.items()}


def main(argv: list[str] | None = None) -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser("python -m benchmarks.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="measure only one step of all streams against one by one, on this network")
    parser.add_argument("--device", default="cpu", help="for --model (default: %(default)s)")
    parser.add_argument("--precision", default="tf32", choices=PRECISIONS, help="for --model (default: %(default)s)")
    parser.add_argument("--streams", type=int, help="default: 1000, with --model 64")
    parser.add_argument("--rounds", type=int, help="default: 2, with --model 7")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    given = parser.parse_args(argv)
    place = choose_device(given.device)
    if given.model is None and place.type != "cpu":
        parser.error(f"on {place.type} one network is measured: give --model, such as wrn28_10")
    measures: dict[str, Callable[[], Any]]
    if given.model is not None:
        path = given.out / f"fleet_{place.type}_{given.model}.json"
        precision = precision_on(place, given.precision)
        streams, rounds = given.streams or 64, given.rounds or 7
        measures = {"one_by_one": lambda: one_by_one(given.model, streams, rounds, precision, place)}
    else:
        path, streams, rounds = given.out / "fleet_cpu.json", given.streams or 1000, given.rounds or 2
        measures = {
            "throughput": lambda: throughput(streams, rounds),
            "few_of_many": lambda: few_of_many("resnet20", 5 * rounds),
            "during_a_step": lambda: during_a_step(10 * rounds),
            "kept_statistics": lambda: kept_statistics("resnet50", 1000, rounds),
            "moving_states": lambda: moving_states(rounds),
        }
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(place), "threads": 1}
    with float32_precision(given.precision):
        for name, measure in measures.items():
            found[name] = measure()
            print(name, json.dumps(found[name]), flush=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
