"""How much arithmetic a contender does, and how much the device can do: operations counted, matrix products timed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tribe.bench.clock import Call
from tribe.bench.contenders import Contender
from tribe.bench.networks import noise
from tribe.engine import kernels

SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices: large enough that nothing but arithmetic counts


class _Operations(TorchDispatchMode):
    """Counts by torch's own formulas. (Its FlopCounterMode hooks into modules, which torch.autograd.grad refuses.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: float = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **named, out_val=out)
        return out


def operations(found: Contender) -> float:
    """Floating-point operations of a call: convolutions and matrix products, forward and backward.

    Of an eager contender; torch counts what it dispatches, so the kernels are off meanwhile.
    """
    with kernels.using("off"), _Operations() as counted:
        for _ in range(found.period):
            found.call()
    return float(counted.total) / found.period


def matrix_product(device: torch.device, dtype: torch.dtype) -> tuple[Call, float]:
    """A large matrix product, and how many operations it is."""
    side = SIDE.get(device.type, 1024)
    a, b = noise((2, side, side), device).to(dtype)
    return lambda: a @ b, 2.0 * side**3
