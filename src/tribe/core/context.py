"""Set a context variable for a while: each thread has its own value of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def hold(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable; restore what it had on exit.

    >>> colour = ContextVar("colour", default="red")
    >>> with hold(colour, "green"):
    ...     colour.get()
    'green'
    >>> colour.get()
    'red'
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
