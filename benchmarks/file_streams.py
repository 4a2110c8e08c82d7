"""Measure a stream that is read from JPEG files beside the same stream from memory: does decoding keep a GPU busy?

``python -m benchmarks.file_streams --data ROOT --model file.py:Class --weights FILE --images 75000`` plays ImageNet-C
below the root (`tribe corrupt imagenet`) in a recurring stream, once from files and once from bytes in memory, each
with the same network and method. It prints images a second and the memory of the process as it goes, and needs torch,
numpy, safetensors and Pillow. The first steps of a play are not timed: kernels are compiled in them.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tribe
from tribe.core.clock import resident
from tribe.core.graphs import Steps
from tribe.core.precision import PRECISIONS, choose_device, float32_precision, precision_on
from tribe.experiments.provenance import from_file, machine
from tribe.experiments.workbench import in_precision, restrict

WARM = 20  # steps that are not timed
SHOWN = 20  # readings of the memory


class InMemory:
    """A data set whose images were decoded before, as bytes."""

    def __init__(self, dataset: tribe.datasets.Dataset) -> None:
        self.dataset, self.classes, self.domains = dataset, dataset.classes, dataset.domains
        self.labels = dataset.labels

    @cached_property
    def _bytes(self) -> dict[str, Tensor]:
        return {domain: torch.cat(list(self._decoded(domain))) for domain in self.domains}

    def _decoded(self, domain: str) -> Iterator[Tensor]:
        for index in torch.arange(len(self.dataset.labels(domain))).split(64):
            yield (self.dataset.images(domain, index) * 255).round().to(torch.uint8)

    def images(self, domain: str, index: Tensor) -> Tensor:
        """Some images."""
        return self._bytes[domain][index].float().div_(255)


def network(place: str, weights: Path | None, dataset: Any, device: torch.device) -> tribe.Backbone:
    """The network ``file.py:Class``, restricted to the classes of the data set."""
    file, _, name = place.rpartition(":")
    model = getattr(from_file(Path(file), "benchmarked"), name)()
    if weights is not None:
        tribe.models.load(model, weights)
    return restrict(tribe.Backbone(model.to(device)), dataset)


def play(net: Any, method: Any, stream: tribe.Stream, images: int) -> dict[str, Any]:
    """Play so many images as `tribe.run` does; return the speed and the memory over time."""
    device, state = net.device, method.init(net, 1, 0)
    pin = device.type == "cuda"
    steps, retired, done, memory = Steps(method, net, "auto", False), None, 0, []
    timed, begun, every = 0, 0.0, max(1, images // stream.batch // SHOWN)
    for step, batch in enumerate(stream.starting_at(0, pin=pin, ahead=4 if pin else 1)):
        if step == WARM:
            begun = time.perf_counter()
        x, valid = (t.to(device, non_blocking=pin) for t in (batch.x, batch.valid))
        old, (output, state) = state, steps(state, x, valid, retired)
        retired = old
        output.argmax(-1).cpu()  # as a run does: it waits for the device
        count = int(batch.valid.sum())
        done, timed = done + count, timed + (count if step >= WARM else 0)
        if step % every == 0:
            memory.append(round((resident("VmRSS") or 0) / 1e6))
        if done >= images:
            break
    return {"images_a_second": timed / (time.perf_counter() - begun), "images": done, "resident_mb": memory}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--method", default="tribe")
    parser.add_argument("--images", type=int, default=75_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--corruptions", default=",".join(tribe.scenarios.CIFAR_C))
    parser.add_argument("--precision", default="tf32", choices=PRECISIONS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    device = choose_device(given.device)
    names = tuple(given.corruptions.split(","))
    files = tribe.datasets.create("imagenet-c", data=given.data, corruptions=names, workers=given.workers)
    net = network(given.model, given.weights, files, device)
    method = tribe.methods.create(given.method, classes=net.classes)
    precision = precision_on(device, given.precision)
    net, method = in_precision(net, method, precision)
    rounds = 1 + given.images // sum(len(files.labels(domain)) for domain in files.domains)
    scenario = tribe.scenarios.create("recurring", rounds=rounds)
    found: dict[str, Any] = {"machine": machine(device), "settings": {k: str(v) for k, v in vars(given).items()}}
    with float32_precision(precision):
        for name, dataset in (("files", files), ("memory", InMemory(files))):
            found[name] = play(net, method, tribe.Stream(dataset, scenario, (0,), given.batch), given.images)
            print(name, json.dumps(found[name]), flush=True)
    found["share"] = found["files"]["images_a_second"] / found["memory"]["images_a_second"]
    print(f"from files {100 * found['share']:.0f} % of the speed from memory")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
