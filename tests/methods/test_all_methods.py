"""All methods at their edges: settings that are refused, presets, other precisions, networks without BatchNorm."""

import pytest
import torch
from torch import nn

from method_runs import batches, play
from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.memory import Reservoir, Timely
from tribe.core.state import leaves
from tribe.testing import informed, small_network

WITH_OWN_WEIGHTS = ("cotta", "petal", "ttac")
ENTROPY = ("pl", "eata", "sar", "roid", "deyo", "delta", "cmf")
REFUSED = {  # each value alone; the message names the field
    "tent": {"optimizer": ["lion"], "momentum": [1.0]},
    "pl": {"lr": [-1.0], "optimizer": [None]},
    "lame": {"neighbours": [-1], "rounds": [0]},
    "eata": {"d": [-0.1], "fisher": ["median"], "momentum": [-0.1]},
    "sar": {"momentum": [1.0], "rho": [-1.0], "frozen_tail": [1.0, "layer4"], "mean_after_reset": ["old"]},
    "roid": {"beta": [1.5], "tau": [0.0], "optimizer": ["lion"], "prior": ["labels"], "augment": [3]},
    "cmf": {"gamma": [1.5], "q": [-0.1]},
    "delta": {"alpha": [1.5], "lambda_": [-0.1], "loss": ["focal"]},
    "deyo": {"tau_plpd": [1.5], "tau_ent": [-0.1], "patches": [0], "momentum": [1.0], "frozen_tail": [1.0]},
    "cotta": {"lr": [-1.0], "alpha": [1.5], "p": [2.0], "n": [0], "chunk": [0]},
    "petal": {"delta": [-0.1], "swag_every": [0]},
    "ttac": {"tau_pp": [1.1], "n_clus": [0], "statistics": ["running"]},
    "rotta": {"alpha": [1.5], "nu": [-0.1, float("nan")], "size": [0], "every": [0], "room": [2.5], "classes": [1]},
    "note": {"size": [0], "every": [0, 2.5], "k": [-1.0], "m": [2.0], "lr": [float("nan")]},
    "sotta": {"c_0": [1.5], "momentum": [1.5], "every": [0], "frozen_tail": ["layer4"]},
    "petta": {"alpha_0": [1.5], "lambda_0": [-1.0], "loss": ["mse"], "alpha_bn": [2.0], "size": [0]},
    "bank": {"speeds": [(), (2.0,), (0.1, 0.1), (0.0, 0.1)], "temperature": [0.0]},
    "snap": {"tau": [1.5], "momentum": [-0.1], "k": [-1.0], "learn_every": [0], "size": [0]},
    "bdn": {"eta": [2.0], "domains": [1]},
}
SELFTRAIN = {"rule": [3], "teacher": ["frozen", "ema"], "nu": [2.0], "memory": [-1]}  # beside its variants
EACH = [("selftrain", field, value) for field, values in SELFTRAIN.items() for value in values]
EACH += [("selftrain/robust-bn", "alpha", 2.0)]
EACH += [(name, field, value) for name, fields in REFUSED.items() for field in fields for value in fields[field]]
NEED_CLASSES = (
    "eata",
    "roid",
    "cmf",
    "delta",
    "cotta",
    "petal",
    "ttac",
    "rotta",
    "note",
    "sotta",
    "petta",
    "bdn",
    "bank",
)


@pytest.mark.parametrize(("name", "field", "value"), EACH)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(name, field, value):
    with pytest.raises((ValueError, TypeError), match=rf"\b{field}\b"):
        methods.create(name, **{"classes": 4, field: value})


@pytest.mark.parametrize("name", NEED_CLASSES)
def test_the_number_of_classes_is_asked_for(name):
    with pytest.raises(ValueError, match="classes="):
        methods.create(name)


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [("cotta", "p_th", (0.92, 0.72, 0.1)), ("petal", "p_th", (0.92, 0.72, 0.1)), ("sotta", "c_0", (0.99, 0.66, 0.33))],
)
def test_published_settings_follow_from_the_number_of_classes(name, field, values):
    assert tuple(getattr(methods.create(name, classes=k), field) for k in (10, 100, 1000)) == values


@pytest.mark.parametrize("name", ["lame", "petta", "ttac"])
def test_features_need_a_classifier_layer(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    method, source = methods.create(name, classes=4), [(batches(1, dtype=torch.float32)[0][0], None)]
    with pytest.raises(ValueError, match=r"no classifier layer was found.*classifier=\.\.\."):
        methods.check_fits(Backbone(model), method)
    if method.needs:
        with pytest.raises(ValueError, match="no classifier layer was found"):
            method.study(Backbone(model), source)
    informed(method, named := Backbone(model, classifier="3")).init(named)  # says where the features are


@pytest.mark.parametrize("name", REFUSED)
def test_presets_can_be_built_and_have_room_for_their_images(name):
    values = {"mnist": 28 * 28, "cifar10": 3 * 32 * 32, "cifar100": 3 * 32 * 32, "imagenet": 3 * 224 * 224}
    for dataset, size in values.items():
        method = methods.get(name).preset(dataset)
        assert method.classes in (10, 100, 1000)
        assert getattr(method, "room", size) >= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_two_classes_and_half_precision(name, dtype):
    """Images in memory have the network's precision; all else that a method keeps, at least float32."""
    classes = 4 if name == "petal" else 2  # PETAL studies the labels of `informed`, which are of 4 classes
    net = Backbone(small_network(classes).to(dtype))
    method = informed(methods.create(name, classes=classes), net)
    outputs, state = play(method, net, batches(5, batch=8, dtype=dtype))
    assert all(y.shape == (1, 8, classes) and y.isfinite().all() for y in outputs)
    if name in ("lame", "roid", "cmf"):  # log-probabilities: their softmax is what these methods correct
        assert all(torch.allclose(y.float().logsumexp(-1), torch.zeros(1, 8), atol=1e-1) for y in outputs)
    assert int(state.info.images) == 40
    kept = {n: t for n, t in leaves(state).items() if t.is_floating_point() and not n.endswith("image")}
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in kept.values())
    assert all(memory.image.dtype == dtype for memory in state if isinstance(memory, Timely | Reservoir))
    if name in WITH_OWN_WEIGHTS and dtype == torch.bfloat16:
        start = leaves(method.init(net))
        assert any(not torch.equal(t, start[n]) for n, t in kept.items() if n.endswith("weights"))


@pytest.mark.parametrize("name", [*ENTROPY, *WITH_OWN_WEIGHTS])
def test_networks_without_batch_norm_adapt_too(name):
    torch.manual_seed(0)
    convolution, classifier = nn.Conv2d(3, 4, 3), nn.Linear(144, 4)
    with torch.no_grad():
        classifier.weight.mul_(20)
    net = Backbone(nn.Sequential(convolution, nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), classifier).double())
    fields = {"sar": {"e_m": 0.0, "frozen_tail": 0.0}, "deyo": {"frozen_tail": 0.0, "tau_plpd": -1.0}}.get(name, {})
    method = informed(methods.create(name, classes=4, **fields), net)
    outputs, state = play(method, net, batches(3))
    assert all(y.isfinite().all() for y in outputs)
    end, start = (leaves(getattr(s, "student", s)) for s in (state, method.init(net)))
    place = "weights" if name in WITH_OWN_WEIGHTS else "affine.weight"
    assert not torch.equal(end[place], start[place])
