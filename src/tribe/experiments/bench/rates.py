"""The number of operations of a contender, and the matrix product that measures the rate of the device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tribe.core import kernels
from tribe.experiments.bench.clock import Call
from tribe.experiments.bench.contenders import Contender
from tribe.experiments.bench.networks import noise

SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices: so large that arithmetic dominates


class _Operations(TorchDispatchMode):
    """Counts with torch's formulas. (FlopCounterMode adds module hooks, which torch.autograd.grad refuses.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: float = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **options, out_val=out)
        return out


def count_operations(contender: Contender) -> float:
    """Floating-point operations of a call: convolutions and matrix products, forward and backward.

    The contender must be eager, and the kernels are off: torch counts only the operations that it dispatches.
    """
    with kernels.using(False), _Operations() as counter:
        for _ in range(contender.period):
            contender.call()
    return float(counter.total) / contender.period


def matrix_product(device: torch.device, dtype: torch.dtype) -> tuple[Call, float]:
    """A large matrix product, and its number of operations."""
    side = SIDE.get(device.type, 1024)
    a, b = noise((2, side, side), device).to(dtype)
    return lambda: a @ b, 2.0 * side**3
