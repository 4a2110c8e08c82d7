"""A child process that reads one damaged file after another, with limits, and the parent's side of it.

The child measures processor time and memory itself. The parent ends a child that does not answer, and starts another
one after a crash.
"""

import contextlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

from processes import Process

SECONDS = 5  # of processor time for a file
WALL = 60  # seconds after which a child that waits for something is ended
MEMORY = 1 << 30  # bytes above those of the child without a file
DOCUMENTED = (ValueError, OSError, ImportError)


class Outcome(NamedTuple):
    """How reading a file ended."""

    kind: str  # "read", "refused", or what is wrong
    text: str  # a digest of the contents, the message of the error, or the details

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("read", "refused")


class Worker:
    """A child process; a context manager."""

    def __init__(self):
        self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        tests = Path(__file__).resolve().parents[1]
        (stdin, questions), (answers, stdout) = os.pipe(), os.pipe()
        self.process = Process("-m", "fuzz.worker", cwd=tests, stdin=stdin, stdout=stdout, seconds=0)
        os.close(stdin)
        os.close(stdout)
        self.questions = os.fdopen(questions, "w")
        self.answers = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(os.fdopen(answers), self.answers), daemon=True).start()

    @staticmethod
    def _listen(stdout, answers):
        with stdout:
            for line in stdout:
                answers.put(line)
        answers.put(None)

    def stop(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(BrokenPipeError):
                self.questions.close()
            code = self.process.end().code
            self.process = None
            return code
        return None

    def read(self, reader: str, folder: Path) -> Outcome:
        """Read the file of a reader in a folder."""
        if self.process is None:
            self.start()
        self.questions.write(json.dumps([reader, str(folder)]) + "\n")
        self.questions.flush()
        try:
            answer = self.answers.get(timeout=WALL)
        except queue.Empty:
            self.stop()
            return Outcome("hang", f"no answer in {WALL} seconds")
        if answer is None:
            code = self.stop()
            return Outcome("crash", f"the process ended with {code} (-11: memory fault, -24: over {SECONDS} seconds)")
        outcome = Outcome(*json.loads(answer))
        if outcome.kind == "memory":
            self.stop()
        return outcome


# -- in the child -----------------------------------------------------------------------------------------------------


def used_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_memory():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def limit_address_space():
    """Let no file take the memory of the whole machine: three times the limit above what is mapped now."""
    if sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 3 * MEMORY, resource.RLIM_INFINITY))


def chain(error):
    """An error and those that it was raised from."""
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def outcome(reader, folder: Path) -> Outcome:
    """Read a file in this process."""
    begun = used_seconds()
    resource.setrlimit(resource.RLIMIT_CPU, (int(begun) + SECONDS + 2, resource.RLIM_INFINITY))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = Outcome("read", reader.read(folder))
    except DOCUMENTED as error:
        result = Outcome("refused", f"{type(error).__name__}: {error}")
        if any(isinstance(part, MemoryError) for part in chain(error)):
            result = Outcome("memory", f"it wanted more than there is, and said so: {error}")
        elif folder.name not in str(error):
            result = Outcome("unnamed", f"the message does not name the file: {traceback.format_exc()}")
    except MemoryError:
        result = Outcome("memory", traceback.format_exc())
    except BaseException as error:
        result = Outcome(f"undocumented {type(error).__name__}", traceback.format_exc())
    if not result.is_failure and used_seconds() - begun > SECONDS:
        return Outcome("slow", f"{used_seconds() - begun:.1f} seconds of processor time; at most {SECONDS} are allowed")
    return result


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reader prints is not an answer
    import torch

    from fuzz.broken import BrokenReader
    from fuzz.readers import READERS

    torch.set_num_threads(1)
    limit_address_space()
    baseline = peak_memory()
    for line in sys.stdin:
        name, folder = json.loads(line)
        before = peak_memory()
        broken = name.removeprefix("broken ")
        result = outcome(READERS[name] if broken == name else BrokenReader(broken), Path(folder))
        peak = peak_memory()
        if not result.is_failure and peak > max(before, baseline + MEMORY):
            result = Outcome("memory", f"{(peak - baseline) >> 20} MiB; at most {MEMORY >> 20} are allowed")
        out.write(json.dumps(result) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
