"""Runs the code of a page as a reader would: block by block, in one folder.

A block of Python with a title is a file. One without is run in this process, with the names of the blocks before it.
Lines of a shell block are commands, each a process. A block of text shows what the last command or block printed: its
lines must be among those that it printed, in this order, apart from numbers.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from places import ROOT
from processes import ended

FENCE = re.compile(r'^```(python|sh|text)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code: Python with a title is a file; text is what the block before it prints."""

    language: str
    title: str
    code: str


def blocks(page):
    """The blocks of a page below docs/, in the order in which a reader meets them."""
    return [Block(*found) for found in FENCE.findall((ROOT / "docs" / page).read_text())]


def run_page(page, folder, skip=()):
    """Run all blocks of a page in a folder, which is the working directory; `skip`: commands that a test cannot run."""
    scope, printed = {"__name__": "__main__"}, ""
    for language, title, code in blocks(page):
        if language == "python" and title:
            Path(folder, title).write_text(code)
        elif language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, page, "exec"), scope)
            printed = out.getvalue()
        elif language == "sh":
            lines = [line for line in code.replace("\\\n", " ").splitlines() if line not in skip]
            printed = "".join(run_command(line, folder) for line in lines)
        elif printed:
            missing = list(lines_not_printed(code, printed))
            assert not missing, f"{page} shows {missing[0]!r}, but this was printed:\n{printed}"


def run_command(line, folder):
    """Run `tribe ...` or `python FILE` in a folder; return what it printed."""
    program, *arguments = shlex.split(line)
    where = {"tribe": ("-m", "tribe"), "python": ()}[program]
    result = ended(*where, *arguments, cwd=folder, env={"COLUMNS": "200"})
    assert result.code == 0, f"{line}:\n{result.err}"
    return result.out


def lines_not_printed(shown, printed):
    """The lines of a text that are not in another one, in this order; numbers and runs of blanks count as equal."""
    rest = iter([pattern(line) for line in printed.splitlines()])
    for line in shown.splitlines():
        if pattern(line) not in rest:  # this goes on behind the last line that was found
            yield line


def pattern(line):
    return re.sub(r"\s+", " ", re.sub(r"[+-]?\d[\d.,]*", "0", line)).strip()
