"""Write ImageNet-C to disk in its published layout: one JPEG file per image."""

import hashlib
import io
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.corruptions import SEVERITIES, family_for
from tribe.corruptions.pillow import require_pillow
from tribe.datasets.generation import (
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
from tribe.datasets.image_files import image_file_size, read_image
from tribe.datasets.imagenet_c import ImageNetC
from tribe.datasets.locations import MissingData, data_root
from tribe.datasets.manifest import Manifest
from tribe.datasets.writing import check_space, held, placing
from tribe.scenarios.orders import IMAGENET_C

RESIZE, CROP, QUALITY = 256, 224, 85  # as published
SHAPE = (3, CROP, CROP)
IMAGE_BYTES = 5_000  # a lower bound of the mean size of a corrupted image


def generate_imagenet(
    images: str,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    out: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    force: bool = False,
    progress: GenerationProgress | None = None,
) -> Summary:
    """Corrupt ``images/<class>/NAME.JPEG`` to ``out/ImageNet-C/<corruption>/<severity>/<class>/NAME.JPEG``.

    The images of a class are read once, corrupted in every way, and moved to their places together. The other
    arguments are those of `tribe.datasets.array_generation.generate`.
    """
    family = family_for(SHAPE)
    names, chosen = check_names(corruptions, IMAGENET_C, family), check_severities(severities, tuple(SEVERITIES))
    place, classes = check_device(device), _find_images(Path(images).expanduser())
    count = sum(len(paths) for paths in classes.values())
    progress, started = progress or GenerationProgress(), time.perf_counter()
    with held(data_root(out) / ImageNetC.folder) as folder, ThreadPoolExecutor() as threads:
        fresh = Manifest("imagenet", count, _listing_sha256(classes), check_seed(seed), family, rounding(SHAPE))
        manifest = open_manifest(folder, fresh, force)
        pairs = [(name, severity) for name in names for severity in chosen]
        missing = {c: [d for d in pairs if force or not _has(folder, d, c, classes[c])] for c in classes}
        left = sum(len(missing[c]) * len(classes[c]) for c in classes)
        touched = {f"{name}@{severity}" for domains in missing.values() for name, severity in domains}
        domains = [f"{name}@{severity}" for name, severity in pairs]
        there = [domain for domain in domains if domain not in touched]
        check_space(folder, left * IMAGE_BYTES)
        progress.begin(left, there)
        writer = _ClassWriter(folder, seed, place, threads, progress)
        first = 0
        for name, paths in classes.items():
            if missing[name]:
                writer.write(name, paths, first, missing[name])
            first += len(paths)
        for domain in domains:
            if domain in touched or domain not in manifest.blocks:
                block = new_block(_files_digest(folder / domain.replace("@", "/"), classes), place)
                manifest = replace(manifest, blocks={**manifest.blocks, domain: block})
                write_manifest(folder, manifest)
                progress.finish(domain)
    return Summary(folder, [d for d in domains if d in touched], there, count, time.perf_counter() - started)


def _find_images(root: Path) -> dict[str, list[Path]]:
    """The images of each class, all sorted by name."""
    if not root.is_dir():
        raise MissingData(f"no folder of images at {root}")
    classes = {}
    for folder in sorted(f for f in root.iterdir() if f.is_dir()):
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
        if paths:
            classes[folder.name] = paths
    if not classes:
        raise MissingData(f"no images in {root}: expected a folder for each class, {root}/<class>/NAME.JPEG")
    return classes


def _listing_sha256(classes: dict[str, list[Path]]) -> str:
    """A hash of names and sizes: reading all images would take as long as some corruptions."""
    lines = (
        f"{path.parent.name}/{path.name} {image_file_size(path)}\n" for paths in classes.values() for path in paths
    )
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _files_digest(folder: Path, classes: dict[str, list[Path]]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for name, paths in classes.items():
        for path in paths:
            digest.update((folder / name / path.name).read_bytes())
    return digest


def _has(folder: Path, domain: tuple[str, int], name: str, paths: list[Path]) -> bool:
    place = folder / domain[0] / str(domain[1]) / name
    return place.is_dir() and {path.name for path in paths} <= set(os.listdir(place))


@dataclass(frozen=True)
class _ClassWriter:
    """Corrupts and writes the images of one class at a time."""

    folder: Path
    seed: int
    device: torch.device
    threads: ThreadPoolExecutor
    progress: GenerationProgress

    def write(self, name: str, paths: list[Path], first: int, domains: list[tuple[str, int]]) -> None:
        """Write a class under some corruptions; its first image has number ``first``."""
        step = chunk_size(SHAPE, self.device)
        with ExitStack() as stack:
            needed = IMAGE_BYTES * len(paths)
            places = [stack.enter_context(placing(self.folder / c / str(s) / name, needed)) for c, s in domains]
            for start in range(0, len(paths), step):
                part = paths[start : start + step]
                clean = torch.stack(list(self.threads.map(_read, part))).to(self.device).float().div_(255)
                index = torch.arange(first + start, first + start + len(part))
                for (corruption, severity), place in zip(domains, places, strict=True):
                    pixels = corrupt_to_bytes(clean, corruption, severity, self.seed, index)
                    list(self.threads.map(_save, pixels, [place / path.name for path in part]))
                    self.progress.advance(f"{corruption}@{severity}", len(part))


def _read(path: Path) -> Tensor:
    return read_image(path, resize=RESIZE, crop=CROP)


def _save(pixels: NDArray[np.uint8], path: Path) -> None:
    encoded = io.BytesIO()  # given a file, Pillow does not report that the disk is full
    require_pillow("writing images").fromarray(pixels).save(encoded, "JPEG", quality=QUALITY, optimize=True)
    with path.open("wb") as file:
        file.write(encoded.getbuffer())
        file.flush()
        os.fsync(file.fileno())
