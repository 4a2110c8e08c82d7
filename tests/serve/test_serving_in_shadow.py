"""Streams in shadow: the source answers, the stream learns; the mode is stored, and goes where the stream goes."""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest
import torch
from hosted_worker import images_of
from http_calls import IMAGES, infer, refused, web
from replays import POLICY, batch, kinds, new_fleet, replay, working
from small_server import serving, small_fleet, token

import tribe
from processes import Process
from stores import fast_folder
from tribe.core.state import digest
from tribe.io import states
from tribe.serve.client import Client, ClientError
from tribe.serve.config import Policy
from tribe.serve.errors import NotOwner
from tribe.serve.security import Principal, Token
from tribe.serve.server import Server
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker
from tribe.streams import stream_seed
from tribe.testing import small_network
from watching import pictures

HOST = str(Path(__file__).parent / "hosted_server.py")


@pytest.fixture
def store(tmp_path):
    kept = SqliteStore(tmp_path / "data")
    yield kept
    kept.close()


# -- one worker --------------------------------------------------------------------------------------------------------


async def test_the_source_answers_and_the_stream_learns():
    fleet = new_fleet(shadow=True)
    async with working(fleet) as worker:
        answers = [await worker.infer("cam", batch(seed)) for seed in range(3)]
        predicted = await worker.infer("cam", batch(3), learn=False)
        described = worker.stream("cam")
    for seed, answer in enumerate([*answers, predicted]):
        assert torch.equal(answer.logits, fleet.predict_source(batch(seed)))
        assert (answer.adapted, answer.answered, answer.clock) == (False, "source", min(seed + 1, 3))
        assert answer.health["shadow"]
    assert fleet.digest("cam") == replay(fleet, "cam", [batch(seed) for seed in range(3)])
    assert (described["state"], described["shadow"], described["images"]) == ("learning", True, 6)
    assert worker.metrics.total("tribe_requests_total", outcome="shadow") == 4


async def test_after_the_promotion_it_answers_as_if_it_had_never_been_in_shadow():
    fleet, never = new_fleet(shadow=True), new_fleet()
    async with working(fleet) as worker, working(never) as other:
        for seed in range(2):
            await worker.infer("cam", batch(seed)), await other.infer("cam", batch(seed))
        assert (await worker.control("promote", "cam"))["shadow"] is False
        ours, theirs = await worker.infer("cam", batch(2)), await other.infer("cam", batch(2))
        assert torch.equal(ours.logits, theirs.logits)
        assert (ours.adapted, ours.answered, ours.clock) == (True, "adapted", 3)
        assert (await worker.control("demote", "cam"))["shadow"] is True
        assert (await worker.infer("cam", batch(3))).answered == "source"
        await other.infer("cam", batch(3))
        assert worker.metrics.total("tribe_demotions_total", cause="person") == 1
        assert kinds(worker)[-2:] == ["promoted", "demoted"]
        text = worker.metrics_text(streams=True)
    assert fleet.digest("cam") == never.digest("cam")
    assert 'tribe_streams_shadow{model="tribe",version="1"} 1.0' in text
    assert 'tribe_stream_shadow{model="tribe",stream="cam",version="1"} 1.0' in text
    assert "tribe_stream_differ{" in text


async def test_the_mode_is_stored_before_the_answer_and_survives_a_crash(tmp_path):
    """No round of writing comes: what a crash leaves is what `promote` itself has stored."""
    fleet, other = new_fleet(shadow=True), new_fleet(shadow=True)
    crashed = Worker(fleet, SqliteStore(tmp_path), policy=POLICY, owner="one")
    await crashed.start()
    await crashed.infer("a", batch(0)), await crashed.infer("b", batch(0))
    await crashed.control("promote", "a")
    await crashed.write_round()
    await crashed.control("promote", "b")
    await crashed.control("demote", "a")  # and the process is gone
    async with working(other, SqliteStore(tmp_path, now=lambda: time.time() + 2000), owner="two") as worker:
        found = {name: await worker.infer(name, batch(1)) for name in "ab"}
    assert (found["a"].answered, found["b"].answered) == ("source", "adapted")
    assert all(answer.clock == 2 and answer.generation == 2 for answer in found.values())
    for task in crashed._chores:
        task.cancel()
    crashed.runtime.close()


async def test_a_worker_that_follows_answers_in_the_stored_mode(tmp_path):
    place, policy = tmp_path, Policy(max_batch_delay=0, write_every=1000, staleness=0)
    async with (
        working(new_fleet(shadow=True), SqliteStore(place), policy=policy, owner="one") as one,
        working(new_fleet(shadow=True), SqliteStore(place), policy=policy, owner="two") as two,
    ):
        await one.infer("cam", batch(0))
        await one.write_round()
        assert (await two.infer("cam", batch(1))).answered == "source"
        await one.control("promote", "cam")
        followed = await two.infer("cam", batch(1))
        assert (followed.answered, followed.adapted, two.stream("cam")["state"]) == ("adapted", False, "followed")
        assert torch.equal(followed.logits, one.fleet.fleet_of("cam").predict({"cam": batch(1)})["cam"])
        with pytest.raises(NotOwner):
            await two.control("demote", "cam")
        assert not one.fleet.in_shadow("cam")


async def test_reset_and_rollback_and_a_state_that_is_put_keep_the_mode(store):
    fleet = new_fleet(shadow=True)
    async with working(fleet, store) as worker:
        await worker.infer("cam", batch(0))
        await worker.control("snapshot", "cam")
        outside = new_fleet()
        outside({"cam": batch(5)})
        await worker.control("put_state", "cam", data=outside.to_bytes("cam"))
        assert fleet.digest("cam") == outside.digest("cam")
        assert fleet.in_shadow("cam"), "whoever puts a state does not promote"
        await worker.control("promote", "cam")
        assert not (await worker.control("rollback", "cam"))["shadow"]
        assert not (await worker.control("reset", "cam"))["shadow"]
        await worker.control("demote", "cam")
        assert (await worker.control("reset", "cam"))["shadow"]
        assert states.decode(store.read("cam").blob).shadow == [True]
        await worker.control("put_state", "new", data=outside.to_bytes("cam"))
        assert fleet.in_shadow("new"), "new streams begin in shadow"


async def test_streams_in_both_modes_are_stepped_together():
    """Answers of a batch of several streams are those of each alone, to rounding; states are those without shadow."""
    fleet, never = tribe.fleet(small_network(), h0=2.0, shadow=True), tribe.fleet(small_network(), h0=2.0)
    async with working(fleet) as worker, working(never) as other:
        for each in (worker, other):
            await asyncio.gather(*(each.infer(name, batch(i)) for i, name in enumerate("abcd")))
        await worker.control("promote", "b")
        answers = await asyncio.gather(*(worker.infer(name, batch(9 + i)) for i, name in enumerate("abcd")))
        adapted = await asyncio.gather(*(other.infer(name, batch(9 + i)) for i, name in enumerate("abcd")))
    assert [answer.answered for answer in answers] == ["source", "adapted", "source", "source"]
    for i, (ours, theirs) in enumerate(zip(answers, adapted, strict=True)):
        expected = theirs.logits if i == 1 else fleet.predict_source(batch(9 + i))
        assert torch.allclose(ours.logits, expected, atol=1e-5)


async def test_adapting_that_goes_wrong_demotes_and_the_answer_says_who_gave_it(store):
    """The step that raises the alarm was answered by what adapts; from the next one on the source answers."""
    policy = tribe.Shadow(begin=False, demote=True)
    fleet = tribe.fleet(small_network(), "tent+watch", lr=0.3, exact=True, shadow=policy)
    async with working(fleet, store) as worker:
        answers = [await worker.infer("cam", pictures(1, 6, seed)[0]) for seed in range(10)]
        event = next(event for event in worker.log.kept if event.kind == "demoted")
        await worker.write_round()
        assert states.decode(store.read("cam").blob).shadow == [True]
    said = [answer.answered for answer in answers]
    last = said.index("source")
    assert said == ["adapted"] * last + ["source"] * (10 - last)
    assert (answers[last - 1].adapted, answers[last - 1].health["shadow"]) == (True, True)
    assert event.stream == "cam"
    assert "run away" in event.words
    assert event.numbers["image"] == 6 * last
    assert worker.metrics.total("tribe_demotions_total", cause="policy") == 1
    assert kinds(worker).count("demoted") == 1
    assert "alarm-drift" in kinds(worker)
    assert "alarm-demoted" not in kinds(worker)


def test_the_server_takes_the_mode_and_the_policy():
    net = small_network()
    with (
        Server(net, port=0, shape=(3, 8, 8), shadow=True, name="small") as server,
        Client(server.url, "small") as client,
    ):
        facts = client.infer("cam", IMAGES).facts
        assert (facts["tribe_answered"], facts["tribe_adapted"], facts["tribe_health_shadow"]) == (
            "source",
            False,
            True,
        )
    made = Server(net, port=0, guard=True, policy=Policy(demote=True))
    mode = made.service.worker.fleet.fleets["1"].shadow
    assert (mode.begin, mode.demote) == (False, True)
    with pytest.raises(ValueError, match="guard=True"):
        Server(net, port=0, policy=Policy(demote=True))
    with pytest.raises(ValueError, match="demote"):
        Policy(demote="auto")


def test_the_command_begins_streams_in_shadow_and_takes_the_policy():
    reader, writer = os.pipe()
    options = ("--shadow", "--guard", "--set", "policy.demote=true")
    process = Process("-m", "tribe", "serve", "--port", 0, *options, stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as said:
        port = re.search(r"127\.0\.0\.1:(\d+)", said.readline())[1]
        with Client(f"http://127.0.0.1:{port}") as client:
            digits = np.random.default_rng(0).random((2, 1, 28, 28), np.float32)
            before = client.infer("cam", digits).facts
            assert client.promote() == {}
            after = client.infer("cam", digits).facts
        os.kill(process.pid, signal.SIGTERM)
        said.read()
    assert process.end().code == 0
    assert (before["tribe_answered"], before["tribe_adapted"], before["tribe_clock"]) == ("source", False, 1)
    assert after["tribe_answered"] == "adapted"


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shadowed():
    tokens = [
        token("watcher", streams="a-", role="predict"),
        token("camera", streams="a-", role="learn"),
        token("owner", streams="a-", role="admin"),
        token("operator", streams="", role="admin"),
    ]
    with serving(Worker(small_fleet(shadow=True), model="small"), tokens=tokens) as found:
        yield found


def post(server, name, path):
    return web.post(server.url + path, headers={"authorization": f"Bearer {name}"})


def test_routes_say_who_answers_now_and_an_unknown_stream_is_refused(shadowed):
    with Client(shadowed.url, "small", token="owner") as client:
        source = client.predict(None, IMAGES)
        assert np.array_equal(client.predict("a-1", IMAGES), source)
        assert client.control("promote", "a-1")["shadow"] is False
        answer = client.infer("a-1", IMAGES)
        assert (answer.facts["tribe_answered"], answer.facts["tribe_adapted"]) == ("adapted", True)
        assert client.demote("a-1") == {}
        assert client.stream("a-1")["shadow"] is True
        with pytest.raises(ClientError, match="no stream"):
            client.promote("a-none")
    refused(web.post(f"{shadowed.url}/v1/promote?before=x", headers={"authorization": "Bearer owner"}), 400, "before")


def test_who_only_predicts_or_learns_changes_no_mode(shadowed):
    """Also not by what makes, ends or reads a stream; and nobody changes streams of others."""
    with Client(shadowed.url, "small", token="operator") as client:
        client.predict("a-2", IMAGES), client.predict("b-2", IMAGES)
    for name in ("watcher", "camera"):
        for action in ("promote", "demote"):
            refused(post(shadowed, name, f"/v1/streams/a-2/{action}"), 403, "role admin")
            refused(post(shadowed, name, f"/v1/{action}"), 403, "role admin")
    refused(post(shadowed, "owner", "/v1/streams/b-2/promote"), 403, "'b-2'")
    assert post(shadowed, "camera", "/v1/streams/a-2/end").status_code == 200
    answer = infer(shadowed, sequence_id="a-2", sequence_start=True, headers={"authorization": "Bearer camera"})
    assert answer.json()["parameters"]["tribe_answered"] == "source"
    answer = infer(shadowed, sequence_id="a-2", tribe_shadow=False, headers={"authorization": "Bearer watcher"})
    assert answer.json()["parameters"]["tribe_answered"] == "source"
    refused(web.post(f"{shadowed.url}/v1/promote"), 401, "token")


def test_all_streams_of_a_token_at_once(shadowed):
    with (
        Client(shadowed.url, "small", token="operator") as operator,
        Client(shadowed.url, "small", token="owner") as owner,
    ):
        for name in ("a-3", "a-4", "b-3"):
            operator.predict(name, IMAGES)
        operator.demote()
        assert owner.promote() == {}
        modes = {each["name"]: each["shadow"] for each in operator.streams()}
        assert all(shadow == name.startswith("b-") for name, shadow in modes.items())
        assert operator.demote() == {}
        assert all(each["shadow"] for each in operator.streams())


async def test_all_streams_are_also_those_that_are_stored_only(store, monkeypatch):
    """A page at a time; streams that are not open are opened, changed, stored and released."""
    monkeypatch.setattr("tribe.serve.controls.TOGETHER", 2)
    fleet = new_fleet(shadow=True)
    async with working(fleet, store) as worker:
        for name in "abcde":
            await worker.infer(name, batch(0))
        for name in "bcde":
            await worker.control("end", name)
        store.claim("d", "another", 100)
        user = Principal(Token("everybody", ""))
        pages, after = [], ""
        while after is not None:
            pages.append(await worker.control.set_all("promote", user, after))
            after = pages[-1]["after"]
        assert [page["changed"] for page in pages] == [["a", "b"], ["c"], ["e"]]
        assert pages[1]["failed"] == {"d": "another worker owns it"}
        assert [each["name"] for each in worker.streams()] == ["a"]
        shadow = {name: states.decode(store.read(name).blob).shadow for name in "abcde"}
    assert shadow == {"a": [], "b": [], "c": [], "d": [True], "e": []}


# -- a server under load, that is killed -------------------------------------------------------------------------------

KILLS = int(os.environ.get("TRIBE_KILLS", 5))
STREAMS = 4


class Site:
    """A server in a process of its own, which is killed and starts again on the same store."""

    def __init__(self, folder):
        self.folder, self.starts, self.process, self.url = folder, 0, None, None

    def start(self):
        policy = {"write_every": 0.05, "lease": 60, "renew": 1, "requests": 10_000}
        spec = {"place": str(self.folder), "shift": 100 * self.starts, "policy": policy}
        reader, writer = os.pipe()
        self.process = Process(HOST, json.dumps(spec), stdout=writer)
        os.close(writer)
        self.said = os.fdopen(reader)
        self.url, self.starts = f"http://127.0.0.1:{int(self.said.readline())}", self.starts + 1

    def end(self, number):
        self.url = None
        os.kill(self.process.pid, number)
        assert self.process.end().code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        self.said.close()


class Camera:
    """Sends the images of a stream one request after the other, each until it is answered, and notes the answers."""

    def __init__(self, site, name):
        self.site, self.name, self.answers, self.errors = site, name, [], []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            while not self.stop.is_set():
                self.send(f"{self.name}-{len(self.answers)}")
        except Exception as error:  # the test reads it: the thread must not hide it
            self.errors.append(error)

    def send(self, request_id):
        images, tries = images_of("small", request_id).numpy(), 0
        while True:
            began, url = time.monotonic(), self.site.url
            try:
                with Client(url, "small") as client:
                    logits, facts = client.infer(self.name, images, id=request_id)
            except (OSError, HTTPException, ValueError):  # killed, or not there yet
                tries += 1
                time.sleep(0.01)
                continue
            self.answers.append((request_id, logits, facts, began, time.monotonic(), tries))
            return


class Told:
    """When each stream was told to change its mode: from the call to its answer, in order."""

    def __init__(self, names):
        self.times = {name: [(0.0, 0.0, "source")] for name in names}  # they begin in shadow

    def tell(self, url, action, names, all_of_them=False):
        began = time.monotonic()
        with Client(url, "small") as client:
            for name in [None] if all_of_them else names:
                assert getattr(client, action)(name) == {}
        for name in names:
            self.times[name].append((began, time.monotonic(), "adapted" if action == "promote" else "source"))

    def expected(self, name, began, ended):
        """Which model a request may be answered by that was sent and answered at these times."""
        changes = self.times[name]
        last = max(i for i, (_, answered, _) in enumerate(changes) if answered <= began)
        return {changes[last][2]} | {mode for start, _, mode in changes[last + 1 :] if start <= ended}


def check_answers(fleet, camera, told):
    """Each answer is the one of its mode, bit for bit, by a replay of what the stream has learned."""
    states_ = [fleet.method.init(fleet.net, 1, stream_seed(camera.name))]
    found = set()
    for request_id, logits, facts, began, ended, tries in camera.answers:
        x, clock, answered = images_of("small", request_id), facts["tribe_clock"], facts["tribe_answered"]
        assert answered in told.expected(camera.name, began, ended)
        # A kill loses the last steps. A request whose answer it lost may have been learned all the same.
        assert tries or clock == len(states_)
        del states_[clock:]
        assert len(states_) == clock
        stepped, after = fleet.method.step(fleet.net, states_[-1], x[None])
        states_.append(after)
        own = [stepped[0], fleet.method.predict(fleet.net, after, x[None])[0]][: 1 + (tries > 0)]
        wanted = [fleet.predict_source(x)] if answered == "source" else own
        assert any(np.array_equal(logits, each.numpy()) for each in wanted)
        assert facts["tribe_adapted"] == (answered == "adapted") or tries
        if not torch.equal(wanted[0], (own if answered == "source" else [fleet.predict_source(x)])[0]):
            found.add(answered)  # the other model answers differently
    return states_, found


@pytest.mark.slow  # each server starts, and serves for a while
def test_promoted_and_demoted_under_load_and_killed_in_between_every_answer_is_that_of_its_mode():
    folder, draw = fast_folder(), random.Random(0)
    site, names = Site(folder), [f"cam{i}" for i in range(STREAMS)]
    site.start()
    told, cameras = Told(names), [Camera(site, name) for name in names]

    def wait(more):
        """Let every camera get some more answers."""
        goals = [len(camera.answers) + more for camera in cameras]
        while any(len(camera.answers) < goal for camera, goal in zip(cameras, goals, strict=True)):
            assert not any(camera.errors for camera in cameras), [camera.errors for camera in cameras]
            time.sleep(0.01)

    try:
        for number in range(KILLS + 1):
            for action in draw.sample(("promote", "demote", "promote"), 3):
                wait(5)
                everyone = draw.random() < 0.3
                told.tell(site.url, action, names if everyone else draw.sample(names, 2), everyone)
            if number < KILLS:
                site.end(signal.SIGKILL)  # at once after the answer
                site.start()
        wait(5)
    finally:
        for camera in cameras:
            camera.stop.set()
        for camera in cameras:
            camera.thread.join()
    site.end(signal.SIGTERM)
    fleet, both = small_fleet(), set()
    with contextlib.closing(SqliteStore(folder, now=lambda: time.time() + 100 * site.starts)) as store:
        for camera in cameras:
            assert not camera.errors
            learned, found = check_answers(fleet, camera, told)
            both |= found
            stored = store.read(camera.name)
            fleet.from_bytes("stored", stored.blob)
            assert fleet.digest("stored") == digest(learned[-1])
            assert fleet.in_shadow("stored") == (told.times[camera.name][-1][2] == "source")
    assert both == {"source", "adapted"}
    shutil.rmtree(folder)
