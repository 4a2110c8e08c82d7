"""Measure what a model file costs beside plain inference, and what its smaller forms lose.

``python -m benchmarks.model_files``

ONNX Runtime with one thread runs plain inference and the file in turn, and torch its own plain inference; ratios of
medians of the processor's time, so other programs matter little. With --data the errors on CIFAR-10-C, too: 15
corruptions at severity 5, one after the other, as float32, float16 and int8.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

import tribe
from tribe.experiments.workbench import build_dataset
from tribe.onnx import Session, export, quantize

OBSERVED = (1, 4, 16)  # an image in so many
Run = Callable[..., object]


def plain_session(net: nn.Module, shape: tuple[int, ...], path: Path) -> Run:
    """Plain inference in ONNX Runtime, as anybody would export it."""
    import onnxruntime

    batch = torch.export.Dim("batch", min=1, max=2**16)
    given = (torch.rand(3, *shape),)
    options = {"dynamo": True, "dynamic_shapes": ({0: batch},), "external_data": False, "verbose": False}
    torch.onnx.export(net, given, str(path), **options)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})


def in_turn(runs: Mapping[str, Run], rounds: int, calls: int) -> dict[str, float]:
    """The median processor time of so many calls of each, in ms."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            start = time.thread_time()
            for _ in range(calls):
                run()
            if i >= 2:
                times[name].append(1000 * (time.thread_time() - start) / calls)
    return {name: median(values) for name, values in times.items()}


def costs(net: nn.Module, shape: tuple[int, ...], batches: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Ratios to plain inference in ONNX Runtime, by batch size; each in turn with plain inference."""
    found: dict[str, Any] = {str(batch): {} for batch in batches}
    with tempfile.TemporaryDirectory() as folder:
        plain = plain_session(net, shape, Path(folder) / "plain.onnx")
        contenders: dict[str, Callable[[], Run]] = {
            "torch": lambda: Eager(net, torch.contiguous_format),
            "torch, channels last": lambda: Eager(net, torch.channels_last),
        }
        for observe in OBSERVED:
            path = Path(folder) / f"{observe}.onnx"
            export(net, path, shape, observe=observe)
            contenders[f"file, observe={observe}"] = partial(Session, path, threads=1)
            contenders[f"tuned, observe={observe}"] = partial(Session, path, threads=1, tune=True)
        small = Path(folder) / "int8.onnx"
        quantize(Path(folder) / "4.onnx", small, "int8", np.random.default_rng(0).random((32, *shape), np.float32))
        contenders["int8, observe=4"] = partial(Session, small, threads=1)
        for name, make in contenders.items():
            run = make()
            for batch in batches:
                x = np.random.default_rng(0).random((batch, *shape), np.float32)
                # So many calls that each has observed as often as it does on average.
                calls = max(1, max(OBSERVED) // batch)
                times = in_turn({"plain": partial(plain, x), "other": partial(run, x)}, rounds, calls)
                found[str(batch)].setdefault("plain, ms", round(times["plain"], 3))
                found[str(batch)][name] = round(times["other"] / times["plain"], 2)
    return found


class Eager:
    """Plain inference in torch; images are brought into an order of memory once."""

    def __init__(self, net: nn.Module, form: torch.memory_format) -> None:
        self.net, self.form, self.known = copy.deepcopy(net).to(memory_format=form), form, (None, torch.empty(0))

    @torch.inference_mode()
    def __call__(self, x: Any) -> torch.Tensor:
        if self.known[0] is not x:
            self.known = x, torch.from_numpy(x).contiguous(memory_format=self.form)
        result: torch.Tensor = self.net(self.known[1])
        return result


def errors(net: nn.Module, data: Path, images: int) -> dict[str, float]:
    """Errors in % on a stream of CIFAR-10-C."""
    corrupted = build_dataset("live-cifar10-c", data, {})
    clean = build_dataset("cifar10", data, {})
    index = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[:images]
    with tempfile.TemporaryDirectory() as folder:
        path, half, small = (Path(folder) / name for name in ("full.onnx", "half.onnx", "int8.onnx"))
        export(net, path, (3, 32, 32))
        quantize(path, half, "float16")
        quantize(path, small, "int8", clean.images(clean.domains[0], index[:256]).numpy())
        players: dict[str, Any] = {
            "source": tribe.adapt(net, "source"),
            "torch": tribe.adapt(net, "bank", compare=0),
            "float32": Session(path),
            "tuned": Session(path, tune=True),
            "float16": Session(half),
            "int8": Session(small),
        }
        wrong = dict.fromkeys(players, 0)
        count = 0
        for domain in corrupted.domains:
            x, y = corrupted.images(domain, index), corrupted.labels(domain)[index].numpy()
            for start in range(0, len(x), 64):
                batch = x[start : start + 64]
                count += len(batch)
                for name, player in players.items():
                    logits = player(batch.numpy()) if isinstance(player, Session) else player(batch).numpy()
                    wrong[name] += int((logits.argmax(1) != y[start : start + 64]).sum())
    return {name: round(100 * n / count, 2) for name, n in wrong.items()}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m benchmarks.model_files", description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="resnet20", help="a name, or timm/NAME with random weights and 10 classes")
    p.add_argument("--weights", type=Path)
    p.add_argument("--size", type=int, help="rows and columns of images; by default those of the network")
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--data", type=Path, help="root of the data sets, for errors on CIFAR-10-C")
    p.add_argument("--images", type=int, default=1000, help="of each corruption")
    p.add_argument("--out", type=Path, help="add the result to this JSON file")
    o = p.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    channels, rows, columns = tribe.models.architecture(o.model).shape
    net = tribe.models.create(o.model, classes=10) if o.weights is None else tribe.models.load(o.model, o.weights)
    result: dict[str, Any] = costs(net.eval(), (channels, o.size or rows, o.size or columns), (1, 64), o.rounds)
    if o.data is not None:
        result["errors, %"] = errors(net, o.data, o.images)
    print(json.dumps({o.model: result}, indent=1))
    if o.out is not None:
        before = json.loads(o.out.read_text()) if o.out.exists() else {}
        o.out.write_text(json.dumps({**before, o.model: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
