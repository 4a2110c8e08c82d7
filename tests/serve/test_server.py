"""`tribe.serve.Server` and ``tribe serve``: the real worker, fleet and store behind real connections."""

import json
import os
import re
import signal
from functools import partial

import numpy as np
import pytest
import torch
from http_calls import IMAGES, web
from torch import nn

import tribe
import tribe.serve
from commands import message, tribe_command
from networks import at_once
from processes import Prints, Process, ended, interrupted
from tribe.serve import Client, ClientError, Server
from tribe.serve.config import Policy
from tribe.serve.plain import encode_npy
from tribe.streams import fleet
from tribe.testing import small_network
from watching import calibration_of

BATCHES = [np.random.default_rng(i).random((1 + i % 3, 3, 8, 8), np.float32) for i in range(4)]
FIELDS = {"h0": 2.0, "exact": True}  # trusts more, so that a network that was never trained learns something


def serving(**options):
    return Server(small_network(), port=0, name="small", shape=(3, 8, 8), **FIELDS, **options)


def test_a_budget_is_resolved_at_the_first_request_and_is_refused_for_stored_streams(tmp_path):
    with pytest.raises(ValueError, match="learn_every"):
        serving(budget=1.5, data=tmp_path)
    with serving(budget=tribe.Budget(4, (7.25, 1.05))) as server:
        Client(server.url, "small").predict("cam", BATCHES[0])
        assert server.service.worker.fleet.method.rare.learn_every == 3


def offline(streams):
    """Return what the library computes: the logits of each stream's batches, and the states."""
    streams_of = fleet(small_network(), **FIELDS)
    logits = {name: [streams_of({name: torch.from_numpy(x)})[name].numpy() for x in xs] for name, xs in streams.items()}
    return logits, {name: streams_of.digest(name) for name in streams}


def digest_of(client, name, folder):
    (folder / f"{name}.safetensors").write_bytes(client.get_state(name))
    return tribe.load(folder / f"{name}.safetensors", small_network()).digest()


def test_streams_at_once_equal_the_library_also_after_a_restart(tmp_path):
    """Bit for bit: three streams from three threads, a stop in the middle, and the rest with another server."""
    streams = {"cam1": BATCHES, "cam2": BATCHES[::-1], "7": BATCHES[1:]}
    wanted, states = offline(streams)
    found = {name: [] for name in streams}
    for part in (slice(0, 2), slice(2, None)):
        with serving(data=tmp_path / "data") as server:

            def play(name, part=part, server=server):
                with Client(server.url, "small") as client:
                    found[name] += [client.predict(name, x) for x in streams[name][part]]

            at_once(*(partial(play, name) for name in streams))
            with Client(server.url, "small") as client:
                listed = {each["name"] for each in client.streams()}
                assert listed == set(streams)
                ends = {name: digest_of(client, name, tmp_path) for name in streams}
    for name in streams:
        assert all(np.array_equal(a, b) for a, b in zip(found[name], wanted[name], strict=True)), name
        assert ends[name] == states[name], name


def test_every_action_with_the_real_worker(tmp_path):
    with serving(data=tmp_path / "data") as server, Client(server.url, "small") as client:
        first = client.infer("cam", IMAGES, id="a")
        assert first.facts["tribe_adapted"] is True
        assert (first.facts["tribe_clock"], first.facts["tribe_generation"]) == (1, 1)
        assert any(name.startswith("tribe_health_") for name in first.facts)
        assert client.infer("cam", IMAGES, id="a").facts["tribe_adapted"] is False
        assert client.control("snapshot", "cam")["snapshot"] == 1
        client.predict("cam", IMAGES)
        assert client.control("rollback", "cam", to=1)["clock"] == 1
        assert client.control("freeze", "cam")["name"] == "cam"
        client.predict("cam", IMAGES)
        assert client.stream("cam")["clock"] == 1
        client.control("unfreeze", "cam")
        assert client.control("reset", "cam")["clock"] == 0
        assert client.infer("cam", IMAGES, end=True).facts["tribe_adapted"] is True
        assert [each["name"] for each in client.streams()] == []
        assert web.get(f"{server.url}/v1/streams?stored=true").json()["stored"] == ["cam"]
        assert client.infer("cam", IMAGES).facts["tribe_clock"] == 2
        assert client.put_state("copy", client.get_state("cam"))["clock"] == 2
        client.drop("cam")
        for action in ("reset", "freeze", "rollback", "snapshot"):
            with pytest.raises(ClientError) as caught:
                client.control(action, "cam")
            assert caught.value.status == 404
        with pytest.raises(ClientError) as caught:
            client.put_state("copy", b"nonsense")
        assert caught.value.status == 409
        assert client.predict(None, IMAGES).shape == (2, 4)
        text = web.get(f"{server.url}/metrics").text
        assert "nv_inference_request_success" in text
        assert 'stream="copy"' in web.get(f"{server.url}/metrics?streams=true").text
        assert 'tribe_http_responses_total{status="200"}' in text


def test_a_network_that_does_not_fit_its_images_says_so():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    with Server(net, port=0) as server:
        for size, code in ((8, 200), (5, 400), (2, 400)):
            images = np.full((1, 3, size, size), 0.5, np.float32)
            answer = web.post(f"{server.url}/v1/streams/cam/predict", content=encode_npy(images))
            assert answer.status_code == code, answer.text
        assert "images" in answer.json()["error"]


def test_the_shape_is_that_of_the_first_layer_unless_it_is_given():
    server = Server(small_network(), port=0)
    assert server.service.model.shape == (3, None, None)
    with pytest.raises(ValueError, match="shape"):
        Server(small_network(), shape=(3, 0, 8))
    with pytest.raises(ValueError, match="labels"):
        Server(small_network(), labels=("a",))
    with pytest.raises(ValueError, match="1 to 128"):
        Server(small_network(), name="a/b")
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    with pytest.raises(ValueError, match="no convolution"):
        Server(plain)


def test_the_package_names_what_it_has():
    assert tribe.serve.Server is Server
    with pytest.raises(AttributeError, match="Sever"):
        _ = tribe.serve.Sever


# -- the command -------------------------------------------------------------------------------------------------------

LISTENS = Prints("Ctrl-C stops it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_digits_until_a_signal(tmp_path, number):
    result = ended("-m", "tribe", "serve", "--port", 0, "--data", tmp_path / "data", when=LISTENS, number=number)
    assert result.code == 0, result.err
    first, last = result.out.splitlines()
    assert first.startswith("tribe serves compact (tribe) on http://127.0.0.1:")
    assert f"streams are in {tmp_path}/data" in first
    assert last == "stopped; every stream is stored"
    assert result.err == ""


def test_the_command_refuses_that_everybody_may_do_everything_unless_it_is_said_twice(tmp_path):
    result = ended("-m", "tribe", "serve", "--port", 0, "--host", "0.0.0.0")
    assert result.code == 2
    assert "--set limits.open=true" in " ".join(result.err.split())
    said = ("--host", "0.0.0.0", "--set", "limits.open=true")
    result = interrupted("-m", "tribe", "serve", "--port", 0, *said, when=LISTENS)
    assert "has no tokens" in " ".join(result.err.split())
    (tmp_path / "tokens.json").write_text(
        json.dumps({"tokens": [{"name": "a", "token": "x" * 16, "streams": "", "role": "admin"}]})
    )
    options = ("--host", "0.0.0.0", "--tokens", tmp_path / "tokens.json")
    assert interrupted("-m", "tribe", "serve", "--port", 0, *options, when=LISTENS).err == ""


def test_a_process_that_serves_collects_no_garbage_among_what_it_has_imported():
    code = "import gc; from tribe.serve.server import shorten_collections as s; s(); print(gc.get_freeze_count())"
    assert int(ended("-c", code).out) > 50_000


def test_the_command_guards_and_watches_with_a_calibration(tmp_path):
    path, net = tmp_path / "health.safetensors", tribe.models.load("compact", tribe.models.find("compact", "mnist"))
    calibration_of(net, "tribe+guard", 10).save(path)
    result = interrupted("-m", "tribe", "serve", "--port", 0, "--guard", "--health", path, when=LISTENS)
    assert result.out.startswith("tribe serves compact (tribe+guard) on"), result.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--health", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--ray", "2"], "--ray needs --data"),
        (["--ray", "2", "--data", "streams", "--grpc-port", "0"], "Ray listens"),
        (["--model", "resnet20"], "--model resnet20 needs --weights FILE"),
        (["--model", "compac"], "compact"),
        (["--method", "trieb"], "tribe"),
        (["--port", "70000"], "port is the number of a port"),
        (["--tokens", "nowhere.json"], "nowhere.json"),
        (["--tls", "cert.pem", "key.pem"], "No such file"),
        (["--set", "server.shape=3x8"], "shape"),
        (["--set", "tent.lr=1"], "takes no part"),
        (["--set", "limits.body=0"], "body"),
        (["--set", "guard.lean_half=1"], "needs --guard"),
        (["--guard", "--set", "guard.half=1"], "lean_half"),
        (["--guard", "--set", "guard.images=nowhere"], "no pictures"),
        (["--set", "policy.deadline=-1"], "deadline"),
        (["--set", "policy.dead=-1"], "deadline"),
    ],
)
def test_wrong_options_are_refused_in_words(nowhere, options, words):
    result = tribe_command("serve", "--port", "0", *options)
    assert result.exit_code == 2
    assert words in message(result)


def tokens_file(path, *names, **fields):
    """Write a file of tokens whose secrets are their names, sixteen times."""
    entries = [{"name": name, "token": name * 16, "streams": "", "role": "learn", **fields} for name in names]
    path.write_text(json.dumps({"tokens": entries}))


def test_the_hang_up_signal_reads_the_tokens_again_and_does_not_end_the_server(tmp_path):
    """SIGHUP ended the server at once, with what it had not stored."""
    place = tmp_path / "tokens.json"
    tokens_file(place, "a", "b")
    (out, printed), (err, logged) = os.pipe(), os.pipe()
    with open(out) as lines, open(err) as log:
        words = ("-m", "tribe", "serve", "--port", 0, "--tokens", place)
        process = Process(*words, stdout=printed, stderr=logged)
        os.close(printed)
        os.close(logged)
        url = re.search(r"http://\S+\d", lines.readline())[0]

        def status(name):
            return web.get(f"{url}/v1/streams", headers={"authorization": f"Bearer {name * 16}"}).status_code

        assert [status(name) for name in "abc"] == [200, 200, 401]
        tokens_file(place, "b", "c")
        os.kill(process.pid, signal.SIGHUP)
        assert "2 tokens, 1 of them new; 1 are no longer valid" in log.readline()
        assert [status(name) for name in "abc"] == [401, 200, 200]
        place.write_text("{")
        os.kill(process.pid, signal.SIGHUP)
        assert "stay as they are" in log.readline()
        assert [status(name) for name in "abc"] == [401, 200, 200]
        os.kill(process.pid, signal.SIGTERM)
        assert process.end().code == 0


def clean_folder(folder):
    """Clean pictures of digits, as files."""
    image, data = pytest.importorskip("PIL.Image"), tribe.datasets.create("mnist")
    for i, pixels in enumerate(data.images("clean", torch.arange(250))):
        image.fromarray((255 * pixels[0]).byte().numpy()).save(folder / f"{i:03d}.png")
    return folder


def test_the_command_serves_a_fitted_guard_a_time_filter_and_health_at_once(tmp_path):
    """The full configuration could not be served: the guard was unfitted, and a guard in the name refused --health."""
    path, net = tmp_path / "health.safetensors", tribe.models.load("compact", tribe.models.find("compact", "mnist"))
    calibration_of(net, "tribe+guard+time", 10).save(path)
    (tmp_path / "clean").mkdir()
    clean_folder(tmp_path / "clean")
    first = ("-m", "tribe", "serve", "--port", 0, "--health", path)
    result = interrupted(*first, "--method", "tribe+guard+time", when=LISTENS)
    assert result.out.startswith("tribe serves compact (tribe+guard+time) on"), result.err
    options = ("--method", "tribe+time", "--guard", "--set", f"guard.images={tmp_path}/clean")
    result = interrupted(*first, *options, when=LISTENS)
    assert result.out.startswith("tribe serves compact (tribe+guard+time) on"), result.err
    assert "--set guard.lean_half=0." in result.err


NETWORKS = """
import torch
from torch import nn

class Random(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))

def trained():
    net = Random()
    for value in net.parameters():
        nn.init.constant_(value, 0.1)
    return net

here = Random()
"""


def test_the_command_warns_of_a_class_without_weights(tmp_path):
    """Random weights were served without a word."""
    (tmp_path / "nets.py").write_text(NETWORKS)

    def told(name, *options):
        command = ("-m", "tribe", "serve", "--port", 0, "--model", f"{tmp_path}/nets.py:{name}", *options)
        result = interrupted(*command, when=LISTENS)
        assert result.code == 0, result.err
        return "not trained" in " ".join(result.err.split())

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    assert told("Random")
    assert not any(told(*words) for words in (("trained",), ("here",), ("Random", "--weights", tmp_path / "net.pt")))


def test_a_word_for_false_turns_a_limit_off():
    """As a text it counted as true: --set limits.open=false let everybody do everything."""
    result = ended("-m", "tribe", "serve", "--port", 0, "--host", "0.0.0.0", "--set", "limits.open=false")
    assert result.code == 2
    assert "without tokens" in " ".join(result.err.split())


@pytest.mark.parametrize("exact", [False, True])
def test_streams_step_together_unless_the_policy_says_exact(exact):
    server = Server(small_network(), shape=(3, 8, 8), port=0, policy=Policy(exact=exact))
    assert (server.service.worker.fleet.fleets["1"].unbatched_reason is not None) == exact


@pytest.mark.parametrize("option", ["limits.open=maybe", "limits.any_range=1", "policy.exact=0"])
def test_a_choice_is_true_or_false(option):
    """A text counted as true, so that limits.open=false opened a server."""
    result = tribe_command("serve", "--port", "0", "--set", option)
    assert result.exit_code == 2
    assert "true or false" in message(result)
