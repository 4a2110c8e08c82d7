"""What lies in a folder of corrupted images and how it was made: its ``made.json``.

The published archives carry none and are taken as complete. A folder that carries one holds the blocks it lists, and
what is not listed is not there, whatever the files look like.
"""

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tribe.datasets.files import MissingData, open_array

FILE = "made.json"
SCHEMA = 1


@dataclass(frozen=True)
class Block:
    """Every clean image under one corruption at one severity."""

    sha256: str  # of its bytes
    device: str  # where it was made; the last bit of a pixel may differ between devices and versions
    torch: str
    tribe: str


@dataclass(frozen=True)
class Made:
    """The making of a folder: what all of its blocks share, and the blocks by domain ("fog@5")."""

    dataset: str  # the clean set,
    images: int  # how many it has,
    clean: str  # and its sha256
    seed: int
    family: str  # of the corruptions
    rounding: str  # of pixels to bytes, "nearest" or "down"
    blocks: Mapping[str, Block] = field(default_factory=dict)

    def json(self) -> str:
        """The content of the file: the same for the same making."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=2, sort_keys=True) + "\n"

    def difference(self, other: "Made") -> str | None:
        """The first field in which another making differs, in words."""
        for name in ("dataset", "clean", "images", "seed", "family", "rounding"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{'clean set, sha256' if name == 'clean' else name} {here}, not {there}"
        return None


def read_made(folder: Path) -> Made | None:
    """How a folder was made; None for a published archive."""
    path = folder / FILE
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(text)
        if fields.pop("schema") != SCHEMA:
            raise ValueError("written by another version of tribe")
        blocks = {domain: Block(**block) for domain, block in fields.pop("blocks").items()}
        return Made(**fields, blocks=blocks)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove the folder {folder} and make it again") from error


def is_published(folder: Path) -> bool:
    """Whether files lie there that were not made here."""
    return not (folder / FILE).exists() and any(not entry.name.startswith(".") for entry in folder.iterdir())


def command(dataset: str, out: Path, *, corruptions: Iterable[str] = (), severities: Iterable[int] = ()) -> str:
    """The command that makes a corrupted data set from the clean one.

    >>> command("cifar10", Path("my data"), corruptions=("fog", "snow"), severities=(5,))
    "tribe corrupt cifar10 --severity 5 --corruptions fog,snow --out 'my data'"
    """
    options = {"severity": ",".join(map(str, severities)), "corruptions": ",".join(corruptions), "out": str(out)}
    words = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    return shlex.join(["tribe", "corrupt", dataset, *words])


def remedy(folder: Path, again: str) -> str:
    """What to do about a folder that lacks something; ``again`` is the command that makes it."""
    done = "unpack the published archive again" if is_published(folder) else f"make it with `{again}`"
    return f"The folder is incomplete: {done}"


def check_made(folder: Path, domain: str, again: str) -> None:
    """Refuse a block that the folder's making does not list."""
    made = read_made(folder)
    if made is not None and domain not in made.blocks:
        there = ", ".join(sorted(made.blocks)) or "none yet"
        raise MissingData(f"{domain} was not made in {folder}; there: {there}. Make it with `{again}`")


def recorded(folder: Path, domain: str) -> str | None:
    """The sha256 of a block, as its making recorded it; None for a published archive."""
    made = read_made(folder)
    return None if made is None else made.blocks[domain].sha256


@contextlib.contextmanager
def damaged(folder: Path, again: str) -> Iterator[None]:
    """What is said of a file that cannot be used ends with what to do about it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}. {remedy(folder, again)}") from error


def open_whole(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Memory-map images, and refuse a file that goes on after them."""
    array: Any = open_array(path, shape)
    expected, size = array.offset + array.nbytes, path.stat().st_size
    if size != expected:
        raise ValueError(f"{path} has {size} bytes; its header promises {expected}")
    return array  # type: ignore[no-any-return]
