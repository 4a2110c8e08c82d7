"""Measure time and memory. Contenders take turns, so that a noisy machine slows all of them equally."""

import contextlib
import ctypes
import math
import time
import timeit
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)

WARM_UP = 3  # calls before timing: libraries choose algorithms, steps are captured in CUDA graphs
BLOCK = 0.05  # seconds: the shortest block of calls that is timed, so that the cost of the clock is small
MOST = 100  # calls in a block
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def warm_up(call: Call, device: torch.device, times: int = WARM_UP) -> None:
    """Call a few times, so that one-time costs are not timed."""
    for _ in range(times):
        call()
    wait(device)


def time_in_turns(
    calls: Mapping[Name, Call],
    rounds: int,
    device: torch.device,
    *,
    block: float = BLOCK,
    periods: Mapping[Name, int] | None = None,
    on_timing: Callable[[Name], None] | None = None,
) -> dict[Name, list[float]]:
    """Time contenders, which are warm, in turns; return seconds a call, one value a round.

    A timing takes ``block`` seconds, but at most `MOST` calls, in whole ``periods``: calls after which the cost of a
    call repeats.
    """
    period = {name: (periods or {}).get(name, 1) for name in calls}
    length = {}
    for name, call in calls.items():
        once = max(seconds(call, period[name], device) * period[name], 1e-6)
        length[name] = period[name] * max(min(math.ceil(block / once), MOST // period[name]), 1)
    times: dict[Name, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            times[name].append(seconds(calls[name], length[name], device))
            if on_timing is not None:
                on_timing(name)
        order.append(order.pop(0))  # so that no contender always runs after the same one, with its data in the caches
    return times


def seconds(call: Call, times: int, device: torch.device) -> float:
    """Mean seconds a call over a block of calls, until the device has finished all of them."""

    def clock() -> float:
        wait(device)
        return time.perf_counter()

    return timeit.timeit(call, timer=clock, number=times) / times


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(times: Sequence[float]) -> tuple[float, float]:
    """The median, and the interquartile range divided by it, which shows how noisy the machine was.

    >>> summary([1.0, 2.0, 3.0])
    (2.0, 0.5)
    """
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return middle, (high - low) / middle


class Peak:
    """Peak memory of a block of code above the memory before it, in bytes; None where it cannot be measured."""

    bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of a ``with`` block, above the memory in use before it.

    On CUDA this is the memory that torch allocates; elsewhere the resident memory of the process, if its high-water
    mark can be reset (Linux).
    """
    peak = Peak()
    if device.type == "cuda":
        wait(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        wait(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    trim()
    before_block = None
    with contextlib.suppress(OSError):  # a system may not allow this
        CLEAR.write_text("5")  # resets the high-water mark
        before_block = resident("VmRSS")
    yield peak
    highest = resident("VmHWM")
    peak.bytes = None if before_block is None or highest is None else max(highest - before_block, 0)


def resident(field: str) -> int | None:
    """A field of /proc/self/status in bytes; None on other systems than Linux."""
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def trim() -> None:
    """Return freed memory to the system, if the allocator can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
