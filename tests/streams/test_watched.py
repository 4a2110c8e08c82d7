"""Streams of a fleet that are guarded or watched: health, alarms by the name of a stream, and files."""

import logging

import pytest
import torch

import tribe
from tribe.testing import small_network
from watching import calibration_of, pictures

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


def test_without_health_there_is_none():
    fleet = cameras(tribe.fleet(small_network()), 1)
    assert fleet.health("door") is None
    assert fleet.report_many(["door"])["door"].health is None
    assert fleet.events == []


def test_a_calibrated_stream_has_an_estimate_and_goes_through_a_file(tmp_path):
    net = small_network()
    calibration = calibration_of(net)
    calibration.save(tmp_path / "health.safetensors")
    fleet = tribe.fleet(net, health=tmp_path / "health.safetensors", time="auto")
    fleet({"door": pictures(1, 8)[0]})
    found = fleet.health("door")
    assert 0 <= found.low <= found.accuracy <= found.high <= 1
    fleet.save("door", tmp_path / "door.safetensors")
    assert fleet.load("porch", tmp_path / "door.safetensors").health("porch") == found
    assert tribe.load(tmp_path / "door.safetensors", net).health == [found]
    adapter = tribe.adapt(net, health=calibration)
    adapter(pictures(1, 8)[0])
    assert (adapter.health[0].calibrated, adapter.health[0].accuracy) == (True, found.accuracy)
    with pytest.raises(ValueError, match="another network"):
        tribe.adapt(small_network(seed=1), health=calibration)
    with pytest.raises(ValueError, match="was made with tribe; this stream adapts with tent"):
        tribe.adapt(net, "tent", health=calibration)
