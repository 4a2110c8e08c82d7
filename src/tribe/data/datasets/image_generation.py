"""Write ImageNet-C to disk in its published layout: one JPEG file per image.

The images of a chunk are read once and corrupted in every way on the device, while threads read the next chunk and
encode and write the results: Pillow works in parallel. A file is written elsewhere and moved to its place. After an
interruption the images that are missing are made.
"""

import contextlib
import hashlib
import io
import itertools
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.data.corruptions import SEVERITIES, family_for
from tribe.data.corruptions.pillow import require_pillow
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
from tribe.data.datasets.image_files import cores, image_file_size, read_image
from tribe.data.datasets.imagenet import ImageNet, resize_for
from tribe.data.datasets.imagenet_c import ImageNetC
from tribe.data.datasets.locations import MissingData, data_root
from tribe.data.datasets.manifest import Manifest
from tribe.data.datasets.writing import ADVICE, check_space, held
from tribe.data.scenarios.orders import IMAGENET_C
from tribe.io.files import CannotWrite

CROP, QUALITY = ImageNet.shape[1], 85  # as published
IMAGE_BYTES = 5_000  # a lower bound of the mean size of a corrupted image
WAITING = 2048  # images that wait to be encoded: 300 MB
WRITING = ".writing.tmp"  # folder of files that are not complete; a later process removes it
END = b"\xff\xd9"  # of a JPEG file


class Domain(NamedTuple):
    """A corruption at a severity."""

    corruption: str
    severity: int

    @property
    def name(self) -> str:
        """As data sets name it."""
        return f"{self.corruption}@{self.severity}"

    @property
    def place(self) -> Path:
        """Its folder."""
        return Path(self.corruption, str(self.severity))


def generate_imagenet(
    data: str | None = None,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    out: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    force: bool = False,
    progress: GenerationProgress | None = None,
) -> Summary:
    """Corrupt ``<class>/NAME.JPEG`` to ``out/ImageNet-C/<corruption>/<severity>/<class>/NAME.JPEG``.

    Images of any size are resized and cropped to 224 x 224 as the authors do, unless all have that size.

    Args:
        data: the folder of the class folders, or the root of all data, where `ImageNet` finds it.
        out: folder below which to write; by default the root of all data.
        corruptions, severities, seed, device, force, progress: as of `tribe.datasets.array_generation.generate`.
    """
    family = family_for(ImageNet.shape)
    names, chosen = check_names(corruptions, IMAGENET_C, family), check_severities(severities, tuple(SEVERITIES))
    domains = [Domain(name, severity) for name in names for severity in chosen]
    root, place = data_root(data), check_device(device)
    images = _image_folder(root)
    paths = _find_images(images)
    target = data_root(out) if out is not None or images == root else root
    progress, started = progress or GenerationProgress(), time.perf_counter()
    with held(target / ImageNetC.folder) as folder, ThreadPoolExecutor(cores(), "tribe-images") as threads:
        shape = ImageNet.shape
        fresh = Manifest("imagenet", len(paths), _listing_sha256(paths), check_seed(seed), family, rounding(shape))
        manifest = open_manifest(folder, fresh, force)
        if force:
            manifest = _without(folder, manifest, domains)
        files = _Files(folder, paths, threads)
        missing = {domain: files.missing(domain, complete=domain.name in manifest.blocks) for domain in domains}
        left = sum(int(wanted.sum()) for wanted in missing.values())
        made = [domain for domain in domains if missing[domain].any()]
        there = [domain.name for domain in domains if domain not in made]
        check_space(folder, left * IMAGE_BYTES)
        progress.begin(left, there)
        with _Writer(folder, threads, progress) as writer:
            _corrupt(paths, missing, writer, seed, place)
        if left and hasattr(os, "sync"):
            os.sync()  # before the manifest says that they are complete
        unlisted = [d for d in domains if d in made or d.name not in manifest.blocks]
        for domain, digest in zip(unlisted, threads.map(files.digest, unlisted), strict=True):
            manifest = replace(manifest, blocks={**manifest.blocks, domain.name: new_block(digest, place)})
            write_manifest(folder, manifest)
            progress.finish(domain.name)
    return Summary(folder, [d.name for d in made], there, len(paths), time.perf_counter() - started)


def _image_folder(root: Path) -> Path:
    """The folder of the class folders: the root, or one below it where `ImageNet` is found."""
    if not root.is_dir():
        raise MissingData(f"no folder of images at {root}")
    places = (root / place for place in ImageNet.places["clean"])
    return next((folder for folder in places if folder.is_dir()), root)


def _find_images(folder: Path) -> list[Path]:
    """The images, sorted by class and name."""
    found = []
    for kind in sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")):
        found += sorted(path for path in kind.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
    if not found:
        raise MissingData(f"no images in {folder}: expected a folder for each class, {folder}/<class>/NAME.JPEG")
    return found


def _listing_sha256(paths: Sequence[Path]) -> str:
    """A hash of names and sizes: reading all images would take as long as some corruptions."""
    lines = (f"{path.parent.name}/{path.name} {image_file_size(path)}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _without(folder: Path, manifest: Manifest, domains: Sequence[Domain]) -> Manifest:
    """Remove domains, first from the manifest: images of another set must not stay among those that are made."""
    names = {domain.name for domain in domains}
    manifest = replace(manifest, blocks={name: b for name, b in manifest.blocks.items() if name not in names})
    write_manifest(folder, manifest)
    for domain in domains:
        with _told(folder / domain.place), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / domain.place)
    return manifest


@dataclass(frozen=True)
class _Files:
    """The files of a data set that is made."""

    folder: Path
    paths: Sequence[Path]  # the clean images
    threads: ThreadPoolExecutor

    def missing(self, domain: Domain, complete: bool) -> NDArray[np.bool_]:
        """Which images of a domain have to be made.

        Of a complete domain, which the manifest lists, the names are compared. Of another one, a power failure may have
        left names without contents.
        """
        kinds = dict.fromkeys(path.parent.name for path in self.paths)
        names = {kind: _names(self.folder / domain.place / kind) for kind in kinds}
        found = np.array([path.name in names[path.parent.name] for path in self.paths])
        if not complete:
            present = [path for path, there in zip(self.paths, found.tolist(), strict=True) if there]
            places = [place_of(self.folder / domain.place, path) for path in present]
            found[found] = list(self.threads.map(_is_whole, places))
        return ~found

    def digest(self, domain: Domain) -> Any:
        """A hash of all files of a domain."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(place_of(self.folder / domain.place, path).read_bytes())
        return digest


def place_of(folder: Path, path: Path) -> Path:
    """The file in a folder of class folders that is made from a clean image."""
    return folder / path.parent.name / path.name


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _is_whole(path: Path) -> bool:
    """Whether a file ends as a JPEG file does."""
    try:
        with path.open("rb") as file:
            file.seek(-len(END), os.SEEK_END)
            return file.read() == END
    except OSError:
        return False


def _corrupt(
    paths: Sequence[Path],
    missing: dict[Domain, NDArray[np.bool_]],
    writer: "_Writer",
    seed: int,
    device: torch.device,
) -> None:
    """Corrupt the missing images; the files of the next chunk are decoded meanwhile."""
    wanted = np.flatnonzero(np.logical_or.reduce(list(missing.values())))
    step = chunk_size(ImageNet.shape, device)
    chunks = np.split(wanted, range(step, len(wanted), step))
    resize = resize_for(paths, CROP)
    crop = None if resize is None else CROP

    def read(chunk: NDArray[Any]) -> "list[Future[Tensor]]":
        return [writer.threads.submit(read_image, paths[i], resize=resize, crop=crop) for i in chunk]

    ahead = read(chunks[0])
    for n, chunk in enumerate(chunks if len(wanted) else ()):
        now, ahead = ahead, read(chunks[n + 1]) if n + 1 < len(chunks) else []
        clean = _cropped([f.result() for f in now], [paths[i] for i in chunk]).to(device).float().div_(255)
        for domain, lacking in missing.items():
            rows = torch.from_numpy(lacking[chunk]).nonzero().flatten()
            if len(rows):
                some = clean if len(rows) == len(clean) else clean[rows.to(device)]
                index = torch.from_numpy(chunk)[rows]
                pixels = corrupt_to_bytes(some, *domain, seed, index)
                writer.write(domain, pixels, [paths[i] for i in index.tolist()])


def _cropped(images: Sequence[Tensor], paths: Sequence[Path]) -> Tensor:
    """A batch of images; one of another size is an error that names it."""
    for image, path in zip(images, paths, strict=True):
        if image.shape != ImageNet.shape:
            size = f"{image.shape[2]}x{image.shape[1]}"
            raise ValueError(f"{path} is {size} pixels, and the others {CROP}x{CROP}, as if all had been cropped")
    return torch.stack(list(images))


@dataclass(frozen=True)
class _Writer:
    """Encodes and writes images in threads. At most `WAITING` images wait."""

    folder: Path
    threads: ThreadPoolExecutor
    progress: GenerationProgress
    waiting: "deque[tuple[Domain, Path, Future[None]]]" = field(default_factory=deque)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of temporary files

    def __enter__(self) -> "_Writer":
        with _told(self.folder):
            (self.folder / WRITING).mkdir(exist_ok=True)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._drain(0)
        for *_, future in self.waiting:
            future.cancel()
        for *_, future in self.waiting:
            if not future.cancelled():
                future.exception()  # waits for it
        shutil.rmtree(self.folder / WRITING, ignore_errors=True)

    def write(self, domain: Domain, images: NDArray[np.uint8], paths: Sequence[Path]) -> None:
        """Write the corrupted images (n, H, W, 3) of clean files; return before they are written."""
        for pixels, path in zip(images, paths, strict=True):
            place = place_of(self.folder / domain.place, path)
            temporary = self.folder / WRITING / f"{os.getpid()}.{next(self.numbers)}"
            self.waiting.append((domain, place, self.threads.submit(_save, pixels, temporary, place)))
        self._drain(WAITING)

    def _drain(self, most: int) -> None:
        """Wait until at most so many images wait; report what is written."""
        done: dict[str, int] = {}
        while self.waiting and (len(self.waiting) > most or self.waiting[0][2].done()):
            domain, place, future = self.waiting.popleft()
            with _told(place):
                future.result()
            done[domain.name] = done.get(domain.name, 0) + 1
        for name, images in done.items():
            self.progress.advance(name, images)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Add the path and what to do to an error of the operating system."""
    try:
        yield
    except OSError as error:
        raise CannotWrite.because(error, path, IMAGE_BYTES, ADVICE) from error


def _save(pixels: NDArray[np.uint8], temporary: Path, place: Path) -> None:
    encoded = io.BytesIO()  # given a file, Pillow does not report that the disk is full
    require_pillow("writing images").fromarray(pixels).save(encoded, "JPEG", quality=QUALITY, optimize=True)
    temporary.write_bytes(encoded.getbuffer())
    place.parent.mkdir(parents=True, exist_ok=True)
    os.replace(temporary, place)
