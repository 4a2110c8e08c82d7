"""Versions of a network in one worker: addressed, moved, back bit for bit, by share, collected, and on trial."""

import asyncio
import contextlib

import pytest
import torch
from replays import POLICY, Guided, batch, kinds, working
from torch import nn
from version_networks import fleet_of, tuned_network, versions_of

import tribe
from stores import Clock
from tribe.core.backbone import Backbone
from tribe.core.state import digest as digest_of
from tribe.core.state import leaves
from tribe.io.states import StateFileError
from tribe.serve.errors import Conflict, NotFound, Unavailable, UnknownStream
from tribe.serve.store import BEFORE, UNDONE, StoreDown
from tribe.serve.versions import FAR, Versions, build_versions, carried, is_in_share, network_distance
from tribe.testing import small_network
from watching import calibration_of, pictures


def source_of(version, x):
    return fleet_of(version).predict_source(x)


def digest(worker, stream="cam"):
    """The version of a stream and a hash of its whole state."""
    version = worker.fleet.version_of(stream)
    return version, worker.fleet.fleets[version].digest(stream)


async def learned(worker, stream="cam", count=3, first=0):
    for i in range(first, first + count):
        await worker.infer(stream, batch(i), request_id=f"r{i}")


# -- what versions are ------------------------------------------------------------------------------------------------


def test_versions_are_of_one_design_with_names_and_weights_of_their_own():
    net = small_network()
    with pytest.raises(ValueError, match="same weights"):
        Versions({"1": fleet_of("1"), "2": fleet_of("1")})
    with pytest.raises(ValueError, match="design"):
        build_versions({"1": net, "2": small_network(classes=5)}, "tribe")
    with pytest.raises(ValueError, match="budget"):
        build_versions({"1": net, "2": tuned_network()}, "tribe", budget=2.0)
    with pytest.raises(ValueError, match="32"):
        build_versions({"a/b": net}, "tribe")
    with pytest.raises(ValueError, match="at least one"):
        build_versions({}, "tribe")
    with pytest.raises(ValueError, match="calibration"):
        build_versions({"1": net, "2": tuned_network()}, "tribe", health=calibration_of(net))
    with pytest.raises(ValueError, match="same way"):
        build_versions({"1": net, "2": tribe.fleet(tuned_network(), time="auto")}, "tribe")
    other = tuned_network()
    own = tribe.fleet(other, health=calibration_of(other))
    assert build_versions({"1": net, "2": own}, "tribe", health=calibration_of(net)).names == ("1", "2")


def test_a_share_is_of_names_and_a_larger_one_has_all_of_a_smaller_one():
    names = [f"cam{i}" for i in range(2000)]
    chosen = [{name for name in names if is_in_share(name, share)} for share in (0, 0.1, 0.3, 1)]
    assert chosen[0] == set()
    assert chosen[0] < chosen[1] < chosen[2] < chosen[3] == set(names)
    assert 150 < len(chosen[1]) < 250


def test_the_distance_of_networks_is_that_of_the_layers_before_the_last():
    one, head = Backbone(small_network()), small_network()
    with torch.no_grad():
        head[-1].weight.neg_()
    assert network_distance(one, Backbone(head)) == 0.0
    assert network_distance(one, Backbone(tuned_network(0.02))) == pytest.approx(0.02, rel=1e-3)
    assert network_distance(one, Backbone(small_network(seed=1))) > FAR
    assert network_distance(one, Backbone(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))) is None


def test_what_changed_since_the_source_is_carried_to_another_source():
    old, new = fleet_of("1"), fleet_of("2")
    old.add("fresh")
    new.add("fresh")
    ours, theirs = leaves(carried(old, new, "fresh", relative=True)), leaves(new.state("fresh"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "nothing changed"
    for i in range(3):
        old({"cam": batch(i)})
    first, last = leaves(old.method.init(old.net, 1, 0)), leaves(old.state("cam"))
    ours, theirs = leaves(carried(old, new, "cam", relative=True)), leaves(new.method.init(new.net, 1, 0))
    spread = [(each["pair.var"]).sqrt() for each in (first, theirs)]
    shifts = [
        (a["pair.mean"] - b["pair.mean"]) / s for a, b, s in zip((last, ours), (first, theirs), spread, strict=True)
    ]
    assert torch.allclose(*shifts, atol=1e-5)
    assert torch.allclose(last["pair.var"] / first["pair.var"], ours["pair.var"] / theirs["pair.var"], rtol=1e-4)
    changes = [a["affine.bias"] - b["affine.bias"] for a, b in ((last, first), (ours, theirs))]
    assert torch.allclose(*changes, atol=1e-6)
    assert torch.equal(ours["key.clock"], last["key.clock"])


def test_what_is_carried_over_is_the_state_as_it_is_unless_it_holds_the_old_weights():
    old, new = fleet_of("1"), fleet_of("3")
    for i in range(3):
        old({"cam": batch(i)})
    state = carried(old, new, "cam")
    new.replace_state("cam", state)
    assert new.digest("cam") == old.digest("cam")
    new({"cam": batch(3)})
    assert digest_of(state) == old.digest("cam"), "it is a copy"
    assert carried(old, fleet_of("3", time="auto"), "cam") is None, "other shapes"
    whole = [tribe.fleet(net(), "cotta") for net in (small_network, tuned_network)]
    whole[0]({"cam": batch(0)})
    assert carried(*whole, "cam") is None


# -- addressed --------------------------------------------------------------------------------------------------------


async def test_a_request_gets_the_version_of_its_stream_or_the_source_of_the_one_that_it_names():
    async with working(versions_of()) as worker:
        first = await worker.infer("cam", batch(0))
        other = await worker.infer("cam", batch(0), version="2")
        named = await worker.infer("gate", batch(0), version="2")
        after = await worker.infer("gate", batch(1))
        plain = [await worker.infer(None, batch(5), version=version) for version in (None, "1", "2")]
        clock = worker.stream("cam")["clock"]
    assert (first.version, first.adapted) == ("1", True)
    assert (other.version, other.adapted) == ("2", False)
    assert torch.equal(other.logits, source_of("2", batch(0)))
    assert [(each.version, each.adapted) for each in (named, after)] == [("2", True)] * 2
    offline = fleet_of("2")
    offline({"gate": batch(0)})
    assert torch.equal(after.logits, offline({"gate": batch(1)})["gate"])
    assert [each.version for each in plain] == ["1", "1", "2"]
    assert torch.equal(plain[2].logits, source_of("2", batch(5)))
    assert clock == 1, "a version that is not the stream's teaches it nothing"


async def test_requests_that_wait_while_their_stream_moves_get_the_version_that_they_name():
    async with working(versions_of("1", "2")) as worker:
        await worker.infer("cam", batch(0))
        async with worker.runtime.hold("cam"):
            asked = [asyncio.create_task(worker.infer("cam", batch(1), version=version)) for version in (None, "1")]
            moving = asyncio.create_task(worker.control("move", "cam", version="2"))
            while not worker.scheduler.queues["cam"].holders or len(worker.scheduler.queues["cam"].jobs) < 2:
                await asyncio.sleep(0)
        await moving
        free, bound = await asyncio.gather(*asked)
    assert (free.version, free.adapted, free.clock) == ("2", True, 1)
    assert (bound.version, bound.adapted) == ("1", False)
    assert torch.equal(bound.logits, source_of("1", batch(1)))


# -- move and back ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "redis"])
def real_store(request, tmp_path):
    """A function that opens the same store again."""
    from stores import open_kind

    return open_kind(request.param, tmp_path, None)


@pytest.fixture(params=["memory", "sqlite", "redis"])
def any_store(request, tmp_path):
    """A function that opens the same store again; in memory: None."""
    from stores import open_kind

    if request.param == "memory":
        return lambda: None
    return open_kind(request.param, tmp_path, None)


async def test_back_returns_to_the_state_before_the_move_bit_for_bit(any_store):
    store = any_store()
    async with working(versions_of(), store) as worker:
        await learned(worker)
        before = digest(worker)
        moved = await worker.control("move", "cam", version="2")
        assert (moved["version"], moved["clock"], moved["moved"]) == ("2", 0, True)
        answer = await worker.infer("cam", batch(8))
        offline = fleet_of("2")
        assert torch.equal(answer.logits, offline({"cam": batch(8)})["cam"])
        left = digest(worker)
        back = await worker.control("back", "cam")
        assert (back["version"], back["clock"], back["moved"]) == ("1", 3, False)
        assert digest(worker) == before
        with pytest.raises(Conflict, match="has not moved"):
            await worker.control("back", "cam")
        again = await worker.control("move", "cam", version="2", start="kept")
        assert again["clock"] == 1
        assert digest(worker) == left
        assert worker.fleet.fleets["1"].names == []
        assert kinds(worker).count("moved") == 2
        assert kinds(worker).count("moved-back") == 1
    if store is not None:
        store.close()


async def test_after_a_restart_a_stream_goes_on_in_its_version_and_may_still_go_back(real_store):
    store = real_store()
    async with working(versions_of(), store) as worker:
        await learned(worker)
        before = digest(worker)
        await worker.control("move", "cam", version="2")
        await learned(worker, count=2, first=3)
        state = digest(worker)
    async with working(versions_of("2", "1"), store) as worker:
        answer = await worker.infer("cam", batch(9), learn=False)
        assert (answer.version, answer.clock) == ("2", 2)
        assert digest(worker) == state
        back = await worker.control("back", "cam")
        assert (back["version"], back["clock"]) == ("1", 3)
        assert digest(worker) == before
        repeated = await worker.infer("cam", batch(0), request_id="r0")
        assert not repeated.adapted, "the ids of its requests are those of that state"
    store.close()


async def test_what_is_carried_depends_on_how_near_the_networks_are(tmp_path):
    async with working(versions_of()) as worker:
        for stream in ("near", "far", "asked", "anew"):
            await learned(worker, stream)
        moves = {"near": ("3", "auto"), "far": ("2", "auto"), "asked": ("2", "relative"), "anew": ("3", "source")}
        clocks = {
            stream: (await worker.control("move", stream, version=version, start=start))["clock"]
            for stream, (version, start) in moves.items()
        }
        with pytest.raises(Conflict, match="has left"):
            await worker.control("move", "near", version="2", start="kept")
        with pytest.raises(NotFound, match="'1', '2', '3'"):
            await worker.control("move", "near", version="4")
        events = [event.words for event in worker.log.kept if event.kind == "moved"]
    assert clocks == {"near": 3, "far": 0, "asked": 3, "anew": 0}
    assert "goes on with its state" in events[0]
    assert "from the source model" in events[1]


async def test_a_stream_in_shadow_stays_in_shadow_wherever_it_moves():
    async with working(versions_of()) as worker:
        await learned(worker)
        await worker.control("demote", "cam")
        for version in ("3", "2"):
            await worker.control("move", "cam", version=version)
            answer = await worker.infer("cam", batch(5))
            assert (answer.version, answer.answered) == (version, "source")
            assert torch.allclose(answer.logits, source_of(version, batch(5)), atol=1e-6)
        await worker.control("promote", "cam")
        await worker.control("back", "cam")
        answer = await worker.infer("cam", batch(6))
        assert (answer.version, answer.answered) == ("3", "adapted"), "to go back does not demote it"


async def test_a_frozen_stream_stays_frozen_and_snapshots_belong_to_their_version():
    async with working(versions_of()) as worker:
        await learned(worker)
        await worker.control("snapshot", "cam")
        await worker.control("freeze", "cam")
        for version in ("2", "3"):
            moved = await worker.control("move", "cam", version=version)
            assert (moved["state"], moved["snapshots"]) == ("frozen", [])
        with pytest.raises(UnknownStream, match="snapshot"):
            await worker.control("rollback", "cam")
        await worker.control("move", "cam", version="1")
        assert (await worker.control("rollback", "cam"))["clock"] == 3


async def test_a_store_that_fails_leaves_the_stream_whole_in_one_version(real_store):
    """Whichever call fails, and whether or not it did its work: what is stored is of one version, and back is exact."""
    store = real_store()
    failing = Guided(store)
    async with working(versions_of(), failing) as worker:
        worker.policy.__dict__.update(retry=0.0)
        for number, (name, kind) in enumerate(
            (name, kind) for name in ("write", "claim", "release") for kind in ("fails", "fails_after")
        ):
            stream = f"cam{number}"
            await learned(worker, stream)
            before = digest(worker, stream)
            setattr(failing, kind, {name})
            with contextlib.suppress(Unavailable):
                await worker.control("move", stream, version="2")
            setattr(failing, kind, set())
            await worker.sessions.renew()
            await worker.infer(stream, batch(9), learn=False)  # opens it again, if its claim was lost
            if worker.fleet.version_of(stream) == "1":
                assert digest(worker, stream) == before
                await worker.control("move", stream, version="2")
            await worker.infer(stream, batch(7))
            assert (await worker.control("back", stream))["version"] == "1"
            assert digest(worker, stream) == before
    store.close()


@pytest.mark.parametrize("done", [False, True])
async def test_the_second_write_of_a_move_may_fail_and_the_state_before_it_is_kept_all_the_same(real_store, done):
    store = real_store()
    plain, calls = store.write, []

    def write(writes):
        calls.append(writes)
        if len(calls) == 2 and not done:
            raise StoreDown("the disk is full")
        refused = plain(writes)
        if len(calls) == 2:
            raise StoreDown("the connection was closed")
        return refused

    async with working(versions_of(), store) as worker:
        await learned(worker)
        before, store.write = digest(worker), write
        with pytest.raises(Unavailable):
            await worker.control("move", "cam", version="2")
        assert worker.stream("cam")["version"] == "2"
        await worker.infer("cam", batch(7))
        worker.sessions.writer._paused_until = 0.0
        await worker.write_round()
        assert [[write.keep for write in each] for each in calls] == [[None], [BEFORE], [BEFORE]]
        assert (await worker.control("back", "cam"))["version"] == "1"
        assert digest(worker) == before
    store.close()


async def test_a_state_of_another_version_goes_to_it_and_one_of_none_is_named(tmp_path, any_store):
    store, other = any_store(), fleet_of("2")
    other({"x": batch(0)})
    state = other.to_bytes("x")
    async with working(versions_of("1", "2"), store) as worker:
        await learned(worker)
        put = await worker.control("put_state", "cam", data=state)
        assert (put["version"], put["clock"]) == ("2", 1)
    if store is None:
        return
    async with working(versions_of("1", "3"), store) as worker:
        answer = await worker.infer("cam", batch(1))
        words = [event.words for event in worker.log.kept if event.kind == "unfit" and event.stream == "cam"]
        assert (answer.version, answer.adapted, worker.stream("cam")["state"]) == ("1", False, "unfit")
        with pytest.raises(StateFileError, match="another network"):
            worker.fleet.check_bytes("cam", state)
    assert "('1', '3')" in words[0]
    store.close()


async def test_kept_states_are_collected_after_their_time_and_with_their_stream(any_store):
    store, clock = any_store(), Clock()
    async with working(versions_of(), store, clock=clock) as worker:
        await learned(worker)
        await worker.control("move", "cam", version="2")
        await worker.control.moves.collect()
        assert worker.stream("cam")["moved"]
        clock.time += worker.policy.keep_moved + 1
        if store is not None:
            await worker.sessions.renew()
        await worker.control.moves.collect()
        assert not worker.stream("cam")["moved"]
        assert store is None or store.read("cam", place=BEFORE) is None
        with pytest.raises(Conflict, match="collected"):
            await worker.control("back", "cam")
        await worker.control("move", "cam", version="3")
        await worker.control("drop", "cam")
        assert store is None or store.kept("cam") is None
    if store is not None:
        store.close()


# -- by share, and on trial -------------------------------------------------------------------------------------------


async def test_a_share_moves_streams_that_are_open_and_those_that_come_but_none_that_went_back(any_store):
    store, names = any_store(), [f"cam{i}" for i in range(12)]
    inside = [name for name in names if is_in_share(name, 0.5)]
    assert 2 <= len(inside) <= 10
    async with working(versions_of("1", "2"), store) as worker:
        for name in names:
            await learned(worker, name, 1)
        found = await worker.control.moves.move_share("2", 0.5)
        assert (found["moved"], found["failed"], found["share"]) == (inside, {}, 0.5)
        await worker.control("back", inside[0])
        found = await worker.control.moves.move_share("2", 0.5)
        assert found["moved"] == []
        late = next(f"late{i}" for i in range(100) if is_in_share(f"late{i}", 0.5))
        answer = await worker.infer(late, batch(0))
        assert (answer.version, answer.clock) == ("2", 1)
        if store is not None:
            await worker.control("end", inside[0])
            await worker.infer(inside[0], batch(1))
            await worker.runtime.finished()
            assert worker.stream(inside[0])["version"] == "1"
        metrics = worker.metrics_text()
        assert f'tribe_version_streams{{model="tribe",version="2"}} {float(len(inside))}' in metrics
        found = await worker.control.moves.back_all("2")
        assert found["moved"] == inside[1:]
        assert found["share"] == 0.0
        assert (await worker.infer(f"new-{late}", batch(0))).version == "1"
    if store is not None:
        store.close()


async def test_a_stream_that_drifts_after_its_move_goes_back_by_itself():
    """The alarm is a real one: in the second version the learning rate is far too high."""
    guarded = {"method": "tribe+watch"}
    both = Versions({"1": fleet_of("1", **guarded), "2": fleet_of("2", lr=3.0, **guarded)})
    async with working(both) as worker:
        await learned(worker, count=6)
        assert worker.stream("cam")["version"] == "1"
        before = digest(worker)
        await worker.control("move", "cam", version="2")
        for i in range(30):
            await worker.infer("cam", pictures(1, 8, i)[0])
            await worker.runtime.finished()
            if worker.stream("cam")["version"] == "1":
                break
        assert digest(worker) == before
        events = [event for event in worker.log.kept if event.kind == "moved-back"]
        assert len(events) == 1
        assert "alarm" in events[0].words
        assert 'by="auto"' in worker.metrics_text()


async def test_a_stream_whose_estimate_falls_goes_back_unless_the_policy_says_no():
    for auto in (True, False):
        policy = type(POLICY)(**{**POLICY.__dict__, "auto_back": auto})
        async with working(versions_of("1", "2"), policy=policy) as worker:
            await learned(worker)
            session = worker.sessions.by_name["cam"]
            session.report["accuracy"] = 0.8
            await worker.control("move", "cam", version="2")
            for high, version in ((0.81, "2"), (0.79, "1" if auto else "2")):
                session.report = session.report | {"accuracy_high": high}
                worker.control.moves.note_estimate(session)
                await worker.runtime.finished()
                assert worker.stream("cam")["version"] == version


async def test_the_page_and_the_store_know_what_is_kept(real_store):
    store = real_store()
    async with working(versions_of(), store) as worker:
        await learned(worker)
        await worker.control("move", "cam", version="3")
        assert store.kept("cam").place == BEFORE
        assert store.read("cam", place=BEFORE).clock == 3
        await worker.control("back", "cam")
        assert store.kept("cam").place == UNDONE
    store.close()
