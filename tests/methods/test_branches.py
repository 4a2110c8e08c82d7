"""Teacher, student and anchor: the same numbers in one pass and one after the other, and how far they agree."""

import pytest
import torch

import tribe
from tribe.core.state import digest, leaves, tree_map
from tribe.methods import report_agreement
from tribe.methods import tribe as module
from tribe.testing import CLASSES, images, ready, small_network


def played(method, net, apart, monkeypatch):
    """The logits of the last of four steps, and the state; memory of old states is used again, as an adapter does."""
    monkeypatch.setattr(module, "APART", apart)
    state, retired = method.init(net, 3), None
    for seed in range(4):
        x = images(3, 6, seed).double()
        x[0, 1] = float("nan")
        old, (logits, state) = state, method.step(net, state, x, None, retired)
        retired = old
    return logits, state


IMAGENET = {"eta": 0.5, "gamma": 0.5, "lr": 5e-4}  # half of each update is shared, and two images fill a class


@pytest.mark.parametrize(
    "fields",
    [{}, {"class_stats": "packed"}, {"lambda_anc": 0.0}, IMAGENET, {**IMAGENET, "class_stats": "packed"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["tribe", "selftrain/fixmatch"])
def test_branches_apart_are_the_branches_together(name, fields, monkeypatch):
    method = tribe.methods.create(name, classes=CLASSES, h0=0.9, **fields)
    net = tribe.Backbone(small_network().double())
    together, apart = (played(method, net, pixels, monkeypatch) for pixels in (2**20, 0))
    assert (together[0] - apart[0]).abs().max() <= 1e-9
    assert together[1].info.trusted.max() > 0  # else there is no gradient to compare
    for name, t in leaves(together[1]).items():
        assert (t.double() - leaves(apart[1])[name].double()).abs().max() <= 1e-9, name


@pytest.mark.parametrize("apart", [2**20, 0])
def test_a_retired_state_that_shares_memory_with_the_state_is_not_written_to(apart, monkeypatch):
    """Catches a comparison of tuples: a store makes new ones of the same tensors whenever it is read."""
    monkeypatch.setattr(module, "APART", apart)
    method, net = tribe.methods.create("tribe", classes=CLASSES), tribe.Backbone(small_network())
    state = method.init(net, 2)
    before = digest(state)
    method.step(net, state, images(2, 6), None, tree_map(lambda t: t, state))
    assert digest(state) == before


def test_large_batches_take_half_the_memory(monkeypatch):
    """Only one branch at a time has rows in the network."""
    monkeypatch.setattr(module, "APART", 0)
    net, rows = tribe.Backbone(small_network()), []
    net.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    method = tribe.methods.create("tribe", classes=CLASSES)
    method.step(net, method.init(net, 2), images(2, 6))
    assert rows == [2, 2, 2, 2]  # prediction, anchor, teacher, student


# -- agreement --------------------------------------------------------------------------------------------------------


def test_agreement_counts_valid_images_with_the_same_class():
    teacher = torch.eye(3)[None, [0, 1, 2, 0]]
    student = torch.eye(3)[None, [0, 1, 1, 1]]
    anchor = torch.eye(3)[None, [1, 1, 1, 1]]
    valid = torch.tensor([[True, True, True, False]])
    _, start = tribe.methods.Method.new_key_and_info(tribe.Backbone(small_network()), 1, 0)
    info = report_agreement(start, teacher, student, anchor, valid)
    assert info.student_agreement.item() == pytest.approx(2 / 3)
    assert info.anchor_agreement.item() == pytest.approx(1 / 3)
    assert report_agreement(start, teacher, student, None, valid).anchor_agreement.item() == 1


def reports(method, steps=6, **fields):
    """What two streams report after each of some batches."""
    net = small_network()
    with torch.no_grad():
        net[-1].bias -= net(images(1, 64, 9)[0]).mean(0)  # so that it predicts several classes
    adapter = tribe.adapt(net, tribe.methods.create(method, classes=4, **fields), streams=2)
    infos = []
    for seed in range(steps):
        adapter(images(2, 8, seed))
        infos += adapter.info
    return infos


@pytest.mark.parametrize("method", ["tribe", "selftrain/tribe", "selftrain/fixmatch"])
def test_self_training_reports_agreement(method):
    same = reports(method, augment=lambda x: x)
    assert {info.student_agreement for info in same} == {1}  # the student sees what the teacher sees
    other = reports(method, augment=lambda x: x.flip(0))
    assert min(info.student_agreement for info in other) < 1  # it sees another image of the batch
    far = min(info.anchor_agreement for info in reports(method, lr=1.0, h0=1.0))
    assert far == 1 if method == "selftrain/fixmatch" else far < 1  # it has no anchor


def test_rotta_reports_agreement_at_its_last_update():
    first = [info.student_agreement for info in reports("rotta", 10, size=8, every=16, nu=0.0, lr=1.0)][::2]
    assert first[0] == 1  # no update yet
    assert min(first) < 1
    assert all(first[i] == first[i + 1] for i in range(1, 9, 2))  # an update every second batch


@pytest.mark.parametrize("method", ["source", "bn", "tent", "note"])
def test_methods_without_branches_report_1(method):
    adapter = tribe.adapt(small_network(), ready(method))
    adapter(images(1, 8, 0)[0])
    assert (adapter.info[0].student_agreement, adapter.info[0].anchor_agreement) == (1, 1)
