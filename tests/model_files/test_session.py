"""Sessions: streams, state files both ways, threads, bad input, and no torch."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from exported import digits, digits_network, marked

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import tribe
import tribe.onnx
from places import ROOT
from tribe.core.state import leaves
from tribe.onnx import ModelFileError, Session
from tribe.testing import small_network


def some(count, start=0):
    return digits()[0][start : start + count].numpy()


def equal(state, other):
    return state.keys() == other.keys() and all(np.array_equal(t, other[name]) for name, t in state.items())


# -- without torch ----------------------------------------------------------------------------------------------------

ALONE = """
import sys
import numpy, tribe.onnx
assert "torch" not in sys.modules
session = tribe.onnx.Session(sys.argv[1], threads=1)
x = numpy.random.default_rng(0).random((5, 1, 28, 28), dtype=numpy.float32)
assert session(x, stream="a").shape == (5, 10)
session.save(sys.argv[2], "a")
session.load(sys.argv[2], "b")
assert session.info("b").images == 5
assert not {"torch", "onnx"} & sys.modules.keys()
"""


def test_a_session_needs_no_torch(model_file, tmp_path):
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    command = [sys.executable, "-c", ALONE, str(model_file("digits")), str(tmp_path / "state")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tribe.load(tmp_path / "state", digits_network()).info[0].images == 5


# -- state files ------------------------------------------------------------------------------------------------------


def test_a_stream_goes_from_torch_to_a_file_and_back(session, tmp_path):
    net, x = digits_network(), digits()[0]
    throughout, adapter = (tribe.adapt(net, "bank", compare=0) for _ in range(2))
    ours = session("digits")
    for i, batch in enumerate(x[:512].split(16)):
        expected = throughout(batch).numpy()
        if i % 8 < 4:
            logits = adapter(batch).numpy()
            adapter.save(tmp_path / "state")
        else:
            if i % 8 == 4:
                ours.load(tmp_path / "state")
            logits = ours(batch.numpy())
            ours.save(tmp_path / "state")
            adapter = tribe.load(tmp_path / "state", net)
        assert np.abs(logits - expected).max() < 1e-3 * max(1.0, np.abs(expected).max())
    assert adapter.info[0].images == throughout.info[0].images == 512


def test_a_state_file_holds_what_the_library_writes(session, tmp_path):
    """Catches a difference in names, in the header or in the digest: torch writes the same again."""
    ours = session("digits")
    ours(some(20))
    ours.save(tmp_path / "ours")
    tribe.load(tmp_path / "ours", digits_network()).save(tmp_path / "theirs")
    one, other = (content(tmp_path / name) for name in ("ours", "theirs"))
    assert one[0] == other[0]
    assert equal(one[1], other[1])
    ours.freeze().save(tmp_path / "frozen")
    assert tribe.load(tmp_path / "frozen", digits_network()).info[0].frozen


def test_a_state_in_shadow_is_refused(session, tmp_path):
    """A session would answer by what adapts, although nobody has promoted it."""
    session("digits").save(tmp_path / "state")
    adapter = tribe.load(tmp_path / "state", digits_network()).demote()
    adapter.save(tmp_path / "shadow")
    with pytest.raises(ModelFileError, match="shadow"):
        session("digits").load(tmp_path / "shadow")
    adapter.promote().save(tmp_path / "shadow")
    session("digits").load(tmp_path / "shadow")


def test_a_file_with_a_time_filter_goes_both_ways(session, tmp_path):
    ours, adapter = session("marked"), marked()
    x = torch.rand(6, 3, 8, 8)
    adapter(x)
    adapter.save(tmp_path / "state")
    ours.load(tmp_path / "state")
    assert np.abs(ours(x.numpy()) - adapter(x).numpy()).max() < 1e-4
    ours.save(tmp_path / "back")
    again = tribe.load(tmp_path / "back", small_network())
    assert np.abs(ours(x.numpy()) - again(x).numpy()).max() < 1e-4


def content(path):
    """The header and the tensors of a safetensors file."""
    with safe_open(path, "numpy") as file:
        return dict(file.metadata()), load_file(path)


def rewritten(change):
    """Change the tensors or the header of a state file, and sign it again if ``change`` returns True."""

    def write(path):
        metadata, tensors = content(path)
        if change(tensors, metadata):
            from tribe.onnx.states import content_digest

            metadata["digest"] = content_digest(metadata, tensors)
        save_file(tensors, path, metadata)

    return write


def put(name, value):
    def change(tensors, metadata):
        tensors[name] = np.full_like(tensors[name], value)
        return True

    return rewritten(change)


def say(name, value):
    return rewritten(lambda tensors, metadata: metadata.update({name: value}) or True)


BAD_FILES = {
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-8]), "cut short"),
    "empty": (lambda path: path.write_bytes(b""), "cut short"),
    "a number changed": (rewritten(lambda tensors, _: tensors["score"].__iadd__(1) is None), "damaged"),
    "another kind of file": (say("format", "tribe-knowledge"), "not a tribe state file"),
    "a later schema": (say("schema", "9"), "schema"),
    "no JSON": (say("fields", "{"), "header"),
    "not finite": (put("stats.mean", np.nan), "not finite"),
    "below its bounds": (put("info.images", -1), "bounds"),
    "another network": (say("fingerprint", "0" * 32), "another network"),
    "another method": (say("method", "tent"), "tent"),
    "other settings": (
        rewritten(lambda _, m: m.update(fields=m["fields"].replace('"observe": 4', '"observe": 7')) is None),
        "observe=7",
    ),
    "two streams": (say("streams", "2"), "2 streams"),
    "a tensor is missing": (rewritten(lambda tensors, _: tensors.pop("score") is not None), "score"),
    "another shape": (rewritten(lambda t, _: t.update({"score": t["score"][:, :2].copy()}) is None), "score"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_state_file_is_refused_and_nothing_is_lost(what, session, tmp_path):
    damage, words = BAD_FILES[what]
    ours, path = session("digits"), tmp_path / "state"
    ours(some(8))
    ours.save(path)
    ours(some(8, 8))
    before = ours.state()
    damage(path)
    with pytest.raises(ModelFileError, match=words):
        ours.load(path)
    assert equal(ours.state(), before)


def test_a_state_of_a_stream_of_torch_with_another_method_is_refused(session, tmp_path):
    net = digits_network()
    tribe.adapt(net, "bank", compare=0, observe=2).save(tmp_path / "other")
    with pytest.raises(ModelFileError, match="observe"):
        session("digits").load(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="nothing"):
        session("digits").load(tmp_path / "nothing")


# -- streams ----------------------------------------------------------------------------------------------------------


def test_streams_do_not_affect_each_other(session):
    ours, alone = session("digits"), session("digits")
    for i in range(4):
        ours(some(16, 16 * i), stream="a")
        ours(1 - some(16, 16 * i), stream="b")
        alone(some(16, 16 * i))
    assert ours.streams == ["a", "b"]
    assert equal(ours.state("a"), alone.state())
    assert not equal(ours.state("b"), alone.state())
    assert ours.remove("a").streams == ["b"]
    assert ours.info("a").images == 0


def test_threads_do_not_disturb_each_other(session):
    ours, alone = session("digits"), session("digits")
    names = [f"camera {i}" for i in range(4)]

    def play(at, name):
        for i in range(6):
            at(some(16, 16 * i), stream=name)

    threads = [threading.Thread(target=play, args=(ours, name)) for name in (*names, *names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    play(alone, "one")
    for name in names:
        assert ours.info(name).images == 2 * alone.info("one").images, "a step was lost"
        assert ours.info(name).steps == 12


def test_frozen_streams_only_predict(session):
    ours = session("digits")
    ours(some(16))
    before = ours.state()
    predicted = ours.predict(some(16, 16))
    assert equal(ours.state(), before)
    assert np.array_equal(ours.freeze()(some(16, 16)), predicted)
    assert equal(ours.state(), before)
    assert ours.info().frozen
    ours.unfreeze()(some(16, 16))
    assert ours.info() == (32, 0, 2, ours.info().entropy, False)


def test_the_time_filter_of_a_frozen_stream_goes_on(session):
    ours, x = session("marked"), np.random.default_rng(0).random((6, 3, 8, 8), dtype=np.float32)
    ours.freeze()(x)
    first, state = session("marked").state(), ours.state()
    moved = {name for name, t in state.items() if not np.array_equal(t, first[name])}
    assert moved
    assert all(name.startswith("filter.") for name in moved)


def test_reset_snapshot_and_restore(session):
    ours = session("digits")
    first = ours.state()
    ours(some(16))
    kept, then = ours.snapshot(), ours.state()
    ours(some(16, 16))
    assert equal(ours.restore(kept).state(), then)
    assert equal(ours.restore(kept, "another").state("another"), then)
    assert equal(ours.reset().state(), first)
    with pytest.raises(ModelFileError, match="another network"):
        session("marked").restore(kept)


# -- images -----------------------------------------------------------------------------------------------------------

BAD_IMAGES = {
    "none": (some(1)[:0], "at least one"),
    "without a batch": (some(1)[0], "shape"),
    "another size": (np.zeros((2, 1, 32, 32), np.float32), "shape"),
    "of whole numbers": (np.zeros((2, 1, 28, 28), np.uint8), "float32"),
}


@pytest.mark.parametrize("what", BAD_IMAGES)
def test_images_that_do_not_fit_are_refused(what, session):
    x, words = BAD_IMAGES[what]
    ours = session("digits")
    ours(some(8))
    before = ours.state()
    with pytest.raises(ValueError, match=words):
        ours(x)
    assert equal(ours.state(), before)


@pytest.mark.parametrize("pixel", [np.nan, np.inf, 1e30])
def test_a_bad_image_is_predicted_evenly_and_changes_nothing(pixel, session):
    ours, clean, x = session("digits"), session("digits"), some(9)
    ours(x)
    clean(x)
    bad = x.copy()
    bad[3] = pixel
    logits = ours(bad)
    expected = clean(np.delete(bad, 3, 0))
    assert not logits[3].any()
    assert np.abs(np.delete(logits, 3, 0) - expected).max() < 1e-4
    assert ours.info().skipped == 1
    state, wanted = ours.state(), clean.state()
    assert all(np.allclose(t, wanted[name], atol=1e-4) for name, t in state.items() if name != "info.skipped")
    before = ours.state()
    assert not ours(np.full((4, 1, 28, 28), pixel, np.float32)).any()
    after = ours.state()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"info.skipped"}


def test_marks_are_for_files_that_take_them(session):
    with pytest.raises(ValueError, match="valid"):
        session("digits")(some(2), np.ones(2, bool))


# -- files that are no model files ------------------------------------------------------------------------------------


def test_files_that_are_no_model_files_are_refused(model_file, tmp_path):
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "net.onnx"
    with pytest.raises(FileNotFoundError, match=r"net\.onnx"):
        Session(path)
    path.write_bytes(model_file("digits").read_bytes()[:50_000])
    with pytest.raises(ModelFileError, match="cannot be opened"):
        Session(path)
    model = onnx.load(model_file("digits"))
    model.opset_import[0].version = 99
    onnx.save(model, path)
    with pytest.raises(ModelFileError, match="99"):
        Session(path)
    model = onnx.load(model_file("digits"))
    del model.metadata_props[:]
    onnx.save(model, path)
    with pytest.raises(ModelFileError, match="did not write"):
        Session(path)


@pytest.mark.slow
def test_a_network_without_convolutions_cannot_be_tuned(tmp_path):
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(12, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
    )
    tribe.onnx.export(net.eval(), tmp_path / "net.onnx", (3, 2, 2))
    assert Session(tmp_path / "net.onnx")(np.zeros((2, 3, 2, 2), np.float32)).shape == (2, 3)
    with pytest.raises(ModelFileError, match="cannot be tuned"):
        Session(tmp_path / "net.onnx", tune=True)


def test_state_names_are_those_of_the_library(session):
    adapter = tribe.adapt(digits_network(), "bank", compare=0)
    assert list(session("digits").state()) == list(leaves(adapter.state))
