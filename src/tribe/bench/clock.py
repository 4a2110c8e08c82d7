"""Time and memory under noise: contenders take turns, so that what disturbs the machine disturbs all alike."""

import contextlib
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)

WARM_UP = 3  # calls before any clock starts: libraries choose algorithms, steps are captured
BLOCK = 0.05  # seconds: calls are timed in blocks at least this long, so that the clock costs little
MOST = 100  # calls in a block
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


# -- time --------------------------------------------------------------------------------------------------------------


def warm_up(call: Call, device: torch.device, times: int = WARM_UP) -> None:
    """Call until everything that happens once has happened."""
    for _ in range(times):
        call()
    wait(device)


def race(
    calls: Mapping[Name, Call],
    rounds: int,
    device: torch.device,
    *,
    block: float = BLOCK,
    periods: Mapping[Name, int] | None = None,
    watch: Callable[[Name], None] | None = None,
) -> dict[Name, list[float]]:
    """Seconds a call, one value a round, of contenders that are warm and take turns.

    Args:
        calls: the contenders.
        rounds: how often each is timed.
        device: what they run on.
        block: seconds that a timing takes at least, as far as `MOST` calls go.
        periods: after how many calls the cost of one repeats, where that is not every call; blocks are whole periods.
        watch: told who was timed, after each timing.
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
            if watch is not None:
                watch(name)
        order.append(order.pop(0))  # nobody always runs after the same neighbour, in its caches
    return times


def seconds(call: Call, times: int, device: torch.device) -> float:
    """Mean seconds a call over a block of calls: by the device's own clock on CUDA, until it is done."""
    wait(device)
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begun) / times


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the distance between the quartiles relative to it: how noisy the machine was.

    >>> summary([1.0, 2.0, 3.0])
    (2.0, 0.5)
    """
    if len(times) < 2:
        return times[0], 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, (high - low) / middle


# -- memory ------------------------------------------------------------------------------------------------------------


class Peak:
    """Bytes in use at the height of a piece of work above those before it; None where that cannot be known."""

    bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Watch a piece of work: what it keeps and what it needs for a moment, beside what there was before.

    On CUDA that is what torch allocates; elsewhere what the system holds for the process, which is known where its
    high-water mark can be reset (Linux).
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
    rest = resident("VmRSS") if _cleared() else None
    yield peak
    height = resident("VmHWM")
    peak.bytes = None if rest is None or height is None else max(height - rest, 0)


def _cleared() -> bool:
    """Reset the process's high-water mark, if the system lets us."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


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
