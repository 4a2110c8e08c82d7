"""Shadow mode: the source answers, and the state learns as if it did not. Nothing is lost on the way in and out."""

import pickle
from dataclasses import replace

import pytest
import torch

import tribe
from networks import batch
from tribe.health.alarms import KINDS
from tribe.health.estimate import Features
from tribe.health.regression import GaussianProcess
from tribe.io import states
from tribe.testing import images, ready, small_network
from tribe.testing.shared import small_backbone
from watching import calibration_of, pictures

NET = small_backbone()
METHODS = ["tribe", "tent", "rotta", "lame", "bn", "tribe+guard+time", "tent+watch", "tribe+rare"]


def lively(name):
    """A method that learns something from a network that was never trained."""
    return {"h0": 2.0} if name.startswith("tribe") else {"every": 6, "size": 12} if name == "rotta" else {}


def pair(name="tribe", streams=1, **options):
    """An adapter in shadow, and one that never is."""
    fields = lively(name)
    method = name if fields else ready(name)
    made = [tribe.adapt(NET, method, streams=streams, shadow=shadow, **fields, **options) for shadow in (True, False)]
    return *made, tribe.adapt(NET, "source", streams=streams)


def played(adapter, seeds, streams=1):
    return [adapter(pictures(streams, 6, seed)[0] if streams == 1 else pictures(streams, 6, seed)) for seed in seeds]


def all_equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_the_source_answers_and_the_state_is_that_without_shadow(name, streams):
    """The answers, and what was learned, bit for bit; also the first answers after the promotion."""
    shadow, open_, source = pair(name, streams)
    for seed in range(5):
        answers, adapted, plain = (played(each, [seed], streams)[0] for each in (shadow, open_, source))
        assert torch.equal(answers, plain)
        assert shadow.digest() == open_.digest()
    assert not torch.equal(adapted, plain), "the other one has learned something, or predicts in another way"
    assert [info.shadow for info in shadow.info] == [True] * streams
    assert [info.shadow for info in open_.info] == [False] * streams
    shadow.promote()
    assert all_equal(played(shadow, [7, 8], streams), played(open_, [7, 8], streams))
    assert shadow.digest() == open_.digest()
    shadow.demote()
    assert all_equal(played(shadow, [9], streams), played(source, [9], streams))
    played(open_, [9], streams)
    assert shadow.digest() == open_.digest()


def test_predict_answers_as_a_call_does_unless_it_is_told_whom_to_ask():
    shadow, open_, source = pair()
    played(shadow, range(3)), played(open_, range(3))
    before = shadow.digest()
    x = batch(9)
    assert torch.equal(shadow.predict(x), source(x))
    assert torch.equal(shadow.predict(x, shadow=False), open_.predict(x))
    assert torch.equal(open_.predict(x, shadow=True), source(x))
    assert shadow.digest() == before
    assert torch.equal(shadow.promote().predict(x), open_.predict(x))


def test_streams_in_shadow_and_out_of_it_in_one_adapter():
    """One extra pass, of the streams in shadow only; the others get the bits that they get without shadow."""
    mixed, open_, source = tribe.adapt(NET, streams=3, h0=2.0), *pair(streams=3)[1:]
    alone = tribe.adapt(NET, "source", streams=2)
    mixed.demote(0).demote(stream=-1)
    for seed in range(3):
        x = images(3, 6, seed)
        answers, adapted, plain = mixed(x), open_(x), alone(x[[0, 2]])
        assert torch.equal(answers[1], adapted[1])
        assert torch.equal(answers[[0, 2]], plain)
        assert torch.allclose(answers[[0, 2]], source(x)[[0, 2]], atol=1e-5)
        assert mixed.digest() == open_.digest()
        assert torch.equal(mixed.predict(x)[1], open_.predict(x)[1])
        assert torch.equal(mixed.predict(x)[[0, 2]], plain)
    assert [info.shadow for info in mixed.info] == [True, False, True]
    assert "in shadow=[0, 2]" in repr(mixed)
    assert "in shadow)" in repr(mixed.demote()).splitlines()[0] or ", in shadow" in repr(mixed)
    with pytest.raises(IndexError, match="streams 0 to 2"):
        mixed.promote(3)


def test_padding_order_and_bad_images():
    """They are answered as the source method answers them: in the given order, uniformly where nothing can be seen."""
    shadow, open_, source = pair()
    x = batch(3).clone()
    x[1], x[4] = torch.nan, torch.inf
    valid, order = torch.tensor([True] * 5 + [False]), torch.tensor([5.0, 1, 2, 0, 4, 3])
    answers = shadow(x, valid, order)
    assert torch.equal(answers, source(x, valid, order))
    assert all(len(answers[i].unique()) == 1 for i in (1, 4, 5))
    open_(x, valid, order)
    assert shadow.digest() == open_.digest()
    assert torch.equal(shadow.predict(x, valid, order), answers)
    counted = shadow.info[0].differ * 3
    assert counted == pytest.approx(round(counted)), "three images were seen"


def test_a_frozen_stream_stays_in_shadow_and_its_filter_goes_on():
    shadow, open_, source = pair("tribe+guard+time")
    played(shadow, range(2)), played(open_, range(2))
    shadow.freeze(), open_.freeze()
    assert all_equal(played(shadow, [5, 6]), played(source, [5, 6]))
    played(open_, [5, 6])
    assert shadow.digest() == open_.digest()
    assert all_equal(played(shadow.promote(), [7]), played(open_, [7]))


def test_how_many_answers_differ_is_counted_on_all_images_in_shadow():
    shadow, open_ = (tribe.adapt(NET, "tent", lr=0.3, shadow=shadow) for shadow in (True, False))
    source = tribe.adapt(NET, "source")
    counts, images_ = 0.0, 0.0
    for seed in range(6):
        x = batch(seed)
        differ = (open_(x).argmax(1) != source(x).argmax(1)).sum().item()
        keep = torch.tensor(-len(x) / 500).exp().item()
        counts, images_ = counts * keep + differ, images_ * keep + len(x)
        shadow(x)
    assert counts > 0
    assert shadow.info[0].differ == pytest.approx(counts / images_, abs=1e-5)
    assert open_.info[0].differ is None, "nobody asked the source"
    assert shadow.promote().info[0].differ is None
    assert shadow.demote().info[0].differ is None, "it is counted anew"


def test_a_promoted_stream_is_compared_with_the_source_where_a_guard_asks_it():
    adapter = tribe.adapt(NET, "tribe+watch", probe=1, h0=2.0)
    played(adapter, range(4))
    assert adapter.info[0].differ == pytest.approx(1 - adapter.health[0].source_agreement)


def test_the_mode_is_in_the_file_and_goes_on(tmp_path):
    shadow, *_ = pair(streams=2)
    open_ = tribe.adapt(NET, streams=2, h0=2.0)
    played(shadow, range(2), 2), played(open_, range(2), 2)
    shadow.promote(1)
    shadow.save(tmp_path / "a"), open_.save(tmp_path / "b")
    resumed = tribe.load(tmp_path / "a", NET)
    assert [info.shadow for info in resumed.info] == [True, False]
    assert all_equal(played(resumed, [5], 2), played(shadow, [5], 2))
    assert b'"shadow"' not in (tmp_path / "b").read_bytes(), "as files were before there was a shadow"
    assert not any(info.shadow for info in tribe.load(tmp_path / "b", NET).info)
    assert [info.shadow for info in pickle.loads(pickle.dumps(shadow)).info] == [True, False]


def test_a_file_that_counts_other_streams_in_its_shadow_is_refused(tmp_path):
    tribe.adapt(NET, shadow=True).save(tmp_path / "a")
    states.write(tmp_path / "b", states.read(tmp_path / "a")._replace(shadow=[True, False]))
    with pytest.raises(tribe.StateFileError, match="in shadow"):
        tribe.load(tmp_path / "b", NET)


def test_reset_restore_and_rollback_keep_the_mode():
    adapter = tribe.adapt(NET, shadow=True, history=tribe.History(every=6, keep=4), h0=2.0)
    first = adapter.snapshot()
    played(adapter, range(3))
    adapter.promote()
    adapter.rollback(images=6)
    assert not adapter.info[0].shadow
    assert not adapter.restore(first).info[0].shadow, "the snapshot was taken in shadow"
    assert not adapter.reset().info[0].shadow
    adapter.demote().reset().restore(first)
    assert adapter.info[0].shadow


def test_a_fleet_has_streams_of_both_kinds():
    cameras, open_, source = (tribe.fleet(NET, h0=2.0, exact=True, shadow=shadow) for shadow in (True, False, False))
    x = {"door": batch(0), "gate": batch(1)}
    assert all(torch.equal(logits, source.predict_source(x[name])) for name, logits in cameras(x).items())
    open_(x)
    cameras.promote("door")
    answers, adapted = cameras(x), open_(x)
    assert torch.equal(answers["door"], adapted["door"])
    assert torch.equal(answers["gate"], source.predict_source(x["gate"]))
    assert [cameras.info(name).shadow for name in ("door", "gate")] == [False, True]
    assert [info.shadow for info in cameras.info_many(["door", "gate"]).values()] == [False, True]
    assert cameras.info("gate").differ == cameras.info_many(["gate"])["gate"].differ
    assert {name: cameras.digest(name) for name in x} == {name: open_.digest(name) for name in x}
    predicted = cameras.predict(x, shadow={"gate": False})
    assert all(torch.equal(predicted[name], logits) for name, logits in open_.predict(x).items())
    cameras.promote()
    assert not any(cameras.in_shadow(name) for name in cameras.names)
    assert cameras.demote().in_shadow("door")
    cameras.promote("door")({"new": batch(2)})
    assert cameras.in_shadow("new"), "a new stream begins in shadow"
    with pytest.raises(tribe.streams.UnknownStream, match="dor"):
        cameras.promote("dor")


def test_streams_of_a_fleet_step_together_whatever_their_mode():
    """They agree with single streams to rounding, as ever; and states are those of a fleet without shadow."""
    cameras, open_ = tribe.fleet(NET, h0=2.0, shadow=True), tribe.fleet(NET, h0=2.0)
    for seed in range(3):
        x = {name: batch(10 * seed + i) for i, name in enumerate("abcd")}
        answers, adapted = cameras(x), open_(x)
        for name in x:
            expected = cameras.predict_source(x[name]) if cameras.in_shadow(name) else adapted[name]
            assert torch.allclose(answers[name], expected, atol=1e-5)
        cameras.promote("abcd"[seed])
        assert {n: cameras.digest(n) for n in x} == {n: open_.digest(n) for n in x}


def test_the_mode_of_a_stream_goes_through_bytes_and_other_hands():
    cameras = tribe.fleet(NET, h0=2.0)
    cameras({"a": batch(0), "b": batch(1)})
    cameras.demote("a")
    data = cameras.to_bytes("a")
    other = tribe.fleet(NET, h0=2.0, shadow=True).from_bytes("x", data).from_bytes("y", cameras.to_bytes("b"))
    assert (other.in_shadow("x"), other.in_shadow("y")) == (True, False)
    other.from_bytes("y", data, shadow=False)
    assert not other.in_shadow("y")


def test_a_stream_on_the_host_answers_in_shadow():
    cameras = tribe.fleet(NET, h0=2.0, rows=1, shadow=True)
    cameras({"a": batch(0)})
    cameras({"b": batch(1)})
    assert torch.equal(cameras.predict({"a": batch(2)})["a"], cameras.predict_source(batch(2)))
    assert cameras.in_shadow("a")


def test_promote_during_a_step_is_not_undone_by_its_end():
    """The step writes its entries at its end, and must not write the mode that it began with."""
    adapter = tribe.adapt(NET, shadow=True, h0=2.0)
    step = adapter._core._runner.step

    def promoted_meanwhile(*arguments):
        adapter.promote()
        return step(*arguments)

    adapter._core._runner.step = promoted_meanwhile
    x = batch(0)
    assert torch.equal(adapter(x), tribe.adapt(NET, "source")(x)), "the call had begun"
    assert not adapter.info[0].shadow


# -- demotion ----------------------------------------------------------------------------------------------------------


FAST = {"method": "tent+watch", "lr": 0.3}  # parameters run away


def test_adapting_that_goes_wrong_demotes_by_itself_once_and_says_why(caplog):
    heard = []
    policy = tribe.Shadow(begin=False, demote=True)
    adapter = tribe.adapt(NET, **FAST, shadow=policy, on_event=heard.append)
    assert not adapter.info[0].shadow
    played(adapter, range(10))
    assert adapter.info[0].shadow
    alarm, demoted = [event for event in heard if event.kind in ("drift", "demoted")]
    assert (alarm.kind, demoted.kind, demoted.stream) == ("drift", "demoted", 0)
    assert demoted.image == alarm.image
    assert demoted.since == alarm.since
    assert demoted.numbers == alarm.numbers
    assert "run away" in demoted.words
    assert any("run away" in record.message and record.kind == "demoted" for record in caplog.records)
    assert all_equal(played(adapter, [99]), played(tribe.adapt(NET, "source"), [99]))
    played(adapter, range(20))
    assert adapter.info[0].shadow, "nothing undoes it"
    assert sum(event.kind == "demoted" for event in adapter.events) == 1
    played(adapter.reset().promote(), [0])
    assert not adapter.info[0].shadow, "a person has promoted it, and its alarms are over"


def test_a_stream_that_is_demoted_is_named_and_others_stay():
    heard = []
    cameras = tribe.fleet(NET, **FAST, on_event=heard.append, shadow=tribe.Shadow(begin=False, demote=True))
    for seed in range(10):
        cameras({"bad": pictures(1, 6, seed)[0]})
    cameras({"good": batch(0)})
    assert (cameras.in_shadow("bad"), cameras.in_shadow("good")) == (True, False)
    assert {event.stream for event in heard if event.kind == "demoted"} == {"bad"}


def test_demotion_needs_what_watches():
    with pytest.raises(ValueError, match="guard=True"):
        tribe.adapt(NET, shadow=tribe.Shadow(demote=True))
    with pytest.raises(ValueError, match="some of"):
        tribe.Shadow(alarms=("drifts",))
    with pytest.raises(TypeError, match=r"tribe\.Shadow"):
        tribe.adapt(NET, shadow="auto")


def test_without_the_policy_nothing_is_demoted():
    adapter = tribe.adapt(NET, **FAST)
    played(adapter, range(10))
    assert "drift" in adapter.health[0].alarms
    assert not adapter.info[0].shadow


def test_alarms_of_the_camera_do_not_demote():
    policy = tribe.Shadow(begin=False, demote=True)
    adapter = tribe.adapt(NET, "tribe+watch", shadow=policy)
    for _ in range(20):
        adapter(torch.zeros(16, 3, 8, 8))
    assert set(adapter.health[0].alarms) & set(KINDS)
    assert not adapter.info[0].shadow


def calibration_where(own, source):
    """A calibration that finds these log-odds of the accuracy in every window, of the method and of the source."""
    seen = torch.zeros(20, len(Features._fields))
    seen[:, 0] = torch.linspace(-1, 3, 20)
    made = calibration_of(small_network(), "bn")
    fitted = (GaussianProcess.fit(seen, torch.full((20,), value), torch.full((20,), 0.1)) for value in (own, source))
    one, other = (replace(made.estimator, model=model, spread=0.0) for model in fitted)
    return replace(made, estimator=replace(one, source=other))


@pytest.mark.parametrize(("own", "source", "demoted"), [(-1.0, 3.0, True), (3.0, -1.0, False), (1.0, 1.1, False)])
def test_an_estimate_below_the_sources_demotes_where_the_intervals_do_not_explain_it(own, source, demoted):
    heard = []
    policy = tribe.Shadow(begin=False, demote=True)
    adapter = tribe.adapt(
        small_network(), "bn", health=calibration_where(own, source), shadow=policy, on_event=heard.append
    )
    played(adapter, range(8))
    assert not adapter.info[0].shadow, "48 images: it is not looked at yet"
    played(adapter, [8])
    assert adapter.info[0].shadow == demoted
    events = [event for event in heard if event.kind == "demoted"]
    assert len(events) == demoted
    if demoted:
        (health,) = adapter.health
        assert events[0].image == 54
        assert events[0].numbers["source_accuracy"] == pytest.approx(health.source_accuracy, abs=0.05)
        assert events[0].numbers["high"] < events[0].numbers["source_accuracy"]
        assert f"{events[0].numbers['accuracy']:.0%}" in events[0].words


def test_a_policy_may_leave_the_estimate_out():
    policy = tribe.Shadow(begin=False, demote=True, accuracy=False)
    adapter = tribe.adapt(small_network(), "bn", health=calibration_where(-1.0, 3.0), shadow=policy)
    played(adapter, range(20))
    assert not adapter.info[0].shadow
