"""State files: resume bit for bit, and survive being killed."""

import dataclasses
import json
import os
import signal
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tribe
from processes import ended
from tribe.io import states
from tribe.testing import images, ready, small_network


def played(steps=3, **fields):
    adapter = tribe.adapt(small_network(), **fields)
    for seed in range(steps):
        adapter(images(1, 6, seed)[0])
    return adapter


@pytest.mark.parametrize("method", tribe.methods.names())
@pytest.mark.parametrize("streams", [1, 3])
def test_a_saved_adapter_goes_on_bit_for_bit(tmp_path, method, streams):
    method = ready(method)
    if method.needs:  # a path is what a state file can hold of it
        method.knowledge.save(tmp_path / "knowledge.safetensors")
        method = dataclasses.replace(method, knowledge=tmp_path / "knowledge.safetensors")
    adapter = tribe.adapt(small_network(), method, streams=streams, seed=5)
    for seed in range(3):
        adapter(images(streams, 6, seed))
    adapter.save(tmp_path / "state.safetensors")
    resumed = tribe.load(tmp_path / "state.safetensors", small_network())
    assert resumed.method == adapter.method
    for seed in range(3, 6):
        x = images(streams, 6, seed)
        assert torch.equal(adapter(x), resumed(x))
    assert adapter.digest() == resumed.digest()
    assert adapter.reset().digest() == resumed.reset().digest(), "the seed survives too"


def test_another_process_goes_on_bit_for_bit(tmp_path):
    adapter = played()
    adapter.save(tmp_path / "state.safetensors")
    script = """
        import sys, torch, tribe
        from tribe.testing import images, small_network
        torch.set_num_threads(int(sys.argv[2]))
        adapter = tribe.load(sys.argv[1], small_network())
        for seed in range(3, 6):
            adapter(images(1, 6, seed)[0])
        print(adapter.digest())
    """
    done = ended("-c", textwrap.dedent(script), tmp_path / "state.safetensors", torch.get_num_threads())
    for seed in range(3, 6):
        adapter(images(1, 6, seed)[0])
    assert done.out.strip() == adapter.digest(), done.err


def test_frozen_and_augmentation_survive(tmp_path):
    augment = tribe.Augment(per="image", hue=(-0.01, 0.02))
    played(augment=augment).freeze().save(tmp_path / "a")
    resumed = tribe.load(tmp_path / "a", small_network())
    assert resumed.method.augment == augment
    assert resumed.info[0].frozen


def test_a_custom_augmentation_is_asked_for_again(tmp_path):
    def flip(x):
        return x.flip(-1)

    adapter = played(augment=flip)
    adapter.save(tmp_path / "a")
    with pytest.raises(tribe.StateFileError, match=r"custom augment .*flip.*augment="):
        tribe.load(tmp_path / "a", small_network())
    resumed = tribe.load(tmp_path / "a", small_network(), augment=flip)
    assert torch.equal(resumed(images(1, 6, 9)[0]), adapter(images(1, 6, 9)[0]))


def test_source_knowledge_may_move(tmp_path):
    method = ready("eata")
    old, new, other = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "other"))
    method.knowledge.save(old)
    adapter = tribe.adapt(small_network(), dataclasses.replace(method, knowledge=old))
    adapter(images(1, 6)[0])
    adapter.save(tmp_path / "state")
    os.rename(old, new)
    with pytest.raises(tribe.StateFileError, match=r"no source knowledge at .*old.*moved.*knowledge=FILE"):
        tribe.load(tmp_path / "state", small_network())
    for given in (new, str(new), method.knowledge):
        resumed = tribe.load(tmp_path / "state", small_network(), knowledge=given)
        assert resumed.digest() == adapter.digest()
        assert resumed.method == adapter.method
    known = method.knowledge
    changed = dataclasses.replace(known, tensors={name: 2 * t for name, t in known.tensors.items()})
    changed.save(other)
    both = f"{known.digest[:12]} from .*old.*other.* holds {changed.digest[:12]}"
    with pytest.raises(tribe.StateFileError, match=both):
        tribe.load(tmp_path / "state", small_network(), knowledge=other)
    changed.save(old)
    with pytest.raises(tribe.StateFileError, match=f"old.*old.* holds {changed.digest[:12]}"):
        tribe.load(tmp_path / "state", small_network())


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    adapter = played()
    adapter.save(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    name = whole.index(b'"digest"')  # who breaks the name of the digest breaks nothing else
    places = {*range(8, header, 11), *range(header, len(whole), 499)} - {*range(name, name + 8)}
    net = tribe.Backbone(small_network())
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / "b").write_bytes(damaged)
        with pytest.raises(tribe.StateFileError):
            tribe.load(tmp_path / "b", net)


def test_a_file_from_before_digests_loads(tmp_path):
    adapter = played()
    adapter.save(tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del header["digest"]
    save_file(tensors, tmp_path / "a", header)
    assert tribe.load(tmp_path / "a", small_network()).digest() == adapter.digest()


@pytest.mark.parametrize("fisher", ["sum", "mean"])
def test_a_file_that_is_older_than_a_field_goes_on_as_before(tmp_path, fisher):
    """Catches a default that changed under a state which had no such field."""
    method = ready("eata")
    method.knowledge.save(tmp_path / "knowledge")
    adapter = tribe.adapt(small_network(), dataclasses.replace(method, knowledge=tmp_path / "knowledge", fisher=fisher))
    adapter(images(1, 6)[0])
    adapter.save(tmp_path / "a")
    assert tribe.load(tmp_path / "a", small_network()).method == adapter.method
    with safe_open(tmp_path / "a", "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    fields = json.loads(header["fields"])
    del fields["fisher"], header["digest"]
    save_file(tensors, tmp_path / "a", header | {"fields": json.dumps(fields)})
    assert tribe.load(tmp_path / "a", small_network()).method.fisher == "sum"


def test_the_file_says_what_it_is(tmp_path):
    played(lr=5e-4).save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        header = file.metadata()
    assert header["format"] == "tribe-state"
    assert header["schema"] == "1"
    assert header["method"] == "tribe"
    assert json.loads(header["fields"])["lr"] == 5e-4


def test_saving_replaces_the_file_and_leaves_nothing_behind(tmp_path):
    adapter = played()
    for _ in range(3):
        adapter.save(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_kill_while_saving_leaves_the_old_state_or_the_new(tmp_path, monkeypatch, renamed):
    adapter = played()
    adapter.save(tmp_path / "a")
    old = adapter.digest()
    adapter(images(1, 6, 9)[0])

    def replace(source, target, _replace=os.replace):
        if renamed:
            _replace(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "replace", replace)
        try:
            adapter.save(tmp_path / "a")
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert tribe.load(tmp_path / "a", small_network()).digest() == (adapter.digest() if renamed else old)


@pytest.mark.parametrize("method", ["tribe", "rotta", "tribe+time"])
def test_a_file_from_before_states_reported_agreement_still_loads(tmp_path, method):
    adapter = tribe.adapt(small_network(), tribe.methods.create(method, classes=4))
    adapter(images(1, 6, 0)[0])
    saved = states.read(adapter.save(tmp_path / "new") or tmp_path / "new")
    older = {name: t for name, t in saved.tensors.items() if not name.endswith("_agreement")}
    assert len(older) == len(saved.tensors) - 2
    states.write(tmp_path / "old", saved._replace(tensors=older))
    resumed = tribe.load(tmp_path / "old", small_network())
    assert (resumed.info[0].student_agreement, resumed.info[0].anchor_agreement) == (1, 1)
    assert torch.equal(resumed(images(1, 6, 1)[0]), adapter(images(1, 6, 1)[0]))
    plain = {name: t for name, t in adapter.state_dict().items() if not name.endswith("_agreement")}
    other = tribe.adapt(small_network(), adapter.method)
    other.load_state_dict(plain)
    assert torch.equal(other(images(1, 6, 2)[0]), adapter(images(1, 6, 2)[0]))


@pytest.mark.parametrize(
    ("method", "later"),
    [
        ("tribe+time", "filter.confidence"),
        ("tribe+guard", "watch.recent"),
        ("tribe+watch", "rings.source"),
        ("tribe+guard", "collapse.burst"),
        ("tribe+guard", "collapse.changed"),
    ],
)
def test_a_file_from_before_a_state_had_a_field_still_loads(tmp_path, method, later):
    adapter = tribe.adapt(small_network(), tribe.methods.create(method, classes=4))
    adapter(images(1, 6, 0)[0])
    saved = states.read(adapter.save(tmp_path / "new") or tmp_path / "new")
    older = {name: t for name, t in saved.tensors.items() if not name.endswith(later)}
    assert len(older) == len(saved.tensors) - 1
    states.write(tmp_path / "old", saved._replace(tensors=older))
    resumed = tribe.load(tmp_path / "old", small_network())
    assert torch.equal(resumed(images(1, 6, 1)[0]), adapter(images(1, 6, 1)[0]))
    fleet = tribe.fleet(small_network(), tribe.methods.create(method, classes=4))
    fleet.load("camera", tmp_path / "old")
    assert fleet({"camera": images(1, 6, 2)[0]})["camera"].shape == (6, 4)
