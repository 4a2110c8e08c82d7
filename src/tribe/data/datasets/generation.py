"""Write corrupted data sets in their published layouts: npy files (MNIST-C, CIFAR-C) or JPEG files (ImageNet-C).

The manifest lists the domains that are complete. A domain is added to it when all of its files are on the disk, and
removed before a file of it changes. So after an interruption the same call continues.
"""

import contextlib
import hashlib
import io
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe._version import __version__
from tribe.core.precision import choose_device
from tribe.data.corruptions import SEVERITIES, apply, chunk_size, family_for
from tribe.data.datasets import create
from tribe.data.datasets.corrupted import functions_of, to_bytes
from tribe.data.datasets.files import data_root, open_images
from tribe.data.datasets.imagenet import ImageNet, ImageNetC
from tribe.data.datasets.manifest import FILE, Manifest, is_published, read_manifest, write_manifest
from tribe.data.datasets.npy_sets import SEVERITY, Cifar10C, Cifar100C, MnistC
from tribe.data.images import LARGEST_FILE, cores, read_image, require_pillow
from tribe.data.scenarios import CIFAR_C, IMAGENET_C, MNIST_C
from tribe.fields import require
from tribe.io.files import CannotWrite, exclusive, explain_failure, open_plain, regular_size, room_for, write_atomically
from tribe.registry import nearest

QUALITY = 85  # of ImageNet-C's JPEG files, as published
JPEG_BYTES = 5_000  # a lower bound of the mean size of a corrupted image
JPEG_END = b"\xff\xd9"
WAITING = 2048  # images that wait to be encoded: 300 MB
ADVICE = ". The finished domains are kept: make room or use another --out, and run the same command again"


# -- the files of a data set -------------------------------------------------------------------------------------------


class Benchmark(NamedTuple):
    """A corrupted data set that can be made."""

    folder: str
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    images: str = ""  # the npy file of a corruption; its blocks are the severities, in order
    labels: str = ""
    label_type: Any = np.uint8  # as published


BENCHMARKS = {
    "cifar10": Benchmark(Cifar10C.folder, CIFAR_C, tuple(SEVERITIES), "{}.npy", "labels.npy"),
    "cifar100": Benchmark(Cifar100C.folder, CIFAR_C, tuple(SEVERITIES), "{}.npy", "labels.npy"),
    "mnist": Benchmark(MnistC.folder, MNIST_C, (SEVERITY,), "{}/test_images.npy", "{}/test_labels.npy", np.int64),
    "imagenet": Benchmark(ImageNetC.folder, IMAGENET_C, tuple(SEVERITIES)),
}


class NpyFiles:
    """One npy file for each corruption, with a block of images for each severity."""

    at_once = False  # the domains are made one after the other

    def __init__(self, dataset: str, data: str | None, out: str | None) -> None:
        self.layout = BENCHMARKS[dataset]
        self.clean = create(dataset, data=data)
        self.domain = self.clean.domains[0]
        self.labels = self.clean.labels(self.domain).numpy()
        self.count = len(self.labels)
        self.shape = tuple(self.read(torch.arange(1)).shape[1:])
        self.image_bytes = int(np.prod(self.shape))
        self.folder = data_root(data if out is None else out) / self.layout.folder
        channels, rows, columns = self.shape
        self.size = self.count * len(self.layout.severities), rows, columns, channels  # of an npy file

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def clean_sha256(self) -> str:
        """Return a hash of labels and pixels, which does not depend on the file format."""
        digest = hashlib.sha256(self.labels.tobytes())
        for index in torch.arange(self.count).split(chunk_size(self.shape, torch.device("cpu"))):
            digest.update(self.read(index).mul_(255).round_().to(torch.uint8).numpy().data)
        return digest.hexdigest()

    def read(self, index: Tensor) -> Tensor:
        """Read clean images, (n, C, H, W) in [0, 1]."""
        return self.clean.images(self.domain, index)

    def prepare(self, domains: Sequence[str], again: bool) -> None:
        """Write the label files; the images of a domain that is made again are written over."""
        labels = np.tile(self.labels, len(self.layout.severities)).astype(self.layout.label_type)
        buffer = io.BytesIO()
        np.save(buffer, labels)
        content = buffer.getvalue()
        for path in {self.folder / self.layout.labels.format(domain.partition("@")[0]) for domain in domains}:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != content:
                write_atomically(path, content)

    def missing(self, domain: str, block: Mapping[str, str] | None) -> NDArray[np.bool_]:
        """Return all images, unless the block is listed and has the bytes that were written."""
        intact = block is not None and self._mapped(domain) is not None and self.sha256(domain) == block["sha256"]
        return np.full(self.count, not intact)

    def write(self, domain: str, index: Tensor, pixels: NDArray[np.uint8]) -> None:
        """Write corrupted images (n, H, W, C)."""
        path = self._path(domain)
        with explain_failure(path, self.count * self.image_bytes, ADVICE):
            array = self._mapped(domain)
            if array is None:
                array = np.lib.format.open_memmap(path, "w+", np.uint8, self.size)  # all holes
            with path.open("r+b") as file:  # not through the map: a full disk would end the process
                file.seek(array.offset + (self._block(domain).start + int(index[0])) * self.image_bytes)
                file.write(pixels.data)

    def sync(self, domains: Sequence[str]) -> None:
        """Wait until all images of some domains are on the disk."""
        for domain in domains:
            with self._path(domain).open("rb") as file:
                os.fsync(file.fileno())

    def sha256(self, domain: str) -> str:
        """Return a hash of the bytes of a domain."""
        return hashlib.sha256(np.load(self._path(domain), mmap_mode="r")[self._block(domain)]).hexdigest()

    def _path(self, domain: str) -> Path:
        return self.folder / self.layout.images.format(domain.partition("@")[0])

    def _block(self, domain: str) -> slice:
        start = self.layout.severities.index(int(domain.partition("@")[2])) * self.count
        return slice(start, start + self.count)

    def _mapped(self, domain: str) -> Any:
        """Return the memory-mapped file of a corruption; None if it does not exist or is another array."""
        try:
            return open_images(self._path(domain), self.size)
        except (FileNotFoundError, ValueError):
            return None


class JpegFiles:
    """One JPEG file for each image. Threads decode the next clean images and encode the corrupted ones meanwhile."""

    at_once = True  # all domains are made in one pass over the clean images, because they are slow to read
    shape = ImageNet.shape
    image_bytes = JPEG_BYTES

    def __init__(self, dataset: str, data: str | None, out: str | None) -> None:
        listing = ImageNet(data=data).listing("clean")
        self.paths, self.resize = [listing.folder / name for name in listing.names], listing.resize
        self.count = len(self.paths)
        target = out if out is not None or listing.folder == data_root(data) else data
        self.folder = data_root(target) / BENCHMARKS[dataset].folder
        self.waiting: deque[Future[None]] = deque()
        self.threads = ThreadPoolExecutor(cores(), "tribe-images")

    def close(self) -> None:
        """Stop the threads."""
        self.threads.shutdown(cancel_futures=True)

    def clean_sha256(self) -> str:
        """Return a hash of names and sizes: reading all images would take as long as some corruptions."""
        lines = (f"{path.parent.name}/{path.name} {regular_size(path, LARGEST_FILE)}\n" for path in self.paths)
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def read(self, index: Tensor) -> Tensor:
        """Read clean images, (n, C, H, W) in [0, 1]."""
        return torch.stack(list(self.threads.map(self._decode, index.tolist()))).float().div_(255)

    def _decode(self, i: int) -> Tensor:
        side = self.shape[1]
        image = read_image(self.paths[i], resize=self.resize, crop=None if self.resize is None else side)
        if image.shape != self.shape:
            size, expected = f"{image.shape[2]}x{image.shape[1]}", f"{side}x{side}"
            raise ValueError(f"{self.paths[i]} is {size} pixels, and the others {expected}, as if all had been cropped")
        return image

    def prepare(self, domains: Sequence[str], again: bool) -> None:
        """Remove the folders of domains that are made again: they may hold images of another set."""
        for domain in domains if again else ():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._folder(domain))

    def missing(self, domain: str, block: Mapping[str, str] | None) -> NDArray[np.bool_]:
        """Return which images have to be made; of a domain that is not listed, a file may be cut short."""
        places = [self._place(domain, path) for path in self.paths]
        return ~np.array(list(self.threads.map(Path.is_file if block else _is_whole, places)))

    def write(self, domain: str, index: Tensor, pixels: NDArray[np.uint8]) -> None:
        """Write corrupted images (n, H, W, C)."""
        for i, image in zip(index.tolist(), pixels, strict=True):
            self.waiting.append(self.threads.submit(_save, image, self._place(domain, self.paths[i])))
        self._wait(WAITING)

    def sync(self, domains: Sequence[str]) -> None:
        """Wait until all images of some domains are on the disk."""
        self._wait(0)
        if domains and hasattr(os, "sync"):
            os.sync()

    def sha256(self, domain: str) -> str:
        """Return a hash of the bytes of a domain."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(self._place(domain, path).read_bytes())
        return digest.hexdigest()

    def _wait(self, most: int) -> None:
        """Wait until at most so many images wait to be written."""
        while len(self.waiting) > most:
            self.waiting.popleft().result()

    def _folder(self, domain: str) -> Path:
        corruption, _, severity = domain.partition("@")
        return self.folder / corruption / severity

    def _place(self, domain: str, path: Path) -> Path:
        return self._folder(domain) / path.parent.name / path.name


def _save(pixels: NDArray[np.uint8], place: Path) -> None:
    encoded = io.BytesIO()  # given a file, Pillow does not report that the disk is full
    require_pillow("writing images").fromarray(pixels).save(encoded, "JPEG", quality=QUALITY, optimize=True)
    with explain_failure(place, JPEG_BYTES, ADVICE):
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "wb", opener=open_plain) as file:
            file.write(encoded.getbuffer())


def _is_whole(path: Path) -> bool:
    """Whether a file ends as a JPEG file does: the marker occurs nowhere else in the files that `_save` writes."""
    if not path.is_file() or path.stat().st_size < len(JPEG_END):
        return False
    with path.open("rb") as file:
        file.seek(-len(JPEG_END), os.SEEK_END)
        return file.read() == JPEG_END


# -- making them -------------------------------------------------------------------------------------------------------


# Called with a domain, and how many more images of it were made, of how many in all domains; 0 more: it is complete.
GenerationProgress = Callable[[str, int, int], None]


class Summary(NamedTuple):
    """The result of `generate`."""

    folder: Path
    made: list[str]  # domains
    there: list[str]  # domains that existed already
    images: int  # per domain
    seconds: float


def generate(
    dataset: str,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    out: str | None = None,
    data: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    force: bool = False,
    progress: GenerationProgress | None = None,
) -> Summary:
    """Corrupt a clean test set and write it in its published layout.

    Severities that are not chosen are holes in an npy file: they take no space, and the readers refuse them. Images of
    ImageNet of any size are resized and cropped to 224 x 224 as the authors do, unless all have that size. The files
    lie below ``out``, by default beside the clean set in ``data``, for ImageNet in the root of all data. ``force``
    makes existing domains again, and begins anew if the folder was made with other settings.
    """
    if dataset not in BENCHMARKS:
        raise ValueError(f"unknown data set {dataset!r}: {nearest(dataset, BENCHMARKS)}")
    benchmark = BENCHMARKS[dataset]
    names = benchmark.corruptions if corruptions is None else tuple(dict.fromkeys(corruptions))
    functions_of(dataset, names)  # raises an error for an unknown corruption
    chosen = sorted(set(severities or (5,)))
    if strange := [severity for severity in chosen if severity not in benchmark.severities]:
        single = f"MNIST-C has a single strength, which is called severity {benchmark.severities[0]}"
        expected = single if len(benchmark.severities) == 1 else "a severity is 1, 2, 3, 4 or 5"
        raise ValueError(f"{expected}; got {strange[0]!r}")
    require(0 <= seed < 2**63, "a seed is at least 0 and below 2**63", seed)
    place = choose_device(device)
    domains = [f"{name}@{severity}" for name in names for severity in chosen]
    files = (JpegFiles if dataset == "imagenet" else NpyFiles)(dataset, data, out)
    started = time.perf_counter()
    with _locked(files.folder) as folder, contextlib.closing(files):
        family = family_for(files.shape)
        rounding = "nearest" if family == "mnist" else "down"  # as `to_bytes` does
        fresh = Manifest(dataset, files.count, files.clean_sha256(), seed, family, rounding)
        manifest = _open_manifest(folder, fresh, force)
        if force:
            manifest = _unlist(folder, manifest, domains)
        files.prepare(domains, again=force)
        missing = {domain: files.missing(domain, manifest.blocks.get(domain)) for domain in domains}
        made = [domain for domain in domains if missing[domain].any()]
        left = sum(int(lacking.sum()) for lacking in missing.values())
        if (needed := left * files.image_bytes) > shutil.disk_usage(folder).free:
            raise CannotWrite(f"there is too little room in {folder}. {room_for(needed, folder)}. Use another --out")
        manifest = _unlist(folder, manifest, made)

        def advance(domain: str, images: int) -> None:
            if progress is not None:
                progress(domain, images, left)

        for group in [domains] if files.at_once else [[domain] for domain in domains]:
            _corrupt(files, {domain: missing[domain] for domain in group}, seed, place, advance)
            files.sync([domain for domain in group if domain in made])
            for domain in group:
                if domain not in manifest.blocks:
                    made_by = {"device": place.type, "torch": torch.__version__, "tribe": __version__}
                    blocks = {**manifest.blocks, domain: {"sha256": files.sha256(domain), **made_by}}
                    manifest = write_manifest(folder, replace(manifest, blocks=blocks))
                advance(domain, 0)
    there = [domain for domain in domains if domain not in made]
    return Summary(folder, made, there, files.count, time.perf_counter() - started)


def _corrupt(
    files: NpyFiles | JpegFiles,
    missing: Mapping[str, NDArray[np.bool_]],
    seed: int,
    device: torch.device,
    advance: Callable[[str, int], None],
) -> None:
    """Corrupt the missing images in chunks; the clean images of the next chunk are read meanwhile."""
    wanted = torch.from_numpy(np.logical_or.reduce(list(missing.values()))).nonzero().flatten()
    if not len(wanted):
        return
    chunks = wanted.split(chunk_size(files.shape, device))
    with ThreadPoolExecutor(1) as ahead:
        following = ahead.submit(files.read, chunks[0])
        for n, chunk in enumerate(chunks):
            clean = following.result().to(device)
            if n + 1 < len(chunks):
                following = ahead.submit(files.read, chunks[n + 1])
            for domain, lacking in missing.items():
                rows = torch.from_numpy(lacking)[chunk].nonzero().flatten()
                if len(rows):
                    some = clean if len(rows) == len(clean) else clean[rows.to(device)]
                    name, _, severity = domain.partition("@")
                    x = to_bytes(apply(some, name, int(severity), seed=seed, index=chunk[rows]))
                    files.write(domain, chunk[rows], x.permute(0, 2, 3, 1).contiguous().cpu().numpy())
                    advance(domain, len(rows))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Make a folder and hold an exclusive lock on it."""
    with explain_failure(folder):
        folder.mkdir(parents=True, exist_ok=True)
    busy = f"another process is writing to {folder}: wait for it, or use another --out"
    with exclusive(folder / ".lock", busy=busy):
        for leftover in folder.rglob(".*.tmp"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
        yield folder


def _open_manifest(folder: Path, fresh: Manifest, force: bool) -> Manifest:
    """Return the manifest of a folder if domains can be added to it, else write a fresh one or raise an error.

    The manifest is written before any image: without it an incomplete folder would count as published.
    """
    if is_published(folder) and not force:
        held = f"{folder} holds files but no {FILE}, like the published archive"
        raise ValueError(f"{held}: use another --out, or --force to write over them")
    try:
        manifest = read_manifest(folder)
    except ValueError:
        if not force:
            raise
        manifest = None
    difference = None if manifest is None else manifest.difference(fresh)
    if difference is not None and not force:
        raise ValueError(f"{folder} was made with {difference}: use another --out, or --force to begin anew")
    if manifest is None or difference is not None:
        return write_manifest(folder, fresh)
    return manifest


def _unlist(folder: Path, manifest: Manifest, domains: Sequence[str]) -> Manifest:
    """Remove domains from the manifest, before their files change."""
    kept = {name: block for name, block in manifest.blocks.items() if name not in domains}
    return write_manifest(folder, replace(manifest, blocks=kept))
