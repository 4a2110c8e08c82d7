"""The other doors of a prepared file: a server process, versions with a file each, `tribe run`, `tribe try`."""

import contextlib
import json
import os
import re
import signal
from dataclasses import replace

import httpx
import pytest
import torch
from safetensors.torch import save_file

import tribe
from commands import assert_refused, succeeded
from commands import tribe_command as command
from processes import Process
from tribe.cli.commands.serve import NamedWeights, _further
from tribe.core.backbone import Backbone
from tribe.serve import Client
from tribe.serve.config import Policy
from watching import digits, digits_network


@contextlib.contextmanager
def serving(*options):
    """A server process; it is stopped gracefully. The URL."""
    reader, writer = os.pipe()
    process = Process("-m", "tribe", "serve", *options, "--port", 0, stdout=writer)
    os.close(writer)
    with open(reader) as said:
        line = said.readline()
        if not line:
            raise AssertionError(process.end().err)
        try:
            yield re.search(r"http://\S+\d", line)[0]
        finally:
            os.kill(process.pid, signal.SIGTERM)
            said.read()
    assert process.end().code == 0


def bursts(count=192):
    """Digits, sorted by class, in batches."""
    x, y = digits(300, count)
    return list(x[y.argsort()].split(32))


def test_a_server_answers_as_a_fleet_and_goes_on_where_it_stopped(path, net, tmp_path):
    fleet = tribe.fleet(net, path)
    with serving(path, "--data", tmp_path / "data") as url, Client(url) as client:
        for x in bursts():
            expected = fleet({"cam": x})["cam"]
            assert torch.allclose(torch.tensor(client.predict("cam", x.numpy())), expected, atol=1e-4)
        assert fleet.filters("cam")[0].on
        health = httpx.get(f"{url}/v1/streams/cam").json()
        assert health["accuracy"] == pytest.approx(fleet.health("cam").accuracy, abs=1e-4)
        assert health["accuracy_low"] <= health["accuracy"] <= health["accuracy_high"]
        model = httpx.get(f"{url}/v2/models/compact").json()
        assert model["inputs"][0]["shape"] == [-1, 1, 28, 28]
    with serving(path, "--data", tmp_path / "data") as url, Client(url) as client:
        x, _ = digits(0, 32)
        answer = client.infer("cam", x.numpy())
        assert answer.facts["tribe_clock"] == fleet.clock("cam") + 1
        assert torch.allclose(torch.tensor(answer.logits), fleet({"cam": x})["cam"], atol=1e-4)


def test_versions_have_a_prepared_file_each(path, prepared, tmp_path):
    net = digits_network()
    files = [tmp_path / f"{name}.safetensors" for name in "12"]
    save_file(net.state_dict(), files[0])
    tuned = {name: 1.01 * t if t.is_floating_point() else t for name, t in net.state_dict().items()}
    save_file(tuned, files[1])
    net.load_state_dict(tuned)
    other = Backbone(net).fingerprint(exact=False)
    second = tmp_path / "net2.tribe"
    replace(prepared, network=other, calibration=replace(prepared.calibration, network=other)).save(second)
    both = "--weights", f"1={files[0]}", "--weights", f"2={files[1]},{second}"
    with serving(path, *both) as url, Client(url) as client:
        x, *rest = bursts()
        assert client.infer("cam", x.numpy()).facts["model_version"] == "1"
        assert client.control("move", "cam", version="2")["version"] == "2"
        for part in rest:
            assert client.infer("cam", part.numpy()).facts["model_version"] == "2"
        assert httpx.get(f"{url}/v1/streams/cam").json()["accuracy"] > 0.5
        fleet = tribe.fleet(net, second)
        fresh = client.infer("gate", x.numpy(), version="2")
        assert torch.allclose(torch.tensor(fresh.logits), fleet({"gate": x})["gate"], atol=1e-4)
    options = {"policy": Policy(demote=True, exact=True), "shadow": False, "health": False, "guard": False}
    further = _further("compact", [NamedWeights("2", files[1], second)], prepared, options, {})["2"]
    assert further.shadow.demote, "the policy is of all versions"
    assert further.unbatched_reason is not None
    for given in (f"2={files[1]},{path}", f"2={files[1]}"):
        refused = command("serve", path, "--weights", f"1={files[0]}", "--weights", given, "--port", "0")
        assert_refused(refused, "another network" if "," in given else "prepared file")


def test_run_plays_the_prepared_method(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=1000000")
    result = succeeded(command("run", "--prepared", path, "--methods", "source", *few, "--json", "-"))
    rows = {row["method"]: row for row in json.loads(result.stdout)["results"]}
    assert set(rows) == {"source", "bank+guard+time-checked"}
    assert rows["bank+guard+time-checked"]["instance_error"] < rows["source"]["instance_error"]
