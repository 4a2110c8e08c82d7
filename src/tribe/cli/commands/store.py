"""``tribe store``: check where `tribe serve` keeps its streams, back them up to one file, and restore them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tribe.cli.commands import app
from tribe.cli.options import AsJson
from tribe.cli.output import Bars, messages, print_json, print_message
from tribe.fields import printable, require

SHOWN = 10  # streams that are named

Place = Annotated[str, typer.Argument(help="The --data of `tribe serve`: a folder, or redis://HOST:PORT.")]


class Commands(TyperGroup):
    """`tribe store DIR` checks DIR: a word that is not a command of the group is a place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command first; options may come before a place."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["check", *args]
        return super().parse_args(ctx, args)


group = typer.Typer(cls=Commands, help="Check, back up and restore where `tribe serve` keeps its streams.")
app.add_typer(group, name="store")


@group.command()
def check(
    data: Place,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Streams go on from the states that a damaged ledger has lost.")
    ] = False,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Move these states to the folder set-aside; they are not read there.")
    ] = False,
) -> None:
    """Check whether all states that were stored are in the ledger: `tribe store DIR` does the same.

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


@group.command()
def backup(
    data: Place,
    file: Annotated[
        Path, typer.Argument(help="The file to write; an older one is replaced when the new one is whole.")
    ],
    as_json: AsJson = False,
) -> None:
    """Write the newest state of every stream to one file, while servers go on.

    Ends with 1 if a state cannot be read: the others are in the file.
    """
    with messages(redirect=False):
        from tribe.serve.store import backup as backups
        from tribe.serve.store import shown_place

        with _bar("backing up") as progress:
            done = backups.backup(data, file, progress)
    for stream, reason in [*done.older.items()][:SHOWN]:
        print_message("warning", f"{stream}: its newest state is damaged, the one before it is backed up ({reason})")
    for stream, reason in [*done.damaged.items()][:SHOWN]:
        print_message("error", f"{stream} is not in the backup: {reason}")
    if as_json:
        print_json({"file": str(file), "place": shown_place(data), **done._asdict()})
    else:
        words = f"{file}: {done.streams} streams of {shown_place(data)}, {done.bytes / 1e6:,.1f} MB"
        empty = f"; {done.stateless} have no state yet" if done.stateless else ""
        typer.echo(printable(words + empty))
    if done.damaged:
        raise typer.Exit(1)


@group.command()
def restore(
    file: Annotated[Path, typer.Argument(help="What `tribe store backup` wrote.")],
    data: Place,
    force: Annotated[bool, typer.Option("--force", help="Replace streams that are there with another state.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the streams of a backup to a folder or a Redis server, after all of the file was checked.

    Streams that are not in the backup stay. A server must not hold the streams: stop it, or end them.
    """
    with messages(redirect=False):
        from tribe.serve.store import backup as backups
        from tribe.serve.store import shown_place

        with _bar("restoring") as progress:
            done = backups.restore(file, data, force, progress)
    if as_json:
        print_json({"file": str(file), "place": shown_place(data), **done._asdict()})
        return
    equal = f"; {done.equal} were there already" if done.equal else ""
    typer.echo(printable(f"{shown_place(data)}: {done.streams} streams restored, {done.bytes / 1e6:,.1f} MB{equal}"))


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr."""
    with Bars(transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
