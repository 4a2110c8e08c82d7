"""Print tables in the terminal, or into a file."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console

from tribe.cli.output import WIDE, wide_console
from tribe.experiments.spec import plain
from tribe.io.files import write_atomically


class OutputTarget(NamedTuple):
    """The format of the output, and the file that it goes to; None: the terminal."""

    style: str
    path: Path | None

    def write(self, text: str) -> None:
        """Write text."""
        if self.path is None:
            typer.echo(text, nl=False)
        else:
            write_atomically(self.path, text.encode())

    def write_json(self, data: Any) -> None:
        """Write data as JSON."""
        self.write(json.dumps(plain(data), indent=2, allow_nan=False) + "\n")

    def draw(self, draw: Callable[[Console], None]) -> None:
        """Draw tables: in the width of the terminal, or wide where the output goes elsewhere."""
        if self.path is None:
            draw(wide_console())
        else:
            console = Console(width=WIDE, record=True, file=io.StringIO())
            draw(console)
            self.write(console.export_text())
