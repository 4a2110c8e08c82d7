"""What HTTP and gRPC share: check the token, give the images to the worker, and turn its errors into answers."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tribe.serve.backend import Action, Backend
from tribe.serve.config import Limits
from tribe.serve.errors import NotOwner, NotStored, Overloaded, WrongState
from tribe.serve.protocol.errors import BadInput, Conflict, NotFound, ServeError, TooMany, Unavailable
from tribe.serve.protocol.messages import Answer, Images, ModelInfo, Request
from tribe.serve.security import Access, Holder
from tribe.serve.store.protocol import StoreDamaged
from tribe.serve.thumbnails import Thumbnails

T = TypeVar("T")
log = logging.getLogger("tribe.serve")
LARGE = 2**20  # bytes of images that are converted in a thread: the event loop goes on meanwhile


class Service:
    """A worker, and who may use it."""

    def __init__(self, worker: Backend, model: ModelInfo, limits: Limits, access: Access) -> None:
        self.worker, self.model, self.limits, self.access = worker, model, limits, access
        self.thumbnails = Thumbnails(limits.thumbnails)

    async def infer(self, request: Request, holder: Holder, arrived: float) -> Answer:
        """Predict the images of a request, and let its stream learn from them.

        Args:
            request: the request. If there is no stream of its name, it makes one.
            holder: who asks.
            arrived: when, in the event loop's time; the deadline counts from here.
        """
        deadline = None if request.timeout is None else arrived + request.timeout / 1e6
        stream, learn = request.stream, request.learn
        if stream is not None:
            learn = await self._admit(stream, request, holder)
        images = request.images
        if images.nbytes < LARGE:
            tensor = as_tensor(images)
        else:
            tensor = await asyncio.to_thread(as_tensor, images)
        result = await translated(
            self.worker.infer(stream, tensor, request_id=request.id, deadline=deadline, learn=learn)
        )
        if stream is not None and request.end and holder.can("end"):
            self.thumbnails.forget(stream)
            await self._end(stream)
        if stream is not None and not request.end:
            self.thumbnails.note(stream, tensor)
        logits = result.logits.detach().to("cpu", torch.float32).contiguous().numpy()
        return Answer(logits, stream, result.adapted, result.clock, result.generation, result.health or {})

    async def _end(self, stream: str) -> None:
        """End a stream after its last request. A failure is logged: an error would say that nothing was learned."""
        try:
            await translated(self.worker.control("end", stream))
        except Exception as error:
            words = "stream %r was not released after its last request, and stays until it is idle: %s"
            log.warning(words, stream, error, exc_info=not isinstance(error, ServeError))

    async def _admit(self, stream: str, request: Request, holder: Holder) -> bool:
        """Check the token, create the stream if need be, and return whether it may learn from the images."""
        holder.check("create" if request.start else "end" if request.end else "predict", stream)
        if holder.token.most_streams is not None or not holder.can("create"):
            await self.admit_stream(stream, holder)
        return request.learn and holder.can("learn") and holder.may_learn(len(request.images))

    async def create(self, stream: str, holder: Holder) -> dict[str, Any]:
        """Create a stream, unless it exists or the token has as many as it may."""
        holder.check("create", stream)
        await self.admit_stream(stream, holder)
        return await translated(self.worker.control("create", stream))

    async def admit_stream(self, stream: str, holder: Holder) -> None:
        """Refuse a stream that does not exist, if the token may not create it or has as many as it may."""
        try:
            self.worker.stream(stream)
            return
        except LookupError:
            found = await translated(self.worker.stored(holder.token.streams))
        if stream in found:
            return
        if not holder.can("create"):
            raise NotFound(f"there is no stream {stream!r}, and the token {holder.token.name!r} may not create one")
        known = {each["name"] for each in self.worker.streams() if holder.sees(each["name"])} | found
        if holder.token.most_streams is not None and len(known) >= holder.token.most_streams:
            raise TooMany(
                f"the token {holder.token.name!r} has {len(known)} streams, as many as it may; delete one with "
                "DELETE /v1/streams/NAME first"
            )

    async def control(self, action: Action, stream: str, holder: Holder, **arguments: Any) -> dict[str, Any]:
        """Do something to a stream."""
        holder.check(action, stream)
        if action in ("drop", "end"):
            self.thumbnails.forget(stream)
        return await translated(self.worker.control(action, stream, **arguments))

    async def put_state(self, stream: str, data: bytes) -> dict[str, Any]:
        """Replace the state of a stream; a state that does not fit is a conflict."""
        try:
            return await translated(self.worker.put_state(stream, data))
        except BadInput as error:
            raise Conflict(str(error)) from error


def as_tensor(images: Images) -> Tensor:
    """Images as the network takes them: floating point in [0, 1]; float32 shares the memory."""
    if not images.flags.writeable:
        images = images.copy()  # torch has no tensors that cannot be written
    tensor = torch.from_numpy(images)
    return tensor / 255 if images.dtype == np.uint8 else tensor.to(torch.float32)


async def translated(doing: Awaitable[T]) -> T:
    """Await something of the worker; its errors become answers."""
    try:
        return await doing
    except (ServeError, asyncio.CancelledError):
        raise
    except LookupError as error:
        raise NotFound(_words(error)) from error
    except StoreDamaged as error:
        raise ServeError(_words(error)) from error
    except (ValueError, TypeError) as error:
        raise BadInput(_words(error)) from error
    except torch.OutOfMemoryError as error:
        raise Unavailable(f"there is not enough memory for this request: {_words(error)}. Send fewer images") from error
    except Overloaded as error:
        raise Unavailable(_words(error), error.retry_after) from error
    except (NotOwner, NotStored, WrongState) as error:
        raise Conflict(_words(error)) from error
    except OSError as error:  # the store fails
        raise Unavailable(_words(error)) from error


def _words(error: BaseException) -> str:
    """The message of an error; that of a KeyError is its repr."""
    return str(error.args[0]) if len(error.args) == 1 else str(error)
