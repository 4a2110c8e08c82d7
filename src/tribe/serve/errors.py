"""The errors of a server, as clients get them; docs/serving.md lists them with their docstrings.

Clients get no paths of the server, no names of streams but those that they name, and nothing of other owners. The log
has the rest: of the store's errors, once in a while.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import ClassVar

import msgspec
import torch

from tribe.core.shortage import is_out_of_memory
from tribe.fields import printable
from tribe.io.states import StateFileError
from tribe.serve.store import Fenced, StoreDamaged, StoreDown
from tribe.streams import UnknownStream as UnknownStream
from tribe.streams.names import WrongName

FULL_AGAIN = 60.0  # seconds after which another stream may be opened, if none is deleted before
log = logging.getLogger("tribe.serve")


class ServeError(Exception):
    """An unexpected error in the server; its log says more."""

    status: ClassVar[int] = 500  # of HTTP
    code: ClassVar[str] = "INTERNAL"  # of gRPC
    headers: Mapping[str, str] = {}  # of the answer


class BadRequest(ServeError):
    """The request does not follow the protocol, or was cut short."""

    status, code = 400, "INVALID_ARGUMENT"


class BadInput(BadRequest):
    """The images have a wrong type, shape or size, or are not images."""


class NoToken(ServeError):
    """The server has tokens, and the request names none of them."""

    status, code = 401, "UNAUTHENTICATED"
    headers: Mapping[str, str] = {"www-authenticate": "Bearer", "connection": "close"}


class Forbidden(ServeError):
    """The token does not permit this, or a page of another site sent the request."""

    status, code = 403, "PERMISSION_DENIED"


class NotFound(ServeError):
    """The path, the model or the stream does not exist."""

    status, code = 404, "NOT_FOUND"


class WrongMethod(ServeError):
    """The path does not have this method; see the header Allow."""

    status, code = 405, "UNIMPLEMENTED"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.headers = {"allow": allowed}


class TooSlow(ServeError):
    """The body did not arrive in time; the connection is closed."""

    status, code = 408, "DEADLINE_EXCEEDED"
    headers: Mapping[str, str] = {"connection": "close"}


class Conflict(ServeError):
    """The state does not fit the stream, or another worker owns it."""

    status, code = 409, "FAILED_PRECONDITION"


class TooLarge(ServeError):
    """The body, the images or the answer are too large."""

    status, code = 413, "RESOURCE_EXHAUSTED"


class WrongType(ServeError):
    """The server does not read this type or encoding."""

    status, code = 415, "INVALID_ARGUMENT"


class Unavailable(ServeError):
    """The deadline cannot be met, or the server is full or stops; see Retry-After."""

    status, code = 503, "UNAVAILABLE"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds
        self.headers = {"retry-after": str(max(1, math.ceil(retry_after)))}


class TooMany(Unavailable):
    """A quota of the token is used up; see Retry-After."""

    status, code = 429, "RESOURCE_EXHAUSTED"


class NotOwner(Conflict):
    """Another worker owns the stream, so this one cannot change it."""


class NotStored(Conflict):
    """The state of the stream cannot be stored, for example because a number in it is not finite."""


NO_MEMORY = "the server has not enough memory for this request; try again, or send fewer images"
ANSWERS: dict[type[Exception], tuple[type[ServeError], str]] = {  # for clients, with the text of the error
    UnknownStream: (NotFound, "{}"),
    WrongName: (BadRequest, "{}"),
    StateFileError: (Conflict, "{}"),
    StoreDown: (Unavailable, "the store of the streams cannot be reached or written; try again"),
    StoreDamaged: (ServeError, "the stored states of the stream are damaged; the server's log says more"),
    Fenced: (NotOwner, "another worker has claimed the stream at this moment; nothing was changed. Try again"),
    msgspec.MsgspecError: (
        BadRequest,
        "the JSON or the query of the request cannot be read: {}. See the section Protocol of docs/serving.md",
    ),
    MemoryError: (Unavailable, NO_MEMORY),
    torch.OutOfMemoryError: (Unavailable, NO_MEMORY),
}
FOR_OPERATORS = (StoreDown, StoreDamaged)  # whose text only the log has
LOG_EVERY = 10.0  # seconds between two lines of the log about errors of one type
# A ValueError or an OSError of another type is a mistake in the server.
EXPECTED: tuple[type[Exception], ...] = (ServeError, *ANSWERS)


def as_serve_error(error: Exception) -> ServeError:
    """Return an error as clients get it; others than `EXPECTED` say nothing."""
    if isinstance(error, ServeError):
        return error
    if is_out_of_memory(error):
        _log_rarely(error)
        return Unavailable(NO_MEMORY)
    for expected, (answer, words) in ANSWERS.items():
        if isinstance(error, expected):
            if isinstance(error, FOR_OPERATORS):
                _log_rarely(error)
            return answer(words.format(getattr(error, "public", error)))
    return ServeError("an unexpected error in the server; its log says more")


_logged: dict[type[Exception], float] = {}


def _log_rarely(error: Exception) -> None:
    now = time.monotonic()
    if now >= _logged.get(type(error), 0.0):
        _logged[type(error)] = now + LOG_EVERY
        log.error("%s: %s", type(error).__name__, printable(str(error)[:2000]))
