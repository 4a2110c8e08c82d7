"""Measure methods and plain inference of the same network, side by side in one process.

Images are noise, and the weights of a named network are random: the time of a step depends on shapes. It also depends
on values where a method does more work for uncertain images (CoTTA, PETAL) or skips a step without reliable images
(EATA, SAR).
"""

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tribe.core import kernels
from tribe.core.backbone import Backbone
from tribe.core.clock import WARM_UP, peak_memory, summary, time_in_turns, warm_up
from tribe.core.precision import check_precision, float32_precision
from tribe.experiments.bench import contenders
from tribe.experiments.bench.contenders import CHANNELS_LAST, COMPILED, INFERENCE, PLAIN, Contender, Workload, noise
from tribe.experiments.provenance import machine
from tribe.fields import Count, check_fields, is_whole, require

BenchProgress = Callable[[int, int, str], None]  # steps done, number of steps, name of the current contender

METHODS = ("source", "tent", "rotta", "tribe")
MATMUL = "matmul"  # timed in turns with the contenders: the rate of the device under the same noise
REPEATS = 15
SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices: so large that arithmetic dominates


@dataclass(frozen=True)
class Setting:
    """One network under one load: what a result depends on, apart from the code and the machine."""

    model: str
    shape: tuple[int, ...]  # of an image
    classes: Count
    batch: Count = 64  # images a stream and step
    streams: Count = 1
    device: str = "cpu"
    precision: str = "float32"  # as in tribe.core.precision: float32, tf32, or bf16, of network and images
    graphs: bool = True  # capture steps in CUDA graphs, where possible
    kernels: bool = True  # Triton kernels, on CUDA
    threads: Count | None = None  # of torch on the CPU; None: torch's default

    def __post_init__(self) -> None:
        check_fields(self)
        whole = bool(self.shape) and all(is_whole(n, least=1) for n in self.shape)
        require(whole, "shape is the shape of one image, such as (3, 32, 32)", self.shape)
        check_precision(self.precision)
        if self.precision == "tf32" and not self.device.startswith("cuda"):
            raise ValueError("tf32 is a format of NVIDIA GPUs: choose device cuda, or precision float32 or bf16")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and images."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


@dataclass(frozen=True)
class BenchRow:
    """The measurements of one contender."""

    name: str
    ms_per_image: float  # median over the repeats
    spread: float  # interquartile range, relative to the median
    times: dict[str, float]  # kind of plain inference -> how many times as long this contender takes
    tflops: float  # achieved, TFLOP/s
    share: float  # of the device's measured rate of matrix products
    peak_bytes: int | None  # while it was built and warmed up, without the network and the images
    state_bytes: int  # the state of all streams, between steps
    capture_disabled_reason: str | None = None  # why its steps were not captured, if the setting wants that


@dataclass(frozen=True)
class BenchResult:
    """All measurements, with setting and machine."""

    setting: Setting
    machine: dict[str, Any]
    repeats: int  # timings of each contender
    matmul_tflops: float  # the device's rate of matrix products in this precision, TFLOP/s
    rows: tuple[BenchRow, ...]


def measure(
    model: nn.Module,
    setting: Setting,
    methods: Sequence[str] = METHODS,
    *,
    compiled: bool = False,
    repeats: int = REPEATS,
    progress: BenchProgress | None = None,
) -> BenchResult:
    """Time methods and plain inference in turns.

    The network is copied and never changed. With ``compiled``, compiled channels-last inference is timed, too.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    >>> result = measure(net, Setting("mine", (3, 8, 8), classes=4, batch=2), ["tent"], repeats=1)
    >>> [row.name for row in result.rows]
    ['plain', 'channels-last', 'tent']
    """
    if repeats < 1:
        raise ValueError(f"repeats is how often each contender is timed, at least 1; got {repeats}")
    contenders.check_names(methods)
    names = list(dict.fromkeys([PLAIN, CHANNELS_LAST, *[COMPILED] * compiled, *methods]))
    steps = len(names) * (2 + repeats) + repeats
    done = 0

    def advance(name: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps, name)

    with _configured(setting) as device:
        workload = _workload(model, setting, device)
        counts = _operations(names, workload, advance)
        built, peaks = _build_contenders(names, workload, advance)
        side = SIDE.get(device.type, 1024)
        a, b = noise((2, side, side), device).to(setting.dtype)
        warm_up(lambda: a @ b, device)
        times = time_in_turns(
            {**{name: each.call for name, each in built.items()}, MATMUL: lambda: a @ b},
            repeats,
            device,
            periods={name: each.period for name, each in built.items()},
            on_timing=advance,
        )
        computer = machine(device)
    timings = {name: summary(t) for name, t in times.items()}
    rate = 2.0 * side**3 / timings[MATMUL][0] / 1e12
    captures = setting.graphs and setting.device.startswith("cuda")
    rows = []
    for name in names:
        median, spread = timings[name]
        tflops = counts[name] / median / 1e12
        row = BenchRow(
            name,
            ms_per_image=1e3 * median / (setting.streams * setting.batch),
            spread=spread,
            times={other: median / timings[other][0] for other in INFERENCE if other in timings},
            tflops=tflops,
            share=tflops / rate,
            peak_bytes=peaks[name],
            state_bytes=built[name].state_bytes,
            capture_disabled_reason=built[name].capture_disabled_reason() if captures else None,
        )
        rows.append(row)
    return BenchResult(setting, computer, repeats, rate, tuple(rows))


@contextlib.contextmanager
def _configured(setting: Setting) -> Iterator[torch.device]:
    """The device of a setting, with its threads, precision and kernels; restore all of them on exit."""
    device, threads = torch.device(setting.device), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(float32_precision(setting.precision))
        stack.enter_context(kernels.using("auto" if setting.kernels else False))
        stack.enter_context(torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext())
        if setting.threads is not None:
            stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(setting.threads)
        yield device


def _workload(model: nn.Module, setting: Setting, device: torch.device) -> Workload:
    net = copy.deepcopy(model).to(device).eval()
    backbone = Backbone(net).to(setting.dtype)
    net = net.to(setting.dtype)
    images = noise((setting.streams, setting.batch, *setting.shape), device).to(setting.dtype)
    try:
        with torch.no_grad():
            output = net(images[0, :1])
    except Exception as error:  # the network's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{setting.model} failed on images of shape {setting.shape}: {reason}") from error
    logits = getattr(output, "logits", output)
    if getattr(logits, "shape", None) != (1, setting.classes):
        got = tuple(getattr(logits, "shape", ())) or type(logits).__name__
        raise ValueError(f"{setting.model} gave {got} for an image; expected logits of shape (1, {setting.classes})")
    return Workload(net, backbone, images, setting.classes, "auto" if setting.graphs else False)


def _operations(names: Sequence[str], workload: Workload, advance: Callable[[str], None]) -> dict[str, float]:
    """The operations of a call of each contender, counted on a temporary eager one."""
    eager = dataclasses.replace(workload, graphs=False)
    counts: dict[str, float] = {}
    for name in names:
        same = PLAIN if name in INFERENCE else name  # layouts and compilers do not change the number of operations
        counts[name] = counts.get(same) or contenders.count_operations(contenders.create(same, eager))
        advance(name)
    gc.collect()
    return counts


def _build_contenders(
    names: Sequence[str], workload: Workload, advance: Callable[[str], None]
) -> tuple[dict[str, Contender], dict[str, int | None]]:
    """All contenders, warmed up, and the peak memory of each."""
    built, peaks, device = {}, {}, workload.images.device
    for name in names:
        # The memory of a compiler, and of a copy of the network in another layout, do not count for inference.
        inference = contenders.create(name, workload) if name in INFERENCE else None
        with peak_memory(device) as peak:
            built[name] = inference or contenders.create(name, workload)
            warm_up(built[name].call, device, max(WARM_UP, built[name].period))
        peaks[name] = peak.bytes
        advance(name)
    return built, peaks
