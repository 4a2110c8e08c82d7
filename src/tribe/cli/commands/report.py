"""``tribe report``: all that lies in a folder of runs, on one page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tribe.cli.app import app
from tribe.cli.output import fail, print_json, print_message
from tribe.experiments import report as pages
from tribe.experiments.report.page import plural
from tribe.fields import printable


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of results, such as runs or results; searched in depth.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path("report.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Say what was found for programs.")] = False,
) -> None:
    """Show all results in a folder on one page: errors, curves, classes, calibration, cost, and how each was made.

    The page needs no network and no program but a browser. Damaged records are named, on the page and here, and make
    the exit status 1.
    """
    try:
        runs = pages.write(folder, out)
    except (ValueError, OSError) as error:
        fail(str(error))
    for path, reason in runs.damaged:
        print_message("warning", f"{path} is left out: {reason}")
    for path, reason in runs.repeated:
        print_message("warning", f"{path} {reason}")
    results = sum(len(row.played) for group in runs.groups for row in group.rows)
    if as_json:
        print_json(
            {
                "report": str(out),
                "records": results,
                "groups": [group.title for group in runs.groups],
                "damaged": dict(runs.damaged),
                "repeated": dict(runs.repeated),
            }
        )
    else:
        Console().print(
            printable(f"{plural(results, 'result')} in {plural(len(runs.groups), 'group')}: {out}"),
            soft_wrap=True,
            markup=False,
        )
    if runs.damaged:
        raise typer.Exit(1)
