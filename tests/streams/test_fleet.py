"""Streams of a fleet come and go, are frozen, reset, saved, restored and paged; each gets what it gets alone."""

import pytest
import torch

import tribe
from tribe import methods
from tribe.core.state import digest, leaves
from tribe.io.states import StateFileError
from tribe.streams import UnknownStream, stream_seed
from tribe.streams.core import EXACT, OWN_WEIGHTS
from tribe.testing import images, ready, small_network
from tribe.testing.shared import small, small_backbone

NET = small_backbone()


def x(seed=0, size=2):
    return images(1, size, seed)[0]


def lively(**options):
    """A fleet of two streams that have learned something."""
    fleet = tribe.fleet(NET, h0=2.0, **options)
    for seed in range(2):
        fleet({"a": x(seed), "b": x(10 + seed, 3)})
    return fleet


def test_the_order_of_adding_does_not_matter():
    one, other = tribe.fleet(NET).add("a").add("b"), tribe.fleet(NET).add("b").add("a")
    assert one.digest("a") == other.digest("a") != one.digest("b")
    assert one.state("a").key.seed.item() == stream_seed("a", 0)
    assert tribe.fleet(NET, seed=1).add("a").state("a").key.seed.item() == stream_seed("a", 1) != stream_seed("a", 0)
    assert tribe.fleet(NET).add("a", seed=7).state("a").key.seed.item() == 7
    assert stream_seed("cam1") == 1800425154380021466, "seeds are the same in every version: states depend on them"


def test_streams_are_added_and_dropped():
    fleet = tribe.fleet(NET)
    assert len(fleet) == 0
    fleet({"b": x()})
    fleet.add("a")
    assert (fleet.names, len(fleet), fleet.clock("a"), fleet.clock("b")) == (["a", "b"], 2, 0, 1)
    fleet.drop("b")
    assert fleet.names == ["a"]
    assert ("a" in fleet, "b" in fleet) == (True, False)
    fleet({"b": x()})
    assert fleet.clock("b") == 1, "it starts anew"


def test_only_streams_with_images_are_stepped():
    fleet = lively()
    before = fleet.digest("b")
    assert fleet({"a": x(5)}).keys() == {"a"}
    assert fleet.clock("a") == 3
    assert fleet.digest("b") == before
    assert fleet({}) == {}
    assert fleet.predict({}) == {}


def test_answers_have_the_layout_and_the_order_of_the_images():
    fleet = lively()
    given = {"b": x(1, 4), "new": x(2, 1).unsqueeze(0), "a": x(3, 0)}
    for answers in (fleet(given), fleet.predict(given)):
        assert list(answers) == ["b", "new", "a"]
        assert [tuple(t.shape) for t in answers.values()] == [(4, 4), (1, 1, 4), (0, 4)]
    assert fleet.clock("a") == 2, "a batch without images is no step"


def test_a_frozen_stream_only_predicts():
    fleet = lively()
    before = fleet.digest("a")
    fleet.freeze("a")
    expected = fleet.predict({"a": x(5)})["a"]
    answers = fleet({"a": x(5), "b": x(5)})
    assert torch.equal(answers["a"], expected)
    assert fleet.digest("a") == before
    assert fleet.info("a").frozen
    assert not fleet.info("b").frozen
    assert fleet.clock("b") == 3
    fleet.unfreeze("a").learn({"a": x(5)})
    assert fleet.clock("a") == 3


def test_a_frozen_stream_goes_on_in_time():
    fleet = tribe.fleet(NET, time="auto")
    fleet({"a": x(0), "b": x(1)})
    fleet.freeze("a").freeze("b")
    before = fleet.state("a")
    expected = fleet.predict({"a": x(2), "b": x(3)})
    answers = fleet({"a": x(2), "b": x(3)})
    assert all(torch.equal(answers[name], expected[name]) for name in "ab")
    after = fleet.state("a")
    assert digest(after.method) == digest(before.method)
    assert digest(after.filter) != digest(before.filter)


def test_one_stream_is_reset():
    fleet, other = lively(), lively().digest("b")
    assert fleet.reset("a").digest("a") == tribe.fleet(NET, h0=2.0).add("a").digest("a")
    assert fleet.digest("b") == other


def test_a_stream_returns_to_a_snapshot():
    fleet, adapter = lively(), tribe.adapt(NET, h0=2.0)
    snapshot, before = fleet.snapshot("a"), fleet.digest("a")
    assert adapter.restore(snapshot).digest() == before
    adapter(x(4))
    assert fleet.restore("door", adapter.snapshot()).digest("door") == adapter.digest()
    fleet({"a": x(5)})
    fleet.freeze("a")
    assert fleet.restore("a", snapshot).digest("a") == before
    assert not fleet.info("a").frozen
    assert fleet.restore("copy", snapshot).digest("copy") == before
    with pytest.raises(ValueError, match="taken with"):
        tribe.fleet(NET, "bn").restore("a", snapshot)
    with pytest.raises(TypeError, match="snapshot"):
        fleet.restore("a", fleet.state("a"))


def test_a_state_is_a_copy():
    fleet = lively()
    before = fleet.digest("a")
    for tensor in leaves(fleet.state("a")).values():
        tensor.zero_()
    assert fleet.digest("a") == before


def test_a_stream_is_saved_and_loaded(tmp_path):
    fleet, path = lively(), tmp_path / "a.safetensors"
    fleet.freeze("a").save("a", path)
    adapter = tribe.load(path, NET)
    assert adapter.digest() == fleet.digest("a")
    assert adapter.info[0].frozen
    assert len(path.read_bytes()) == len(fleet.to_bytes("a"))
    logits = adapter.unfreeze()(x(6))
    file, data = (tribe.fleet(NET, h0=2.0) for _ in range(2))
    for other in (file.load("z", path), data.from_bytes("z", fleet.to_bytes("a"))):
        assert other.digest("z") == fleet.digest("a")
        assert other.info("z").frozen
        assert torch.equal(other.unfreeze("z")({"z": x(6)})["z"], logits)
        assert other.digest("z") == adapter.digest()


def test_a_custom_augmentation_is_that_of_the_fleet():
    fleet = tribe.fleet(NET, augment=lambda x: x.flip(-1), h0=2.0)
    fleet({"a": x(0)})
    assert fleet.from_bytes("b", fleet.to_bytes("a")).digest("b") == fleet.digest("a")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tribe.fleet(NET, "bn").add("a").to_bytes("a"), "saved with"),
        (lambda: tribe.fleet(NET, lr=0.5).add("a").to_bytes("a"), "saved with"),
        (lambda: tribe.fleet(small_network(seed=1)).add("a").to_bytes("a"), "model"),
        (lambda: b"nonsense", "is not a tribe state file"),
        (lambda: tribe.fleet(NET).add("a").to_bytes("a")[:-9], "cut short or damaged"),
        (lambda: b"", "is not a tribe state file"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, make, message):
    fleet = tribe.fleet(NET).add("a")
    before, data = fleet.digest("a"), make()
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(StateFileError, match=message):
        fleet.from_bytes("a", data)
    with pytest.raises(StateFileError, match=message):
        fleet.load("new", tmp_path / "file")
    assert fleet.digest("a") == before
    assert fleet.names == ["a"]


def test_a_file_of_two_streams_is_refused(tmp_path):
    tribe.adapt(NET, streams=2).save(tmp_path / "two.safetensors")
    with pytest.raises(StateFileError, match="holds 2 streams"):
        tribe.fleet(NET).load("a", tmp_path / "two.safetensors")
    with pytest.raises(FileNotFoundError):
        tribe.fleet(NET).load("a", tmp_path / "none.safetensors")
    with pytest.raises(TypeError, match="bytes of a state file"):
        tribe.fleet(NET).from_bytes("a", "text")


def test_one_stream_is_exported():
    fleet = lively()
    assert torch.allclose(fleet.export("a")(x(7)), fleet.predict({"a": x(7)})["a"], atol=1e-5)
    with pytest.raises(ValueError, match="cannot be exported"):
        tribe.fleet(NET, "lame").add("a").export("a")


def test_the_source_model_predicts_for_an_unknown_stream():
    fleet = lively()
    assert torch.equal(fleet.predict_source(x(7)), tribe.adapt(NET, "source").predict(x(7)))
    assert fleet.predict_source(x(7, 0)).shape == (0, 4)
    assert fleet.names == ["a", "b"]


# -- alone and together ------------------------------------------------------------------------------------------------

# Rounds of images by stream: odd numbers, streams that come late, and one that comes alone.
ROUNDS = (
    {"a": 1, "b": 1, "c": 3},
    {"a": 1, "c": 3, "d": 2, "e": 1},
    {"b": 4},
    {"a": 2, "b": 2, "c": 1, "d": 1, "e": 5, "f": 1},
)


@pytest.mark.parametrize("name", [*methods.names(), "tribe+time", "tribe+guard", "cotta+time", "lame+time"])
def test_every_stream_gets_the_bits_that_it_gets_alone(name):
    method = small(ready(name))
    fleet = tribe.fleet(NET, method, exact=True)
    rounds = [{name: x(100 * i + j, n) for j, (name, n) in enumerate(sizes.items())} for i, sizes in enumerate(ROUNDS)]
    answers = [fleet(batch) for batch in rounds]
    assert fleet.unbatched_reason == (OWN_WEIGHTS if name.startswith(("cotta", "petal", "ttac")) else EXACT)
    assert fleet.names == ["a", "b", "c", "d", "e", "f"]
    for stream in fleet.names:
        state = method.init(NET, 1, stream_seed(stream))
        for batch, answer in zip(rounds, answers, strict=True):
            if stream in batch:
                logits, state = method.step(NET, state, batch[stream].unsqueeze(0))
                assert torch.equal(answer[stream], logits[0])
        assert fleet.digest(stream) == digest(state)
        assert fleet.clock(stream) == sum(stream in sizes for sizes in ROUNDS)


# -- states on the device and on the host ------------------------------------------------------------------------------

NAMES = [f"cam{i}" for i in range(6)]


def batches(names, seed):
    return {name: x(10 * seed + i, 1 + i % 2) for i, name in enumerate(names)}


def places(fleet):
    return {name: fleet.table.entries[name].residence for name in fleet.names}


def test_a_paged_stream_comes_back_bit_for_bit():
    small, large = tribe.fleet(NET, rows=2), tribe.fleet(NET)
    for seed, names in enumerate((NAMES, NAMES[:3], NAMES[2:5])):
        given = batches(names, seed)
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
        fleet({name: x(0, 1)})
    assert places(fleet) == {"a": "host", "b": "device", "c": "device"}
    fleet.predict({"b": x(0, 1)})
    fleet({"a": x(0, 1)})
    assert places(fleet) == {"a": "device", "b": "device", "c": "host"}


def test_a_stream_on_the_host_can_be_used_as_any_other():
    fleet = tribe.fleet(NET, rows=1)
    fleet(batches(NAMES, 0))
    paged = [name for name, place in places(fleet).items() if place == "host"]
    copy = tribe.fleet(NET).from_bytes("x", fleet.to_bytes(paged[0]))
    assert copy.digest("x") == fleet.digest(paged[0]) == fleet.restore("y", fleet.snapshot(paged[0])).digest("y")
    fleet.freeze(paged[1])
    assert fleet.info(paged[1]).frozen
    assert places(fleet)[paged[1]] == "host"
    fleet({paged[1]: x(0, 1)})
    assert fleet.clock(paged[1]) == 1, "it is frozen"
    for name in fleet.names:
        fleet.drop(name)
    assert len(fleet) == 0


def test_a_state_of_a_stream_shares_no_memory_with_those_of_others():
    fleet = tribe.fleet(NET)
    fleet({name: x(i, 1) for i, name in enumerate(NAMES)})
    tensors = [t for name in NAMES for t in leaves(fleet.table.entries[name].state).values()]
    pointers = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(pointers)) == len(pointers)
    assert {t.untyped_storage().nbytes() // t.nbytes for t in tensors} == {1}


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"rows": 1.5}, {"exact": 3}, {"exact": "auto"}, {"graphs": True}])
def test_wrong_limits_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tribe.fleet(NET, **wrong)


# -- what is refused, and changes nothing ------------------------------------------------------------------------------


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
        (torch.zeros(2, 3, 8, 8, dtype=torch.int32), TypeError, "stream 'bad': images are torch.int32"),
        ([1, 2], TypeError, "stream 'bad': expected images"),
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
