"""What all corrupted data sets written to disk share: options, progress, the manifest.

A file moves to its place when it is complete, and the manifest lists it after that. A block that is listed and still
has its bytes is not made again. So after an interruption the same call continues.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe._version import __version__
from tribe.data.corruptions import apply
from tribe.data.corruptions.families import CHUNK, CHUNK_ELSEWHERE
from tribe.data.datasets.corrupted import check_corruptions, to_bytes
from tribe.data.datasets.manifest import FILE, Block, Manifest, is_published, read_manifest
from tribe.data.datasets.writing import replacing

DEFAULT_SEVERITY = 5


class GenerationProgress:
    """Receives the progress of the work; override the methods to show it."""

    def begin(self, images: int, there: Sequence[str]) -> None:
        """The work begins: the number of images to make, and the domains that exist already."""

    def advance(self, domain: str, images: int) -> None:
        """More images of a domain are made."""

    def finish(self, domain: str) -> None:
        """A domain is complete."""


class Summary(NamedTuple):
    """The result of the work."""

    folder: Path
    made: list[str]  # domains
    there: list[str]  # domains that existed already
    images: int  # per domain
    seconds: float


def corrupt_to_bytes(images: Tensor, name: str, severity: int, seed: int, index: Tensor) -> NDArray[np.uint8]:
    """Corrupt images (n, C, H, W) and return bytes (n, H, W, C)."""
    pixels = to_bytes(apply(images, name, severity, seed=seed, index=index))
    return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def chunk_size(shape: Sequence[int], device: torch.device) -> int:
    """How many images of a shape are corrupted at once."""
    return max(1, CHUNK.get(device.type, CHUNK_ELSEWHERE) // int(np.prod(shape)))


def rounding(shape: Sequence[int]) -> str:
    """How `to_bytes` rounds images of a shape."""
    return "nearest" if to_bytes(torch.full((1, *shape), 0.75 / 255)).any() else "down"


def new_block(digest: Any, device: torch.device) -> Block:
    """A block made now, with these bytes."""
    return Block(digest.hexdigest(), device.type, torch.__version__, __version__)


def open_manifest(folder: Path, fresh: Manifest, force: bool) -> Manifest:
    """Return the manifest of a folder if blocks can be added to it, else write a fresh one or raise an error.

    The manifest is written before any image: without it an incomplete folder would count as published.
    """
    if is_published(folder) and not force:
        raise ValueError(
            f"{folder} holds files but no {FILE}, like the published archive: use another --out, or --force to write "
            "over them"
        )
    manifest = _read_if_valid(folder) if force else read_manifest(folder)
    if manifest is not None:
        difference = manifest.difference(fresh)
        if difference is None:
            return manifest
        if not force:
            raise ValueError(f"{folder} was made with {difference}: use another --out, or --force to begin anew")
    write_manifest(folder, fresh)
    return fresh


def _read_if_valid(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except ValueError:
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a folder."""
    with replacing(folder / FILE) as file:
        file.write(manifest.json().encode())


def check_names(names: Sequence[str] | None, default: tuple[str, ...], family: str) -> tuple[str, ...]:
    """The corruptions to make, each once."""
    check_corruptions(names or (), family)
    return default if names is None else tuple(dict.fromkeys(names))


def check_severities(severities: Sequence[int] | None, possible: tuple[int, ...]) -> list[int]:
    """The severities to make, sorted."""
    for severity in severities or ():
        if severity not in possible:
            single = f"MNIST-C has a single strength, which is called severity {possible[0]}"
            expected = single if len(possible) == 1 else "a severity is 1, 2, 3, 4 or 5"
            raise ValueError(f"{expected}; got {severity!r}")
    return sorted(set(severities or (DEFAULT_SEVERITY,)))


def check_seed(seed: int) -> int:
    """The seed, if the random numbers can use it."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"a seed is at least 0 and below 2**63; got {seed}")
    return seed


def check_device(device: str) -> torch.device:
    """The device, if it can be used."""
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"a device is cpu or cuda; got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA device can be used here: use --device cpu")
    return torch.device(device)
