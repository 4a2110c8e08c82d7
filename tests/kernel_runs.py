"""Tests of kernels: where they run, and what they are compared with."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from tribe.core import kernels

T = TypeVar("T")

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
HERE = kernels.missing is None
runs = pytest.mark.skipif(not HERE, reason="needs a GPU, or Triton's interpreter: make test-kernels")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """(R, B, C, ...) whose channels are adjacent in memory."""
    order = (0, 1, *range(3, x.dim()), 2)
    back = (0, 1, x.dim() - 1, *range(2, x.dim() - 1))
    return x.permute(order).contiguous().permute(back)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Relative to the size of the whole."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    assert a.shape == b.shape
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-3))


def without_and_with_kernels(work: Callable[[], T]) -> tuple[T, T]:
    with kernels.using(False):
        plain = work()
    with kernels.using("auto"):
        return plain, work()
