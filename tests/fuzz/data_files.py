"""Readers of data sets."""

import gzip

import numpy as np
import torch

import layouts
from fuzz.registry import digest, reader
from tribe import datasets
from tribe.data.datasets.array_generation import generate
from tribe.data.datasets.files import mnist_test
from tribe.data.datasets import fingerprint
from tribe.data.datasets.image_generation import generate_imagenet

UNPICKLE = ("tribe.datasets.unpickle.unpickle", "tribe.datasets.unpickle.Machine.run")
NPY = ("tribe.datasets.array_files._map", "tribe.datasets.array_files._read_header")
PICTURE = ("tribe.datasets.image_files.read_image",)
SIZE = "tribe.datasets.image_files.image_size"


def contents(dataset):
    """A digest of all images and labels."""
    parts = [fingerprint(dataset)]
    for domain in dataset.domains:
        labels = dataset.labels(domain)
        parts += [labels, dataset.images(domain, torch.arange(min(len(labels), 20)))]
    return digest(*parts, dataset.classes)


class DataFile:
    """A file of a data set in its published layout."""

    def __init__(self, write, path, name, **fields):
        self.write, self.path, self.name, self.fields = write, path, name, fields

    def make(self, folder):
        self.write(folder, np.random.default_rng(0))
        return folder / self.path

    def read(self, folder):
        return contents(layouts.made(self.name, folder, **self.fields))


def write_pickles(folder, draw):
    layouts.write_cifar_binary(folder, draw)
    layouts.write_cifar_python(folder)
    for binary in ("cifar-10-batches-bin", "cifar-100-binary"):
        for path in (folder / binary).iterdir():
            path.unlink()


def write_mnist(folder, draw):
    layouts.write_mnist(folder / "mnist", draw)


def write_mnist_gz(folder, draw):
    write_mnist(folder, draw)
    for path in list((folder / "mnist").iterdir()):
        (folder / "mnist" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()


def write_cifar_c(folder, draw):
    layouts.write_cifar_c(folder / "CIFAR-10-C", 10, draw)


def write_mnist_c(folder, draw):
    layouts.write_mnist_c(folder / "mnist_c", draw)


def write_imagenet_c(folder, draw):
    for wnid in layouts.WNIDS:
        place = folder / "ImageNet-C" / "fog" / "5" / wnid
        place.mkdir(parents=True)
        layouts.picture(draw, 224, 224).save(place / "a.JPEG", quality=90)


IDX = "mnist/t10k-{}-ubyte"
for name, format, functions, given in (
    (
        "cifar10",
        "",
        ("tribe.datasets.clean._rows",),
        (layouts.write_cifar_binary, "cifar-10-batches-bin/test_batch.bin"),
    ),
    ("cifar100", "", ("tribe.datasets.clean._rows",), (layouts.write_cifar_binary, "cifar-100-binary/test.bin")),
    ("cifar10-pickle", "pickle", UNPICKLE, (write_pickles, "cifar-10-batches-py/test_batch")),
    ("cifar100-pickle", "pickle", UNPICKLE, (write_pickles, "cifar-100-python/test")),
    ("mnist", "", ("tribe.datasets.clean._idx",), (write_mnist, IDX.format("images-idx3"))),
    ("mnist-labels", "", ("tribe.datasets.clean._idx",), (write_mnist, IDX.format("labels-idx1"))),
    ("mnist-gz", "gzip", ("tribe.datasets.clean._unpacked",), (write_mnist_gz, IDX.format("images-idx3") + ".gz")),
    ("cifar10-c", "npy", NPY, (write_cifar_c, "CIFAR-10-C/fog.npy")),
    ("cifar10-c-labels", "npy", NPY, (write_cifar_c, "CIFAR-10-C/labels.npy")),
    ("mnist-c", "npy", NPY, (write_mnist_c, "mnist_c/fog/test_images.npy")),
    ("mnist-c-labels", "npy", NPY, (write_mnist_c, "mnist_c/fog/test_labels.npy")),
):
    made = "-".join(part for part in name.split("-") if part in ("cifar10", "cifar100", "mnist", "c"))
    reader(name, format, functions)(DataFile(*given, made))


@reader("imagenet-c", "image", PICTURE)
class ImageNetCFile:
    @staticmethod
    def make(folder):
        write_imagenet_c(folder, np.random.default_rng(0))
        return folder / "ImageNet-C" / "fog" / "5" / layouts.WNIDS[0] / "a.JPEG"

    @staticmethod
    def read(folder):
        return contents(datasets.create("imagenet-c", data=str(folder), corruptions=("fog",)))


@reader("imagenet-c-ids", "", ("tribe.datasets.imagenet_c.ImageNetC._ids",))
class Ids:
    @staticmethod
    def make(folder):
        write_imagenet_c(folder, np.random.default_rng(0))
        (folder / "ids.txt").write_text("".join(f"{wnid}/a.JPEG\n" for wnid in reversed(layouts.WNIDS)))
        return folder / "ids.txt"

    @staticmethod
    def read(folder):
        fields = {"data": str(folder), "corruptions": ("fog",), "ids": str(folder / "ids.txt")}
        return digest(datasets.create("imagenet-c", **fields).labels("fog@5"))


class Picture:
    """An image of a folder, once as the reader of all images and once with another that is not damaged."""

    def __init__(self, suffix, **options):
        self.suffix, self.options = suffix, options

    def make(self, folder):
        draw = np.random.default_rng(0)
        for place in ("day/cat", "day/dog"):
            (folder / "images" / place).mkdir(parents=True)
        layouts.picture(draw, 24, 24).save(folder / "images/day/dog/b.png")
        image, path = layouts.picture(draw, 30, 24), folder / f"images/day/cat/a.{self.suffix}"
        (image.convert("P") if self.suffix == "gif" else image).save(path, **self.options)
        return path

    def read(self, folder):
        skipping = contents(datasets.create("folder", root=str(folder / "images"), size=224, unreadable="skip"))
        return digest(skipping, contents(datasets.create("folder", root=str(folder / "images"), size=224)))


for suffix in ("png", "jpg", "gif", "bmp", "webp", "tiff", "ppm"):
    reader(f"image-{suffix}", "image", (*PICTURE, "tribe.datasets.folder.Folder._content"))(Picture(suffix))


# -- data sets that are made ------------------------------------------------------------------------------------------


class Generated:
    """A file in a folder of `tribe corrupt mnist`, which goes on where it stopped."""

    def __init__(self, path):
        self.path = path

    def make(self, folder):
        pixels, labels = mnist_test()
        place = folder / "mnist"
        place.mkdir()
        for part in ("t10k", "train"):
            header = np.array([0x803, 5, 28, 28], ">u4").tobytes()
            (place / f"{part}-images-idx3-ubyte").write_bytes(header + pixels[:5].tobytes())
            header = np.array([0x801, 5], ">u4").tobytes()
            (place / f"{part}-labels-idx1-ubyte").write_bytes(header + labels[:5].astype(np.uint8).tobytes())
        generate("mnist", corruptions=("stripe",), out=str(folder), data=str(folder))
        return folder / "mnist_c" / self.path

    def read(self, folder):
        read = contents(layouts.made("mnist-c", folder, corruptions=("stripe",)))
        generate("mnist", corruptions=("stripe",), out=str(folder), data=str(folder))
        return digest(read, contents(layouts.made("mnist-c", folder, corruptions=("stripe",))))


INTACT = "tribe.datasets.array_generation._ImageFiles."
reader("made-json", "json", ("tribe.datasets.manifest.read_manifest",))(Generated("made.json"))
reader("made-images", "npy", (f"{INTACT}read", f"{INTACT}is_intact"))(Generated("stripe/test_images.npy"))
reader("made-labels", "npy", ("tribe.datasets.array_generation._write_labels",))(Generated("stripe/test_labels.npy"))


@reader(
    "clean-imagenet",
    "image",
    (*PICTURE, SIZE, "tribe.datasets.image_generation._Files.digest"),
)
class CleanImageNet:
    @staticmethod
    def make(folder):
        for wnid in layouts.WNIDS[:1]:
            (folder / "val" / wnid).mkdir(parents=True)
            layouts.picture(np.random.default_rng(0), 40, 60).save(folder / "val" / wnid / "a.JPEG", quality=90)
        return folder / "val" / layouts.WNIDS[0] / "a.JPEG"

    @staticmethod
    def read(folder):
        generate_imagenet(str(folder / "val"), corruptions=("brightness",), severities=(1,), out=str(folder))
        return contents(datasets.create("imagenet-c", data=str(folder), corruptions=("brightness",), severities=(1,)))
