"""Watching: health, events and the last good state, through real adapters and fleets."""

import logging
import math
from dataclasses import replace

import pytest
import torch

import tribe
from tribe.core.state import digest
from tribe.testing import images, ready, small_network
from tribe.testing.shared import small_backbone
from watching import calibration_of, pictures


def test_without_health_there_is_none_and_with_it_every_stream_has_one():
    plain, fleet = tribe.adapt(small_network()), tribe.fleet(small_network()).add("door")
    assert plain.health is fleet.health("door") is fleet.report_many(["door"])["door"].health is None
    assert plain.events == fleet.events == []
    adapter = tribe.adapt(small_network(), health=True, streams=2)
    assert adapter.method.name == "tribe+watch"
    for seed in range(3):
        adapter(pictures(2, 8, seed))
    first, second = adapter.health
    assert (first.images, second.images) == (24, 24)
    assert first.accuracy is first.low is first.high is first.overall is None
    assert first.calibrated is False
    assert sum(first.predicted) == 24
    assert first.followed == 1
    assert first.statistics > 0
    assert 0 <= first.source_agreement <= 1


def test_entropy_and_trusted_are_of_the_last_images_not_of_the_last_batch():
    strict = tribe.methods.create("tribe", classes=4, h0=0.005)  # trusts some images of these, not all
    adapter = tribe.adapt(small_network(), strict, streams=2, health=True)
    sums = torch.zeros(2, 3, dtype=torch.float64)
    for step in range(12):
        x = images(2, 1, step)
        valid = torch.tensor([[True], [step % 3 > 0]])
        adapter(x, valid=valid)
        for s, info in enumerate(adapter.info):
            if valid[s]:
                sums[s] = sums[s] * math.exp(-1 / 500) + torch.tensor([info.entropy, info.trusted, 1.0])
    for row, health in zip(sums, adapter.health, strict=True):
        assert health.entropy == pytest.approx(float(row[0] / row[2]), abs=1e-6)
        assert health.trusted == pytest.approx(float(row[1] / row[2]), abs=1e-6)
    assert 0 < adapter.health[0].trusted < 1  # in batches of one a report is 0 or 1


def test_an_alarm_after_a_reset_is_new_and_one_of_a_snapshot_is_not():
    heard = []
    adapter = tribe.adapt(small_network(), health=True, history=True, on_event=lambda event: heard.append(event.kind))
    black, clean = torch.zeros(64, 3, 8, 8), pictures(1, 64)[0]
    adapter(black)
    assert "black" in heard
    snapshot, heard[:] = adapter.snapshot(), []
    adapter.reset()
    adapter(black)
    assert "black" in heard
    for go_back in (adapter.restore, adapter.rollback):
        for _ in range(4):
            adapter(clean)
        adapter(black)
        heard.clear()
        go_back(snapshot)
        adapter(clean)
        assert "black" not in heard
    weights = adapter.state_dict()
    adapter.reset()
    adapter.load_state_dict(weights)
    adapter(clean)
    assert "black" not in heard


def test_a_stream_that_goes_wrong_returns_to_its_last_good_state():
    net, guarded = small_backbone(), ready("tent+guard", lr=0.3, speed=None, pull=0.0, good_every=40, probe=0)
    state = guarded.init(net, 2)
    source = torch.cat(net.source()[0], 1)
    returned = []
    for seed in range(30):
        _, state = guarded.step(net, state, pictures(2, 8, seed))
        returned.append(state.guard.returned.clone())
        if bool((returned[-1] > (returned[-2] if seed else 0)).all()):
            break
    assert bool((returned[-1] > 0).all()), "parameters that run away raise the alarm drift"
    moved = torch.cat(state.method.affine, 1)
    good = torch.cat(state.guard.good.affine, 1)
    assert torch.equal(moved, good)
    assert float((moved - source).norm() / source.norm()) < 0.2
    before = digest(state.guard.good)
    _, after = guarded.step(net, state, pictures(2, 8, 99))
    assert digest(state.guard.good) == before, "a copy, not a view"
    assert after.method.key.clock.tolist() == [int(t) + 1 for t in state.method.key.clock]


# -- streams of a fleet ------------------------------------------------------------------------------------------------

BLACK = torch.zeros(16, 3, 8, 8)


def cameras(fleet, rounds=6):
    """A black camera and one that sees something."""
    fleet({"gate": pictures(1, 16)[0], "door": pictures(1, 16, 1)[0]})
    for seed in range(rounds):
        fleet({"gate": BLACK, "door": pictures(1, 16, 2 + seed)[0]})
    return fleet


def test_a_black_camera_raises_an_alarm_once_by_its_name_and_learns_nothing(caplog):
    heard = []
    fleet = tribe.fleet(small_network(), guard=True, on_event=heard.append)
    with caplog.at_level(logging.WARNING, "tribe.health"):
        cameras(fleet)
    black = [event for event in heard if event.kind == "black"]
    assert [(event.stream, event.since) for event in black] == [("gate", 16)]
    assert fleet.events == heard
    assert any(r.stream == "gate" and r.kind == "black" and "camera is black" in r.message for r in caplog.records)
    gate, door = fleet.health("gate"), fleet.health("door")
    assert ("black" in gate.alarms, "black" in door.alarms) == (True, False)
    assert (gate.held, door.held) == (96, 0)
    assert (gate.images, door.images) == (112, 112)


def test_what_was_reported_is_not_reported_again_after_a_file_a_reset_reports_anew():
    fleet, heard = cameras(tribe.fleet(small_network(), guard=True)), []
    again = tribe.fleet(fleet.net, guard=True, on_event=heard.append)
    again.from_bytes("gate", fleet.to_bytes("gate"))
    again({"gate": BLACK})
    assert heard == []
    assert "black" in again.health("gate").alarms
    again.reset("gate")
    assert again.health("gate").alarms == ()
    for _ in range(6):
        again({"gate": BLACK})
    assert [event.kind for event in heard if event.kind == "black"] == ["black"]


def test_several_streams_are_read_together_wherever_their_states_are():
    fleet = cameras(tribe.fleet(small_network(), health=True, rows=1))
    fleet({"gate": torch.full((2, 3, 8, 8), torch.nan)})  # the door's state goes to a file
    names = ["door", "gate"]
    reports = fleet.report_many(names)
    assert {name: report.info for name, report in reports.items()} == {name: fleet.info(name) for name in names}
    assert reports["gate"].info.poisoned == (0, 1)
    less = {"statistics": None, "followed": None}
    assert all(reports[name].health == fleet.health(name)._replace(**less) for name in names)
    assert fleet.health("door").statistics > 0


def test_a_calibrated_stream_has_an_estimate_and_goes_through_a_file(tmp_path):
    net = small_network()
    calibration = calibration_of(net)
    replace(calibration, method="tribe+time").save(tmp_path / "health.safetensors")
    fleet = tribe.fleet(net, health=tmp_path / "health.safetensors", time="auto")
    fleet({"door": pictures(1, 8)[0]})
    found = fleet.health("door")
    assert 0 <= found.low <= found.accuracy <= found.high <= 1
    fleet.save("door", tmp_path / "door.safetensors")
    assert fleet.load("porch", tmp_path / "door.safetensors").health("porch") == found
    loaded = tribe.load(tmp_path / "door.safetensors", net, calibration=tmp_path / "health.safetensors")
    assert loaded.health == [found]
    adapter = tribe.adapt(net, health=calibration)
    adapter(pictures(1, 8)[0])
    assert adapter.health[0].calibrated
    assert adapter.health[0].accuracy is not None
    with pytest.raises(ValueError, match="another network"):
        tribe.adapt(small_network(seed=1), health=calibration)
    with pytest.raises(ValueError, match="was made with tribe; this stream answers by tent"):
        tribe.adapt(net, "tent", health=calibration)
