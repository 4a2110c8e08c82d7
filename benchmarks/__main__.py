"""``tribe bench``, all its options, and one contender more: TRIBE in the structure of the released code."""

import sys
from functools import partial

import torch
import typer

import tribe
from benchmarks.released import Released
from tribe.bench import METHODS, Contender, Workload, contender
from tribe.cli.commands.bench import bench

RELEASED = "released"


@contender(RELEASED)
def released(workload: Workload) -> Contender:
    """Three networks, one launch at a time, one stream."""
    if len(workload.images) > 1:
        raise ValueError(f"{RELEASED} is a yardstick for one stream; `tribe bench` measures several without it")
    if workload.images.dtype != torch.float32:
        raise ValueError(f"{RELEASED} keeps its statistics in the network's precision: --precision float32 or tf32")
    yardstick = Released(workload.net, tribe.methods.create("tribe", classes=workload.classes))
    return Contender(partial(yardstick, workload.images[0]), yardstick.nbytes())


def main(argv: list[str]) -> None:
    """Call the command."""
    app = typer.Typer(add_completion=False)
    app.command(help=f"`tribe bench`, whose --methods may also be {RELEASED!r}, and are by default with it.")(bench)
    chosen = any(word.partition("=")[0] == "--methods" for word in argv)
    app([*argv, *([] if chosen else ["--methods", ",".join([*METHODS, RELEASED])])], prog_name="python -m benchmarks")


if __name__ == "__main__":
    main(sys.argv[1:])
