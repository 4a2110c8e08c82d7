"""The Open Inference Protocol over gRPC, in the event loop of the server. The extra `grpc`."""

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tribe.serve import protocol
from tribe.serve.errors import EXPECTED, BadInput, BadRequest, TooLarge, as_serve_error
from tribe.serve.protocol import MAX_DIMENSIONS, MAX_NUMBERS, VERSION, InferHead, InferRequest, infer_request
from tribe.serve.security import Principal
from tribe.serve.service import Service

grpc: Any = importlib.import_module("grpc")
messages: Any = importlib.import_module("tribe.serve.open_inference_pb2")
CONTENTS = {  # datatype -> field of a message, its numbers, those of the datatype
    "FP32": ("fp32_contents", np.float32, np.float32),
    "FP64": ("fp64_contents", np.float64, np.float64),
    "UINT8": ("uint_contents", np.uint32, np.uint8),
}
MAX_PARAMETERS = 64  # of a request or a tensor
MAX_METADATA = 16 * 2**10  # bytes
GRACE = 10.0  # seconds that open calls get when the server stops
log = logging.getLogger("tribe.serve")


@asynccontextmanager
async def listening(
    service: Service, address: str, tls: tuple[str | PathLike[str], str | PathLike[str]] | None
) -> AsyncIterator[int]:
    """Listen for gRPC on an address; the value is the port."""
    limits = service.limits
    options = [("grpc.max_receive_message_length", limits.body), ("grpc.max_metadata_size", MAX_METADATA)]
    options += [("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", limits.connections)]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.connections)
    calls = Calls(service)
    name = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, calls.handlers()),))
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            certificate, key = (Path(each).read_bytes() for each in tls)
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    except RuntimeError as error:
        raise OSError(f"cannot listen for gRPC on {address}: {error}. Choose another with --grpc-port") from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(GRACE)


class Calls:
    """The calls of the service."""

    def __init__(self, service: Service) -> None:
        self.service, self.model = service, service.model

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
        calls = {name: self._constant(getattr(messages, f"{name}Response")(**facts[name])) for name in facts}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(call),
                getattr(messages, f"{name}Request").FromString,
                getattr(messages, f"{name}Response").SerializeToString,
            )
            for name, call in {**calls, "ModelInfer": self.model_infer}.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self.model_stream_infer,
            messages.ModelInferRequest.FromString,
            messages.ModelStreamInferResponse.SerializeToString,
        )
        return handlers

    def _constant(self, answer: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return a call that always answers the same; of a model, after a check of its name."""

        async def call(request: Any, context: Any) -> Any:
            if hasattr(request, "version"):
                self.model.check(request.name, request.version)
            return answer

        return call

    def _guarded(self, function: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return the call with its errors turned into statuses of gRPC."""

        async def run(request: Any, context: Any) -> Any:
            try:
                return await function(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                if not isinstance(error, EXPECTED):
                    log.exception("an unexpected error in %s", function.__name__)
                known = as_serve_error(error)
                await context.abort(grpc.StatusCode[known.code], str(known), tuple(known.headers.items()))

        return run

    async def model_infer(self, request: Any, context: Any) -> Any:
        """Predict images."""
        user, stream = self._caller(context)
        return await self._infer(request, user, stream)

    async def model_stream_infer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Predict the images of many requests, one after another; an error does not end the call."""
        async for request in requests:
            try:
                user, stream = self._caller(context)
                answer = messages.ModelStreamInferResponse(infer_response=await self._infer(request, user, stream))
            except EXPECTED as error:
                named, words = messages.ModelInferResponse(id=request.id), str(as_serve_error(error))
                answer = messages.ModelStreamInferResponse(error_message=words, infer_response=named)
            yield answer

    def _caller(self, context: Any) -> tuple[Principal, str | None]:
        """Return who calls, and the stream that the metadata names."""
        given: dict[str, str] = {}
        for name, value in context.invocation_metadata() or ():
            if name in ("authorization", "x-tribe-stream") and given.setdefault(name, value) != value:
                raise BadRequest(f"the metadata {name} occurs twice; expected once")
        return self.service.access.identify(given.get("authorization")), given.get("x-tribe-stream")

    async def _infer(self, message: Any, user: Principal, stream: str | None) -> Any:
        arrived = asyncio.get_running_loop().time()
        self.model.check(message.model_name, message.model_version)
        request = decode_message(message, self.model, stream)
        result = await self.service.infer(request, user, arrived)
        logits = protocol.as_numbers(result.logits)
        answer = messages.ModelInferResponse(model_name=self.model.name, model_version=VERSION, id=request.id or "")
        answer.outputs.add(name=self.model.output, datatype="FP32", shape=logits.shape)
        answer.raw_output_contents.append(logits.tobytes())
        for name, value in protocol.answer_parameters(result, request.stream).items():
            kind = {bool: "bool", int: "int64", float: "double"}.get(type(value), "string")
            setattr(answer.parameters[name], f"{kind}_param", value)
        return answer


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
    return infer_request(msgspec.convert(head, InferHead), content, model, stream_header)


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
