"""Measure TRIBE on a ResNet-50 with 1,000 classes beside a yardstick: what its passes cost without adaptation.

``python3 -m benchmarks.resnet50 --model FOLDER/resnet50.py --device cuda --out FOLDER`` takes the class ``ResNet50`` of
the file, with random weights if none are given. The yardstick is 2 compiled inferences and 2 compiled forward and
backward passes to the affine parameters, which is the arithmetic of a step. Compiling takes most of the time of a run:
``--yardstick 0.61,0.57`` gives its milliseconds an image in TF32 and bf16 instead. It also measures the peak memory
beside TENT's, and WRN-28-10 at the size of CIFAR, with and without fusion. ``--profile`` lists the kernels of a step by
their time. Results are in docs/performance.md, ResNet-50.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import tribe
from tribe.core import fusion, kernels
from tribe.core.clock import Call, peak_memory, summary, time_in_turns, warm_up
from tribe.core.precision import choose_device, float32_precision
from tribe.experiments.bench.contenders import build, estimate_statistics, noise
from tribe.experiments.provenance import from_file, machine
from tribe.methods import tribe as tribe_method

DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16}
APART = tribe_method.APART
CONTENDERS: dict[str, tuple[str, int, kernels.Switch]] = {  # method, from how many pixels apart, fusion
    "tent": ("tent", APART, "auto"),
    "tribe": ("tribe", APART, "auto"),
    "tribe-stacked": ("tribe", 2**40, "auto"),  # teacher and student in one pass
    "tribe-unfused": ("tribe", APART, False),
}
TOP, NAME = 40, 110  # kernels of a profile, and characters of their names
STEPS = 3  # profiled


def network(o: argparse.Namespace, device: torch.device) -> nn.Module:
    """The network of the file, in evaluation mode."""
    torch.manual_seed(0)
    net: nn.Module = from_file(o.model, "benchmarked").ResNet50().to(device)
    if o.weights is not None:
        return tribe.models.load(net, o.weights).eval()
    return estimate_statistics(net, noise((2, 8, 3, o.size, o.size), device))


def inference(net: nn.Module, x: Tensor, compiler: str | None) -> Call:
    """Compiled, channels-last."""
    run = _compiled(net, compiler)

    @torch.no_grad()
    def call() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        run(x)

    return call


def forward_backward(net: nn.Module, x: Tensor, compiler: str | None) -> Call:
    """The same with statistics of the batch, and the gradient of the affine parameters, as TENT needs."""
    net = copy.deepcopy(net).requires_grad_(False)
    parameters = []
    for layer in net.modules():
        if isinstance(layer, _BatchNorm):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
            layer.num_batches_tracked = None
            parameters += [p.requires_grad_() for p in (layer.weight, layer.bias)]
    run = _compiled(net, compiler)

    def call() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        torch.autograd.grad(run(x).float().square().mean(), parameters)

    return call


def _compiled(net: nn.Module, compiler: str | None) -> Callable[[Tensor], Tensor]:
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net if compiler is None else torch.compile(net, mode=compiler)


def adapter(net: nn.Module, method: str, dtype: torch.dtype) -> tribe.Adapter:
    """A method on a network with weights of this type, captured where that is possible."""
    backbone = tribe.Backbone(net).to(dtype)
    return tribe.adapt(backbone, tribe.methods.create(method, classes=backbone.classes), graphs="auto")


class Report:
    """Collects numbers, prints each and keeps them in a file."""

    def __init__(self, path: Path | None, device: torch.device, o: argparse.Namespace) -> None:
        self.path, self.begun = path, time.monotonic()
        settings = {name: getattr(o, name) for name in ("note", "batch", "size", "rounds", "yardstick")}
        self.found: dict[str, Any] = {"machine": machine(device), "settings": settings}

    def add(self, name: str, value: Any) -> None:
        self.found[name] = value
        shown = f"{value:.4f}" if isinstance(value, float) else value
        print(f"{time.monotonic() - self.begun:5.0f} s  {name}: {shown}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1))


def measured(calls: dict[str, Call], images: int, rounds: int, device: torch.device) -> dict[str, float]:
    """Milliseconds an image, in turns."""
    for call in calls.values():
        warm_up(call, device)
    times = time_in_turns(calls, rounds, device, block=0.12)
    return {name: 1e3 * summary(found)[0] / images for name, found in times.items()}


def measure(net: nn.Module, precision: str, o: argparse.Namespace, device: torch.device, report: Report) -> None:
    """The step, the yardstick and the memory of one precision."""
    dtype = DTYPES[precision]
    x = noise((o.batch, 3, o.size, o.size), device).to(dtype)
    peaks: dict[str, float] = {}
    calls: dict[str, Call] = {}
    for name, (method, apart, fused) in CONTENDERS.items():
        if name in o.contenders.split(","):
            tribe_method.APART = apart
            with peak_memory(device) as peak, fusion.using(fused):
                adapting = adapter(net, method, dtype)
                warm_up(partial(adapting, x), device)
            peaks[name], calls[name] = (peak.bytes or 0) / 2**20, partial(adapting, x)
            report.add(f"{precision} {name} peak MB", peaks[name])
            report.add(f"{precision} {name} not captured", adapting.capture_disabled_reason)
            report.add(f"{precision} {name} fusion", adapting.net.fusion.describe())
    found = measured(calls, o.batch, o.rounds, device)
    if o.profile:
        report.add(f"{precision} profile", profile(calls["tribe"]))
    del calls, adapting
    if device.type == "cuda":
        torch.cuda.empty_cache()
    yardstick = o.yardstick and dict(zip(DTYPES, map(float, o.yardstick.split(",")), strict=False)).get(precision)
    if yardstick is None:
        compiler = "reduce-overhead" if device.type == "cuda" else None
        half, images = copy.deepcopy(net).to(dtype), x.contiguous(memory_format=torch.channels_last)
        passes = {"inference": inference(half, images, compiler)}
        passes["forward and backward"] = forward_backward(half, images, compiler)
        found |= measured(passes, o.batch, o.rounds, device)
        yardstick = 2 * found["inference"] + 2 * found["forward and backward"]
    for name, ms in {**found, "yardstick": yardstick}.items():
        report.add(f"{precision} {name}, ms an image", ms)
    for name in peaks:
        report.add(f"{precision} {name} / yardstick", found[name] / yardstick)
        report.add(f"{precision} peak memory, {name} / tent", peaks[name] / max(peaks["tent"], 1e-9))


def measure_small(o: argparse.Namespace, precision: str, device: torch.device, report: Report) -> None:
    """A network of CIFAR's size, with and without fusion."""
    small, x = build(o.wrn, 10, device), noise((o.batch, 3, 32, 32), device).to(DTYPES[precision])
    calls: dict[str, Call] = {}
    for name in ("tribe", "tribe-unfused"):
        with fusion.using(CONTENDERS[name][2]):
            calls[name] = partial(adapter(small, "tribe", DTYPES[precision]), x)
            warm_up(calls[name], device)  # records it
    for name, ms in measured(calls, o.batch, o.rounds, device).items():
        report.add(f"{precision} {o.wrn} {name}, ms an image", ms)


def profile(call: Call) -> list[tuple[str, int, float]]:
    """The kernels of a step: name, launches and milliseconds, the longest first."""
    activity = torch.profiler.ProfilerActivity
    device = activity.CUDA if torch.cuda.is_available() else activity.CPU
    with torch.profiler.profile(activities=[device]) as seen:
        for _ in range(STEPS):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    rows = []
    for event in seen.key_averages():
        spent = event.self_device_time_total or event.self_cpu_time_total * (device == activity.CPU)
        rows.append((event.key[:NAME], event.count // STEPS, spent / 1e3 / STEPS))
    rows = sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])
    print(f"{sum(n for _, n, _ in rows)} launches, {sum(ms for *_, ms in rows):.2f} ms a step")
    for name, launches, ms in rows[:TOP]:
        print(f"{ms:8.3f} ms {launches:5} {name}", flush=True)
    return rows[:TOP]


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m benchmarks.resnet50", description=__doc__, formatter_class=style)
    p.add_argument("--model", type=Path, required=True, help="a file with a class ResNet50")
    p.add_argument("--weights", type=Path)
    p.add_argument("--device", default="auto")
    p.add_argument("--out", type=Path, help="folder for resnet50.json")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    p.add_argument("--precisions", default="tf32,bf16")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--yardstick", help="known milliseconds an image, TF32 and bf16, with a comma; default: measure it")
    p.add_argument("--contenders", default=",".join(CONTENDERS), help="default: %(default)s")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--note", help="kept with the results: the commit")
    p.add_argument("--wrn", default="wrn28_10", help="a network of CIFAR's size for comparison; '' leaves it out")
    return p.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    o = options(arguments)
    device = choose_device(o.device)
    report = Report(o.out and o.out / "resnet50.json", device, o)
    with float32_precision("tf32"):
        for precision in o.precisions.split(",") if o.wrn else ():
            measure_small(o, precision, device, report)
        net = network(o, device)
        for precision in o.precisions.split(","):
            measure(net, precision, o, device, report)


if __name__ == "__main__":
    main()
