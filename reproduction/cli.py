"""The commands of this folder; ``tribe reproduce`` and ``tribe train`` call them."""

import typer

from reproduction.command import reproduce_artifact
from reproduction.train.command import train

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
app.command("reproduce")(reproduce_artifact)
app.command("train")(train)
