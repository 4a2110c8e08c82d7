"""The commands of this folder; ``tribe reproduce`` and ``tribe train`` call them."""

import typer

from reproduction.command import reproduce
from reproduction.train import train_command

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
app.command("reproduce")(reproduce)
app.command("train")(train_command)
