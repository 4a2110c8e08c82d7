"""Records say what the method knew after every step, keep logits if asked, and become tables of pandas."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tribe import filters, norms
from tribe.core.backbone import Backbone
from tribe.data.scenarios import create
from tribe.experiments.record import FROM_INFO, Record
from tribe.experiments.replay import replay
from tribe.experiments.runner import run
from tribe.experiments.stream import Stream
from tribe.norms.batch import Robust
from tribe.testing import CLASSES, ready, small_network
from watching import pictures

IMAGES, BATCH = 30, 8


class Pictures:
    """Two domains without a file; the last image has no label."""

    classes, domains = tuple("abcd"), ("noon", "night")

    def labels(self, domain):
        return torch.where(torch.arange(IMAGES) == IMAGES - 1, -1, torch.arange(IMAGES) % CLASSES)

    def images(self, domain, index):
        return pictures(1, IMAGES)[0][index] * (1.0 if domain == "noon" else 0.3)


def stream(seeds=(0,)):
    return Stream(Pictures(), create("replay"), seeds, batch=BATCH)


def play(method="tribe", **options):
    return run(Backbone(small_network()), ready(method), stream(), **options)[0]


def equal(one, other):
    return all(torch.equal(a.nan_to_num(-2), b.nan_to_num(-2)) for a, b in zip(one, other, strict=True))


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


@dataclass(frozen=True)
class NanOfFour(Robust):
    """A rule that returns NaN for batches of four images."""

    def __call__(self, mean, *others):
        centre, spread, kept = super().__call__(mean, *others)
        return centre * (torch.nan if mean.shape[1] == 4 else 1), spread, kept


def test_images_that_were_skipped_are_counted_in_a_warning():
    norms.register("nan-of-four")(NanOfFour)
    try:
        with pytest.warns(UserWarning, match="4 of 60 images were skipped: their predictions, or what was learned"):
            run(Backbone(small_network()), ready("selftrain", rule="nan-of-four"), stream())
    finally:
        del norms.registry._classes["nan-of-four"]


def test_a_file_holds_the_trace_if_there_is_one(tmp_path):
    record = play()
    record.save(tmp_path / "record.npz")
    assert equal(Record.load(tmp_path / "record.npz").trace, record.trace)
    record._replace(trace=None).save(tmp_path / "without.npz")
    assert Record.load(tmp_path / "without.npz").trace is None


def test_a_run_that_was_stopped_goes_on_to_the_same_trace(tmp_path):
    def stop(done, *_):
        if done == 5:
            raise RuntimeError("a power cut")

    where = {"checkpoint": tmp_path / "run.safetensors", "every": 2}
    with pytest.raises(RuntimeError, match="power cut"):
        play(**where, progress=stop)
    assert equal(play(**where).trace, play().trace)


def test_logits_in_a_file_serve_a_filter_as_those_in_memory_do(tmp_path):
    record, rule = play(keep_outputs=True), filters.create("cofa")
    record.save(tmp_path / "without.npz")
    assert Record.load(tmp_path / "without.npz").outputs is None
    record.save(tmp_path / "record.npz", outputs=True)
    loaded = Record.load(tmp_path / "record.npz")
    assert torch.equal(loaded.outputs.values, record.outputs.values)
    assert loaded.outputs.kind == "logits"
    (one,), (other,) = (replay([r], rule) for r in (record, loaded))
    assert torch.equal(one.prediction, other.prediction)
    assert equal(one.trace, record.trace), "that of the method alone"
    with pytest.raises(ValueError, match=r"keep_outputs=True\) keeps them"):
        play().save(tmp_path / "record.npz", outputs=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trace_step": np.zeros(3, np.int64)}, "60"),
        (
            {f"trace_{name}": np.zeros(3, np.float32) for name in FROM_INFO} | {"trace_step": np.zeros(3, int)},
            "60",
        ),
        ({"output_values": np.zeros(8, np.float32)}, "damaged"),
        ({"output_sizes": np.full(8, 3)}, "24 images"),
    ],
)
def test_damaged_columns_are_refused(tmp_path, changes, words):
    path = tmp_path / "record.npz"
    play(keep_outputs=True).save(path, outputs=True)
    with np.load(path) as file:
        held = dict(file)
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
    assert "accuracy" in run(Backbone(small_network()), ready("tribe+watch"), stream())[0].to_pandas()


def test_without_pandas_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tribe-tta\[pandas\]'"):
        play("source").to_pandas()
