"""Guarded and watched streams over the wire: health in answers and descriptions, alarms as events and in metrics."""

import logging

import numpy as np
import pytest
import torch
from replays import new_fleet, working

from tribe.serve import Client, Server
from tribe.serve.store.sqlite import SqliteStore
from tribe.testing import small_network
from watching import calibration_of, pictures

BLACK = torch.zeros(16, 3, 8, 8)


def seen(number):
    return pictures(1, 16, number)[0]


async def feed(worker, batches):
    return [await worker.infer("gate", x) for x in batches]


async def test_a_black_camera_is_an_alarm_an_event_a_metric_and_it_is_held_back_until_it_sees_again(caplog):
    caplog.set_level(logging.INFO)
    async with working(new_fleet(guard=True)) as worker:
        answers = await feed(worker, [seen(0), *[BLACK] * 4])
        known, metrics = worker.stream("gate"), worker.metrics_text(streams=True)
        predicted = await worker.infer("gate", seen(0), learn=False)
        await feed(worker, [seen(number) for number in range(1, 8)])
        later, events = worker.stream("gate"), list(worker.log.kept)
    assert answers[0].health["alarms"] == []
    assert "black" in answers[-1].health["alarms"]
    assert [answer.health["held"] for answer in answers] == [0, 16, 32, 48, 64]
    assert "black" in known["alarms"]
    assert known["images"] == answers[-1].health["images"]
    assert predicted.health["alarms"] == known["alarms"]
    for line in (
        'tribe_alarms_total{kind="black",model="tribe",version="1"} 1.0',
        'tribe_streams_alarmed{kind="black",model="tribe",version="1"} 1.0',
        'tribe_guard_held_images_total{model="tribe",version="1"} 64.0',
        'tribe_stream_held{model="tribe",stream="gate",version="1"} 64.0',
    ):
        assert line in metrics
    assert "black" not in later["alarms"]
    assert later["held"] == 64
    found = {event.kind: event for event in events if event.stream == "gate"}
    assert [event.kind for event in events].count("alarm-black") == 1
    assert found["alarm-black"].numbers["since"] == 16
    assert "the camera is black" in found["alarm-black"].words
    assert [event.kind for event in events].count("guard-held") == 1
    assert found["guard-held"].numbers == {"held": 16}
    assert "the alarm is over" in found["over-black"].words
    logged = [record for record in caplog.records if "camera is black" in record.message]
    assert [(record.stream, record.kind) for record in logged] == [("gate", "black")], "it is logged once"


async def test_a_return_to_the_last_good_state_is_an_event():
    """The guard's count is set by hand here: what makes it return is tested in tests/health."""
    fleet = new_fleet(guard=True)
    plain = fleet.report_many
    returned = {"gate": 0}

    def report_many(names):
        return {
            name: one._replace(health=one.health._replace(returned=returned["gate"]))
            for name, one in plain(names).items()
        }

    fleet.report_many = report_many

    async with working(fleet) as worker:
        await feed(worker, [seen(0)])
        returned["gate"] = 1
        await feed(worker, [seen(1), seen(2)])
        metrics, events = worker.metrics_text(), worker.log.kept
    assert [event.numbers for event in events if event.kind == "guard-returned"] == [{"returned": 1}]
    assert 'tribe_guard_returns_total{model="tribe",version="1"} 1.0' in metrics


async def test_after_a_restart_the_health_is_known_and_an_old_alarm_is_no_news(tmp_path):
    store = SqliteStore(tmp_path)
    async with working(new_fleet(guard=True), store) as worker:
        await feed(worker, [seen(0), *[BLACK] * 4])
    async with working(new_fleet(guard=True), store) as worker:
        await worker.control("create", "gate")
        known = worker.stream("gate")
        await feed(worker, [BLACK])
        events = list(worker.log.kept)
    store.close()
    assert "black" in known["alarms"]
    assert known["held"] == 64
    assert not [event for event in events if event.kind.startswith("alarm-")]


async def test_a_stream_without_a_guard_says_nothing_of_health():
    async with working() as worker:
        (answer,) = await feed(worker, [seen(0)])
        health, known, metrics = answer.health, worker.stream("gate"), worker.metrics_text(streams=True)
    assert not {"alarms", "accuracy", "held"} & (health.keys() | known.keys())
    assert "tribe_stream_accuracy" not in metrics


@pytest.mark.parametrize("guard", [False, True])
def test_over_the_wire_an_answer_has_the_estimated_accuracy_with_its_interval_and_the_alarms(tmp_path, guard):
    net, path = small_network(), tmp_path / "health.safetensors"
    calibration_of(net, "tribe+guard" if guard else "tribe").save(path)
    with (
        Server(net, shape=(3, 8, 8), guard=guard, health=path, port=0) as server,
        Client(server.url, "model") as client,
    ):
        for x in (seen(0), *[BLACK] * 4):
            client.predict("gate", x.numpy())
        answer = client.infer("gate", np.zeros((1, 3, 8, 8), np.float32))
        known = client.stream("gate")
    facts = answer.facts
    low, estimate, high = (facts[f"tribe_health_accuracy{end}"] for end in ("_low", "", "_high"))
    assert 0 <= low <= estimate <= high <= 1
    assert "black" in facts["tribe_health_alarms"].split(",")
    assert known["alarms"] == facts["tribe_health_alarms"].split(",")
    assert (known["accuracy_low"], known["accuracy_high"]) == (low, high)
    assert (facts["tribe_health_held"] > 0) == guard
