"""The errors of a worker. The HTTP and gRPC sides turn each of them into an answer."""

from tribe.streams.fleet import UnknownStream

__all__ = ["NotOwner", "NotStored", "Overloaded", "UnknownStream", "WrongState"]


class Overloaded(RuntimeError):
    """The worker cannot answer in time.

    Args:
        message: why, for people.
        retry_after: in how many seconds it may.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WrongState(RuntimeError):
    """The stored state of the stream belongs to another model or method."""


class NotOwner(RuntimeError):
    """Another worker owns the stream, so this one cannot change it."""


class NotStored(RuntimeError):
    """The state of the stream cannot be stored, for example because a number in it is not finite."""
