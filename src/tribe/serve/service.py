"""A worker and its users, shared by HTTP and gRPC: check the rights, call the worker, turn its errors into answers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch

from tribe.serve.config import Limits
from tribe.serve.errors import (
    BadInput,
    Conflict,
    NotFound,
    NotOwner,
    NotStored,
    Overloaded,
    ServeError,
    TooMany,
    Unavailable,
    WrongState,
)
from tribe.serve.execution import InferResult
from tribe.serve.protocol import InferRequest, ModelInfo
from tribe.serve.security import Access, Principal
from tribe.serve.store import StoreDamaged, StreamStore
from tribe.serve.thumbnails import Thumbnails
from tribe.serve.worker import Worker

T = TypeVar("T")
log = logging.getLogger("tribe.serve")


class Service:
    """A worker, and who may use it.

    Args:
        worker: predicts, learns, and keeps streams.
        model: the model, as clients see it.
        access: the tokens.
        limits: how much is accepted.
        store: is closed after the worker has stopped.
    """

    def __init__(
        self,
        worker: Worker,
        model: ModelInfo,
        access: Access | None = None,
        limits: Limits | None = None,
        store: StreamStore | None = None,
    ) -> None:
        self.worker, self.model, self.access, self.limits = worker, model, access or Access(), limits or Limits()
        self.store = store
        self.thumbnails = Thumbnails(self.limits.thumbnails)
        self.ready = False  # between the start of the worker and its stop

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the worker, and stop it when the block ends."""
        try:
            await self.worker.start()
            self.ready = True
            try:
                yield
            finally:
                self.ready = False
                await self.worker.stop()
        finally:
            if self.store is not None:
                self.store.close()

    async def infer(self, request: InferRequest, user: Principal, arrived: float) -> InferResult:
        """Predict the images of a request, and let its stream learn from them.

        Args:
            request: the request. It makes its stream if that does not exist.
            user: who asks.
            arrived: when, in the event loop's time; the deadline counts from here.
        """
        if not self.ready:
            raise Unavailable("the server starts or stops; try again")
        stream, images, learn = request.stream, request.images, request.learn
        deadline = None if request.timeout is None else arrived + request.timeout / 1e6
        if stream is not None:
            user.check("create" if request.start else "end" if request.end else "predict", stream)
            if user.token.most_streams is not None or not user.can("create"):
                await self._admit(stream, user)
            learn = learn and user.can("learn") and user.may_learn(len(images))
        result = await translated(
            self.worker.infer(stream, images, request_id=request.id, deadline=deadline, learn=learn)
        )
        if stream is not None and request.end:
            await self._end(stream)
        elif stream is not None and self.thumbnails.limit:
            self.thumbnails.update(stream, images)
        return result

    async def _end(self, stream: str) -> None:
        """End a stream after its last request. A failure is logged: an error would say that nothing was learned."""
        self.thumbnails.drop(stream)
        try:
            await self.worker.control("end", stream)
        except Exception as error:
            words = "stream %r was not released after its last request, and stays until it is idle: %s"
            log.warning(words, stream, error)

    async def _admit(self, stream: str, user: Principal) -> None:
        """Raise for a stream that does not exist, if the token may not create it or has as many as it may."""
        try:
            self.worker.stream(stream)
            return
        except LookupError:
            stored = await translated(self.worker.stored(user.token.streams))
        if stream in stored:
            return
        if not user.can("create"):
            raise NotFound(f"no stream {stream!r}, and the token {user.token.name!r} may not create one")
        names = {each["name"] for each in self.worker.streams() if user.can_access(each["name"])} | stored
        if user.token.most_streams is not None and len(names) >= user.token.most_streams:
            raise TooMany(
                f"the token {user.token.name!r} has {len(names)} streams, as many as it may; delete one with "
                "DELETE /v1/streams/NAME first"
            )

    async def control(self, action: Any, stream: str, user: Principal, **arguments: Any) -> dict[str, Any]:
        """Create, end, reset, freeze, unfreeze, snapshot, roll back or drop a stream."""
        user.check(action, stream)
        if action == "create":
            await self._admit(stream, user)
        elif action in ("drop", "end"):
            self.thumbnails.drop(stream)
        return await translated(self.worker.control(action, stream, **arguments))

    def describe(self, stream: str, user: Principal) -> dict[str, Any]:
        """Return the description of a stream."""
        user.check("see", stream)
        try:
            return self._with_thumbnail(self.worker.stream(stream))
        except LookupError as error:
            raise NotFound(_message(error)) from None

    def describe_all(self, user: Principal) -> list[dict[str, Any]]:
        """Return the descriptions of the streams of a token."""
        return [self._with_thumbnail(each) for each in self.worker.streams() if user.can_access(each["name"])]

    def _with_thumbnail(self, description: dict[str, Any]) -> dict[str, Any]:
        number = self.thumbnails.number(description["name"])
        return description if number is None else description | {"thumbnail": number}

    async def stored(self, user: Principal) -> list[str]:
        """Return the names of the token's streams in the store."""
        return sorted(await translated(self.worker.stored(user.token.streams)))

    async def get_state(self, stream: str, user: Principal) -> bytes:
        """Return the state file of a stream."""
        user.check("get_state", stream)
        return await translated(self.worker.get_state(stream))

    async def put_state(self, stream: str, data: bytes, user: Principal) -> dict[str, Any]:
        """Replace the state of a stream; a state that does not fit is a conflict."""
        await self._admit(stream, user)
        try:
            return await translated(self.worker.put_state(stream, data))
        except BadInput as error:
            raise Conflict(str(error)) from error


async def translated(call: Awaitable[T]) -> T:
    """Await a call of the worker; raise its errors as a `ServeError`."""
    try:
        return await call
    except (ServeError, asyncio.CancelledError):
        raise
    except LookupError as error:
        raise NotFound(_message(error)) from error
    except StoreDamaged as error:
        raise ServeError(_message(error)) from error
    except (ValueError, TypeError) as error:
        raise BadInput(_message(error)) from error
    except torch.OutOfMemoryError as error:
        raise Unavailable(f"not enough memory for this request: {_message(error)}. Send fewer images") from error
    except Overloaded as error:
        raise Unavailable(_message(error), error.retry_after) from error
    except (NotOwner, NotStored, WrongState) as error:
        raise Conflict(_message(error)) from error
    except OSError as error:  # the store fails
        raise Unavailable(_message(error)) from error


def _message(error: BaseException) -> str:
    """Return the message of an error; ``str`` of a KeyError is its repr."""
    return str(error.args[0]) if len(error.args) == 1 else str(error)
