"""All results in a folder on one page that opens from disk, with the spec behind every number.

    tribe.experiments.report.write("runs", "report.html")       # or: tribe report runs -o report.html

It reads the results of `tribe run` and `tribe reproduce`, with records or without, and records of `Record.save`. The
page loads nothing, and works without JavaScript, on paper, a phone or a wide screen.
"""

from os import PathLike
from pathlib import Path

from tribe.experiments.report.groups import Runs, collect
from tribe.experiments.report.page import render
from tribe.io.files import check_file, write_atomically

ENDINGS = (".html", ".htm")


def write(folder: str | PathLike[str], path: str | PathLike[str]) -> Runs:
    """Write the page about all results under ``folder``, atomically, and return them.

    A damaged record is named on the page and in ``Runs.damaged``. The same records make the same bytes.
    """
    if Path(path).suffix.lower() not in ENDINGS:  # a mistyped command must not cost a record
        raise ValueError(f"a report ends in {' or '.join(ENDINGS)}; got {path}")
    check_file(path)
    runs = collect(folder)
    write_atomically(path, render(runs).encode())
    return runs
