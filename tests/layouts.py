"""Data sets in their published layouts, written small: the same folders, names, shapes and types."""

import dataclasses
import functools
import gzip
import io
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from tribe import datasets
from tribe.data.datasets.files import mnist_test

PER = 20  # images a severity; the published files have 10,000
WNIDS = ("n01440764", "n01443537", "n02123045")
CORRUPTIONS = {"mnist-c": ("fog", "stripe"), "live-mnist-c": ("stripe", "rotate"), "imagenet-c": ("fog", "shot_noise")}
CORRUPTIONS["live-imagenet-c"] = ("contrast", "brightness")
SMALL = ("fog", "snow")  # of all the others


def write(root):
    """Everything under one root."""
    draw = np.random.default_rng(0)
    for folder, classes in (("CIFAR-10-C", 10), ("CIFAR-100-C", 100)):
        write_cifar_c(root / folder, classes, draw)
    write_mnist_c(root / "mnist_c", draw)
    write_cifar_binary(root, draw)
    write_mnist(root / "mnist", draw)
    write_usps(root / "usps", draw)
    write_imagenet_c(root / "ImageNet-C", draw)
    write_imagenet(root)
    write_folder(root / "camera", draw)
    return root


def made(name, root, **fields):
    """A registered data set on what `write` wrote, with few corruptions where it has any."""
    if name == "optdigits":
        pytest.importorskip("sklearn", reason="needs the extra digits: pip install '.[digits]'")
    known = {field.name for field in dataclasses.fields(datasets.get(name))}
    if "corruptions" in known:
        fields.setdefault("corruptions", CORRUPTIONS.get(name, SMALL))
    places = {"root": str(root / "camera")} if name == "folder" else {"data": str(root)}
    return datasets.create(name, **{field: place for field, place in places.items() if field in known}, **fields)


def pixels(draw, *shape):
    return draw.integers(256, size=shape).astype(np.uint8)


def write_cifar_c(folder, classes, draw):
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(draw.integers(classes, size=PER), 5).astype(np.uint8))
    for name in SMALL:
        array = pixels(draw, 5 * PER, 32, 32, 3)
        array[:, 0, 0, 0] = np.arange(5 * PER)
        np.save(folder / f"{name}.npy", array)


def write_mnist_c(root, draw):
    for name in CORRUPTIONS["mnist-c"]:
        (root / name).mkdir(parents=True)
        np.save(root / name / "test_images.npy", pixels(draw, PER, 28, 28, 1))
        np.save(root / name / "test_labels.npy", draw.integers(10, size=PER))


CIFAR = (  # folder and files of the binary version and of the python one, how many labels of what size, their keys
    (
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
        ("test_batch", *(f"data_batch_{i}" for i in range(1, 6))),
        {b"labels": 10},
    ),
    (("cifar-100-binary", "cifar-100-python"), ("test", "train"), {b"coarse_labels": 20, b"fine_labels": 100}),
)


def write_cifar_binary(root, draw):
    for (folder, _), files, labels in CIFAR:
        (root / folder).mkdir()
        for i, file in enumerate(files):
            rows = pixels(draw, PER, 3072)
            rows[:, 0] = i
            columns = [draw.integers(high, size=PER).astype(np.uint8)[:, None] for high in labels.values()]
            (root / folder / f"{file}.bin").write_bytes(np.concatenate([*columns, rows], 1).tobytes())


def write_cifar_python(root):
    """The python versions of what `write_cifar_binary` wrote."""
    for (binary, python), files, labels in CIFAR:
        (root / python).mkdir()
        for file in files:
            rows = np.fromfile(root / binary / f"{file}.bin", np.uint8).reshape(PER, -1)
            held = {b"batch_label": b"batch", b"data": np.ascontiguousarray(rows[:, len(labels) :])}
            held |= {key: rows[:, i].tolist() for i, key in enumerate(labels)}
            (root / python / file).write_bytes(pickle.dumps(held, 2))


class Malicious:
    """An object whose pickle makes a folder when it is opened."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def write_mnist(folder, draw):
    folder.mkdir()
    for split in ("t10k", "train"):
        write_idx(folder, split, pixels(draw, PER, 28, 28), draw.integers(10, size=PER))


def write_usps(folder, draw):
    """Text as it is published: of the test images with few digits after the point, of the others with four."""
    folder.mkdir()
    for split, form in (("test", "{:g}"), ("train", "{:.4f}")):
        rows = np.column_stack((draw.integers(10, size=PER), draw.integers(-1000, 1001, (PER, 256)) / 1000))
        text = "".join(" ".join(map(form.format, row)) + " \n" for row in rows)
        (folder / f"zip.{split}.gz").write_bytes(gzip.compress(text.encode()))


def write_digits(root, train, test):
    """So many real digits for training and testing."""
    images, labels = mnist_test()
    (root / "mnist").mkdir()
    for split, part in {"train": slice(train), "t10k": slice(train, train + test)}.items():
        write_idx(root / "mnist", split, images[part], labels[part])
    return str(root)


def write_idx(folder, split, images, labels):
    """The two files of a split, each with a header that tells its kind and its size."""
    for name, kind, array in (("images-idx3", 0x803, images), ("labels-idx1", 0x801, labels)):
        header = np.array([kind, *array.shape], ">u4").tobytes()
        (folder / f"{split}-{name}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())


def gzip_mnist(folder):
    for path in list(folder.iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def picture(draw, height, width):
    """Something smooth, which JPEG keeps small."""
    return Image.fromarray(pixels(draw, 3, 4, 3)).resize((width, height), Image.Resampling.BILINEAR)


def write_imagenet_c(root, draw):
    """One corruption as it lies in the field's folders, one as the archive of its group has it."""
    for corruption in ("fog", "noise/shot_noise"):
        for k, wnid in enumerate(WNIDS):
            folder = root / corruption / "5" / wnid
            folder.mkdir(parents=True)
            for i in range(3):
                number = 100 * i + 7 * k  # so that the order of names is not the order of classes
                picture(draw, 224, 224).save(folder / f"ILSVRC2012_val_{number:08}.JPEG", quality=90)


@functools.cache
def jpegs(mode):
    """Two small files, of another size each."""
    draw, encoded = np.random.default_rng(3), [io.BytesIO(), io.BytesIO()]
    for i, file in enumerate(encoded):
        picture(draw, 230 + 40 * i, 250).convert(mode).save(file, "JPEG")
    return [file.getvalue() for file in encoded]


def write_imagenet(root):
    """ImageNet's validation images and the sets beside it, with few classes; their images have two sizes."""
    for folder, kinds in (
        ("imagenet/val", WNIDS),
        ("imagenetv2-matched-frequency-format-val", ("0", "1", "10", "2")),
        ("imagenet-r", WNIDS[1:]),
        ("imagenet-a", WNIDS[:2]),
        ("sketch", WNIDS),
    ):
        for kind in kinds:
            (root / folder / kind).mkdir(parents=True)
            for i, encoded in enumerate(jpegs("L" if folder == "sketch" else "RGB")):
                (root / folder / kind / f"{i}.JPEG").write_bytes(encoded)


def write_folder(root, draw):
    for domain in ("day", "night"):
        for kind in ("cat", "dog"):
            (root / domain / kind).mkdir(parents=True)
            for i in range(4):
                picture(draw, 24, 24).save(root / domain / kind / f"{i}.png")
