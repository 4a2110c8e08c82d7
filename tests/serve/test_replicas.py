"""Several workers on Ray Serve: streams stay with their worker, the store decides, and nothing is lost at the end."""

import os
import signal
import socket
import sys
import time

import numpy as np
import pytest
from http_calls import web
from replays import batch, new_fleet, replay

from tribe.serve import Client, ClientError, replicas
from tribe.serve.config import Policy
from tribe.serve.plain import encode_npy
from tribe.serve.store.sqlite import SqliteStore
from tribe.testing import small_network

NAMES = [f"cam{i}" for i in range(16)]


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def learns(client, name, seed):
    """Whether the stream learns from a request; it does not while nobody owns it, or its worker is gone."""
    try:
        return client.infer(name, batch(seed).numpy(), id=f"{name}-{seed}").facts["tribe_adapted"]
    except ClientError:
        return False


@pytest.mark.slow  # Ray takes long to start
def test_two_workers_share_the_streams_and_each_stream_stays_with_one_until_it_is_killed(tmp_path):
    pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install '.[ray-serve]'")
    policy = Policy(lease=2.0, renew=0.4, margin=0.6, staleness=0.1)
    options = {"name": "small", "shape": (3, 8, 8), "resources": {"num_cpus": 0.1}, "policy": policy, "h0": 2.0}
    app = replicas.application(small_network(), data=tmp_path, **options)
    store, fleet = SqliteStore(tmp_path), new_fleet()
    with replicas.running(app, port=free_port()) as url, Client(url, "small") as client:
        for seed in range(4):
            for name in NAMES:
                answer = client.infer(name, batch(seed).numpy(), id=f"{name}-{seed}")
                assert answer.facts["tribe_adapted"], "its worker owns the stream"
                assert answer.facts["tribe_generation"] == 1
        again = client.infer("cam0", batch(3).numpy(), id="cam0-3")
        assert not again.facts["tribe_adapted"], "a retry reaches the worker that knows it"
        assert web.post(f"{url}/v1/predict", content=encode_npy(np.asarray(batch(0)))).status_code == 200
        assert web.get(f"{url}/v2/models/small").json()["name"] == "small"
        owners = {name: store.entry(name).owner for name in NAMES}
        assert len(set(owners.values())) == 2, "the streams are spread over both workers"
        killed = owners["cam0"]
        os.kill(int(killed.rsplit("-", 2)[1]), signal.SIGKILL)
        for name in NAMES:
            seed = 4
            while not learns(client, name, seed):
                seed += 1
                time.sleep(0.1)
            assert store.entry(name).generation > 1 or owners[name] != killed, "it was claimed anew"
    for name in NAMES:
        stored = store.read(name)
        assert not store.entry(name).held, "it was released at the end"
        fleet.from_bytes(name, stored.blob)
        learned = [int(request.rpartition("-")[2]) for request in stored.requests]
        assert learned == sorted(set(learned)), "in order, and none twice"
        assert fleet.digest(name) == replay(fleet, name, [batch(seed) for seed in learned])
    store.close()


def test_without_a_store_there_cannot_be_several_workers():
    with pytest.raises(ValueError, match="store"):
        replicas.application(small_network(), data=None)
    with pytest.raises(ValueError, match="workers"):
        replicas.application(small_network(), data="streams", workers=0)


def test_without_ray_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ModuleNotFoundError, match="ray-serve"):
        replicas.application(small_network(), data=tmp_path)
