"""What a number depends on beside the code: the machine, its versions, and the precision it is computed in."""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tribe

# float32 and tf32: what float32 means on CUDA. bf16: the network's weights and activations are bfloat16, and what stays
# float32 (statistics, affine parameters of norm layers, losses) uses TF32 there.
PRECISIONS = ("float32", "tf32", "bf16")


def choose_device(name: str = "auto") -> torch.device:
    """The device of a name; "auto" is the GPU where there is one.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}: expected auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but this torch sees no CUDA device; use cpu")
    return device


def check_precision(precision: str) -> None:
    """Refuse what is none of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}; got {precision!r}")


def precision_on(device: torch.device, precision: str) -> str:
    """What a precision comes to on a device: a CPU has no TF32 and computes in float32; bf16 is bf16 everywhere.

    >>> precision_on(torch.device("cpu"), "tf32"), precision_on(torch.device("cpu"), "bf16")
    ('float32', 'bf16')
    """
    check_precision(precision)
    return "float32" if precision == "tf32" and device.type != "cuda" else precision


@contextlib.contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Decide whether float32 on CUDA means IEEE arithmetic ("float32") or TF32, and put things back afterwards."""
    check_precision(precision)
    backends: Any = torch.backends
    switches = backends.cuda.matmul, backends.cudnn.conv
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee" if precision == "float32" else "tf32"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """The same bits every time on a GPU too, so that a resumed run equals one that never stopped.

    Where torch has no such algorithm for an operation of the network, it warns, and names it.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    tuned, filling = torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False  # what is fastest now may not be the next time
        memory.fill_uninitialized_memory = False  # nothing is read that was not written
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory = tuned, filling


def keep_memory() -> bool:
    """Let this process keep memory that it frees, for the next step, and say whether it does (glibc can).

    By default glibc gives large buffers back to the kernel at once, which then clears fresh pages for the next layer:
    up to a quarter of a step on a CPU. For a program of its own, not for a library in somebody else's.
    """
    trim_threshold, mmap_threshold = -1, -3  # the names that mallopt has for them
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, 2**31 - 1))  # as large as they may be


def machine(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, for the record."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "tribe": tribe.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
