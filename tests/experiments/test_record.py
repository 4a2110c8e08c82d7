"""Records hold every image, what the method reported after every step and its outputs; damaged files are refused."""

import json
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from grid import Stopped, stop_at
from tribe import Record, filters, norms
from tribe.core.backbone import Backbone
from tribe.data.scenarios import create
from tribe.experiments.record import FROM_INFO, Watched
from tribe.experiments.replay import replay
from tribe.experiments.runner import run
from tribe.experiments.stream import Stream
from tribe.health.alarms import KINDS
from tribe.norms.batch import Robust
from tribe.testing import CLASSES, ready, small_network
from watching import calibration_of, pictures

GOOD = {
    "domain": [0, 0, 1],
    "label": [0, -1, 2],
    "prediction": [0, 1, 2],
    "confidence": [0.5, 1.0, 0.25],
    "seconds": [0.0, 1.0, 2.0],
}
IMAGES, BATCH = 30, 8


class Pictures:
    """Two domains without a file; the last image has no label."""

    classes, domains = tuple("abcd"), ("noon", "night")

    def labels(self, domain):
        return torch.where(torch.arange(IMAGES) == IMAGES - 1, -1, torch.arange(IMAGES) % CLASSES)

    def images(self, domain, index):
        return pictures(1, IMAGES)[0][index] * (1.0 if domain == "noon" else 0.3)


class Black(Pictures):
    """The second domain is black."""

    def images(self, domain, index):
        return super().images(domain, index) * (domain == "noon")


def stream(seeds=(0,), data=Pictures):
    return Stream(data(), create("replay"), seeds, batch=BATCH)


def play(method="tribe", data=Pictures, fields=None, **options):
    return run(Backbone(small_network()), ready(method, **(fields or {})), stream(data=data), **options)[0]


def equal(one, other):
    """Equal tensors, where both have some."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, torch.Tensor)]
    return bool(pairs) and all(torch.equal(a.nan_to_num(-2), b.nan_to_num(-2)) for a, b in pairs)


def made(**changes):
    columns = {name: torch.tensor(values) for name, values in (GOOD | changes).items() if name in GOOD}
    rest = {"domains": ("fog", "snow"), "classes": 3, "spec": {"seed": 0}} | changes
    return Record(**columns, **{name: value for name, value in rest.items() if name not in GOOD})


def test_the_trace_is_what_the_state_says_after_each_step():
    record, net, method = play(), Backbone(small_network()), ready("tribe")
    state, steps = method.init(net), record.trace.steps()
    assert steps.step.tolist() == list(range(1, len(stream()) + 1))
    for row, batch in enumerate(stream()):
        _, state = method.step(net, state, batch.x, batch.valid)
        for name in FROM_INFO:
            assert torch.allclose(getattr(steps, name)[row], getattr(state.info, name)[0], atol=1e-6), name
    assert steps.distance[-1] > steps.distance[0] > 0
    assert torch.equal(record.trace.step, torch.arange(2 * IMAGES) // BATCH + 1)


def test_streams_side_by_side_have_their_own_traces():
    net, method = Backbone(small_network()), ready("rotta")
    together = run(net, method, stream((3, 5)), seed=(3, 5))
    (alone,) = run(net, method, stream((5,)), seed=5)
    assert torch.allclose(together[1].trace.entropy, alone.trace.entropy, atol=1e-5)
    assert torch.equal(together[1].trace.step, alone.trace.step)


def test_a_watched_run_records_estimates_and_alarms():
    watched = play("tribe+watch", Black, {"calibration": calibration_of(small_network())}).watched
    assert len(watched.alarms) == 2 * IMAGES
    assert watched.kinds == KINDS
    assert bool((watched.low <= watched.accuracy).all() & (watched.accuracy <= watched.high).all())
    image, kind = watched.beginnings()[0]
    assert kind == "black"
    assert image >= IMAGES


def test_without_a_calibration_there_are_alarms_only_and_plain_methods_record_nothing():
    assert play("tribe").watched is None
    watched = play("tribe+watch", Black).watched
    assert bool(watched.accuracy.isnan().all())
    assert "black" in {kind for _, kind in watched.beginnings()}


def test_beginnings_by_hand():
    none = torch.zeros(6)
    watched = Watched(none, none, none, torch.tensor([0, 1, 1, 0, 3, 2]), ("a", "b"))
    assert watched.beginnings() == [(1, "a"), (4, "a"), (4, "b")]


@pytest.mark.parametrize(("method", "part"), [("tribe", "trace"), ("tribe+watch", "watched")])
def test_a_run_that_was_stopped_goes_on_to_the_same_columns(tmp_path, method, part):
    where = {"checkpoint": tmp_path / "run.safetensors", "every": 2}
    with pytest.raises(Stopped):
        play(method, **where, progress=stop_at(5))
    assert equal(getattr(play(method, **where), part), getattr(play(method), part))


@dataclass(frozen=True)
class NanOfFour(Robust):
    """A rule that returns NaN for batches of four images."""

    def __call__(self, mean, *others):
        centre, spread, kept = super().__call__(mean, *others)
        return centre * (torch.nan if mean.shape[1] == 4 else 1), spread, kept


def test_images_that_were_skipped_are_counted_in_a_warning(registries):
    norms.register("nan-of-four")(NanOfFour)
    with pytest.warns(UserWarning, match="4 of 60 images were skipped: their predictions, or what was learned"):
        run(Backbone(small_network()), ready("selftrain", rule="nan-of-four"), stream())


def test_it_goes_through_a_file(tmp_path):
    path = tmp_path / "record.npz"
    made().save(path)
    record = Record.load(path)
    assert record.domains == ("fog", "snow")
    assert equal(record, made())
    played = play("tribe+watch")
    played.save(path)
    loaded = Record.load(path)
    assert equal(loaded.trace, played.trace)
    assert equal(loaded.watched, played.watched)
    assert loaded.watched.kinds == KINDS
    played._replace(trace=None, watched=None).save(path)
    assert (Record.load(path).trace, Record.load(path).watched) == (None, None)


def test_logits_in_a_file_serve_a_filter_as_those_in_memory_do(tmp_path):
    record, rule = play(keep_outputs=True), filters.create("cofa")
    record.save(tmp_path / "without.npz")
    assert Record.load(tmp_path / "without.npz").outputs is None
    record.save(tmp_path / "record.npz", outputs=True)
    loaded = Record.load(tmp_path / "record.npz")
    assert torch.equal(loaded.outputs.values, record.outputs.values)
    (one,), (other,) = (replay([r], rule) for r in (record, loaded))
    assert torch.equal(one.prediction, other.prediction)
    assert equal(one.trace, record.trace), "that of the method alone"
    with pytest.raises(ValueError, match=r"keep_outputs=True\) keeps them"):
        play().save(tmp_path / "record.npz", outputs=True)


def scrambled(data):
    """The same length, the compressed bytes of the first column turned around."""
    start = data.index(b"domain.npy") + 200
    return data[:start] + data[start : start + 40][::-1] + data[start + 40 :]


@pytest.mark.parametrize("damage", [lambda data: b"PK", lambda data: data[:-30], lambda data: b"nothing", scrambled])
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "record.npz"
    with pytest.raises(FileNotFoundError, match="no record at"):
        Record.load(path)
    made().save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="damaged"):
        Record.load(path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"domain": [0, 0, 2]}, "domain"),
        ({"label": [0, -2, 1]}, "label"),
        ({"label": [0, 1, 3]}, "label"),
        ({"prediction": [0, 1, 3]}, "prediction"),
        ({"prediction": [0, 1]}, "length"),
        ({"confidence": [0.5, 1.0, 1.5]}, "confidence"),
        ({"seconds": [0.0, -1.0, 2.0]}, "seconds"),
        ({"seconds": [0.0, float("inf"), 2.0]}, "seconds"),
        ({"domains": ("fog",) * 2**12, "classes": 2**12}, "pairs"),
        ({"classes": -1}, "classes"),
    ],
)
def test_wrong_contents_are_refused(tmp_path, changes, word):
    made(**changes).save(tmp_path / "record.npz")
    with pytest.raises(ValueError, match=word):
        Record.load(tmp_path / "record.npz")


def shorter(names, length=3):
    return {name: np.zeros(length, np.int64 if name.endswith(("step", "alarms")) else np.float32) for name in names}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"domain": np.zeros(60)}, "damaged"),
        ({"label": np.zeros((60, 1), int)}, "damaged"),
        ({"words": np.array("[]")}, "damaged"),
        ({"label": np.array([print, 1, 2], dtype=object)}, "damaged"),
        (shorter(["trace_step"]), "60"),
        (shorter(["trace_step", *(f"trace_{name}" for name in FROM_INFO)]), "60"),
        ({"output_values": np.zeros(8, np.float32)}, "damaged"),
        ({"output_sizes": np.full(8, 3)}, "24 images"),
        ({"watched_accuracy": np.full(60, 2.0, np.float32)}, "expected shares"),
        ({"watched_alarms": np.full(60, 2**20)}, "a bit for each kind"),
        (shorter(["watched_alarms"]), "rows"),
    ],
)
def test_damaged_columns_are_refused(tmp_path, changes, words):
    """An array of objects is not unpickled."""
    path = tmp_path / "record.npz"
    play("source+watch", keep_outputs=True).save(path, outputs=True)
    with np.load(path) as file:
        held = dict(file)
    assert json.loads(str(held["words"]))["alarms"] == list(KINDS)
    np.savez_compressed(path, **(held | changes))
    with pytest.raises(ValueError, match=words):
        Record.load(path)


def test_a_table_of_pandas():
    pytest.importorskip("pandas")
    record = play(keep_outputs=True)
    table = record.to_pandas()
    assert list(table.columns[:7]) == ["domain", "label", "prediction", "confidence", "seconds", "correct", "step"]
    assert len(table) == 2 * IMAGES
    assert table["domain"].iloc[0] == "noon"
    assert table["correct"].isna().sum() == 2, "images without a label"
    right = (record.prediction == record.label)[record.label >= 0].double().mean().item()
    assert table["correct"].mean() == pytest.approx(right)
    assert (table[[f"logits_{k}" for k in range(CLASSES)]].to_numpy().argmax(1) == table["prediction"]).all()
    by_step = table.groupby("step")["entropy"].first()
    assert by_step.to_list() == record.trace.steps().entropy.tolist()
    assert table.attrs["spec"]["method"]["name"] == "tribe"
    assert "accuracy" in play("tribe+watch").to_pandas()


def test_without_pandas_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tribe-tta\[pandas\]'"):
        play("source").to_pandas()
