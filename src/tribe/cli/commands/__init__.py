"""Commands: each file adds its commands to the application with ``@app.command()``."""

import importlib
import keyword
import pkgutil
from typing import Annotated

import typer

from tribe._version import __version__

app = typer.Typer(
    help="Keep a deployed image classifier accurate while the world in front of it changes.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Print the version for --version, and the help without a command."""
    if version:
        typer.echo(f"tribe {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def load_app(command: str | None = None) -> typer.Typer:
    """Import the file that is named like a command, or all files; return the application.

    The file of a command whose name is a keyword of Python ends in an underscore.
    """
    files = [module.name for module in pkgutil.iter_modules(__path__)]
    named = f"{command}_" if keyword.iskeyword(command or "") else command
    for file in [named] if named in files else files:
        importlib.import_module(f"{__name__}.{file}")
    return app
