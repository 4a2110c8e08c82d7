"""Whether a long stream costs more as it goes on: step time and memory over many steps, in ten windows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

import tribe
from benchmarks import networks
from benchmarks.measure import WARM_UP, megabytes, memory, seconds, table

WINDOWS = 10
BATCHES = 8  # distinct ones, over and over: new images every step would time the generator


@dataclass(frozen=True)
class Window:
    """A tenth of the run."""

    steps: int  # done at its end
    ms_per_step: float  # median
    memory_bytes: int | None  # in use at its end


def watch(network: str, method: str, classes: int, batch: int, streams: int, steps: int, device: str) -> list[Window]:
    """Adapt for many steps."""
    place, size = torch.device(device), networks.image_size(network)
    adapter = tribe.adapt(networks.build(network, classes, place), method, streams=streams)
    x = torch.rand(BATCHES, streams, batch, 3, size, size, device=place)
    batches = x if streams > 1 else x[:, 0]
    for images in batches[:WARM_UP]:
        adapter(images)
    windows = []
    for window in range(WINDOWS):
        first, end = steps * window // WINDOWS, steps * (window + 1) // WINDOWS
        times = [seconds(partial(adapter, batches[i % BATCHES]), 1, place) for i in range(first, end)]
        windows.append(Window(end, 1e3 * statistics.median(times), memory(place)))
    return windows


def show(windows: Sequence[Window]) -> str:
    """The windows as text, and the second half of the run against the first."""
    cells = [(str(w.steps), f"{w.ms_per_step:.3f}", megabytes(w.memory_bytes)) for w in windows]
    early, late = (
        statistics.median(w.ms_per_step for w in half) for half in (windows[: WINDOWS // 2], windows[WINDOWS // 2 :])
    )
    verdict = f"time, second half against the first: x {late / early:.3f}"
    first, last = windows[0].memory_bytes, windows[-1].memory_bytes
    if first is not None and last is not None:
        verdict += f"; memory, last window against the first: {(last - first) / 2**20:+.1f} MB"
    return f"{table(('steps', 'ms/step', 'in use MB'), cells)}\n\n{verdict}"
