"""Source networks: published names and sizes, weights that load, and errors that say what is wrong."""

import copy
import sys
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import tribe
from places import SHARED
from tribe import models
from tribe.core.backbone import Backbone
from tribe.core.calling import Normalize
from tribe.data.models.architectures import HALF, IMAGENET, BatchNormReLU
from tribe.data.models.external import Normalized

WEIGHTS = SHARED / "weights"
PUBLISHED = {  # file -> name of the network
    "wrn28_10_cifar10": "wrn28_10",
    "resnext29_cifar100": "resnext29",
    "resnet18_mnist": "resnet18_mnist",
    "resnet20_cifar10": "resnet20",
}
SMALL = ("resnet8", "wrn10_1", "compact")
published = pytest.mark.skipif(not WEIGHTS.is_dir(), reason="the published weights are not here")


def on_meta(name, **fields):
    with torch.device("meta"):
        return models.create(name, **fields)


def images(name, n=2, seed=0):
    shape = models.architecture(name).shape
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def weights(tmp_path):
    """A small network and its weights in a file."""
    net = models.create("resnet8")
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    return net.eval(), tmp_path / "net.safetensors"


# -- the networks are the published ones --------------------------------------------------------------------------


NETWORKS = {  # published numbers of parameters, and the normalisation that their weights want
    "wrn28_10": (36_479_194, None),
    "wrn40_2": (2_243_546, None),
    "wrn40_2_augmix": (2_243_546, HALF),
    "resnext29": (6_900_132, None),
    "resnext29_augmix": (6_900_132, HALF),
    "resnet18": (11_689_512, IMAGENET),
    "resnet34": (21_797_672, IMAGENET),
    "resnet50": (25_557_032, IMAGENET),
    "resnet101": (44_549_160, IMAGENET),
    "resnet152": (60_192_808, IMAGENET),
    "resnet18_mnist": (11_175_370, None),
    "resnet20": (269_722, IMAGENET),
    "resnet110": (1_727_962, IMAGENET),
    "compact": (51_706, None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_as_published(name):
    count, normalize = NETWORKS[name]
    net = on_meta(name)
    assert sum(p.numel() for p in net.parameters()) == count
    assert models.architecture(name).normalize == normalize
    assert sum(isinstance(m, Normalize) for m in net.modules()) == (normalize is not None)


@published
@pytest.mark.parametrize(("file", "name"), PUBLISHED.items())
def test_published_weights_load_in_full(file, name):
    net = models.load(name, WEIGHTS / f"{file}.safetensors")
    assert not net.training
    ours = {key: tensor for key, tensor in net.state_dict().items() if not key.endswith("num_batches_tracked")}
    with safe_open(WEIGHTS / f"{file}.safetensors", "pt") as opened:
        theirs = {key: opened.get_tensor(key) for key in opened.keys() if "num_batches" not in key}  # noqa: SIM118
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, theirs[key].to(tensor.dtype)), key
    with torch.no_grad():
        confidence = net(images(name)).softmax(1).amax(1)
    assert torch.isfinite(confidence).all()


# torchvision's own names for one block of each kind: first with a shortcut, then without
TORCHVISION = {
    "resnet18": (2, "layer2.0.downsample.0.weight", "layer2.0.downsample.1.running_var", "layer4.1.bn2.weight"),
    "resnet50": (3, "layer1.0.downsample.0.weight", "layer1.0.downsample.1.running_var", "layer3.5.bn3.weight"),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_are_torchvisions(name):
    convolutions, *expected = TORCHVISION[name]
    state = on_meta(name).state_dict()
    assert {"conv1.weight", "bn1.num_batches_tracked", "fc.bias", *expected} <= state.keys()
    assert {k.split(".")[0] for k in state} == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}
    block = {k.split(".")[2] for k in state if k.startswith("layer1.1.")}
    assert block == {f"{kind}{i}" for kind in ("conv", "bn") for i in range(1, convolutions + 1)}


def test_bottlenecks_stride_in_the_3x3_convolution_as_torchvisions_do():
    block = on_meta("resnet50").layer2[0]
    assert [conv.stride for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]


# -- building by name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.names())
def test_every_name_gives_logits_for_images_of_its_shape_from_its_head(name):
    net, design = on_meta(name, classes=7).eval(), models.architecture(name)
    assert net(torch.empty(2, *design.shape, device="meta")).shape == (2, 7)
    head = net.get_submodule(design.head)
    assert isinstance(head, nn.Linear)
    assert head.out_features == 7


def test_names_cover_what_is_promised_and_other_depths_and_widths():
    promised = {"wrn28_10", "resnext29", "resnet18", "resnet18_mnist", "resnet50", "resnet20", "compact"}
    assert promised <= set(models.names())
    assert models.architecture("wrn22_3") == models.architecture("wrn", depth=22, width=3)
    assert models.architecture("resnet_cifar", depth=14).depth == 14
    assert models.architecture("resnet152").shape == (3, 224, 224), "torchvision's, though CIFAR has that depth too"


# -- normalise and activate as one layer ------------------------------------------------------------------------------


def separate(net):
    """The same network with each ReLU behind its BatchNorm as a layer of its own; it shares the parameters."""
    net = copy.deepcopy(net)
    for name, layer in list(net.named_modules()):
        if isinstance(layer, BatchNormReLU):
            bare = nn.BatchNorm2d(layer.num_features).to(layer.weight.dtype)
            bare.load_state_dict(layer.state_dict())
            parent, _, child = name.rpartition(".")
            setattr(net.get_submodule(parent), child, nn.Sequential(bare.train(layer.training), nn.ReLU()))
    return net


def values(net):
    """Parameters and statistics, whatever the layers are called."""
    return [*net.parameters(), *net.buffers()]


# name -> normalisation layers, and those that a ReLU follows at once
LAYERS = {
    "compact": (6, 6),
    "resnet8": (7, 4),
    "wrn10_1": (7, 7),
    "resnext29": (31, 19),
    "resnet18": (20, 9),
    "resnet50": (53, 33),
}


@pytest.mark.parametrize(("name", "counts"), LAYERS.items())
def test_every_relu_that_follows_a_batch_norm_is_done_on_the_way(name, counts):
    slots = Backbone(on_meta(name)).slots
    assert (len(slots), sum(slot.relu for slot in slots)) == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_one_layer_trains_and_predicts_as_two_do_to_the_bit(name, dtype):
    torch.manual_seed(0)
    one = models.create(name, classes=4).to(dtype)
    two, x, y = separate(one), images(name, 8).to(dtype), torch.arange(8) % 4
    for _ in range(3):
        for net in (one, two):
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(p.grad, alpha=0.05)
    assert all(torch.equal(a, b) for a, b in zip(values(one), values(two), strict=True))
    before, same = one.eval()(x), two.eval()(x)
    assert torch.equal(before, same)
    assert torch.equal(copy.deepcopy(one)(x), before)
    assert not torch.equal(one.train()(x), before)  # evaluation and training are told apart


@pytest.mark.parametrize(("name", "method"), [*product(SMALL, ["tribe", "tent", "bn"])])
def test_one_layer_adapts_as_two_do(name, method):
    torch.manual_seed(0)
    one = models.create(name, classes=4)
    with torch.no_grad():
        one(images(name, 16))  # statistics that fit
    two = separate(one.eval())
    adapters = [tribe.adapt(net, method) for net in (one, two)]
    for seed in range(3):
        x = images(name, 6, seed)
        a, b = (adapter(x) for adapter in adapters)
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        assert torch.isfinite(a).all()
    exported = [adapter.export() for adapter in adapters]
    torch.testing.assert_close(exported[0](x), exported[1](x), atol=1e-6, rtol=1e-5)
    assert [type(m) for m in exported[0].modules()] == [type(m) for m in one.modules()]
    assert exported[0].state_dict().keys() <= one.state_dict().keys()  # bn keeps no statistics


@pytest.mark.parametrize("name", SMALL)
def test_a_network_compiles_in_one_piece(name):
    net, x = models.create(name).eval(), images(name)
    with torch.no_grad():
        assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(x), net(x))


# -- input normalisation is part of the model -----------------------------------------------------------------------


def test_images_are_normalised_once_inside():
    net = models.create("resnet8").eval()
    plain = models.create("resnet8", normalize=None).eval()
    plain.load_state_dict(net.state_dict())
    x = images("resnet8")
    assert torch.equal(net(x), plain(Normalize(*IMAGENET)(x)))
    assert not torch.allclose(net(x), plain(x))


def test_normalisation_is_not_in_the_state_dict_but_moves_with_the_network():
    net = models.create("resnet8")
    assert not any("normalize" in name for name in net.state_dict())
    assert net.double().normalize.mean.dtype == torch.float64


# -- loading ------------------------------------------------------------------------------------------------------


def resaved(net, folder, change=lambda state: state, file="net.pt"):
    torch.save(change({k: v.clone() for k, v in net.state_dict().items()}), folder / file)
    return folder / file


def prefixed(prefix):
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


ENVELOPES = {
    "as it is": lambda s: s,
    "from DataParallel": prefixed("module."),
    "from a wrapper": prefixed("model."),
    "from both": prefixed("module.model."),
    "compiled": prefixed("_orig_mod."),
    "without counts": lambda s: {k: v for k, v in s.items() if not k.endswith("num_batches_tracked")},
    "a training checkpoint": lambda s: {
        "epoch": 3,
        "state_dict": prefixed("module.")(s),
        "optimizer": torch.optim.Adam([torch.zeros(1)]).state_dict(),
        "milestones": Counter([3, 5]),
    },
    "with its normalisation": lambda s: (
        prefixed("model.")(s) | {k: torch.tensor(v).view(1, 3, 1, 1) for k, v in zip(("mu", "sigma"), IMAGENET)}  # noqa: B905
    ),
}


@pytest.mark.parametrize("envelope", ENVELOPES)
@pytest.mark.parametrize("by", ["name", "module"])
def test_weights_load_from_every_envelope(envelope, by, weights, tmp_path):
    net, _ = weights
    path = resaved(net, tmp_path, ENVELOPES[envelope])
    loaded = models.load("resnet8" if by == "name" else models.create("resnet8"), path)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, net.state_dict()[name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_the_networks_own(dtype, weights, tmp_path):
    net, _ = weights
    path = resaved(net, tmp_path, lambda s: {k: v.to(dtype) if v.is_floating_point() else v for k, v in s.items()})
    loaded = models.load("resnet8", path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded.linear.weight, net.linear.weight, atol=1e-2, rtol=1e-2)


def test_classes_and_normalisation_are_read_from_the_file(tmp_path):
    path = resaved(models.create("compact", classes=37), tmp_path)
    assert models.load("compact", path).fc.out_features == 37
    half = {k: torch.tensor(v) for k, v in zip(("mu", "sigma"), HALF, strict=True)}
    path = resaved(models.create("wrn10_1"), tmp_path, lambda s: s | half)
    net = models.load("wrn10_1", path)
    assert net.normalize.mean.tolist() == [0.5] * 3


def test_a_network_behind_a_wrapper_loads_the_librarys_names(weights):
    net, path = weights
    wrapped = models.load(Normalized(models.create("resnet8", normalize=None), IMAGENET), path)
    x = images("resnet8")
    assert torch.equal(wrapped(x), net(x))


def saved_as_safetensors(net, folder):
    save_file(net.state_dict(), folder / "cut.safetensors")
    return folder / "cut.safetensors"


def without(name):
    return lambda s: {k: v for k, v in s.items() if k != name}


def with_tensor(name, tensor):
    return lambda s: s | {name: tensor}


def cut(path, keep=0.6):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


def written(path, data):
    path.write_bytes(data)
    return path


BAD_FILES = {  # what is wrong: (how the file is made, a word of the message)
    "no file": (lambda net, d: d / "none.pt", "no weights file at .*none.pt"),
    "a folder": (lambda net, d: d, "is a folder"),
    "an unknown suffix": (lambda net, d: written(d / "net.onnx", b"x"), "got .onnx"),
    "a safetensors cut short": (lambda net, d: cut(saved_as_safetensors(net, d)), "cut short"),
    "a whole pickled model": (lambda net, d: resaved(net, d, lambda s: net), "Python objects.*save model.state_dict"),
    "a list": (lambda net, d: resaved(net, d, lambda s: [1, 2]), "holds no state dict"),
    "an empty dict": (lambda net, d: resaved(net, d, lambda s: {}), "holds no state dict"),
    "a missing name": (lambda net, d: resaved(net, d, without("layer1.0.bn1.weight")), "lacks layer1.0.bn1.weight$"),
    "an unexpected name": (
        lambda net, d: resaved(net, d, with_tensor("extra.weight", torch.ones(2))),
        "has extra.weight",
    ),
    "another network": (lambda net, d: resaved(nn.Linear(2, 2), d), "no name fits.*it has weight, bias"),
    "a name twice": (
        lambda net, d: resaved(net, d, with_tensor("module.conv1.weight", torch.ones(16, 3, 3, 3))),
        "conv1.weight twice",
    ),
    "a wrong shape": (
        lambda net, d: resaved(net, d, with_tensor("conv1.weight", torch.ones(16, 1, 3, 3))),
        r"conv1.weight is \(16, 1, 3, 3\) where the network has \(16, 3, 3, 3\)",
    ),
    "quantised weights": (
        lambda net, d: resaved(net, d, with_tensor("conv1.weight", torch.ones(16, 3, 3, 3, dtype=torch.int8))),
        "conv1.weight is torch.int8",
    ),
    "a weight that is not a number": (
        lambda net, d: resaved(net, d, with_tensor("bn1.weight", torch.full((16,), torch.nan))),
        "not finite",
    ),
    "another normalisation": (
        lambda net, d: resaved(net, d, lambda s: s | {k: torch.full((3,), 0.5) for k in ("mu", "sigma")}),
        "build it with normalize=",
    ),
}
OTHER_ERRORS = {"no file": FileNotFoundError, "a folder": IsADirectoryError}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_weights_get_a_clear_error_and_change_nothing(case, weights, tmp_path):
    make, message = BAD_FILES[case]
    net, _ = weights
    path = make(net, tmp_path)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(OTHER_ERRORS.get(case, models.WeightsError), match=message):
        models.load(net, path)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


BAD_NAMES = {  # what is wrong: (the call, exception, a word of the message)
    "a typing error": (lambda: models.create("wrn28_1O"), ValueError, "did you mean.*wrn28_10"),
    "not a name": (lambda: models.create(None), ValueError, "unknown model None"),
    "an unknown field": (lambda: models.create("resnet20", width=2), TypeError, "no field 'width'"),
    "a field the name fixes": (lambda: models.create("wrn28_10", depth=40), TypeError, "says depth=28 already.*'wrn'"),
    "an impossible wide depth": (lambda: models.create("wrn27_10"), ValueError, "6n \\+ 4.*got 27"),
    "no width": (lambda: models.create("wrn28_0"), ValueError, "width of wrn"),
    "an impossible small depth": (lambda: models.create("resnet_cifar", depth=21), ValueError, "6n \\+ 2.*got 21"),
    "an impossible depth": (lambda: models.create("resnet", depth=20), ValueError, "one of 18, .*; got 20"),
    "no classes": (lambda: models.create("compact", classes=0), ValueError, "at least 1; got 0"),
    "classes in words": (lambda: models.create("compact", classes="10"), ValueError, "classes of"),
    "grey with colour's mean": (lambda: models.create("resnet20", channels=1), ValueError, "for each of 1 channels"),
    "no deviation": (lambda: models.create("compact", normalize=((0.1,), (0.0,))), ValueError, "std above 0"),
    "a missing file": (lambda: models.load("wrn28_10", "none.pt"), FileNotFoundError, "tribe train DATASET"),
    "no weights": (lambda: models.find("wrn28_10", "cifar10", "h"), FileNotFoundError, "tribe train cifar10 --model"),
    "no recipe": (
        lambda: models.find("wrn28_10", "folder", "h"),
        FileNotFoundError,
        "Place them there.*--weights",
    ),
    "load by a wrong name": (lambda: models.load("resnet21", "none.pt"), ValueError, "unknown model 'resnet21'"),
    "timm without a name": (lambda: models.create("timm"), ValueError, "say which of timm's networks"),
    "torchvision in grey": (lambda: models.create("torchvision/resnet18", channels=1), ValueError, "take 3 channels"),
}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_bad_names_and_fields_get_a_clear_error(case):
    make, exception, message = BAD_NAMES[case]
    with pytest.raises(exception, match=message):
        make()


def test_weights_are_looked_for_where_all_data_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "weights" / "wrn10_1_cifar10.safetensors")):
        models.find("wrn10_1", "cifar10")
    place = tmp_path / "weights" / "wrn10_1_cifar10.safetensors"
    place.parent.mkdir()
    save_file(models.create("wrn10_1").state_dict(), place)
    assert models.find("wrn10_1", "cifar10") == place


def test_what_is_said_to_be_trained_here_has_a_recipe():
    from reproduction.recipe import PRESETS
    from tribe.data.models.weights import TRAINED_HERE

    assert tuple(PRESETS) == TRAINED_HERE


def test_load_wants_a_name_or_a_module(weights):
    with pytest.raises(TypeError, match=r"expected a name or a torch\.nn\.Module; got int"):
        models.load(3, weights[1])
    with pytest.raises(TypeError, match="classes can be set for a network built by name"):
        models.load(weights[0], weights[1], classes=3)


# -- timm and torchvision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm/efficientnet_lite0", "torchvision/resnet50"])
def test_a_missing_library_is_named_with_the_extra_that_installs_it(name, monkeypatch):
    library = name.partition("/")[0]
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(ImportError, match=rf"{name} needs {library}.*pip install 'tribe-tta\[models\]'"):
        models.create(name)


def fake_network(*args, num_classes, **options):
    net = models.create("resnet8", normalize=None, classes=num_classes)
    net.pretrained_cfg = {"mean": HALF[0], "std": HALF[1]}
    return net


FAKES = {
    "timm": SimpleNamespace(create_model=fake_network, is_model="lite0".__eq__),
    "torchvision": SimpleNamespace(models=SimpleNamespace(get_model=fake_network, list_models=lambda: ["lite0"])),
}


@pytest.mark.parametrize(("library", "normalize"), [("timm", HALF), ("torchvision", IMAGENET)])
def test_networks_of_other_libraries_come_with_their_normalisation(library, normalize, monkeypatch):
    monkeypatch.setitem(sys.modules, library, FAKES[library])
    net = models.create(f"{library}/lite0", classes=5).eval()
    x = images("resnet8")
    assert torch.equal(net(x), net.model(Normalize(*normalize)(x)))
    assert net(x).shape == (2, 5)
    with pytest.raises(ValueError, match=f"{library} has no network 'lite1'"):
        models.create(f"{library}/lite1")
