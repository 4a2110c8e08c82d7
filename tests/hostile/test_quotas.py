"""Quotas of tokens, what they see of them, and names of streams that contradict each other."""

import json

import pytest
from http_calls import IMAGES, refused, web
from small_server import has_grpc, listening, serving, small_fleet, token

from tribe.serve.config import Policy
from tribe.serve.errors import TooMany
from tribe.serve.plain import encode_npy
from tribe.serve.security import Principal, Token, read_tokens
from tribe.serve.worker import Worker

BODY = encode_npy(IMAGES)

# -- quotas ------------------------------------------------------------------------------------------------------------

LIMITED = [
    token("few", requests_per_second=1e-6),
    token("small", predicted_images_per_second=1e-6),
    token("narrow", bytes_in_flight=10_000),
    token("part", streams="p-", role="learn", learning_share=0.5),
    token("operator"),
]


@pytest.fixture(scope="module")
def limited():
    with listening(tokens=LIMITED, grpc_port=0 if has_grpc() else None) as found:
        yield found


def posted(server, name, content=BODY, path="/v1/predict", **headers):
    return web.post(server.url + path, content=content, headers={"authorization": f"Bearer {name}", **headers})


def test_beyond_a_quota_the_answer_is_429_and_says_when_to_come_back(limited):
    for name, words in (("few", "requests a second"), ("small", "images a second")):
        assert posted(limited, name).status_code == 200
        answer = posted(limited, name)
        refused(answer, 429, words, repr(name))
        assert int(answer.headers["retry-after"]) >= 3600
    assert posted(limited, "narrow").status_code == 200
    answer = posted(limited, "narrow", encode_npy(IMAGES.repeat(10, 0)))
    refused(answer, 429, "10,000 bytes")
    assert int(answer.headers["retry-after"]) >= 1
    assert posted(limited, "narrow").status_code == 200, "what was taken is given back"


@pytest.mark.skipif(not has_grpc(), reason="grpcio and protobuf are not installed: make test-serve")
def test_a_quota_holds_over_grpc_too():
    import grpc

    from tribe.serve import open_inference_pb2 as messages

    with listening(tokens=[token("few", requests_per_second=1e-6)], grpc_port=0) as server:
        request = messages.ModelInferRequest(model_name="small")
        request.inputs.add(name="images", datatype="FP32", shape=IMAGES.shape)
        request.raw_input_contents.append(IMAGES.tobytes())
        with grpc.insecure_channel(server.grpc_address) as channel:
            call = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=messages.ModelInferRequest.SerializeToString,
                response_deserializer=messages.ModelInferResponse.FromString,
            )
            metadata = [("authorization", "Bearer few")]
            assert call(request, metadata=metadata).raw_output_contents
            with pytest.raises(grpc.RpcError) as caught:
                call(request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(caught.value.trailing_metadata())["retry-after"]) >= 3600


def test_a_rate_holds_over_time():
    now = [0.0]
    user = Principal(Token("x", "", requests_per_second=5.0), clock=lambda: now[0])
    passed, waits = 0, set()
    for _ in range(1000):  # 50 seconds, with 20 requests in each
        try:
            user.count_request()
            passed += 1
        except TooMany as error:
            waits.add(error.retry_after)
        now[0] += 0.05
    assert 0 < min(waits) <= max(waits) <= 0.21
    assert 250 <= passed <= 256
    assert user.used["refused"] == 1000 - passed
    closed = Principal(Token("x", "", requests_per_second=0.0))
    with pytest.raises(TooMany):
        closed.count_request()


def test_tokens_see_what_they_use_and_an_admin_of_all_streams_sees_everybody(limited):
    posted(limited, "part", path="/v1/streams/p-1/predict")

    def users(name):
        answer = web.get(f"{limited.url}/v1/streams", headers={"authorization": f"Bearer {name}"}).json()
        assert answer["open_streams"] == 10_000
        return {each["name"]: each for each in answer["tokens"]}

    assert set(users("operator")) == {each.name for each in LIMITED}
    (own,) = users("part").values()
    assert (own["images"], own["learned"], own["open"], own["waiting"], own["bytes"]) == (2, 2, 1, 0, 0)
    assert (own["streams"], own["role"], own["learning_share"]) == ("p-", "learn", 0.5)
    assert "digest" not in own
    text = web.get(f"{limited.url}/metrics", headers={"authorization": "Bearer operator"}).text
    assert 'tribe_token_learned_total{model="tribe",token="part",version="1"} 2.0' in text
    assert 'tribe_token_open{model="tribe",token="part",version="1"} 1.0' in text
    assert "tribe_token" not in web.get(f"{limited.url}/metrics", headers={"authorization": "Bearer x"}).text


def test_metrics_of_tokens_are_bounded_and_add_up_by_name():
    tokens = [token(f"user-{i}") for i in range(30)]
    tokens.append(Token("user-0", "0" * 64))  # the next secret of the same user
    worker = Worker(small_fleet(), policy=Policy(stream_metrics=10))
    with serving(worker, tokens=tokens) as server:
        posted(server, "user-0")
        text = web.get(f"{server.url}/metrics", headers={"authorization": "Bearer user-0"}).text
    assert text.count("tribe_token_requests_total{") == 10
    assert text.count('tribe_token_images_total{model="tribe",token="user-0",version="1"} 2.0') == 1


def test_quotas_come_from_the_file(tmp_path):
    quotas = {"most_streams": 3, "images_per_second": 2.5, "predicted_images_per_second": 9.0}
    quotas |= {"requests_per_second": 4.0, "bytes_in_flight": 100, "learning_share": 2.0}
    entry = {"name": "cam", "streams": "a-", "role": "learn", "sha256": "0" * 64}
    (tmp_path / "t").write_text(json.dumps({"tokens": [entry | quotas]}))
    (found,) = read_tokens(tmp_path / "t")
    assert found == Token("cam", "0" * 64, "a-", "learn", **quotas)
    for wrong in ({"requests_per_second": -1}, {"bytes_in_flight": 1.5}, {"learning_share": 0}):
        (tmp_path / "t").write_text(json.dumps({"tokens": [entry | wrong]}))
        with pytest.raises(ValueError, match="docs/serving"):
            read_tokens(tmp_path / "t")


# -- names that contradict each other ----------------------------------------------------------------------------------


def test_a_header_that_names_another_stream_than_the_path_is_refused():
    """A proxy sends it to the worker of one stream, and the worker answered for the other."""
    with listening() as server:
        for method, path in (("POST", "/predict"), ("POST", "/reset"), ("PUT", ""), ("DELETE", "")):
            body = BODY if path == "/predict" else b""
            url = f"{server.url}/v1/streams/a{path}"
            for named in ("b", ""):
                refused(
                    web.request(method, url, content=body, headers={"x-tribe-stream": named}), 400, "x-tribe-stream"
                )
        assert web.get(f"{server.url}/v1/streams/a").status_code == 404
        url = f"{server.url}/v1/streams/a/predict"
        assert web.post(url, content=BODY, headers={"x-tribe-stream": "a"}).status_code == 200
