"""A process of ``tribe serve`` with several users, and the one whose answers and states must be right: the victim."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from attacks import Target, secret
from small_server import has_grpc

import tribe
from processes import Process
from tribe.data.datasets.files import mnist_test
from tribe.serve.client import Client, Prediction
from tribe.serve.store import open_store

# Secrets of users by what they may do: the victim learns, and the operator looks at its states. All others attack.
TOKENS = {
    "victim": {"streams": "victim-", "role": "learn"},
    "operator": {"streams": "", "role": "admin"},
    "predict": {"streams": "bad-", "role": "predict"},
    "learn": {"streams": "bad-l-", "role": "learn", "most_streams": 5},
    "race": {"streams": "bad-r-", "role": "learn", "most_streams": 5},
    "admin": {"streams": "bad-a-", "role": "admin", "most_streams": 8},
}
# A step cannot be interrupted. So who shares a server bounds it, here to 32 digits, and with it what others wait.
SETTINGS = {
    "server.exact": True,
    "policy.images": 32,
    "limits.request_pixels": 32 * 28 * 28,
    "limits.body": 4 * 2**20,
    "limits.state": 4 * 2**20,
    "limits.bodies": 64 * 2**20,
    "limits.body_seconds": 5,
    "limits.state_seconds": 5,
    "limits.idle_seconds": 5,
}
CAMERAS = 4


class Hosted:
    """A running ``tribe serve``: its address, memory and log."""

    def __init__(self, folder, store=None, seconds=900):
        self.folder, self.store = Path(folder), str(store or Path(folder, "streams"))
        entries = [{"name": name, "token": secret(name), **fields} for name, fields in TOKENS.items()]
        (self.folder / "tokens.json").write_text(json.dumps({"tokens": entries}))
        options = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
        options += ["--grpc-port", 0] if has_grpc() else []
        options += ["--guard", "--tokens", self.folder / "tokens.json", "--data", self.store]
        self.log = self.folder / "log.txt"
        reader, writer = os.pipe()
        with self.log.open("wb") as log:
            command = ("-m", "tribe", "serve", "--port", 0, *options)
            self.process = Process(*command, stdout=writer, stderr=log, cwd=self.folder, seconds=seconds)
        os.close(writer)
        self.said = os.fdopen(reader)
        line = self.said.readline()
        ports = [int(each) for each in re.findall(r"127\.0\.0\.1:(\d+)", line)]
        assert ports, self.log.read_text()
        self.target = Target(ports[0], ports[1] if len(ports) > 1 else None)
        self.operator = Client(self.target.url, token=secret("operator"))

    def peak(self):
        """The most megabytes that were resident since `forget_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024

    def forget_peak(self):
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.peak()

    def ready(self):
        with contextlib.closing(Client(self.target.url)) as client:
            return client._call("GET", "/v2/health/ready")[1] == b""

    def stop(self):
        """Stop it as an operator does; every stream is stored."""
        self.operator.close()
        os.kill(self.process.pid, signal.SIGTERM)
        with self.said:
            assert self.said.read() == "stopped; every stream is stored\n"
        assert self.process.end().code == 0


def new_fleet():
    """The digits network as the server serves it."""
    net = tribe.models.load("compact", tribe.models.find("compact", "mnist"))
    return tribe.fleet(net, guard=True, exact=True)


class Answer(NamedTuple):
    """An answer to the victim, and how long it took."""

    prediction: Prediction
    seconds: float


class Camera:
    """A camera of the victim, which sends a fixed sequence of digits, one request after the other."""

    def __init__(self, target, number):
        self.name, self.number, self.count, self.answers = f"victim-{number}", number, 0, []
        self.client = Client(target.url, token=secret("victim"), seconds=30)
        self.channel = None
        if target.grpc_port is not None and number == CAMERAS - 1:  # the last one calls by gRPC
            import grpc

            self.channel = grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}")
            self.call = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    def images(self, count):
        chosen = [(1009 * self.number + 7 * count + i) % 10_000 for i in range(1 + count % 2)]
        return np.ascontiguousarray(mnist_test()[0][chosen])[:, None]

    def send(self):
        """Send the next images and keep the answer; an error is the caller's."""
        images, began = self.images(self.count), time.perf_counter()
        request_id = f"{self.name} {self.count}"
        answer = self._call(images, request_id) if self.channel else self.client.infer(self.name, images, id=request_id)
        self.answers.append(Answer(answer, time.perf_counter() - began))
        self.count += 1

    def _call(self, images, request_id):
        from tribe.serve import open_inference_pb2 as messages

        request = messages.ModelInferRequest(model_name="compact", id=request_id)
        request.inputs.add(name="images", datatype="UINT8", shape=images.shape)
        request.raw_input_contents.append(images.tobytes())
        request.parameters["sequence_id"].string_param = self.name
        metadata = (("authorization", f"Bearer {secret('victim')}"),)
        content = self.call(request.SerializeToString(), metadata=metadata, timeout=30)
        answer = messages.ModelInferResponse.FromString(content)
        facts = {
            name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in answer.parameters.items()
        }
        return Prediction(np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(len(images), -1), facts)

    def close(self):
        self.client.close()
        if self.channel:
            self.channel.close()


class Oracle:
    """The victim's cameras, and what the library alone computes from the images that they sent."""

    def __init__(self, hosted):
        self.hosted, self.fleet = hosted, new_fleet()
        self.cameras = [Camera(hosted.target, number) for number in range(CAMERAS)]
        self.checked = dict.fromkeys(self.cameras, 0)

    def check(self):
        """Every answer and every state equals the replay, bit for bit."""
        for camera in self.cameras:
            self.replay(camera)
            self.check_state(camera, self.hosted.operator.get_state(camera.name))

    def replay(self, camera):
        for i in range(self.checked[camera], camera.count):
            (logits, facts), x = camera.answers[i].prediction, torch.from_numpy(camera.images(i)) / 255
            assert (facts["tribe_adapted"], facts["tribe_clock"]) == (True, i + 1), (camera.name, i, facts)
            expected = self.fleet({camera.name: x})[camera.name].numpy()
            self.checked[camera] = i + 1
            assert np.array_equal(logits, expected), (camera.name, i)

    def check_state(self, camera, content):
        self.fleet.from_bytes("served", content)
        assert self.fleet.digest("served") == self.fleet.digest(camera.name), camera.name
        assert self.fleet.clock("served") == camera.count

    def check_stored(self):
        """What the server stored when it stopped also equals the replay."""
        with contextlib.closing(open_store(self.hosted.store)) as store:
            for camera in self.cameras:
                stored = store.read(camera.name)
                self.replay(camera)
                self.check_state(camera, stored.blob)
                assert (stored.clock, len(stored.requests)) == (camera.count, min(camera.count, 256))

    def close(self):
        for camera in self.cameras:
            camera.close()


@contextlib.contextmanager
def two_tenants(folder, store=None, seconds=900):
    """A server with its oracle; at the end the server stops, and the oracle looks at what it stored."""
    hosted = Hosted(folder, store, seconds)
    oracle = Oracle(hosted)
    try:
        for camera in oracle.cameras:  # the first steps take memory, which stays
            for _ in range(3):
                camera.send()
        yield oracle
    finally:
        oracle.close()
        hosted.stop()
    oracle.check_stored()
