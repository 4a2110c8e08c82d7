"""Triton kernels for CUDA: normalisation, Balanced BN, time filter, random numbers, colour jitter, in few launches.

With tensor operations (`tribe.core.moments`, `tribe.norms.balanced`) a normalisation layer takes about a hundred
launches, forward and backward, and reads its activations many times. With the kernels it takes nine launches, and every
pass reads once. The numbers are the same up to rounding. Sums are in float32, centred before they are squared, and in a
fixed order, so that a run repeats bit by bit.

The kernels serve tensors on CUDA. Tensor operations serve elsewhere: on other devices, in float64, where Triton is not
installed, inside ``kernels.using(False)`` or with TRIBE_KERNELS=off in the environment. Triton's interpreter
(TRITON_INTERPRET=1) runs the kernels on the CPU, for tests.

At the first use on a device they are compared with the tensor operations (`proof`).

Here is what decides whether a kernel can serve a tensor: callers ask the ``can_*`` function of an operation first.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tribe.core.kernels import proof
from tribe.core.kernels.loading import INTERPRETED, missing, tl, triton
from tribe.core.kernels.proof import comparison, numbers, or_without, works

__all__ = ["INTERPRETED", "comparison", "missing", "numbers", "or_without", "tl", "triton", "works"]

EXACT = (torch.float32,)  # of moments, likelihoods and augmented images
DTYPES = (*EXACT, torch.bfloat16, torch.float16)
LINE = 256  # bytes of adjacent channels that a program reads; also how many numbers one takes where there are few
SAMPLES = 128  # the largest batch whose sums over classes `update` holds on the chip
PIXELS = 4096  # the most pixels of an image that `jitter` holds on the chip; it takes two launches for more
CLASSES = 65536  # the most classes that one program of the time filter holds on the chip

# Of kernels, fusion and CUDA graphs. "auto": where possible; True: always, or an error; False: never.
Switch = bool | Literal["auto"]
_mode: Switch = False if os.environ.get("TRIBE_KERNELS") == "off" else "auto"


def mode() -> Switch:
    """Return the current mode: False also where kernels have been turned off, see `proof`."""
    return False if proof.off is not None else _mode


def state() -> str:
    """Describe whether kernels run in this process, or why they do not."""
    if reason := missing or proof.off:
        return f"off: {reason}"
    if _mode is False:
        return "off: by TRIBE_KERNELS=off or kernels.using(False)"
    if proof.refused:
        return f"off on {'; '.join(f'{device}: {reason}' for device, reason in proof.refused.items())}"
    devices = proof.compared()
    compared = f"compared with tensor operations on {', '.join(devices)}" if devices else "not used yet"
    return f"on: Triton {triton.__version__}, {compared}"


@contextlib.contextmanager
def using(mode: Switch) -> Iterator[None]:
    """Use kernels where they can run ("auto"), or nowhere (False), in the whole process; restore the mode on exit."""
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def can_run(x: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> bool:
    """Return whether kernels can work on this tensor: its type, size and device."""
    return x.dtype in dtypes and x.numel() > 0 and can_launch(x)


def can_launch(x: Tensor) -> bool:
    """Return whether kernels can be launched on the device of this tensor."""
    if missing is not None or proof.off is not None:
        return False
    if (forced := proof.forced.get()) is not None:
        return forced
    if _mode is False:
        return False
    if INTERPRETED:
        return x.device.type == "cpu" and works(x.device)
    # Triton launches on the current device.
    return x.is_cuda and x.device.index == torch.cuda.current_device() and works(x.device)


def can_normalise(x: Tensor) -> bool:
    """Return whether the kernels can pass over these activations (R, B, C, ...): offsets inside a sample are int32."""
    return can_run(x) and (at := strides_of(x)) is not None and at.channels * at.pixels < 2**31


def can_update(mean: Tensor) -> bool:
    """Return whether the kernels can update class statistics from these moments (R, B, C)."""
    return can_run(mean, EXACT) and mean.shape[1] <= SAMPLES


def can_filter(likelihood: Tensor) -> bool:
    """Return whether the kernels can filter with these likelihoods (..., K)."""
    return can_run(likelihood, EXACT) and likelihood.shape[-1] <= CLASSES


class Strides(NamedTuple):
    """Sample n, channel c, pixel l of x (R, B, C, ...) is at n * sample + c * channel + l * pixel."""

    samples: int
    channels: int
    pixels: int
    sample: int
    channel: int
    pixel: int


def strides_of(x: Tensor) -> Strides | None:
    """Return the strides; None where rows and samples, or the pixels' axes, do not form one run each, or leave gaps."""
    rows, batch, channels = x.shape[:3]
    if sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) != x.numel() - 1:
        return None
    sample = x.stride(1) if batch > 1 else x.stride(0)
    if rows > 1 and batch > 1 and x.stride(0) != batch * x.stride(1):
        return None
    pixels, step = 1, 1
    for size, stride in zip(reversed(x.shape[3:]), reversed(x.stride()[3:]), strict=True):
        if size == 1:
            continue
        if pixels == 1:
            step = stride
        elif stride != pixels * step:
            return None
        pixels *= size
    return Strides(rows * batch, channels, pixels, sample, x.stride(2), step)
