"""Clocks and scales: time under noise, peak memory, precision, and a table of it all."""

import contextlib
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

Call = Callable[[], object]
Precision = Literal["float32", "tf32", "bf16"]

WARM_UP = 3
BLOCK = (
    0.05  # seconds: calls are timed in blocks at least this long, so that a clock and a wait for the GPU cost little
)
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def race(calls: Mapping[Any, Call], repeats: int, device: torch.device) -> dict[Any, list[float]]:
    """Seconds a call, ``repeats`` times each, in turn: what disturbs the machine disturbs all alike."""
    blocks = {}
    for name, call in calls.items():
        for _ in range(WARM_UP - 1):
            call()
        blocks[name] = min(math.ceil(BLOCK / max(seconds(call, 1, device), 1e-6)), 100)
    times: dict[Any, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(repeats):
        for name in order:
            times[name].append(seconds(calls[name], blocks[name], device))
        order.append(order.pop(0))  # nobody always runs after the same neighbour, in its caches
    return times


def seconds(call: Call, times: int, device: torch.device) -> float:
    """Mean seconds a call over a block of calls, until the device is done."""
    wait(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    wait(device)
    return (time.perf_counter() - start) / times


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the distance between the quartiles relative to it: how noisy the machine was."""
    if len(times) < 2:
        return times[0], 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, (high - low) / middle


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Bytes in use at the height of a call, above those in use before it; None where that cannot be known."""
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    trim()
    try:
        CLEAR.write_text("5")  # resets the high-water mark
    except OSError:
        return None
    rest = resident("VmRSS")
    call()
    peak = resident("VmHWM")
    return None if rest is None or peak is None else max(peak - rest, 0)


def memory(device: torch.device) -> int | None:
    """Bytes in use now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    trim()
    return resident("VmRSS")


def resident(field: str) -> int | None:
    """A field of the process's status in bytes, on Linux."""
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def trim() -> None:
    """Give freed memory back to the system, where the allocator can: it is not in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def megabytes(count: int | None) -> str:
    """Bytes for people."""
    return "n/a" if count is None else f"{count / 2**20:,.1f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in (header, ["-" * w for w in widths], *rows)
    )
