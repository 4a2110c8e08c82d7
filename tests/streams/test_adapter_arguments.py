"""Arguments of `tribe.adapt` and of methods that are refused: what was wrong, what was expected, what to do."""

import dataclasses

import numpy as np
import pytest
from torch import nn

import tribe
from tribe.methods import check_classes
from tribe.testing import CLASSES, small_network


class Uncopyable(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.file = open(__file__)  # noqa: SIM115

    def forward(self, x):
        return self.norm(x)


class Headless(nn.Module):
    """Logits without any layer that tells how many."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(x).mean((2, 3))


MAKING = {
    "no norm layers": (lambda: tribe.adapt(nn.Linear(3, 2)), ValueError, "no normalisation layers.*BatchNorm"),
    "not a module": (lambda: tribe.adapt("resnet50"), TypeError, "expected a torch.nn.Module; got str"),
    "a lazy norm layer": (
        lambda: tribe.adapt(nn.Sequential(nn.LazyBatchNorm2d(), nn.Linear(3, 2))),
        ValueError,
        "not known yet: run the model once",
    ),
    "a model that cannot be copied": (lambda: tribe.adapt(Uncopyable()), ValueError, "cannot be copied"),
    "an unknown method": (
        lambda: tribe.adapt(small_network(), "trbe"),
        ValueError,
        "unknown method 'trbe': did you mean 'tribe'",
    ),
    "an unknown field": (
        lambda: tribe.adapt(small_network(), gama=0.1),
        TypeError,
        "method 'tribe' has no field 'gama': did you mean 'gamma'",
    ),
    "a field of another method": (
        lambda: tribe.adapt(small_network(), "tent", h0=0.1),
        TypeError,
        "'tent' has no field 'h0'",
    ),
    "fields beside a built method": (
        lambda: tribe.adapt(small_network(), tribe.methods.create("tent"), lr=1.0),
        TypeError,
        "built already.*lr",
    ),
    "a class count that contradicts the network": (
        lambda: tribe.adapt(small_network(), classes=7),
        ValueError,
        "classes=7, but the network's classifier '8' has 4 outputs",
    ),
    "a method built for other classes": (
        lambda: tribe.adapt(small_network(), tribe.methods.create("tribe", classes=5)),
        ValueError,
        "has 4 outputs",
    ),
    "a network that does not tell its classes": (lambda: tribe.adapt(Headless()), ValueError, "pass classes="),
    "one class": (lambda: tribe.methods.create("tribe", classes=1), ValueError, "at least 2; got 1"),
    "a fraction of a class": (
        lambda: tribe.methods.create("tribe", classes=2.5),
        ValueError,
        "classes of tribe is a whole number; got 2.5",
    ),
    "text for a number": (
        lambda: tribe.adapt(small_network(), lr="x"),
        ValueError,
        "lr of tribe is a finite number; got 'x'",
    ),
    "nothing for a number": (
        lambda: tribe.adapt(small_network(), lr=None),
        ValueError,
        "lr .* is a finite number; got None",
    ),
    "no number at all": (
        lambda: tribe.adapt(small_network(), h0=float("nan")),
        ValueError,
        "h0 .* a finite number; got nan",
    ),
    "infinity for a number": (
        lambda: tribe.adapt(small_network(), lr=float("inf")),
        ValueError,
        "lr of tribe is a finite number; got inf",
    ),
    "a word for a truth": (
        lambda: tribe.adapt(small_network(), "roid", consistency="false"),
        ValueError,
        "consistency of roid is True or False; got 'false'",
    ),
    "a number for a truth that may be open": (
        lambda: tribe.adapt(small_network(), rate_cap=0),
        ValueError,
        "rate_cap of tribe is True or False; got 0",
    ),
    "nothing for a truth": (
        lambda: tribe.adapt(small_network(), "roid", consistency=None),
        ValueError,
        "consistency of roid is True or False; got None",
    ),
    "a truth for a number": (
        lambda: tribe.adapt(small_network(), eta=True),
        ValueError,
        "eta .* a finite number; got True",
    ),
    "a fraction of a neighbour": (
        lambda: tribe.adapt(small_network(), "lame", neighbours=1.5),
        ValueError,
        "neighbours of lame is a whole number; got 1.5",
    ),
    "watched and guarded": (lambda: tribe.adapt(small_network(), "tribe+watch+guard"), ValueError, "two guards"),
    "guarded twice, with a filter": (
        lambda: tribe.adapt(small_network(), "tribe+guard+guard+time"),
        ValueError,
        "two guards",
    ),
    "tribe without classes": (lambda: tribe.methods.create("tribe"), ValueError, "number of classes: classes="),
    "no streams": (lambda: tribe.adapt(small_network(), streams=0), ValueError, "streams.*at least 1; got 0"),
    "a fraction of a stream": (lambda: tribe.adapt(small_network(), streams=1.5), ValueError, "streams.*got 1.5"),
    "a seed that is no int": (lambda: tribe.adapt(small_network(), seed="a"), TypeError, "seed is an int"),
    "eta out of range": (lambda: tribe.adapt(small_network(), eta=0.0), ValueError, r"eta lies in \(0, 1\]"),
    "gamma out of range": (lambda: tribe.adapt(small_network(), gamma=1.5), ValueError, r"gamma lies in \[0, 1\]"),
    "a negative threshold": (lambda: tribe.adapt(small_network(), h0=-0.1), ValueError, "h0 of tribe is not negative"),
    "a negative learning rate": (lambda: tribe.adapt(small_network(), lr=-1.0), ValueError, "lr.*not negative"),
    "tent's negative learning rate": (
        lambda: tribe.adapt(small_network(), "tent", lr=-1.0),
        ValueError,
        "lr.*not negative",
    ),
    "an unknown convention": (lambda: tribe.adapt(small_network(), convention="arxiv"), ValueError, "'released' or"),
    "a convention with all that another had settled": (
        lambda: dataclasses.replace(tribe.methods.create("tribe", classes=4), convention="paper"),
        ValueError,
        "convention is 'paper', but anchor_on, .* all have the values of another one.*tribe.methods.create",
    ),
    "an unknown anchor": (
        lambda: tribe.adapt(small_network(), anchor_on="labels"),
        ValueError,
        "'logits' or 'posteriors'",
    ),
    "an augmentation that cannot be called": (lambda: tribe.adapt(small_network(), augment=3), TypeError, "callable"),
    "an unknown preset": (
        lambda: tribe.methods.get("tribe").preset("cifar"),
        ValueError,
        "no preset 'cifar': did you mean 'cifar1",
    ),
    "an unknown norm": (lambda: tribe.norms.create("balance"), ValueError, "did you mean 'balanced'"),
    "an unknown classifier layer": (
        lambda: tribe.Backbone(small_network(), classifier="fc"),
        ValueError,
        "no layer 'fc'",
    ),
    "a standard deviation of zero": (lambda: tribe.Normalize([0.5], [0.0]), ValueError, "std above 0"),
}


@pytest.mark.parametrize("case", MAKING)
def test_making(case):
    make, error, message = MAKING[case]
    with pytest.raises(error, match=message):
        make()


def test_the_classes_of_a_method_are_those_of_the_network():
    single = tribe.Backbone(nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(384, 1)))
    for net, classes, words in (
        (tribe.Backbone(small_network()), 7, "classes=7, but the network's classifier '8' has 4 outputs"),
        (single, None, r"classifier '3' has a single output.*at least 2.*\(0, z\)"),
        (single, 1, "single output"),
    ):
        with pytest.raises(ValueError, match=words):
            check_classes(net, classes)
    for net in (tribe.Backbone(small_network()), tribe.Backbone(Headless())):
        check_classes(net, None)
        check_classes(net, CLASSES)


def test_numpys_numbers_are_numbers(tmp_path):
    given = {
        "streams": np.int64(2),
        "seed": np.int32(5),
        "classes": np.int64(CLASSES),
        "lr": np.float32(0.5),
        "rate_cap": np.True_,
    }
    theirs, plain = (
        tribe.adapt(small_network(), **given),
        tribe.adapt(small_network(), streams=2, seed=5, lr=0.5, rate_cap=True),
    )
    assert theirs.digest() == plain.digest()
    assert theirs.method == plain.method
    assert theirs.reset(stream=np.int64(-1)).digest() == plain.digest()
    theirs.save(tmp_path / "a")
    assert tribe.load(tmp_path / "a", small_network()).method == plain.method
