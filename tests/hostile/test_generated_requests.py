"""Thousands of requests that follow from a seed: proper answers, and states that only right requests change.

`Mirror` plays what the server has accepted by the library. A request that was refused must leave no trace: the streams
still equal those of the mirror.
"""

import collections
import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from generated import CRAFTED, STREAMS, Generator, exchange
from tenants import Hosted, new_fleet

from stores import fast_folder
from tribe.serve.client import ClientError

REQUESTS = int(os.environ.get("TRIBE_HOSTILE_REQUESTS", 10_000))
SEED = int(os.environ.get("TRIBE_HOSTILE_SEED", 0))
EVERY = 20  # requests after which the states are compared
PLAIN = (400, 408, 411, 413, 414, 417, 421, 431, 501, 503, 505)  # that the HTTP library answers in words of its own
PROPER = (*PLAIN, 401, 403, 404, 405, 409, 415, 429)


class Mirror:
    """The streams of the server, played by the library."""

    def __init__(self, hosted):
        self.hosted, self.fleet = hosted, new_fleet()

    def play(self, request, answer):
        """Predict, and learn if the server has; the logits are the same bit for bit."""
        images, name = torch.from_numpy(request.images.copy()), request.stream
        x = images / 255 if images.dtype == torch.uint8 else images.to(torch.float32)
        facts = {name.removeprefix("tribe_"): value for name, value in answer.get("parameters", answer).items()}
        logits = answer["logits"] if "logits" in answer else answer["outputs"][0]["data"]
        if name is None:
            expected = self.fleet.predict_source(x)
        else:
            if name not in self.fleet:
                self.fleet.add(name)
            if facts["answered"] == "source":  # in shadow; a request that came before does not teach
                expected = self.fleet.predict_source(x)
                if facts["clock"] != self.fleet.clock(name):
                    self.fleet({name: x})
            else:
                expected = (self.fleet if facts["adapted"] else self.fleet.predict)({name: x})[name]
            assert facts["clock"] == self.fleet.clock(name)
        assert np.array_equal(np.array(logits, np.float32).reshape(len(x), -1), expected.numpy())

    def adopt(self, drain):
        """Take over the streams as the server has them now; ``drain``: it may still learn what it answered."""
        for name in set(self.fleet.names) & set(STREAMS):
            self.fleet.drop(name)
        for name in self.names():
            if drain:
                self.hosted.operator.control("end", name)
            content = self.state(name)
            if content is not None:
                self.fleet.from_bytes(name, content)

    def names(self):
        answer = json.loads(self.hosted.operator._call("GET", "/v1/streams?stored=true")[1])
        return {*answer["stored"], *(each["name"] for each in answer["streams"])} & set(STREAMS)

    def state(self, name):
        try:
            return self.hosted.operator.get_state(name)
        except ClientError as error:
            if error.status != 404:
                raise
            return None

    def compare(self):
        """Every stream equals its replay; return a state file."""
        content = b""
        for name in self.names():
            if (content := self.state(name) or b"") and name in self.fleet:
                self.fleet.from_bytes("served", content)
                assert self.fleet.digest("served") == self.fleet.digest(name), name
        return content


def check_answer(request, answer):
    """An answer has a proper status, and an error says in JSON what is wrong; return the status and what it says."""
    if not answer:
        assert not request.head_is_right, "no answer"
        return None, None
    head, _, body = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    if length := re.search(rb"(?i)\r\ncontent-length: (\d+)", head):  # damage may have made two requests of one
        body = body[: int(length[1])]
    status = int(head.split()[1])
    assert status in (200, 206, *PROPER), answer[:500]
    assert b"Traceback" not in answer
    if status < 400 or request.method == "HEAD":
        return status, body
    try:
        assert isinstance(json.loads(body)["error"], str)
    except ValueError:
        assert status in PLAIN, answer[:500]
        assert not request.head_is_right, answer[:500]
        assert len(body) < 300
    return status, body


def play(hosted, count, seed):
    generator, mirror, statuses = Generator(seed), Mirror(hosted), collections.Counter()
    for number in range(count):
        request = generator.next()
        shown = f"seed {seed}, request {number}: {request.content[:600]!r}"
        try:
            status, body = check_answer(request, exchange(hosted.target.port, request))
            statuses[status] += 1
            if request.is_right and request.stream != CRAFTED and status == 200:
                mirror.play(request, json.loads(body))
            elif status in (None, 408, 503):  # a step that ended too late is learned
                mirror.adopt(drain=True)
            elif status == 200 and request.content[:4] not in (b"GET ", b"HEAD"):
                mirror.adopt(drain=b'adapted":false' in body)
            if number % EVERY == 0 and (content := mirror.compare()):
                generator.states = [content, generator.damaged(content), *generator.states[:4]]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{shown}") from error
    mirror.compare()
    assert hosted.ready()
    text = hosted.log.read_text(errors="replace")
    assert "Traceback" not in text, text[-3000:]
    return statuses


@pytest.fixture
def hosted():
    folder = fast_folder()
    hosted = Hosted(folder, seconds=7200)
    yield hosted
    hosted.stop()
    shutil.rmtree(folder)


def test_a_few_generated_requests(hosted):
    statuses = play(hosted, 120, seed=SEED)
    assert statuses[200] > 30
    assert len(statuses) > 5


@pytest.mark.slow  # ten thousand requests, or TRIBE_HOSTILE_REQUESTS
def test_generated_requests(hosted):
    statuses = play(hosted, REQUESTS, seed=SEED + 1)
    print(f"\n{REQUESTS:,} requests: {dict(statuses)}")
    assert statuses[200] > REQUESTS / 4
