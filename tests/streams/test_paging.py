"""A fleet has bounded memory on the device: states that were not used for long move to host memory, and come back."""

import pytest
import torch

import tribe
from tribe.core.state import leaves
from tribe.testing import images
from tribe.testing.samples import small_backbone

NET = small_backbone()
NAMES = [f"cam{i}" for i in range(6)]


def batch(names, seed):
    return {name: images(1, 1 + i % 2, 10 * seed + i)[0] for i, name in enumerate(names)}


def places(fleet):
    return {name: fleet.table.entries[name].residence for name in fleet.names}


def test_a_paged_stream_comes_back_bit_for_bit():
    small, large = tribe.fleet(NET, rows=2), tribe.fleet(NET)
    for seed, names in enumerate((NAMES, NAMES[:3], NAMES[2:5])):
        given = batch(names, seed)
        answers, expected = small(given), large(given)
        assert all(torch.equal(answers[name], expected[name]) for name in names)
        reports = {name: small.info(name) for name in small.names}  # without moving anything
        assert list(places(small).values()).count("device") <= 2
        assert reports == {name: large.info(name) for name in large.names}
    there = places(small)
    assert list(there.values()).count("host") == 4
    assert [small.digest(name) for name in NAMES] == [large.digest(name) for name in NAMES]
    assert places(small) == there, "a digest moves nothing"


def test_the_least_recently_used_streams_go_first():
    fleet = tribe.fleet(NET, rows=2)
    for name in ("a", "b", "c"):
        fleet({name: images(1, 1)[0]})
    assert places(fleet) == {"a": "host", "b": "device", "c": "device"}
    fleet.predict({"b": images(1, 1)[0]})
    fleet({"a": images(1, 1)[0]})
    assert places(fleet) == {"a": "device", "b": "device", "c": "host"}


def test_a_stream_on_the_host_can_be_used_as_any_other():
    fleet = tribe.fleet(NET, rows=1)
    fleet(batch(NAMES, 0))
    paged = [name for name, place in places(fleet).items() if place == "host"]
    copy = tribe.fleet(NET).from_bytes("x", fleet.to_bytes(paged[0]))
    assert copy.digest("x") == fleet.digest(paged[0]) == fleet.restore("y", fleet.snapshot(paged[0])).digest("y")
    fleet.freeze(paged[1])
    assert fleet.info(paged[1]).frozen
    assert places(fleet)[paged[1]] == "host"
    fleet({paged[1]: images(1, 1)[0]})
    assert fleet.clock(paged[1]) == 1, "it is frozen"
    for name in fleet.names:
        fleet.drop(name)
    assert len(fleet) == 0


def test_a_state_of_a_stream_shares_no_memory_with_those_of_others():
    fleet = tribe.fleet(NET)
    fleet({name: images(1, 1, i)[0] for i, name in enumerate(NAMES)})
    tensors = [t for name in NAMES for t in leaves(fleet.table.entries[name].state).values()]
    pointers = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(pointers)) == len(pointers)
    assert {t.untyped_storage().nbytes() // t.nbytes for t in tensors} == {1}


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"rows": 1.5}, {"exact": 3}, {"exact": "auto"}])
def test_wrong_limits_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tribe.fleet(NET, **wrong)
