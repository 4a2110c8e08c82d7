"""The Open Inference Protocol over gRPC, in the event loop of the server. The extra `grpc`."""

import asyncio
import dataclasses
import importlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tribe.serve import protocol
from tribe.serve.app import LARGE, LARGE_JSON, Handlers
from tribe.serve.edge import LogLimit
from tribe.serve.errors import EXPECTED, BadInput, BadRequest, NoToken, TooLarge, TooSlow, as_serve_error
from tribe.serve.grpc_server import Places, new_server
from tribe.serve.protocol import (
    MAX_DIMENSIONS,
    MAX_HEAD,
    MAX_JSON,
    MAX_NUMBERS,
    InferHead,
    InferRequest,
    infer_request,
)
from tribe.serve.security import Principal, Token

grpc: Any = importlib.import_module("grpc")
messages: Any = importlib.import_module("tribe.serve.open_inference_pb2")
DecodeError: Any = importlib.import_module("google.protobuf.message").DecodeError
CONTENTS = {  # datatype -> field of a message, its numbers, those of the datatype
    "FP32": ("fp32_contents", np.float32, np.float32),
    "FP64": ("fp64_contents", np.float64, np.float64),
    "UINT8": ("uint_contents", np.uint32, np.uint8),
}
MAX_PARAMETERS = 64  # of a request or a tensor
INPUTS, RAW, INPUT_CONTENTS = 5, 7, 5  # fields of ModelInferRequest that hold images, and of its inputs
FIXED = {1: 8, 5: 4}  # wire type of protobuf -> bytes
GRACE = 10.0  # seconds that open calls get when the server stops
SHARE, STRANGER_SHARE = 2, 8  # one token has at most this part of all places, all calls without a token that part
STRANGER = Principal(Token("stranger", ""))  # who calls without a token, where there are tokens: rights are not asked
METADATA = ("authorization", "x-tribe-stream")  # of which a call has one at most
Handle = Callable[[Any, Principal, str | None], Awaitable[None]]
log = logging.getLogger("tribe.serve")


@asynccontextmanager
async def listening(
    handlers: Handlers, address: str, tls: tuple[str | PathLike[str], str | PathLike[str]] | None
) -> AsyncIterator[int]:
    """Listen for gRPC on an address; the value is the port. The handlers are those of HTTP: they share a budget."""
    calls = Calls(handlers)
    server = new_server(handlers.limits, calls.most)
    name = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    server.add_registered_method_handlers(name, calls.handlers())
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            certificate, key = (Path(each).read_bytes() for each in tls)
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    except RuntimeError as error:
        raise OSError(f"cannot listen for gRPC on {address}: {error}. Choose another with --grpc-port") from error
    with LogLimit(as_one=True).on("grpc._cython.cygrpc"):  # clients cause its records, without a token
        await server.start()
        try:
            yield port
        finally:
            await server.stop(GRACE)


class Calls:
    """The calls of the service. Each is a stream for the library: so its messages are read here, after the token."""

    def __init__(self, handlers: Handlers) -> None:
        self.service, self.model, self.limits = handlers.service, handlers.model, handlers.limits
        self.bodies, self.decoders = handlers.bodies, handlers.decoders
        self.most = min(self.limits.body, self.limits.bodies)  # bytes of a message
        third = max(1, self.limits.bodies // self.most // 3)  # of the budget; HTTP has the last one for itself
        self.open = Places(self.limits.connections)
        self.reads, self.streams = Places(third), Places(third)

    def handlers(self) -> dict[str, Any]:
        """Return the handler of each call, by its name."""
        facts: dict[str, Mapping[str, Any]] = {  # the fields of answers that are always the same
            "ServerLive": {"live": True},
            "ServerReady": {"ready": True},  # the service listens only while the worker runs
            "ServerMetadata": protocol.server_metadata(),
            "ModelReady": {"ready": True},
            "ModelMetadata": protocol.model_metadata(self.model),
            "ModelConfig": {"config": protocol.model_config(self.model)},
        }
        calls = {name: self._guarded(self._constant(name, facts[name]), public=True) for name in facts}
        calls["ModelInfer"] = self._guarded(self.model_infer)
        calls["ModelStreamInfer"] = self._guarded(self.model_stream_infer)
        return {name: grpc.stream_stream_rpc_method_handler(call) for name, call in calls.items()}

    def _constant(self, name: str, facts: Mapping[str, Any]) -> Handle:
        """Return a call that always answers the same; of a model, after a check of its name."""
        kind = getattr(messages, f"{name}Request")
        answer = getattr(messages, f"{name}Response")(**facts).SerializeToString()

        async def call(context: Any, user: Principal, _: str | None) -> None:
            if "version" in kind.DESCRIPTOR.fields_by_name:
                raw = await self._receive(context, user)
                if len(raw) > MAX_HEAD:
                    raise TooLarge(f"the message has {len(raw):,} bytes; expected {MAX_HEAD:,} at most")
                request = parse(kind, raw)
                self.model.check(request.name, request.version)
            await context.write(answer)

        return call

    def _guarded(self, function: Handle, public: bool = False) -> Callable[[Any, Any], Awaitable[None]]:
        """Return a handler that asks who calls, counts the open calls and turns errors into statuses of gRPC."""

        async def run(_: Any, context: Any) -> None:
            try:
                user, stream = self._caller(context, public)
                async with self.open.take_now(user, self._share(user, self.open), "calls are open"):
                    await function(context, user, stream)
            except grpc.aio.BaseError:  # of the library: the client has gone
                raise
            except Exception as error:
                if not isinstance(error, EXPECTED):
                    log.exception("an unexpected error in a call of gRPC")
                known = as_serve_error(error)
                headers = tuple(each for each in known.headers.items() if each[0] != "connection")
                await context.abort(grpc.StatusCode[known.code], str(known), headers)

        return run

    def _caller(self, context: Any, public: bool) -> tuple[Principal, str | None]:
        """Return who calls, and the stream that the metadata names."""
        given: dict[str, str] = {}
        for name, value in context.invocation_metadata() or ():
            if name in METADATA:
                if name in given:
                    raise BadRequest(f"the metadata {name} occurs twice; expected once")
                given[name] = value
        try:
            user = self.service.access.identify(given.get("authorization"))
        except NoToken:
            if not public:
                raise
            user = STRANGER
        return user, given.get("x-tribe-stream")

    def _share(self, user: Principal, places: Places) -> int:
        """Return how many of some places a user may have at the same time."""
        if self.service.access.is_open:
            return places.count
        return max(1, places.count // (STRANGER_SHARE if user is STRANGER else SHARE))

    async def _receive(self, context: Any, user: Principal) -> bytes:
        """Return the only message of a call. While it arrives, it counts as if it were as large as it may be."""
        share, seconds = self._share(user, self.reads), self.limits.body_seconds
        if user is STRANGER:  # who waits for a place would have one among the open calls
            place = self.reads.take_now(user, share, "messages arrive")
        else:
            place = self.reads.take(user, share, seconds)
        async with place:
            with self.bodies.hold(self.most):
                raw = await self._read(context, seconds)
        if raw is None:
            raise BadRequest("the call ends before its message; expected one")
        return raw

    async def _read(self, context: Any, seconds: float) -> bytes | None:
        """Return the next message of a call; None: there is none.

        A read that is cancelled keeps the memory of what arrives for good, so this one is left to the library, which
        ends it with the call.
        """
        reading = asyncio.ensure_future(context.read())
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        done, _ = await asyncio.wait({reading}, timeout=seconds)
        if not done:
            raise TooSlow(f"the message did not arrive within {seconds:g} s. Send it again")
        raw = reading.result()
        return raw if isinstance(raw, bytes) else None

    async def model_infer(self, context: Any, user: Principal, stream: str | None) -> None:
        """Predict images."""
        arrived = asyncio.get_running_loop().time()
        raw = await self._receive(context, user)
        with self.bodies.hold(2 * len(raw), user):  # the bytes, and the message that is made from them
            message = await self._parse(raw, user)
            del raw
            asked = await self._decode(message, user, stream)
            del message
        await context.write((await self._infer(asked, user, arrived)).SerializeToString())

    async def model_stream_infer(self, context: Any, user: Principal, stream: str | None) -> None:
        """Predict the images of many requests, one after another; an error does not end the call."""
        words = "streams of requests are open"
        async with self.streams.take_now(user, self._share(user, self.streams), words):
            with self.bodies.hold(self.most):  # for a message can begin at any time
                while (raw := await self._read(context, self.limits.idle_seconds)) is not None:
                    await context.write(await self._answer(raw, user, stream))
                    del raw

    async def _answer(self, raw: bytes, user: Principal, stream: str | None) -> bytes:
        """Return the answer to a message of a stream of requests."""
        arrived, named = asyncio.get_running_loop().time(), messages.ModelInferResponse()
        try:
            message = await self._parse(raw, user)
            named.id = message.id
            asked = await self._decode(message, user, stream)
            del message, raw
            answer = messages.ModelStreamInferResponse(infer_response=await self._infer(asked, user, arrived))
        except EXPECTED as error:
            answer = messages.ModelStreamInferResponse(error_message=str(as_serve_error(error)), infer_response=named)
        content: bytes = answer.SerializeToString()
        return content

    async def _parse(self, raw: bytes, user: Principal) -> Any:
        """Return the message in some bytes, after its size beside the images is checked."""
        check_size(raw)
        if len(raw) <= LARGE:
            return parse(messages.ModelInferRequest, raw)
        return await self.decoders.run(user, lambda: parse(messages.ModelInferRequest, raw))

    async def _decode(self, message: Any, user: Principal, stream: str | None) -> InferRequest:
        """Return the request in a message, in a thread if that takes long."""
        self.model.check(message.model_name, message.model_version)
        size, raw = message.ByteSize(), bool(message.raw_input_contents)
        if size <= (LARGE if raw else LARGE_JSON):
            return decode_message(message, self.model, stream)
        return await self.decoders.run(user, lambda: decode_message(message, self.model, stream))

    async def _infer(self, request: InferRequest, user: Principal, arrived: float) -> Any:
        with self.bodies.hold(request.images.nbytes, user):
            result = await self.service.infer(request, user, arrived)
        logits = protocol.as_numbers(result.logits)
        names = {"model_name": self.model.name, "model_version": result.version}
        answer = messages.ModelInferResponse(**names, id=request.id or "")
        answer.outputs.add(name=protocol.OUTPUT, datatype="FP32", shape=logits.shape)
        answer.raw_output_contents.append(logits.tobytes())
        for name, value in protocol.answer_parameters(result, request.stream).items():
            kind = {bool: "bool", int: "int64", float: "double"}.get(type(value), "string")
            setattr(answer.parameters[name], f"{kind}_param", value)
        return answer


def parse(kind: Any, raw: bytes) -> Any:
    """Return the message of a kind in some bytes."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise BadRequest(
            f"the message is not a {kind.DESCRIPTOR.name}: it was cut short, or is of another kind"
        ) from None


def check_size(raw: bytes) -> None:
    """Raise if a ModelInferRequest has too many bytes beside its images: to parse them takes 50 times their memory."""
    view, head, numbers = memoryview(raw), 0, 0
    for field, content in fields(view):
        if field == INPUTS and content is not None:
            for inner, part in fields(content):
                if inner == INPUT_CONTENTS and part is not None:
                    numbers += len(part)
                    part = None
                head += 2 if part is None else 2 + len(part)
        elif field != RAW and content is not None:
            head += len(content)
        head += 2  # at least, for the field itself
        if head > MAX_HEAD:
            raise TooLarge(f"the message has more than {MAX_HEAD:,} bytes beside its images")
        if numbers > MAX_JSON:
            words = f"the contents have {numbers:,} bytes; expected {MAX_JSON:,} at most"
            raise TooLarge(f"{words}. Send raw_input_contents")


def fields(view: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Yield the number of each field of a message, and its bytes if it has a length."""
    at, end = 0, len(view)
    while at < end:
        tag, at = varint(view, at)
        kind, content = tag % 8, None
        if kind == 0:
            _, at = varint(view, at)
        elif kind == 2:
            size, at = varint(view, at)
            content, at = view[at : at + size], at + size
        elif kind in FIXED:
            at += FIXED[kind]
        else:
            raise BadRequest(f"a field of the message has the wire type {kind}; expected 0, 1, 2 or 5")
        if at > end:
            raise BadRequest("the message was cut short")
        yield tag // 8, content


def varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the number of variable length at a place, and the place after it."""
    value = 0
    for i, byte in enumerate(view[at : at + 10]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    raise BadRequest("the message was cut short")


def decode_message(message: Any, model: protocol.ModelInfo, stream_header: str | None) -> InferRequest:
    """Return the request in a message: what `protocol.decode_infer` is for HTTP."""
    if len(message.inputs) != 1 or len(message.outputs) > 1 or len(message.inputs[0].shape) > MAX_DIMENSIONS:
        raise BadRequest(f"expected one input, with at most {MAX_DIMENSIONS} dimensions, and at most one output")
    (given,) = message.inputs
    raw = message.raw_input_contents
    if len(raw) > 1 or (raw and given.HasField("contents")):
        raise BadInput("expected the images either in raw_input_contents, once, or in contents")
    content = bytearray(raw[0]) if raw else _contents(given)
    tensor = _tensor(given) | {"shape": list(given.shape), "datatype": given.datatype}
    tensor["parameters"]["binary_data_size"] = len(content)
    head = {
        "inputs": [tensor],
        "outputs": [_tensor(each) for each in message.outputs],
        "parameters": _parameters(message.parameters),
        "id": message.id or None,
    }
    request = infer_request(msgspec.convert(head, InferHead), content, model, stream_header)
    return dataclasses.replace(request, version=message.model_version or None)


def _contents(given: Any) -> bytearray:
    """Return the bytes of the numbers of an input."""
    if given.datatype not in CONTENTS:
        raise BadInput(f"{given.datatype[:20]!r} has no contents in a message; send raw_input_contents")
    name, wide, narrow = CONTENTS[given.datatype]
    numbers = getattr(given.contents, name)
    if len(numbers) > MAX_NUMBERS:
        words = f"the contents have {len(numbers):,} numbers; expected {MAX_NUMBERS:,} at most"
        raise TooLarge(f"{words}. Send raw_input_contents")
    array = np.fromiter(numbers, wide, len(numbers))
    if narrow == np.uint8 and array.max(initial=0) > 255:
        raise BadInput("the contents of the images cannot be read; expected integers from 0 to 255")
    return bytearray(array.astype(narrow))


def _tensor(given: Any) -> dict[str, Any]:
    return {"name": given.name, "parameters": _parameters(given.parameters)}


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    if len(given) > MAX_PARAMETERS:
        raise BadRequest(f"there are {len(given):,} parameters; expected {MAX_PARAMETERS} at most")
    choices = {name: value.WhichOneof("parameter_choice") for name, value in given.items()}
    return {name: getattr(given[name], chosen) for name, chosen in choices.items() if chosen is not None}
