"""How commands print: results and JSON on stdout, errors and warnings as messages on stderr."""

import contextlib
import json
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, TextIO

import typer
from rich.console import Console
from rich.text import Text

from tribe.experiments.spec import plain
from tribe.experiments.statistics import spread
from tribe.fields import printable
from tribe.io.files import check_file


def fail(message: str) -> NoReturn:
    """Print an error message and exit with status 2."""
    print_message("error", message)
    raise typer.Exit(2)


def print_message(kind: Literal["error", "warning"], message: str, console: Console | None = None) -> None:
    """Print a message on stderr as one paragraph: messages of other libraries contain line breaks and indents."""
    colour = {"error": "bold red", "warning": "bold yellow"}[kind]
    text = Text.assemble((f"{kind}: ", colour), printable(" ".join(message.split())))
    (console or Console(stderr=True)).print(text, soft_wrap=True)


def shown(name: str) -> Text:
    """A name for a table or a line: neither markup nor control characters in it take effect."""
    return Text(printable(name))


def percent(shares: Sequence[float]) -> str:
    """Errors of some seeds in a cell of a table.

    >>> percent([0.25]), percent([0.1, 0.3]), percent([float("nan")])
    ('25.00', '20.00 ± 14.14', 'no labels')
    """
    return "no labels" if any(map(math.isnan, shares)) else str(spread([100 * share for share in shares]))


def print_json(data: Any) -> None:
    """Print JSON on stdout."""
    typer.echo(json.dumps(plain(data), indent=2, allow_nan=False))


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn an error that explains itself into a message, and exit with status 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))


def stdout_to_stderr() -> contextlib.AbstractContextManager[TextIO]:
    """Send to stderr what other code prints: programs read the results on stdout."""
    return contextlib.redirect_stdout(sys.stderr)


def describe_error(error: BaseException) -> str:
    """The type and the message of an error that custom code raised."""
    return f"{type(error).__name__}: {error}"


def describe_error_with_line(error: BaseException) -> str:
    """The type, the message and the line of an unexpected error."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{describe_error(error)}, at {last.filename}:{last.lineno}"


def check_json_file(file: str | None) -> None:
    """Raise OSError if --json FILE cannot be written: before the work, not after it."""
    if file not in (None, "-"):
        check_file(str(file))
