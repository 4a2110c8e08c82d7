"""Run all GPU tests and measurements in one call: first the tests, then the times, at the end a short table.

``PYTHONPATH=src:. python3 -m benchmarks.gpu_session --out FOLDER``, on a machine with pytest. Every section runs in its
own process with a time limit and prints each number as soon as it is measured. So a section that fails or hangs loses
only its remaining numbers. All numbers go to ``gpu_session.json`` in the folder.
"""

import argparse
import contextlib
import copy
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import tribe
from benchmarks import growth
from benchmarks.released import Released
from tribe.core import kernels
from tribe.core.clock import peak_memory, summary, time_in_turns, warm_up
from tribe.core.kernels import Switch
from tribe.core.precision import float32_precision
from tribe.experiments.bench.contenders import build, noise
from tribe.experiments.bench.results import table
from tribe.experiments.provenance import machine

TESTS = {  # in parallel: most of their time is compilation
    "gpu": ["tests/core/test_gpu.py"],
    "graphs": ["tests/core/test_graphs.py"],
    "fusion": ["tests/core/test_fusion.py"],
    "kernels": ["tests/core/test_kernels.py", "-k", "not passes"],
    "passes-float32": ["tests/core/test_kernels.py", "-k", "passes and dtype0"],
    "passes-bfloat16": ["tests/core/test_kernels.py", "-k", "passes and dtype1"],
    "passes-float16": ["tests/core/test_kernels.py", "-k", "passes and dtype2"],
}
MARK = "result "  # starts a line with a number
LIMITS = {"wrn": 60, "others": 60, "bf16": 60, "resnext": 60, "streams": 45, "apart": 45, "resnet50": 60}  # seconds
LIMITS |= {"long": 45, "profile": 35, "compiled": 60}
ROUNDS, SECONDS = 7, 0.12  # of a measurement; the median is used
LONG, WITHIN = 2000, 18.0  # steps of the long run, and its time limit in seconds
CUDA = torch.device("cuda")
PURPOSES = {  # of launches, by the names of kernels
    "dgrad": "convolutions, backward",
    "fprop|convolve_common": "convolutions, forward",
    "^_(moments|slopes)": "statistics",
    "^_(apply|joint)": "normalisation",
    "^_(update|fold)": "class update",
    "CUDAFunctor_add|launch_clamp|threshold|BinaryFunctor<(float|c10::BFloat16)": "ReLU and additions",
}
REST = "the rest"


# -- sections: each measures a few contenders --------------------------------------------------------------------------


def wrn() -> None:
    """WRN-28-10, batch 64, TF32: the effect of each change."""
    with float32_precision("tf32"):
        ceilings()
        net, x = build("wrn28_10", 10, CUDA), pictures(1, 64, 32)
        inference(net, x, "wrn tf32")
        shared = tribe.Backbone(net)
        for method, label, graphs, mode in (
            ("tribe", "eager", False, False),
            ("tribe", "graphs", True, False),
            ("tribe", "kernels", False, "auto"),
            ("tribe", "kernels+graphs", True, "auto"),
            ("tent", "kernels+graphs", True, "auto"),
            ("source", "kernels+graphs", True, "auto"),
        ):
            adapting(shared, method, x, f"wrn tf32 {method} {label}", graphs, mode)
        with tuned():
            adapting(shared, "tribe", x, "wrn tf32 tribe kernels+graphs, cudnn.benchmark", True, "auto")
        released = Released(net, tribe.methods.create("tribe", classes=10))
        report("wrn tf32 released structure", measure(lambda: released(x[0]), 64))


def others() -> None:
    """WRN-28-10, batch 64, TF32: methods with a decision on the host, and TRIBE with deterministic=True."""
    with float32_precision("tf32"):
        shared, x = tribe.Backbone(build("wrn28_10", 10, CUDA)), pictures(1, 64, 32)
        for method in ("rotta", "note", "lame"):
            adapting(shared, method, x, f"wrn tf32 {method} kernels+graphs", "auto", "auto")
        adapting(shared, "rotta", x, "wrn tf32 rotta kernels", False, "auto")
        adapting(shared, "rotta", x, "wrn tf32 rotta eager", False, False)
        label = "wrn tf32 tribe kernels+graphs, deterministic"
        adapting(shared, "tribe", x, label, True, "auto", deterministic=True)


def bf16() -> None:
    """WRN-28-10, batch 64, bf16: by autocast, and with weights in bf16 (which need no cast in every pass)."""
    with float32_precision("tf32"):
        net, x = build("wrn28_10", 10, CUDA), pictures(1, 64, 32)
        with torch.autocast("cuda", torch.bfloat16):
            inference(net, x, "wrn bf16 autocast")
            shared = tribe.Backbone(net)
            adapting(shared, "tribe", x, "wrn bf16 autocast tribe graphs", True, False)
            adapting(shared, "tribe", x, "wrn bf16 autocast tribe kernels+graphs", True, "auto")
        half = tribe.Backbone(net).to(torch.bfloat16)
        adapting(half, "tribe", x, "wrn bf16 weights tribe kernels+graphs", True, "auto")
        with tuned():
            adapting(half, "tribe", x, "wrn bf16 weights tribe kernels+graphs, cudnn.benchmark", True, "auto")


def resnext() -> None:
    """ResNeXt-29, CIFAR-100, batch 64."""
    with float32_precision("tf32"):
        net, x = build("resnext29", 100, CUDA), pictures(1, 64, 32)
        inference(net, x, "resnext tf32")
        shared = tribe.Backbone(net)
        adapting(shared, "tribe", x, "resnext tf32 tribe eager", False, False)
        adapting(shared, "tribe", x, "resnext tf32 tribe kernels+graphs", True, "auto")
        half = tribe.Backbone(net).to(torch.bfloat16)
        adapting(half, "tribe", x, "resnext bf16 weights tribe kernels+graphs", True, "auto")
        with tuned():
            adapting(shared, "tribe", x, "resnext tf32 tribe kernels+graphs, cudnn.benchmark", True, "auto")


def streams() -> None:
    """Many streams of small batches in one step."""
    with float32_precision("tf32"):
        shared = tribe.Backbone(build("wrn28_10", 10, CUDA))
        for count, batch in ((1, 1), (16, 1), (1, 8), (8, 8), (4, 64)):
            x = pictures(count, batch, 32)
            adapting(shared, "tribe", x, f"streams {count} x {batch} tribe kernels+graphs", True, "auto")


def apart() -> None:
    """16 streams of batch 1 in one step, and 16 adapters that are called in turn; all captured, one network."""
    with float32_precision("tf32"), kernels.using("auto"):
        shared, x = tribe.Backbone(build("wrn28_10", 10, CUDA)), pictures(16, 1, 32)
        together = tribe.adapt(shared, "tribe", streams=16, graphs=True)
        alone = [tribe.adapt(shared, "tribe", seed=i, graphs=True) for i in range(16)]

        def in_turn() -> None:
            for adapter, images in zip(alone, x, strict=True):
                adapter(images)

        calls = {"streams 16 x 1 in one step": lambda: together(x), "streams 16 x 1, an adapter each": in_turn}
        for call in calls.values():
            warm_up(call, CUDA)
        for label, times in time_in_turns(calls, ROUNDS, CUDA, block=SECONDS).items():
            report(label, 1e3 * summary(times)[0] / 16)


def long() -> None:
    """Compare the time of a step at the start and at the end of a long run."""
    with float32_precision("tf32"), kernels.using("auto"):
        windows = growth.watch("wrn28_10", "tribe", 10, 64, 1, LONG, str(CUDA), WITHIN)
    first, last = windows[0], windows[-1]
    found = {"steps": last.steps, "first ms a step": first.ms_per_step, "last ms a step": last.ms_per_step}
    note("long wrn tf32 tribe kernels+graphs", found)
    print(f"a tenth of {LONG} steps at a time:\n{growth.show(windows)}", flush=True)


def resnet50() -> None:
    """ResNet-50, K = 1000, batch 64: time and peak memory."""
    with float32_precision("tf32"):
        net, x = build("resnet50", 1000, CUDA), pictures(1, 64, 224)
        inference(net, x, "resnet50 tf32")
        shared = tribe.Backbone(net)
        for method in ("tent", "tribe"):
            adapting(shared, method, x, f"resnet50 tf32 {method} kernels", False, "auto")
            adapting(shared, method, x, f"resnet50 tf32 {method} kernels+graphs", True, "auto")


def profile() -> None:
    """Measure where a TRIBE step with kernels spends its time."""
    for precision in ("tf32", "bf16"):
        with float32_precision("tf32"), kernels.using("auto"):
            net = tribe.Backbone(build("wrn28_10", 10, CUDA))
            net = net.to(torch.bfloat16) if precision == "bf16" else net
            adapter, x = tribe.adapt(net, "tribe", graphs=False), pictures(1, 64, 32)[0]
            for _ in range(5):
                adapter(x)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for _ in range(3):
                    adapter(x)
                torch.cuda.synchronize()
        work = [e for e in seen.key_averages() if e.self_device_time_total > 0]  # without the calls on the host
        rows = [(e.key, e.count // 3, e.self_device_time_total / 3e3) for e in work]
        rows.sort(key=lambda row: -row[2])
        total, launches = sum(ms for *_, ms in rows), sum(n for _, n, _ in rows)
        parts = grouped(rows)
        top = [(name[:90], n, ms) for name, n, ms in rows[:60]]
        note(f"profile {precision}", {"launches": launches, "device ms a step": total, "parts": parts, "rows": top})
        print(f"profile {precision}: {launches} launches, {total:.2f} ms on the device a step")
        cells = [(name, str(n), f"{ms:.2f}", f"{ms / total:.0%}") for name, (n, ms) in parts.items()]
        print(table(("", "launches", "ms", "share"), cells), flush=True)


def grouped(rows: list[tuple[str, int, float]]) -> dict[str, tuple[int, float]]:
    """Group launches and milliseconds by purpose; see docs/performance.md."""
    found = dict.fromkeys([*PURPOSES.values(), REST], (0, 0.0))
    for name, n, ms in rows:
        purpose = next((purpose for pattern, purpose in PURPOSES.items() if re.search(pattern, name)), REST)
        found[purpose] = found[purpose][0] + n, found[purpose][1] + ms
    return found


def compiled() -> None:
    """Compiled channels-last inference: the fastest baseline."""
    with float32_precision("tf32"), torch.no_grad():
        for dtype, label in ((torch.float32, "tf32"), (torch.bfloat16, "bf16")):
            net = build("wrn28_10", 10, CUDA).to(dtype=dtype, memory_format=torch.channels_last)
            x = pictures(1, 64, 32)[0].to(dtype).to(memory_format=torch.channels_last)
            run = torch.compile(net, mode="reduce-overhead")
            report(f"wrn {label} inference, compiled, channels-last", measure(lambda run=run, x=x: run(x), 64))


SECTIONS: Mapping[str, Callable[[], None]] = {
    f.__name__: f for f in (wrn, others, bf16, resnext, streams, apart, resnet50, profile, compiled, long)
}


# -- contenders --------------------------------------------------------------------------------------------------------


def ceilings() -> None:
    """The limits of the machine: matrix products and copies."""
    found = {}
    for name, dtype in (("tf32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        found[f"matmul {name} TFLOP/s"] = 2 * 8192**3 / measure(lambda a=a, b=b: a @ b, 1) / 1e9
    source = torch.rand(2**29, device="cuda")
    target = torch.empty_like(source)
    found["copy TB/s"] = 2 * source.nbytes / measure(lambda: target.copy_(source), 1) / 1e9
    note("ceilings", found)
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)


def pictures(streams: int, batch: int, size: int) -> torch.Tensor:
    return noise((streams, batch, 3, size, size), CUDA)


def inference(net: torch.nn.Module, x: torch.Tensor, label: str) -> None:
    """Plain inference in the user's layout, and in channels-last."""
    fast_net, fast_x = (t.to(memory_format=torch.channels_last) for t in (copy.deepcopy(net), x[0]))
    with torch.no_grad():
        report(f"{label} inference, plain eager", measure(lambda: net(x[0]), x.shape[1]))
        report(f"{label} inference, channels-last eager", measure(lambda: fast_net(fast_x), x.shape[1]))


def adapting(
    net: tribe.Backbone, method: str, x: torch.Tensor, label: str, graphs: Switch, mode: kernels.Switch, **options: Any
) -> None:
    """Measure a method's steps; record a failure as a result."""
    try:
        with kernels.using(mode), peak_memory(CUDA) as peak:
            adapter = tribe.adapt(net, method, streams=len(x), graphs=graphs, **options)
            images = x if len(x) > 1 else x[0]
            ms = measure(lambda: adapter(images), len(x) * x.shape[1])
    except (RuntimeError, ValueError) as error:
        note(label, {"failed": f"{type(error).__name__}: {error}"[:600]})
        print(f"{label}: FAILED {error}", flush=True)
        return
    report(label, ms, peak.bytes, adapter.capture_disabled_reason if graphs else None)


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """Let cuDNN try its algorithms and use the fastest."""
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


def measure(call: Callable[[], object], images: int) -> float:
    """Return the median milliseconds per image."""
    warm_up(call, CUDA)
    return 1e3 * summary(time_in_turns({"": call}, ROUNDS, CUDA, block=SECONDS)[""])[0] / images


def report(label: str, ms: float, peak: int | None = None, not_captured: str | None = None) -> None:
    found = {"ms an image": ms, "peak MB": None if peak is None else peak / 2**20}
    note(label, found | ({"not captured": not_captured} if not_captured else {}))
    print(f"{label}: {ms:.4f} ms an image{f', not captured: {not_captured}' * bool(not_captured)}", flush=True)


def note(label: str, values: Mapping[str, Any]) -> None:
    print(MARK + json.dumps({"label": label, **values}), flush=True)


# -- the session -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m benchmarks.gpu_session", description=__doc__.partition("\n")[0])
    p.add_argument("--section", choices=SECTIONS, help="run one section in this process")
    p.add_argument("--only", help="sections, such as wrn,bf16; default: all")
    p.add_argument("--no-tests", action="store_true")
    p.add_argument("--out", type=Path, default=Path(), help="folder for numbers and logs; default: the current one")
    p.add_argument("--tests-limit", type=int, default=110, help="seconds")
    p.add_argument("--seconds", type=int, default=420, help="start no section after this time")
    o = p.parse_args(argv)
    if o.section:
        SECTIONS[o.section]()
        return
    begun, out = time.monotonic(), o.out
    results: list[dict[str, Any]] = []
    messages = [] if o.no_tests else run_tests(out, o.tests_limit)
    for name in o.only.split(",") if o.only else SECTIONS:
        if time.monotonic() - begun > o.seconds:
            messages.append(f"{name}: not started, out of time")
            continue
        found, message = run_section(name, out)
        results += found
        messages += [message] if message else []
        save = {"machine": machine(torch.device("cuda")), "words": messages, "results": results}
        (out / "gpu_session.json").write_text(json.dumps(save, indent=1))
    cells = [
        (r["label"], f"{r['ms an image']:.4f}", "" if r["peak MB"] is None else f"{r['peak MB']:,.0f}")
        for r in results
        if "ms an image" in r
    ]
    print("\n".join(messages))
    print(f"\n{table(('', 'ms/image', 'peak MB'), cells)}\n\n{time.monotonic() - begun:.0f} s in all")


def run_tests(out: Path, limit: int) -> list[str]:
    """Run the tests; return the last line of each group, and the failures."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "--maxfail=8"]
    logs = {name: out / f"tests-{name}.log" for name in TESTS}
    jobs = {}
    for name, log in logs.items():
        with log.open("w") as file:
            jobs[name] = subprocess.Popen([*command, *TESTS[name]], stdout=file, stderr=subprocess.STDOUT)
    end = time.monotonic() + limit
    messages = []
    for name, job in jobs.items():
        try:
            job.wait(max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            job.kill()
            messages.append(f"{name}: stopped after {limit} s")
        lines = logs[name].read_text().splitlines()
        messages += [f"{name}: {line}" for line in lines if line.startswith(("FAILED", "ERROR", "E  "))][:12]
        messages += [f"{name}: {line}" for line in lines[-1:]]
    return messages


def run_section(name: str, out: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Run a section; return the numbers it printed, and a message if it failed."""
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--section", name]
    log, message = out / f"{name}.log", None
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMITS[name], check=False
            ).returncode
            message = f"{name}: ended with {code}: {log.read_text()[-600:]}" if code else None
        except subprocess.TimeoutExpired:
            message = f"{name}: stopped after {LIMITS[name]} s"
    lines = log.read_text().splitlines()
    found = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    print("\n".join(line for line in lines if not line.startswith(MARK)), flush=True)
    return found, message


if __name__ == "__main__":
    main()
