"""Copy results without their records into a folder whose files are sorted and fit into git."""

from collections import defaultdict
from dataclasses import replace
from os import PathLike
from pathlib import Path

from tribe.experiments.store import Result, ResultStore, changed, encode, pack_name
from tribe.io.files import exclusive, write_atomically

PRIVATE = ("command",)  # entries of an environment that are left out: they hold paths of a machine


def stale(result: Result) -> list[str]:
    """Return the components whose file has changed since the result was computed: "method", "scenario" and so on.

    A result that does not name the digest of a file is not stale.
    """
    codes = (stream.environment.get("code") or {} for stream in result.streams.values())
    return list(dict.fromkeys(role for code in codes for role in changed(result.experiment, code)))


def keep(root: str | PathLike[str], target: str | PathLike[str]) -> None:
    """Copy the results in ``root``, without their records, into ``target``.

    A result of a stream that is there stays: results do not change. Unless it is `stale`, and the new one is not.
    """
    target = Path(target)
    there = {result.experiment.id: result for result in ResultStore(target).results()}
    for result in ResultStore(root).results():
        name = result.experiment.id
        old = there.get(name)
        if old is None or (stale(old) and not stale(result)):
            there[name] = result
        else:
            streams = dict(sorted({**result.streams, **old.streams}.items()))
            there[name] = Result(replace(old.experiment, seeds=tuple(streams)), target, streams)
    packs: dict[str, list[bytes]] = defaultdict(list)
    for _, result in sorted(there.items()):
        for seed, stream in sorted(result.streams.items()):
            environment = {name: value for name, value in stream.environment.items() if name not in PRIVATE}
            line = encode(result.experiment, seed, stream._replace(environment=environment))
            packs[pack_name(result.experiment)].append(line)
    target.mkdir(parents=True, exist_ok=True)
    for name, lines in packs.items():
        with exclusive(target / ".lock", wait=True):
            write_atomically(target / name, b"".join(lines))
