"""Write MNIST-C, CIFAR-10-C and CIFAR-100-C to disk in their published layout: one npy file per corruption."""

import hashlib
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.data.corruptions import SEVERITIES
from tribe.data.datasets import Dataset, create
from tribe.data.datasets.cifar_c import Cifar10C, Cifar100C
from tribe.data.datasets.corrupted import family_of
from tribe.data.datasets.generation import (
    GenerationProgress,
    Summary,
    check_device,
    check_names,
    check_seed,
    check_severities,
    chunk_size,
    corrupt_to_bytes,
    new_block,
    open_manifest,
    rounding,
    write_manifest,
)
from tribe.data.datasets.locations import MissingData, data_root
from tribe.data.datasets.manifest import Block, Manifest
from tribe.data.datasets.mnist_c import SEVERITY, MnistC
from tribe.data.datasets.writing import check_space, held, replacing
from tribe.data.scenarios.orders import CIFAR_C, MNIST_C
from tribe.registry import nearest

COPIED = 2**22  # bytes copied or hashed at once


class ArrayLayout(NamedTuple):
    """The files of a corrupted data set and what they hold."""

    folder: str
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]  # the blocks of a file, in order
    images: str  # file of a corruption
    labels: str
    label_type: Any  # as published


LAYOUTS = {
    "cifar10": ArrayLayout(Cifar10C.folder, CIFAR_C, tuple(SEVERITIES), "{}.npy", "labels.npy", np.uint8),
    "cifar100": ArrayLayout(Cifar100C.folder, CIFAR_C, tuple(SEVERITIES), "{}.npy", "labels.npy", np.uint8),
    "mnist": ArrayLayout(MnistC.folder, MNIST_C, (SEVERITY,), "{}/test_images.npy", "{}/test_labels.npy", np.int64),
}


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
    """Corrupt a clean test set, "mnist", "cifar10" or "cifar100", and write it in its published layout.

    Severities that are not chosen are holes in the file: they take no space, and the readers refuse them.

    Args:
        dataset: the clean set.
        corruptions: by default the fifteen of the benchmark.
        severities: by default 5.
        out: folder below which to write; by default that of the clean set.
        data: folder below which the clean set lies; by default that of all data, else ``out``.
        seed: seed of the corruptions' random numbers.
        device: where to compute.
        force: make existing blocks again, and begin anew if the folder was made with other settings.
        progress: receives the progress of the work.
    """
    if dataset not in LAYOUTS:
        raise ValueError(f"unknown data set {dataset!r}: {nearest(dataset, LAYOUTS)}")
    layout, family = LAYOUTS[dataset], family_of(dataset)
    names = check_names(corruptions, layout.corruptions, family)
    chosen = check_severities(severities, layout.severities)
    clean = _CleanImages(_open_clean(dataset, data, out), check_seed(seed), check_device(device))
    shape, labels = clean.shape, clean.labels
    progress, started = progress or GenerationProgress(), time.perf_counter()
    with held(data_root(data if out is None else out) / layout.folder) as folder:
        fresh = Manifest(dataset, len(labels), clean.sha256(), seed, family, rounding(shape))
        manifest = open_manifest(folder, fresh, force)
        for path in {folder / layout.labels.format(name) for name in names}:
            _write_labels(path, np.tile(labels, len(layout.severities)).astype(layout.label_type))
        files = _ImageFiles(folder, layout, len(labels), (*shape[1:], shape[0]))
        jobs = [files.job(manifest, name, chosen, force) for name in names]
        domains = [f"{job.name}@{s}" for job in jobs for s in job.make]
        there = [f"{job.name}@{s}" for job in jobs for s in chosen if s not in job.make]
        check_space(folder, files.size * (len(domains) + max((len(job.keep) for job in jobs), default=0)))
        progress.begin(len(labels) * len(domains), there)
        for job in jobs:
            if job.make:
                others = {d: b for d, b in manifest.blocks.items() if d.partition("@")[0] != job.name}
                blocks = _write_images(files, job, manifest, clean, progress)
                manifest = replace(manifest, blocks=others | blocks)
                write_manifest(folder, manifest)
                for severity in job.make:
                    progress.finish(f"{job.name}@{severity}")
    return Summary(folder, domains, there, len(labels), time.perf_counter() - started)


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


@dataclass(frozen=True)
class _CleanImages:
    """The clean images, and the settings to corrupt them with."""

    dataset: Dataset
    seed: int
    device: torch.device

    @property
    def labels(self) -> NDArray[np.int64]:
        return self.dataset.labels(self.dataset.domains[0]).numpy()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.read(torch.arange(1)).shape[1:])

    def read(self, index: Tensor) -> Tensor:
        return self.dataset.images(self.dataset.domains[0], index)

    def chunks(self) -> Iterator[Tensor]:
        """The numbers of all images, in the chunks that are corrupted at once."""
        return iter(torch.arange(len(self.labels)).split(chunk_size(self.shape, self.device)))

    def corrupt(self, index: Tensor, name: str, severity: int) -> NDArray[np.uint8]:
        return corrupt_to_bytes(self.read(index).to(self.device), name, severity, self.seed, index)

    def sha256(self) -> str:
        """A hash of labels and pixels that does not depend on the file format."""
        digest = hashlib.sha256(self.labels.tobytes())
        for index in self.chunks():
            digest.update(self.read(index).mul_(255).round_().to(torch.uint8).numpy().data)
        return digest.hexdigest()


class _Job(NamedTuple):
    """One file to write."""

    name: str
    make: list[int]  # severities
    keep: list[int]  # severities to copy from the existing file


class _ImageFiles:
    """The image files of a layout: a header, and one block per severity."""

    def __init__(self, folder: Path, layout: ArrayLayout, images: int, shape: tuple[int, ...]) -> None:
        self.folder, self.layout = folder, layout
        self.header = _npy_header((images * len(layout.severities), *shape))
        self.size = images * int(np.prod(shape))  # bytes of a block
        self.total = len(self.header) + len(layout.severities) * self.size

    def path(self, name: str) -> Path:
        return self.folder / self.layout.images.format(name)

    def offset(self, severity: int) -> int:
        return len(self.header) + self.layout.severities.index(severity) * self.size

    def read(self, name: str, severity: int) -> Iterator[bytes]:
        with self.path(name).open("rb") as file:
            file.seek(self.offset(severity))
            for start in range(0, self.size, COPIED):
                yield file.read(min(COPIED, self.size - start))

    def job(self, manifest: Manifest, name: str, severities: Sequence[int], force: bool) -> _Job:
        """Which blocks of a file to make, and which to keep."""
        make = [s for s in severities if force or not self.is_intact(manifest, name, s)]
        others = [s for s in self.layout.severities if s not in make] if make else []
        return _Job(name, make, [s for s in others if self.is_intact(manifest, name, s)])

    def is_intact(self, manifest: Manifest, name: str, severity: int) -> bool:
        """Whether a block is listed and still has the bytes that were written."""
        block, path = manifest.blocks.get(f"{name}@{severity}"), self.path(name)
        if block is None or not path.is_file() or path.stat().st_size != self.total:
            return False
        with path.open("rb") as file:
            if file.read(len(self.header)) != self.header:
                return False
        digest = hashlib.sha256()
        for part in self.read(name, severity):
            digest.update(part)
        return digest.hexdigest() == block.sha256


def _write_images(
    files: _ImageFiles, job: _Job, manifest: Manifest, clean: _CleanImages, progress: GenerationProgress
) -> dict[str, Block]:
    """Write the file of a corruption block by block; return its blocks."""
    blocks = {}
    with replacing(files.path(job.name), files.size * len(job.make + job.keep)) as file:
        file.write(files.header)
        for severity in sorted(job.make + job.keep):
            domain = f"{job.name}@{severity}"
            file.seek(files.offset(severity))
            if severity in job.keep:
                file.writelines(files.read(job.name, severity))
                blocks[domain] = manifest.blocks[domain]
            else:
                blocks[domain] = _write_block(file, job.name, severity, clean, progress)
        file.truncate(files.total)  # blocks that were not written are holes
    return blocks


def _write_block(file: IO[bytes], name: str, severity: int, clean: _CleanImages, progress: GenerationProgress) -> Block:
    digest = hashlib.sha256()
    for index in clean.chunks():
        pixels = clean.corrupt(index, name, severity)
        file.write(pixels.data)
        digest.update(pixels.data)
        progress.advance(f"{name}@{severity}", len(pixels))
    return new_block(digest, clean.device)


def _write_labels(path: Path, labels: NDArray[Any]) -> None:
    data = _npy_header(labels.shape, labels.dtype) + labels.tobytes()
    if not path.is_file() or path.read_bytes() != data:
        with replacing(path, len(data)) as file:
            file.write(data)


def _npy_header(shape: tuple[int, ...], dtype: Any = np.uint8) -> bytes:
    """The first bytes of an npy file."""
    file = io.BytesIO()
    description = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(file, {"descr": description, "fortran_order": False, "shape": shape})
    return file.getvalue()
