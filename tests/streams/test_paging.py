"""A fleet has bounded memory: states that were not used for long move to host memory, then to files, and come back."""

import errno
import logging
import os

import pytest
import torch

import tribe
from tribe.core.state import leaves
from tribe.health.recorder import count_bytes
from tribe.io import states
from tribe.testing import images
from tribe.testing.samples import small_backbone

NET = small_backbone()
NAMES = [f"cam{i}" for i in range(6)]


def batch(names, seed):
    return {name: images(1, 1 + i % 2, 10 * seed + i)[0] for i, name in enumerate(names)}


def places(fleet):
    return {name: fleet._pool.entries[name].place for name in fleet.names}


def files(folder):
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("on_host", [0, 2, 99])
def test_a_paged_stream_comes_back_bit_for_bit(tmp_path, on_host):
    size = count_bytes(tribe.fleet(NET).add("a").state("a")) / 2**20
    small, large = tribe.fleet(NET, rows=2, spill=tmp_path, megabytes=on_host * size), tribe.fleet(NET)
    for seed, names in enumerate((NAMES, NAMES[:3], NAMES[2:5])):
        given = batch(names, seed)
        answers, expected = small(given), large(given)
        assert all(torch.equal(answers[name], expected[name]) for name in names)
        infos = {name: small.info(name) for name in small.names}  # without moving anything
        assert list(places(small).values()).count("device") <= 2
        assert infos == {name: large.info(name) for name in large.names}
    there = list(places(small).values())
    assert there.count("device") == 2
    assert len(files(tmp_path)) == there.count("file")
    assert there.count("host") == min(on_host, 4)
    assert [small.digest(name) for name in NAMES] == [large.digest(name) for name in NAMES]
    assert list(places(small).values()) == there, "a digest moves nothing"


def test_without_a_folder_states_stay_in_memory():
    fleet = tribe.fleet(NET, rows=1, megabytes=0)
    fleet(batch(NAMES, 0))
    assert sorted(places(fleet).values()) == ["device", *["host"] * 5]


def test_the_least_recently_used_streams_go_first(tmp_path):
    fleet = tribe.fleet(NET, rows=2, spill=tmp_path, megabytes=0)
    for name in ("a", "b", "c"):
        fleet({name: images(1, 1)[0]})
    assert places(fleet) == {"a": "file", "b": "device", "c": "device"}
    fleet.predict({"b": images(1, 1)[0]})
    fleet({"a": images(1, 1)[0]})
    assert places(fleet) == {"a": "device", "b": "device", "c": "file"}


def test_whatever_is_done_to_a_paged_stream_leaves_no_file(tmp_path):
    fleet = tribe.fleet(NET, rows=1, spill=tmp_path, megabytes=0)
    fleet(batch(NAMES, 0))
    assert len(files(tmp_path)) == 5
    paged = [name for name, place in places(fleet).items() if place == "file"]
    copy, image = tribe.fleet(NET), images(1, 1)[0]
    copy.from_bytes("x", fleet.to_bytes(paged[0]))
    assert copy.digest("x") == fleet.digest(paged[0]) == fleet.restore("y", fleet.snapshot(paged[0])).digest("y")
    fleet.freeze(paged[1])
    assert fleet.info(paged[1]).frozen
    assert places(fleet)[paged[1]] == "file"
    fleet({paged[1]: image})
    assert fleet.clock(paged[1]) == 1, "it is frozen"
    for name in fleet.names:
        fleet.drop(name)
    assert files(tmp_path) == []


def test_the_files_go_with_the_fleet(tmp_path):
    fleet = tribe.fleet(NET, rows=1, spill=tmp_path, megabytes=0)
    fleet(batch(NAMES, 0))
    tribe.load(files(tmp_path)[0], NET)  # they are state files
    other = tribe.fleet(NET, rows=1, spill=tmp_path, megabytes=0)
    other(batch(NAMES, 0))
    assert len(files(tmp_path)) == 10
    del fleet
    assert len(files(tmp_path)) == 5
    assert other.clock("cam0") == 1


def test_a_state_that_no_file_can_hold_stays_in_memory(tmp_path):
    fleet = tribe.fleet(NET, rows=1, spill=tmp_path, megabytes=0)
    fleet({"a": images(1, 1)[0]})
    leaves(fleet._pool.entries["a"].state)["affine.weight"].fill_(torch.nan)
    fleet({"b": images(1, 1)[0], "c": images(1, 1)[0]})
    assert places(fleet) == {"a": "host", "b": "file", "c": "device"}


def test_a_full_disk_loses_nothing_and_is_reported_once(tmp_path, monkeypatch, caplog):
    """Paging out is not part of a step: the step has learned, and its alarms are heard."""
    heard = []
    fleet = tribe.fleet(NET, rows=1, spill=tmp_path, megabytes=0, health=True, on_event=heard.append)
    write = states.write_atomically

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(states, "write_atomically", full)
    with caplog.at_level(logging.WARNING, "tribe.fleet"):
        for _ in range(2):
            fleet({name: torch.zeros(40, 3, 8, 8) for name in "abc"})
    assert {name: fleet.clock(name) for name in "abc"} == dict.fromkeys("abc", 2)
    assert {event.kind for event in heard} >= {"black"}
    assert places(fleet) == {"a": "host", "b": "host", "c": "device"}
    (message,) = (record.getMessage() for record in caplog.records if record.name == "tribe.fleet")
    assert "No space left on device" in message
    monkeypatch.setattr(states, "write_atomically", write)
    fleet({"c": torch.zeros(1, 3, 8, 8)})
    assert places(fleet) == {"a": "file", "b": "file", "c": "device"}


def test_a_file_that_something_else_removed_is_an_error_in_words(tmp_path):
    fleet = tribe.fleet(NET, rows=1, spill=tmp_path, megabytes=0)
    for name in "abc":
        fleet({name: images(1, 1)[0]})
    for file in files(tmp_path):
        file.unlink()
    for use in (fleet.predict, fleet):
        with pytest.raises(tribe.StateFileError, match=r"is gone.*stream 'a'.*reset\('a'\)"):
            use({"a": images(1, 1)[0]})
    fleet.reset("a")
    fleet.drop("b")
    fleet({"a": images(1, 1)[0], "c": images(1, 1)[0]})
    assert fleet.clock("a") == 1
    assert fleet.clock("c") == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_child_leaves_the_files_of_its_parent(tmp_path):
    fleet = tribe.fleet(NET, rows=1, spill=tmp_path, megabytes=0)
    fleet(batch(NAMES, 0))
    kept = files(tmp_path)
    child = os.fork()
    if not child:
        fleet._pool._finalizer()  # as at the exit of the child
        os._exit(0)
    os.waitpid(child, 0)
    assert files(tmp_path) == kept
    assert len(kept) == 5


def test_a_state_of_a_stream_shares_no_memory_with_those_of_others():
    fleet = tribe.fleet(NET)
    fleet({name: images(1, 1, i)[0] for i, name in enumerate(NAMES)})
    pointers = [
        t.untyped_storage().data_ptr() for name in NAMES for t in leaves(fleet._pool.entries[name].state).values()
    ]
    sizes = {
        t.untyped_storage().nbytes() // t.nbytes for n in NAMES for t in leaves(fleet._pool.entries[n].state).values()
    }
    assert len(set(pointers)) == len(pointers)
    assert sizes == {1}


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"rows": 1.5}, {"megabytes": -1}, {"megabytes": "many"}, {"exact": 3}])
def test_wrong_limits_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tribe.fleet(NET, **wrong)
