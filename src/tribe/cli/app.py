"""The application that commands add themselves to, and what they share: words for errors, JSON for programs."""

import json
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from tribe._version import __version__
from tribe.lab.spec import plain

app = typer.Typer(
    help="Keep a deployed image classifier accurate while the world in front of it changes.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Answer --version, and show the help to whoever asks for nothing."""
    if version:
        typer.echo(f"tribe {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def fail(message: str) -> NoReturn:
    """Say in one paragraph what is wrong with what was asked, and exit with 2."""
    say("error", message)
    raise typer.Exit(2)


def say(kind: Literal["error", "warning"], message: str, console: Console | None = None) -> None:
    """Say something in one paragraph on stderr: errors of others come with line breaks and indents."""
    colour = {"error": "bold red", "warning": "bold yellow"}[kind]
    words = Text.assemble((f"{kind}: ", colour), " ".join(message.split()))
    (console or Console(stderr=True)).print(words, soft_wrap=True)


def emit(data: Any) -> None:
    """Print JSON, and nothing else, on stdout."""
    typer.echo(json.dumps(plain(data), indent=2, allow_nan=False))
