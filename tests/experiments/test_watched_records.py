"""Records of watched methods: what the method knew of its stream, image by image, in memory and in a file."""

import json

import numpy as np
import pytest
import torch

from tribe.core.backbone import Backbone
from tribe.data.scenarios import create
from tribe.experiments.record import WATCHED, Record, Watched
from tribe.experiments.runner import run
from tribe.experiments.stream import Stream
from tribe.health.alarms import KINDS
from tribe.testing import CLASSES, ready, small_network
from watching import calibration_of, pictures

IMAGES = 64


class BlackFromTheMiddle:
    """Pictures, black in the second half."""

    classes, domains = tuple("abcd"), ("noon",)

    def labels(self, domain):
        return torch.arange(IMAGES) % CLASSES

    def images(self, domain, index):
        x = pictures(1, IMAGES)[0]
        x[IMAGES // 2 :] = 0
        return x[index]


def play(method, net=None, **fields):
    options = {name: fields.pop(name) for name in ("checkpoint", "every", "progress") if name in fields}
    stream = Stream(BlackFromTheMiddle(), create("replay"), (0,), batch=8)
    return run(net or Backbone(small_network()), ready(method, **fields), stream, **options)[0]


def equal(one, other):
    return all(torch.equal(getattr(one, name).nan_to_num(-1), getattr(other, name).nan_to_num(-1)) for name in WATCHED)


def test_a_watched_run_records_estimates_and_alarms(tmp_path):
    net = Backbone(small_network())
    record = play("tribe+watch", net, calibration=calibration_of(small_network()))
    watched = record.watched
    assert len(watched.alarms) == IMAGES
    assert watched.kinds == KINDS
    assert bool((watched.low <= watched.accuracy).all() & (watched.accuracy <= watched.high).all())
    image, kind = watched.beginnings()[0]
    assert kind == "black"
    assert IMAGES // 2 <= image < IMAGES
    record.save(tmp_path / "record.npz")
    loaded = Record.load(tmp_path / "record.npz")
    assert equal(loaded.watched, watched)
    assert loaded.watched.kinds == watched.kinds


def test_without_a_calibration_there_are_alarms_only_and_plain_methods_record_nothing():
    assert play("tribe").watched is None
    watched = play("tribe+watch").watched
    assert bool(watched.accuracy.isnan().all())
    assert "black" in {kind for _, kind in watched.beginnings()}


def test_a_run_that_was_stopped_goes_on_to_the_same_estimates(tmp_path):
    def stop(done, *_):
        if done == 5:
            raise RuntimeError("a power cut")

    plain = play("tribe+watch")
    where = {"checkpoint": tmp_path / "run.safetensors", "every": 2}
    with pytest.raises(RuntimeError, match="power cut"):
        play("tribe+watch", **where, progress=stop)
    assert equal(play("tribe+watch", **where).watched, plain.watched)


def test_beginnings_by_hand():
    none = torch.zeros(6)
    watched = Watched(none, none, none, torch.tensor([0, 1, 1, 0, 3, 2]), ("a", "b"))
    assert watched.beginnings() == [(1, "a"), (4, "a"), (4, "b")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"watched_accuracy": np.full(IMAGES, 2.0, np.float32)}, "expected shares"),
        ({"watched_alarms": np.full(IMAGES, 2**20)}, "a bit for each kind"),
        ({"watched_alarms": np.zeros(3, np.int64)}, "rows"),
    ],
)
def test_damaged_columns_are_refused(tmp_path, changes, words):
    path = tmp_path / "record.npz"
    play("source+watch").save(path)
    with np.load(path) as file:
        held = dict(file)
    assert json.loads(str(held["words"]))["alarms"] == list(KINDS)
    np.savez_compressed(path, **(held | changes))
    with pytest.raises(ValueError, match=words):
        Record.load(path)
