"""``tribe store``: check where `tribe serve` keeps its streams, and go on after its ledger was damaged."""

from typing import Annotated

import typer

from tribe.cli.commands import app
from tribe.cli.output import messages
from tribe.fields import require


@app.command()
def store(
    data: Annotated[str, typer.Argument(help="The --data of `tribe serve`: a folder, or redis://HOST:PORT.")],
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Streams go on from the states that a damaged ledger has lost.")
    ] = False,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Move these states to the folder set-aside; they are not read there.")
    ] = False,
) -> None:
    """Check where streams are kept: whether all states that were stored are in the ledger.

    After a damage of the ledger, `tribe serve` refuses to start until one of the options says what to do. A state that
    is adopted waits for the next request of its stream; the ids of requests that it has learned are lost.
    """
    with messages(redirect=False):
        require(not (adopt and set_aside), "--adopt or --set-aside, not both", "both")
        from tribe.serve.store import open_store, shown_place

        opened = open_store(data, lost="adopt" if adopt else "set-aside" if set_aside else "refuse")
        try:
            streams = opened.count()
        finally:
            opened.close()
    moved = f"; {opened.unexplained} states were {'adopted' if adopt else 'set aside'}" if opened.unexplained else ""
    typer.echo(f"{shown_place(data)}: the ledger has {streams} streams, and explains all states{moved}")
