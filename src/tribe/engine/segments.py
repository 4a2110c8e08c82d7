"""Parts of a step that look at no value, so that they can be recorded where the step as a whole cannot.

A method whose step needs a decision of the host in the middle (which images enter a memory) calls what comes before and
after it through `part`:

    prediction = segment(self._look, net, state, x, valid)
    ...                                                     # the host decides
    state = segment(self._learn, net, state, memory)

As a rule that is the call itself. While `tribe.engine.graphs` takes the step on a GPU, each part is one launch.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
Perform = Callable[[Callable[..., Any], tuple[Any, ...]], Any]  # does work with its arguments, in some way

_perform: ContextVar[Perform | None] = ContextVar("tribe_parts", default=None)


def segment(work: Callable[..., T], *args: Any) -> T:
    """``work(*args)``: a pure function of its tensors, alone or in (named) tuples, and of plain values that hash."""
    perform = _perform.get()
    return work(*args) if perform is None else perform(work, args)


@contextlib.contextmanager
def run_segments_with(perform: Perform) -> Iterator[None]:
    """Let parts be done in this way for a while."""
    token = _perform.set(perform)
    try:
        yield
    finally:
        _perform.reset(token)


def flatten(value: Any) -> Iterator[Any]:
    """Tensors and plain values within tuples, in order."""
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
