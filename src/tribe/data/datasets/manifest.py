"""The manifest of a folder of corrupted images, ``made.json``: which images it holds and how they were made.

The published archives have no manifest and count as complete. A folder with a manifest holds the blocks that the
manifest lists and no others, even if its files are larger.
"""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tribe.data.datasets.files import MissingData
from tribe.io import json_files
from tribe.io.files import write_atomically

FILE = "made.json"
SCHEMA = 1
SETTINGS = {"dataset": str, "clean": str, "images": int, "seed": int, "family": str, "rounding": str}


@dataclass(frozen=True)
class Manifest:
    """The settings that a folder was made with, and its finished blocks by domain ("fog@5")."""

    dataset: str  # the clean data set
    images: int  # number of clean images
    clean: str  # sha256 of the clean images
    seed: int
    family: str  # of the corruptions
    rounding: str  # of pixels to bytes, "nearest" or "down"
    blocks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # sha256, and where and by what it was made

    def difference(self, other: "Manifest") -> str | None:
        """Return how the settings of another manifest differ, as part of an error message."""
        for name in SETTINGS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{'clean set, sha256' if name == 'clean' else name} {mine}, not {theirs}"
        return None


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None if it has none, like a published archive."""
    path, advice = folder / FILE, f"Remove the folder {folder} and make it again"
    try:
        fields = json_files.read(path, {"schema": {SCHEMA}, **SETTINGS, "blocks": {...: {"sha256": str}}}, advice)
    except FileNotFoundError:
        return None
    return Manifest(**{name: fields[name] for name in (*SETTINGS, "blocks")})


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest of a folder and return it; an interrupted write leaves the old one."""
    content = json.dumps({"schema": SCHEMA, **dataclasses.asdict(manifest)}, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / FILE, content.encode())
    return manifest


def is_published(folder: Path) -> bool:
    """Whether the folder holds files but no manifest."""
    return not (folder / FILE).exists() and any(not entry.name.startswith(".") for entry in folder.iterdir())


def corrupt_command(dataset: str, root: Path, *, corruptions: Iterable[str], severities: Iterable[int]) -> str:
    """Return the command that makes a corrupted data set from the clean one below the same root."""
    options = {"severity": ",".join(map(str, severities)), "corruptions": ",".join(corruptions), "data": str(root)}
    words = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    return shlex.join(["tribe", "corrupt", dataset, *words])


def remedy(folder: Path, command: str) -> str:
    """Return what to do about an incomplete folder; ``command`` makes it."""
    action = "unpack the published archive again" if is_published(folder) else f"make it with `{command}`"
    return f"The folder is incomplete: {action}"


def require_block(folder: Path, domain: str, command: str) -> None:
    """Raise an error if the folder has a manifest that does not list a block; ``command`` makes the block."""
    manifest = read_manifest(folder)
    if manifest is not None and domain not in manifest.blocks:
        listed = ", ".join(sorted(manifest.blocks)) or "none yet"
        raise MissingData(f"{domain} was not made in {folder}; there: {listed}. Make it with `{command}`")
