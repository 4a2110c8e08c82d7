"""Data sets in their published layouts, written here small: the same folders, names, shapes and types."""

import numpy as np
import pytest
import torch

from tribe import datasets, scenarios
from tribe.datasets.corrupted import Corrupted
from tribe.datasets.files import MissingData, data_root
from tribe.stream import Stream

PER = 20  # images a severity; the published files have 10,000


@pytest.fixture
def root(tmp_path):
    draw = np.random.default_rng(0)
    for folder, classes in (("CIFAR-10-C", 10), ("CIFAR-100-C", 100)):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "labels.npy", np.tile(draw.integers(classes, size=PER), 5).astype(np.uint8))
        for name in ("fog", "snow"):
            array = draw.integers(256, size=(5 * PER, 32, 32, 3)).astype(np.uint8)
            array[:, 0, 0, 0] = np.arange(5 * PER)
            np.save(tmp_path / folder / f"{name}.npy", array)
    for name in ("fog", "stripe"):
        folder = tmp_path / "mnist_c" / name
        folder.mkdir(parents=True)
        np.save(folder / "test_images.npy", draw.integers(256, size=(PER, 28, 28, 1)).astype(np.uint8))
        np.save(folder / "test_labels.npy", draw.integers(10, size=PER))
    for folder, files, labels in (
        ("cifar-10-batches-bin", ["test_batch", *(f"data_batch_{i}" for i in range(1, 6))], [10]),
        ("cifar-100-binary", ["test", "train"], [20, 100]),
    ):
        (tmp_path / folder).mkdir()
        for i, file in enumerate(files):
            pixels = draw.integers(256, size=(PER, 3072)).astype(np.uint8)
            pixels[:, 0] = i
            columns = [draw.integers(high, size=PER).astype(np.uint8)[:, None] for high in labels]
            (tmp_path / folder / f"{file}.bin").write_bytes(np.concatenate([*columns, pixels], 1).tobytes())
    (tmp_path / "mnist").mkdir()
    for split in ("t10k", "train"):
        pixels = draw.integers(256, size=(PER, 28, 28)).astype(np.uint8)
        header = np.array([0x803, PER, 28, 28], ">u4").tobytes()
        (tmp_path / f"mnist/{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = np.array([0x801, PER], ">u4").tobytes()
        labels = draw.integers(10, size=PER).astype(np.uint8)
        (tmp_path / f"mnist/{split}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return tmp_path


CORRUPTIONS = {"cifar10-c": ("fog", "snow"), "cifar100-c": ("fog", "snow"), "mnist-c": ("fog", "stripe")}
CLEAN = ("cifar10", "cifar100", "mnist")


def made(name, root, **fields):
    if name not in CLEAN:
        fields["corruptions"] = CORRUPTIONS[name]
    return datasets.create(name, data=str(root), **fields)


def test_there_is_a_test_for_every_registered_data_set():
    assert datasets.names() == sorted([*CORRUPTIONS, *CLEAN])


@pytest.mark.parametrize("name", datasets.names())
def test_types_ranges_and_lengths(name, root):
    data = made(name, root)
    for domain in data.domains:
        labels = data.labels(domain)
        assert labels.dtype == torch.int64
        assert len(labels) == PER
        assert 0 <= int(labels.min()) <= int(labels.max()) < len(data.classes)
        images = data.images(domain, torch.tensor([3, 0, 3]))
        assert images.dtype == torch.float32
        assert images.shape[0] == 3
        assert images.dim() == 4
        assert 0 <= images.min() <= images.max() <= 1
        assert torch.equal(images[0], images[2])
        assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_a_severity_is_its_block_of_the_file(root, severity):
    data = made("cifar10-c", root, severities=(severity,))
    first = data.images(f"fog@{severity}", torch.arange(PER))[:, 0, 0, 0] * 255
    assert first.round().tolist() == list(range(PER * (severity - 1), PER * severity))


def test_images_are_the_bytes_of_the_file(root):
    array = np.load(root / "CIFAR-10-C" / "snow.npy")
    images = made("cifar10-c", root).images("snow@5", torch.tensor([7]))
    assert torch.equal((images[0] * 255).round().byte(), torch.from_numpy(array[4 * PER + 7].transpose(2, 0, 1)))


def test_files_are_mapped_and_not_read(root):
    data = made("cifar10-c", root)
    data.images("fog@5", torch.tensor([0]))
    assert isinstance(data._arrays["fog"], np.memmap)


@pytest.mark.parametrize("name", datasets.names())
def test_they_play_as_streams(name, root):
    stream = Stream(made(name, root), scenarios.create("ptta"), (0, 1), batch=16)
    assert sum(int(b.valid.sum()) for b in stream) == 2 * len(stream.domains) * PER


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
def test_corrupted_on_the_fly_whatever_the_order(name, chosen, root):
    clean = made(name, root)
    data = Corrupted(clean, chosen, severities=(3, 5))
    assert data.domains == tuple(f"{c}@{s}" for c in chosen for s in (3, 5))
    for domain in data.domains:
        whole = data.images(domain, torch.arange(PER))
        assert torch.equal(whole[[7, 2]], data.images(domain, torch.tensor([7, 2])))
        assert torch.equal((whole * 255).round() / 255, whole), "bytes, as the published files hold them"
        assert not torch.equal(whole, clean.images("clean", torch.arange(PER)))
    assert torch.equal(data.labels(data.domains[0]), clean.labels())
    assert sum(int(b.valid.sum()) for b in Stream(data, scenarios.create("iid"), (0,))) == 4 * PER
    with pytest.raises(ValueError, match="unknown domain 'fog@1'"):
        data.labels("fog@1")


CLEAN_FILES = {
    "cifar10": "cifar-10-batches-bin/test_batch.bin",
    "cifar100": "cifar-100-binary/test.bin",
    "mnist": "mnist/t10k-images-idx3-ubyte",
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_files_that_are_cut_short_or_missing_are_named(name, root):
    path = root / CLEAN_FILES[name]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=f"{path.name}.*cut short"):
        made(name, root).labels()
    path.unlink()
    with pytest.raises(MissingData, match=f"{path.name} not found"):
        made(name, root).labels()
    with pytest.raises(ValueError, match="split is 'test' or 'train'"):
        made(name, root, split="val")


def test_an_idx_file_of_another_kind_is_refused(root):
    path = root / "mnist/t10k-labels-idx1-ubyte"
    path.write_bytes(np.array([0x803, PER], ">u4").tobytes() + bytes(PER))
    with pytest.raises(ValueError, match="no idx file of bytes with 1 axes"):
        made("mnist", root).labels()


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
    "no folder": (
        lambda r: (r / "CIFAR-10-C").rename(r / "gone"),
        MissingData,
        "CIFAR-10-C not found: looked for .*data=",
    ),
    "no labels": (lambda r: (r / LABELS).unlink(), MissingData, "the labels not found"),
    "no such corruption": (lambda r: (r / FOG).unlink(), MissingData, "corruption 'fog' not found"),
    "truncated": (lambda r: _cut(r / FOG), ValueError, "fog.npy cannot be read as an array"),
    "no array": (lambda r: (r / FOG).write_text("fog"), ValueError, "fog.npy cannot be read as an array"),
    "wrong shape": (
        lambda r: np.save(r / FOG, np.zeros((5 * PER, 32, 32), np.uint8)),
        ValueError,
        "expected uint8 .100, 32",
    ),
    "wrong length": (lambda r: np.save(r / FOG, np.zeros((7, 32, 32, 3), np.uint8)), ValueError, "expected uint8"),
    "wrong type": (lambda r: np.save(r / FOG, np.zeros((5 * PER, 32, 32, 3))), ValueError, "holds float64"),
    "labels out of range": (
        lambda r: np.save(r / LABELS, np.full(5 * PER, 10)),
        ValueError,
        "10 to 10; expected 0 to 9",
    ),
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
    with pytest.raises(ValueError, match="severity is 1 to 5; got 6"):
        made("cifar10-c", root, severities=(6,))
    with pytest.raises(ValueError, match="unknown domain 'fgo@5': did you mean 'fog@5'"):
        made("cifar10-c", root).labels("fgo@5")
    with pytest.raises(ValueError, match="unknown data set 'cifar-c'"):
        datasets.create("cifar-c")
    (root / "mnist_c/fog/test_labels.npy").unlink()
    with pytest.raises(MissingData, match=r"corruption 'fog' not found: looked for .*test_labels.npy"):
        made("mnist-c", root).labels("fog")
