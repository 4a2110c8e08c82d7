"""Source knowledge: its file, whom it may serve, and `tribe source`, which makes it, with data as published."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import layouts
import tribe
from commands import assert_refused, message, succeeded
from commands import tribe_command as command
from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.state import digest
from tribe.experiments.store import finished
from tribe.knowledge import SHIPPED, Knowledge, KnowledgeError, find_knowledge
from tribe.testing import images, informed, small_network


@pytest.fixture
def net():
    return Backbone(small_network())


@pytest.fixture
def eata(net):
    return informed(methods.create("eata", classes=4), net)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_knowledge_comes_back_from_its_file_as_it_was(eata, net, tmp_path):
    path = tmp_path / "eata.safetensors"
    eata.knowledge.save(path)
    back = Knowledge.load(path)
    assert back == eata.knowledge
    assert back.spec == eata.knowledge.spec
    assert all(torch.equal(back.tensors[k], eata.knowledge.tensors[k]) for k in ("weight", "bias"))
    all_kept = dataclasses.replace(eata, e0=1.0, d=2.0)
    ends = []
    for method in (all_kept, dataclasses.replace(all_kept, knowledge=path)):
        state = method.init(net)
        for seed in range(4):
            _, state = method.step(net, state, images(1, 8, seed))
        assert int(state.adam.steps) == 4
        ends.append(digest(state))
    assert ends[0] == ends[1], "knowledge from a file weighs otherwise"


def test_knowledge_of_another_method_is_refused(eata, tmp_path):
    other = dataclasses.replace(eata.knowledge, method="ttac")
    other.save(tmp_path / "ttac.safetensors")
    for given in (other, tmp_path / "ttac.safetensors"):
        with pytest.raises(KnowledgeError, match="Fisher"):
            methods.create("eata", classes=4, knowledge=given)


def test_knowledge_of_another_network_is_refused(eata):
    with pytest.raises(KnowledgeError, match="another"):
        eata.init(Backbone(small_network(seed=1)))


def test_knowledge_serves_its_network_in_any_precision(eata, net):
    half = Backbone(small_network().bfloat16().float())
    assert half.fingerprint(exact=False) != net.fingerprint(exact=False)  # other weights, once rounded
    eata.init(Backbone(small_network(dtype=torch.float64)))  # the same weights, held wider


def damaged(method, net, change):
    """The method, informed, with one tensor of its knowledge changed, or taken away."""
    method = informed(method, net)
    tensors = dict(method.knowledge.tensors)
    name, value = change
    tensors[name] = value(tensors[name])
    return dataclasses.replace(
        method,
        knowledge=Knowledge(
            method.name, {k: t for k, t in tensors.items() if t is not None}, net.fingerprint(exact=False)
        ),
    )


NEEDY = {"eata": "bias", "petal": "var/0.weight", "petta": "var", "ttac": "class_cov"}


@pytest.mark.parametrize(("name", "tensor"), NEEDY.items())
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (lambda _: None, "nothing"),
        (lambda t: t[:, None], r"a tensor of shape \(.*1.*\)"),
        (lambda t: torch.cat((t, t), -1), "a tensor of shape"),
        (lambda t: torch.full_like(t, torch.nan), "values that are not finite"),
        (lambda t: t.double() + 1e300, "values that are not finite"),  # in the network's precision
    ],
    ids=["absent", "another axis", "larger", "nan", "too large"],
)
def test_what_knowledge_holds_is_checked_alike_for_all_methods(net, name, tensor, value, found):
    method = damaged(methods.create(name, classes=4), net, (tensor, value))
    with pytest.raises(KnowledgeError, match=f"holds {found}.* as {tensor}; expected finite.*tribe source {name}"):
        method.init(net)


@pytest.mark.parametrize("name", NEEDY)
def test_missing_knowledge_is_asked_for(net, name):
    with pytest.raises(KnowledgeError, match=f"{name} needs the .*tribe source {name}"):
        methods.create(name, classes=4).init(net)
    methods.create("eata", classes=4, alpha=0.0).init(net)  # it needs none without its penalty


@pytest.mark.parametrize("given", [3, b"eata.safetensors", {"weight": torch.zeros(14)}])
def test_other_values_are_not_knowledge(given):
    with pytest.raises(KnowledgeError, match="source"):
        methods.create("eata", classes=4, knowledge=given)


# -- the images it is taken from --------------------------------------------------------------------------------------


def batch(seed, count=16):
    return images(1, count, seed)[0], torch.arange(count) % 4


@pytest.mark.parametrize("name", NEEDY)
def test_bad_images_are_left_out_of_every_study(net, name):
    """Alone in a batch, too."""
    method, good = methods.create(name, classes=4), [batch(0), batch(1)]
    bad = torch.full_like(good[0][0][:1], torch.nan)
    mixed = torch.cat((good[0][0][:5], bad, good[0][0][5:])), torch.cat((good[0][1][:5], good[0][1][4:]))
    clean, screened = method.study(net, good), method.study(net, [mixed, (bad, torch.tensor([1])), good[1]])
    assert screened == clean
    assert screened.spec == clean.spec
    assert clean.spec["images"] == 32
    with pytest.raises(ValueError, match="got"):
        method.study(net, [])


@pytest.mark.parametrize("name", NEEDY)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: ((x * 255).to(torch.uint8), y), r"source images are torch.uint8.*images.float\(\) / 255"),
        (lambda x, y: (x, y[:-1]), r"for each of 16 source images; got torch.int64 of shape \(15,\)"),
        (lambda x, y: (x, y.float()), "got torch.float32"),
        (lambda x, y: (x, y - 1), "class number, 0 or more.* -1 the smallest"),
    ],
    ids=["uint8", "fewer labels", "float labels", "negative labels"],
)
def test_batches_that_cannot_be_studied_are_refused_in_words(net, name, change, words):
    with pytest.raises((ValueError, TypeError), match=words):
        methods.create(name, classes=4).study(net, [batch(0), change(*batch(1))])


@pytest.mark.parametrize(
    ("labels", "words"),
    [(None, "came without labels"), (torch.full((16,), 7), "has 4 classes.* label is 7")],
)
def test_labels_that_are_learned_from_must_be_the_networks_classes(net, labels, words):
    with pytest.raises(ValueError, match=words):
        methods.create("petal", classes=4).study(net, [(batch(0)[0], labels)])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.unlink(), "no source knowledge at"),
        (lambda p: p.write_bytes(p.read_bytes()[:-7]), "cut short"),
        (flipped, "damaged"),
        (lambda p: save_file(load_file(p), p), "not a file of source knowledge"),
        (lambda p: save_file(load_file(p), p, {"format": "tribe-source", "schema": "2"}), "damaged"),
    ],
    ids=["absent", "cut", "flipped", "plain", "words lost"],
)
def test_a_damaged_file_is_refused_in_words(eata, tmp_path, damage, words):
    path = tmp_path / "eata.safetensors"
    eata.knowledge.save(path)
    damage(path)
    with pytest.raises(KnowledgeError, match=words):
        methods.create("eata", classes=4, knowledge=path)


# -- tribe source -----------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Small published data, a working folder, and no other data."""
    data = tmp_path / "data"
    data.mkdir()
    layouts.write(data)
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return data


DIGITS = ("--model", "compact", "--dataset", "mnist")


def play(root, names, *options):
    """Run methods on a short stream of digits."""
    small = ("--data", root, "--scenario", "ptta", "--set", "dataset.corruptions=('stripe',)")
    return command("run", *small, "--methods", names, *options)


def study(root, name="eata", *options):
    """Make the source knowledge of a method from digits."""
    return command("source", name, *DIGITS, "--data", root, "--batch", 10, *options)


OWN = """
from torch import nn
import torch
def net(classes=10):
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), pool, nn.Flatten(), nn.Linear(4, classes))
def two():
    return net(2)
"""


def test_the_package_network_on_published_digits_and_a_run_that_finds_it(root):
    result = succeeded(study(root, "eata", "--json"))
    report = json.loads(result.stdout)
    path = root / "source" / "eata_compact_mnist.safetensors"
    assert report["path"] == str(path)
    assert report["bytes"] == path.stat().st_size
    net = Backbone(tribe.models.load("compact", tribe.models.find("compact", "mnist", root)))
    assert report["tensors"]["weight"] == {"shape": [net.channels], "dtype": "float32"}
    assert report["spec"] == {
        **{"model": "compact", "dataset": "mnist", "images": 20, "batches": 2, "batch": 10, "seed": 0},
    }
    knowledge = Knowledge.load(path)
    assert knowledge.network == net.fingerprint(exact=False)
    assert report["digest"] == knowledge.digest

    # The same, by hand: the training split, in the order of the seed.
    data = tribe.datasets.create("mnist", data=str(root), split="train")
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    taken = [(data.images("clean", part), None) for part in order.split(10)]
    expected = methods.create("eata", classes=10).study(net, taken).tensors
    assert all(torch.allclose(knowledge.tensors[k], expected[k], rtol=1e-4, atol=1e-9) for k in expected)

    succeeded(play(root, "eata", "--out", "run", "--json", "-"))
    assert used(root, "run") == knowledge


def used(root, folder):
    """The source knowledge that the one result in a folder was computed with."""
    (result,) = finished(folder)
    digest = result.experiment.method.fields["knowledge"]["knowledge"]
    return next(known for known in map(Knowledge.load, (root / "source").iterdir()) if known.digest == digest)


def test_a_run_names_the_commands_that_make_missing_knowledge(root, monkeypatch):
    monkeypatch.setattr("tribe.knowledge.SHIPPED", root / "nothing")
    result = play(root, "eata,source,ttac")
    wanted = [f"tribe source {name} --model compact --dataset mnist --data {root}" for name in ("eata", "ttac")]
    assert_refused(result)
    assert message(result).endswith(f"Here: {' && '.join(wanted)}")
    assert not Path("runs").exists(), "nothing was begun"
    assert play(root, "eata", "--set", "eata.alpha=0", "--out", "free").exit_code == 0, "without penalty none is needed"
    for line in wanted:
        assert command(*line.split()[1:], "--batch", 10).exit_code == 0
    assert play(root, "eata,source,ttac").exit_code == 0


def test_knowledge_of_other_settings_has_a_file_of_its_own_and_a_run_finds_it(root):
    usual = f"tribe source ttac --model compact --dataset mnist --data {root}"
    assert command(*usual.split()[1:], "--batch", 10).exit_code == 0
    before = (root / "source" / "ttac_compact_mnist.safetensors").read_bytes()
    frozen = ("--set", "ttac.statistics=frozen", "--set", "ttac.lr=0.5")
    result = play(root, "ttac", "--out", "out", *frozen)
    assert_refused(result)
    advice = f"{usual} --set ttac.statistics=frozen --set ttac.lr=0.5"
    assert message(result).endswith(advice)
    assert command(*advice.split()[1:], "--batch", 10).exit_code == 0
    made = {path.name: path.read_bytes() for path in (root / "source").iterdir()}
    assert made.keys() == {"ttac_compact_mnist.safetensors", "ttac_compact_mnist+statistics=frozen.safetensors"}
    assert made["ttac_compact_mnist.safetensors"] == before
    for options, expected in ((frozen, "frozen"), (frozen[:2], "frozen"), ((), "batch"), (frozen[2:], "batch")):
        folder = f"out{len(options)}{options[:2]}"
        result = succeeded(play(root, "ttac", *options, "--out", folder))
        assert used(root, folder).spec["statistics"] == expected


def test_knowledge_without_classes_does_not_replace_that_with_them(root):
    assert study(root, "ttac").exit_code == 0
    before = (root / "source" / "ttac_compact_mnist.safetensors").read_bytes()
    assert study(root, "ttac", "--set", "ttac.class_aware=false").exit_code == 0
    assert (root / "source" / "ttac_compact_mnist.safetensors").read_bytes() == before
    for options, classes in (((), True), (("--set", "ttac.class_aware=false"), False)):
        succeeded(play(root, "ttac", *options, "--out", f"out{classes}"))
        assert used(root, f"out{classes}").spec["class_aware"] is classes


def test_knowledge_of_other_weights_is_not_used_in_silence(root):
    Path("mine.py").write_text(OWN)
    arguments = ("--model", "mine.py:net", "--dataset", "cifar10", "--data", root, "--batch", 20)
    assert command("source", "eata", *arguments).exit_code == 0
    assert find_knowledge("eata", "mine.py:net", "cifar10", root) is not None
    Path("mine.py").write_text(OWN.replace("manual_seed(0)", "manual_seed(1)"))
    played = ("--dataset", "cifar10-c", "--model", "mine.py:net", "--data", root, "--scenario", "ptta")
    played += ("--set", "dataset.corruptions=('fog',)")
    advice = f"tribe source eata --model mine.py:net --dataset cifar10 --data {root}"
    words = "belongs to another network (model mine.py:net, dataset cifar10)"
    assert_refused(command("run", *played, "--methods", "eata"), words, advice)
    assert command("source", "eata", *arguments).exit_code == 0  # replaces it
    assert command("run", *played, "--methods", "eata").exit_code == 0


def test_a_folder_of_pictures(root):
    Path("mine.py").write_text(OWN)
    arguments = ("--model", "mine.py:two", "--dataset", "folder", "--data", root / "camera", "--batch", 5)
    result = succeeded(command("source", "eata", *arguments, "--out", "camera.safetensors"))
    assert "15 images" in result.stdout  # of 16: a last batch of one is left out
    assert "weight" in result.stdout
    knowledge = Knowledge.load("camera.safetensors")
    assert knowledge.spec["batches"] == 3
    played = ("--dataset", "folder", "--data", root / "camera", "--model", "mine.py:two")
    played += ("--scenario", "ptta")
    missing = command("run", *played, "--methods", "eata")
    assert missing.exit_code == 2
    advice = message(missing).partition("Here: tribe ")[2].replace("TRAINING_IMAGES", str(root / "camera"))
    assert command(*advice.split(), "--batch", 5).exit_code == 0, "there was no folder for it yet"
    assert command("run", *played, "--methods", "eata").exit_code == 0
    made = find_knowledge("eata", "mine.py:two", "folder", Path(os.environ["TRIBE_DATA"]))
    made.unlink()
    succeeded(command("run", *played, "--methods", "eata", "--set", "eata.knowledge=camera.safetensors"))
    assert sorted(p.name for p in (root / "camera").iterdir()) == ["day", "night"], (
        "something was put among the pictures"
    )
    assert command("source", "eata", *arguments).exit_code == 0
    assert find_knowledge("eata", "mine.py:two", "folder", Path(os.environ["TRIBE_DATA"])) is not None
    assert command("run", *played, "--methods", "eata").exit_code == 0


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_images_come_from_the_training_split(root, dataset):
    Path("mine.py").write_text(OWN.replace("classes=10", f"classes={100 if dataset == 'cifar100' else 10}"))
    arguments = ("--model", "mine.py:net", "--dataset", dataset, "--data", root, "--batch", 7, "--images", 14)
    written = []
    for seed in (0, 0, 1):
        succeeded(command("source", "eata", *arguments, "--seed", seed, "--out", "out.safetensors"))
        written.append(Knowledge.load("out.safetensors"))
    assert written[0] == written[1]
    assert written[0] != written[2], "the seed chose no other images"
    assert written[0].spec["images"] == 14
    for path in root.glob("cifar-*/test*.bin"):
        path.unlink()
    assert command("source", "eata", *arguments, "--out", "out.safetensors").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tent", *DIGITS], "tent needs no source knowledge"),
        (["eta", *DIGITS], "unknown method 'eta'"),
        (["eata", "--model", "compact", "--dataset", "mnsit"], "unknown data set 'mnsit'"),
        (["eata", "--model", "compact", "--dataset", "live-mnist-c"], "comes from the clean ones: --dataset mnist"),
        (["eata", "--model", "compact", "--dataset", "imagenet-c"], "comes from the clean ones: --dataset imagenet"),
        (["eata", "--model", "wrn28_10", "--dataset", "cifar10"], "no weights of wrn28_10 for cifar10"),
        (["eata", *DIGITS, "--batch", "0"], "--batch"),
        (["eata", *DIGITS, "--images", "0"], "--images"),
        (["eata", *DIGITS, "--out", "no/where.safetensors"], "no folder no"),
        (["eata", *DIGITS, "--out", "data"], "is a folder"),
        (["eata", *DIGITS, "--set", "eata.dd=1"], "no field 'dd'"),
        (["eata", *DIGITS, "--device", "tpu9"], "device"),
        (["eata", "--model", "absent.py:net", "--dataset", "mnist"], "no file at absent.py"),
        (["petal", *DIGITS, "--images", "5"], "swag_every"),
        (["eata", "--model", "compact", "--dataset", "folder"], "needs --data DIR"),
    ],
)
def test_wrong_arguments_are_refused(root, arguments, words):
    data = [] if "folder" in arguments else ["--data", str(root)]
    assert_refused(command("source", *arguments, *data), words)
    assert not (root / "source").is_dir() or not any((root / "source").iterdir())


def test_where_a_run_of_other_data_would_look_is_made(root):
    """As the advice of a run on images whose clean ones tribe does not know has it."""
    place = root / "elsewhere" / "source" / "eata_compact_imagenet.safetensors"
    assert study(root, "eata", "--out", place).exit_code == 0
    assert Knowledge.load(place).method == "eata"


CHATTY = """
from dataclasses import dataclass
import tribe
from tribe.methods.eata import Eata

print("words at import")

@dataclass(frozen=True)
class Chatty(Eata):
    def study(self, *given):
        print("words of a study")
        return super().study(*given)

def net():
    print("words of a network")
    return tribe.models.load("compact", tribe.models.find("compact", "mnist"))
"""


def test_json_is_alone_on_stdout_whatever_custom_code_prints(root):
    Path("chatty.py").write_text(CHATTY)
    words = ("--model", "chatty.py:net", "--dataset", "mnist", "--data", root, "--batch", 10, "--out", "k.safetensors")
    try:
        result = command("source", "chatty.py:Chatty", *words, "--json")
    finally:
        tribe.methods.registry._classes.pop("chatty", None)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["method"] == "chatty"
    for words in ("words at import", "words of a study", "words of a network", "chatty, mnist"):
        assert words in result.stderr


def test_a_damaged_file_found_by_a_run_names_the_command(root):
    assert study(root).exit_code == 0
    flipped(root / "source" / "eata_compact_mnist.safetensors")
    advice = f"tribe source eata --model compact --dataset mnist --data {root}"
    assert_refused(play(root, "eata"), "damaged", advice)


def test_unreadable_pictures_are_left_out(root):
    Path("mine.py").write_text(OWN)
    (root / "camera" / "day" / "cat" / "0.png").write_bytes(b"no picture")
    arguments = ("--model", "mine.py:two", "--dataset", "folder", "--data", root / "camera", "--batch", 16, "--json")
    assert_refused(command("source", "eata", *arguments), "0.png")
    skip = ("--set", "dataset.unreadable=skip", "--out", "k.safetensors")
    result = succeeded(command("source", "eata", *arguments, *skip))
    assert "0.png" in message(result)
    assert json.loads(result.stdout)["spec"]["images"] == 15
    assert np.isfinite(Knowledge.load("k.safetensors").tensors["weight"].numpy()).all()


def test_a_run_refuses_knowledge_of_another_data_set(root, tmp_path):
    """The same network, but told to have been studied on other images."""
    shipped = Knowledge.load(SHIPPED / "eata_compact_mnist.safetensors")
    dataclasses.replace(shipped, spec={**shipped.spec, "dataset": "cifar10"}).save(tmp_path / "other.safetensors")
    result = play(root, "eata", "--set", f"eata.knowledge={tmp_path / 'other.safetensors'}")
    advice = "tribe source eata --model compact --dataset mnist"
    assert_refused(result, "was taken from cifar10, not from mnist", advice)
