"""The worker on its event loop, with a real network and a real store: what is answered, learned, stored and lost."""

import asyncio
import contextlib
import random

import pytest
import torch
from replays import Guided, Paused, batch, kinds, new_fleet, replay, working

import tribe
from stores import Clock
from tribe.io.states import StateFileError
from tribe.serve.config import Policy
from tribe.serve.errors import NotOwner, Unavailable
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker
from tribe.streams import UnknownStream, stream_seed
from tribe.testing import small_network


@pytest.fixture
def store(tmp_path):
    kept = SqliteStore(tmp_path / "data")
    yield kept
    kept.close()


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_request_is_stepped_and_says_so():
    fleet = new_fleet()
    async with working(fleet) as worker:
        answers = [await worker.infer("cam", batch(seed)) for seed in range(3)]
    state = fleet.method.init(fleet.net, 1, stream_seed("cam"))
    for seed, answer in enumerate(answers):
        logits, state = fleet.method.step(fleet.net, state, batch(seed)[None])
        assert torch.equal(answer.logits, logits[0])
        assert (answer.adapted, answer.clock, answer.generation) == (True, seed + 1, None)
        assert answer.health["images"] == 2 * (seed + 1)
    assert fleet.digest("cam") == replay(fleet, "cam", [batch(seed) for seed in range(3)])


async def test_a_request_between_learning_steps_says_that_it_was_not_learned_from():
    fleet = tribe.fleet(small_network(), "tribe+rare", learn_every=2, h0=2.0, exact=True)
    async with working(fleet) as worker:
        answers = [await worker.infer("cam", batch(seed)) for seed in range(3)]
    assert [answer.adapted for answer in answers] == [True, False, True]
    assert [answer.clock for answer in answers] == [1, 2, 3]
    assert fleet.digest("cam") == replay(fleet, "cam", [batch(seed) for seed in range(3)])


async def test_a_request_without_a_stream_is_predicted_by_the_source_model():
    fleet = new_fleet()
    async with working(fleet) as worker:
        answers = await asyncio.gather(*(worker.infer(None, batch(seed, size)) for seed, size in enumerate((1, 2, 3))))
    for seed, answer in enumerate(answers):
        assert torch.allclose(answer.logits, fleet.predict_source(batch(seed, seed + 1)), atol=1e-6)
        assert answer[1:] == (False, None, None, None, "source", "1")
    assert fleet.names == []


async def test_a_request_that_only_predicts_changes_nothing():
    fleet = new_fleet()
    async with working(fleet) as worker:
        await worker.infer("cam", batch(0))
        before = fleet.digest("cam")
        answer = await worker.infer("cam", batch(1), learn=False)
    assert fleet.digest("cam") == before
    assert torch.equal(answer.logits, fleet.predict({"cam": batch(1)})["cam"])
    assert (answer.adapted, answer.clock) == (False, 1)


async def test_a_repeated_request_id_does_not_learn_twice():
    fleet = new_fleet()
    async with working(fleet) as worker:
        together = [worker.infer("cam", batch(0), request_id="7") for _ in range(3)]  # also at the same time
        answers = [*await asyncio.gather(*together), await worker.infer("cam", batch(0), request_id="7")]
    assert [answer.adapted for answer in answers].count(True) == 1
    assert fleet.digest("cam") == replay(fleet, "cam", [batch(0)])


async def test_a_request_that_fails_harms_no_other():
    fleet = new_fleet()
    async with working(fleet) as worker:
        await worker.infer("bad", batch(0))
        await worker.infer("good", batch(0))
        wrong = worker.infer("bad", torch.rand(2, 5, 8, 8))
        error, answer = await asyncio.gather(wrong, worker.infer("good", batch(1)), return_exceptions=True)
    assert isinstance(error, Exception)
    assert answer.adapted
    assert fleet.digest("bad") == replay(fleet, "bad", [batch(0)])


async def test_a_worker_that_stops_refuses_requests():
    async with working() as worker:
        await worker.infer("cam", batch(0))
    with pytest.raises(Unavailable, match="stops"):
        await worker.infer("cam", batch(0))


# -- latency ----------------------------------------------------------------------------------------------------------


async def test_under_load_images_are_predicted_by_the_last_state_and_counted():
    fleet = Paused()
    async with working(fleet, policy=Policy(waiting=4)) as worker:
        for name in ("cam", "a", "b", "c"):  # all are open
            await worker.infer(name, batch(0))
        fleet.go.clear()
        asked = [asyncio.create_task(worker.infer(name, batch(1))) for name in ("a", "b", "c")]  # a is stepped
        await asyncio.sleep(0)
        try:
            hurried = await worker.infer("cam", batch(1))  # and two wait: half of what may
            assert not hurried.adapted
            assert torch.equal(hurried.logits, fleet.predict({"cam": batch(1)})["cam"])
            assert 'tribe_unlearned_images_total{model="tribe",version="1"} 2.0' in worker.metrics_text()
        finally:
            fleet.go.set()
        assert all(answer.adapted for answer in await asyncio.gather(*asked))
    assert fleet.digest("cam") == replay(fleet, "cam", [batch(0)])


async def test_a_prediction_does_not_wait_for_a_running_step_and_is_learned_in_order():
    fleet, clock = Paused(), Clock()
    async with working(fleet, clock=clock) as worker:
        for _ in range(20):
            worker.scheduler.times.observe("step", 2, 1.0)
        fleet.go.clear()
        first = asyncio.create_task(worker.infer("cam", batch(0)))
        await asyncio.sleep(0)
        hurried = await worker.infer("cam", batch(1), deadline=clock() + 0.5)
        later = asyncio.create_task(worker.infer("cam", batch(2)))
        await asyncio.sleep(0)
        assert not first.done()
        fleet.go.set()
        first, later = await first, await later
    assert (hurried.adapted, hurried.clock) == (False, 0)
    assert (first.clock, later.clock) == (1, 3)
    assert fleet.digest("cam") == replay(fleet, "cam", [batch(0), batch(1), batch(2)])


async def test_a_request_is_refused_at_its_deadline_even_if_its_step_still_runs():
    fleet, clock = Paused(), Clock()
    async with working(fleet, clock=clock) as worker:
        fleet.go.clear()
        asked = asyncio.create_task(worker.infer("cam", batch(0), request_id="7", deadline=clock() + 1.0))
        while worker.scheduler.stepping is None:
            await asyncio.sleep(0)
        clock.time += 1.0
        worker.pump()
        with pytest.raises(Unavailable, match="within"):
            await asked
        fleet.go.set()
        again = await worker.infer("cam", batch(0), request_id="7")
    assert (again.adapted, fleet.clock("cam")) == (False, 1)  # the step was taken: a retry does not learn again


# -- what is stored ---------------------------------------------------------------------------------------------------


async def test_every_state_equals_the_replay_of_what_it_learned_and_a_restart_goes_on_from_there(store):
    draw, fleets = random.Random(0), [new_fleet(), new_fleet()]
    load = [(f"cam{draw.randrange(16)}", i, draw.randrange(1, 4), draw.randrange(4)) for i in range(80)]

    async def send(worker, stream, seed, size, rest):
        for _ in range(rest):
            await asyncio.sleep(0)  # odd arrival times
        await worker.infer(stream, batch(seed, size), request_id=str(seed))

    for fleet, part in zip(fleets, (load[:40], load[40:]), strict=True):
        async with working(fleet, store) as worker:
            await asyncio.gather(*(send(worker, *each) for each in part))
            await worker.write_round()
    for name in {stream for stream, *_ in load}:
        stored = store.read(name)
        sizes = {str(seed): size for _, seed, size, _ in load}
        assert set(stored.requests) == {str(seed) for stream, seed, *_ in load if stream == name}
        fleets[1].from_bytes(name, stored.blob)
        expected = replay(fleets[1], name, [batch(int(seed), sizes[seed]) for seed in stored.requests])
        assert fleets[1].digest(name) == expected
        assert stored.clock == len(stored.requests)
        assert not store.entry(name).held


async def test_the_oldest_change_is_stored_first_up_to_the_bytes_of_a_round(store):
    clock = Clock()
    one_at_a_time = Policy(max_batch_delay=0, write_every=1000, renew=1, lease=1000, idle=1000, write_bytes=1)
    async with working(store=store, policy=one_at_a_time, clock=clock) as worker:
        for name in ("c", "a", "b"):
            clock.time += 1
            await worker.infer(name, batch(0))
        clock.time += 1
        stored = []
        for _ in range(3):
            await worker.write_round()
            stored.append([name for name in "abc" if store.read(name) is not None])
        assert worker.stream("b")["lag"] == 0
    assert stored == [["c"], ["a", "c"], ["a", "b", "c"]]


async def test_streams_are_not_written_one_by_one_each_after_a_step_of_its_own(store):
    fleet, names, captured = Paused(), [f"cam{i}" for i in range(6)], []
    plain = fleet.fleet.to_bytes
    fleet.to_bytes = lambda name: captured.append(name) or plain(name)
    async with working(fleet, store) as worker:
        await asyncio.gather(*(worker.infer(name, batch(0)) for name in names))
        fleet.go.clear()
        asked = asyncio.create_task(worker.infer("cam0", batch(1)))
        while worker.scheduler.stepping is None:
            await asyncio.sleep(0)
        writing = asyncio.create_task(worker.sessions.writer._write(list(worker.sessions.by_name.values())))
        for _ in range(10**6):  # cam0 is the first, and is being stepped; the others need not wait for that
            if len(captured) == 5:
                break
            await asyncio.sleep(0)
        assert sorted(captured) == names[1:]
        fleet.go.set()
        await asyncio.gather(asked, writing)
    assert store.read("cam0").clock == 2


async def test_a_store_that_fails_stops_nothing_until_too_much_would_be_lost(store):
    failing, clock, fleet = Guided(store), Clock(), new_fleet()
    async with working(fleet, failing, clock=clock) as worker:
        await worker.infer("cam", batch(0))
        failing.fails = {"all"}
        clock.time += 1
        await worker.write_round()
        during = await worker.infer("cam", batch(1))
        assert during.adapted
        assert "tribe_persist_lag_seconds" in worker.metrics_text()
        assert worker.stream("cam")["lag"] == 1.0
        clock.time += 31  # past Policy.lag
        late = await worker.infer("cam", batch(2))
        assert (late.adapted, worker.stream("cam")["state"]) == (False, "lag")
        source = await worker.infer("new", batch(3))  # nobody can say who owns it
        assert (source.adapted, worker.stream("new")["state"]) == (False, "unreachable")
        failing.fails = set()
        clock.time += 10
        await worker.write_round()
        after = await worker.infer("cam", batch(4))
        found = await worker.infer("new", batch(3))
        assert found.adapted
        seen = kinds(worker)
    assert (after.adapted, after.clock) == (True, 3)
    assert seen.count("store-down") == 1
    assert seen.count("store-up") == 1
    assert store.read("cam").clock == 3


# -- ownership --------------------------------------------------------------------------------------------------------


class TwoWorkers:
    """Two workers on one store, with one clock for both and for the store."""

    def __init__(self, tmp_path):
        self.clock = Clock()
        self.store = SqliteStore(tmp_path / "data", now=self.clock)
        self.fleets = new_fleet(), new_fleet()

    @contextlib.asynccontextmanager
    async def workers(self):
        policy = Policy(max_batch_delay=0, write_every=1000, renew=2, margin=2, lease=10, idle=1000, staleness=1)
        options = {"policy": policy, "clock": self.clock}
        pair = [Worker(f, self.store, owner=n, **options) for f, n in zip(self.fleets, ("one", "two"), strict=True)]
        for worker in pair:
            worker._accepting = True  # without the tasks that act by themselves
        try:
            yield pair
            for worker in pair:
                await worker.stop()
        finally:
            self.store.close()


async def test_a_worker_that_does_not_own_a_stream_answers_from_the_last_stored_state(tmp_path):
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, two):
        await one.infer("cam", batch(0))
        before = await two.infer("cam", batch(9))  # nothing is stored yet: the source model
        await one.write_round()
        world.clock.time += 1.5
        first = await two.infer("cam", batch(9))
        await one.infer("cam", batch(1))
        await one.write_round()
        soon = await two.infer("cam", batch(9))  # within the staleness
        world.clock.time += 1.5
        second = await two.infer("cam", batch(9))
        with pytest.raises(NotOwner, match="another"):
            await two.control("reset", "cam")
        answers = before, first, soon, second
    assert [answer.adapted for answer in answers] == [False] * 4
    assert [answer.clock for answer in answers] == [None, 1, 1, 2]
    assert answers[3].generation == 1


async def test_a_worker_whose_lease_was_not_renewed_only_predicts_until_it_is(tmp_path):
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, _):
        answers = [await one.infer("cam", batch(0))]
        world.clock.time += 8.5  # lease - margin is 8
        answers.append(await one.infer("cam", batch(1)))
        assert one.stream("cam")["state"] == "lease"
        await one.sessions.renew()
        answers.append(await one.infer("cam", batch(2)))
    assert [(answer.adapted, answer.clock) for answer in answers] == [(True, 1), (False, 1), (True, 2)]


async def test_a_stream_that_another_worker_has_claimed_is_dropped_and_its_write_is_fenced(tmp_path):
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, two):
        await one.infer("cam", batch(0))
        await one.write_round()
        await one.infer("cam", batch(1))  # never stored
        world.clock.time += 11
        taken = await two.infer("cam", batch(2))
        assert (taken.adapted, taken.clock, taken.generation) == (True, 2, 2)
        await one.write_round()
        assert one.metrics.total("tribe_fenced_writes_total") == 1
        assert one.streams() == []
        assert [event.kind for event in one.log.kept][-1] == "fenced"
        followed = await one.infer("cam", batch(3))
        assert (followed.adapted, followed.clock, followed.generation) == (False, 1, 2)


async def test_a_renewal_finds_lost_streams_and_their_waiting_requests_are_placed_again(tmp_path):
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, two):
        await one.infer("cam", batch(0))
        await one.write_round()
        world.clock.time += 11
        await two.infer("cam", batch(1))
        async with one.runtime.hold("cam"):
            waiting = asyncio.create_task(one.infer("cam", batch(2)))
            await asyncio.sleep(0)
            losing = asyncio.create_task(one.sessions.renew())
            while one.sessions.by_name["cam"].claim is not None:
                await asyncio.sleep(0)
        await losing
        answer = await waiting
    assert (answer.adapted, answer.clock) == (False, 1)


async def test_a_stream_that_gets_no_requests_here_learns_at_the_worker_that_gets_them(tmp_path):
    """After a rolling restart streams learned nothing for 300 s: the worker they had gone to renewed its claims."""
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, two):
        await one.infer("cam", batch(0))
        await one.write_round()
        answers = []
        for i in range(8):
            world.clock.time += 2.5
            await one.sessions.renew()
            answers.append(await two.infer("cam", batch(1 + i)))
        assert one.stream("cam")["state"] == "resting"
        assert [answer.adapted for answer in answers] == [False] * 5 + [True] * 3
        assert answers[-1].clock == 4
        back = await one.infer("cam", batch(9))
        assert (back.adapted, one.stream("cam")["state"]) == (False, "followed")
        assert "fenced" not in kinds(one)


async def test_a_slow_camera_learns_from_each_image_although_its_lease_ends_between_them(tmp_path):
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, _):
        for i in range(3):
            assert (await one.infer("cam", batch(i))).adapted
            await one.write_round()
            for _ in range(20):
                world.clock.time += 3
                await one.sessions.renew()
            assert one.stream("cam")["state"] == "resting"
        await one.control("freeze", "cam")
        assert (one.stream("cam")["clock"], one.stream("cam")["generation"]) == (3, 1)


async def test_a_stream_that_is_not_stored_yet_is_renewed_without_requests(tmp_path):
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, two):
        await one.infer("cam", batch(0))
        for _ in range(10):
            world.clock.time += 3
            await one.sessions.renew()
        assert not (await two.infer("cam", batch(1))).adapted


async def test_a_released_stream_is_taken_over_at_once(tmp_path):
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, two):
        await one.infer("cam", batch(0), request_id="7")
        assert (await one.control("end", "cam"))["state"] == "released"
        with pytest.raises(UnknownStream):
            one.stream("cam")
        repeated = await two.infer("cam", batch(0), request_id="7")
        answer = await two.infer("cam", batch(1))
    assert (repeated.adapted, repeated.clock) == (False, 1)
    assert (answer.adapted, answer.clock, answer.generation) == (True, 2, 2)


async def test_an_idle_stream_is_stored_and_released(tmp_path):
    world = TwoWorkers(tmp_path)
    async with world.workers() as (one, _):
        await one.infer("cam", batch(0))
        world.clock.time += 1001
        await one.sessions.release_idle()
        assert one.streams() == []
        assert world.fleets[0].names == []
        assert (world.store.read("cam").clock, world.store.entry("cam").owner) == (1, None)


# -- control ----------------------------------------------------------------------------------------------------------


async def test_a_stream_is_frozen_reset_and_rolled_back_and_its_state_is_stored(store):
    fleet = new_fleet()
    async with working(fleet, store) as worker:
        await worker.infer("cam", batch(0))
        kept = await worker.control("snapshot", "cam")
        assert kept["snapshot"] == 1
        await worker.infer("cam", batch(1))
        assert (await worker.control("freeze", "cam"))["state"] == "frozen"
        assert not (await worker.infer("cam", batch(2))).adapted
        await worker.control("unfreeze", "cam")
        back = await worker.control("rollback", "cam")
        assert (back["clock"], back["generation"]) == (1, 2)  # an earlier clock needs a new generation
        assert store.read("cam").clock == 1
        assert fleet.digest("cam") == replay(fleet, "cam", [batch(0)])
        assert (await worker.control("reset", "cam"))["clock"] == 0
        await worker.infer("cam", batch(3))
        with pytest.raises(UnknownStream, match="snapshot"):
            await worker.control("rollback", "cam", to=5)
    fleet.from_bytes("cam", store.read("cam").blob)
    assert fleet.digest("cam") == replay(fleet, "cam", [batch(3)])


async def test_a_state_is_read_and_replaced_and_a_wrong_one_changes_nothing(store):
    fleet = new_fleet()
    async with working(fleet, store) as worker:
        await worker.infer("cam", batch(0))
        data = await worker.control.get_state("cam")
        made = await worker.control("put_state", "copy", data=data)
        before = fleet.digest("cam")
        with pytest.raises(StateFileError, match="cam"):
            await worker.control("put_state", "cam", data=b"no state")
        assert fleet.digest("cam") == before
        await worker.control("end", "cam")
        fleet.from_bytes("as stored", await worker.control.get_state("cam"))
        assert fleet.digest("as stored") == before
        with pytest.raises(UnknownStream):
            await worker.control.get_state("other")
        digest = fleet.digest("copy")
    assert (made["clock"], digest) == (1, replay(fleet, "cam", [batch(0)]))


async def test_the_source_predicts_for_a_stored_state_of_another_method_which_stays(store):
    """Known cameras got 409 after any change of weights or settings, and nothing was logged."""
    async with working(tribe.fleet(small_network(), "tent"), store) as worker:
        await worker.infer("cam", batch(0))
    before, fleet = store.read("cam"), new_fleet()
    async with working(fleet, store) as worker:
        await worker.runtime.finished()
        at_start = [event for event in worker.log.kept if event.kind == "unfit"]
        assert [event.stream for event in at_start] == [None]
        assert "tent" in at_start[0].words
        for _ in range(3):
            result = await worker.infer("cam", batch(0))
            assert (result.adapted, result.clock) == (False, None)
            assert torch.equal(result.logits, fleet.predict_source(batch(0)))
        assert worker.stream("cam")["state"] == "unfit"
        assert [event.stream for event in worker.log.kept if event.kind == "unfit"] == [None, "cam"]
        assert 'state="unfit"' in worker.metrics_text()
        assert not store.entry("cam").held  # others may have it
        with pytest.raises(NotOwner, match="fit"):
            await worker.control("reset", "cam")
        assert await worker.control.get_state("cam") == before.blob
    assert store.read("cam").blob == before.blob
    async with working(tribe.fleet(small_network(), "tent"), store) as worker:
        assert (await worker.infer("cam", batch(1))).clock == 2


async def test_a_stream_whose_stored_state_does_not_fit_begins_anew_when_it_is_deleted(store):
    async with working(tribe.fleet(small_network(), "tent"), store) as worker:
        await worker.infer("cam", batch(0))
    async with working(store=store) as worker:
        assert not (await worker.infer("cam", batch(0))).adapted
        await worker.control("drop", "cam")
        assert (await worker.infer("cam", batch(0))).clock == 1


async def test_the_source_predicts_where_every_stored_state_is_damaged(store, tmp_path):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
    blobs = list(tmp_path.rglob("*.state"))
    assert blobs
    for blob in blobs:
        blob.write_bytes(b"x" * blob.stat().st_size)
    async with working(store=store) as worker:
        assert not (await worker.infer("cam", batch(0))).adapted
        assert "damaged" in next(event.words for event in worker.log.kept if event.stream == "cam")
        assert not store.entry("cam").held
        await worker.control("drop", "cam")
        assert (await worker.infer("cam", batch(0))).adapted


async def test_the_source_predicts_while_an_owner_with_another_method_learns(store):
    """A rolling change: a worker with the new method follows one with the old method, and takes over its own kind."""
    async with working(tribe.fleet(small_network(), "tent"), store) as old, working(store=store) as new:
        await old.infer("cam", batch(0))
        await old.write_round()
        assert not (await new.infer("cam", batch(0))).adapted
        assert new.stream("cam")["state"] == "unfit"
        assert (await old.infer("cam", batch(1))).adapted


async def test_a_canceled_request_leaves_nothing_behind(store):
    fleet = Paused()
    async with working(fleet, store) as worker:
        opening = asyncio.create_task(worker.infer("cam", batch(0)))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        assert worker.scheduler.waiting == 0
        fleet.go.clear()
        stepping = asyncio.create_task(worker.infer("cam", batch(1)))
        while worker.scheduler.stepping is None:
            await asyncio.sleep(0)
        stepping.cancel()
        await asyncio.wait([stepping])
        assert worker.scheduler.waiting == 0
        fleet.go.set()
        assert (await worker.infer("cam", batch(2))).clock == 2  # the step was taken


async def test_a_dropped_stream_starts_anew(store):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
        await worker.write_round()
        await worker.control("drop", "cam")
        assert store.entry("cam") is None
        with pytest.raises(UnknownStream):
            await worker.control("reset", "cam")
        answer = await worker.infer("cam", batch(1))
    assert (answer.clock, answer.generation) == (1, 2)


async def test_an_unknown_action_and_a_wrong_name_are_refused():
    async with working() as worker:
        with pytest.raises(ValueError, match="explode"):
            await worker.control("explode", "cam")
        with pytest.raises(ValueError, match="name"):
            await worker.infer("a\nb", batch(0))


# -- watching ---------------------------------------------------------------------------------------------------------


async def test_metrics_are_what_prometheus_reads(store):
    parser = pytest.importorskip("prometheus_client.parser")
    async with working(store=store, model="digits") as worker:
        await worker.infer("cam:1", batch(0))
        await worker.infer(None, batch(0))
        await worker.write_round()
        text = worker.metrics_text(streams=True)
    samples = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, *sorted(sample.labels.values())] = sample.value
    common = ("1", "digits")
    assert samples["nv_inference_request_success", *common] == 2
    assert samples["nv_inference_count", *common] == 4
    assert samples["tribe_requests_total", "1", "adapted", "digits"] == 1
    assert samples["tribe_requests_total", "1", "digits", "source"] == 1
    assert samples["tribe_step_seconds_count", *common] == 1
    assert samples["tribe_writes_total", *common] == 1
    assert samples["tribe_fenced_writes_total", *common] == 0
    assert samples["tribe_streams", "1", "digits", "learning"] == 1
    assert samples["tribe_stream_clock", "1", "cam:1", "digits"] == 1
