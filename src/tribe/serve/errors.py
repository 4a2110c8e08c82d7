"""The errors of a server, as clients get them; docs/serving.md lists them with their docstrings."""

import math
from collections.abc import Mapping
from typing import ClassVar

import msgspec
import torch

from tribe.io.states import StateFileError
from tribe.serve.store import StoreDamaged, StoreDown
from tribe.streams import UnknownStream as UnknownStream
from tribe.streams.names import WrongName

FULL_AGAIN = 60.0  # seconds after which another stream may be opened, if none is deleted before


class ServeError(Exception):
    """An unexpected error in the server; its log says more."""

    status: ClassVar[int] = 500  # of HTTP
    code: ClassVar[str] = "INTERNAL"  # of gRPC
    headers: Mapping[str, str] = {}  # of the answer


class BadRequest(ServeError):
    """The request does not follow the protocol: JSON, headers, parameters, names, a body that was cut short."""

    status, code = 400, "INVALID_ARGUMENT"


class BadInput(BadRequest):
    """The images have a wrong type, shape or size, or the bytes are not an image."""


class NoToken(ServeError):
    """The server has tokens, and the request has none or an unknown one."""

    status, code = 401, "UNAUTHENTICATED"
    headers: Mapping[str, str] = {"www-authenticate": "Bearer"}


class Forbidden(ServeError):
    """The token does not permit this, or a page of another site sent the request."""

    status, code = 403, "PERMISSION_DENIED"


class NotFound(ServeError):
    """The path, the model or the stream does not exist."""

    status, code = 404, "NOT_FOUND"


class WrongMethod(ServeError):
    """The path exists, but not with this method; the header Allow names those that it has."""

    status, code = 405, "UNIMPLEMENTED"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.headers = {"allow": allowed}


class TooSlow(ServeError):
    """The body did not arrive in time; the connection is closed."""

    status, code = 408, "DEADLINE_EXCEEDED"
    headers: Mapping[str, str] = {"connection": "close"}


class Conflict(ServeError):
    """It does not fit the stream: a state of another model or not finite, or another worker owns the stream."""

    status, code = 409, "FAILED_PRECONDITION"


class TooLarge(ServeError):
    """The body has too many bytes, the images too many pixels, or the answer too many numbers."""

    status, code = 413, "RESOURCE_EXHAUSTED"


class WrongType(ServeError):
    """The body has a type or an encoding that the server does not read."""

    status, code = 415, "INVALID_ARGUMENT"


class Unavailable(ServeError):
    """The deadline cannot be met, the server is full or stops; the header Retry-After says when to try again."""

    status, code = 503, "UNAVAILABLE"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds
        self.headers = {"retry-after": str(max(1, math.ceil(retry_after)))}


class TooMany(Unavailable):
    """A quota of the token is used up, such as its streams or its requests of this second; see Retry-After."""

    status, code = 429, "RESOURCE_EXHAUSTED"


class NotOwner(Conflict):
    """Another worker owns the stream, so this one cannot change it."""


class NotStored(Conflict):
    """The state of the stream cannot be stored, for example because a number in it is not finite."""


ANSWERS: dict[type[Exception], tuple[type[ServeError], str]] = {  # for clients, with the text of the error
    UnknownStream: (NotFound, "{}"),
    WrongName: (BadRequest, "{}"),
    StateFileError: (Conflict, "{}"),
    StoreDown: (Unavailable, "{}"),
    StoreDamaged: (ServeError, "{}"),
    msgspec.MsgspecError: (
        BadRequest,
        "the JSON or the query of the request cannot be read: {}. See the section Protocol of docs/serving.md",
    ),
    torch.OutOfMemoryError: (Unavailable, "not enough memory for this request: {}. Send fewer images"),
}
# A ValueError or an OSError of another type is a mistake in the server.
EXPECTED: tuple[type[Exception], ...] = (ServeError, *ANSWERS)


def as_serve_error(error: Exception) -> ServeError:
    """Return an error as clients get it; others than `EXPECTED` say nothing."""
    if isinstance(error, ServeError):
        return error
    for expected, (answer, words) in ANSWERS.items():
        if isinstance(error, expected):
            return answer(words.format(error))
    return ServeError("an unexpected error in the server; its log says more")
