"""Data sets in their published layouts, written here small: the same folders, names, shapes and types."""

import gzip
import hashlib
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import layouts
from layouts import PER, Malicious, made
from tribe import datasets, methods, scenarios
from tribe.data.datasets import clean
from tribe.data.datasets.files import MissingData, data_root
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import trained_on
from tribe.testing import check_dataset


@pytest.fixture
def root(tmp_path):
    return layouts.write(tmp_path)


CLEAN = ("cifar10", "cifar100", "mnist")


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_a_severity_is_its_block_of_the_file(root, severity):
    data = made("cifar10-c", root, severities=(severity,))
    first = data.images(f"fog@{severity}", torch.arange(PER))[:, 0, 0, 0] * 255
    assert first.round().tolist() == list(range(PER * (severity - 1), PER * severity))


def test_images_are_the_bytes_of_the_file(root):
    array = np.load(root / "CIFAR-10-C" / "snow.npy")
    images = made("cifar10-c", root).images("snow@5", torch.tensor([7]))
    assert torch.equal((images[0] * 255).round().byte(), torch.from_numpy(array[4 * PER + 7].transpose(2, 0, 1)))


@pytest.mark.parametrize("name", datasets.names())
def test_they_play_as_streams(name, root):
    stream = Stream(made(name, root), scenarios.create("ptta"), (0, 1), batch=16)
    assert sum(int(b.valid.sum()) for b in stream) == 2 * sum(len(y) for y in stream.labels) > 0


def test_clean_images_and_labels_are_those_of_the_file(root):
    record = np.fromfile(root / "cifar-100-binary/test.bin", np.uint8).reshape(PER, 3074)[7]
    data = made("cifar100", root)
    assert data.labels()[7] == record[1], "the fine label, not the coarse one"
    picture = torch.from_numpy(record[2:].reshape(3, 32, 32))
    assert torch.equal((data.images("clean", torch.tensor([7]))[0] * 255).round().byte(), picture)
    assert len(made("cifar10", root, split="train").labels()) == 5 * PER
    first = made("cifar10", root, split="train").images("clean", torch.tensor([4 * PER]))[0, 0, 0, 0]
    assert round(255 * float(first)) == 5, "the fifth training file"


@pytest.mark.parametrize(("name", "chosen"), [("cifar10", ("fog", "contrast")), ("mnist", ("stripe", "rotate"))])
def test_corrupted_on_the_fly(name, chosen, root):
    clean = made(name, root)
    data = made(f"live-{name}-c", root, corruptions=chosen, severities=(3, 5))
    assert data.domains == tuple(f"{c}@{s}" for c in chosen for s in (3, 5))
    for domain in data.domains:
        whole = data.images(domain, torch.arange(PER))
        assert torch.equal((whole * 255).round() / 255, whole), "bytes, as the published files hold them"
        assert not torch.equal(whole, clean.images("clean", torch.arange(PER)))
    assert torch.equal(data.labels(data.domains[0]), clean.labels())
    assert sum(int(b.valid.sum()) for b in Stream(data, scenarios.create("iid"), (0,))) == 4 * PER


CLEAN_FILES = {
    "cifar10": "cifar-10-batches-bin/test_batch.bin",
    "cifar100": "cifar-100-binary/test.bin",
    "mnist": "mnist/t10k-images-idx3-ubyte",
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_files_that_are_cut_short_or_missing_are_named(name, root):
    path = root / CLEAN_FILES[name]
    for content in (path.read_bytes()[:-5], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path.name}.*(cut short|not an idx file)"):
            made(name, root).labels()
    path.unlink()
    with pytest.raises(MissingData, match=f"{path.stem} not found: looked for {path}"):
        made(name, root).labels()
    with pytest.raises(ValueError, match="split of"):
        made(name, root, split="val")


def test_labels_of_a_clean_file_out_of_range_are_refused(root):
    path = root / CLEAN_FILES["cifar10"]
    path.write_bytes(bytes([10]) + path.read_bytes()[1:])
    with pytest.raises(ValueError, match="to 10; expected 0 to 9"):
        made("cifar10", root).labels()


@pytest.fixture
def python_version(root, monkeypatch):
    """The python versions beside the binary ones, as if these were the published files."""
    layouts.write_cifar_python(root)
    for path in (*root.glob("cifar-10-batches-py/*"), *root.glob("cifar-100-python/*")):
        monkeypatch.setitem(clean.MD5, path.name, hashlib.md5(path.read_bytes()).hexdigest())
    return root


def contents(data):
    """Labels and images of a clean data set."""
    return data.labels(), data.images("clean", torch.arange(len(data.labels())))


@pytest.mark.parametrize("split", ["test", "train"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_python_version_holds_the_same_as_the_binary_one(name, split, python_version):
    binary = contents(made(name, python_version, split=split))
    (python_version / CLEAN_FILES[name]).parent.rename(python_version / "gone")
    assert all(map(torch.equal, contents(made(name, python_version, split=split)), binary))


def test_a_pickle_that_is_not_the_published_one_is_not_opened(root):
    layouts.write_cifar_python(root)
    (root / "cifar-10-batches-bin").rename(root / "gone")
    path = root / "cifar-10-batches-py/test_batch"
    path.write_bytes(pickle.dumps({b"data": Malicious(str(root / "trace")), b"labels": []}, 2))
    with pytest.raises(ValueError, match="md5"):
        made("cifar10", root).labels()
    assert not (root / "trace").exists()


HUGE = np.array([0x803, 2**31, 2**31, 2**31], ">u4").tobytes()
IDX = {  # how the file is damaged, its suffix, a word of the message
    "too long": (lambda whole: whole + b"x", "", "values"),
    "cut in the header": (lambda whole: whole[:15], "", "not an idx file"),
    "a size beyond the file": (lambda whole: HUGE, "", "values"),
    "labels": (lambda whole: np.array([0x801, PER], ">u4").tobytes() + bytes(PER), "", "not an idx file"),
    "empty": (lambda whole: b"", "", "not an idx file"),
    "gzip that unpacks to much": (lambda whole: gzip.compress(whole + bytes(2**24)), ".gz", "values"),
    "gzip cut short": (lambda whole: gzip.compress(whole)[:-30], ".gz", "cut short"),
    "no gzip": (lambda whole: b"hello", ".gz", "cannot be unpacked"),
    "empty gzip": (lambda whole: gzip.compress(b""), ".gz", "not an idx"),
}


@pytest.mark.parametrize("case", IDX)
def test_bad_idx_files_are_refused(case, root, monkeypatch):
    monkeypatch.setattr(clean, "LARGEST_IDX", 2**20)
    damage, suffix, words = IDX[case]
    path = root / "mnist/t10k-images-idx3-ubyte"
    whole = path.read_bytes()
    path.unlink()
    path.with_suffix(suffix).write_bytes(damage(whole))
    with pytest.raises(ValueError, match=f"{path.name}.*{words}"):
        made("mnist", root).labels()


def test_mnist_is_read_gzipped_as_published(root):
    plain = contents(made("mnist", root))
    layouts.gzip_mnist(root / "mnist")
    assert all(map(torch.equal, contents(made("mnist", root)), plain))


def test_the_mnist_test_images_come_with_the_package(tmp_path):
    data = made("mnist", tmp_path)
    assert torch.bincount(data.labels()).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    check_dataset(data)
    with pytest.raises(MissingData, match="train-images-idx3-ubyte not found"):
        made("mnist", tmp_path, split="train").labels()


TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
ARCHIVES = {  # address, then what the archive holds: folder and member
    "cifar10": ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "", "cifar-10-batches-bin"),
    "cifar100": ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "", "cifar-100-binary"),
    "imagenet-c": ("https://zenodo.org/records/2235448/files/noise.tar", "ImageNet-C", "noise"),
}
CURL = """#!/bin/sh
echo "$2" >> asked
cat "$(basename "$2")"
"""


@pytest.mark.parametrize("name", [*ARCHIVES, "mnist"])
def test_the_command_that_missing_data_suggests_places_it(name, root, tmp_path_factory):
    """The command is run as it stands, with a curl that serves local archives by the last part of the address."""
    there = tmp_path_factory.mktemp("elsewhere")
    (there / "curl").write_text(CURL)
    (there / "curl").chmod(0o755)
    if name == "mnist":
        urls = [f"https://storage.googleapis.com/cvdf-datasets/mnist/{file}.gz" for file in TRAIN]
        for file in TRAIN:
            (there / f"{file}.gz").write_bytes(gzip.compress((root / "mnist" / file).read_bytes()))
    else:
        urls = [ARCHIVES[name][0]]
        target = there / urls[0].rpartition("/")[2]
        flags = "czf" if target.suffix == ".gz" else "cf"
        subprocess.run(["tar", flags, target, "-C", root / ARCHIVES[name][1], ARCHIVES[name][2]], check=True)
    fields = {"corruptions": ("shot_noise",)} if name == "imagenet-c" else {"split": "train"}
    empty = there / "a new root"
    with pytest.raises(MissingData, match=f"looked for {empty}") as missing:
        made(name, empty, **fields).labels("shot_noise@5" if name == "imagenet-c" else "clean")
    said = str(missing.value)
    assert "\n" not in said
    assert "--data, data= or TRIBE_DATA" in said
    command = said.partition("To place it, run: ")[2].rpartition("; the root")[0]
    path = f"{there}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, cwd=there, env={**os.environ, "PATH": path})
    assert (there / "asked").read_text().split() == urls
    check_dataset(made(name, empty, **fields))


def test_the_root_is_given_or_of_the_environment_or_the_cache(monkeypatch, tmp_path):
    assert data_root("/a/b").as_posix() == "/a/b"
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.delenv("TRIBE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root() == tmp_path / "tribe"


def _cut(path):
    path.write_bytes(path.read_bytes()[:-100])


FOG, LABELS = "CIFAR-10-C/fog.npy", "CIFAR-10-C/labels.npy"
BAD = {
    "no folder": (lambda r: (r / "CIFAR-10-C").rename(r / "gone"), MissingData, "CIFAR-10-C not found: .*data="),
    "no labels": (lambda r: (r / LABELS).unlink(), MissingData, "the labels not found"),
    "no such corruption": (lambda r: (r / FOG).unlink(), MissingData, "corruption 'fog' not found"),
    "truncated": (lambda r: _cut(r / FOG), ValueError, "fog.npy cannot be read as an array"),
    "no array": (lambda r: (r / FOG).write_text("fog"), ValueError, "fog.npy cannot be read as an array"),
    "wrong shape": (lambda r: np.save(r / FOG, np.zeros((5 * PER, 32, 32), np.uint8)), ValueError, "uint8 .100, 32"),
    "wrong length": (lambda r: np.save(r / FOG, np.zeros((7, 32, 32, 3), np.uint8)), ValueError, "expected uint8"),
    "wrong type": (lambda r: np.save(r / FOG, np.zeros((5 * PER, 32, 32, 3))), ValueError, "holds float64"),
    "labels out of range": (lambda r: np.save(r / LABELS, np.full(5 * PER, 10)), ValueError, "10; expected 0 to 9"),
    "labels that are no integers": (lambda r: np.save(r / LABELS, np.zeros(5 * PER)), ValueError, "expected integers"),
    "labels that are no five blocks": (lambda r: np.save(r / LABELS, np.zeros(7, int)), ValueError, "5 blocks"),
    "truncated labels": (lambda r: _cut(r / LABELS), ValueError, "labels.npy cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(root, case):
    damage, error, words = BAD[case]
    damage(root)
    with pytest.raises(error, match=words):
        made("cifar10-c", root).images("fog@5", torch.tensor([0]))  # needs the labels too


def test_bad_requests(root):
    with pytest.raises(ValueError, match="severity is 1, 2, 3, 4 or 5; got 6"):
        made("cifar10-c", root, severities=(6,))
    (root / "mnist_c/fog/test_labels.npy").unlink()
    with pytest.raises(MissingData, match=r"corruption 'fog' not found: looked for .*test_labels.npy"):
        made("mnist-c", root).labels("fog")


def test_digits_of_others_stand_in_the_box_of_mnist_and_take_its_presets(root):
    for name, count in (("optdigits", 1797), ("usps", PER)):
        data = made(name, root)
        assert (trained_on(data), tuple(data.domains), len(data.labels(name))) == ("mnist", (name,), count)
        images = data.images(name, torch.arange(count))
        assert images.shape[1:] == (1, 28, 28)
        assert images[:, :, 4:24, 4:24].amax() > 0.8
        assert not images[:, :, :4].any()
        assert not images[..., 24:].any()
        methods.create("tribe", **methods.get("tribe").presets[trained_on(data)])
    with pytest.raises(ValueError, match="split"):
        made("optdigits", root, split="train").labels("optdigits")


def test_optdigits_without_scikit_learn_names_the_extra(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"tribe-tta\[digits\]"):
        datasets.create("optdigits").labels("optdigits")


@pytest.mark.parametrize("split", ["test", "train"])
def test_usps_is_the_text_of_its_file(split, root):
    row = gzip.decompress((root / f"usps/zip.{split}.gz").read_bytes()).split(b"\n")[3].split()
    data = made("usps", root, split=split)
    assert data.labels("usps")[3] == float(row[0])
    corner = (float(row[1]) + 1) / 2  # the first pixel of the box is that of the file
    assert data.images("usps", torch.tensor([3]))[0, 0, 4, 4].item() == pytest.approx(corner, abs=1 / 255)


BAD_USPS = {
    "another width": (b"1 0 0\n", "3 numbers"),
    "a word": (b"1 " + b"0 " * 255 + b"dark\n", "cannot be read"),
    "a ragged line": (b"1 " + b"0 " * 256 + b"\n2 0\n", "cannot be read"),
    "nothing": (b"", "no numbers"),
    "a label of 10": (b"10 " + b"0 " * 256, "label"),
    "half a label": (b"1.5 " + b"0 " * 256, "label"),
    "bytes of grey": (b"1 " + b"255 " * 256, "grey"),
    "no number": (b"1 " + b"nan " * 256, "grey"),
}


@pytest.mark.parametrize("case", BAD_USPS)
def test_bad_files_of_usps_are_refused(case, root):
    content, word = BAD_USPS[case]
    (root / "usps/zip.test.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=rf"zip\.test.*{word}"):
        made("usps", root).labels("usps")


def test_usps_that_is_missing_cut_short_or_no_gzip_is_named(root):
    path = root / "usps/zip.test.gz"
    for content in (path.read_bytes()[:-30], b"hello"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            made("usps", root).labels("usps")
    path.unlink()
    with pytest.raises(MissingData, match="curl"):
        made("usps", root).labels("usps")
