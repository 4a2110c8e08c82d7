"""The Open Inference Protocol over gRPC, in the event loop of the server. The extra `grpc`."""

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from tribe.serve.grpc_messages import SERVICE, message_classes
from tribe.serve.protocol import metadata
from tribe.serve.protocol.datatypes import byte_size, from_bytes, from_numbers
from tribe.serve.protocol.errors import BadInput, BadRequest, ServeError
from tribe.serve.protocol.messages import INPUT, VERSION, Answer, Images, ModelInfo, Request
from tribe.serve.protocol.v2 import read_request
from tribe.serve.security import Holder
from tribe.serve.service import Service

CONTENTS = {"FP32": "fp32_contents", "FP64": "fp64_contents", "UINT8": "uint_contents"}
GRACE = 10.0  # seconds that open calls get when the server stops
log = logging.getLogger("tribe.serve")


def _libraries() -> tuple[Any, dict[str, Any]]:
    """The module grpc and the classes of messages, or an error that says how to install them."""
    try:
        return importlib.import_module("grpc"), message_classes()
    except ImportError as error:
        raise ImportError(f"gRPC needs grpcio and protobuf ({error}): pip install 'tribe-tta[grpc]'") from error


@asynccontextmanager
async def listening(
    service: Service,
    host: str,
    port: int | None,
    certificate: str | PathLike[str] | None = None,
    key: str | PathLike[str] | None = None,
) -> AsyncIterator[int]:
    """Listen for gRPC; the value is the port."""
    grpc, classes = _libraries()
    limits = service.limits
    options = [("grpc.max_receive_message_length", limits.body), ("grpc.max_metadata_size", limits.head_bytes)]
    options += [("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", limits.connections)]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.connections)
    calls = Calls(service, grpc, classes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls.handlers()),))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if certificate is None or key is None:
            found = server.add_insecure_port(address)
        else:
            pair = Path(key).read_bytes(), Path(certificate).read_bytes()
            found = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise OSError(f"cannot listen for gRPC on {address}: {error}. Choose another with --grpc-port") from error
    await server.start()
    try:
        yield found
    finally:
        await server.stop(GRACE)


class Calls:
    """The calls of the service."""

    def __init__(self, service: Service, grpc: Any, classes: Mapping[str, Any]) -> None:
        self.service, self.grpc, self.classes, self.model = service, grpc, classes, service.model

    def handlers(self) -> dict[str, Any]:
        """What answers each call, by its name."""
        single = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ServerMetadata": self.server_metadata,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "ModelInfer": self.model_infer,
        }
        found = {
            name: self.grpc.unary_unary_rpc_method_handler(self._guarded(function), *self._coding(name))
            for name, function in single.items()
        }
        decode = self.classes["ModelInferRequest"].FromString
        encode = self.classes["ModelStreamInferResponse"].SerializeToString
        found["ModelStreamInfer"] = self.grpc.stream_stream_rpc_method_handler(self.model_stream_infer, decode, encode)
        return found

    def _coding(self, name: str) -> tuple[Any, Any]:
        return self.classes[f"{name}Request"].FromString, self.classes[f"{name}Response"].SerializeToString

    def _guarded(self, function: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """A call whose errors become statuses of gRPC."""

        async def run(request: Any, context: Any) -> Any:
            try:
                return await function(request, context)
            except ServeError as error:
                wait = getattr(error, "retry_after", None)
                trailing = () if wait is None else (("retry-after", f"{wait:g}"),)
                await context.abort(self.grpc.StatusCode[error.code], str(error), trailing)
            except (asyncio.CancelledError, self.grpc.aio.AbortError):
                raise
            except Exception:
                log.exception("an unexpected error in %s", function.__name__)
                await context.abort(
                    self.grpc.StatusCode.INTERNAL, "an unexpected error in the server; its log says more"
                )

        return run

    async def server_live(self, request: Any, context: Any) -> Any:
        """The process answers."""
        return self.classes["ServerLiveResponse"](live=True)

    async def server_ready(self, request: Any, context: Any) -> Any:
        """Requests are taken: the service listens only while the worker runs."""
        return self.classes["ServerReadyResponse"](ready=True)

    async def server_metadata(self, request: Any, context: Any) -> Any:
        """What the server is."""
        return self.classes["ServerMetadataResponse"](**metadata.server_metadata())

    async def model_ready(self, request: Any, context: Any) -> Any:
        """Whether the model is there."""
        self.model.check(request.name, request.version)
        return self.classes["ModelReadyResponse"](ready=True)

    async def model_metadata(self, request: Any, context: Any) -> Any:
        """What the model takes and gives."""
        self.model.check(request.name, request.version)
        return self.classes["ModelMetadataResponse"](**metadata.model_metadata(self.model))

    async def model_config(self, request: Any, context: Any) -> Any:
        """The configuration of the model."""
        self.model.check(request.name, request.version)
        return self.classes["ModelConfigResponse"](config=metadata.model_config(self.model))

    async def model_infer(self, request: Any, context: Any) -> Any:
        """Predict images."""
        arrived, holder, stream = self._caller(context)
        return await self._infer(request, holder, stream, arrived)

    async def model_stream_infer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Predict images of many requests, one after another; an error does not end the call."""
        answered = self.classes["ModelStreamInferResponse"]
        async for request in requests:
            try:
                arrived, holder, stream = self._caller(context)
                yield answered(infer_response=await self._infer(request, holder, stream, arrived))
            except ServeError as error:
                yield answered(
                    error_message=str(error), infer_response=self.classes["ModelInferResponse"](id=request.id)
                )

    def _caller(self, context: Any) -> tuple[float, Holder, str | None]:
        """The time, who calls, and the stream that the metadata names."""
        given: dict[str, str] = {}
        for name, value in context.invocation_metadata() or ():
            if name in ("authorization", "x-tribe-stream") and given.setdefault(name, value) != value:
                raise BadRequest(f"the metadata {name} occurs twice; expected once")
        holder = self.service.access.identify(given.get("authorization"))
        return asyncio.get_running_loop().time(), holder, given.get("x-tribe-stream")

    async def _infer(self, message: Any, holder: Holder, stream: str | None, arrived: float) -> Any:
        self.model.check(message.model_name, message.model_version)
        request = parse_message(message, self.model, stream)
        answer = await self.service.infer(request, holder, arrived)
        return self._response(answer, request)

    def _response(self, answer: Answer, request: Request) -> Any:
        message = self.classes["ModelInferResponse"](
            model_name=self.model.name, model_version=VERSION, id=request.id or ""
        )
        for wanted in request.outputs:
            message.outputs.add(name=wanted.name, datatype="FP32", shape=answer.logits.shape)
            message.raw_output_contents.append(answer.logits.tobytes())
        for name, value in answer.facts().items():
            kind = {bool: "bool", int: "int64", float: "double"}.get(type(value), "string")
            setattr(message.parameters[name], f"{kind}_param", value)
        return message


def parse_message(message: Any, model: ModelInfo, stream_header: str | None) -> Request:
    """The request in a message."""
    parameters = {name: _value(value) for name, value in message.parameters.items()}
    outputs = [
        {"name": each.name, "parameters": {n: _value(v) for n, v in each.parameters.items()}}
        for each in message.outputs
    ]
    return read_request(_images(message, model), parameters, outputs, message.id or None, model, stream_header)


def _value(parameter: Any) -> Any:
    chosen = parameter.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(parameter, chosen)


def _images(message: Any, model: ModelInfo) -> Images:
    if len(message.inputs) != 1 or message.inputs[0].name != INPUT:
        names = ", ".join(repr(each.name[:40]) for each in message.inputs[:4]) or "none"
        raise BadInput(f"the inputs are {names}; expected one input with the name {INPUT!r}")
    given = message.inputs[0]
    shape = tuple(given.shape)
    model.check_images(shape)
    if not message.raw_input_contents:
        byte_size(given.datatype, shape)  # refuses an unknown datatype
        field = CONTENTS.get(given.datatype)
        if field is None:
            raise BadInput(f"{given.datatype} has no contents of its own in a message; send raw_input_contents")
        return from_numbers(list(getattr(given.contents, field)), given.datatype, shape)
    if len(message.raw_input_contents) != 1 or given.HasField("contents"):
        raise BadInput("expected the images either in raw_input_contents, once, or in contents")
    content, expected = message.raw_input_contents[0], byte_size(given.datatype, shape)
    if len(content) != expected:
        raise BadInput(
            f"raw_input_contents has {len(content)} bytes; {given.datatype} of the shape {shape} has {expected}"
        )
    return from_bytes(content, given.datatype, shape)
