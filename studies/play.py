"""What the studies of the time filter share: play a method once over a stream, then filter its predictions.

A filter stands behind a method and changes nothing that the method learns. So a method plays each stream once, its
predictions are kept, and every filter reads them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe import scenarios
from tribe.core.backbone import Backbone
from tribe.core.precision import PRECISIONS, precision_on
from tribe.data.datasets import Dataset, optional
from tribe.data.scenarios import Scenario, Schedule
from tribe.experiments import metrics
from tribe.experiments.provenance import machine
from tribe.experiments.realtime import Realtime
from tribe.experiments.record import Record
from tribe.experiments.replay import replay
from tribe.experiments.runner import run
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Workbench, in_precision
from tribe.filters import Filtered, TimeFilter, create, informative
from tribe.filters.markov import Markov, MarkovState
from tribe.io.files import write_atomically
from tribe.methods import Method

BATCH = 64
FILTERS: dict[str, TimeFilter | None] = {  # by the words of the results
    "none": None,
    "past": create("time"),
    "batch": create("time", within="batch"),
    "cofa": create("cofa"),
}


class InMemory:
    """A data set whose images are read once and kept in memory."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.classes, self.domains = dataset, dataset.classes, dataset.domains
        self._images: dict[str, Tensor] = {}

    def labels(self, domain: str) -> Tensor:
        """As the data set."""
        return self.dataset.labels(domain)

    def images(self, domain: str, index: Tensor) -> Tensor:
        """As the data set."""
        if domain not in self._images:
            self._images[domain] = self.dataset.images(domain, torch.arange(len(self.labels(domain))))
        return self._images[domain][index]


class Subset:
    """Some images of each domain of a data set."""

    def __init__(self, dataset: Any, choose: Callable[[int], Tensor]) -> None:
        """``choose`` returns the positions to keep among so many images of a domain."""
        self.dataset, self._choose, self.classes = dataset, choose, dataset.classes
        self.domains: tuple[str, ...] = tuple(dataset.domains)
        self.clean_name, self.outputs = optional(dataset, "clean_name"), optional(dataset, "outputs")

    def labels(self, domain: str) -> Tensor:
        """Return those of the chosen images."""
        labels: Tensor = self.dataset.labels(domain)
        return labels[self._choose(len(labels))]

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Return some of the chosen images."""
        chosen = self._choose(len(self.dataset.labels(domain)))
        images: Tensor = self.dataset.images(domain, chosen[index])
        return images


class Bench(NamedTuple):
    """A data set in memory, and a way to build methods for it."""

    data: InMemory
    method: Callable[[str], tuple[Backbone, Method]]  # with the network in the precision of the study
    device: torch.device


def open_bench(o: argparse.Namespace) -> Bench:
    """Open what the options name."""
    workbench = Workbench(o.data, o.device, {o.model: o.weights} if o.weights else None)
    data = workbench.dataset(ComponentSpec(o.dataset))
    net = workbench.network(o.model, data, {})

    def method(name: str) -> tuple[Backbone, Method]:
        built = workbench.method(name, net, data, o.model, {})
        return in_precision(net, built, precision_on(workbench.device, o.precision))

    return Bench(InMemory(data), method, workbench.device)


@dataclass(frozen=True)
class Shortened(Scenario):
    """The beginning of another scenario's stream."""

    _: KW_ONLY
    whole: Scenario
    most: int  # images

    def schedule(self, labels: Sequence[Tensor], seed: int) -> Schedule:
        """Cut the other's schedule."""
        return Schedule(*(t[: self.most] for t in self.whole.schedule(labels, seed)))


class AlwaysOn(Markov):
    """The Markov filter without its switch."""

    def step(self, state: MarkovState, logits: Tensor, valid: Tensor) -> Filtered:
        """Use the belief for every image."""
        return super().step(state, logits, valid)._replace(used=informative(logits, valid))


def play(
    bench: Bench,
    method: str,
    scenario: Scenario,
    seeds: Sequence[int],
    limit: int | None = None,
    realtime: Realtime | None = None,
) -> list[Record]:
    """Adapt over the streams of all seeds side by side; ``limit``: the most images of each."""
    net, built = bench.method(method)
    whole = scenario.on(bench.data.domains)
    shown = whole if limit is None else Shortened(whole.domains, whole=whole, most=limit)
    stream = Stream(bench.data, shown, seeds, BATCH)  # type: ignore[arg-type]
    return run(net, built, stream, spec={}, keep_outputs=True, progress=Progress(method), realtime=realtime)


def filtered(bench: Bench, records: list[Record], rule: TimeFilter | None) -> list[Record]:
    """The records with the answers of a filter; None: as they are."""
    return records if rule is None else replay(records, rule, spec={}, device=bench.device)


def errors(record: Record) -> dict[str, float]:
    """Instance and category error in %."""
    both = {"inst": metrics.instance_error(record), "cat": metrics.category_error(record)}
    return {name: round(100 * float(error), 3) for name, error in both.items()}


def cell_scenario(cell: str) -> Scenario:
    """The scenario of a cell: F100 is GLI-F at imbalance 100, V10 is GLI-V at 10, F1 is PTTA, as in the paper.

    Others are names of scenarios.
    """
    if cell == "F1":
        return scenarios.create("ptta")
    if cell[:1] in ("F", "V") and cell[1:].isdigit():
        return scenarios.create(f"gli-{cell[0].lower()}", imbalance=float(cell[1:]))
    return scenarios.create(cell)


# -- options and files -------------------------------------------------------------------------------------------------


def add_options(p: argparse.ArgumentParser) -> None:
    """Add the options that say what is played where."""
    p.add_argument("--dataset", default="cifar10-c")
    p.add_argument("--data", type=Path, help="root of the data sets, as `tribe corrupt` writes them")
    p.add_argument("--model", default="resnet20")
    p.add_argument("--weights", type=Path, help="of the network; default: where `tribe train` puts them")
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", default="tf32", choices=PRECISIONS)
    p.add_argument("--limit", type=int, help="most images of a stream")
    p.add_argument("--out", type=Path, default=Path("results"), help="folder for the results (default: %(default)s)")


def add_cost_options(p: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark that times steps."""
    p.add_argument("--model", default="resnet20")
    p.add_argument("--method", default="tribe")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", default="tf32", choices=PRECISIONS)
    p.add_argument("--out", type=Path, default=Path("results"), help="folder for the results (default: %(default)s)")


def settings(o: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What every row of a study shares."""
    shared = {name: getattr(o, name) for name in ("dataset", "model", "limit")}
    return {**shared, "precision": precision_on(device, o.precision), "machine": machine(device)}


def write(path: Path, shared: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the settings, and a line for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    write_atomically(path, f'{{"settings": {json.dumps(shared)},\n "rows": [\n{lines}\n]}}\n'.encode())


def read(pattern: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of all result files that match, each with the settings of its file."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob(pattern))}
    return [{**file["settings"], "file": name, **row} for name, file in found.items() for row in file["rows"]]


class Progress:
    """Prints how far a run is, every so many seconds."""

    EVERY = 20.0  # seconds

    def __init__(self, what: str) -> None:
        self._what, self._last = what, time.monotonic()

    def __call__(self, done: int, batches: int, error: float | None) -> None:
        """After a batch."""
        if time.monotonic() - self._last > self.EVERY:
            self._last = time.monotonic()
            print(f"          {self._what}: {done} of {batches} batches, error {100 * (error or 0):.2f}", flush=True)


class Clock:
    """Prints a line with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, *words: object) -> None:
        """Print at once."""
        print(f"{time.monotonic() - self._start:7.1f} s ", *words, flush=True)
