"""Time the path of a newcomer, from a clone to a new method in a table of the paper: ``python -m website.newcomer``.

It does what the pages Five minutes and Add a method say, in a temporary folder, without the main job: clone, install,
and every command of the tutorial. With ``--site`` it also builds the site there. Reading and writing are not in it.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from website.code_blocks import blocks
from website.links import ROOT

PAGE = "tutorials/add-a-method.md"


def timed(command: str, folder: Path, environment: dict[str, str]) -> None:
    """Run a command and print what it took: seconds on the clock, and seconds of processors."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{command}: {done.stderr or done.stdout}")
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{wall:7.1f} s  {busy:7.1f} s of processors  load {os.getloadavg()[0]:4.1f}  {command[:90]}", flush=True)


def main() -> None:
    """Follow the path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as place:
        here, clone, start = Path(place), Path(place) / "tribe", time.monotonic()
        timed(f"git clone --quiet {ROOT} tribe", here, environment)
        timed("make .venv/.installed", clone, environment)
        installed = {**environment, "PATH": f"{clone / '.venv/bin'}{os.pathsep}{environment['PATH']}"}
        for block in blocks(PAGE):
            if block.language == "python":
                (here / block.title).write_text(block.code)
            for command in block.commands() if block.language == "sh" else ():
                timed(command, here, installed)
        print(f"{time.monotonic() - start:7.1f} s  from the clone to the table")
        if "--site" in sys.argv:
            timed("make site", clone, environment)


if __name__ == "__main__":
    main()
