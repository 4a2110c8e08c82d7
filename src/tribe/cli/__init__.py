"""The command line. typer and rich are optional dependencies: nothing in the library imports this package.

To add a command, put a file into `commands/`; `commands/doctor.py` is an example.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

MISSING = "tribe's command line needs typer and rich: pip install 'tribe-tta[cli]'"
CLOSED_PIPE = 128 + getattr(signal, "SIGPIPE", 13)  # the exit status of programs that end at a closed pipe


def main() -> None:
    """Entry point of the ``tribe`` command."""
    try:
        from tribe.cli.commands import load_app

        app = load_app(sys.argv[1] if len(sys.argv) > 1 else None)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(MISSING)
    from tribe.core.precision import keep_memory

    keep_memory()
    with checked_stdout():
        app(prog_name="tribe")


class StdoutError(Exception):
    """Stdout cannot be written. Not an OSError: commands print those as errors of the files that they write."""


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """Run a command; where its output is lost, exit with an error message, or quietly where a pipe was closed."""
    if sys.stdout is None:  # the next file that is opened would get its number, and what C code prints
        _fail("stdout is closed: redirect it to a file, or to /dev/null")
    plain = sys.stdout
    sys.stdout = checked = _Stdout(plain)
    try:
        try:
            yield
        finally:
            checked.flush()
    except StdoutError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), plain.fileno())  # Python flushes again when it exits
        reason = error.__cause__
        if isinstance(reason, OSError) and reason.errno == errno.EPIPE:
            sys.exit(CLOSED_PIPE)
        _fail(str(error))
    finally:
        sys.stdout = plain


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


class _Stdout:
    """Stdout that raises `StdoutError`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise StdoutError(f"stdout could not be written: {error.strerror or error}") from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise StdoutError(f"stdout could not be written: {error.strerror or error}") from error
