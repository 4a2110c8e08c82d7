"""State files: resume bit for bit, and survive being killed."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tribe
from tribe.storage.atomic import write_atomically
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
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(script),
        tmp_path / "state.safetensors",
        str(torch.get_num_threads()),
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    for seed in range(3, 6):
        adapter(images(1, 6, seed)[0])
    assert printed == adapter.digest()


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


def test_the_file_says_what_it_is(tmp_path):
    played(lr=5e-4).save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        header = file.metadata()
    assert header["format"] == "tribe-state"
    assert header["schema"] == "1"
    assert header["method"] == "tribe"
    assert json.loads(header["fields"])["lr"] == 5e-4


def test_saving_replaces_whole_files_and_leaves_nothing_behind(tmp_path):
    adapter = played()
    for _ in range(3):
        adapter.save(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    old = tmp_path / ".a.killed.tmp"
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    adapter.save(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"], "what a killed writer left long ago is swept"


def test_saving_keeps_who_may_read_a_file_and_follows_a_link(tmp_path):
    adapter = played()
    adapter.save(tmp_path / "a")
    (tmp_path / "a").chmod(0o600)
    before = (tmp_path / "a").read_bytes()
    (tmp_path / "link").symlink_to("a")
    adapter(images(1, 4, seed=9)[0])
    adapter.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_bytes() != before
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_atomically(tmp_path / "pipe", b"news")
    reader.join()
    assert read == [b"news"]
    assert (tmp_path / "pipe").is_fifo()
    write_atomically(os.devnull, b"news")
    assert not Path(os.devnull).is_file()


KILLER = """
    import os, random, signal, sys, time, torch, tribe
    from tribe.testing import images
    from torch import nn

    torch.set_num_threads(1)  # a forked child has no thread pool
    torch.manual_seed(0)
    body = nn.Conv2d(3, 1024, 1), nn.BatchNorm2d(1024), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(*body, nn.Linear(1024, 64))
    path = sys.argv[1]
    backbone = tribe.Backbone(net)
    a, b = tribe.adapt(backbone, seed=0), tribe.adapt(backbone, seed=1)
    a(images(1, 4, 0)[0]), b(images(1, 4, 1)[0])
    known = {a.digest(), b.digest()}
    a.save(path)
    begun = time.perf_counter()
    b.save(path)
    length = time.perf_counter() - begun
    draw, unfinished, seen = random.Random(0), 0, set()
    folder = os.path.dirname(path)

    def half_written():
        return [os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".tmp")]

    def wait_for_saves(count):
        for _ in range(count):
            before = os.stat(path).st_ino
            while os.stat(path).st_ino == before:
                pass

    for i in range(int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            while True:
                a.save(path)
                b.save(path)
        if i % 4 < 3:
            time.sleep(length * draw.uniform(0.2, 4))
        else:  # right after the first save of this child, or its second: both states are found, however slow it is
            wait_for_saves(1 + i % 8 // 4)
        while i % 2 and not half_written():  # every other kill waits for a file in the making
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        digest = tribe.load(path, backbone).digest()  # raises if the file is broken
        assert digest in known, "the file holds neither state"
        seen.add(digest)
        left = half_written()
        unfinished += bool(left)
        for f in left:
            os.unlink(f)
    print(unfinished, len(seen))
"""


def test_fifty_kills_while_saving_leave_the_old_file_or_the_new(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLER), str(tmp_path / "state.safetensors"), "50"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    unfinished, states = map(int, result.stdout.split())
    assert unfinished >= 10, "too few kills met a half-written file for this test to mean anything"
    assert states == 2, "both states should have been found"
