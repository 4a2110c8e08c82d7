"""The application that every command adds itself to."""

import warnings
from typing import Annotated

import typer

from tribe._version import __version__
from tribe.fields import printable

app = typer.Typer(
    help="Keep a deployed image classifier accurate while the world in front of it changes.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def printable_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning in one line, as it is printed on stderr."""
    return printable(f"{filename}:{lineno}: {category.__name__}: {message}") + "\n"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Print the version for --version, and the help without a command."""
    warnings.formatwarning = printable_warning  # a warning may name a file
    if version:
        typer.echo(f"tribe {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
