"""Measure a worker under five times the load that it can answer: what is late, what is refused, memory, recovery.

``python -m benchmarks.overload --out benchmarks/results``

The embedded digits network, 16 streams, one image a request, a store in a temporary folder. First the capacity: as many
requests as clients get answered, with learning and without. Then requests come at a fixed rate, five times the
capacity without learning, each with a deadline, whether earlier ones are answered or not. Then the load falls to a
tenth. The clients run on the worker's event loop, so their work counts as load, too.
"""

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import tribe
from tribe.data.datasets.files import mnist_test
from tribe.experiments.provenance import machine
from tribe.io.files import write_atomically
from tribe.serve.errors import Unavailable
from tribe.serve.server import shorten_collections
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker

RESULTS = Path(__file__).parent / "results"
STREAMS = 16
OVERLOAD = 5  # times the capacity
CALM = 0.1  # of the capacity with learning, after the overload
STEPS = 4  # of all streams in the time until a deadline: enough for a step, with others before it
TICK = 0.005  # seconds between two bursts of requests
OUTCOMES = ("adapted", "predicted", "refused")


class Ended:
    """How requests ended. The memory for all of them is taken at the start, so that it is not taken for the worker's.

    Args:
        most: requests that there can be.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self.sent, self.seconds = np.ones(most), np.ones(most)
        self.outcome = np.ones(most, np.int8)  # a position in OUTCOMES

    def add(self, sent: float, seconds: float, outcome: str) -> None:
        """Note one request."""
        self.sent[self.count], self.seconds[self.count] = sent, seconds
        self.outcome[self.count] = OUTCOMES.index(outcome)
        self.count += 1

    def finish(self) -> "Ended":
        """Drop what was not used, and sort by the time of sending."""
        order = np.argsort(self.sent[: self.count], kind="stable")
        self.sent, self.seconds, self.outcome = (
            a[: self.count][order] for a in (self.sent, self.seconds, self.outcome)
        )
        return self

    def was(self, outcome: str) -> NDArray[np.bool_]:
        """Which requests ended so."""
        found: NDArray[np.bool_] = self.outcome == OUTCOMES.index(outcome)
        return found


def images() -> Iterator[Tensor]:
    """Digits, one at a time, for ever."""
    digits = torch.tensor(mnist_test()[0][:1000])[:, None] / 255
    while True:
        yield from digits.split(1)


async def capacity(worker: Worker, seconds: float, learn: bool) -> float:
    """Answers a second, to clients that each wait for their answer before they ask again: four a stream."""
    source, count, until = images(), 0, time.monotonic() + seconds

    async def client(stream: str) -> None:
        nonlocal count
        while time.monotonic() < until:
            await worker.infer(stream, next(source), learn=learn)
            count += 1

    await asyncio.gather(*(client(f"cam{i % STREAMS}") for i in range(4 * STREAMS)))
    return count / seconds


async def load(worker: Worker, rate: float, seconds: float, patience: float) -> tuple[Ended, list[int]]:
    """Requests at a fixed rate, whoever is answered; how they ended, and the memory in use at every second."""
    source, ended, memory, tasks = images(), Ended(int(rate * seconds) + 100), [], set[asyncio.Task[None]]()

    async def ask(number: int) -> None:
        sent = time.monotonic()
        try:
            answer = await worker.infer(f"cam{number % STREAMS}", next(source), deadline=sent + patience)
            outcome = "adapted" if answer.adapted else "predicted"
        except Unavailable:
            outcome = "refused"
        ended.add(sent, time.monotonic() - sent, outcome)

    begun = time.monotonic()
    sent = 0
    while (passed := time.monotonic() - begun) < seconds:
        while sent < rate * min(passed, seconds):
            task = asyncio.create_task(ask(sent))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        if len(memory) <= passed:
            memory.append(resident())
        await asyncio.sleep(TICK)
    await asyncio.gather(*tasks)
    return ended.finish(), memory


def resident() -> int:
    """Bytes of memory that this process uses."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def recovery(calm: Ended) -> float:
    """Seconds after the overload from which on nine in ten requests of every half second are learned at once."""
    slot = (2 * (calm.sent - calm.sent[0])).astype(int)
    adapted = calm.was("adapted")
    bad = [i for i in range(slot[-1]) if (slot == i).any() and adapted[slot == i].mean() < 0.9]
    return (bad[-1] + 1) / 2 if bad else 0.0


async def measure(folder: str, seconds: float, deadline: float | None) -> dict[str, Any]:
    """Capacity, overload and recovery of one worker."""
    torch.set_num_threads(1)
    fleet = tribe.fleet(tribe.models.load("compact", tribe.models.find("compact", "mnist")))
    store = SqliteStore(folder)
    worker = Worker(fleet, store)
    shorten_collections()  # as `tribe serve` does
    await worker.start()
    await capacity(worker, 2, learn=True)  # to warm up
    learning, predicting = await capacity(worker, 5, learn=True), await capacity(worker, 5, learn=False)
    patience = STEPS * STREAMS / learning if deadline is None else deadline
    wild, memory = await load(worker, OVERLOAD * predicting, seconds, patience)
    calm, _ = await load(worker, CALM * learning, 5, patience)
    dropped = dict(worker.scheduler.dropped)
    await worker.stop()
    store.close()
    answered, refused = (np.sort(wild.seconds[chosen]) for chosen in (~wild.was("refused"), wild.was("refused")))
    return {
        "learned_per_second": round(learning),
        "predicted_per_second": round(predicting),
        "offered_per_second": round(wild.count / seconds),
        "offered_over_capacity": round(wild.count / seconds / predicting, 2),
        "deadline_seconds": round(patience, 3),
        "outcomes": {outcome: round(float(wild.was(outcome).mean()), 4) for outcome in OUTCOMES},
        "answered_over_capacity": round(len(answered) / seconds / predicting, 3),
        "answers": len(answered),
        "late_answers": int((answered > patience).sum()),
        "slowest_answer_over_deadline": round(answered[-1] / patience, 3),
        "slowest_refusal_over_deadline": round(refused[-1] / patience, 3) if len(refused) else None,
        "median_refusal_over_deadline": round(refused[len(refused) // 2] / patience, 4) if len(refused) else None,
        "memory_last_over_first_tenth": round(memory[-1] / memory[max(1, len(memory) // 10)], 3),
        "recovery_seconds": recovery(calm),
        "learned_at_once_after": round(float(calm.was("adapted").mean()), 3),
        "dropped": dropped,
    }


def main(argv: list[str] | None = None) -> None:
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m benchmarks.overload", description=__doc__, formatter_class=style)
    p.add_argument("--seconds", type=float, default=60, help="of overload (default: %(default)s)")
    p.add_argument(
        "--deadline", type=float, help=f"of each request; by default the time of {STEPS} steps of all streams"
    )
    p.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    o = p.parse_args(argv)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(folder, o.seconds, o.deadline))
    others = {"load of the machine before, and after": [before, os.getloadavg()[0]]}
    found = {"machine": machine(torch.device("cpu"))} | others | found
    print(json.dumps(found, indent=1))
    write_atomically(o.out / "overload_cpu.json", (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
