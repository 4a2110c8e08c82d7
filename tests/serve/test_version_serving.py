"""Versions over HTTP and gRPC: the paths of the Open Inference Protocol, moves, rights, metrics and the command."""

import json
import signal

import numpy as np
import pytest
from http_calls import IMAGES, infer, refused, web
from safetensors.torch import save_file
from small_server import has_grpc, token
from version_networks import NETWORKS, fleet_of

import tribe
from processes import Prints, ended
from tribe.serve import Client, ClientError, Server

FIELDS = {"h0": 2.0, "exact": True}


def serving(**options):
    given = {"port": 0, "name": "small", "shape": (3, 8, 8), **FIELDS}
    return Server({version: NETWORKS[version]() for version in "12"}, **{**given, **options})


def offline(version, *batches, stream="cam"):
    fleet = fleet_of(version)
    return [fleet({stream: tribe.serve.protocol.torch.from_numpy(x)})[stream].numpy() for x in batches]


def test_versions_have_paths_and_every_answer_names_its_own():
    with serving() as server, Client(server.url, "small") as client:
        model = f"{server.url}/v2/models/small"
        assert web.get(model).json()["versions"] == ["1", "2"]
        for version in ("1", "2"):
            assert web.get(f"{model}/versions/{version}/ready").status_code == 200
            assert web.get(f"{model}/versions/{version}").json()["name"] == "small"
        for path in ("/versions/3", "/versions/3/ready", "/versions/3/config"):
            refused(web.get(f"{model}{path}"), 404, "'1', '2'")
        with pytest.raises(ClientError, match="'1', '2'"):
            client.infer("cam", IMAGES, version="3")
        first = client.infer("cam", IMAGES)
        other = client.infer("cam", IMAGES, version="2")
        fresh = client.infer("gate", IMAGES, version="2")
        assert [each.facts["model_version"] for each in (first, other, fresh)] == ["1", "2", "2"]
        assert [each.facts["tribe_adapted"] for each in (first, other, fresh)] == [True, False, True]
        assert np.array_equal(fresh.logits, offline("2", IMAGES, stream="gate")[0])
        plain = {"content-type": "application/x-npy"}
        content = tribe.serve.plain.encode_npy(IMAGES)
        sent = web.post(f"{server.url}/v1/streams/gate/predict", content=content, headers=plain)
        assert sent.json()["version"] == "2"
        as_npy = web.post(
            f"{server.url}/v1/streams/cam/predict", content=content, headers=plain | {"accept": "application/x-npy"}
        )
        assert as_npy.headers["x-tribe-version"] == "1"
        assert infer(server).headers["content-type"] == "application/json"


def test_a_stream_moves_and_goes_back_over_http(tmp_path):
    with serving(data=tmp_path / "data") as server, Client(server.url, "small") as client:
        client.predict("cam", IMAGES)
        state = client.get_state("cam")
        assert client.control("move", "cam", version="2")["version"] == "2"
        assert np.array_equal(client.predict("cam", IMAGES), offline("2", IMAGES)[0])
        assert web.get(f"{server.url}/v1/streams").json()["versions"] == ["1", "2"]
        with pytest.raises(ClientError) as caught:
            client.control("move", "cam", version="9")
        assert caught.value.status == 404
        for wrong in ({}, {"version": 2}, {"version": "2", "start": "soon"}):
            answer = web.post(f"{server.url}/v1/streams/cam/move", content=json.dumps(wrong))
            assert answer.status_code == 400
        assert client.control("back", "cam")["version"] == "1"
        again = client.get_state("cam")
        assert tribe.io.states.decode(again).fingerprint == tribe.io.states.decode(state).fingerprint
        assert np.array_equal(client.predict("cam", IMAGES), offline("1", IMAGES, IMAGES)[1])
        with pytest.raises(ClientError) as caught:
            client.control("back", "cam")
        assert caught.value.status == 409
        move = f"{server.url}/v2/models/small/versions/2"
        found = web.post(f"{move}/move", json={"share": 1.0}).json()
        assert (found["moved"], found["share"]) == ([], 1.0), "it has gone back"
        assert client.infer("new", IMAGES).facts["model_version"] == "2"
        refused(web.post(f"{move}/move", json={"share": 2}), 400)
        assert web.post(f"{move}/back").json()["share"] == 0.0
        text = web.get(f"{server.url}/metrics").text
        assert 'tribe_version_images_total{model="small",version="2"}' in text
        assert 'tribe_version_streams{model="small",version="1"} 1.0' in text


def test_moving_is_a_right_of_admins_and_of_all_streams_for_a_share():
    tokens = [token("learner-of-all-streams", role="learn"), token("admin-of-all-streams")]
    tokens += [token("admin-of-line-3-only", streams="line3-")]
    with serving(tokens=tokens) as server:
        learner, admin, line = (Client(server.url, "small", token=each.name) for each in tokens)
        for stream in ("line3-cam", "gate"):
            learner.predict(stream, IMAGES)
        share = "/v2/models/small/versions/2/move"
        for client, action in (
            (learner, lambda: learner.control("move", "gate", version="2")),
            (learner, lambda: learner.control("back", "gate")),
            (line, lambda: line.control("move", "gate", version="2")),
            (line, lambda: line._json("POST", share, b'{"share": 1}')),
            (learner, lambda: learner._json("POST", share, b'{"share": 1}')),
        ):
            with pytest.raises(ClientError) as caught:
                action()
            assert caught.value.status == 403, client
        assert line.control("move", "line3-cam", version="2")["version"] == "2"
        assert [each["name"] for each in line.streams()] == ["line3-cam"]
        assert admin._json("POST", share, b'{"share": 1}')["moved"] == ["gate"]


def test_grpc_names_the_version_in_both_directions():
    if not has_grpc():
        pytest.skip("grpcio and protobuf are not installed: make test-serve")
    module = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: make test-serve")
    with serving(grpc_port=0) as server:
        client = module.InferenceServerClient(server.grpc_address)
        tensor = module.InferInput("images", IMAGES.shape, "FP32")
        tensor.set_data_from_numpy(IMAGES)
        assert client.is_model_ready("small", "2")
        assert list(client.get_model_metadata("small").versions) == ["1", "2"]
        found = [
            client.infer("small", [tensor], model_version=version, sequence_id="cam").get_response()
            for version in ("2", "", "1")
        ]
        assert [each.model_version for each in found] == ["2", "2", "1"]
        assert [each.parameters["tribe_adapted"].bool_param for each in found] == [True, True, False]
        with pytest.raises(module.InferenceServerException, match="'1', '2'"):
            client.infer("small", [tensor], model_version="3")
        client.close()


def test_the_command_serves_versions_and_refuses_wrong_ones_in_words(tmp_path):
    net = tribe.models.load("compact", tribe.models.find("compact", "mnist"))
    same, other = tmp_path / "same.safetensors", tmp_path / "other.safetensors"
    save_file(net.state_dict(), same)
    save_file({name: 1.01 * t if t.is_floating_point() else t for name, t in net.state_dict().items()}, other)
    command = "-m", "tribe", "serve", "--port", 0
    both = "--weights", f"1={same}", "--weights", f"2={other}"
    started = ended(*command, *both, when=Prints("Ctrl-C stops it"), number=signal.SIGTERM)
    assert started.code == 0, started.err
    assert "versions 1, 2" in started.out
    for given, words in (
        ((f"1={same}", f"2={same}"), "same weights"),
        ((f"1={same}", other), "NAME=FILE"),
        ((f"1={same}", f"2={other},{same}"), "calibration"),
        ((f"1={same}", f"1={other}"), "name of its own"),
    ):
        result = ended(*command, *(each for one in given for each in ("--weights", one)))
        assert result.code == 2, given
        assert words in " ".join(result.err.split()), result.err
