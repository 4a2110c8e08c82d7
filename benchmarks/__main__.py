"""``tribe bench`` with all its options and one more contender: TRIBE in the structure of the released code."""

import sys
from functools import partial

import torch
import typer

import tribe
from benchmarks.released import Released
from tribe.cli.commands.bench import bench
from tribe.experiments.bench.contenders import Contender, Workload, contender
from tribe.experiments.bench.measurement import METHODS

RELEASED = "released"


@contender(RELEASED)
def released(workload: Workload) -> Contender:
    """Three networks, one launch at a time, one stream."""
    if len(workload.images) > 1:
        raise ValueError(f"{RELEASED} runs one stream only; use `tribe bench` without it for several")
    if workload.images.dtype != torch.float32:
        raise ValueError(f"{RELEASED} keeps its statistics in the network's precision; use --precision float32 or tf32")
    reference = Released(workload.net, tribe.methods.create("tribe", classes=workload.classes))
    return Contender(partial(reference, workload.images[0]), reference.nbytes())


def main(argv: list[str]) -> None:
    """Call the command."""
    app = typer.Typer(add_completion=False)
    app.command(help=f"`tribe bench` with one more method, {RELEASED!r}, which is part of the default of --methods.")(
        bench
    )
    chosen = any(word.partition("=")[0] == "--methods" for word in argv)
    app([*argv, *([] if chosen else ["--methods", ",".join([*METHODS, RELEASED])])], prog_name="python -m benchmarks")


if __name__ == "__main__":
    main(sys.argv[1:])
