"""The server over HTTP: real connections to uvicorn on this machine."""

import io
import json
import resource
import shutil
import socket
import subprocess
import sys
import time
import zlib

import httpx
import numpy as np
import pytest
import torch
from http_calls import IMAGES, exchange, head, infer, picture, refused, status, web
from small_server import listening

import tribe
from processes import ended
from tribe.serve.client import Client, ClientError
from tribe.serve.config import Limits
from tribe.serve.protocol.plain import encode_npy
from tribe.testing import small_network


def offline(*batches):
    """The logits of these batches by the library, and the adapter afterwards."""
    adapter = tribe.adapt(small_network(), "tribe", h0=2.0)
    return [adapter(torch.from_numpy(each)).numpy() for each in batches], adapter


# -- what works --------------------------------------------------------------------------------------------------------


def test_the_client_gets_what_the_library_computes(server):
    other = IMAGES[::-1].copy()
    logits, adapter = offline(IMAGES, other)
    with Client(server.url, "small") as client:
        assert np.array_equal(client.predict("lib", IMAGES), logits[0])
        found = client.infer("lib", other, id="second")
        assert np.array_equal(found.logits, logits[1])
        assert found.facts["tribe_adapted"] is True
        assert (found.facts["tribe_stream"], found.facts["tribe_clock"]) == ("lib", 2)
        again = client.infer("lib", other, id="second")
        assert again.facts["tribe_adapted"] is False, "a repeated request learned twice"
        assert client.infer("lib", other, learn=False).facts["tribe_clock"] == 2
        assert client.stream("lib")["images"] == 4
        assert "lib" in {each["name"] for each in client.streams()}
        assert client.predict(None, IMAGES).shape == (2, 4)
        state = client.get_state("lib")
        assert client.put_state("copy", state)["name"] == "copy"
        assert client.control("freeze", "lib")["name"] == "lib"
        assert client.control("unfreeze", "lib")["name"] == "lib"
        assert client.drop("copy")["state"] == "deleted"
        with pytest.raises(ClientError, match="there is no stream 'copy'") as caught:
            client.control("reset", "copy")
        assert caught.value.status == 404
    assert adapter.info[0].images == 4


def test_a_state_is_a_file_of_the_library(server, tmp_path):
    with Client(server.url, "small") as client:
        client.predict("saved", IMAGES)
        (tmp_path / "state.safetensors").write_bytes(client.get_state("saved"))
    _, adapter = offline(IMAGES)
    assert tribe.load(tmp_path / "state.safetensors", small_network()).digest() == adapter.digest()


def test_the_stream_may_be_named_in_a_header_or_a_parameter(server):
    for options in ({"sequence_id": "7"}, {"sequence_id": 7}, {"headers": {"X-Tribe-Stream": "7"}}):
        answer = infer(server, **options)
        assert answer.status_code == 200
        assert answer.json()["parameters"]["tribe_stream"] == "7"
    assert infer(server).json()["parameters"] == {"tribe_adapted": False}
    refused(infer(server, sequence_id="a", headers={"x-tribe-stream": "b"}), 400, "'a'", "'b'", "give one of them")
    twice = [("x-tribe-stream", "a"), ("x-tribe-stream", "a")]
    answer = web.post(f"{server.url}/v1/predict", content=encode_npy(IMAGES), headers=twice)
    refused(answer, 400, "the header x-tribe-stream occurs 2 times")


def test_a_sequence_starts_without_a_reset_and_ends(server):
    for clock in (1, 2):
        found = infer(server, sequence_id="seq", sequence_start=True, sequence_end=clock == 2).json()
        assert found["parameters"]["tribe_clock"] == clock


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_is_read(server, encoding):
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    body = packer.compress(encode_npy(IMAGES)) + packer.flush()
    headers = {"content-encoding": encoding, "accept": "application/x-npy"}
    answer = web.post(f"{server.url}/v1/predict", content=body, headers=headers)
    assert answer.status_code == 200
    assert np.lib.format.read_array(io.BytesIO(answer.content)).shape == (2, 4)
    refused(web.post(f"{server.url}/v1/predict", content=body[:-9], headers=headers), 400, "cut short")
    refused(
        web.post(f"{server.url}/v1/predict", content=b"x", headers={"content-encoding": "br"}), 415, "gzip, deflate"
    )


def test_a_body_without_a_length_is_read(server):
    parts = [encode_npy(IMAGES)[i : i + 100] for i in range(0, 2000, 100)]
    answer = web.post(f"{server.url}/v1/streams/parts/predict", content=iter(parts))
    assert answer.status_code == 200
    assert answer.json()["stream"] == "parts"


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
    wrong = subprocess.run([*words, "-F", "x=@/dev/null"], capture_output=True, check=False)
    assert wrong.returncode != 0 or b"error" in wrong.stdout


def test_every_control_of_a_stream(server):
    url = f"{server.url}/v1/streams/ctl"
    assert web.put(url).json()["name"] == "ctl"
    for action in ("snapshot", "freeze", "unfreeze", "rollback", "reset", "end"):
        assert web.post(f"{url}/{action}").json()["name"] == "ctl"
    refused(web.post(f"{url}/reset", content=b'{"hard": true}'), 400, "there is no argument 'hard'")
    refused(web.post(f"{url}/rollback", content=b'{"to": "2h"}'), 400, "to is '2h'; expected an integer or null")
    refused(web.post(f"{url}/rollback", content=b"{"), 400, "not JSON")
    assert web.delete(url).status_code == 200
    refused(web.get(url), 404, "there is no stream 'ctl'")
    assert web.get(f"{server.url}/v1/streams").json()["model"] == "small"


def test_events_arrive_as_they_happen(server):
    with web.stream("GET", f"{server.url}/v1/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        lines = answer.iter_lines()
        assert next(lines).startswith(":")
        web.put(f"{server.url}/v1/streams/evt")
        event = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
    assert event == {"stream": "evt", "kind": "opened"}


def test_metrics_count_answers(server):
    web.get(f"{server.url}/nowhere")
    text = web.get(f"{server.url}/metrics").text
    assert "tribe_streams 1" in text
    assert 'tribe_http_responses_total{status="404"}' in text
    assert "tribe_stream_images" not in text
    assert "tribe_stream_images" in web.get(f"{server.url}/metrics?streams=true").text
    refused(web.get(f"{server.url}/metrics?streams=all"), 400, "streams is 'all'; expected true or false")
    refused(web.get(f"{server.url}/metrics?stream=true"), 400, "there is no query parameter 'stream'")


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
    refused(web.get(f"{server.url}/v3"), 404, "there is no path '/v3'")
    refused(infer(server, model="large"), 404, "there is no model 'large'; this server has the model 'small'")
    refused(web.get(f"{server.url}/v2/models/large"), 404, "there is no model 'large'")
    refused(web.get(f"{server.url}/v2/models/small/versions/2"), 404, "no version '2'")
    answer = web.delete(f"{server.url}/v2")
    refused(answer, 405, "expected GET, HEAD")
    assert "GET" in answer.headers["allow"]


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
    refused(infer(server, IMAGES[:, :2]), 400, "(2, 2, 8, 8)", "expected (B, 3, 8, 8)")
    refused(infer(server, timeout=0), 400, "timeout is 0")
    refused(web.post(f"{server.url}/v1/predict?timeout=0", content=encode_npy(IMAGES)), 400, "at least 1")
    answer = web.post(f"{server.url}/v1/streams/cam/predict", content=picture(size=(9, 8))[0])
    refused(answer, 400, "9x8 pixels; expected 8x8", "?fit=resize")
    form = {"content-type": "application/x-www-form-urlencoded"}
    refused(web.post(f"{server.url}/v1/predict", content=b"a=b", headers=form), 415, "--data-binary")
    refused(web.post(f"{server.url}/v1/predict", content=b""), 415)


def test_images_that_are_not_finite_harm_nobody(server):
    bad = np.full_like(IMAGES, np.nan)
    found = infer(server, bad, sequence_id="nan").json()
    assert np.ptp(found["outputs"][0]["data"]) == 0
    logits, _ = offline(IMAGES)
    with Client(server.url, "small") as client:
        assert np.array_equal(client.predict("nan", IMAGES), logits[0])


def test_a_state_of_another_model_changes_nothing(server, tmp_path):
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 4)
    tribe.adapt(torch.nn.Sequential(*layers)).save(tmp_path / "other.safetensors")
    with Client(server.url, "small") as client:
        client.predict("kept", IMAGES)
        (tmp_path / "before.safetensors").write_bytes(before := client.get_state("kept"))
        for wrong in ((tmp_path / "other.safetensors").read_bytes(), b"nonsense", before[:-10]):
            with pytest.raises(ClientError) as caught:
                client.put_state("kept", wrong)
            assert caught.value.status == 409
        (tmp_path / "after.safetensors").write_bytes(client.get_state("kept"))
    kept = [tribe.load(tmp_path / f"{name}.safetensors", small_network()) for name in ("before", "after")]
    assert kept[0].digest() == kept[1].digest()


def test_a_deadline_that_cannot_be_met(server):
    worker = server.service.worker
    worker.busy = True
    try:
        answer = infer(server, sequence_id="busy", timeout=1000)
        refused(answer, 503, "the answer would be late")
        assert answer.headers["retry-after"] == "2"
        with pytest.raises(ClientError) as caught, Client(server.url, "small") as client:
            client.predict("busy", IMAGES, timeout=0.001)
        assert caught.value.retry_after == 2
    finally:
        worker.busy = False


# -- bytes that are no proper request ----------------------------------------------------------------------------------


def test_a_body_that_ends_early_is_dropped(server):
    before = len(server.service.worker.calls)
    content = head("POST /v2/models/small/infer", "Content-Length: 1000") + b"half"
    exchange(server.port, content, finish=True)
    assert web.get(f"{server.url}/v2/health/ready").status_code == 200
    assert len(server.service.worker.calls) == before


def test_a_huge_body_is_refused_before_it_arrives(strict):
    answer = exchange(strict.port, head("POST /v1/predict", "Content-Length: 99999999999"))
    assert status(answer) == 413
    assert b"expected 20,000 at most" in answer
    assert b"connection: close" in answer


def test_a_huge_body_without_a_length_is_refused_while_it_arrives(strict):
    def parts():
        for _ in range(100):
            yield b"x" * 1000

    refused(web.post(f"{strict.url}/v1/predict", content=parts()), 413, "more than 20,000 bytes")


def test_a_body_that_unpacks_to_too_much_is_refused(strict):
    bomb = zlib.compress(bytes(10**7))
    assert len(bomb) < 20_000
    answer = web.post(f"{strict.url}/v1/predict", content=bomb, headers={"content-encoding": "deflate"})
    refused(answer, 413, "when it is unpacked")


def test_a_picture_with_too_many_pixels_is_refused(strict):
    refused(web.post(f"{strict.url}/v1/predict", content=picture("JPEG", size=(50, 50))[0]), 413, "50x50 pixels")


def test_a_client_that_never_finishes_its_body(strict):
    answer = exchange(strict.port, head("POST /v1/predict", "Content-Length: 1000") + b"a few bytes")
    assert status(answer) == 408
    assert b"did not arrive within 0.5 s" in answer


def test_a_client_that_never_finishes_its_headers(strict):
    for start in (b"", b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A"):
        answer = exchange(strict.port, start)
        assert status(answer) == 408
        assert b"the headers did not arrive" in answer


def test_headers_that_never_end(strict):
    answer = exchange(strict.port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * 5000)
    assert status(answer) == 431
    assert b"more than 4,096 bytes" in answer


def test_bytes_that_are_no_http(strict):
    answer = exchange(strict.port, b"\x16\x03\x01 hello\r\n\r\n")
    assert status(answer) == 400
    assert b"Expected HTTP/1.1" in answer


def test_too_many_connections(strict):
    """Those that are open stay open and are served; one more is told, and closed."""
    held = [socket.create_connection(("127.0.0.1", strict.port), timeout=60) for _ in range(8)]
    try:
        for connection in held:  # each is taken once it is answered
            connection.sendall(head("GET /v2/health/live"))
            assert status(connection.recv(2**16)) == 200
        answer = exchange(strict.port, b"")
        assert status(answer) == 503
        assert b"as many as it takes" in answer
        held[0].sendall(head("GET /v2/health/live"))
        assert status(held[0].recv(2**16)) == 200
    finally:
        for connection in held:
            connection.close()


def test_a_server_full_of_bodies_refuses_more():
    with listening(limits=Limits(bodies=100)) as found:
        refused(web.post(f"{found.url}/v1/predict", content=encode_npy(IMAGES)), 503, "bytes of other requests")
        assert web.post(f"{found.url}/v1/predict", content=b"x" * 50).status_code == 415
        while found.app.front.budget.used:  # an answer may arrive before its request has ended
            time.sleep(0.01)


def test_many_idle_connections_do_not_stop_others(server):
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(100)]
    try:
        assert web.get(f"{server.url}/v2/health/ready").status_code == 200
    finally:
        for connection in held:
            connection.close()


TEN_THOUSAND = 10_000
CROWDED = f"""
import torch
from tribe.serve import Server
from tribe.serve.config import Limits
from tribe.testing import small_network
limits = Limits(connections={TEN_THOUSAND}, head_seconds=3600, idle_seconds=3600)
server = Server(small_network(), shape=(3, 8, 8), limits=limits, port=0)
server.run(lambda: print(server.port, flush=True))
"""


@pytest.fixture
def many_files():
    """Allow this process as many open files as the test needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = TEN_THOUSAND + 500
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files; the system allows {hard}: ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_ten_thousand_connections_are_served_and_one_more_is_refused_in_words(many_files):
    """The server runs in a process of its own: it has as many open files again."""
    held = []
    with subprocess.Popen([sys.executable, "-c", CROWDED], stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline())
            url = f"http://127.0.0.1:{port}"
            with Client(url, "model") as first:
                clock = first.infer("cam", IMAGES).facts["tribe_clock"]
                for number in range(TEN_THOUSAND - 1):  # and the client's own
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=600))
                    held[-1].sendall(head("GET /v2/health/live"))
                    assert status(held[-1].recv(2**16)) == 200
                    if number % 1000 == 0:
                        answer = first.infer("cam", IMAGES)
                        assert answer.facts["tribe_adapted"], "others are served meanwhile"
                        clock += 1
                        assert answer.facts["tribe_clock"] == clock
                for _ in range(100):
                    refusal = exchange(port, b"")
                    assert status(refusal) == 503
                    assert b"as many as it takes" in refusal
                assert first.infer("cam", IMAGES).facts["tribe_adapted"]
                held[-1].sendall(head("GET /v2/health/live"))
                assert status(held[-1].recv(2**16)) == 200
                held.pop().close()
                while status(exchange(port, head("GET /v2/health/live", "Connection: close"))) == 503:
                    pass  # until the server has seen that one is gone
        finally:
            for connection in held:
                connection.close()
            process.terminate()


def test_a_server_takes_as_many_connections_as_the_system_has_open_files_for():
    code = """
import resource
from tribe.serve.connections import RESERVE, within_the_system
from tribe.serve.config import Limits
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
print(within_the_system(Limits(connections=100)).connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(within_the_system(Limits(connections=5000)).connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    found = ended("-c", code)
    assert found.out.split() == ["100", "356", "744", "1000"], found.err
    assert "so it takes 744 connections instead of 5000" in found.err


def test_a_port_in_use_is_an_error_that_names_it(server):
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {server.port}"):
        listening(port=server.port).start()
