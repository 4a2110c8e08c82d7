"""Real processes that use a store at the same time are stopped, continued and killed, and no write is stale or torn.

The clock of leases is a file that the test sets, so that no test waits for a lease to end.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from processes import Process, Touches
from stores import KINDS, fast_folder, open_kind
from tribe.serve.store import StoreDown, Write

WRITER = """
import json, sys
from pathlib import Path
from tribe.serve.store import Fenced, Write
from tribe.serve.store.redis import RedisStore
from tribe.serve.store.sqlite import SqliteStore

place, options, folder, owner = json.loads(sys.argv[1])
now = lambda: float((Path(folder) / "clock").read_text())
cls = RedisStore if "prefix" in options else SqliteStore
store = cls(place, now=now, **options)
for turn, _ in enumerate(sys.stdin):
    claim = store.claim("cam", f"{owner}-{turn}", 10)
    print("claimed", claim.generation, flush=True)
    clock = 0
    refused = {}
    while not refused:
        clock += 1
        state = json.dumps([claim.owner, claim.generation, clock])
        refused = store.write([Write(claim, state.encode() * 1000, clock, [state])])
        if not refused:
            print("wrote", clock, flush=True)
    assert isinstance(refused["cam"], Fenced)
    print("fenced", refused["cam"], flush=True)
"""
OPEN = """
import sys
from tribe.serve.store.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
print(store.claim("cam", sys.argv[2], 100) is not None, store.claim(sys.argv[2], sys.argv[2], 100).generation)
"""


class Place:
    """A store in this process and a writer in another one."""

    def __init__(self, kind):
        self.folder = fast_folder()
        self.set_clock(0.0)
        self.opened = open_kind(kind, self.folder, lambda: float((self.folder / "clock").read_text()))
        quick = {"patience": 0.02} if kind == "sqlite" else {}
        self.store = self.opened(**quick)
        options = {name: value for name, value in self.opened.keywords.items() if name == "prefix"}
        self.spec = [str(self.opened.args[0]), options, str(self.folder)]

    def set_clock(self, seconds):
        (self.folder / "next").write_text(repr(seconds))
        (self.folder / "next").replace(self.folder / "clock")
        self.now = seconds

    def remove(self):
        self.store.close()
        shutil.rmtree(self.folder)

    def check_state(self):
        """Check that the stored state is one write as a whole."""
        if (found := self.store.read("cam")) is not None:
            (state,) = found.requests
            assert found.blob == state.encode() * 1000
            assert json.loads(state)[1:] == [found.generation, found.clock]
        return found


@pytest.fixture(params=KINDS)
def place(request):
    place = Place(request.param)
    yield place
    place.remove()


class Writer:
    """A process that claims a stream and writes until it is fenced, once for each `go`."""

    def __init__(self, place, owner, **options):
        (stdin, questions), (answers, stdout) = os.pipe(), os.pipe()
        self.process = Process("-c", WRITER, json.dumps([*place.spec, owner]), stdin=stdin, stdout=stdout, **options)
        os.close(stdin)
        os.close(stdout)
        self.questions, self.answers = os.fdopen(questions, "w"), os.fdopen(answers)

    def go(self):
        print("go", file=self.questions, flush=True)

    def until(self, word, count=1):
        """Read what it says until it has said a word so many times."""
        for line in self.answers:
            count -= line.startswith(word)
            if not count:
                return line.split()
        raise AssertionError(f"it ended: {self.process.end()}")

    def signal(self, number):
        os.kill(self.process.pid, number)

    def wait_until_stopped(self):
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.questions.close()
        said = [line.split() for line in self.answers]
        self.answers.close()
        self.process.end()
        return said


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc says whether a process is stopped")


def take_over(place, writer, owner):
    """Claim the stream of a stopped writer after its lease; None if it was stopped inside a transaction of SQLite."""
    place.set_clock(place.now + 10)
    try:
        return place.store.claim("cam", owner, 10)
    except StoreDown as error:
        if "another process holds the ledger" not in str(error):
            raise
        return None


def stop_and_continue(place, cycles):
    """Stop a writer anywhere, claim its stream, write, and continue it: it is fenced, and what we wrote stays."""
    writer, taken = Writer(place, "writer"), 0
    try:
        for cycle in range(cycles):
            writer.go()
            writer.until("wrote", 1 + cycle % 3)
            while True:
                writer.signal(signal.SIGSTOP)
                writer.wait_until_stopped()
                if claim := take_over(place, writer, f"test-{cycle}"):
                    break
                writer.signal(signal.SIGCONT)
                writer.until("wrote")
            place.check_state()
            state = json.dumps([claim.owner, claim.generation, 1])
            assert place.store.write([Write(claim, state.encode() * 1000, 1, [state])]) == {}
            before = place.store.read("cam")
            writer.signal(signal.SIGCONT)
            writer.until("fenced")
            assert place.store.read("cam") == before == place.check_state()
            place.store.release(claim)
            taken += 1
    finally:
        writer.end()
    return taken


@needs_proc
@pytest.mark.parametrize("cycles", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_process_that_is_stopped_past_its_lease_is_fenced(place, cycles):
    assert stop_and_continue(place, cycles) == cycles


@needs_proc
def test_a_process_that_is_stopped_in_the_middle_of_a_write_is_fenced():
    """It stops itself before it opens the file of its third state, which it removes when it is fenced."""
    place = Place("sqlite")
    try:
        writer = Writer(place, "writer", when=Touches("open", "-1-3-"), number=signal.SIGSTOP)
        try:
            writer.go()
            writer.until("wrote", 2)
            writer.wait_until_stopped()
            claim = take_over(place, writer, "test")
            assert claim.generation == 2
            assert place.check_state().clock == 2
            writer.signal(signal.SIGCONT)
            writer.until("fenced")
        finally:
            writer.end()
        assert place.check_state().clock == 2
        left = [path.name.split("-")[1:3] for path in place.folder.rglob("*.state*")]
        assert sorted(left) == [["1", "1"], ["1", "2"]]
    finally:
        place.remove()


def kill_while_writing(place, times):
    """Kill a writer after some writes: the store opens, and the state is at least the last one it told us of."""
    for turn in range(times):
        writer = Writer(place, f"writer-{turn}")
        writer.go()
        generation = int(writer.until("claimed")[1])
        writer.until("wrote", 1 + turn % 4)
        last = writer.end()[-1:] or [["wrote", 1 + turn % 4]]
        with contextlib.closing(place.opened()) as store:
            found = store.read("cam")
        assert found == place.check_state()
        assert (found.generation, json.loads(found.requests[0])[0]) == (generation, f"writer-{turn}-0")
        assert found.clock in (told := int(last[0][1]), told + 1)
        place.set_clock(place.now + 10)
    assert place.store.claim("cam", "test", 10).generation == times + 1
    left = list((place.folder / "store").rglob("*.state*"))
    assert len(left) <= 2, "what killed writers left is removed"


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_while_it_writes_loses_nothing(place, times):
    kill_while_writing(place, times)


def test_processes_that_open_a_new_store_at_the_same_time():
    """One of them gets the stream; each gets its own."""
    folder = fast_folder()
    try:
        processes = [Process("-c", OPEN, folder / "store", f"owner{i}") for i in range(4)]
        ends = [process.end() for process in processes]
    finally:
        shutil.rmtree(folder)
    assert [end.code for end in ends] == [0] * 4, ends
    assert sorted(end.out for end in ends) == ["False 1\n"] * 3 + ["True 1\n"]
