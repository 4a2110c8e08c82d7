"""``tribe reproduce`` and ``tribe train``: forward to ``reproduction/`` of the repository (not in the wheel)."""

import importlib
import sys
from pathlib import Path
from typing import Any

import typer

import tribe
from tribe.cli.commands import app
from tribe.cli.output import fail

PACKAGE = "reproduction"
FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@app.command("reproduce", context_settings=FORWARD, add_help_option=False)
def reproduce(context: typer.Context) -> None:
    """Reproduce a table or a figure of the paper: run what is missing, then compare."""
    find_commands()(["reproduce", *context.args], prog_name="tribe")


@app.command("train", context_settings=FORWARD, add_help_option=False)
def train(context: typer.Context) -> None:
    """Train a source network; write its weights and a card."""
    find_commands()(["train", *context.args], prog_name="tribe")


def find_commands() -> Any:
    """Import the commands of ``reproduction/`` in the working folder, or beside an editable installation."""
    for root in (Path.cwd(), Path(tribe.__file__).resolve().parents[2]):
        if (root / PACKAGE / "cli.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return importlib.import_module(f"{PACKAGE}.cli").app
    fail(
        f"no folder {PACKAGE}/ here: it is in the source repository of tribe, not in the installed package. "
        f"Clone the repository, or unpack the source archive, and call this command there"
    )
