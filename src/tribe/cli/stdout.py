"""Output that cannot be written to stdout ends the command: with a message, or quietly where a pipe was closed."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

CLOSED_PIPE = 128 + getattr(signal, "SIGPIPE", 13)  # the exit status of programs that end at a closed pipe


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
    """Stdout, with its own kind of error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _named():
            return self._stream.write(text)

    def flush(self) -> None:
        with _named():
            self._stream.flush()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StdoutError(f"stdout could not be written: {error.strerror or error}") from error
