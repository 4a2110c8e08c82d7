"""The server over HTTP: real connections to uvicorn on this machine."""

import io
import json
import shutil
import socket
import subprocess
import zlib
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import torch
from http_calls import IMAGES, exchange, head, infer, picture, refused, status, web
from small_server import listening, small_fleet

from tribe.serve.client import Client, ClientError
from tribe.serve.config import Limits
from tribe.serve.plain import encode_npy

# -- what works --------------------------------------------------------------------------------------------------------


def test_the_stream_may_be_named_in_a_header_or_a_parameter(server):
    for options in ({"sequence_id": "7"}, {"sequence_id": 7}, {"headers": {"X-Tribe-Stream": "7"}}):
        answer = infer(server, **options)
        assert answer.status_code == 200
        assert answer.json()["parameters"]["tribe_stream"] == "7"
    assert infer(server).json()["parameters"] == {"tribe_adapted": False, "tribe_answered": "source"}
    refused(infer(server, sequence_id="a", headers={"x-tribe-stream": "b"}), 400, "'a'", "'b'")
    twice = [("x-tribe-stream", "a"), ("x-tribe-stream", "a")]
    refused(web.post(f"{server.url}/v1/predict", content=encode_npy(IMAGES), headers=twice), 400, "2 times")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_is_read(server, encoding):
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    body = packer.compress(encode_npy(IMAGES)) + packer.flush()
    headers = {"content-encoding": encoding, "accept": "application/x-npy"}
    answer = web.post(f"{server.url}/v1/predict", content=body, headers=headers)
    assert answer.status_code == 200
    assert np.lib.format.read_array(io.BytesIO(answer.content)).shape == (2, 4)
    refused(web.post(f"{server.url}/v1/predict", content=body[:-9], headers=headers), 400, "cut short")
    refused(web.post(f"{server.url}/v1/predict", content=b"x", headers=headers), 400, encoding)
    headers["content-encoding"] = "br"
    refused(web.post(f"{server.url}/v1/predict", content=b"x", headers=headers), 415, "gzip")


def test_a_body_without_a_length_is_read(server):
    parts = [encode_npy(IMAGES)[i : i + 100] for i in range(0, 2000, 100)]
    answer = web.post(f"{server.url}/v1/streams/parts/predict", content=iter(parts))
    assert answer.status_code == 200
    assert answer.json()["stream"] == "parts"


def test_large_bodies_and_answers_are_coded_in_threads(server):
    many = np.random.default_rng(1).random((400, 3, 8, 8), np.float32)
    content = json.dumps({"inputs": [_in_json(many)]}).encode()
    answer = web.post(f"{server.url}/v2/models/small/infer", content=content)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["shape"] == [400, 4]


def _in_json(images):
    return {"name": "images", "shape": images.shape, "datatype": "FP32", "data": images.ravel().tolist()}


def test_curl_sends_a_picture(server, tmp_path):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    (tmp_path / "frame.jpg").write_bytes(picture("JPEG")[0])
    words = [curl, "-sS", "--data-binary", f"@{tmp_path}/frame.jpg", f"{server.url}/v1/streams/curl/predict"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    assert found["stream"] == "curl"
    assert found["labels"] == ["abcd"[found["classes"][0]]]
    assert found["adapted"] is True


def test_every_control_of_a_stream(server):
    url = f"{server.url}/v1/streams/ctl"
    assert web.put(url).json()["name"] == "ctl"
    for action in ("snapshot", "freeze", "unfreeze", "rollback", "reset", "end"):
        assert web.post(f"{url}/{action}").json()["name"] == "ctl"
    refused(web.post(f"{url}/reset", content=b'{"hard": true}'), 400, "hard")
    refused(web.post(f"{url}/rollback", content=b'{"to": "2h"}'), 400, "$.to")
    for wrong in (b"{", b'{"to": "\xff"}', b'{"to": ' + b"[" * 10_000):
        refused(web.post(f"{url}/rollback", content=wrong), 400, "JSON")
    assert web.delete(url).status_code == 200
    refused(web.get(url), 404, "'ctl'")
    listed = web.get(f"{server.url}/v1/streams").json()
    assert (listed["model"], listed["unlearned"]) == ("small", 0)
    refused(web.get(f"{server.url}/v1/streams?stored=perhaps"), 400, "$.stored")


def test_events_arrive_as_they_happen(server):
    with web.stream("GET", f"{server.url}/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines).startswith(":")
        web.put(f"{server.url}/v1/streams/evt")
        events = (json.loads(line[6:]) for line in lines if line.startswith("data: "))
        event = next(each for each in events if each["stream"] == "evt")
    assert event["kind"] == "opened"


def test_metrics_count_answers(server):
    web.get(f"{server.url}/nowhere")
    web.put(f"{server.url}/v1/streams/counted")
    text = web.get(f"{server.url}/metrics").text
    assert "tribe_streams{" in text
    assert 'tribe_http_responses_total{status="404"}' in text
    assert "tribe_stream_images" not in text
    assert "tribe_stream_images" in web.get(f"{server.url}/metrics?streams=true").text
    refused(web.get(f"{server.url}/metrics?streams=all"), 400, "$.streams")
    refused(web.get(f"{server.url}/metrics?stream=true"), 400, "`stream`")
    refused(web.get(f"{server.url}/metrics?streams=true&streams=true"), 400, "twice")


def test_an_unexpected_error_is_an_answer_and_is_counted_and_logged(server, monkeypatch, caplog):
    kinds = (AttributeError, ValueError, TimeoutError)  # the last two: not those of the network or of the store
    for kind in kinds:
        with monkeypatch.context() as patched:
            patched.setattr(server.service.worker, "metrics_text", Mock(side_effect=kind("a mistake")))
            refused(web.get(f"{server.url}/metrics"), 500, "its log")
    assert 'tribe_http_responses_total{status="500"} 3.0' in web.get(f"{server.url}/metrics").text
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [*kinds]


def test_a_server_that_stops_ends_its_open_streams_of_events():
    with listening() as found:
        answer = web.send(web.build_request("GET", f"{found.url}/v1/events"), stream=True)
        lines = answer.iter_lines()
        next(lines)
    assert [line for line in lines if line.startswith("data")] == []
    with pytest.raises(httpx.ConnectError):
        web.get(found.url)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_unknown_paths_models_and_methods(server):
    refused(web.get(f"{server.url}/v3"), 404, "'/v3'")
    refused(infer(server, model="large"), 404, "'large'", "'small'")
    refused(web.get(f"{server.url}/v2/models/large"), 404, "'large'")
    refused(web.get(f"{server.url}/v2/models/small/versions/2"), 404, "'2'")
    for path, methods in (("/v2", "GET, HEAD"), ("/v1/streams/a", "DELETE, GET, HEAD, PUT")):
        answer = web.patch(f"{server.url}{path}")
        refused(answer, 405, methods)
        assert answer.headers["allow"] == methods


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "%2e%2e", "a%0Ab", "x" * 10_240, "a%20b", "%00", "%C3%A4"])
def test_a_wrong_name_of_a_stream(server, name):
    for answer in (
        web.post(f"{server.url}/v1/streams/{name}/predict", content=encode_npy(IMAGES)),
        web.delete(f"{server.url}/v1/streams/{name}"),
        web.put(f"{server.url}/v1/streams/{name}/state", content=b"x"),
    ):
        assert answer.status_code in (400, 404, 405), answer.text
        assert len(answer.text) < 600
        assert "error" in answer.json()


def test_wrong_images(server):
    refused(infer(server, IMAGES[:, :2]), 400, "(2, 2, 8, 8)", "(B, 3, 8, 8)")
    refused(infer(server, timeout=0), 400, "timeout")
    refused(web.post(f"{server.url}/v1/predict?timeout=0", content=encode_npy(IMAGES)), 400, "timeout")
    refused(web.post(f"{server.url}/v1/streams/cam/predict", content=picture(size=(9, 8))[0]), 400, "?fit=resize")
    form = {"content-type": "application/x-www-form-urlencoded"}
    refused(web.post(f"{server.url}/v1/predict", content=b"a=b", headers=form), 415, "--data-binary")
    refused(web.post(f"{server.url}/v1/predict", content=b""), 415)


def test_images_that_are_not_finite_harm_no_stream(server):
    bad = np.full_like(IMAGES, np.nan)
    found = infer(server, bad, sequence_id="nan").json()
    assert np.ptp(found["outputs"][0]["data"]) == 0
    wanted = small_fleet()({"nan": torch.from_numpy(IMAGES)})["nan"].numpy()
    with Client(server.url, "small") as client:
        assert np.array_equal(client.predict("nan", IMAGES), wanted)


def test_a_deadline_that_cannot_be_met(server):
    answer = infer(server, sequence_id="busy", timeout=1)
    refused(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1
    with pytest.raises(ClientError) as caught, Client(server.url, "small") as client:
        client.predict("busy", IMAGES, timeout=1e-6)
    assert caught.value.retry_after >= 1


# -- bytes that are not a proper request -------------------------------------------------------------------------------


def test_a_body_that_ends_early_is_dropped(server):
    content = head("POST /v1/streams/early/predict", "Content-Length: 1000") + b"half"
    exchange(server.port, content, finish=True)
    assert web.get(f"{server.url}/v2/health/ready").status_code == 200
    refused(web.get(f"{server.url}/v1/streams/early"), 404)


def test_a_huge_body_is_refused_before_it_arrives(strict):
    request = head("POST /v1/predict", "Content-Length: 99999999999", "Expect: 100-continue")
    answer = exchange(strict.port, request)
    assert status(answer) == 413
    assert b"20,000" in answer
    assert b"connection: close" in answer


def test_what_is_too_large_is_refused(strict):
    url = f"{strict.url}/v1/predict"
    refused(web.post(url, content=iter([b"x" * 1000] * 100)), 413, "20,000")  # without a length: while it arrives
    bomb = zlib.compress(bytes(10**7))
    assert len(bomb) < 20_000
    refused(web.post(url, content=bomb, headers={"content-encoding": "deflate"}), 413, "unpacked")
    refused(web.post(url, content=picture("JPEG", size=(50, 50))[0]), 413, "50x50")


def test_a_client_that_never_finishes_its_body(strict):
    answer = exchange(strict.port, head("POST /v1/predict", "Content-Length: 1000") + b"a few bytes")
    assert status(answer) == 408
    assert b"0.5 s" in answer


def test_bytes_that_are_not_http(strict):
    assert status(exchange(strict.port, b"\x16\x03\x01 hello\r\n\r\n")) == 400


def test_more_connections_than_the_limit_get_503_until_some_are_closed(strict):
    held = []
    try:
        for expected in [200] * 8 + [503]:
            held.append(socket.create_connection(("127.0.0.1", strict.port), timeout=60))
            held[-1].sendall(head("GET /v1/streams"))
            assert status(held[-1].recv(2**16)) == expected
    finally:
        for connection in held:
            connection.close()
    while status(exchange(strict.port, head("GET /v1/streams", "Connection: close"))) == 503:
        pass  # until the server has seen that they are gone


def test_a_server_full_of_bodies_refuses_more():
    with listening(limits=Limits(bodies=100)) as found:
        refused(web.post(f"{found.url}/v1/predict", content=encode_npy(IMAGES)), 503, "other requests")
        assert web.post(f"{found.url}/v1/predict", content=b"x" * 50).status_code == 415
        assert found.app.handlers.bodies.used == 0


def test_a_port_in_use_is_an_error_that_names_it(server):
    with pytest.raises(OSError, match=f"port {server.port}"):
        listening(port=server.port).start()


def test_floating_point_images_of_0_to_255_are_refused_unless_they_are_allowed(server):
    """They were predicted and learned from, and the stream was ruined without a word."""
    wrong = (IMAGES * 255).astype(np.float32)
    stream = {"sequence_id": "scaled"}
    refused(infer(server, wrong, **stream), 400, "divide by 255", "limits.any_range")
    mixed = np.stack([IMAGES[0], wrong[1]])
    refused(infer(server, mixed, **stream), 400, "image 1")
    place = f"{server.url}/v1/streams/scaled/predict"
    refused(web.post(place, content=encode_npy(wrong)), 400, "divide by 255")
    refused(web.post(f"{server.url}/v2/models/small/infer", json={"inputs": [_in_json(wrong)]}), 400, "divide by 255")
    assert web.get(f"{server.url}/v1/streams/scaled").status_code == 404
    assert infer(server, (IMAGES * 255).astype(np.uint8), **stream).status_code == 200
    overshoot = IMAGES * 1.4 - 0.2  # sharp resizing
    assert infer(server, overshoot.astype(np.float32), **stream).status_code == 200
    with listening(limits=Limits(any_range=True)) as lenient:
        assert infer(lenient, wrong, **stream).status_code == 200
