"""A model named on the command line: ``package.module:attribute`` or ``path/to/file.py:attribute``."""

import importlib
import operator
import sys
import zlib
from pathlib import Path
from types import ModuleType

from torch import nn

from tribe import modules
from tribe.cli.app import fail
from tribe.registry import nearest


def load_target(target: str) -> nn.Module:
    """The module that ``package.module:attribute`` or ``file.py:attribute`` names, or makes when called."""
    place, _, attribute = target.rpartition(":")
    if not place or not attribute:
        fail(f"{target!r} names no model: expected package.module:attribute or path/to/file.py:attribute")
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        fail(f"no file at {file}")
    try:
        module = from_package(place) if file is None else from_file(file)
    except (Exception, SystemExit) as error:  # importing runs code that may raise anything
        fail(f"importing {place} failed: {told(error)}")
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError:
        fail(f"{place} has no attribute {attribute!r}: {nearest(attribute, _models(module))}")
    if callable(found) and not isinstance(found, nn.Module):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            fail(f"{target} could not be called without arguments: {told(error)}")
    if not isinstance(found, nn.Module):
        fail(f"{target} is no model: expected an nn.Module, or a callable that returns one; got {type(found).__name__}")
    return found


def from_file(path: Path) -> ModuleType:
    """Run a file as a module."""
    # A name for each file, so that a class finds its own.
    return modules.from_file(path, f"tribe_target_{zlib.crc32(str(path.resolve()).encode()):08x}")


def from_package(name: str) -> ModuleType:
    """Import a module by its name, as a script in the working directory would."""
    sys.path.insert(0, "")  # the working directory, which an installed command does not see by itself
    return importlib.import_module(name)


def _models(module: ModuleType) -> list[str]:
    """The names in a module that could be meant."""
    return [n for n, v in vars(module).items() if not n.startswith("_") and (isinstance(v, nn.Module) or callable(v))]


def told(error: BaseException) -> str:
    """An error of foreign code, with its kind."""
    return f"{type(error).__name__}: {error}"
