"""Set how long threads of OpenMP wait for one another before they sleep. It must run before torch loads.

A thread that has done its part of an operation runs in a loop until the others are done, by default for milliseconds.
On a shared core it takes the time from the very thread that it waits for: `tribe run` on a busy machine took five times
as long with two threads as with one. The command line lets threads sleep after a few microseconds, which costs nothing
on an idle machine (`python -m benchmarks.load`). As a library, tribe changes nothing: set the variable yourself.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE, TURNS = "GOMP_SPINCOUNT", "10000"  # of the loop, of GNU's OpenMP, which torch uses on Linux
OTHERS = ("OMP_WAIT_POLICY", VARIABLE)  # set by the user


def is_command(argv: Sequence[str]) -> bool:
    """Return whether this process is the command line, ``tribe`` or ``python -m tribe``; argv as in `sys.orig_argv`.

    >>> is_command(["python", "/usr/bin/tribe", "run"]), is_command(["python", "-m", "tribe"])
    (True, True)
    >>> is_command(["python", "tribe.py"]), is_command(["python", "-m", "pytest", "tribe"]), is_command([])
    (False, False, False)
    """
    words = argv[1:3]
    return (words[:1] != ["-m"] and any(Path(word).name == "tribe" for word in words[:1])) or words == ["-m", "tribe"]


def setting(argv: Sequence[str], environment: Mapping[str, str], is_loaded: bool) -> dict[str, str]:
    """Return the variables to set: none in another program, after torch was loaded, or if the user has set them."""
    decided = is_loaded or not is_command(argv) or any(name in environment for name in OTHERS)
    return {} if decided else {VARIABLE: TURNS}


os.environ.update(setting(sys.orig_argv, os.environ, "torch" in sys.modules))
