"""What a number depends on beside the code: the machine, its versions, and the precision it is computed in."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

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


Setting = tuple[Any, ...]  # a value for each of some switches


class _Switches:
    """Switches that torch has once for all threads: the first one in saves them, the last one out puts them back."""

    def __init__(self, what: str, read: Callable[[], Setting], write: Callable[[Setting], None]) -> None:
        self._what, self._read, self._write = what, read, write
        self._lock = threading.Lock()
        self._inside: dict[object, tuple[int, Setting]] = {}  # the thread and the setting of each who is in
        self._before: Setting = ()

    @contextlib.contextmanager
    def at(self, setting: Setting) -> Iterator[None]:
        """Switch, unless another thread is inside and counts on another setting."""
        entry, thread = object(), threading.get_ident()
        with self._lock:
            if apart := [held for other, held in self._inside.values() if other != thread and held != setting]:
                raise RuntimeError(
                    f"{self._what} is one for all threads, and another thread is computing with {apart[0]}; asked for "
                    f"is {setting}: wait until it is done, or compute in another process"
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


def _read_float32() -> Setting:
    backends: Any = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


def _write_float32(setting: Setting) -> None:
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = setting


def _read_algorithms() -> Setting:
    memory: Any = torch.utils.deterministic
    chosen = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *chosen, torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory


def _write_algorithms(setting: Setting) -> None:
    memory: Any = torch.utils.deterministic
    mode, warn_only, torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory = setting
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


_float32 = _Switches("what float32 means on CUDA", _read_float32, _write_float32)
_algorithms = _Switches("the choice of algorithms", _read_algorithms, _write_algorithms)


def float32_precision(precision: str) -> contextlib.AbstractContextManager[None]:
    """Decide whether float32 on CUDA means IEEE arithmetic ("float32") or TF32, and put things back afterwards.

    It is decided for all threads: while one is inside, another that asks for the other meaning is refused, with a
    RuntimeError. Who is alone may change it inside, for a while.
    """
    check_precision(precision)
    return _float32.at(("ieee",) * 2 if precision == "float32" else ("tf32",) * 2)


def deterministic() -> contextlib.AbstractContextManager[None]:
    """The same bits every time on a GPU too, so that a resumed run equals one that never stopped.

    Where torch has no such algorithm for an operation of the network, it warns, and names it. Torch decides it for all
    threads: until the last one that is inside leaves, it holds for those outside, too.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    # What cuDNN finds fastest now may not be the next time; and memory need not be filled, as none is read unwritten.
    return _algorithms.at((True, True, False, False))


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
