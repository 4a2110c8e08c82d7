"""A result depends on code: of components that are not tribe's own a hash of their files tells which version it was.

What a component's file imports counts, too, as far as it is somebody's own: neither the standard library nor what is
installed beside tribe. So the helpers in the file next door count, and a new version of a library does not.
"""

import ast
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

INSTALLED = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}


def code_of(*parts: Any) -> str | None:
    """A hash of the files of classes or functions, and of what these import; None: all of them are tribe's.

    >>> from tribe.methods.tent import Tent
    >>> code_of(Tent) is None
    True
    """
    return _hash((_file(part), _package(part.__module__)) for part in parts if not _is_ours(part.__module__))


def code_at(place: str) -> str | None:
    """The same of a module that was loaded by its name, or of a file."""
    if place.endswith(".py"):
        return _hash([(Path(place).resolve(), "")])
    return None if _is_ours(place) else _hash([(_file(sys.modules[place]), _package(place))])


def is_own(part: Any) -> bool:
    """Whether a class or function is somebody's own: neither tribe's nor installed."""
    return not _is_ours(part.__module__) and _own_file(part.__module__) is not None


def _hash(starts: Iterable[tuple[Path, str]]) -> str | None:
    """Of one file its sha256, of several that of all of theirs, wherever they lie."""
    files, todo = set[Path](), list(starts)
    while todo:
        file, package = todo.pop()
        if file not in files:
            files.add(file)
            found = ((name, _own_file(name)) for name in _imports(file, package) if not _is_ours(name))
            todo += [(path, _package(name)) for name, path in found if path is not None]
    marks = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256("".join(marks).encode()).hexdigest() if len(marks) > 1 else next(iter(marks), None)


def _imports(file: Path, package: str) -> Iterator[str]:
    """The names of modules that a file imports, anywhere in it; among them some that are not modules but in one."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            if node.level and not package:
                continue  # which would not work either
            name = importlib.util.resolve_name(name, package) if node.level else name
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _file(part: Any) -> Path:
    try:
        file = Path(inspect.getfile(part)).resolve()
    except TypeError:
        file = Path()
    if not file.is_file():
        raise ValueError(
            f"the code of {part.__name__} is in no file, so that nobody could tell which version of it made a result: "
            "put it into one"
        )
    return file


def _own_file(name: str) -> Path | None:
    """The file of a module that is there, or could be imported by a plain name, unless it was installed."""
    module: Any = sys.modules.get(name)
    try:
        spec = None if module is not None or "." in name else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    place = getattr(module, "__file__", None) if module is not None else getattr(spec, "origin", None)
    file = Path(place).resolve() if isinstance(place, str) and place.endswith(".py") else None
    return file if file is not None and file.is_file() and not INSTALLED & set(file.parents) else None


def _package(module: str) -> str:
    return getattr(sys.modules.get(module), "__package__", None) or ""


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "tribe"
