"""What adapting costs: methods and plain inference of the same network, side by side in one process.

Images are noise and weights are random, unless one's own network is given: the time of a step depends on shapes. It
depends on values, too, where a method does more work for images that it is unsure of (CoTTA, PETAL) or skips a step
when it trusts none (EATA, SAR).
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

from tribe.bench import contenders
from tribe.bench.clock import WARM_UP, peak_memory, race, summary, warm_up
from tribe.bench.contenders import CHANNELS_LAST, COMPILED, INFERENCE, PLAIN, Contender, Ground
from tribe.bench.networks import noise
from tribe.bench.rates import matrix_product, operations
from tribe.engine import kernels
from tribe.engine.backbone import Backbone
from tribe.engine.precision import check_precision, float32_precision
from tribe.fields import is_whole, plain_numbers, require, require_whole
from tribe.lab.provenance import machine

Watch = Callable[[int, int, str], None]  # done, of how many, what

METHODS = ("source", "tent", "rotta", "tribe")
MATMUL = "matmul"  # takes its turns with the contenders: its rate is the device's, as it is now
REPEATS = 15


@dataclass(frozen=True)
class Setting:
    """One network under one load: what a result depends on beside the code and the machine."""

    model: str
    shape: tuple[int, ...]  # of an image
    classes: int
    batch: int = 64  # images a stream and step
    streams: int = 1
    device: str = "cpu"
    precision: str = "float32"  # as in tribe.engine.precision: float32, tf32, or bf16, of network and images
    graphs: bool = True  # steps captured in CUDA graphs, where they can be
    kernels: bool = True  # Triton kernels, on CUDA
    threads: int | None = None  # of torch on the CPU; None: as many as it takes by itself

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_whole(self, "classes", "batch", "streams", *(() if self.threads is None else ("threads",)))
        whole = bool(self.shape) and all(is_whole(n, least=1) for n in self.shape)
        require(whole, "shape is that of one image, such as (3, 32, 32)", self.shape)
        check_precision(self.precision)
        if self.precision == "tf32" and not self.device.startswith("cuda"):
            raise ValueError("tf32 is a format of NVIDIA GPUs: choose device cuda, or precision float32 or bf16")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and images."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


@dataclass(frozen=True)
class Row:
    """What one contender took."""

    name: str
    ms_per_image: float  # median over the repeats
    spread: float  # between the quartiles, relative to the median
    times: dict[str, float]  # as long as each kind of plain inference
    tflops: float  # achieved, TFLOP/s
    share: float  # of the device's measured rate of matrix products
    peak_bytes: int | None  # while it was built and warmed up, beside the network and the images
    state_bytes: int  # what adapts, at rest, of all streams
    eager_because: str | None = None  # why its steps were not captured though that was asked for


@dataclass(frozen=True)
class Result:
    """A contest: all numbers, and what they depend on."""

    setting: Setting
    machine: dict[str, Any]
    repeats: int  # timings of each contender
    matmul_tflops: float  # the device's rate of matrix products in this precision, TFLOP/s
    rows: tuple[Row, ...]


def measure(
    model: nn.Module,
    setting: Setting,
    methods: Sequence[str] = METHODS,
    *,
    compiled: bool = False,
    repeats: int = REPEATS,
    watch: Watch | None = None,
) -> Result:
    """Time methods and plain inference, in turn.

    Args:
        model: the network, which is copied and never changed.
        setting: the load.
        methods: names of methods, and of other contenders.
        compiled: time compiled channels-last inference, too.
        repeats: timings of each contender, of which the median counts.
        watch: told what is going on.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    >>> result = measure(net, Setting("mine", (3, 8, 8), classes=4, batch=2), ["tent"], repeats=1)
    >>> [row.name for row in result.rows]
    ['plain', 'channels-last', 'tent']
    """
    if repeats < 1:
        raise ValueError(f"repeats is how often each contender is timed, at least 1; got {repeats}")
    contenders.check(methods)
    names = list(dict.fromkeys([PLAIN, CHANNELS_LAST, *[COMPILED] * compiled, *methods]))
    steps = len(names) * (2 + repeats) + repeats
    done = 0

    def tell(words: str) -> None:
        nonlocal done
        done += 1
        if watch is not None:
            watch(done, steps, words)

    with _surroundings(setting) as device:
        ground = _ground(model, setting, device)
        counted = _counted(names, ground, tell)
        found, peaks = _built(names, ground, tell)
        product, product_operations = matrix_product(device, setting.dtype)
        warm_up(product, device)
        times = race(
            {**{name: each.call for name, each in found.items()}, MATMUL: product},
            repeats,
            device,
            periods={name: each.period for name, each in found.items()},
            watch=tell,
        )
        facts = machine(device)
    took = {name: summary(t) for name, t in times.items()}
    rate = product_operations / took[MATMUL][0] / 1e12
    rows = [_row(setting, name, found[name], took, counted[name], rate, peaks[name]) for name in names]
    return Result(setting, facts, repeats, rate, tuple(rows))


def _row(
    setting: Setting,
    name: str,
    found: Contender,
    took: dict[str, tuple[float, float]],
    count: float,
    rate: float,
    peak: int | None,
) -> Row:
    median, spread = took[name]
    tflops = count / median / 1e12
    captures = setting.graphs and setting.device.startswith("cuda")
    return Row(
        name,
        ms_per_image=1e3 * median / (setting.streams * setting.batch),
        spread=spread,
        times={other: median / took[other][0] for other in INFERENCE if other in took},
        tflops=tflops,
        share=tflops / rate,
        peak_bytes=peak,
        state_bytes=found.state_bytes,
        eager_because=found.eager_because() if captures else None,
    )


@contextlib.contextmanager
def _surroundings(setting: Setting) -> Iterator[torch.device]:
    """The device, with threads, precision and kernels as the setting says, and everything put back afterwards."""
    device, threads = torch.device(setting.device), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(float32_precision(setting.precision))
        stack.enter_context(kernels.using("auto" if setting.kernels else "off"))
        stack.enter_context(torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext())
        if setting.threads is not None:
            stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(setting.threads)
        yield device


def _ground(model: nn.Module, setting: Setting, device: torch.device) -> Ground:
    net = copy.deepcopy(model).to(device).eval()
    backbone = Backbone(net).to(setting.dtype)
    net = net.to(setting.dtype)
    images = noise((setting.streams, setting.batch, *setting.shape), device).to(setting.dtype)
    try:
        with torch.no_grad():
            given = net(images[0, :1])
    except Exception as error:  # the network's own code may raise anything
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{setting.model} failed on images of shape {setting.shape}: {told}") from error
    logits = getattr(given, "logits", given)
    if getattr(logits, "shape", None) != (1, setting.classes):
        got = tuple(getattr(logits, "shape", ())) or type(logits).__name__
        raise ValueError(f"{setting.model} gave {got} for an image; expected logits of shape (1, {setting.classes})")
    return Ground(net, backbone, images, setting.classes, "auto" if setting.graphs else False)


def _counted(names: Sequence[str], ground: Ground, tell: Callable[[str], None]) -> dict[str, float]:
    """The operations of each contender's call, counted on an eager one, which is thrown away."""
    eager = dataclasses.replace(ground, graphs=False)
    counted: dict[str, float] = {}
    for name in names:
        same = PLAIN if name in INFERENCE else name  # layouts and compilers change no arithmetic
        counted[name] = counted.get(same) or operations(contenders.create(same, eager))
        tell(name)
    gc.collect()
    return counted


def _built(
    names: Sequence[str], ground: Ground, tell: Callable[[str], None]
) -> tuple[dict[str, Contender], dict[str, int | None]]:
    """All contenders, warm, and the peak of memory that each reached on the way."""
    found, peaks, device = {}, {}, ground.images.device
    for name in names:
        # A compiler's memory, and a copy of the network in another layout, are not the price of a pass.
        passes = contenders.create(name, ground) if name in INFERENCE else None
        with peak_memory(device) as peak:
            found[name] = passes or contenders.create(name, ground)
            warm_up(found[name].call, device, max(WARM_UP, found[name].period))
        peaks[name] = peak.bytes
        tell(name)
    return found, peaks
