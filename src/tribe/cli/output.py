"""Print results and JSON on stdout, errors and warnings as messages on stderr."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, Literal, NoReturn, TextIO

import typer
from rich.console import Console
from rich.text import Text

from tribe.experiments.spec import plain
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
    """Return a name for a table or a line: neither markup nor control characters in it take effect."""
    return Text(printable(name))


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
    """Return the type and the message of an error that custom code raised."""
    return f"{type(error).__name__}: {error}"


def check_json_file(file: str | None) -> None:
    """Raise OSError if --json FILE cannot be written: before the work, not after it."""
    if file not in (None, "-"):
        check_file(str(file))
