"""Calibration on the embedded digits: it learns, it survives a file, and it refuses what it cannot use."""

import dataclasses
import json

import pytest
import torch

import tribe
from commands import succeeded
from commands import tribe_command as command
from tribe.core.backbone import Backbone
from tribe.health.calibration import Calibration, fit_temperature
from tribe.health.estimate import Features, Images
from tribe.health.fitting import MIXED, Errors, Labelled, class_spread, cut, fit, left_out, stretches, widening
from tribe.knowledge import Knowledge, KnowledgeError
from tribe.testing import small_network
from watching import digits, digits_network

COUNT = 240  # images
NAMES = ("shot_noise", "fog", "spatter")


@pytest.fixture(scope="module")
def net():
    return Backbone(digits_network())


@pytest.fixture(scope="module")
def calibration(net):
    done = []
    made = tribe.calibrate(
        net, *digits(0, COUNT), method="source", corruptions=NAMES, window=200, progress=lambda *n: done.append(n)
    )
    assert done == [(i, 23) for i in range(1, 24)]  # 4 conditions of 128 images, mixed, then of 240, in batches of 64
    return made


def test_it_knows_the_source(calibration, net):
    images, labels = digits(0, COUNT)
    logits = tribe.adapt(net, "source").predict(images)
    assert calibration.images == COUNT
    assert calibration.accuracy == pytest.approx(float((logits.argmax(-1) == labels).double().mean()))
    assert calibration.corruptions == NAMES


def test_estimates_follow_the_accuracy(calibration, net):
    method, estimator = tribe.methods.create("source", classes=10), calibration.estimator
    images, labels = digits(1000, 200)
    found = {}
    for name in ("clean", "canny_edges"):  # the second is a corruption that it has not seen
        x = images if name == "clean" else tribe.corruptions.apply(images, name, 5)
        logits, _ = method.step(net, method.init(net), x[None])
        every = torch.ones(1, 200, dtype=torch.bool)
        state = estimator.observe(estimator.init(), logits, every, torch.ones(1), None)
        accuracy = float((logits[0].argmax(-1) == labels).double().mean())
        found[name] = accuracy, estimator.read(state)
    assert found["clean"][1].accuracy > found["canny_edges"][1].accuracy + 0.05
    for accuracy, read in found.values():
        assert read.low <= accuracy <= read.high


def test_a_file_holds_all_of_it(calibration, tmp_path):
    calibration.save(tmp_path / "health.safetensors")
    again = Calibration.load(tmp_path / "health.safetensors")
    assert again == calibration
    assert again.knowledge().digest == calibration.knowledge().digest
    assert all(map(torch.equal, again.estimator.model, calibration.estimator.model))


def test_another_network_or_method_is_refused(calibration, net):
    calibration.check(net)
    calibration.check_method("source")
    with pytest.raises(KnowledgeError, match=r"another network.*tribe source health"):
        calibration.check(Backbone(small_network()))
    with pytest.raises(KnowledgeError, match=r"made with source; this stream answers by bn.*--method bn"):
        tribe.adapt(net, "bn", health=calibration)


def test_an_estimate_is_of_the_answers_that_are_delivered(calibration, net):
    """A time filter changes answers, so a calibration without it is refused, and one with it estimates them."""
    with pytest.raises(KnowledgeError, match=r"answers by source\+time"):
        tribe.adapt(net, "source", time="auto", health=calibration)
    made = tribe.calibrate(net, *digits(0, COUNT), method="source+time", corruptions=NAMES, window=200)
    assert made.method == "source+time"
    images, labels = digits(1000, 200)
    order = labels.argsort(stable=True)
    x = tribe.corruptions.apply(images[order], "canny_edges", 5)
    alone, filtered = tribe.adapt(net, "source", health=calibration), tribe.adapt(net, "source+time", health=made)
    right = [(model(x).argmax(-1) == labels[order]).double().mean() for model in (alone, filtered)]
    assert right[1] != right[0]
    for model, share in zip((alone, filtered), right, strict=True):
        health = model.health[0]
        assert health.low <= share <= health.high
        assert health.source_low <= right[0] <= health.source_high


def test_files_that_hold_no_calibration_are_refused(calibration, tmp_path):
    known = calibration.knowledge()
    path = tmp_path / "other.safetensors"
    dataclasses.replace(known, method="eata").save(path)
    with pytest.raises(KnowledgeError, match="source knowledge of eata; expected a calibration"):
        Calibration.load(path)
    spec = dict(known.spec)
    fitted = spec["estimator"]
    for wrong in (
        {},
        {**spec, "estimator": {k: v for k, v in fitted.items() if k != "spread"}},  # as files were before it
        {**spec, "estimator": {**fitted, "temperature": 0.0}},
        {**spec, "estimator": {**fitted, "window": 0}},
        {**spec, "estimator": None},
        {**spec, "accuracy": 3.0},
    ):
        dataclasses.replace(known, spec=wrong).save(path)
        with pytest.raises(KnowledgeError, match="damaged or older: it holds no calibration of today"):
            Calibration.load(path)
    for name, wrong, reason in (
        ("quantiles", torch.zeros(3), "quantiles of shape"),
        ("model.mean", torch.zeros(5), r"model.mean of shape \(5,\); expected \(8,\)"),
        ("model.root", known.tensors["model.root"][1:], "model.root of shape"),
        ("model.weights", torch.full_like(known.tensors["model.weights"], torch.nan), "finite"),
    ):
        Knowledge(known.method, {**known.tensors, name: wrong}, known.network, spec).save(path)
        with pytest.raises(KnowledgeError, match=reason):
            Calibration.load(path)


def test_calibrations_of_the_same_images_are_told_apart(calibration, net):
    """One network keeps its watchers by calibration: an estimator that differs must not find another's."""
    first = calibration.estimator
    other = dataclasses.replace(first, model=first.model._replace(offset=first.model.offset + 1))
    two = calibration, dataclasses.replace(calibration, estimator=other)
    watchers = [tribe.health.Watch(c).watcher(net, tribe.methods.create("source")) for c in two]
    assert [watcher.estimator.model.offset for watcher in watchers] == [first.model.offset, other.model.offset]
    assert two[0].knowledge().digest != two[1].knowledge().digest


@pytest.mark.parametrize(
    ("given", "said"),  # a change of images and labels, or settings
    [
        (lambda x, y: (x[:50], y[:50]), "50 images that can be used are too few .* at least 200"),
        (lambda x, y: (x, y + 1), "numbered from 0; labels go from 1 to 10"),
        (lambda x, y: (x, (y + 1) % 10), "are the classes numbered in the network's order"),
        (lambda x, y: (x, y[:-1]), "expected a class number for each of 240 images"),
        (lambda x, y: (x, y.float()), "labels are torch.float32"),
        (lambda x, y: ((255 * x).byte(), y), "images are torch.uint8"),
        ({"corruptions": ("fogg", "spatter", "stripe")}, "unknown corruption 'fogg'"),
        ({"corruptions": ("fog", "spatter", "fog")}, "2 different names; expected at least 3"),
        ({"window": 3}, "window is how many images"),
    ],
)
def test_images_labels_and_settings_that_cannot_be_used_are_refused(net, given, said):
    change, options = (given, {}) if callable(given) else (lambda x, y: (x, y), given)
    with pytest.raises(ValueError, match=said):
        tribe.calibrate(net, *change(*digits(0, COUNT)), method="source", **options)


def test_the_temperature_undoes_a_scale():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    assert fit_temperature(logits, labels) == pytest.approx(1, abs=0.06)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3 * fit_temperature(logits, labels), rel=0.02)
    sure = 10 * torch.eye(5)[labels][:100]  # never wrong: the cross-entropy alone would choose 0
    assert 0.5 < fit_temperature(sure, labels[:100]) < 1


def test_a_method_without_a_student_gives_agreement_no_weight(calibration):
    factor = Features(*calibration.estimator.model.factor)
    assert (factor.agreement, factor.source) == (0, 0)  # the source agrees with itself
    assert factor.confidence > 0


@pytest.mark.usefixtures("nowhere")
def test_the_command_writes_a_calibration(net):
    options = ("--model", "compact", "--dataset", "mnist", "--images", 200, "--method", "source", "--device", "cpu")
    report = json.loads(
        succeeded(command("source", "health", *options, "--out", "health.safetensors", "--json")).stdout
    )
    assert report["spec"]["images"] == 200
    made = Calibration.load("health.safetensors")
    made.check(net)
    made.check_method("source")
    assert made.accuracy == report["spec"]["accuracy"]


def test_the_spread_between_classes_is_free_of_luck():
    """Class 0 is right in 90 % of all cases and class 1 in 50: deviations of 20 points. Without classes: none."""
    draw = torch.Generator().manual_seed(0)
    predicted = torch.arange(20_000) % 2
    right = torch.rand(20_000, generator=draw) < torch.where(predicted == 0, 0.9, 0.5)
    blank = torch.zeros(20_000)
    images = Images(*[blank] * 6, predicted)
    condition = torch.zeros(20_000, dtype=torch.int64)
    assert class_spread([Labelled(images, right, condition)]) == pytest.approx(0.2, abs=0.01)
    unrelated = images._replace(predicted=torch.randint(0, 50, (20_000,), generator=draw))
    assert class_spread([Labelled(unrelated, right, condition)]) < 0.02


def test_a_stretch_is_one_condition_without_its_first_third():
    condition = torch.tensor([4] * 30 + [1] * 19 + [2] * 40 + [4] * 20)
    assert stretches(condition) == [(4, slice(10, 30)), (2, slice(62, 89)), (4, slice(95, 109))]


def played(condition, share, seen, seed=0):
    """A stream whose images are right with these probabilities, and whose confidence shows ``seen``."""
    draw = torch.Generator().manual_seed(seed)
    count = len(condition)
    right = torch.rand(count, generator=draw) < share
    confidence = (seen + 0.02 * torch.randn(count, generator=draw)).clamp(0.01, 0.99)
    known = [torch.full((count,), 0.5) for _ in range(5)]
    return Labelled(Images(confidence, *known, torch.arange(count) % 10), right, condition)


def test_windows_are_of_one_corruption_or_of_many():
    condition = torch.arange(3).repeat_interleave(600)
    windows = cut([played(condition, torch.full((1800,), 0.7), torch.full((1800,), 0.7))], 200, 10)
    alone = windows.condition != MIXED
    sizes = windows.images[alone].unique(return_counts=True)
    assert [t.tolist() for t in sizes] == [[50, 100, 200], [24, 12, 6]]  # of 400 images, without the first third
    assert (windows.images[~alone] == 200).all()
    assert int((~alone).sum()) == 60


def test_intervals_hold_a_corruption_that_was_left_out():
    """Half of the corruptions are right in 90 % of all cases, the others in 50, and nothing seen tells which."""
    condition = torch.arange(20).repeat_interleave(300)
    share = torch.where(torch.arange(20) % 2 == 0, 0.9, 0.5)[condition]
    hidden = fit([played(condition, share, torch.full((6000,), 0.7))], 10, 1.0, 200)
    assert hidden.unseen == pytest.approx(0.2, abs=0.03)
    shown = fit([played(condition, share, share)], 10, 1.0, 200)
    assert shown.unseen < 0.05
    assert hidden.widening > 1.5 * shown.widening
    features = cut([played(condition, share, torch.full((6000,), 0.7), seed=1)], 200, 10)
    half = hidden.half_width(Features(*features.features.float().unbind(1)), features.images)
    found = hidden.accuracy(Features(*features.features.float().unbind(1)))
    inside = ((found - features.accuracy).abs() <= half).double().mean()
    assert inside > 0.8


def test_a_window_longer_than_all_stretches_is_tested_with_the_longest():
    condition = torch.arange(20).repeat_interleave(90)
    share = torch.where(torch.arange(20) % 2 == 0, 0.9, 0.5)[condition]
    assert fit([played(condition, share, torch.full((1800,), 0.7))], 10, 1.0, 700).unseen > 0.1


def test_the_widening_is_the_share_that_is_held():
    expected = torch.ones(100, dtype=torch.float64)
    assert widening(Errors(torch.linspace(0, 3, 100, dtype=torch.float64), expected)) == pytest.approx(2.7 / 1.6449)
    assert widening(Errors(0 * expected, expected)) == 0.5
    assert widening(Errors(expected[:0], expected[:0])) == 1


def test_without_stretches_nothing_can_be_left_out():
    condition = torch.arange(20).repeat(100)
    stream = played(condition, torch.full((2000,), 0.7), torch.full((2000,), 0.7))
    assert len(left_out(cut([stream], 200, 10), 200).found) == 0


def test_a_guard_that_was_fitted_is_calibrated_with_its_method(net):
    """A guard as the method raised AttributeError, and no argument took one."""
    images, labels = digits(0, COUNT)
    guard = tribe.Guard.fitted(net, images)
    with pytest.raises(TypeError, match="guard="):
        tribe.calibrate(net, images, labels, method=guard)
    with pytest.raises(TypeError, match="Guard"):
        tribe.calibrate(net, images, labels, guard="yes")
    with pytest.raises(TypeError, match="name"):
        tribe.calibrate(net, images, labels, method=3)
    made = tribe.calibrate(net, images, labels, method="bn+time", guard=guard, corruptions=NAMES, window=200)
    assert made.method == "bn+guard+time"
    assert tribe.adapt(net, "bn", time="auto", guard=guard, health=made).health[0].alarms == ()


def test_a_calibration_is_given_to_a_guard_in_the_name_of_a_method(calibration, net):
    """A method with a guard in its name refused ``health``."""
    guarded = dataclasses.replace(calibration, method="source+guard+time")
    fleet = tribe.fleet(net, "source+guard+time", health=guarded)
    assert fleet.method.name == "source+guard+time"
    assert fleet.method.guard.calibration is not None
    for again in ({"guard": True}, {"health": guarded, "calibration": guarded}):
        with pytest.raises(ValueError, match="already"):
            tribe.fleet(net, "source+guard+time", **again)
