"""The worker when something ends in the middle: the store fails, a client goes away, a state cannot be stored."""

import asyncio

import pytest
from replays import POLICY, Guided, batch, kinds, new_fleet, replay, working
from small_server import MODEL

import tribe
from tribe.io.states import StateFileError
from tribe.serve.errors import NotStored, Unavailable
from tribe.serve.protocol import InferRequest
from tribe.serve.service import Service
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker
from tribe.testing import small_network


@pytest.fixture
def store(tmp_path):
    kept = SqliteStore(tmp_path / "data")
    guided = Guided(kept)
    yield guided
    guided.go.set()
    kept.close()


async def until(event):
    while not event.is_set():
        await asyncio.sleep(0)


async def cancel_in(worker, name, doing):
    """Cancel something while it waits for a call of the store; then let the call go on, and all that follows."""
    worker.store.wait_in(name)
    task = asyncio.create_task(doing)
    await until(worker.store.reached)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    worker.store.go.set()
    await worker.runtime.finished()


# -- the store fails --------------------------------------------------------------------------------------------------


async def test_a_stream_that_could_not_be_released_learns_again_when_the_store_answers(store):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
        store.fails = {"release"}
        with pytest.raises(Unavailable, match="store"):
            await worker.control("end", "cam")
        during = await worker.infer("cam", batch(1))
        assert (during.adapted, during.clock, worker.stream("cam")["state"]) == (False, 1, "lease")
        store.fails = set()
        await worker.sessions.renew()
        after = await worker.infer("cam", batch(2))
        assert (after.adapted, after.clock, after.generation) == (True, 2, 1)
        assert kinds(worker) == ["opened", "store-down"]
        assert (await worker.control("end", "cam"))["state"] == "released"
    assert (store.read("cam").clock, store.entry("cam").owner) == (2, None)


async def test_a_stream_that_was_released_although_the_store_failed_is_opened_again_and_loses_nothing(store):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
        store.fails_after = {"release"}
        with pytest.raises(Unavailable, match="store"):
            await worker.control("end", "cam")
        store.fails_after = set()
        assert not (await worker.infer("cam", batch(1))).adapted
        await worker.sessions.renew()  # says that the claim has ended
        after = await worker.infer("cam", batch(2))
    assert (after.adapted, after.clock, after.generation) == (True, 2, 2)


@pytest.mark.parametrize("how", ["fails", "fails_after"])
@pytest.mark.parametrize("call", ["release", "claim"])
async def test_a_reset_that_fails_in_the_store_changes_nothing_and_what_would_be_lost_is_not_learned(store, call, how):
    fleet = new_fleet()
    async with working(fleet, store) as worker:
        await worker.infer("cam", batch(0))
        setattr(store, how, {call})
        with pytest.raises(Unavailable, match="store"):
            await worker.control("reset", "cam")
        setattr(store, how, set())
        assert fleet.digest("cam") == replay(fleet, "cam", [batch(0)])
        assert not (await worker.infer("cam", batch(1))).adapted  # it is unknown whether the claim holds
        await worker.sessions.renew()
        after = await worker.infer("cam", batch(2))
    assert (after.adapted, after.clock) == (True, 2)
    fleet.from_bytes("cam", store.read("cam").blob)
    assert fleet.digest("cam") == replay(fleet, "cam", [batch(0), batch(2)])


@pytest.mark.parametrize("how", ["fails", "fails_after"])
async def test_a_stream_that_could_not_be_deleted_is_deleted_or_goes_on_when_the_store_answers(store, how):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
        await worker.write_round()
        setattr(store, how, {"delete"})
        with pytest.raises(Unavailable, match="store"):
            await worker.control("drop", "cam")
        setattr(store, how, set())
        assert not (await worker.infer("cam", batch(1))).adapted
        await worker.sessions.renew()
        after = await worker.infer("cam", batch(2))
    assert (after.adapted, after.clock) == (True, 2 if how == "fails" else 1)


@pytest.mark.parametrize("call", ["write", "release"])
async def test_the_last_request_of_a_stream_is_answered_although_the_stream_cannot_be_released(store, call):
    """A 503 would say that nothing was learned."""
    async with working(store=store) as worker:
        service = Service(worker, MODEL)
        service.ready, anyone = True, service.access.identify(None)
        store.fails = {call}
        request = InferRequest(batch(0), stream="cam", id="7", end=True)
        answer = await service.infer(request, anyone, worker.clock())
        assert (answer.adapted, answer.clock) == (True, 1)
        with pytest.raises(Unavailable, match="store"):
            await worker.control("end", "cam")
        store.fails = set()
        await worker.sessions.renew()
        repeated = await service.infer(request, anyone, worker.clock())
        assert (repeated.adapted, repeated.clock) == (False, 1)
        assert worker.streams() == []
    assert store.read("cam").requests == ("7",)


# -- a client goes away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "release"])
async def test_a_stream_whose_end_was_cancelled_is_released_and_learns_again(store, call):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
        await cancel_in(worker, call, worker.control("end", "cam"))
        assert worker.streams() == []
        assert store.entry("cam").owner is None
        after = await worker.infer("cam", batch(1))
    assert (after.adapted, after.clock, after.generation) == (True, 2, 2)


@pytest.mark.parametrize("call", ["write", "release", "claim"])
async def test_a_cancelled_reset_is_made_and_the_stream_is_not_lost(store, call):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
        await cancel_in(worker, call, worker.control("reset", "cam"))
        assert (store.read("cam").clock, store.entry("cam").generation) == (0, 2)
        after = await worker.infer("cam", batch(1))
        await worker.sessions.renew()
        assert kinds(worker) == ["opened", "reset"]
    assert (after.adapted, after.clock, after.generation) == (True, 1, 2)
    assert store.read("cam").clock == 1


async def test_what_fails_after_its_client_has_gone_is_logged(store, caplog):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
        store.fails = {"release"}
        await cancel_in(worker, "release", worker.control("end", "cam"))
        store.fails = set()
        await worker.sessions.renew()
        assert (await worker.infer("cam", batch(1))).adapted
    assert "the store fails" in caplog.text
    assert "the disk is full" in caplog.text, "the log has the reason"


async def test_an_idle_stream_is_released_once_although_the_server_stops_meanwhile(store):
    async with working(store=store) as worker:
        await worker.infer("cam", batch(0))
        await worker.write_round()
        worker.sessions.by_name["cam"].used -= 1001
        await cancel_in(worker, "release", worker.sessions.release_idle())
        assert kinds(worker) == ["opened", "released"]


@pytest.mark.parametrize("gone", ["cancelled", "late"])
async def test_a_request_that_has_ended_while_its_stream_was_opened_again_does_not_wait_for_ever(store, gone):
    now = [0.0]
    async with working(store=store, clock=lambda: now[0]) as worker:
        await worker.infer("cam", batch(0))
        async with worker.runtime.hold("cam"):
            asked = asyncio.create_task(worker.infer("cam", batch(1), deadline=1000.0))
            while not worker.scheduler.waiting:
                await asyncio.sleep(0)
            losing = asyncio.create_task(worker.sessions.lose(worker.sessions.by_name["cam"], "another has claimed it"))
            await asyncio.sleep(0)
            store.wait_in("entry")
        await losing
        await until(store.reached)  # the stream of the request is opened again
        if gone == "cancelled":
            asked.cancel()
        else:
            now[0] = 1000.0
            worker.pump()
        await asyncio.wait([asked])
        store.go.set()
        await worker.runtime.finished()
        assert worker.scheduler.waiting == 0
        assert not worker._is_busy(None)


async def test_a_request_whose_stream_is_being_opened_is_answered_before_the_worker_stops(store):
    async with working(store=store) as worker:
        store.wait_in("entry")
        asked = asyncio.create_task(worker.infer("cam", batch(0)))
        await until(store.reached)
        stopping = asyncio.create_task(worker.stop())
        await asyncio.sleep(0)
        store.go.set()
        await stopping
        assert (await asked).adapted
    assert (store.read("cam").clock, store.entry("cam").owner) == (1, None)


# -- a state that cannot be stored ------------------------------------------------------------------------------------


def new_fleet_with_bad(*names):
    """A fleet that cannot turn the states of some streams into bytes once they have learned."""
    fleet = new_fleet()
    plain = fleet.to_bytes

    def to_bytes(name):
        if name in names and fleet.clock(name):
            raise StateFileError("the state is not finite")
        return plain(name)

    fleet.to_bytes = to_bytes
    return fleet


async def test_a_state_that_cannot_be_stored_keeps_no_other_stream_from_being_stored_when_the_worker_stops(store):
    async with working(new_fleet_with_bad("a"), store) as worker:
        for name in ("a", "b", "c"):
            await worker.infer(name, batch(0))
    assert [store.read(name) and store.read(name).clock for name in "abc"] == [None, 1, 1]
    assert [store.entry(name).owner for name in "bc"] == [None, None]
    assert [event.stream for event in worker.log.kept if event.kind == "not-stored"] == ["a", "a"]  # tried, given up
    assert all(thread._shutdown for thread in worker.runtime.threads.values())


async def test_a_state_that_cannot_be_stored_keeps_no_idle_stream_from_being_released(store):
    async with working(new_fleet_with_bad("a"), store) as worker:
        for name in ("a", "b"):
            await worker.infer(name, batch(0))
            worker.sessions.by_name[name].used -= 1001
        for _ in range(2):
            await worker.sessions.release_idle()
        assert [each["name"] for each in worker.streams()] == ["a"]
        assert kinds(worker).count("not-stored") == 1
        with pytest.raises(NotStored, match="finite"):
            await worker.control("end", "a")


async def test_a_stream_whose_state_cannot_be_stored_can_be_reset(store):
    async with working(new_fleet_with_bad("a"), store) as worker:
        await worker.infer("a", batch(0))
        assert (await worker.control("reset", "a"))["clock"] == 0
        assert (await worker.control("end", "a"))["state"] == "released"
    assert store.read("a").clock == 0


# -- a report that cannot be read --------------------------------------------------------------------------------------


async def test_a_step_that_is_committed_is_not_an_error_although_its_report_cannot_be_read(store):
    """An error would make the client send the images again, and the stream would learn from them twice."""
    fleet, broken = new_fleet(), []
    plain = fleet.report_many

    def report_many(names):
        if set(broken) & set(names):
            raise RuntimeError("the report is broken")
        return plain(names)

    fleet.report_many = report_many
    async with working(fleet, store) as worker:
        await worker.infer("a", batch(0))
        broken.append("a")
        answers = await asyncio.gather(*(worker.infer(name, batch(1), request_id="7") for name in ("a", "b")))
        broken.clear()
        a, b, again = [*answers, await worker.infer("a", batch(1), request_id="7")]
    assert [(answer.adapted, answer.clock) for answer in (a, b, again)] == [(True, 2), (True, 1), (False, 2)]
    fleet.from_bytes("a", store.read("a").blob)
    assert fleet.digest("a") == replay(fleet, "a", [batch(0), batch(1)])


# -- which requests a state has learned -------------------------------------------------------------------------------


async def test_a_rollback_returns_to_the_request_ids_of_the_snapshot(store):
    fleet = new_fleet()
    async with working(fleet, store) as worker:
        await worker.infer("cam", batch(1), request_id="r1")
        await worker.control("snapshot", "cam")
        await worker.infer("cam", batch(2), request_id="r2")
        await worker.control("rollback", "cam")
        assert (store.read("cam").clock, store.read("cam").requests) == (1, ("r1",))
        known = await worker.infer("cam", batch(1), request_id="r1")
        again = await worker.infer("cam", batch(2), request_id="r2")
        assert (known.adapted, again.adapted, again.clock) == (False, True, 2)
        await worker.control("rollback", "cam")  # what was learned since has not changed the snapshot
        assert store.read("cam").requests == ("r1",)


@pytest.mark.parametrize("action", ["reset", "put_state"])
async def test_a_state_that_is_replaced_begins_without_request_ids(store, action):
    """A file does not say which requests it has learned, so the ids are those that the stream has learned since."""
    fleet = new_fleet()
    async with working(fleet, store) as worker:
        await worker.infer("cam", batch(1), request_id="r1")
        data = {"data": await worker.control.get_state("cam")} if action == "put_state" else {}
        await worker.infer("cam", batch(2), request_id="r2")
        await worker.control(action, "cam", **data)
        assert (store.read("cam").clock, store.read("cam").requests) == (len(data), ())
        again = await worker.infer("cam", batch(2), request_id="r2")
    before = [batch(1)] if action == "put_state" else []
    assert (again.adapted, again.clock) == (True, len(before) + 1)
    assert store.read("cam").requests == ("r2",)
    fleet.from_bytes("cam", store.read("cam").blob)
    assert fleet.digest("cam") == replay(fleet, "cam", [*before, batch(2)])


async def test_a_stream_that_its_owner_has_deleted_begins_without_request_ids(store):
    now = [100.0]
    async with working(store=store, clock=lambda: now[0]) as worker:
        owner = Worker(new_fleet(), store, policy=POLICY, owner="another", clock=lambda: now[0])
        owner._accepting = True
        await owner.infer("cam", batch(0), request_id="r1")
        await owner.write_round()
        followed = await worker.infer("cam", batch(0), request_id="r1")
        await owner.control("drop", "cam")
        await owner.stop()
        now[0] += 1.5  # past the staleness
        again = await worker.infer("cam", batch(0), request_id="r1")
    assert (followed.adapted, followed.clock) == (False, 1)
    assert (again.adapted, again.clock) == (True, 1)


# -- a wrong file -----------------------------------------------------------------------------------------------------


async def test_a_wrong_state_for_a_new_name_leaves_nothing_behind(store):
    fleet, other = new_fleet(), tribe.fleet(small_network(), "tent")
    other({"cam": batch(0)})
    async with working(fleet, store) as worker:
        for wrong, words in ((b"no state", "stream 'new'"), (other.to_bytes("cam"), "tent")):
            with pytest.raises(StateFileError, match=words):
                await worker.control("put_state", "new", data=wrong)
        assert (worker.streams(), kinds(worker), fleet.names) == ([], [], [])
        assert store.list() == []
        first = await worker.infer("new", batch(0))
        with pytest.raises(StateFileError):
            await worker.control("put_state", "new", data=b"no state")
        second = await worker.infer("new", batch(1))
    assert (first.generation, second.generation, second.clock) == (1, 1, 2)
