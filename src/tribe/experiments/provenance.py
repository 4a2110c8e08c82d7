"""Where a result comes from: a hash of custom code, and the machine.

The hash of a custom component covers its file and all files that it imports, except the standard library and installed
packages. So a change of a helper in a neighbouring file counts, and a new version of a library does not.
"""

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch

from tribe._version import __version__

INSTALLED = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
LIBRARIES = {"site-packages", "dist-packages"}  # folders of installed packages, in any place


def code_of(*parts: Any, strict: bool = True) -> str | None:
    """A hash of the files of classes or functions, and of the files they import; None: all are part of tribe.

    Code that is in no file, as in a notebook, is refused; not ``strict``: it is left out.

    >>> from tribe.methods.tent import Tent
    >>> code_of(Tent) is None
    True
    """
    foreign = [part for part in parts if not _is_ours(part.__module__)]
    files = [(_file(part, strict), _package(part.__module__)) for part in foreign]
    return _hash((file, package) for file, package in files if file is not None)


def code_at(place: str) -> str | None:
    """The hash of a module, given by its name, or of a file."""
    if place.endswith(".py"):
        return _hash([(Path(place).resolve(), "")])
    file = None if _is_ours(place) else _own_file(place)
    return None if file is None else _hash([(file, _package(place))])


def coded(code: str | None) -> dict[str, str]:
    """The entry of a spec for a hash of code: none if the code is part of tribe."""
    return {} if code is None else {"code": code}


def is_own(part: Any) -> bool:
    """Whether a class or function is custom: neither part of tribe nor installed."""
    return not _is_ours(part.__module__) and _own_file(part.__module__) is not None


def _hash(starts: Iterable[tuple[Path, str]]) -> str | None:
    """The sha256 of one file; of several files, that of their sorted hashes, whatever their paths."""
    files, todo = set[Path](), list(starts)
    while todo:
        file, package = todo.pop()
        if file not in files:
            files.add(file)
            names = {whole for name in _imports(file, package) for whole in _with_parents(name)}
            found = ((name, _own_file(name)) for name in names if not _is_ours(name))
            todo += [(path, _package(name)) for name, path in found if path is not None]
    marks = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256("".join(marks).encode()).hexdigest() if len(marks) > 1 else next(iter(marks), None)


def _imports(file: Path, package: str) -> Iterator[str]:
    """The names that a file imports, anywhere in it: modules, and attributes of modules."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            if node.level and not package:
                continue  # such an import fails anyway
            name = importlib.util.resolve_name(name, package) if node.level else name
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _with_parents(name: str) -> Iterator[str]:
    """A module and the packages it is in, which are imported with it: a.b.c, a.b, a."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _file(part: Any, strict: bool) -> Path | None:
    try:
        file = Path(inspect.getfile(part)).resolve()
    except (TypeError, OSError):
        file = Path()
    if file.is_file():
        return file
    if strict:
        raise ValueError(
            f"the code of {part.__name__} is in no file, so a result could not say which version of it was used: put "
            "it into one"
        )
    return None


def _own_file(name: str) -> Path | None:
    """The file of a module, loaded or not; None: it is installed."""
    module = sys.modules.get(name)
    place = getattr(module, "__file__", None) if module is not None else getattr(_spec(name), "origin", None)
    file = Path(place).resolve() if isinstance(place, str) and place.endswith(".py") else None
    if file is None or not file.is_file() or LIBRARIES & set(file.parts) or INSTALLED & set(file.parents):
        return None
    return file


def _spec(name: str) -> ModuleSpec | None:
    """Where a module would be imported from; it is not imported."""
    package = name.rpartition(".")[0]
    try:
        if not package:
            return importlib.util.find_spec(name)
        parent = sys.modules.get(package)
        places = (
            getattr(parent, "__path__", None) if parent else getattr(_spec(package), "submodule_search_locations", None)
        )
        return PathFinder.find_spec(name, places) if places is not None else None
    except (ImportError, ValueError):
        return None


def _package(module: str) -> str:
    """The package that a module's relative imports refer to."""
    if (loaded := sys.modules.get(module)) is not None:
        return getattr(loaded, "__package__", None) or ""
    spec = _spec(module)
    return "" if spec is None else spec.parent or ""


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "tribe"


def machine(device: torch.device) -> dict[str, Any]:
    """The machine and the versions."""
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
