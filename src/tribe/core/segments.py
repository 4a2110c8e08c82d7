"""Segments of a step that read no values, so that they can be captured where the whole step cannot.

A step may need a decision of the host midway, such as which images enter a memory. The method then calls the functions
before and after the decision through `segment`:

    prediction = segment(self._look, net, state, x, valid)
    ...                                                     # the host decides
    state = segment(self._learn, net, state, memory)

By default `segment` just calls the function. While `tribe.core.graphs` takes the step on a GPU, it is one launch.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
Runner = Callable[[Callable[..., Any], tuple[Any, ...]], Any]  # runs a function with these arguments

_runner: ContextVar[Runner | None] = ContextVar("tribe_segments", default=None)


def segment(work: Callable[..., T], *args: Any) -> T:
    """``work(*args)``, for a pure function of tensors, alone or in (named) tuples, and of hashable plain values."""
    run = _runner.get()
    return work(*args) if run is None else run(work, args)


@contextlib.contextmanager
def run_segments_with(runner: Runner) -> Iterator[None]:
    """Run segments with this function; stop on exit."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


def flatten(value: Any) -> Iterator[Any]:
    """The tensors and plain values in nested tuples, in order."""
    if isinstance(value, tuple):
        for item in value:
            yield from flatten(item)
    else:
        yield value


def map_tensors(fn: Callable[[Tensor], Tensor], value: T) -> T:
    """The same tuples with every tensor replaced."""
    if isinstance(value, Tensor):
        return fn(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        items = [map_tensors(fn, item) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value
