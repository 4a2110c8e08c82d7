"""Streams move between versions under load, and the server is killed in between.

Every answer is compared with an offline replay, bit for bit (of the source model, to rounding): it comes from the
version that it names, and from a state that its stream really had. What was acknowledged is not lost: a move, and
learning that is older than the promise.

TRIBE_VERSION_KILLS=100 pytest tests/serve/test_version_kills.py  # more of it
"""

import http.client
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hosted_worker import images_of
from version_networks import fleet_of

from processes import Process
from stores import RedisServer, fast_folder, need_redis
from tribe.serve import Client, ClientError

HOST = str(Path(__file__).parent / "hosted_versions.py")
KILLS = int(os.environ.get("TRIBE_VERSION_KILLS", 50)) // 2  # on each kind of store
SEED = int(os.environ.get("TRIBE_KILL_SEED", 0))
STREAMS = [f"cam{i}" for i in range(4)]
POLICY = {"write_every": 0.1, "lease": 60, "renew": 1, "requests": 10_000}
LOST = 1.0  # seconds of learning: write_every and two rounds of writing
GONE = (OSError, http.client.HTTPException)  # what a client of a killed server gets


class Hosted:
    """The server process, killed and started again on the same port and store."""

    def __init__(self, place):
        self.place, self.port, self.starts = place, 0, 0
        self.start()

    def start(self):
        """Start it; return when it listens."""
        readable, writable = os.pipe()
        spec = {"place": self.place, "port": self.port, "shift": 100.0 * self.starts, "policy": POLICY}
        self.process = Process(HOST, json.dumps(spec), stdout=writable)
        os.close(writable)
        with open(readable) as printed:
            line = printed.readline()
        assert line, self.process.end().err
        self.port, self.starts = int(line), self.starts + 1

    def end(self, number):
        os.kill(self.process.pid, number)
        return self.process.end()


class Load:
    """A client of each stream, and one that moves them; all go on over kills."""

    def __init__(self, url, seed):
        self.url, self.seed, self.go_on = url, seed, True
        self.records = {name: [] for name in STREAMS}  # of its client, in order
        self.versions = dict.fromkeys(STREAMS, "1")  # that were acknowledged
        self.uncertain = set()  # streams with a move that was not acknowledged
        self.up, self.told, self.answers, self.moves = threading.Event(), threading.Condition(), 0, 0
        self.up.set()
        self.errors = []
        targets = [(self.client, name) for name in STREAMS] + [(self.mover,)]
        self.threads = [threading.Thread(target=self.run, args=each) for each in targets]
        for thread in self.threads:
            thread.start()

    def run(self, target, *arguments):
        try:
            target(*arguments)
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self.told:
                self.told.notify_all()

    def client(self, name):
        client, number = Client(self.url, "small"), 0
        while self.go_on:
            id = f"{name}-{number}"
            version = (None, None, None, "1", "2")[number % 5]
            try:
                answer = client.infer(name, images_of("small", id).numpy(), id=id, version=version)
            except GONE:
                self.records[name].append(("gone", id, version))
                self.up.wait()
                continue  # the same id again
            except ClientError as error:
                if error.status != 503:
                    raise
                continue
            self.records[name].append(("answer", id, version, answer, time.monotonic()))
            number += 1
            with self.told:
                self.answers += 1
                self.told.notify_all()

    def mover(self):
        client, draw = Client(self.url, "small"), random.Random(self.seed)
        while self.go_on:
            name = draw.choice(STREAMS)
            back = draw.random() < 0.5
            target = "1" if self.versions[name] == "2" else "2"
            try:
                if back:
                    found = client.control("back", name)
                else:
                    found = client.control("move", name, version=target, start="source")
                self.versions[name] = found["version"]
                self.uncertain.discard(name)
                self.moves += 1
            except GONE:
                self.uncertain.add(name)
                self.up.wait()
            except ClientError as error:
                if error.status not in (404, 409, 503):  # no stream yet; it has gone back already
                    raise

    def wait_for(self, answers, moves):
        """Wait until there are so many more answers and moves."""
        with self.told:
            wanted = self.answers + answers, self.moves + moves
            while (self.answers < wanted[0] or self.moves < wanted[1]) and not self.errors:
                self.told.wait(1)
        assert not self.errors, self.errors

    def stop(self):
        self.go_on = False
        for thread in self.threads:
            thread.join()
        assert not self.errors, self.errors


class Replay:
    """All states that a stream may have had, by version and clock, as its answers prove them."""

    def __init__(self, stream):
        self.stream, self.fleets = stream, {version: fleet_of(version) for version in "12"}
        self.states = defaultdict(list)
        for version, fleet in self.fleets.items():
            fleet.add(stream)
            self.states[version, 0].append(fleet.state(stream))
        self.unanswered = []  # requests that may have been learned without an answer
        self.checked = 0

    def step(self, version, state, id):
        fleet = self.fleets[version]
        fleet.replace_state(self.stream, state)
        logits = fleet({self.stream: images_of("small", id)})[self.stream]
        return logits, fleet.state(self.stream)

    def predict(self, version, state, id):
        fleet = self.fleets[version]
        fleet.replace_state(self.stream, state)
        return fleet.predict({self.stream: images_of("small", id)})[self.stream]

    def reached(self, version, clock):
        """The states of a clock, and those that unanswered requests lead to."""
        yield from self.states[version, clock]
        for id in self.unanswered:
            for state in list(self.states[version, clock - 1]):
                _, after = self.step(version, state, id)
                self.states[version, clock].append(after)
                yield after

    def check(self, record):
        if record[0] == "gone":
            self.unanswered = [*self.unanswered[-3:], record[1]]
            return
        _, id, asked, answer, _ = record
        facts, logits = answer.facts, torch.from_numpy(answer.logits.copy())
        version, clock = facts["model_version"], facts.get("tribe_clock")
        assert asked in (None, version), "it is of the version that the request names"
        self.checked += 1
        if clock is None:
            source = self.fleets[version].predict_source(images_of("small", id))
            assert torch.allclose(source, logits, atol=1e-5), record  # to rounding: those of all streams go together
            return
        if facts["tribe_adapted"]:
            for state in self.reached(version, clock - 1):
                found, after = self.step(version, state, id)
                if torch.equal(found, logits):
                    self.states[version, clock].append(after)
                    return
        elif any(torch.equal(self.predict(version, s, id), logits) for s in self.reached(version, clock)):
            return
        raise AssertionError(f"no state of version {version} at clock {clock} gives this answer: {record}")


def check_versions(load, url):
    """After a kill every stream is in the version of its last acknowledged move."""
    with Client(url, "small") as client:
        for name in STREAMS:
            version = json.loads(client._call("PUT", f"/v1/streams/{name}")[1])["version"]
            if name in load.uncertain:
                load.versions[name] = version
            assert version == load.versions[name], f"{name}: an acknowledged move was lost"


def check_losses(records, kills):
    """Of what was acknowledged more than the promise before a kill, nothing was lost: clocks go on from there."""
    worst = 0.0
    for moment in kills:
        before = [each for each in records if each[0] == "answer" and each[4] <= moment]
        after = [each for each in records if each[0] == "answer" and each[4] > moment]
        learned = [each for each in before if each[3].facts["tribe_adapted"]]
        resumed = next((each for each in after if each[3].facts.get("tribe_clock") is not None), None)
        if resumed is None or not learned:
            continue
        facts = resumed[3].facts
        clock = facts["tribe_clock"] - facts["tribe_adapted"]
        generation = learned[-1][3].facts["tribe_generation"]
        same = [
            each
            for each in learned
            if each[3].facts["tribe_generation"] == generation
            and each[3].facts["model_version"] == facts["model_version"]
            and facts["tribe_generation"] == generation + 1  # else it has moved since
        ]
        lost = [each[4] for each in same if each[3].facts["tribe_clock"] > clock]
        worst = max([worst, *(moment - each for each in lost)])
    return worst


def play(place, kills):
    """Kill the server so many times under load; return what was recorded, and when it was killed."""
    draw, moments = random.Random(SEED), []
    hosted = Hosted(place)
    load = Load(f"http://127.0.0.1:{hosted.port}", SEED)
    try:
        for _ in range(kills):
            load.wait_for(draw.randrange(20, 80), draw.randrange(1, 6))
            load.up.clear()
            moments.append(time.monotonic())
            assert hosted.end(signal.SIGKILL).code == -signal.SIGKILL
            hosted.start()
            # Nobody moves streams until the clients are let go, but for a request that waits for the new server.
            load.up.set()
        load.wait_for(20, 1)
    finally:
        load.go_on = False
        load.up.set()
        load.stop()
    check_versions(load, load.url)
    assert hosted.end(signal.SIGTERM).code == 0
    return load, moments


def check(load, moments):
    for name in STREAMS:
        replay = Replay(name)
        for record in load.records[name]:
            replay.check(record)
        assert replay.checked > 5 * len(moments)
        assert {"1", "2"} <= {r[3].facts["model_version"] for r in load.records[name] if r[0] == "answer"}
    assert load.moves > len(moments)
    return max(check_losses(load.records[name], moments) for name in STREAMS)


def test_every_answer_is_of_its_version_over_moves_and_a_few_kills():
    place = fast_folder()
    check(*play(str(place), 3))
    shutil.rmtree(place)


@pytest.mark.slow  # the server starts once for each kill
def test_fifty_kills_lose_no_move_that_was_acknowledged_and_no_learning_beyond_the_promise(kind):
    if kind == "redis":
        need_redis()
        server = RedisServer()
        lost = check(*play(server.address, KILLS))
        server.remove()
    else:
        place = fast_folder()
        lost = check(*play(str(place), KILLS))
        shutil.rmtree(place)
    print(f"lost at most {lost:.3f} s")
    assert lost <= LOST
