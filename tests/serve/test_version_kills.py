"""Streams move between versions, are promoted and demoted under load, and the server is killed in between.

Every answer is compared with an offline replay, bit for bit (of the source model, to rounding): it comes from the
version that it names, from the mode that its stream was in, and from a state that its stream really had. What was
acknowledged is not lost: a move, a promotion, a demotion, and learning that is older than the promise.

TRIBE_VERSION_KILLS=100 pytest tests/serve/test_version_kills.py  # more of it
"""

import http.client
import json
import math
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from hosted_worker import images_of
from version_networks import fleet_of

from processes import Process
from stores import RedisServer, fast_folder, need_redis
from tribe.core.state import digest
from tribe.serve import Client, ClientError

HOST = str(Path(__file__).parent / "hosted_versions.py")
KILLS = int(os.environ.get("TRIBE_VERSION_KILLS", 50)) // 2  # on each kind of store
SEED = int(os.environ.get("TRIBE_KILL_SEED", 0))
STREAMS = [f"cam{i}" for i in range(4)]
POLICY = {"write_every": 0.1, "lease": 60, "renew": 1, "requests": 10_000}
KINDS = "move", "promote", "demote"
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


class Modes:
    """When each stream was told who answers: from the call to its answer, in order; infinity: no answer came."""

    def __init__(self):
        self.told = {name: [(0.0, 0.0, "adapted")] for name in STREAMS}

    def expected(self, name, began, ended):
        """Return who may answer a request that was sent and answered at these times."""
        told = self.told[name]
        last = max(i for i, (_, answered, _) in enumerate(told) if answered <= began)
        return {told[last][2]} | {mode for start, _, mode in told[last + 1 :] if start <= ended}


class Load:
    """A client of each stream, and one that moves, promotes and demotes them; all go on over kills."""

    def __init__(self, url, seed):
        self.url, self.seed, self.go_on = url, seed, True
        self.records = {name: [] for name in STREAMS}  # of its client, in order
        self.versions = dict.fromkeys(STREAMS, "1")  # that were acknowledged
        self.uncertain = set()  # streams with a move that was not acknowledged
        self.modes, self.changes = Modes(), Counter()
        self.up, self.told, self.answers = threading.Event(), threading.Condition(), 0
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
            version, began = (None, None, None, "1", "2")[number % 5], time.monotonic()
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
            self.records[name].append(("answer", id, version, answer, time.monotonic(), began))
            number += 1
            with self.told:
                self.answers += 1
                self.told.notify_all()

    def mover(self):
        client, draw, kinds = Client(self.url, "small"), random.Random(self.seed), list[str]()
        while self.go_on:
            kinds = kinds or draw.sample(KINDS, len(KINDS))
            name, kind = draw.choice(STREAMS), kinds.pop()
            try:
                if kind == "move":
                    self.move(client, name, back=draw.random() < 0.5)
                else:
                    self.change_mode(client, name, kind)
                self.changes[kind] += 1
            except GONE:
                if kind == "move":
                    self.uncertain.add(name)
                self.up.wait()
            except ClientError as error:
                if error.status not in (404, 409, 503):  # no stream yet; it has gone back already
                    raise

    def move(self, client, name, back):
        if back:
            found = client.control("back", name)
        else:
            target = "1" if self.versions[name] == "2" else "2"
            found = client.control("move", name, version=target, start="source")
        self.versions[name] = found["version"]
        self.uncertain.discard(name)

    def change_mode(self, client, name, action):
        told, began, mode = self.modes.told[name], time.monotonic(), "source" if action == "demote" else "adapted"
        told.append((began, math.inf, mode))  # it may count from now on
        client.control(action, name)
        told[-1] = (began, time.monotonic(), mode)

    def wait_for(self, answers, changes):
        """Wait until there are so many more answers, and changes of each kind."""
        with self.told:
            answers, wanted = self.answers + answers, self.changes + Counter(dict.fromkeys(KINDS, changes))
            while (self.answers < answers or not self.changes >= wanted) and not self.errors:
                self.told.wait(1)
        assert not self.errors, self.errors

    def stop(self):
        self.go_on = False
        for thread in self.threads:
            thread.join()
        assert not self.errors, self.errors


class Replay:
    """All states that a stream may have had, by version and clock, as its answers prove them.

    The source's answers in shadow prove no state: then every state that may have been reached stays possible.
    """

    def __init__(self, stream, modes):
        self.stream, self.modes, self.fleets = stream, modes, {version: fleet_of(version) for version in "12"}
        self.states = defaultdict(dict)  # by digest
        self.last = defaultdict(dict)  # by version: those of its latest past, by clock
        for version, fleet in self.fleets.items():
            fleet.add(stream)
            self.keep(version, 0, [fleet.state(stream)])
        self.unanswered = []  # requests that may have been learned without an answer
        self.before = None  # version, generation and clock of the last answer
        self.checked, self.seen = 0, set()

    def keep(self, version, clock, states):
        """Note what a stream may have at a clock; what was after it is of another past."""
        found = {digest(state): state for state in states}
        self.states[version, clock] |= found
        self.last[version] = {c: some for c, some in self.last[version].items() if c < clock} | {clock: found}

    def step(self, version, state, id):
        fleet = self.fleets[version]
        fleet.replace_state(self.stream, state)
        logits = fleet({self.stream: images_of("small", id)})[self.stream]
        return logits, fleet.state(self.stream)

    def predict(self, version, state, id):
        fleet = self.fleets[version]
        fleet.replace_state(self.stream, state)
        return fleet.predict({self.stream: images_of("small", id)})[self.stream]

    def reached(self, version, clock, known):
        """The states of a clock, and those that unanswered requests lead to."""
        yield from list(known(version, clock).values())
        for id in self.unanswered:
            for state in list(known(version, clock - 1).values()):
                yield self.step(version, state, id)[1]

    def latest(self, version, clock):
        return self.last[version].get(clock) or self.states[version, clock]

    def anywhere(self, version, clock):
        return self.states[version, clock]

    def check(self, record):
        if record[0] == "gone":
            self.unanswered = [*self.unanswered[-3:], record[1]]
            self.suppose(*record[1:])
            return
        _, id, asked, answer, ended, began = record
        facts, logits = answer.facts, torch.from_numpy(answer.logits.copy())
        version, clock = facts["model_version"], facts.get("tribe_clock")
        assert asked in (None, version), "it is of the version that the request names"
        self.checked += 1
        if clock is None or facts["tribe_answered"] == "source":
            source = self.fleets[version].predict_source(images_of("small", id))
            assert torch.allclose(source, logits, atol=1e-5), record  # to rounding: those of all streams go together
        if clock is None:
            return
        mode = facts["tribe_answered"]
        assert mode in self.modes.expected(self.stream, began, ended), record
        self.seen.add(mode)
        here = version, facts["tribe_generation"], clock
        if mode == "source":
            self.follow(id, *here)
        elif facts["tribe_adapted"]:
            self.prove_step(id, version, clock, logits)
        else:
            self.prove(id, version, clock, logits)
        self.before = here

    def suppose(self, id, asked):
        """Note the states after a request without an answer, which is sent again: it may have been learned."""
        version, _, clock = self.before or ("1", 0, 0)
        if asked in (None, version):
            after = [self.step(version, state, id)[1] for state in self.latest(version, clock).values()]
            self.keep(version, clock + 1, after)

    def follow(self, id, version, generation, clock):
        """Note the states that a stream may have after a request in shadow, which may have been learned or not."""
        if self.before == (version, generation, clock):
            return
        after = [self.step(version, state, id)[1] for state in self.latest(version, clock - 1).values()]
        if self.before != (version, generation, clock - 1):
            after += self.latest(version, clock).values()
        assert after, f"version {version} has no state at clock {clock}"
        self.keep(version, clock, after)

    def prove_step(self, id, version, clock, logits):
        for known in (self.latest, self.anywhere):
            for state in self.reached(version, clock - 1, known):
                found, after = self.step(version, state, id)
                if torch.equal(found, logits):
                    self.keep(version, clock - 1, [state])
                    self.keep(version, clock, [after])
                    return
        raise AssertionError(f"no state of version {version} at clock {clock - 1} leads to the answer to {id}")

    def prove(self, id, version, clock, logits):
        for known in (self.latest, self.anywhere):
            for state in self.reached(version, clock, known):
                if torch.equal(self.predict(version, state, id), logits):
                    self.keep(version, clock, [state])
                    return
        raise AssertionError(f"no state of version {version} at clock {clock} gives the answer to {id}")


def check_kept(load):
    """After a kill every stream is in the version of its last acknowledged move, and in its mode."""
    with Client(load.url, "small") as client:
        for name in STREAMS:
            found, now = json.loads(client._call("PUT", f"/v1/streams/{name}")[1]), time.monotonic()
            version = found["version"]
            mode = "source" if found["shadow"] else "adapted"
            assert mode in load.modes.expected(name, now, now), f"{name}: an acknowledged mode was lost"
            if name in load.uncertain:
                load.versions[name] = version
            assert version == load.versions[name], f"{name}: an acknowledged move was lost"


def learns(facts):
    """Whether a request was learned; in shadow it may have been."""
    return facts["tribe_adapted"] or (facts["tribe_answered"] == "source" and facts.get("tribe_clock") is not None)


def check_losses(records, kills):
    """Of what was acknowledged more than the promise before a kill, nothing was lost: clocks go on from there."""
    worst = 0.0
    for moment in kills:
        before = [each for each in records if each[0] == "answer" and each[4] <= moment]
        after = [each for each in records if each[0] == "answer" and each[4] > moment]
        learned = [each for each in before if learns(each[3].facts)]
        resumed = next((each for each in after if each[3].facts.get("tribe_clock") is not None), None)
        if resumed is None or not learned:
            continue
        facts = resumed[3].facts
        clock = facts["tribe_clock"] - learns(facts)
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
            load.wait_for(draw.randrange(20, 80), draw.randrange(1, 3))
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
    check_kept(load)
    assert hosted.end(signal.SIGTERM).code == 0
    return load, moments


def check(load, moments):
    for name in STREAMS:
        replay = Replay(name, load.modes)
        for record in load.records[name]:
            replay.check(record)
        assert replay.checked > 5 * len(moments)
        assert {"1", "2"} <= {r[3].facts["model_version"] for r in load.records[name] if r[0] == "answer"}
        assert replay.seen == {"adapted", "source"}
    assert all(load.changes[kind] > len(moments) for kind in KINDS)
    return max(check_losses(load.records[name], moments) for name in STREAMS)


def test_every_answer_is_of_its_version_over_moves_and_a_few_kills():
    place = fast_folder()
    check(*play(str(place), 3))
    shutil.rmtree(place)


@pytest.mark.slow  # the server starts once for each kill
def test_fifty_kills_lose_nothing_that_was_acknowledged_and_no_learning_beyond_the_promise(kind):
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
