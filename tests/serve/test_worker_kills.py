"""A worker that is killed: what is stored is the replay of a prefix of what it learned, and the next one goes on.

TRIBE_KILLS=100 TRIBE_KILL_STREAMS=16 pytest tests/serve/test_worker_kills.py  # more of it, on both kinds of store
"""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import defaultdict, deque
from pathlib import Path

import pytest
from hosted_worker import images_of, new_fleet, open_place
from replays import replay

from processes import Prints, Process, ended, killed
from stores import RedisServer, fast_folder, need_redis
from tribe.serve.store.sqlite import SqliteStore

HOST = str(Path(__file__).parent / "hosted_worker.py")


def learned(printed):
    """The requests that each stream learned from, in order: id, clock, generation and time."""
    found = defaultdict(list)
    for stream, request_id, adapted, *rest in lines_of(printed):
        if adapted:
            found[stream].append((request_id, *rest))
    return found


def lines_of(printed):
    return [json.loads(line) for line in printed.splitlines() if line.startswith("[")]


def check_replay(fleet, network, stream, stored):
    """The stored state is what its requests make of it, bit for bit."""
    fleet.from_bytes("stored", stored.blob)
    batches = [images_of(network, request_id) for request_id in stored.requests]
    assert fleet.digest("stored") == replay(fleet, stream, batches)
    assert stored.clock == len(stored.requests)


def test_after_a_kill_the_next_worker_goes_on_from_a_prefix_of_what_was_learned(tmp_path):
    policy = {"write_every": 0.05, "lease": 60, "renew": 1, "requests": 1000}
    spec = {"place": str(tmp_path), "network": "compact", "streams": 16, "rest": 0.001, "policy": policy}
    first = spec | {"name": "first", "count": 1000, "shift": 0}
    dead = learned(killed(HOST, json.dumps(first), when=Prints("true", 40)).out)
    store = SqliteStore(tmp_path)
    streams = [f"cam{i}" for i in range(16)]
    before = {stream: store.read(stream) for stream in streams}
    claimed = {stream: 0 if (entry := store.entry(stream)) is None else entry.generation for stream in streams}
    for stream, stored in before.items():
        ids = [request_id for request_id, *_ in dead.get(stream, ())]
        kept = () if stored is None else stored.requests
        # One more may be stored than was answered: its state was written before the answer was printed.
        assert kept[: len(ids)] == tuple(ids[: len(kept)])
        assert len(kept) <= len(ids) + 1
    assert any(before.values())

    second = spec | {"name": "second", "count": 2, "shift": 61}  # the leases of the first have ended
    result = ended(HOST, json.dumps(second))
    assert result.out.endswith("stopped\n"), result.err
    fleet, after = new_fleet("compact"), learned(result.out)
    for stream in streams:
        stored, kept = store.read(stream), before[stream]
        assert stored.requests == (kept.requests if kept else ()) + tuple(f"second-{stream}-{n}" for n in range(2))
        assert [generation for _, _, generation, _ in after[stream]] == [claimed[stream] + 1] * 2
        check_replay(fleet, "compact", stream, stored)
    store.close()


KILLS = int(os.environ.get("TRIBE_KILLS", 30))
STREAMS = int(os.environ.get("TRIBE_KILL_STREAMS", 8))
SEED = int(os.environ.get("TRIBE_KILL_SEED", 0))
LEASE = 2.0


@pytest.fixture
def place(kind):
    """A folder or an address for the store: what a kill loses is up to the worker; a busy disk adds its syncs."""
    if kind == "redis":
        need_redis()
        server = RedisServer()
        yield server.address
        server.remove()
    else:
        found = fast_folder()
        yield str(found)
        shutil.rmtree(found)


def ended_by(process, number):
    """Wait until a worker has got its signal and has ended; one that is stopped goes on after its lease has ended."""
    if number == signal.SIGSTOP:
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        time.sleep(2 * LEASE)  # the other worker takes its streams over
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)  # it answers, and finds that it owns nothing
        os.kill(process.pid, signal.SIGTERM)
    result = process.end()
    assert result.code == (-signal.SIGKILL if number == signal.SIGKILL else 0), result.err
    return result.out


@pytest.mark.slow  # each worker serves for some seconds
def test_kills_under_load_lose_at_most_a_second_each_and_no_stream_has_two_owners(tmp_path, place):
    """Two workers serve the same streams: one owns a stream, the other follows, and takes over when it ends."""
    draw = random.Random(SEED)
    policy = {"lease": LEASE, "renew": 0.4, "margin": 0.6, "staleness": 0.1, "requests": 10_000}
    spec = {"place": place, "network": "small", "streams": STREAMS, "rest": 0.005, "policy": policy, "shift": 0}

    def start(number):
        """A worker that gets a signal when it has given so many answers with which its streams have learned."""
        chosen = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))
        host = json.dumps(spec | {"name": f"w{number}", "count": 10**6})
        return Process(HOST, host, when=Prints("true", draw.randrange(50, 200)), number=chosen), chosen

    running, outputs, numbers = deque([start(0), start(1)]), [], []
    for number in range(2, KILLS + 2):
        numbers.append(running[0][1])
        outputs.append(ended_by(*running.popleft()))
        (tmp_path / f"worker-{number - 2}.txt").write_text(outputs[-1])  # to look at if the test fails
        if number < KILLS:
            running.append(start(number))
    fleet, names = new_fleet("small"), [f"cam{i}" for i in range(STREAMS)]
    with contextlib.closing(open_place(place)) as store:
        stored = {name: store.read(name) for name in names}
    check_owners([learned(output) for output in outputs])
    lost = [seconds_lost(*each, stored) for each in zip(outputs, numbers, strict=True)]
    print(f"lost at most {max(lost):.3f} s, {sum(lost) / len(lost):.3f} s on average, of {len(lost)} workers")
    assert max(lost) <= 1.0
    assert not any(each for each, number in zip(lost, numbers, strict=True) if number == signal.SIGTERM)
    for stream, state in stored.items():
        check_replay(fleet, "small", stream, state)


def check_owners(outputs):
    """A generation of a stream belongs to one worker, and generations of later requests are never lower."""
    owners = defaultdict(set)
    for number, output in enumerate(outputs):
        for stream, lines in output.items():
            generations = [generation for _, _, generation, _ in lines]
            assert generations == sorted(generations)
            for generation in generations:
                owners[stream, generation].add(number)
    assert all(len(found) == 1 for found in owners.values())
    assert len(owners) > KILLS  # they did take over from each other


def seconds_lost(output, number, stored):
    """Return how much learning of a worker is not stored: the longest time from a step that was lost until the
    worker ended, or until its answers say that it does not own the stream, or has claimed it anew. The time for which
    it was stopped does not count."""
    oldest = {}  # when the first lost step of each stream was taken, and its generation
    longest = last = before = paused = 0.0
    for stream, request_id, adapted, _, generation, moment in lines_of(output):
        if number == signal.SIGSTOP and before and moment - before > LEASE:
            paused += moment - before
        before, last = moment, moment - paused
        if stream in oldest and (not adapted or generation != oldest[stream][1]):
            longest = max(longest, last - oldest.pop(stream)[0])
        if adapted and request_id not in stored[stream].requests:
            oldest.setdefault(stream, (last, generation))
    return max([longest, *(last - moment for moment, _ in oldest.values())])
