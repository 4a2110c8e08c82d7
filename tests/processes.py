"""Run a real process and send it a signal at a chosen point, so that no test depends on timing.

The process sends the signal to itself, when it prints a given text or does something to a given file. It therefore
arrives at the same point on a slow machine and on a fast one. SIGINT has its default effect in the process, even where
the parent ignores it, as shells do for background jobs and `nohup`.

    ended = interrupted("-m", "tribe", "corrupt", "cifar10", when=Prints("fog@5: done"))
    assert ended.code == 130
    assert killed("-m", "tribe", "run", when=Touches("os.rename", "record-0.npz", 3)).code == -signal.SIGKILL

To import torch takes longer than most of these commands. A server therefore imports it once, with all of tribe, and
forks a process for each command. The process runs the command as Python does, up to its exit status. It differs from a
cold start in what is imported, so tests of imports start Python themselves. Not forked from the tests' own process,
whose threads a child would lack.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
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


class Process:
    """A process that runs `python *arguments`, forked by the server; `end` waits for it."""

    def __init__(
        self,
        *arguments,
        when=None,
        number=signal.SIGINT,
        cwd=None,
        env=None,
        stdin=None,
        stdout=None,
        stderr=None,
        limits=None,
        seconds=900,
    ):
        point = json.dumps([type(when).__name__, *when] if when else None)
        request = {
            "arguments": [str(int(number)), point, *map(str, arguments)],
            "cwd": os.path.abspath(cwd or "."),
            "env": {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            "limits": limits or {},  # of the module `resource`, by name
            "seconds": seconds,  # after which a process that waits for nothing is ended; 0: never
        }
        self.kept = [None if given else tempfile.TemporaryFile() for given in (stdout, stderr)]  # noqa: SIM115
        self.reply, reply = os.pipe()
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            printed = [given or kept for given, kept in zip((stdout, stderr), self.kept, strict=True)]
            files = (file, *printed, reply, *([] if stdin is None else [stdin]))
            socket.send_fds(server(), [b"."], [f if isinstance(f, int) else f.fileno() for f in files])
        os.close(reply)
        self.reply = open(self.reply)  # noqa: SIM115
        self.pid = int(self.reply.readline())

    def end(self):
        """Wait for the process, and return its exit code (negative: a signal) and what it printed."""
        with self.reply:
            code = int(self.reply.read())
        return Ended(code, *map(content, self.kept))


def content(file):
    """What was printed into a temporary file, if there is one; it is removed."""
    if file is None:
        return ""
    with file:
        file.seek(0)
        # Triton complains at exit of references that it still holds.
        return re.sub(r"(?ms)^nanobind: leaked.*", "", file.read().decode())


def ended(*arguments, **options):
    """Run `python *arguments` to its end; it sends signal `number` to itself at the point `when`, if there is one."""
    return Process(*arguments, **options).end()


def interrupted(*arguments, when, **options):
    """Run `python *arguments` and press Ctrl-C at a point."""
    return ended(*arguments, when=when, number=signal.SIGINT, **options)


def killed(*arguments, when, **options):
    """Run `python *arguments` and kill it at a point; the test fails if the process never gets there."""
    result = ended(*arguments, when=when, number=signal.SIGKILL, **options)
    assert result.code == -signal.SIGKILL, f"it ended with {result.code} before {when}:\n{result.err}"
    return result


LIMIT = """
import resource
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
most = taken + {megabytes} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # a loop without an end is killed
"""
LIBRARY = """
import sys
import torch, tribe, reproduction.train
"""


def run_limited(program, *arguments, megabytes=512, imports=LIBRARY):
    """Run a program with ``sys.argv[1:]`` = arguments, after its imports, with so much memory left."""
    return ended("-c", imports + LIMIT.format(megabytes=megabytes) + program, *arguments)


@functools.cache
def server():
    """The socket of this process's server, which ends when the socket closes."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, __file__, str(theirs.fileno())]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], **quiet)
    theirs.close()
    atexit.register(stop, ours, process)
    return ours


def stop(ours, process):
    ours.close()
    process.wait()


# -- in the server ----------------------------------------------------------------------------------------------------


OPTIONAL = ("grpc", "google", "ray")  # packages that `make test` does not install


def import_all():
    """Import what the commands need: nothing is computed, so no threads are started."""
    importlib.import_module("torch._dynamo")  # torch imports it when the first network is built
    import tribe

    for module in pkgutil.walk_packages(tribe.__path__, "tribe."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # an optional package: tests that need it are skipped
                if error.name.partition(".")[0] not in OPTIONAL:
                    raise


def serve(control):
    """Fork a process for each request; in that process, return its arguments.

    It has a parent of its own, which tells the test how it ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # a process that ends need not look through all that was imported
    while True:
        asked, fds, *_ = socket.recv_fds(control, 1, 5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # no zombies
        if not asked:
            os._exit(0)
        if os.fork():
            for fd in fds:
                os.close(fd)
            continue
        request, out, err, reply, *given = fds
        control.close()
        if child := os.fork():
            for fd in (out, err, *given):
                os.close(fd)
            os.write(reply, f"{child}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(reply, str(code).encode())
            os._exit(0)
        os.close(reply)
        return prepare(request, {1: out, 2: err, **dict(enumerate(given))})


def prepare(request, standard):
    """Take over the surroundings of a process: its input and output, folder, environment and limits."""
    with open(request) as file:
        asked = json.load(file)
    for number, fd in standard.items():
        os.dup2(fd, number)
        os.close(fd)
    signal.alarm(asked["seconds"])
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    for name, most in asked["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    return asked["arguments"]


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
    import_all()
    main(*serve(socket.socket(fileno=int(sys.argv[1]))))
