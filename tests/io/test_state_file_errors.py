"""State files that are missing, damaged or do not fit are refused, and a bad state is not written."""

import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tribe
from limited import run_limited
from networks import batch
from tribe.methods.encoding import method_for_file
from tribe.testing import images, small_network


def adapter(streams=1, **fields):
    made = tribe.adapt(small_network(), streams=streams, **fields)
    made(images(streams, 6) if streams > 1 else batch())
    return made


def _rewrite(path, **changes):
    """The same file with another header or other tensors; without a digest, as older versions wrote them."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    metadata.pop("digest", None)
    tensors.update(changes.pop("tensors", {}))
    for name in changes.pop("without", []):
        del tensors[name]
    save_file(tensors, path, {**metadata, **changes})


FILES = {
    "missing": (lambda p: p.unlink(), FileNotFoundError, "no tribe state file at"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), IsADirectoryError, "is a folder; expected a tribe state file"),
    "with a wrong number": (
        lambda p: _rewrite(p, digest="0", tensors={"affine.bias": torch.zeros(1, 14)}),
        tribe.StateFileError,
        "damaged: it does not hold what was saved",
    ),
    "with numbers that are not finite": (
        lambda p: _rewrite(p, tensors={"affine.bias": torch.full((1, 14), -torch.inf)}),
        tribe.StateFileError,
        r"a state that is not finite \(affine.bias\).*earlier file",
    ),
    "empty": (lambda p: p.write_bytes(b""), tribe.StateFileError, "not a tribe state file, or it was cut short"),
    "text": (lambda p: p.write_text("state\n" * 99), tribe.StateFileError, "not a tribe state file"),
    "a pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), tribe.StateFileError, "not a tribe state file"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-7]), tribe.StateFileError, "cut short"),
    "a truncated header": (lambda p: p.write_bytes(p.read_bytes()[:40]), tribe.StateFileError, "cut short"),
    "weights of some network": (
        lambda p: save_file({"w": torch.ones(2)}, p),
        tribe.StateFileError,
        "not a tribe state",
    ),
    "from a newer version": (
        lambda p: _rewrite(p, schema="2", tribe="9.1"),
        tribe.StateFileError,
        "written by tribe 9.1 with schema 2.*upgrade",
    ),
    "from another model": (lambda p: _rewrite(p, fingerprint="0"), tribe.StateFileError, "saved from another model"),
    "with more streams in its header than in its tensors": (
        lambda p: _rewrite(p, streams="10000000"),
        tribe.StateFileError,
        r"says 10000000 streams, its tensors hold seeds of shape \(1,\)",
    ),
    "of an unknown method": (lambda p: _rewrite(p, method="tribe2"), tribe.StateFileError, "'tribe2', unknown here"),
    "with a broken header": (lambda p: _rewrite(p, fields="{"), tribe.StateFileError, "header"),
    "with a field too many": (
        lambda p: _rewrite(p, fields=json.dumps({"classes": 4, "speed": 3})),
        tribe.StateFileError,
        "speed",
    ),
    "with a tensor missing": (
        lambda p: _rewrite(p, without=["affine.bias"]),
        tribe.StateFileError,
        "affine.bias missing or unexpected",
    ),
    "with a tensor of another shape": (
        lambda p: _rewrite(p, tensors={"affine.bias": torch.zeros(1, 3)}),
        tribe.StateFileError,
        r"affine.bias is \(1, 3\)",
    ),
    "with a tensor of another type": (
        lambda p: _rewrite(p, tensors={"affine.bias": torch.zeros(1, 14, dtype=torch.float16)}),
        tribe.StateFileError,
        "float16; expected",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files(tmp_path, case):
    damage, error, message = FILES[case]
    path = tmp_path / "state.safetensors"
    adapter().save(path)
    damage(path)
    with pytest.raises(error, match=message):
        tribe.load(path, small_network())


SETTINGS = {
    "a memory of a billion places": ("rotta", {"size": 10**9}, "its settings ask for more"),
    "images of 10**15 values": ("rotta", {"room": 10**15}, "damaged: its settings ask for more"),
    "a reservoir of a billion places": ("note", {"size": 10**9}, "damaged: its settings ask for more"),
    "sizes whose product overflows": ("note", {"size": 2**62, "room": 2**62}, "damaged: its settings ask for more"),
    "a number of 30 digits": ("rotta", {"size": 10**30}, "header cannot be read"),
    "a number of 65 bits": ("rotta", {"size": 2**64}, "size of rotta is a whole number of at most 64 bits"),
    "a billion classes": ("tribe", {"classes": 10**9}, "classes=1000000000, but the network"),
    "an augmentation that is a number": ("tribe", {"augment": {"augment": 3}}, "does not take here"),
    "an augmentation without a range": (
        "tribe",
        {"augment": {"augment": {"sigma": []}}},
        r"sigma must be \(low, high\)",
    ),
    "an augmentation of text": (
        "tribe",
        {"augment": {"augment": {"noise": "loud"}}},
        "noise not negative",
    ),
    "source knowledge without a digest": ("tribe", {"augment": {"knowledge": "x"}}, "no path or no digest"),
    "source knowledge at a number": ("tribe", {"augment": {"knowledge": 3, "digest": "x"}}, "no path or no digest"),
    "a list in a list in a list": ("tribe", {"lr": json.loads("[" * 60 + "]" * 60)}, "does not take here"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_do_not_belong_to_the_tensors_are_refused_without_memory(tmp_path, case):
    method, fields, message = SETTINGS[case]
    path = tmp_path / "state.safetensors"
    saved = adapter(method=method)
    saved.save(path)
    _rewrite(path, fields=json.dumps(method_for_file(saved.method) | fields))
    with pytest.raises(ValueError, match=message):
        tribe.load(path, small_network())


LOAD = """
from tribe.testing import small_network
try:
    tribe.load(sys.argv[1], small_network())
except tribe.StateFileError as error:
    print(error)
"""


@pytest.mark.parametrize("case", ["streams", "streams and seeds", "places"])
def test_a_small_file_that_asks_for_much_takes_little_memory(tmp_path, case):
    path, many = tmp_path / "state.safetensors", 2_000_000
    saved = adapter(method="rotta")
    saved.save(path)
    if case == "places":
        _rewrite(path, fields=json.dumps(method_for_file(saved.method) | {"size": many, "room": 300}))
    else:
        _rewrite(path, streams=str(many), tensors={} if case == "streams" else {"key.seed": torch.arange(many)})
    done = run_limited(LOAD, path, megabytes=768)
    assert done.code == 0, done.err
    assert "damaged" in done.out


def test_a_deep_header_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    adapter().save(path)
    for text in ("[" * 100_000, json.dumps({"lr": json.loads("[" * 300 + "]" * 300)})):
        _rewrite(path, fields=text)
        with pytest.raises(tribe.StateFileError, match="damaged: its header cannot be read"):
            tribe.load(path, small_network())


def test_a_file_from_another_network(tmp_path):
    adapter().save(tmp_path / "a")
    with pytest.raises(tribe.StateFileError, match="saved from another model"):
        tribe.load(tmp_path / "a", small_network(seed=1))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [({"lr": 0.1}, tribe.StateFileError, "holds lr=0.001 already"), ({"speed": 1}, TypeError, "no field 'speed'")],
)
def test_fields_that_a_file_holds_cannot_be_given(tmp_path, fields, error, message):
    adapter().save(tmp_path / "a")
    with pytest.raises(error, match=message):
        tribe.load(tmp_path / "a", small_network(), **fields)


@pytest.mark.parametrize(
    ("where", "error", "message"), [("gone/a", FileNotFoundError, "no folder"), ("", IsADirectoryError, "is a folder")]
)
def test_saving_where_nothing_can_be_saved(tmp_path, where, error, message):
    with pytest.raises(error, match=message):
        adapter().save(tmp_path / where)


def test_a_state_that_is_not_finite_is_not_saved_over_a_good_one(tmp_path):
    model = tribe.adapt(small_network(), streams=3)
    model(images(3, 6))
    model.save(tmp_path / "a")
    good, snapshot = (tmp_path / "a").read_bytes(), model.snapshot()
    model.state.affine.weight[[0, 2]] = torch.nan
    with pytest.raises(tribe.StateFileError, match=r"of stream 0, 2 is not finite \(.*reset.*restore.*Nothing was"):
        model.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == good
    model.reset(stream=0).reset(stream=2).save(tmp_path / "b")
    model.restore(snapshot).save(tmp_path / "c")
    assert tribe.load(tmp_path / "c", small_network()).digest() == tribe.core.state.digest(snapshot.state)
