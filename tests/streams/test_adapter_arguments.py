"""Arguments of `tribe.adapt` and of methods that are refused: what was wrong, what was expected, what to do."""

import dataclasses

import numpy as np
import pytest
from torch import nn

import tribe
from tribe.testing import CLASSES, small_network


class Uncopyable(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.file = open(__file__)  # noqa: SIM115

    def forward(self, x):
        return self.norm(x)


HEADLESS = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten())  # no layer tells how many classes
VALUES = [  # a method, fields, and the keyword of the error
    ("trbe", {}, "did you mean 'tribe'"),
    ("tribe", {"classes": 7}, "'8' has 4 outputs"),
    ("tribe", {"lr": "x"}, "lr of tribe is a finite number; got 'x'"),
    ("tribe", {"lr": float("inf")}, "got inf"),
    ("tribe", {"rate_cap": 0}, "rate_cap of tribe is True or False"),
    ("tribe+watch+guard", {}, "two guards"),
    ("tribe+guard+guard+time", {}, "two guards"),
    ("tribe", {"streams": 0}, "streams.*at least 1"),
    ("tribe", {"streams": 1.5}, "streams"),
    ("tribe", {"eta": 0.0}, "above 0 and at most 1"),
    ("tribe", {"gamma": 1.5}, "between 0 and 1"),
    ("tribe", {"lr": -1.0}, "not negative"),
    ("tribe", {"convention": "arxiv"}, "'released' or"),
    ("tribe", {"anchor_on": "labels"}, "'logits' or 'posteriors'"),
]
TYPES = [
    ("tribe", {"gama": 0.1}, "did you mean 'gamma'"),
    ("tent", {"h0": 0.1}, "'tent' has no field 'h0'"),
    (tribe.methods.create("tent"), {"lr": 1.0}, "built already"),
    ("tribe", {"seed": "a"}, "seed is an int"),
    ("tribe", {"augment": 3}, "callable"),
]
MAKING = {
    "no module": (lambda: tribe.adapt("resnet50"), "Module; got str"),
    "no norm layers": (lambda: tribe.adapt(nn.Linear(3, 2)), "no normalisation layers"),
    "a lazy norm layer": (lambda: tribe.adapt(nn.Sequential(nn.LazyBatchNorm2d(), nn.Linear(3, 2))), "not known yet"),
    "a model that cannot be copied": (lambda: tribe.adapt(Uncopyable()), "cannot be copied"),
    "other classes": (lambda: tribe.adapt(small_network(), tribe.methods.create("tribe", classes=5)), "4 outputs"),
    "a network that does not tell its classes": (lambda: tribe.adapt(HEADLESS), "pass classes="),
    "one class": (lambda: tribe.methods.create("tribe", classes=1), "at least 2; got 1"),
    "a fraction of a class": (lambda: tribe.methods.create("tribe", classes=2.5), "classes of tribe is a whole number"),
    "tribe without classes": (lambda: tribe.methods.create("tribe"), "number of classes: classes="),
    "a convention with all that another had settled": (
        lambda: dataclasses.replace(tribe.methods.create("tribe", classes=4), convention="paper"),
        "all have the values of another one",
    ),
    "an unknown preset": (lambda: tribe.methods.get("tribe").preset("cifar"), "did you mean 'cifar1"),
    "an unknown norm": (lambda: tribe.norms.create("balance"), "did you mean 'balanced'"),
    "an unknown classifier layer": (lambda: tribe.Backbone(small_network(), classifier="fc"), "no layer 'fc'"),
    "a standard deviation of zero": (lambda: tribe.Normalize([0.5], [0.0]), "std above 0"),
}


@pytest.mark.parametrize(("method", "fields", "words"), [*VALUES, *TYPES], ids=str)
def test_a_wrong_value_field_or_type_is_refused(method, fields, words):
    with pytest.raises(TypeError if (method, fields, words) in TYPES else ValueError, match=words):
        tribe.adapt(small_network(), method, **fields)


@pytest.mark.parametrize("case", MAKING)
def test_making(case):
    make, words = MAKING[case]
    with pytest.raises(TypeError if case == "no module" else ValueError, match=words):
        make()


def test_numpys_numbers_are_numbers(tmp_path):
    given = {"streams": np.int64(2), "seed": np.int32(5), "classes": np.int64(CLASSES), "lr": np.float32(0.5)}
    theirs = tribe.adapt(small_network(), **given, rate_cap=np.True_)
    plain = tribe.adapt(small_network(), streams=2, seed=5, lr=0.5, rate_cap=True)
    assert theirs.digest() == plain.digest()
    assert theirs.method == plain.method
    assert theirs.reset(stream=np.int64(-1)).digest() == plain.digest()
    theirs.save(tmp_path / "a")
    assert tribe.load(tmp_path / "a", small_network()).method == plain.method
