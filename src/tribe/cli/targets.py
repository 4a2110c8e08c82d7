"""Code of others, named on the command line: ``package.module:attribute`` or ``path/to/file.py:attribute``."""

import contextlib
import importlib
import operator
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from torch import nn

from tribe.cli.app import fail
from tribe.lab import modules
from tribe.registry import nearest


def load_target(target: str) -> nn.Module:
    """The module that ``package.module:attribute`` or ``file.py:attribute`` names, or makes when called."""
    try:
        found = find_target(target, "model", lambda value: isinstance(value, nn.Module) or callable(value))
    except ValueError as error:
        fail(str(error))
    if callable(found) and not isinstance(found, nn.Module):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            fail(f"{target} could not be called without arguments: {describe_error(error)}")
    if not isinstance(found, nn.Module):
        fail(f"{target} is no model: expected an nn.Module, or a callable that returns one; got {type(found).__name__}")
    return found


def find_target(target: str, kind: str, meant: Callable[[Any], bool]) -> Any:
    """What ``package.module:attribute`` or ``file.py:attribute`` names; an error lists what could be ``meant`` there.

    Args:
        target: as it was said.
        kind: of what is wanted, in words.
        meant: whether a value of the module could be wanted.
    """
    place, _, attribute = target.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{target!r} names no {kind}: expected package.module:attribute or path/to/file.py:attribute")
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"no file at {file}")
    try:
        module = from_package(place) if file is None else from_file(file)
    except (Exception, SystemExit) as error:  # importing runs code that may raise anything
        raise ValueError(f"importing {place} failed: {describe_error(error)}") from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        there = [name for name, value in vars(module).items() if not name.startswith("_") and meant(value)]
        raise ValueError(f"{place} has no attribute {attribute!r}: {nearest(attribute, there)}") from None


def stdout_to_stderr() -> contextlib.AbstractContextManager[TextIO]:
    """Send what code of others prints to stderr: stdout is for results, which programs read."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn the errors that say what is wrong with what was asked into a paragraph, and exit."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))


def from_file(path: Path) -> ModuleType:
    """Run a file as a module."""
    # A name for each file, so that a class finds its own.
    return modules.from_file(path, f"tribe_target_{zlib.crc32(str(path.resolve()).encode()):08x}")


def from_package(name: str) -> ModuleType:
    """Import a module by its name, as a script in the working directory would."""
    sys.path.insert(0, "")  # the working directory, which an installed command does not see by itself
    return importlib.import_module(name)


def describe_error(error: BaseException) -> str:
    """An error of foreign code, with its kind."""
    return f"{type(error).__name__}: {error}"


def describe_error_with_line(error: BaseException) -> str:
    """An error that foreign code did not mean to be read, with its kind and the line that raised it."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{describe_error(error)}, at {last.filename}:{last.lineno}"
