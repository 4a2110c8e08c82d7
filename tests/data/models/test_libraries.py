"""Networks of timm and Hugging Face adapt as they come; skipped where the library cannot be imported."""

import functools
import importlib
import importlib.util

import pytest
import torch
from torch import nn

import tribe
from tribe.core.backbone import Backbone
from zoo import FROZEN, different_rows, gap

TIMM = (  # small networks, one of each way to normalise
    "vit_tiny_patch16_224",
    "convnext_atto",
    "poolformer_s12",
    "mobilevit_xxs",
    "edgenext_xx_small",
    "swin_tiny_patch4_window7_224",
)
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]}
HUGGING_FACE = {
    "ViT": {**TINY, "image_size": 32, "patch_size": 8},
    "ConvNext": SIZES,
    "ConvNextV2": SIZES,
    "Swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 32},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}


@functools.cache
def define_detection_operators():
    """Let torchvision be imported beside a torch that its compiled part was not built for.

    timm and transformers import torchvision, and torchvision describes two operators of that part. Nothing here calls
    them.
    """
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators


def library(name):
    """Import a library, or skip the test."""
    if torch.version.cuda is None and importlib.util.find_spec("torchvision"):
        define_detection_operators()
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def shaken(model):
    """A network whose parameters of normalisation are not those of new layers."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def check(model, size):
    """Rows agree with the network and with rows alone; all norm layers adapt, but for those that are none."""
    net, x = Backbone(model), torch.rand(2, 2, 3, size, size)
    assert not any("custom" in why for name, why in net.left_alone.items() if "grn" not in name.lower())
    with torch.no_grad():
        expected = getattr(model(x[1]), "logits", None)
        expected = model(x[1]) if expected is None else expected
        assert gap(net(x, *net.source(2), FROZEN).logits[1], expected) < 1e-4 * float(expected.std())
        arguments = different_rows(net, FROZEN, 2, 2)
        together = net(x, *arguments).logits
        alone = net(x[:1], *arguments.row(0)).logits
    assert gap(together[:1], alone) < 1e-4 * float(alone.std())
    model = tribe.adapt(model, h0=2.0)
    before = model.predict(x[0])
    model(x[0])
    assert gap(model.predict(x[0]), before) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_networks_of_timm_adapt(name):
    timm = library("timm")
    torch.manual_seed(0)
    model = shaken(timm.create_model(name, num_classes=4))
    check(model, model.pretrained_cfg["input_size"][-1])


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_networks_of_hugging_face_adapt(name):
    transformers = library("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(num_labels=4, **HUGGING_FACE[name])
    check(shaken(getattr(transformers, f"{name}ForImageClassification")(config)), 32)


def test_an_adapter_stands_in_a_pipeline():
    transformers = library("transformers")
    image = library("PIL.Image")
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(num_labels=4, **SIZES)
    net = nn.Sequential(tribe.Normalize([0.5] * 3, [0.5] * 3), transformers.ConvNextForImageClassification(config))
    processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 32}, do_normalize=False)
    model = tribe.adapt(net, h0=2.0)
    pipe = transformers.pipeline("image-classification", model=model, image_processor=processor)
    pictures = [image.new("RGB", (40, 40), (50 * i, 100, 200 - 50 * i)) for i in range(4)]
    before = model.digest()
    answers = pipe(pictures, batch_size=2, top_k=2)
    assert [len(answer) for answer in answers] == [2] * 4
    assert {label["label"] for answer in answers for label in answer} <= set(config.id2label.values())
    assert model.info[0].images == 4
    assert model.digest() != before
