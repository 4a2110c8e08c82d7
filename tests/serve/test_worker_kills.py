"""A worker that is killed: what is stored is the replay of a prefix of what it learned, and the next one goes on."""

import json
import random
import shutil
import signal
from collections import defaultdict, deque
from pathlib import Path

import pytest
from hosted_worker import images_of, new_fleet
from replays import replay

from processes import Prints, Process, ended, killed
from stores import fast_folder
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
    spec = {"folder": str(tmp_path), "network": "compact", "streams": 16, "rest": 0.001, "policy": policy}
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


KILLS = 50


@pytest.fixture
def folder():
    """A folder for the store: what a kill loses is up to the worker; a busy disk adds the time of its syncs."""
    found = fast_folder()
    yield found
    shutil.rmtree(found)


@pytest.mark.slow  # each of fifty workers serves for some seconds
def test_fifty_kills_under_load_lose_at_most_a_second_each_and_no_stream_has_two_owners(tmp_path, folder):
    """Two workers serve the same streams: one owns a stream, the other follows, and takes over when it is killed."""
    draw = random.Random(0)
    policy = {"lease": 2.0, "renew": 0.4, "margin": 0.6, "staleness": 0.1, "requests": 10_000}
    spec = {"folder": str(folder), "network": "small", "streams": 8, "rest": 0.005, "policy": policy, "shift": 0}

    def start(number):
        """A worker that is killed when it has given so many answers with which its streams have learned."""
        host = json.dumps(spec | {"name": f"w{number}", "count": 10**6})
        return Process(HOST, host, when=Prints("true", draw.randrange(50, 200)), number=signal.SIGKILL)

    running, outputs = deque([start(0), start(1)]), []
    for number in range(2, KILLS + 2):
        result = running.popleft().end()
        assert result.code == -signal.SIGKILL, result.err
        outputs.append(result.out)
        (tmp_path / f"worker-{number - 2}.txt").write_text(result.out)  # to look at if the test fails
        if number < KILLS:
            running.append(start(number))
    store, fleet = SqliteStore(folder), new_fleet("small")
    stored = {f"cam{i}": store.read(f"cam{i}") for i in range(8)}
    store.close()
    check_owners([learned(output) for output in outputs])
    lost = [seconds_lost(output, stored) for output in outputs]
    print(f"lost at most {max(lost):.3f} s, {sum(lost) / len(lost):.3f} s on average, of {len(lost)} kills")
    assert max(lost) <= 1.0
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


def seconds_lost(output, stored):
    """Return how much learning of a worker is not stored: the longest time from a step that was lost until the
    worker was killed, or until its answers say that it does not own the stream, or has claimed it anew."""
    oldest = {}  # when the first lost step of each stream was taken, and its generation
    longest = last = 0.0
    for stream, request_id, adapted, _, generation, last in lines_of(output):
        if stream in oldest and (not adapted or generation != oldest[stream][1]):
            longest = max(longest, last - oldest.pop(stream)[0])
        if adapted and request_id not in stored[stream].requests:
            oldest.setdefault(stream, (last, generation))
    return max([longest, *(last - moment for moment, _ in oldest.values())])
