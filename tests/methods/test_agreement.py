"""States report on how many images the teacher agrees with the student and with the anchor."""

import pytest
import torch

import tribe
from tribe.methods import report_agreement
from tribe.testing import images, ready, small_network


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


def play(method, steps=6, **fields):
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
    same = play(method, augment=lambda x: x)
    assert {info.student_agreement for info in same} == {1}  # the student sees what the teacher sees
    other = play(method, augment=lambda x: x.flip(0))
    assert min(info.student_agreement for info in other) < 1  # it sees another image of the batch
    far = min(info.anchor_agreement for info in play(method, lr=1.0, h0=1.0))
    assert far == 1 if method == "selftrain/fixmatch" else far < 1  # it has no anchor


def test_rotta_reports_agreement_at_its_last_update():
    first = [info.student_agreement for info in play("rotta", 10, size=8, every=16, nu=0.0, lr=1.0)][::2]
    assert first[0] == 1  # no update yet
    assert min(first) < 1
    assert all(first[i] == first[i + 1] for i in range(1, 9, 2))  # an update every second batch


@pytest.mark.parametrize("method", ["source", "bn", "tent", "note"])
def test_methods_without_branches_report_1(method):
    adapter = tribe.adapt(small_network(), ready(method))
    adapter(images(1, 8, 0)[0])
    assert (adapter.info[0].student_agreement, adapter.info[0].anchor_agreement) == (1, 1)
