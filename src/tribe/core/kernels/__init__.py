"""Triton kernels for CUDA: normalisation, Balanced BN, time filter, random numbers, colour jitter, in few launches.

With tensor operations (`tribe.core.moments`, `tribe.norms.balanced`) a normalisation layer takes about a hundred
launches, forward and backward, and reads its activations many times. With the kernels it takes nine launches, and every
pass reads once. The numbers are the same up to rounding. Sums are in float32, centred before they are squared, and in a
fixed order, so that a run repeats bit by bit.

The kernels serve tensors on CUDA. Tensor operations serve elsewhere: on other devices, in float64, where Triton is not
installed, and after ``kernels.use(False)`` or with TRIBE_KERNELS=off in the environment. Triton's interpreter
(TRITON_INTERPRET=1) runs the kernels on the CPU, for tests.

Callers ask the ``can_*`` function of an operation first.
"""

from tribe.core.kernels.activations import (
    apply,
    apply_backward,
    joint_backward,
    match_layout,
    observe,
)
from tribe.core.kernels.class_update import UpdateTerms, update, update_backward
from tribe.core.kernels.colour import jitter
from tribe.core.kernels.filtering import scan, smooth
from tribe.core.kernels.launch import (
    INSTALLED,
    INTERPRETED,
    SAMPLES,
    Switch,
    can_filter,
    can_jitter,
    can_normalise,
    can_pool,
    can_run,
    can_update,
    mode,
    use,
    using,
    works,
)
from tribe.core.kernels.pooling import fold, fold_backward, pool, pool_backward
from tribe.core.kernels.random_numbers import normal, uniform

__all__ = [
    "INSTALLED",
    "INTERPRETED",
    "SAMPLES",
    "Switch",
    "UpdateTerms",
    "apply",
    "apply_backward",
    "can_filter",
    "can_jitter",
    "can_normalise",
    "can_pool",
    "can_run",
    "can_update",
    "fold",
    "fold_backward",
    "jitter",
    "joint_backward",
    "match_layout",
    "mode",
    "normal",
    "observe",
    "pool",
    "pool_backward",
    "scan",
    "smooth",
    "uniform",
    "update",
    "update_backward",
    "use",
    "using",
    "works",
]
