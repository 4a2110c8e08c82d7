"""Device, precision, deterministic algorithms and memory: settings of torch and the process that results depend on."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# float32 and tf32: what float32 means on CUDA. bf16: the network's weights and activations are bfloat16; statistics,
# affine parameters of norm layers and losses stay float32, with TF32 on CUDA.
PRECISIONS = ("float32", "tf32", "bf16")


def choose_device(name: str = "auto") -> torch.device:
    """Return the device of this name; "auto" is the GPU if there is one.

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
        raise ValueError(f"device {name!r} was requested, but torch finds no CUDA device; use cpu")
    return device


def check_precision(precision: str) -> None:
    """Refuse a precision that is not in `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}; got {precision!r}")


def precision_on(device: torch.device, precision: str) -> str:
    """Return the effective precision on a device: a CPU has no TF32 and computes in float32; bf16 is bf16 everywhere.

    >>> precision_on(torch.device("cpu"), "tf32"), precision_on(torch.device("cpu"), "bf16")
    ('float32', 'bf16')
    """
    check_precision(precision)
    return "float32" if precision == "tf32" and device.type != "cuda" else precision


# glibc's options for mallopt, by number, each at its maximum: a buffer up to M_MMAP_THRESHOLD (-3) bytes comes from the
# heap, and the heap shrinks only if M_TRIM_THRESHOLD (-1) bytes at its end are free.
KEEP_MEMORY = ((-3, 32 << 20), (-1, 2**31 - 1))

Setting = tuple[Any, ...]  # a value for each of several flags


class _GlobalFlags:
    """Flags that torch has once for all threads: the first thread that enters saves them, the last restores them."""

    def __init__(self, what: str, read: Callable[[], Setting], write: Callable[[Setting], None]) -> None:
        self._what, self._read, self._write = what, read, write
        self._lock = threading.Lock()
        self._inside: dict[object, tuple[int, Setting]] = {}  # thread and setting of each context that is open
        self._before: Setting = ()

    @contextlib.contextmanager
    def at(self, setting: Setting) -> Iterator[None]:
        """Set the flags; restore them on exit. Raises if another thread is inside with another setting."""
        entry, thread = object(), threading.get_ident()
        with self._lock:
            if other := [used for by, used in self._inside.values() if by != thread and used != setting]:
                raise RuntimeError(
                    f"{self._what} is one for all threads, and another thread is computing with {other[0]}; this one "
                    f"requests {setting}: wait until the other is done, or compute in another process"
                )
            if not self._inside:
                self._before = self._read()
            self._inside[entry] = thread, setting
            self._write(setting)
        try:
            yield
        finally:
            with self._lock:
                del self._inside[entry]
                left = [setting for _, setting in self._inside.values()]
                self._write(left[-1] if left else self._before)


def _write_float32(setting: Setting) -> None:
    _backends.cuda.matmul.fp32_precision, _backends.cudnn.conv.fp32_precision = setting


def _read_algorithms() -> Setting:
    chosen = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *chosen, _backends.cudnn.benchmark, _memory.fill_uninitialized_memory


def _write_algorithms(setting: Setting) -> None:
    mode, warn_only, _backends.cudnn.benchmark, _memory.fill_uninitialized_memory = setting
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


_backends: Any = torch.backends
_memory: Any = torch.utils.deterministic
_float32 = _GlobalFlags(
    "what float32 means on CUDA",
    lambda: (_backends.cuda.matmul.fp32_precision, _backends.cudnn.conv.fp32_precision),
    _write_float32,
)
_algorithms = _GlobalFlags("the choice of algorithms", _read_algorithms, _write_algorithms)


def float32_precision(precision: str) -> contextlib.AbstractContextManager[None]:
    """Set whether float32 on CUDA means IEEE arithmetic ("float32") or TF32; restore it on exit.

    The setting holds for all threads: while one is inside, another that requests the other meaning gets a RuntimeError.
    A single thread may nest both.
    """
    check_precision(precision)
    return _float32.at(("ieee",) * 2 if precision == "float32" else ("tf32",) * 2)


def deterministic() -> contextlib.AbstractContextManager[None]:
    """Use deterministic algorithms, also on a GPU, so that a resumed run equals an uninterrupted one bit by bit.

    If torch has no such algorithm for an operation of the network, it warns and names the operation. The setting holds
    for all threads, until the last one that is inside leaves.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it
    # No cuDNN benchmark: its choice may differ between runs. No filling of memory: none is read before it is written.
    return _algorithms.at((True, True, False, False))


def keep_memory() -> bool:
    """Let this process keep memory that it frees for the next step; returns whether it does (glibc only).

    By default glibc returns large buffers to the kernel at once, and the kernel clears new pages for the next layer: up
    to a quarter of a step on a CPU. For programs such as the command line, not for a library inside another program.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(option, value) for option, value in KEEP_MEMORY)
