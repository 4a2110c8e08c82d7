"""Run a real process and send it a signal at a chosen point, so that no test depends on timing.

The process sends the signal to itself, when it prints a given text or does something to a given file. It therefore
arrives at the same point on a slow machine and on a fast one. SIGINT has its default effect in the process, even where
the parent ignores it, as shells do for background jobs and `nohup`.

    ended = interrupted("-m", "tribe", "corrupt", "cifar10", when=Prints("fog@5: done"))
    assert ended.code == 130
    assert killed("-m", "tribe", "run", when=Touches("os.rename", "metrics.json", 3)).code == -signal.SIGKILL
"""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Prints(NamedTuple):
    """The point where the process has printed a text for the n-th time, to stdout or stderr."""

    text: str
    count: int = 1


class Touches(NamedTuple):
    """The point just before the n-th audit event of a name (open, os.rename, os.remove) on a path that holds a text."""

    event: str
    text: str
    count: int = 1


class Ended(NamedTuple):
    """How a process ended: its exit code (negative: a signal) and its output."""

    code: int
    out: str
    err: str


def ended(*arguments, when=None, number=signal.SIGINT, cwd=None, env=None):
    """Run `python *arguments` to its end; it sends signal `number` to itself at the point `when`, if there is one."""
    point = json.dumps([type(when).__name__, *when] if when else None)
    command = [sys.executable, __file__, str(int(number)), point, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    return Ended(done.returncode, done.stdout, done.stderr)


def interrupted(*arguments, when, **options):
    """Run `python *arguments` and press Ctrl-C at a point."""
    return ended(*arguments, when=when, number=signal.SIGINT, **options)


def killed(*arguments, when, **options):
    """Run `python *arguments` and kill it at a point; the test fails if the process never gets there."""
    result = ended(*arguments, when=when, number=signal.SIGKILL, **options)
    assert result.code == -signal.SIGKILL, f"it ended with {result.code} before {when}:\n{result.err}"
    return result


# -- in the process -------------------------------------------------------------------------------------------------


def watch_output(number, text, count):
    """Send this process a signal when it has printed a text."""
    for stream in (sys.stdout, sys.stderr):
        watch_stream(stream, number, text, count)


def watch_stream(stream, number, text, count):
    plain, seen, sent = stream.write, "", False

    def write(printed):
        nonlocal seen, sent
        length, seen = plain(printed), seen + printed
        if not sent and seen.count(text) >= count:
            sent = True
            stream.flush()
            signal.raise_signal(number)
        return length

    stream.write = write


def watch_files(number, event, text, count):
    """Send this process a signal before it does something to a file."""
    seen = 0

    def audit(name, args):
        nonlocal seen
        if name == event and any(text in os.fsdecode(a) for a in args if isinstance(a, str | bytes | os.PathLike)):
            seen += 1
            if seen == count:
                signal.raise_signal(number)

    sys.addaudithook(audit)


def main(number, point, kind, *rest):
    """Become `python kind *rest`, where kind is -m, -c or a script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if point := json.loads(point):
        how, *values = point
        {"Prints": watch_output, "Touches": watch_files}[how](int(number), *values)
    if kind == "-m":
        sys.path[0], sys.argv = os.getcwd(), list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0], sys.argv = str(Path(kind).parent), [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
