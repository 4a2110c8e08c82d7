"""Compare the kernels with the tensor operations that they replace, once a device; turn them off where they fail.

A module that calls kernels registers a `comparison`: a function that computes something with them. Before the first use
on a device it is called twice, with kernels there and with tensor operations on the CPU. A result that differs, or is
not a number, turns the kernels off in this process. So does an error out of Triton in a step, see `or_without`.
"""

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Comparison = Callable[[torch.device], dict[str, Sequence[Tensor]]]  # results on a device, by name

NEEDED = (8, 0)  # compute capability: Ampere, whose TF32 products one kernel uses
TOLERANCE = 1e-4  # of a comparison, relative to the largest number
SLOWER = "steps take several times as long. Set TRIBE_KERNELS=off to silence this warning"

comparisons: list[Comparison] = []
off: str | None = None  # why no kernel runs any more in this process
refused: dict[torch.device, str] = {}  # why kernels cannot be built for a device
_compared: dict[torch.device, int] = {}  # how many comparisons were made on a device: modules are imported when needed
_lock = threading.Lock()
forced: ContextVar[bool | None] = ContextVar("tribe_kernels_forced", default=None)  # while kernels are compared


def comparison(compute: Comparison) -> Comparison:
    """Register a function whose results are compared."""
    comparisons.append(compute)
    return compute


def numbers(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Return the same normal numbers on every device, for a comparison."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)


def works(device: torch.device) -> bool:
    """Return whether kernels can be built for a device and give the right numbers; the first call finds out."""
    if _compared.get(device) != len(comparisons) and device not in refused:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # a comparison reads values
        with _lock:
            if _compared.get(device) != (known := len(comparisons)) and device not in refused:
                _try(device, comparisons[_compared.get(device, 0) : known])
                _compared[device] = known
    return off is None and device not in refused


def compared() -> list[str]:
    """Return the devices on which the kernels gave the numbers of tensor operations."""
    return [str(device) for device in _compared if device not in refused]


def turn_off(reason: str) -> None:
    """Run no kernel any more in this process, and warn."""
    global off
    off = reason
    warnings.warn(f"{reason}: Triton's kernels are off in this process, and {SLOWER}", RuntimeWarning, stacklevel=2)


def or_without(work: Callable[[], T]) -> T:
    """Return ``work()``, which is pure; if Triton raises in it, turn the kernels off, and repeat it without them."""
    try:
        return work()
    except Exception as error:
        if (cause := _error_of_triton(error)) is None:
            raise
        if off is None:  # else another thread has turned them off
            turn_off(f"Triton failed in a step ({type(cause).__name__}: {cause})")
    return work()


def first_difference(device: torch.device, computed: Sequence[Comparison]) -> str | None:
    """Return what kernels compute otherwise than tensor operations; None if nothing differs."""
    for compute in computed:
        found, expected = (_compute(compute, *how) for how in ((device, True), (torch.device("cpu"), False)))
        for name, tensors in expected.items():
            for one, wanted in zip(found[name], tensors, strict=True):
                error = (one.detach().cpu() - wanted.detach()).abs().max()
                if not error <= TOLERANCE * wanted.detach().abs().max():  # not "larger": NaN differs
                    return name
    return None


def _try(device: torch.device, computed: Sequence[Comparison]) -> None:
    """Compare what is computed; warn if a kernel cannot be built, or if its numbers differ."""
    results: list[str | Exception | None] = []

    def compare() -> None:
        try:
            if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < NEEDED:
                raise RuntimeError(f"they need a GPU of compute capability {NEEDED} or more; this one has {capability}")
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                results.append(first_difference(device, computed))
        except Exception as error:  # a compiler may raise anything
            results.append(error)

    # In a thread of its own: no mode of this one enters, such as inference, autocast or a trace.
    thread = threading.Thread(target=compare, name="tribe-kernels")
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, Exception):
        reason = refused[device] = f"{type(result).__name__}: {result}"
        warnings.warn(f"Triton's kernels cannot be used on {device} ({reason}): {SLOWER}", RuntimeWarning, stacklevel=2)
    elif result is not None:
        turn_off(f"kernels on {device} compute {result} otherwise than tensor operations")


def _compute(compute: Comparison, device: torch.device, by_kernels: bool) -> dict[str, Sequence[Tensor]]:
    token = forced.set(by_kernels)
    try:
        return compute(device)
    finally:
        forced.reset(token)


def _error_of_triton(error: BaseException | None) -> BaseException | None:
    """Return the error out of Triton, under a kernel of ours, that another may reword; None if there is none."""
    while error is not None:
        names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        ours = [name.startswith("tribe.core.kernels.") and name != __name__ for name in names]
        under = names[ours.index(True) :] if any(ours) else []
        if any(name.split(".")[0] == "triton" for name in under):
            return None if isinstance(error, torch.OutOfMemoryError) else error
        error = error.__cause__ or error.__context__
    return None
