"""Calls that `torch.compile` leaves as they are, with a warning."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from tribe.core.validation import warn

WORDS = (
    "torch.compile changes nothing here: a step has branches and a state, and runs as it is. Take the wrapper away; on "
    "a GPU steps are captured in CUDA graphs without it"
)


def uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method of a module without `torch.compile`, whose pieces of it are slower; warn once for each module.

    The module has an attribute ``compile_told``.
    """
    disabled: list[Callable[..., Any]] = []  # made when it is needed: it imports the compiler

    @functools.wraps(call)
    def run(self: Any, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            torch._dynamo.skip_frame(WORDS)
        if get_eval_frame_callback() is None:
            return call(self, *args, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(call))
        if not self.compile_told:
            self.compile_told = True
            torch.compiler.disable(warn)(WORDS)
        return disabled[0](self, *args, **named)

    return run
