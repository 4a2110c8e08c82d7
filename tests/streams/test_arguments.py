"""Bad names, images and networks get a clear error, and change nothing."""

import pytest
import torch

import tribe
from tribe.streams import UnknownStream
from tribe.testing import images
from tribe.testing.shared import small_backbone

NET = small_backbone()


def x(seed=0, size=2):
    return images(1, size, seed)[0]


@pytest.mark.parametrize("name", [3, None, b"cam", ("a",), ""])
def test_a_name_is_a_text_that_is_not_empty(name):
    fleet, error, words = tribe.fleet(NET), *((ValueError, "empty") if name == "" else (TypeError, "name"))
    for call in (fleet.add, fleet.info, fleet.reset, lambda n: fleet({n: x()}), lambda n: fleet.from_bytes(n, b"")):
        with pytest.raises(error, match=words):
            call(name)
    assert fleet.names == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "a\nb", "\ud800", "k" * 10_000, "\x00"])
def test_any_text_is_a_name(name):
    assert tribe.fleet(NET).add(name).names == [name]


def test_an_unknown_stream_is_named():
    fleet = tribe.fleet(NET).add("cam1")
    calls = [fleet.info, fleet.drop, fleet.freeze, fleet.unfreeze, fleet.reset, fleet.snapshot, fleet.state]
    calls += [fleet.digest, fleet.clock, fleet.export, fleet.to_bytes, lambda n: fleet.predict({n: x()})]
    for call in calls:
        with pytest.raises(UnknownStream, match="'cam1'"):
            call("cam2")
    with pytest.raises(LookupError, match="none"):
        tribe.fleet(NET).info("cam1")
    with pytest.raises(ValueError, match="already"):
        fleet.add("cam1")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), TypeError, "stream 'bad': images are torch.uint8"),
        ([1, 2], TypeError, "stream 'bad': expected a tensor"),
        (torch.rand(8), ValueError, "stream 'bad': expected images"),
        (torch.rand(2, 5, 8, 8), ValueError, "could not take images of shape"),
    ],
)
def test_images_of_one_stream_that_cannot_be_used_leave_all_as_they_were(wrong, error, message):
    fleet = tribe.fleet(NET)
    fleet({"good": x()})
    before = fleet.digest("good")
    for call in (fleet, fleet.learn):
        with pytest.raises(error, match=message):
            call({"good": x(1), "bad": wrong})
    assert fleet.names == ["good"]
    assert fleet.digest("good") == before
    with pytest.raises(TypeError, match="images"):
        fleet(x())


def test_bad_images_are_skipped_and_named():
    fleet, adapter = tribe.fleet(NET), tribe.adapt(NET)
    broken = x(0, 3)
    broken[1, 0, 0, 0] = torch.nan
    answers = fleet({"a": broken, "b": x(1, 3)})
    assert fleet.info("a").poisoned == (1,)
    assert fleet.info("a").skipped == 1
    assert fleet.info("b").poisoned == ()
    assert torch.equal(answers["a"], adapter(broken))
    fleet.predict({"b": broken})
    assert fleet.info("b").poisoned == (1,)
    assert fleet.info("b").skipped == 0
    fleet({"a": x(2)})
    assert fleet.info("a").poisoned == ()
    assert fleet.info("a").skipped == 1


def test_a_network_that_moved_is_refused():
    net = small_backbone()
    fleet = tribe.fleet(net).add("a")
    net.double()
    for call in (fleet, fleet.predict):
        with pytest.raises(RuntimeError, match="moved"):
            call({"a": x().double()})


def test_a_seed_is_an_int():
    with pytest.raises(TypeError, match="seed is an int"):
        tribe.fleet(NET).add("a", seed="one")


def test_without_exact_bits_streams_agree_to_rounding():
    fast, exact = (tribe.fleet(small_backbone(torch.float64), exact=e) for e in (False, True))
    for seed in range(3):
        batch = {name: images(1, 1 + i % 2, 9 * seed + i, torch.float64)[0] for i, name in enumerate("abcde")}
        answers, expected = fast(batch), exact(batch)
        assert all(torch.allclose(answers[name], expected[name], atol=1e-9) for name in batch)
