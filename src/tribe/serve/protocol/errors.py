"""Every error that a client can get: a class with an HTTP status, and words that say what to do.

A message says what was wrong, what was expected and what to do. The table in docs/serving.md lists these classes.
"""

from typing import ClassVar


class ServeError(Exception):
    """A request that is not answered with success; the message is for the client."""

    status: ClassVar[int] = 500  # of HTTP
    code: ClassVar[str] = "INTERNAL"  # of gRPC
    when: ClassVar[str] = "an unexpected error in the server; its log says more"
    headers: tuple[tuple[bytes, bytes], ...] = ()


class BadRequest(ServeError):
    """A request that does not follow the protocol."""

    status = 400
    code = "INVALID_ARGUMENT"
    when = "the request does not follow the protocol: JSON, headers, parameters, names, a body that was cut short"


class BadInput(BadRequest):
    """Images of a wrong type, shape or size, or bytes that are no image."""

    when = "the images have a wrong type, shape or size, or the bytes are no image"


class NoToken(ServeError):
    """A request without a token, or with one that the server does not know."""

    status = 401
    code = "UNAUTHENTICATED"
    when = "the server has tokens, and the request has none or an unknown one"
    headers = ((b"www-authenticate", b"Bearer"),)


class Forbidden(ServeError):
    """What the token does not permit, or what a page of another site sent."""

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
        self.headers = ((b"allow", allowed.encode()),)


class TooSlow(ServeError):
    """A body that did not arrive in time."""

    status = 408
    code = "DEADLINE_EXCEEDED"
    when = "the body did not arrive in time; the connection is closed"


class Conflict(ServeError):
    """What does not fit the stream: the state of another model, or a worker that does not own the stream."""

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
    """The deadline cannot be met, or too many connections are open."""

    status = 503
    code = "UNAVAILABLE"
    when = "the deadline cannot be met, the server is full or stops; the header Retry-After says when to try again"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = ((b"retry-after", str(max(1, -int(-retry_after // 1))).encode()),)


ERRORS: tuple[type[ServeError], ...] = (
    *(BadRequest, BadInput, NoToken, Forbidden, NotFound, WrongMethod, TooSlow, Conflict, TooLarge, WrongType),
    *(TooMany, Unavailable, ServeError),
)
