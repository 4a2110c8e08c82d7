"""The errors of a server: those of its worker, and the answers that clients get instead of a success."""

from typing import ClassVar

from tribe.streams.fleet import UnknownStream as UnknownStream

# -- of a worker; tribe.serve.service turns each of them into one of those below ---------------------------------------


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


# -- of a request; docs/serving.md lists them --------------------------------------------------------------------------


class ServeError(Exception):
    """A request that is not answered with success; the message is for the client."""

    status: ClassVar[int] = 500  # of HTTP
    code: ClassVar[str] = "INTERNAL"  # of gRPC
    when: ClassVar[str] = "an unexpected error in the server; its log says more"
    retry_after: float | None = None  # seconds

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        return {}


class BadRequest(ServeError):
    """A request that does not follow the protocol."""

    status = 400
    code = "INVALID_ARGUMENT"
    when = "the request does not follow the protocol: JSON, headers, parameters, names, a body that was cut short"


class BadInput(BadRequest):
    """Images of a wrong type, shape or size, or bytes that are not an image."""

    when = "the images have a wrong type, shape or size, or the bytes are not an image"


class NoToken(ServeError):
    """A request without a token, or with an unknown one."""

    status = 401
    code = "UNAUTHENTICATED"
    when = "the server has tokens, and the request has none or an unknown one"

    @property
    def headers(self) -> dict[str, str]:
        """Return the header that asks for a token."""
        return {"www-authenticate": "Bearer"}


class Forbidden(ServeError):
    """A request that the token does not permit, or that a page of another site sent."""

    status = 403
    code = "PERMISSION_DENIED"
    when = "the token does not permit this, or a page of another site sent the request"


class NotFound(ServeError):
    """A path, a model or a stream that does not exist."""

    status = 404
    code = "NOT_FOUND"
    when = "the path, the model or the stream does not exist"


class WrongMethod(ServeError):
    """A path that exists, with a method that it does not have."""

    status = 405
    code = "UNIMPLEMENTED"
    when = "the path exists, but not with this method; the header Allow names those that it has"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        """Return the header with the methods of the path."""
        return {"allow": self.allowed}


class TooSlow(ServeError):
    """A body that did not arrive in time."""

    status = 408
    code = "DEADLINE_EXCEEDED"
    when = "the body did not arrive in time; the connection is closed"

    @property
    def headers(self) -> dict[str, str]:
        """Return the header that closes the connection."""
        return {"connection": "close"}


class Conflict(ServeError):
    """A state of another model, or a worker that does not own the stream."""

    status = 409
    code = "FAILED_PRECONDITION"
    when = (
        "it does not fit the stream: the state of another model or method, another worker owns the stream, or its "
        "state is not finite and cannot be stored"
    )


class TooLarge(ServeError):
    """A body, or an image, that is larger than the server accepts."""

    status = 413
    code = "RESOURCE_EXHAUSTED"
    when = "the body has too many bytes, or the image too many pixels"


class WrongType(ServeError):
    """A body of a type or an encoding that the server does not read."""

    status = 415
    code = "INVALID_ARGUMENT"
    when = "the body has a type or an encoding that the server does not read"


class TooMany(ServeError):
    """More streams than a token may have."""

    status = 429
    code = "RESOURCE_EXHAUSTED"
    when = "the token has as many streams as it may have"


class Unavailable(ServeError):
    """A deadline that cannot be met, or a server that is full, starts or stops."""

    status = 503
    code = "UNAVAILABLE"
    when = "the deadline cannot be met, the server is full or stops; the header Retry-After says when to try again"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Return the header with the seconds to wait."""
        return {"retry-after": str(max(1, -int(-(self.retry_after or 0) // 1)))}


ERRORS: tuple[type[ServeError], ...] = (
    *(BadRequest, BadInput, NoToken, Forbidden, NotFound, WrongMethod, TooSlow, Conflict, TooLarge, WrongType),
    *(TooMany, Unavailable, ServeError),
)
