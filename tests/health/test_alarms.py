"""Alarms: each begins when it should, is told once in words, and rows, padding and the device's time do not matter."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tribe import methods
from tribe.core.state import leaves, select, stream
from tribe.health.alarms import KINDS, Alarms, CollapseRules, look_for_collapse, start_collapse
from tribe.health.frames import Verdict
from tribe.health.guard import FAULTY, GONE_WRONG
from tribe.health.martingale import Reference, fit_reference
from tribe.health.report import AlarmLog, Event, read_alarms
from tribe.health.watch import Watcher
from tribe.testing import small_network
from tribe.testing.shared import small_backbone
from watching import calibration_of

CLASSES, SIZE = 10, 20
ALARMS = Alarms()


def draw(seed):
    return torch.Generator().manual_seed(seed)


def logits(labels, seed=0, gap=6.0):
    """Predictions of the labels (N,), one in ten of them wrong: (1, N, K)."""
    generator = draw(seed)
    wrong = torch.rand(labels.shape, generator=generator) < 0.1
    shown = torch.where(wrong, torch.randint(CLASSES, labels.shape, generator=generator), labels)
    return (torch.randn(len(labels), CLASSES, generator=generator) + gap * torch.eye(CLASSES)[shown])[None]


def mixed(count, seed=0):
    return torch.randint(CLASSES, (count,), generator=draw(seed))


def bursts(count, length, seed=0):
    return mixed(count // length + 1, seed).repeat_interleave(length)[:count]


def watch(output, source=None, distance=None, known=None, reference=None, size=SIZE, valid=None):
    """Feed predictions (S, N, K) in batches: all events, and the last state."""
    streams, count = output.shape[:2]
    state, seen, events = ALARMS.init(streams, CLASSES), None, []
    valid = torch.ones(streams, count, dtype=torch.bool) if valid is None else valid
    distance = torch.zeros(streams, count) if distance is None else distance
    for i in range(0, count, size):
        x, marks, moved, said, asked = (
            t if t is None else t[:, i : i + size] for t in (output, valid, distance, source, known)
        )
        sound = Verdict(*[torch.zeros_like(marks)] * 7)
        state = ALARMS.observe(state, sound, x, marks, moved[:, -1], source=said, known=asked, reference=reference)
        new, seen = read_alarms(state, seen)
        events += new
    return events, state


@pytest.mark.parametrize(("length", "size", "count"), [(1, 64, 4000), (40, 64, 4000), (400, 64, 8000), (20, 1, 200)])
def test_a_healthy_method_raises_no_alarm_in_any_order(length, size, count):
    labels = bursts(count, length)
    assert watch(logits(labels, 1), logits(labels, 2), size=size)[0] == []


@pytest.mark.parametrize("every", [4, 16])
@pytest.mark.parametrize(("before", "after"), [(1.0, 0.5), (0.9, 0.3), (0.3, 0.9)])
def test_a_stream_whose_classes_become_more_or_less_even_is_healthy(before, after, every):
    shares = torch.cat([torch.full((2500,), share) for share in (before, after)])
    labels = torch.where(torch.rand(5000, generator=draw(7)) < shares, 0, mixed(5000, 8))
    right = 20 * torch.eye(CLASSES)[labels][None]
    assert watch(right, right, known=(torch.arange(5000) % every == 0)[None])[0] == []


def test_predictions_of_one_class_are_a_collapse_only_if_the_source_sees_others():
    labels = mixed(3000)
    stuck = 20 * torch.eye(CLASSES)[torch.where(torch.arange(3000) < 1000, labels, 3)][None]
    (event,), state = watch(stuck, logits(labels, 2))
    assert event.kind == "collapse"
    assert 1000 < event.image <= 2000
    assert abs(event.since - 1000) < 150
    assert event.numbers["class"] == 3
    assert event.numbers["share"] > 0.5
    assert bool(state.on[0, KINDS.index("collapse")])
    assert watch(stuck[:, :2200], stuck[:, :2200])[0] == []


@pytest.mark.parametrize("every", [4, 16])
def test_predictions_of_few_classes_in_random_order_are_a_collapse(every):
    labels, known = mixed(3000), (torch.arange(3000) % every == 0)[None]
    few = 20 * torch.eye(CLASSES)[torch.where(torch.arange(3000) < 1000, labels, labels % 2)][None]
    events, _ = watch(few, logits(labels, 2), known=known)
    assert {event.kind for event in events} == {"collapse"}
    assert 1000 < events[0].image < 2000
    same = watch(few, few, known=known)[1]
    assert not same.times[0, KINDS.index("collapse")]  # the source sees these classes, too


def test_without_the_source_only_a_long_run_of_one_class_is_a_collapse():
    one = torch.full((3000,), 3)
    pure = torch.eye(CLASSES)[one][None] * 20
    assert watch(pure[:, :1200])[0] == []
    (event,), _ = watch(pure)
    assert event.kind == "collapse"


@pytest.mark.parametrize(("every", "length", "most"), [(1, 100, 1000), (4, 100, 1000), (16, 500, 2500)])
def test_predictions_that_do_not_follow_the_order_of_the_stream_are_found(every, length, most):
    labels = bursts(4000, length)
    known = (torch.arange(4000) % every == 0)[None]
    events, _ = watch(logits(mixed(4000, 5), 1), logits(labels, 2), known=known)
    assert [event.kind for event in events][:1] == ["scatter"]
    assert events[0].image <= most
    assert events[0].numbers["source_order"] > events[0].numbers["order"]


@pytest.mark.parametrize("every", [4, 16])
def test_a_source_that_gets_stuck_on_one_class_is_no_scatter(every):
    labels = mixed(5000, 3)
    stuck = torch.where(torch.arange(5000) < 2500, labels, 7)
    known = (torch.arange(5000) % every == 0)[None]
    assert watch(logits(labels), 20 * torch.eye(CLASSES)[stuck][None], known=known)[0] == []


@pytest.mark.parametrize("size", [1, SIZE])
def test_a_class_that_returns_after_another_is_no_scatter_if_all_agree(size):
    labels = torch.cat([torch.full((count,), kind) for kind, count in ((0, 3000), (1, 350), (0, 400))])
    same = 20 * torch.eye(CLASSES)[labels][None]
    assert watch(same, same, size=size)[0] == []


def test_a_burst_that_a_poor_source_half_sees_is_no_collapse():
    burst = torch.cat([mixed(1000), torch.full((1500,), 4)])
    guess = torch.rand(2500, generator=draw(9)) < 0.6
    assert watch(20 * torch.eye(CLASSES)[burst][None], logits(torch.where(guess, mixed(2500, 6), burst)))[0] == []


def test_a_long_way_in_few_steps_is_drift_and_the_same_way_in_many_is_not():
    labels = mixed(4000)
    fast, slow = torch.full((1, 4000), 0.1), torch.linspace(0, 0.1, 4000)[None]
    events, _ = watch(logits(labels), distance=fast)
    assert [(event.kind, event.image) for event in events] == [("drift", 4 * SIZE)]
    assert watch(logits(labels), distance=slow)[0] == []


def test_a_long_stream_explains_no_more_drift_than_a_day():
    state = start_collapse(1, CLASSES)._replace(steps=torch.tensor([10**6]))
    classes, counted = torch.zeros(1, 2, 1, dtype=torch.int64), torch.tensor([[[True], [False]]])
    for distance, drifts in ((0.7, True), (0.5, False)):
        signs, _ = look_for_collapse(CollapseRules(), state, classes, counted, torch.tensor([distance]))
        assert signs.drift == drifts


def test_a_shift_is_found_against_the_reference_and_the_source_counts_if_it_is_there():
    labels = mixed(2000, 3)
    normal, unsure = logits(labels, 4), logits(labels, 5, gap=3.0)
    share = torch.distributions.Categorical(logits=normal[0]).entropy() / math.log(CLASSES)
    reference = fit_reference(share, normal[0].argmax(1), labels, CLASSES)
    changed = torch.cat((normal, unsure), 1)
    events, _ = watch(changed, reference=reference)
    assert [event.kind for event in events] == ["shift"]
    assert 2000 < events[0].image < 2400
    assert abs(events[0].since - 2000) <= 2 * SIZE
    assert watch(changed, torch.cat((normal, normal), 1), reference=reference)[0] == []
    assert [event.kind for event in watch(torch.cat((normal, normal), 1), changed, reference=reference)[0]] == ["shift"]


def pictures(streams, count, seed=0):
    coarse = torch.rand(streams * count, 3, 5, 5, generator=draw(seed))
    fine = torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear")
    return fine.view(streams, count, 3, 16, 16)


def look(x, size=SIZE, valid=None, reference=None):
    """Give images (S, N, ...) to the alarms: all events, and the last state."""
    state, seen, events = ALARMS.init(len(x), CLASSES), None, []
    valid = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
    for images, marks in zip(x.split(size, 1), valid.split(size, 1), strict=True):
        verdict, state = ALARMS.look(state, images, marks)
        output = 5 * images.flatten(2)[..., :CLASSES] if reference else torch.zeros(*marks.shape, CLASSES)
        state = ALARMS.observe(state, verdict, output, marks, torch.zeros(len(x)), reference=reference)
        new, seen = read_alarms(state, seen)
        events += new
    return events, state


@pytest.mark.parametrize("size", [3, 7, 60])
def test_a_black_camera_is_told_once_an_episode_with_its_beginning(size):
    x = pictures(1, 420)
    x[0, 60:120] = 0
    x[0, 240:300] = 0
    events, state = look(x, size)
    black = [event for event in events if event.kind == "black"]
    assert [event.since for event in black] == [60, 240]
    assert all(event.since < event.image <= event.since + 60 for event in black)
    assert not state.on.any()
    assert "the camera is black" in str(black[0])


def test_single_bad_frames_are_no_alarm():
    x = pictures(1, 200)
    x[0, ::10] = 0
    assert look(x)[0] == []


def test_frames_that_teach_nothing_do_not_count_as_predictions():
    events, state = look(torch.zeros(1, 3000, 3, 16, 16), size=100)
    assert {event.kind for event in events} == {"black", "frozen"}
    assert int(state.images) == 3000
    assert float(state.collapse.weight.max()) == 0


def test_streams_together_equal_streams_alone_and_padding_leaves_no_trace():
    x = pictures(3, 120)
    x[1, 50:] = 0
    x[2, 20:] *= 255
    reference = Reference(0.9 + 0.1 * torch.linspace(0, 1, 64).expand(CLASSES, 64), torch.tensor(0.1))
    together, end = look(x, reference=reference)
    assert len(end.martingale.excess[:, 1].unique()) == len(end.martingale.log_wealth.unique(dim=0)) == 3
    for i in range(3):
        alone, state = look(x[i : i + 1], reference=reference)
        assert [event[1:] for event in alone] == [event[1:] for event in together if event.stream == i]
        for (name, a), b in zip(leaves(stream(end, i, 3)).items(), leaves(state).values(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    padded, real = torch.rand(3, 6, 31, 3, 16, 16), torch.zeros(3, 6, 31, dtype=torch.bool)
    padded[:, :, 4:24], real[:, :, 4:24] = x.view(3, 6, 20, 3, 16, 16), True
    events, state = look(padded.flatten(1, 2), size=31, valid=real.flatten(1, 2), reference=reference)
    assert [event[:4] for event in events] == [event[:4] for event in together]
    torch.testing.assert_close(state, end)


def test_a_stream_that_was_reset_is_read_again_from_the_beginning():
    x = pictures(2, 100)
    x[:, 20:] = 0
    _, state = look(x)
    _, seen = read_alarms(state)
    assert read_alarms(state, seen)[0] == []
    fresh = select(torch.tensor([True, False]), ALARMS.init(2, CLASSES), state)
    _, seen = read_alarms(fresh, seen)
    assert seen[0] == [0] * len(KINDS)
    assert {event.stream for event in read_alarms(state, seen)[0]} == {0}


def test_nothing_waits_for_the_device():
    with FakeTensorMode():
        valid, output = torch.ones(2, 5) > 0, torch.rand(2, 5, CLASSES)
        verdict, state = ALARMS.look(ALARMS.init(2, CLASSES), torch.rand(2, 5, 3, 16, 16), valid)
        reference = Reference(torch.rand(CLASSES, 64), torch.rand(()))
        given = {"source": output, "known": valid, "reference": reference}
        state = ALARMS.observe(state, verdict, output, valid, torch.rand(2), **given)
        state = ALARMS.compare(state, (torch.rand(2), torch.rand(2), torch.rand(2)), 0.9, valid[:, 0])
    assert state.on.shape == (2, len(KINDS))


def test_a_class_that_is_not_known_for_any_image_says_nothing():
    predicted, counted = torch.zeros(1, 2, 8, dtype=torch.int64), torch.tensor([[True], [False]]).expand(1, 2, 8)
    state = start_collapse(1, CLASSES)
    for _ in range(3):
        signs, state = look_for_collapse(CollapseRules(), state, predicted, counted, torch.zeros(1))
    assert float(state.evidence) == 0
    assert not signs.scatter


@pytest.mark.parametrize("size", [20, 500])
def test_an_estimated_accuracy_that_falls_is_told_once_with_its_numbers_and_ends_when_it_is_back(size):
    calibration = replace(calibration_of(small_network(), classes=CLASSES), accuracy=0.95)
    watcher = Watcher.of(CLASSES, 0, calibration, torch.device("cpu"))
    state, seen, events, told = watcher.init(small_backbone(), 2), None, [], []
    sure, unsure = torch.full((1500,), 6.0), torch.full((1500,), 0.7)
    gaps = torch.stack((torch.cat((sure, unsure, sure)), sure.repeat(3)))  # the second stream stays as it is
    output = gaps.unsqueeze(2) * torch.eye(CLASSES)[mixed(4500)]
    for x in output.split(size, 1):
        valid = torch.ones(x.shape[:2], dtype=torch.bool)
        verdict = Verdict(*[torch.zeros_like(valid)] * 7)
        info = SimpleNamespace(distance=torch.zeros(2), student_agreement=torch.ones(2))
        state = watcher.estimate(watcher.observe(state, verdict, None, x, valid, info), None, x, valid, info)
        new, seen = read_alarms(state.alarms, seen)
        events += [event for event in new if event.kind == "accuracy"]
        told.append(bool(state.alarms.on[0, KINDS.index("accuracy")]))
    (event,) = events
    numbers = event.numbers
    assert event.stream == 0
    assert 1500 < event.image <= 2000
    assert 1000 <= event.since <= 1625
    assert numbers["low"] < numbers["accuracy"] < numbers["high"] < numbers["clean"] == pytest.approx(0.95)
    assert f"({numbers['low']:.2f} to {numbers['high']:.2f}); clean images had 0.95; since image" in event.words
    on = torch.tensor(told).repeat_interleave(size)[:4500]
    assert bool(on[event.image : 3000].all()), "it does not flicker"
    assert not on[3500:].any()


def test_an_accuracy_between_the_two_thresholds_neither_begins_nor_ends_an_alarm():
    state, on = ALARMS.init(1, CLASSES), []
    for images, high in enumerate((0.9, 0.75, 0.69, 0.74, 0.76, 0.74)):
        state = state._replace(images=torch.tensor([images]))
        estimate = tuple(torch.tensor([value]) for value in (high - 0.04, high - 0.2, high))
        late = ALARMS.compare(state, estimate, 0.8, torch.tensor([False]))
        assert torch.equal(late.on, state.on)
        state = ALARMS.compare(state, estimate, 0.8, torch.tensor([True]))
        on.append(bool(state.on[0, KINDS.index("accuracy")]))
    assert on == [False, False, True, True, False, False]
    assert int(state.since[0, KINDS.index("accuracy")]) == 1, "it was fine then"
    assert state.on.sum() == 0
    assert state.times.sum() == 1


def test_the_accuracy_of_streams_together_is_compared_as_that_of_streams_alone():
    estimator = calibration_of(small_network(), classes=CLASSES).estimator
    x = torch.randn(5, 300, CLASSES, generator=draw(4)) * torch.linspace(0.5, 4, 5).view(5, 1, 1)
    valid = torch.ones(5, 300, dtype=torch.bool)
    together = estimator.read_window(estimator.observe(estimator.init(5), x, valid, torch.ones(5), None))
    for i in range(5):
        state = estimator.observe(estimator.init(), x[[i]], valid[[i]], torch.ones(1), None)
        for a, b in zip(together, estimator.read_window(state), strict=True):
            assert torch.equal(a[[i]], b)


def test_a_fallen_accuracy_is_no_reason_for_a_guard_to_go_back():
    assert "accuracy" not in (*KINDS[GONE_WRONG], *KINDS[FAULTY])
    assert KINDS[GONE_WRONG] == ("drift", "collapse", "scatter")


EVENT = Event(1, "black", 30, 20, "the camera is black", {"share": 1.0})


def test_a_listener_that_fails_stops_nothing(caplog):
    def fail(event):
        raise RuntimeError("no dashboard")

    log = AlarmLog(methods.create("tribe+watch", classes=CLASSES), fail)
    log.publish([EVENT, EVENT])
    assert len(log.events) == 2
    assert "a listener failed" in caplog.text


def test_a_listener_needs_something_that_watches():
    with pytest.raises(ValueError, match="health=True"):
        AlarmLog(methods.create("bn"), print)
    with pytest.raises(TypeError, match="on_event"):
        AlarmLog(methods.create("tribe+watch", classes=CLASSES), 3)
