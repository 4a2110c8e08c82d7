"""Import Triton, if it is there and there is something to run its kernels on; otherwise say why not."""

# mypy: disable-error-code="no-untyped-def, import-not-found, import-untyped, unused-ignore"

import importlib.util
import os
from typing import Any

import torch


class _StandIn:
    """Stand in for Triton and its language, so that the files of the kernels can be imported."""

    constexpr = int

    @staticmethod
    def jit(kernel: Any) -> Any:
        return kernel


def _probe(x):
    """Stand for a kernel: Triton reads the source of a function already when it is decorated."""


def load() -> tuple[Any, Any, str | None]:
    """Return Triton and its language; or stand-ins for both, and the reason."""
    try:
        if importlib.util.find_spec("triton") is None:
            return _StandIn, _StandIn, "Triton is not installed (torch's CPU builds come without it)"
        if not INTERPRETED and torch.cuda.device_count() == 0:
            return _StandIn, _StandIn, "torch finds no GPU"  # Triton loads slowly
        import triton
        import triton.language as tl

        triton.jit(_probe)
    except Exception as error:  # an old Triton, or a broken one, may raise anything
        return _StandIn, _StandIn, f"Triton cannot be imported ({type(error).__name__}: {error})"
    return triton, tl, None


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, for tests
triton, tl, missing = load()
