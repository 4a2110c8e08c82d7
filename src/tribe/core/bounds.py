"""Bounds of the numbers in a state, declared beside each tensor, and checked when a state comes from a file.

    class Memory(NamedTuple):
        label: Annotated[Tensor, CLASS]  # (S, M) int64
        held: Annotated[Tensor, COUNT]  # (S,) int64

A tensor that is an index, a count or a label needs bounds: a number outside of them is an error in a later step, which
may be one of many streams. A bound of a field that holds a state is one of all tensors in it.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

MOST = 2**53  # of a count: sums of it stay exact in float64, and within 64 bits


class Bounds(NamedTuple):
    """The least and the greatest number that a tensor may hold, both included."""

    low: float = -math.inf
    high: float | Callable[[Any], float] = math.inf  # a function of the state that has the tensor
    classes: bool = False  # whether the numbers are classes: below K, where K is known

    def of(self, state: Any, classes: int | None) -> "Bounds":
        """Return the bounds in numbers, for a state and K classes; None: not known."""
        high = self.high(state) if callable(self.high) else self.high
        return Bounds(self.low, classes - 1 if self.classes and classes else high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:,.6g}"
        return f"{self.low:,.6g} to {self.high:,.20g}"


ANY = Bounds()  # any number of the tensor's type
COUNT = Bounds(0, MOST)  # how many of something
CLASS = Bounds(0, MOST, classes=True)  # the number of a class
NOT_NEGATIVE = Bounds(0)
TRUTH = Bounds(0, 1)  # of booleans, which a file may hold as any byte


class BoundedTensor(NamedTuple):
    """A tensor of a state, and its bounds in numbers; None: none are declared."""

    name: str
    tensor: Tensor
    bounds: Bounds | None


@functools.cache
def _declared(kind: Any) -> dict[str, Bounds]:
    """The bounds of the fields of a state's class."""
    try:
        hints = get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):  # a custom state whose annotations cannot be read here
        return {}
    marks = [(name, mark) for name, hint in hints.items() for mark in getattr(hint, "__metadata__", ())]
    return {name: mark for name, mark in marks if isinstance(mark, Bounds)}


def bounded(
    state: Any, classes: int | None = None, prefix: str = "", outer: Bounds | None = None
) -> Iterator[BoundedTensor]:
    """Yield the tensors of a state, named as by `tribe.core.state.leaves`, with their bounds."""
    kind: Any = type(state)
    declared = _declared(kind)
    for name, value in zip(state._fields, state, strict=True):
        bounds = declared[name].of(state, classes) if name in declared else outer
        if isinstance(value, Tensor):
            implied = TRUTH if value.dtype == torch.bool else None
            yield BoundedTensor(prefix + name, value, bounds or implied)
        else:
            yield from bounded(value, classes, f"{prefix}{name}.", bounds)


def out_of_bounds(state: Any, classes: int | None = None) -> tuple[str, float, Bounds] | None:
    """Return the first tensor that has a number outside its bounds, the number, and the bounds; None: all fit."""
    for name, tensor, bounds in bounded(state, classes):
        if bounds is None or bounds == ANY or not tensor.numel():
            continue
        values = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        for end in values.aminmax():
            if not bounds.low <= (number := end.item()) <= bounds.high:  # type: ignore[operator]
                return name, number, bounds
    return None
