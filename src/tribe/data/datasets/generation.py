"""Write corrupted data sets in their published layouts, see `tribe.data.datasets.corrupted_files`.

The manifest lists the domains that are complete. A domain is added to it when all of its files are on the disk, and
removed before a file of it changes. So after an interruption the same call continues.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tribe._version import __version__
from tribe.core.precision import choose_device
from tribe.data.corruptions import apply, chunk_size, family_for
from tribe.data.datasets.corrupted import functions_of, to_bytes
from tribe.data.datasets.corrupted_files import BENCHMARKS, JpegFiles, NpyFiles
from tribe.data.datasets.manifest import FILE, Manifest, is_published, read_manifest, write_manifest
from tribe.fields import require
from tribe.io.files import CannotWrite, exclusive, explain_failure, room_for
from tribe.registry import nearest


class GenerationProgress:
    """Receives the progress of the work; override the methods to show it."""

    def begin(self, images: int, there: Sequence[str]) -> None:
        """Show that the work begins: the number of images to make, and the domains that exist already."""

    def advance(self, domain: str, images: int) -> None:
        """Show that more images of a domain are made."""

    def finish(self, domain: str) -> None:
        """Show that a domain is complete."""


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
    progress, started = progress or GenerationProgress(), time.perf_counter()
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
        there = [domain for domain in domains if domain not in made]
        progress.begin(left, there)
        for group in [domains] if files.at_once else [[domain] for domain in domains]:
            _corrupt(files, {domain: missing[domain] for domain in group}, seed, place, progress)
            files.sync([domain for domain in group if domain in made])
            for domain in group:
                if domain not in manifest.blocks:
                    made_by = {"device": place.type, "torch": torch.__version__, "tribe": __version__}
                    blocks = {**manifest.blocks, domain: {"sha256": files.sha256(domain), **made_by}}
                    manifest = write_manifest(folder, replace(manifest, blocks=blocks))
                    progress.finish(domain)
    return Summary(folder, made, there, files.count, time.perf_counter() - started)


def _corrupt(
    files: NpyFiles | JpegFiles,
    missing: Mapping[str, NDArray[np.bool_]],
    seed: int,
    device: torch.device,
    progress: GenerationProgress,
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
                    progress.advance(domain, len(rows))


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
