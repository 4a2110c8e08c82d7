"""Corrupted data sets written to disk in their published layouts, so that whoever is killed half-way simply goes on.

A file is whole when it is in its place, and ``made.json`` lists it after that; what is listed and still has the bytes
that were written is not made again.
"""

import hashlib
import io
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe._version import __version__
from tribe.corruptions import SEVERITIES, apply
from tribe.corruptions import names as known_corruptions
from tribe.corruptions.families import CHUNK, CHUNK_ELSEWHERE
from tribe.datasets import Dataset, create
from tribe.datasets.cifar_c import Cifar10C, Cifar100C
from tribe.datasets.corrupted import to_bytes
from tribe.datasets.files import MissingData, data_root
from tribe.datasets.imagenet_c import ImageNetC
from tribe.datasets.made import FILE, Block, Made, is_published, read_made
from tribe.datasets.mnist_c import STRENGTH, MnistC
from tribe.datasets.writing import CannotWrite, check_space, held, placing, replacing
from tribe.registry import nearest
from tribe.scenarios.orders import CIFAR_C, IMAGENET_C, MNIST_C

__all__ = ["CannotWrite", "Summary", "Watch", "generate", "generate_pictures"]

PART = 2**22  # bytes copied or hashed at once


class Layout(NamedTuple):
    """Where the files of a corrupted data set lie, and what is in them."""

    folder: str
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]  # the blocks of a file, in order
    images: str  # file of a corruption
    labels: str
    label_type: Any  # as published


LAYOUTS = {
    "cifar10": Layout(Cifar10C.folder, CIFAR_C, tuple(SEVERITIES), "{}.npy", "labels.npy", np.uint8),
    "cifar100": Layout(Cifar100C.folder, CIFAR_C, tuple(SEVERITIES), "{}.npy", "labels.npy", np.uint8),
    "mnist": Layout(MnistC.folder, MNIST_C, (STRENGTH,), "{}/test_images.npy", "{}/test_labels.npy", np.int64),
}


class Watch:
    """Who wants to see the work go on overrides these."""

    def begin(self, images: int, there: Sequence[str]) -> None:
        """So many images are to be made; these domains are there already."""

    def advance(self, domain: str, images: int) -> None:
        """So many more of a domain's images are made."""

    def finish(self, domain: str) -> None:
        """A domain is in its place."""


class Summary(NamedTuple):
    """What was done."""

    folder: Path
    made: list[str]  # domains
    there: list[str]  # domains that were there already
    images: int  # in a domain
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
    watch: Watch | None = None,
) -> Summary:
    """Corrupt a clean test set, "mnist", "cifar10" or "cifar100", and write it in its published layout.

    Severities that were not asked for are holes in the file, which take no space and which the readers refuse.

    Args:
        dataset: the clean set.
        corruptions: by default the fifteen of the benchmark.
        severities: by default 5.
        out: folder below which to write; by default that of the clean set.
        data: folder below which the clean set lies; by default that of all data, else ``out``.
        seed: of the corruptions' randomness.
        device: where to compute.
        force: make again what is there, and begin anew where a folder was made otherwise.
        watch: is told how far the work is.
    """
    if dataset not in LAYOUTS:
        raise ValueError(f"unknown data set {dataset!r}: {nearest(dataset, LAYOUTS)}")
    layout, family = LAYOUTS[dataset], "mnist" if dataset == "mnist" else "common"
    names = _names(corruptions, layout.corruptions, family)
    levels = _severities(severities, layout.severities)
    source = _Source(_open_clean(dataset, data, out), _seed(seed), _device(device))
    watch, begun = watch or Watch(), time.perf_counter()
    with held(data_root(data if out is None else out) / layout.folder) as folder:
        shape, labels = source.shape, source.labels
        made = _agree(folder, Made(dataset, len(labels), source.sha256(), seed, family, _rounding(shape)), force)
        for path in {folder / layout.labels.format(name) for name in names}:
            _write_labels(path, np.tile(labels, len(layout.severities)).astype(layout.label_type))
        files = _Files(folder, layout, len(labels), (*shape[1:], shape[0]))
        jobs = []
        for name in names:
            make = [s for s in levels if force or not files.intact(made, name, s)]
            keep = [s for s in layout.severities if s not in make and files.intact(made, name, s)] if make else []
            jobs.append(_Job(name, make, keep))
        domains = [f"{job.name}@{s}" for job in jobs for s in job.make]
        there = [f"{job.name}@{s}" for job in jobs for s in levels if s not in job.make]
        check_space(folder, files.size * (len(domains) + max((len(job.keep) for job in jobs), default=0)))
        watch.begin(len(labels) * len(domains), there)
        for job in jobs:
            if job.make:
                others = {d: b for d, b in made.blocks.items() if d.partition("@")[0] != job.name}
                made = replace(made, blocks=others | _write_images(files, job, made, source, watch))
                _write_made(folder, made)
                for severity in job.make:
                    watch.finish(f"{job.name}@{severity}")
    return Summary(folder, domains, there, len(labels), time.perf_counter() - begun)


@dataclass(frozen=True)
class _Source:
    """The clean images, and how to corrupt them."""

    clean: Dataset
    seed: int
    device: torch.device

    @property
    def labels(self) -> NDArray[np.int64]:
        return self.clean.labels(self.clean.domains[0]).numpy()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.read(torch.arange(1)).shape[1:])

    def read(self, index: Tensor) -> Tensor:
        return self.clean.images(self.clean.domains[0], index)

    def chunks(self) -> Iterator[Tensor]:
        """The numbers of all images, as many at once as are corrupted at once."""
        return iter(torch.arange(len(self.labels)).split(_at_once(self.shape, self.device)))

    def corrupt(self, index: Tensor, name: str, severity: int) -> NDArray[np.uint8]:
        return _corrupt(self.read(index).to(self.device), name, severity, self.seed, index)

    def sha256(self) -> str:
        """Of labels and pixels, however their files are packed."""
        digest = hashlib.sha256(self.labels.tobytes())
        for index in self.chunks():
            digest.update(self.read(index).mul_(255).round_().to(torch.uint8).numpy().data)
        return digest.hexdigest()


class _Job(NamedTuple):
    """One file to write."""

    name: str
    make: list[int]  # severities
    keep: list[int]  # severities to take over from the file that is there


class _Files:
    """The image files of a layout: a header, and a block a severity."""

    def __init__(self, folder: Path, layout: Layout, images: int, shape: tuple[int, ...]) -> None:
        self.folder, self.layout = folder, layout
        self.header = _header((images * len(layout.severities), *shape))
        self.size = images * int(np.prod(shape))  # bytes of a block
        self.total = len(self.header) + len(layout.severities) * self.size

    def path(self, name: str) -> Path:
        return self.folder / self.layout.images.format(name)

    def offset(self, severity: int) -> int:
        return len(self.header) + self.layout.severities.index(severity) * self.size

    def read(self, name: str, severity: int) -> Iterator[bytes]:
        with self.path(name).open("rb") as file:
            file.seek(self.offset(severity))
            for start in range(0, self.size, PART):
                yield file.read(min(PART, self.size - start))

    def intact(self, made: Made, name: str, severity: int) -> bool:
        """Whether a block is listed and still has the bytes that were written."""
        block, path = made.blocks.get(f"{name}@{severity}"), self.path(name)
        if block is None or not path.is_file() or path.stat().st_size != self.total:
            return False
        with path.open("rb") as file:
            if file.read(len(self.header)) != self.header:
                return False
        digest = hashlib.sha256()
        for part in self.read(name, severity):
            digest.update(part)
        return digest.hexdigest() == block.sha256


def _write_images(files: _Files, job: _Job, made: Made, source: _Source, watch: Watch) -> dict[str, Block]:
    """Write the file of a corruption, block by block, and tell what is in it."""
    blocks = {}
    with replacing(files.path(job.name), files.size * len(job.make + job.keep)) as file:
        file.write(files.header)
        for severity in sorted(job.make + job.keep):
            domain = f"{job.name}@{severity}"
            file.seek(files.offset(severity))
            if severity in job.keep:
                file.writelines(files.read(job.name, severity))
                blocks[domain] = made.blocks[domain]
            else:
                blocks[domain] = _write_block(file, job.name, severity, source, watch)
        file.truncate(files.total)  # what was not written is a hole
    return blocks


def _write_block(file: IO[bytes], name: str, severity: int, source: _Source, watch: Watch) -> Block:
    digest = hashlib.sha256()
    for index in source.chunks():
        pixels = source.corrupt(index, name, severity)
        file.write(pixels.data)
        digest.update(pixels.data)
        watch.advance(f"{name}@{severity}", len(pixels))
    return _block(digest, source.device)


# -- ImageNet-C: a picture a file --------------------------------------------------------------------------------------

RESIZE, CROP, QUALITY = 256, 224, 85  # as published
PICTURE_BYTES = 5_000  # what a corrupted picture takes at the very least, on average


def generate_pictures(
    images: str,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    out: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    force: bool = False,
    watch: Watch | None = None,
) -> Summary:
    """Corrupt pictures ``images/<class>/NAME.JPEG`` to ``out/ImageNet-C/<corruption>/<severity>/<class>/NAME.JPEG``.

    The pictures of a class are read once, put under every corruption, and moved into their places together. The other
    arguments are those of `generate`.
    """
    names, levels = _names(corruptions, IMAGENET_C, "common"), _severities(severities, tuple(SEVERITIES))
    place, classes = _device(device), _find_pictures(Path(images).expanduser())
    n = sum(len(paths) for paths in classes.values())
    shape = (3, CROP, CROP)
    watch, begun = watch or Watch(), time.perf_counter()
    with held(data_root(out) / ImageNetC.folder) as folder, ThreadPoolExecutor() as pool:
        fresh = Made("imagenet", n, _listing_sha256(classes), _seed(seed), "common", _rounding(shape))
        made = _agree(folder, fresh, force)
        asked = [(name, severity) for name in names for severity in levels]
        missing = {c: [d for d in asked if force or not _has(folder, d, c, classes[c])] for c in classes}
        todo = sum(len(missing[c]) * len(classes[c]) for c in classes)
        touched = {f"{name}@{severity}" for domains in missing.values() for name, severity in domains}
        domains = [f"{name}@{severity}" for name, severity in asked]
        there = [d for d in domains if d not in touched]
        check_space(folder, todo * PICTURE_BYTES)
        watch.begin(todo, there)
        first = 0
        for name, paths in classes.items():
            if missing[name]:
                _write_class(folder, name, paths, first, missing[name], seed, place, pool, watch)
            first += len(paths)
        for domain in domains:
            if domain in touched or domain not in made.blocks:
                digest = hashlib.sha256()
                for name, paths in classes.items():
                    for path in paths:
                        digest.update((folder / domain.replace("@", "/") / name / path.name).read_bytes())
                made = replace(made, blocks={**made.blocks, domain: _block(digest, place)})
                _write_made(folder, made)
                watch.finish(domain)
    return Summary(folder, [d for d in domains if d in touched], there, n, time.perf_counter() - begun)


def _find_pictures(root: Path) -> dict[str, list[Path]]:
    """The pictures of each class, all in the order of their names."""
    if not root.is_dir():
        raise MissingData(f"no folder of pictures at {root}")
    classes = {}
    for folder in sorted(f for f in root.iterdir() if f.is_dir()):
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
        if paths:
            classes[folder.name] = paths
    if not classes:
        raise MissingData(f"no pictures in {root}: expected a folder a class, {root}/<class>/NAME.JPEG")
    return classes


def _listing_sha256(classes: dict[str, list[Path]]) -> str:
    """Of names and sizes: to read all pictures would take as long as some corruptions."""
    lines = (f"{path.parent.name}/{path.name} {path.stat().st_size}\n" for paths in classes.values() for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _has(folder: Path, domain: tuple[str, int], name: str, paths: list[Path]) -> bool:
    place = folder / domain[0] / str(domain[1]) / name
    return place.is_dir() and {path.name for path in paths} <= set(os.listdir(place))


def _write_class(
    folder: Path,
    name: str,
    paths: list[Path],
    first: int,
    domains: list[tuple[str, int]],
    seed: int,
    device: torch.device,
    pool: ThreadPoolExecutor,
    watch: Watch,
) -> None:
    """Write one class under some corruptions; its first picture has number ``first``."""
    from PIL import Image

    from tribe.datasets.pictures import read_picture

    def read(path: Path) -> Tensor:
        return read_picture(path, resize=RESIZE, crop=CROP)

    def save(pixels: NDArray[np.uint8], path: Path) -> None:
        encoded = io.BytesIO()  # given a file, Pillow takes no notice when the disk is full
        Image.fromarray(pixels).save(encoded, "JPEG", quality=QUALITY, optimize=True)
        with path.open("wb") as file:
            file.write(encoded.getbuffer())
            file.flush()
            os.fsync(file.fileno())

    step = _at_once((3, CROP, CROP), device)
    with ExitStack() as stack:
        needed = PICTURE_BYTES * len(paths)
        places = [stack.enter_context(placing(folder / c / str(s) / name, needed)) for c, s in domains]
        for start in range(0, len(paths), step):
            some = paths[start : start + step]
            clean = torch.stack(list(pool.map(read, some))).to(device).float().div_(255)
            index = torch.arange(first + start, first + start + len(some))
            for (corruption, severity), place in zip(domains, places, strict=True):
                pixels = _corrupt(clean, corruption, severity, seed, index)
                list(pool.map(save, pixels, [place / path.name for path in some]))
                watch.advance(f"{corruption}@{severity}", len(some))


# -- what both share ---------------------------------------------------------------------------------------------------


def _corrupt(images: Tensor, name: str, severity: int, seed: int, index: Tensor) -> NDArray[np.uint8]:
    """Images (n, C, H, W) to bytes (n, H, W, C)."""
    pixels = to_bytes(apply(images, name, severity, seed=seed, index=index))
    return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def _at_once(shape: Sequence[int], device: torch.device) -> int:
    return max(1, CHUNK.get(device.type, CHUNK_ELSEWHERE) // int(np.prod(shape)))


def _rounding(shape: Sequence[int]) -> str:
    """How `to_bytes`, which alone decides, cuts such images."""
    return "nearest" if to_bytes(torch.full((1, *shape), 0.75 / 255)).any() else "down"


def _block(digest: Any, device: torch.device) -> Block:
    return Block(digest.hexdigest(), device.type, torch.__version__, __version__)


def _agree(folder: Path, fresh: Made, force: bool) -> Made:
    """What a folder holds that can be added to. The file comes first: without it half a folder would look published."""
    if is_published(folder) and not force:
        raise ValueError(
            f"{folder} holds files that were not made here, the published archive it seems: use another --out, or "
            "--force to write over them"
        )
    made = read_made(folder) if not force else _read_or_none(folder)
    if made is not None:
        difference = made.difference(fresh)
        if difference is None:
            return made
        if not force:
            raise ValueError(f"{folder} was made with {difference}: use another --out, or --force to begin anew")
    _write_made(folder, fresh)
    return fresh


def _read_or_none(folder: Path) -> Made | None:
    try:
        return read_made(folder)
    except ValueError:
        return None


def _write_made(folder: Path, made: Made) -> None:
    with replacing(folder / FILE) as file:
        file.write(made.json().encode())


def _write_labels(path: Path, labels: NDArray[Any]) -> None:
    data = _header(labels.shape, labels.dtype) + labels.tobytes()
    if not path.is_file() or path.read_bytes() != data:
        with replacing(path, len(data)) as file:
            file.write(data)


def _header(shape: tuple[int, ...], dtype: Any = np.uint8) -> bytes:
    """What an npy file of an array begins with."""
    file = io.BytesIO()
    description = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(file, {"descr": description, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _open_clean(dataset: str, data: str | None, out: str | None) -> Dataset:
    """The clean set below the first root that holds it."""
    roots = [data] if data is not None or out is None else [None, out]
    errors = []
    for root in roots:
        clean = create(dataset, data=root)
        try:
            clean.labels(clean.domains[0])
        except MissingData as error:
            errors.append(error)
        else:
            return clean
    raise errors[0]


def _names(asked: Sequence[str] | None, usual: tuple[str, ...], family: str) -> tuple[str, ...]:
    known = known_corruptions(family)
    for name in asked or ():
        if name not in known:
            raise ValueError(f"unknown corruption {name!r}: {nearest(name, known)}")
    return usual if asked is None else tuple(dict.fromkeys(asked))


def _severities(asked: Sequence[int] | None, known: tuple[int, ...]) -> list[int]:
    for severity in asked or ():
        if severity not in known:
            only = f"MNIST-C has a single strength, which goes by severity {STRENGTH}" if len(known) == 1 else ""
            raise ValueError(f"{only or 'a severity is 1, 2, 3, 4 or 5'}; got {severity!r}")
    return sorted(set(asked or (STRENGTH,)))


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise ValueError(f"a seed is at least 0 and below 2**63; got {seed}")
    return seed


def _device(device: str) -> torch.device:
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"a device is cpu or cuda; got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA device can be used here: use --device cpu")
    return torch.device(device)
