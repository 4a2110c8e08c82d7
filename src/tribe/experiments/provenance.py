"""Where a result comes from: the machine, the versions, the commit, and the files of the components.

The id of an experiment holds a hash of custom code: of its file, and of the files that it imports, except the standard
library and installed packages. A component of the package is named by its name and fields alone, so its result also
keeps the digest of the component's own file. Where that differs from today's, the result is *stale*.
"""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tribe._version import __version__

INSTALLED = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
LIBRARIES = {"site-packages", "dist-packages"}  # folders of installed packages, in any place


def code_of(*parts: Any, strict: bool = True) -> str | None:
    """Return a hash of the files of custom classes or functions; None if all are part of tribe.

    With ``strict``, code that is in no file, as in a notebook, is refused. Otherwise it is left out.

    >>> from tribe.methods.tent import Tent
    >>> code_of(Tent) is None
    True
    """
    files = [(_file_of(part), part) for part in parts if not is_ours(part)]
    if strict and (lost := [part for file, part in files if file is None]):
        raise ValueError(
            f"the code of {lost[0].__name__} is in no file, so a result could not name its version: put it into one"
        )
    return _hash([file for file, _ in files if file is not None]) if files else None


def code_at(place: str) -> str | None:
    """Return the hash of a module, given by its name or its file; None if it is installed or part of tribe."""
    if place.endswith(".py"):
        return _hash([Path(place).resolve()])
    origin = getattr(importlib.util.find_spec(place), "origin", None) or ""
    file = Path(origin).resolve()
    return None if place.partition(".")[0] == "tribe" or _is_installed(file) else _hash([file])


def is_ours(part: Any) -> bool:
    """Return whether a class or function is part of tribe."""
    return str(part.__module__).partition(".")[0] == "tribe"


def is_custom(part: Any) -> bool:
    """Return whether a class or function is neither part of tribe nor installed."""
    file = None if is_ours(part) else _file_of(part)
    return file is not None and not _is_installed(file)


def file_digest(part: Any) -> str | None:
    """Return 16 digits of the hash of the file of a class or function; None if it is in no file."""
    file = _file_of(part)
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _file_of(part: Any) -> Path | None:
    try:
        file = Path(inspect.getfile(part)).resolve()
    except (TypeError, OSError):
        return None
    return file if file.is_file() else None


def _is_installed(file: Path) -> bool:
    return bool(LIBRARIES & set(file.parts) or INSTALLED & set(file.parents))


def _hash(starts: Iterable[Path]) -> str | None:
    """Return the sha256 of one file; of several files, that of their sorted hashes, whatever their paths."""
    files = {file for start in starts for file in _with_imports(start)}
    marks = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256("".join(marks).encode()).hexdigest() if len(marks) > 1 else next(iter(marks), None)


def _with_imports(file: Path) -> set[Path]:
    """Return a file and the files that it imports, anywhere in it, which are neither installed nor part of tribe."""
    root = file.parent
    while (root / "__init__.py").is_file():  # a file in a package: relative imports refer to it
        root = root.parent
    own = [place for place in map(Path, sys.path) if not _is_installed(place.resolve() / "module")]
    finder = _CustomFinder([str(root), str(file.parent), *map(str, own)], excludes=["tribe"])
    with contextlib.suppress(SyntaxError):
        if root == file.parent:
            finder.run_script(str(file))
        else:
            finder.import_hook(".".join(file.relative_to(root).with_suffix("").parts))
    places = (getattr(module, "__file__", None) for module in finder.modules.values())
    return {file, *(Path(place).resolve() for place in places if place)}


class _CustomFinder(ModuleFinder):
    """Finds modules; a folder without ``__init__.py`` has no file, so its name counts as not found."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        try:
            return super().find_module(name, path, parent)
        except AttributeError:
            raise ImportError(name) from None


def from_file(path: Path, name: str) -> ModuleType:
    """Run a file as the module ``name``; not the file's own name, which a loaded module may have."""
    path = path.absolute()  # in tracebacks, and for `inspect`
    sys.path.insert(0, str(path.resolve().parent))  # a script can import its neighbours, as when Python runs it
    module = sys.modules[name] = ModuleType(name)  # dataclasses look their module up there
    module.__file__ = str(path)
    # From the source: a cache of bytecode misses an edit of the same size within the same second.
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return module


@functools.cache
def commit() -> dict[str, Any]:
    """Return the commit of the checkout that the package is in, and whether its files are as committed; else {}."""

    def git(*words: str) -> str:
        folder = Path(__file__).parents[1]
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": head, "clean": not changes} if head else {}


def machine(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "tribe": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
