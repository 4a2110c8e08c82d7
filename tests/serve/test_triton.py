"""NVIDIA's tritonclient, as it is, against the server: HTTP, gRPC, and both with asyncio."""

import queue

import numpy as np
import pytest
import torch
from http_calls import IMAGES
from small_server import has_grpc, small_fleet

import tribe
from tribe.testing import small_network

open_inference_pb2 = pytest.importorskip("tribe.serve.open_inference_pb2", exc_type=ImportError)
HTTP, GRPC = "tritonclient.http", "tritonclient.grpc"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def client_of(name, server):
    """A module of tritonclient and a client of the server."""
    module = pytest.importorskip(name, reason=f"{name} is not installed: make test-serve")
    if name.startswith(GRPC):
        if not has_grpc():
            pytest.skip("grpcio and protobuf are not installed: make test-serve")
        return module, module.InferenceServerClient(server.grpc_address)
    return module, module.InferenceServerClient(server.url.partition("://")[2])


def tensor(module, images=IMAGES, datatype="FP32", **options):
    found = module.InferInput("images", images.shape, datatype)
    found.set_data_from_numpy(images, **options)
    return found


def expected(stream, *batches):
    fleet = small_fleet()
    return [fleet({stream: torch.from_numpy(each)})[stream].numpy() for each in batches]


@pytest.mark.parametrize("name", [HTTP, GRPC])
def test_a_sequence_adapts(server, name):
    module, client = client_of(name, server)
    stream = name.rpartition(".")[2]
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("small")
    for i, logits in enumerate(expected(stream, IMAGES, IMAGES)):
        options = {"sequence_id": stream, "sequence_start": i == 0, "sequence_end": i == 1, "request_id": str(i)}
        result = client.infer("small", [tensor(module)], timeout=60_000_000, **options)
        assert np.array_equal(result.as_numpy("logits"), logits)
    client.close()


@pytest.mark.parametrize("name", [HTTP, GRPC])
def test_metadata_and_configuration(server, name):
    _, client = client_of(name, server)
    options = {"as_json": True} if name == GRPC else {}
    assert client.get_server_metadata(**options)["name"] == "tribe"
    found = client.get_model_metadata("small", "1", **options)
    assert [int(size) for size in found["inputs"][0]["shape"]] == [-1, 3, 8, 8]
    assert [int(size) for size in found["outputs"][0]["shape"]] == [-1, 4]
    config = client.get_model_config("small", **options)
    config = config.get("config", config)
    assert config["max_batch_size"] == 1024
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["parameters"]["method"]["string_value"] == "tribe"
    client.close()


@pytest.mark.parametrize("name", [HTTP, GRPC])
def test_types_of_images_and_outputs(server, name):
    module, client = client_of(name, server)
    pixels = (IMAGES * 255).astype(np.uint8)
    source = tribe.adapt(small_network(), "source")
    for images, datatype in ((pixels, "UINT8"), (IMAGES.astype(np.float16), "FP16"), (IMAGES.astype(float), "FP64")):
        x = torch.from_numpy(images.astype(np.float32))
        wanted = source.predict(x / 255 if datatype == "UINT8" else x).numpy()
        output = module.InferRequestedOutput("logits")
        result = client.infer("small", [tensor(module, images, datatype)], outputs=[output])
        assert np.array_equal(result.as_numpy("logits"), wanted)
    assert client.infer("small", [tensor(module)], sequence_id=12345).as_numpy("logits").shape == (2, 4)
    client.close()


def test_http_with_numbers_in_json_and_compressed(server):
    module, client = client_of(HTTP, server)
    output = module.InferRequestedOutput("logits", binary_data=False)
    plain = client.infer("small", [tensor(module, binary_data=False)], outputs=[output])
    packed = client.infer("small", [tensor(module)], request_compression_algorithm="gzip")
    assert np.allclose(plain.as_numpy("logits"), packed.as_numpy("logits"))
    client.close()


@pytest.mark.parametrize("name", [HTTP, GRPC])
def test_errors_have_words(server, name):
    module, client = client_of(name, server)
    error = module.InferenceServerException
    wrong = IMAGES[:, :1]
    for words, options in (
        ("'large'", {"model_name": "large"}),
        (r"\(B, 3, 8, 8\)", {"inputs": [tensor(module, wrong)]}),
        ("sequence_id", {"sequence_id": "../x"}),
        ("timeout", {"timeout": 0}),
        ("'boxes'", {"outputs": [module.InferRequestedOutput("boxes")]}),
        ("'a'", {"sequence_id": "a", "headers": {"x-tribe-stream": "b"}}),
    ):
        with pytest.raises(error, match=words):
            client.infer(**{"model_name": "small", "inputs": [tensor(module)], **options})
    client.close()


def test_grpc_streams_requests_in_order(server):
    module, client = client_of(GRPC, server)
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for i in range(3):
        shown = IMAGES if i < 2 else IMAGES[:, :1]
        client.async_stream_infer("small", [tensor(module, shown)], sequence_id="bidi", request_id=str(i))
    found = [answers.get(timeout=60) for _ in range(3)]
    client.stop_stream()
    assert [result.get_response().id for result, error in found[:2]] == ["0", "1"]
    for (result, error), logits in zip(found[:2], expected("bidi", IMAGES, IMAGES), strict=True):
        assert error is None
        assert np.array_equal(result.as_numpy("logits"), logits)
    assert "expected (B, 3, 8, 8)" in str(found[2][1])
    client.close()


@pytest.mark.parametrize("name", [f"{HTTP}.aio", f"{GRPC}.aio"])
async def test_asyncio_clients(server, name):
    stream = f"aio-{name.split('.')[1]}"
    module, client = client_of(name, server)
    try:
        assert await client.is_server_ready()
        for logits in expected(stream, IMAGES, IMAGES):
            result = await client.infer("small", [tensor(module)], sequence_id=stream)
            assert np.array_equal(result.as_numpy("logits"), logits)
    finally:
        await client.close()


def test_the_messages_have_the_numbers_and_types_of_the_published_ones():
    """A field with another number would be lost without an error."""
    service = pytest.importorskip("tritonclient.grpc.service_pb2")
    config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    published = {**service.DESCRIPTOR.message_types_by_name, **config.DESCRIPTOR.message_types_by_name}

    def compare(ours, theirs):
        if ours.full_name.startswith("inference.ModelInfer"):
            assert sorted(ours.fields_by_name) == sorted(theirs.fields_by_name)
        for name, field in ours.fields_by_name.items():
            other = theirs.fields_by_name[name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), name
        for name, inner in ours.nested_types_by_name.items():
            compare(inner, theirs.nested_types_by_name[name])

    messages = open_inference_pb2.DESCRIPTOR.message_types_by_name
    assert len(messages) > 20
    for name, ours in messages.items():
        compare(ours, published[name])
