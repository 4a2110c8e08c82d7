"""Norm rules from text, and methods that play them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from tribe import methods, norms
from tribe.core.backbone import Backbone
from tribe.core.rules import Frozen, PerBatch
from tribe.norms import Stats
from tribe.norms.batch import Robust
from tribe.norms.named import find_class, from_text
from tribe.testing import CLASSES, ready, small_network
from watching import pictures


def test_a_name_and_fields():
    assert from_text("robust", 10) == Robust()
    assert from_text("robust( alpha=0.25 )", 10) == Robust(0.25)
    assert from_text("balanced(eta=0.1)", 7).classes == 7, "the number of classes comes from the method"
    assert from_text("frozen", 10) == Frozen()
    assert from_text("batch", 10) == PerBatch()
    assert [find_class(text) for text in ("robust(alpha=1)", "nothing", 3)] == [Robust, None, None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("robst", "did you mean"),
        ("robust(", "robust"),
        ("robust(0.1)", "cannot be read"),
        ("robust(alpha=open('x'))", "cannot be read"),
        ("robust(alpha=2)", "alpha"),
        ("robust(beta=2)", "beta"),
    ],
)
def test_text_that_is_not_a_rule(text, words):
    with pytest.raises((ValueError, TypeError), match=words):
        from_text(text, 10)


@dataclass(frozen=True)
class Broken:
    """A rule that is wrong in one way."""

    how: str = ""
    classes: ClassVar[int] = 1

    @property
    def observes(self):
        return self.how != "unobserved"

    def __call__(self, mean, var, count, stats, labels, valid, eps):
        if self.how == "raises":
            return labels.nothing
        if self.how == "pair":
            return mean, var
        if self.how == "labels":
            labels.sum()
        centre = mean.mean(1, keepdim=True)
        spread = var.mean(1, keepdim=True)
        return {
            "nan": (centre / 0 * 0, spread, stats),
            "infinite": (centre, spread, Stats(stats.mean, stats.var / 0)),
            "negative": (centre, -spread, stats),
            "shape": (centre[:, 0], spread, stats),
            "kept": (centre, spread, Stats(stats.mean[:, :, :1], stats.var)),
        }.get(self.how, (centre, spread, stats))


@pytest.fixture
def broken(registries):
    norms.register("broken")(Broken)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("nan", "finite"),
        ("infinite", "finite"),
        ("negative", "negative"),
        ("shape", "shapes"),
        ("kept", "shapes"),
        ("unobserved", "observes"),
        ("pair", "failed with labels"),
        ("raises", "failed with labels"),
        ("labels", "failed without labels"),
    ],
)
def test_a_rule_that_breaks_the_protocol_is_refused_before_it_plays(how, words):
    with pytest.raises(ValueError, match=words):
        methods.create("selftrain", classes=4, rule=f"broken(how={how!r})")


@pytest.mark.usefixtures("broken")
def test_a_custom_rule_normalises_every_branch():
    net, x = Backbone(small_network()), pictures(1, 8)
    own, batch = (ready("selftrain", rule=rule) for rule in ("broken", "batch"))
    assert own.functions == (Broken,)
    logits = [method.step(net, method.init(net), x)[0] for method in (own, batch)]
    assert not torch.allclose(logits[0], ready("source").step(net, ready("source").init(net), x)[0])
    assert logits[0].shape == logits[1].shape == (1, 8, CLASSES)
    same = [ready("selftrain", rule=rule) for rule in ("batch", "mixed(share=1.0)")]
    one, other = (method.step(net, method.init(net), x) for method in same)
    assert torch.allclose(one[0], other[0], atol=1e-5), "a mixture of the batch alone is the batch"
    assert torch.allclose(one[1].affine.bias, other[1].affine.bias, atol=1e-6)
