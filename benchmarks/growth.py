"""Measure whether steps get slower or need more memory over a long stream, in ten windows.

``python -m benchmarks.growth --steps 5000``
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

import tribe
from tribe.core import kernels
from tribe.core.clock import resident, seconds, trim, warm_up
from tribe.core.precision import float32_precision
from tribe.experiments.bench.contenders import build, noise
from tribe.experiments.bench.results import size, table

WINDOWS = 10
BATCHES = 8  # distinct batches, used in turn: new images at every step would also time the generator


@dataclass(frozen=True)
class Window:
    """Measurements of one tenth of the run."""

    steps: int  # finished at the end of the window
    ms_per_step: float  # median
    memory_bytes: int | None  # in use at the end of the window


def watch(
    model: str,
    method: str,
    classes: int,
    batch: int,
    streams: int,
    steps: int,
    device: str,
    within: float = float("inf"),
) -> list[Window]:
    """Adapt for many steps; start no window after ``within`` seconds."""
    place = torch.device(device)
    adapter = tribe.adapt(build(model, classes, place), method, streams=streams, graphs="auto")
    x = noise((BATCHES, streams, batch, *tribe.models.architecture(model).shape), place)
    batches = x if streams > 1 else x[:, 0]
    warm_up(partial(adapter, batches[0]), place)
    windows: list[Window] = []
    begun = time.monotonic()
    for window in range(WINDOWS):
        if time.monotonic() - begun > within:
            break
        first, end = steps * window // WINDOWS, steps * (window + 1) // WINDOWS
        times = [seconds(partial(adapter, batches[i % BATCHES]), 1, place) for i in range(first, end)]
        windows.append(Window(end, 1e3 * statistics.median(times), memory(place)))
    return windows


def memory(device: torch.device) -> int | None:
    """Return the bytes in use now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    trim()
    return resident("VmRSS")


def show(windows: Sequence[Window]) -> str:
    """Format the windows as a table, and compare the last with the first."""
    cells = [(str(w.steps), f"{w.ms_per_step:.3f}", size(w.memory_bytes)) for w in windows]
    first, last = windows[0], windows[-1]
    verdict = f"last window compared with the first: time x {last.ms_per_step / first.ms_per_step:.3f}"
    if first.memory_bytes is not None and last.memory_bytes is not None:
        verdict += f", memory {(last.memory_bytes - first.memory_bytes) / 1e6:+.1f} MB"
    return f"{table(('steps', 'ms/step', 'in use'), cells)}\n\n{verdict}"


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m benchmarks.growth", description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="resnet8")
    p.add_argument("--method", default="tribe")
    p.add_argument("--classes", type=int, default=10)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--streams", type=int, default=1)
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = p.parse_args(argv)
    if o.steps < WINDOWS:
        p.error(f"--steps must be at least {WINDOWS}")
    print(", ".join(f"{name} {value}" for name, value in vars(o).items()), end="\n\n", flush=True)
    with float32_precision("tf32"), kernels.using("auto"):
        print(show(watch(**vars(o))))


if __name__ == "__main__":
    main()
