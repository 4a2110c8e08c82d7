"""State files: resume bit for bit, and refuse what does not fit. `test_files` kills their writer."""

import dataclasses
import os
import textwrap

import pytest
import torch
from safetensors.torch import save_file

import tribe
from processes import ended
from tribe.io import tensors as tensor_file
from tribe.io.states import STATE
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
    if method.needs:
        method.knowledge.save(tmp_path / "knowledge.safetensors")
        method = dataclasses.replace(method, knowledge=tmp_path / "knowledge.safetensors")
    adapter = tribe.adapt(small_network(), method, streams=streams, seed=5)
    for seed in range(3):
        adapter(images(streams, 6, seed))
    adapter.save(tmp_path / "state.safetensors")
    given = {"knowledge": method.knowledge} if method.needs else {}
    resumed = tribe.load(tmp_path / "state.safetensors", small_network(), **given)
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


def test_source_knowledge_is_given_and_compared(tmp_path):
    method = ready("eata")
    old, new, other = (tmp_path / f"{name}.safetensors" for name in ("old", "new", "other"))
    method.knowledge.save(old)
    adapter = tribe.adapt(small_network(), dataclasses.replace(method, knowledge=old))
    adapter(images(1, 6)[0])
    adapter.save(tmp_path / "state")
    with pytest.raises(tribe.StateFileError, match=r"old.*not opened.*knowledge=FILE"):
        tribe.load(tmp_path / "state", small_network())
    os.rename(old, new)
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


def rewrite(path, **changes):
    """Write the same file with another header or other tensors, and a digest that fits."""
    header, tensors = tensor_file.read(path, STATE)
    tensors |= changes.pop("tensors", {})
    for name in changes.pop("without", []):
        del tensors[name]
    tensor_file.write(path, dataclasses.replace(STATE, schema=changes.pop("schema", 1)), header | changes, tensors)


FILES = {  # the damage, and a word of the error
    "with numbers that are not finite": (
        lambda p: rewrite(p, tensors={"affine.bias": torch.full((1, 14), -torch.inf)}),
        "not finite",
    ),
    "text": (lambda p: p.write_text("state\n" * 99), "not a tribe state file"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-7]), "cut short"),
    "weights of some network": (lambda p: save_file({"w": torch.ones(2)}, p), "not a tribe state"),
    "of another version": (lambda p: rewrite(p, schema=2), "schema 2"),
    "from another model": (lambda p: rewrite(p, fingerprint="0"), "another model"),
    "with more streams in its header": (lambda p: rewrite(p, streams=10_000_000), "10000000 streams"),
    "of an unknown method": (lambda p: rewrite(p, method="tribe2"), "tribe2"),
    "with a field too many": (lambda p: rewrite(p, fields={"classes": 4, "speed": 3}), "speed"),
    "with a tensor missing": (lambda p: rewrite(p, without=["affine.bias"]), "affine.bias"),
    "with a tensor of another shape": (lambda p: rewrite(p, tensors={"affine.bias": torch.zeros(1, 3)}), "affine.bias"),
    "with a tensor of another type": (
        lambda p: rewrite(p, tensors={"affine.bias": torch.zeros(1, 14, dtype=torch.float16)}),
        "float16",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_does_not_fit_is_refused(tmp_path, case):
    damage, word = FILES[case]
    played(1).save(tmp_path / "state.safetensors")
    damage(tmp_path / "state.safetensors")
    with pytest.raises(tribe.StateFileError, match=word):
        tribe.load(tmp_path / "state.safetensors", small_network())


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [({"lr": 0.1}, tribe.StateFileError, "holds lr=0.001 already"), ({"speed": 1}, TypeError, "no field 'speed'")],
)
def test_fields_that_a_file_holds_cannot_be_given(tmp_path, fields, error, message):
    played(1).save(tmp_path / "a")
    with pytest.raises(error, match=message):
        tribe.load(tmp_path / "a", small_network(), **fields)


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
