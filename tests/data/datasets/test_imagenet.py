"""ImageNet and the sets with its labels: their layouts, their classes among the 1,000, and networks that tell more."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

import layouts
from layouts import WNIDS, made, picture
from tribe import datasets, methods, scenarios
from tribe.core.backbone import Backbone
from tribe.core.rules import Frozen
from tribe.data.datasets.files import MissingData
from tribe.data.datasets.imagenet import output_of, outputs_of, wnids
from tribe.data.images import read_image
from tribe.experiments.runner import run
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Workbench, plain_method, restrict
from tribe.testing import small_network

SISTERS = {"imagenet-v2": "matched-frequency", "imagenet-r": "renditions", "imagenet-a": "adversarial"}


@pytest.fixture
def root(tmp_path):
    layouts.write_imagenet(tmp_path)
    return tmp_path


def imagenet(folder, **fields):
    return datasets.create("imagenet", data=str(folder), **fields)


def test_the_outputs_of_networks_are_the_sorted_wnids():
    assert len(wnids()) == len(set(wnids())) == 1000
    assert list(wnids()) == sorted(wnids())
    assert tuple(list(wnids())[i] for i in (0, 281, -1)) == ("n01440764", "n02123045", "n15075141")  # tench, tabby, ...
    assert [output_of(name) for name in ("n02123045", "281", "0281", "1000", "-1", "²", "cat", "")] == [
        *(281, 281, 281),
        *(None,) * 5,
    ]
    assert outputs_of(["n02123045", "0"]) == (281, 0)
    assert outputs_of(["n02123045", "cat"]) is outputs_of([]) is None


def test_classes_are_the_folders_and_their_outputs_are_known(root):
    renditions = made("imagenet-r", root)
    assert renditions.classes == WNIDS[1:]
    assert renditions.outputs == tuple(wnids()[wnid] for wnid in WNIDS[1:]) == (1, 281)
    assert renditions.labels("renditions").tolist() == [0, 0, 1, 1]
    layouts.write_imagenet_c(root / "ImageNet-C", np.random.default_rng(0))
    assert made("imagenet-c", root).outputs == made("imagenet", root).outputs == (0, 1, 281)
    live = made("live-imagenet-c", root)
    assert (live.classes, live.outputs) == (WNIDS, (0, 1, 281))


def test_numbered_folders_are_in_the_order_of_numbers(root):
    data = made("imagenet-v2", root)
    assert data.classes == ("0", "1", "2", "10")
    assert data.outputs == (0, 1, 2, 10)
    images = [name for name in data.listing("matched-frequency").names if name.endswith("0.JPEG")]
    assert images == ["0/0.JPEG", "1/0.JPEG", "2/0.JPEG", "10/0.JPEG"]


def test_the_variants_of_imagenet_v2_are_domains(root):
    folder = root / "imagenetv2-matched-frequency-format-val"
    shutil.copytree(folder, root / "imagenetv2-top-images-format-val")
    data = made("imagenet-v2", root, variants=("top-images", "matched-frequency"))
    assert data.domains == ("top-images", "matched-frequency")
    assert torch.equal(data.labels("top-images"), data.labels("matched-frequency"))
    with pytest.raises(MissingData, match=r"main/imagenetv2-threshold0\.7\.tar\.gz"):
        made("imagenet-v2", root, variants=("threshold0.7",)).labels("threshold0.7")
    with pytest.raises(ValueError, match="unknown variant 'top'"):
        made("imagenet-v2", root, variants=("top",))
    shutil.rmtree(root / "imagenetv2-top-images-format-val" / "2")
    with pytest.raises(ValueError, match=r"has other classes than .*'2' is in only one of them"):
        made("imagenet-v2", root, variants=("matched-frequency", "top-images")).labels("top-images")


def test_a_folder_with_wnids_knows_the_outputs_too(root):
    (root / "mine").mkdir()
    (root / "imagenet-a").rename(root / "mine/night")
    assert datasets.create("folder", root=str(root / "mine"), size=32).outputs == (0, 1)
    layouts.write_folder(root / "camera", np.random.default_rng(0))
    assert datasets.create("folder", root=str(root / "camera")).outputs is None


@pytest.mark.parametrize("name", SISTERS)
def test_images_are_resized_and_cropped_as_everybody_evaluates(name, root):
    data = made(name, root)
    folder, names, *_ = data.listing(SISTERS[name])
    images = data.images(SISTERS[name], torch.tensor([1, 0]))
    for image, path in zip(images, (names[1], names[0]), strict=True):
        assert torch.equal((image * 255).round().byte(), read_image(folder / path, resize=256, crop=224))


def test_cropped_images_stay_as_they_are(tmp_path):
    for number in ("0007", "0003"):
        (tmp_path / number).mkdir()
        picture(np.random.default_rng(int(number)), 224, 224).save(tmp_path / number / "a.jpg", quality=84)
    data = imagenet(tmp_path)
    assert (data.classes, data.outputs) == (("0003", "0007"), (3, 7))
    expected = read_image(tmp_path / "0003/a.jpg")
    assert torch.equal((data.images("clean", torch.tensor([0]))[0] * 255).round().byte(), expected)
    resized = read_image(tmp_path / "0003/a.jpg", resize=256, crop=224)
    picture(np.random.default_rng(0), 300, 224).save(tmp_path / "0007/b.jpg")  # so they are not all cropped
    assert torch.equal((imagenet(tmp_path).images("clean", torch.tensor([0]))[0] * 255).round().byte(), resized)


def test_the_folder_of_the_classes_may_be_named_itself(root):
    whole, direct = made("imagenet", root), imagenet(root / "imagenet/val")
    assert torch.equal(whole.labels("clean"), direct.labels("clean"))
    (root / "imagenet/val").rename(root / "elsewhere")
    assert imagenet(root / "elsewhere").classes == whole.classes
    assert Workbench(root, "cpu").root(datasets.get("imagenet")) == root
    with pytest.raises(ValueError, match="unknown domain 'dirty'"):
        whole.labels("dirty")
    assert Workbench(root / "elsewhere", "cpu").root(datasets.get("imagenet")) != root / "elsewhere", "not for files"


CAT = f"holds a folder 'cat', which is not a class of ImageNet; expected .*{WNIDS[0]}.*--dataset folder --data ROOT"


BAD = {
    "nothing": (lambda val: shutil.rmtree(val.parent), MissingData, "imagenet/val or .*image-net.org"),
    "empty": (lambda val: [shutil.rmtree(kind) for kind in val.iterdir()], MissingData, "holds no folders; expected"),
    "a class of another set": (lambda val: (val / "cat").mkdir(), ValueError, CAT),
    "a class twice": (lambda val: (val / "0").mkdir(), ValueError, "the same class twice, as '0' and 'n01440764'"),
    "no images": (lambda val: [file.unlink() for file in val.rglob("*.JPEG")], MissingData, "holds no images"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case, root):
    damage, kind, words = BAD[case]
    damage(root / "imagenet/val")
    with pytest.raises(kind, match=words):
        made("imagenet", root).labels("clean")


def test_classes_that_would_be_domains_get_a_hint(root):
    with pytest.raises(ValueError, match=r"holds the classes of ImageNet, not domains.*--dataset imagenet --data"):
        datasets.create("folder", root=str(root / "imagenet/val"), size=32).labels(WNIDS[0])
    layouts.write_folder(root / "camera", np.random.default_rng(0))
    with pytest.raises(ValueError, match="If the domains are classes, as in an ImageFolder, name the folder above"):
        Stream(datasets.create("folder", root=str(root / "camera/day")), scenarios.create("ptta"))


def test_as_many_domains_without_labels_as_classes_are_a_warning(tmp_path):
    layouts.write_folder(tmp_path, np.random.default_rng(0))
    stream = Stream(datasets.create("folder", root=str(tmp_path / "day")), scenarios.create("replay"))
    with pytest.warns(UserWarning, match=r"if they are classes, as in an ImageFolder, name the folder above them"):
        run(Backbone(small_network(classes=len(stream.domains))), methods.create("source"), stream)


def test_missing_sisters_name_their_archives(tmp_path):
    for name, domain in SISTERS.items():
        with pytest.raises(MissingData, match=r"To place it, run: .* curl -fL https://"):
            made(name, tmp_path).labels(domain)
    with pytest.raises(MissingData, match="HaohanWang/ImageNet-Sketch"):
        made("imagenet-sketch", tmp_path).labels("sketches")


def thousand():
    """A network with 1,000 outputs."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 7, 8), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, 1000)).eval()


def test_only_the_classes_of_the_data_set_are_predicted(root):
    data, model = made("imagenet-r", root), thousand()
    net = restrict(Backbone(model), data)
    assert net.classes == 2
    x = data.images("renditions", torch.arange(4))
    affine, stats = net.source()
    with torch.no_grad():
        logits, features, _ = net(x[None], affine, stats, Frozen())
        torch.testing.assert_close(logits[0], model(x)[:, [1, 281]])
    assert features.shape == (1, 4, 4)
    assert net.fingerprint() == Backbone(model).fingerprint(), "source knowledge of the network still fits"
    method = plain_method("tent", net, data, {})
    (record,) = run(net, method, Stream(data, scenarios.create("replay"), (0,), batch=4))
    assert record.classes == 2
    assert set(record.prediction.tolist()) <= {0, 1}


def test_a_workbench_restricts_and_keeps_networks_apart(root):
    bench = Workbench(root, "cpu", networks={"mine.py:net": thousand()})
    names = ("imagenet-r", "imagenet-a", "imagenet-sketch")
    nets = [bench.network("mine.py:net", made(name, root), {}) for name in names]
    assert [net.outputs.tolist() for net in nets] == [[1, 281], [0, 1], [0, 1, 281]]
    assert [net.classes for net in nets] == [2, 2, 3]


def test_a_network_that_is_not_restricted_is_refused(root):
    data = made("imagenet-r", root)
    stream = Stream(data, scenarios.create("replay"), (0,), batch=4)
    with pytest.raises(ValueError, match=r"1000 classes, but the data set has 2. net.restricted_to\(dataset.out"):
        run(Backbone(thousand()), methods.create("source"), stream)


def test_a_network_of_the_same_classes_stays_whole(root):
    data = made("imagenet", root)
    model = nn.Sequential(nn.Conv2d(3, 4, 7, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 28 * 28, 3))
    assert restrict(net := Backbone(model), data) is net


@pytest.mark.parametrize("outputs", [[], [3], [1, 1], [-1, 2], [0, 1000]])
def test_outputs_that_are_none(outputs):
    with pytest.raises(ValueError, match="two or more different numbers below 1000; got"):
        Backbone(thousand()).restricted_to(outputs)
    with pytest.raises(ValueError, match="restricted to 2 outputs already"):
        Backbone(thousand()).restricted_to([1, 2]).restricted_to([0, 1])
