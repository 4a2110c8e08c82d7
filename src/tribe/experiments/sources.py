"""The source code that a result depends on: a digest of each component, kept beside the result.

The id of an experiment names a component of the package by its name and fields. If its file is edited in place, the id
stays the same and the number may not. So a result also keeps a digest of the source of its method, scenario, data set
and network. Where a digest differs from today's, the result is *stale*: it is computed again, or a table says so.

A digest covers the module of a component and the modules of the package that it imports, and theirs in turn, but not
the core (`CORE`). It is of the syntax tree without comments, docstrings and annotations: a new layout or a better
sentence makes no result stale. Others have the hash of their files in the id: `tribe.experiments.provenance`.
See docs/decisions/0029-source-digests.md.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tribe import methods
from tribe.data import datasets, models, scenarios
from tribe.data.datasets import optional
from tribe.experiments.experiment import COMPONENTS, Experiment
from tribe.experiments.spec import canonical, decode_fields
from tribe.norms.named import find_class

PACKAGE = "tribe"
CORE = (  # a change of its numbers fails the tests: goldens, slow loops, the contract
    *("tribe.core", "tribe.io", "tribe.registry", "tribe.fields", "tribe.knowledge", "tribe.experiments"),
    *(
        f"tribe.methods.{name}"
        for name in ("method", "stepping", "encoding", "building", "exporting", "pipeline", "naming")
    ),
    *(f"tribe.datasets.{name}" for name in ("locations", "manifest", "fingerprint", "array_files", "image_files")),
    *(f"tribe.models.{name}" for name in ("weights", "pickled", "architectures")),
    *("tribe.corruptions.families", "tribe.corruptions.pillow", "tribe.filters.filter"),
)
LOADED = time.time()  # when this process had loaded the components, which are imported above
UNSEEN = ("annotation", "returns", "type_comment", "type_params", "type_ignores", "kind", "ctx")  # fields of nodes


def sources_of(experiment: Experiment) -> dict[str, str]:
    """A digest for each component of an experiment whose code is in the package, by "method", "scenario" and so on."""
    found = {role: digest_of(*_parts(experiment, role)) for role in COMPONENTS}
    return {role: digest for role, digest in found.items() if digest is not None}


def changed(code: Mapping[str, Any] | None, experiment: Experiment) -> list[str]:
    """The components whose source differs from that of a result, given as its environment has it; None: unknown."""
    today = sources_of(experiment) if code else {}
    return [role for role, digest in today.items() if (code or {}).get(role, digest) != digest]


def files_of(experiment: Experiment) -> dict[str, str]:
    """File and class of each custom component, such as "mine.py:Mine", by "method" and so on, and "rule": a norm rule.

    Without the folder, which is private; the digest of the code is in the spec.
    """
    rule = find_class(experiment.method.fields.get("rule"))
    found = {}
    for role in COMPONENTS:
        for part in _parts(experiment, role) if getattr(experiment, role).code is not None else ():
            if isinstance(part, type) and part.__module__.partition(".")[0] != PACKAGE:
                place = f"{Path(inspect.getfile(part)).name}:{part.__qualname__}"
                found["rule" if part is rule else role] = place
    return found


def digest_of(*parts: Any) -> str | None:
    """16 digits of a hash of the source of classes or functions of the package; None: there are none.

    >>> from tribe.methods.tent import Tent
    >>> len(digest_of(Tent)), digest_of(int) is None
    (16, True)
    """
    modules = sorted({module for part in parts for start in _homes(part) for module in _reached(start)})
    if not modules:
        return None
    return hashlib.sha256("".join(_digest(module) for module in modules).encode()).hexdigest()[:16]


def code_digest(source: bytes) -> str:
    """The hash of a file's syntax tree: the same for every layout, comment, docstring and version of Python.

    >>> code_digest(b"x = f(1)  # why") == code_digest(b"x = f( 1 )"), code_digest(b"x = 1") == code_digest(b"x = 2")
    (True, False)
    """
    return hashlib.sha256("".join(_dump(ast.parse(source))).encode()).hexdigest()


@functools.cache
def commit() -> dict[str, Any]:
    """The commit of the checkout that the package is in, and whether its files are as committed; empty: none."""
    folder = Path(__file__).parents[1]
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return {"commit": head, "clean": not _git(folder, "status", "--porcelain", "--", ".")} if head else {}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(folder: Path, *words: str) -> str:
    options = {"capture_output": True, "text": True, "check": True, "timeout": 10}
    return str(subprocess.run(["git", "-C", str(folder), *words], **options).stdout).strip()  # type: ignore[call-overload]


# -- which classes ----------------------------------------------------------------------------------------------------


def _parts(experiment: Experiment, role: str) -> tuple[Any, ...]:
    """The classes and functions of a component; none for one that is unknown here."""
    spec = getattr(experiment, role)
    try:
        if role == "method":
            rule = find_class(spec.fields.get("rule"))
            return *methods.classes_of(spec.name), *(() if rule is None else (rule,))
        if role == "scenario":
            return (scenarios.get(spec.name),)
        if role == "model":
            return (type(models.architecture(spec.name)),)
        return datasets.get(spec.name), *_functions(spec.name, canonical(spec.fields))
    except (ValueError, ImportError):
        return ()


@functools.lru_cache(maxsize=256)
def _functions(dataset: str, fields: str) -> tuple[Any, ...]:
    """The functions that a data set corrupts its images with."""
    try:
        built = datasets.create(dataset, **decode_fields(json.loads(fields)))
        return tuple(optional(built, "functions"))
    except (ValueError, TypeError, OSError, ImportError):  # it needs a folder that is not here
        return ()


# -- which modules ----------------------------------------------------------------------------------------------------


def _homes(part: Any) -> Iterator[str]:
    """The modules of the package that define a function, or a class and its bases, without the core."""
    for cls in part.__mro__ if isinstance(part, type) else (part,):
        if _counts(cls.__module__):
            yield cls.__module__


def _counts(module: str) -> bool:
    """Whether a module is part of the package and not of its core; a package only hands names on."""
    if module.partition(".")[0] != PACKAGE or any(module == core or module.startswith(f"{core}.") for core in CORE):
        return False
    return not hasattr(sys.modules.get(module) or importlib.import_module(module), "__path__")


@functools.cache
def _reached(start: str) -> frozenset[str]:
    """A module, and all modules that count which it imports, and theirs in turn."""
    found, todo = set[str](), [start]
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += [other for other in _imported(module) if _counts(other)]
    return frozenset(found)


def _imported(module: str) -> Iterator[str]:
    """The modules of the package that a module uses: where the names that it imports are defined."""
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            place = importlib.import_module(str(node.module))
            for alias in node.names:
                value = getattr(place, alias.name, None)
                home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
                yield home if isinstance(home, str) and home.partition(".")[0] == PACKAGE else str(node.module)


def _file(module: str) -> Path:
    return Path(str(importlib.import_module(module).__file__))


def _source(module: str) -> bytes:
    return _file(module).read_bytes()


@functools.cache
def _digest(module: str) -> str:
    """The digest of a module's file; another one if the file was edited after this process loaded the module."""
    changed_at = _file(module).stat().st_mtime
    edited = LOADED < changed_at <= time.time()  # a time to come says nothing: another clock wrote it
    return code_digest(_source(module)) + "edited" * edited


def _dump(node: Any) -> Iterator[str]:
    """A syntax tree as text; what is empty is left out, since versions of Python differ in it."""
    if isinstance(node, ast.AST):
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            if name not in UNSEEN and value not in (None, []):
                yield f"{name}="
                yield from _dump(_without_docstring(node, value) if name == "body" else value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _dump(item)
            yield ","
        yield "]"
    else:
        yield repr(node)


def _without_docstring(node: ast.AST, body: Any) -> Any:
    holds = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return body[1:] if holds and ast.get_docstring(node, clean=False) is not None else body  # type: ignore[arg-type]
