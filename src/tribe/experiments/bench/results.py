"""Write, read and compare results."""

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from tribe.experiments.bench.measurement import BenchResult, BenchRow, Setting
from tribe.io import json_files
from tribe.io.files import write_atomically
from tribe.io.json_files import Where

SCHEMA = 1
KIND = "tribe bench"
TIME = Where(float, lambda ms: ms > 0, "a positive number")
RESULT = {
    "setting": {
        **dict.fromkeys(("model", "device", "precision"), str),
        **dict.fromkeys(("classes", "batch", "streams"), int),
        **dict.fromkeys(("graphs", "kernels"), bool),
        "shape": [int],
        "threads": (int, None),
    },
    "rows": [
        {
            "name": str,
            "ms_per_image": TIME,
            **dict.fromkeys(("spread", "tflops", "share"), float),
            "times": {...: float},
            "peak_bytes": (int, None),
            "state_bytes": int,
            "capture_disabled_reason": (str, None),
        }
    ],
    "machine": dict,
    "repeats": int,
    "matmul_tflops": float,
}


class Change(NamedTuple):
    """One contender in two results; None where it is missing."""

    name: str
    old: BenchRow | None
    new: BenchRow | None

    @property
    def ratio(self) -> float | None:
        """The new time divided by the old one."""
        return None if self.old is None or self.new is None else self.new.ms_per_image / self.old.ms_per_image


def to_data(result: BenchResult) -> dict[str, Any]:
    """A result as plain data, as in a file."""
    return {"kind": KIND, "schema": SCHEMA, **dataclasses.asdict(result)}


def write(path: str | PathLike[str], data: Mapping[str, Any]) -> None:
    """Write the data of `to_data`, and any additional keys, atomically."""
    write_atomically(path, json.dumps(data, indent=1, allow_nan=False).encode())


def read(path: str | PathLike[str]) -> BenchResult:
    """Read a result that `write` wrote, on any machine."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no result at {path}; `tribe bench --json {path}` writes one")
    data = json_files.read(path, object)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ValueError(f"{path} is not a result of `tribe bench --json`")
    if data.get("schema") != SCHEMA:
        given = reprlib.repr(data.get("schema"))
        raise ValueError(f"{path} has format {given}; this version reads format {SCHEMA}: measure again")
    json_files.check(data, RESULT, str(path), "Measure again")
    try:
        setting = Setting(**{**_fields(Setting, data["setting"]), "shape": tuple(data["setting"]["shape"])})
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Measure again") from error
    rows = tuple(BenchRow(**_fields(BenchRow, row)) for row in data["rows"])
    return BenchResult(setting, data["machine"], data["repeats"], data["matmul_tflops"], rows)


def _fields(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: data[field.name] for field in dataclasses.fields(cls)}


def check_comparable(old: Setting, new: Setting) -> None:
    """Raise ValueError, with the differences, if the settings are not the same."""
    then, now = dataclasses.asdict(old), dataclasses.asdict(new)
    then["device"], now["device"] = (d["device"].partition(":")[0] for d in (then, now))  # cuda:1 is cuda
    differ = [f"{name} {then[name]} then, {now[name]} now" for name in then if then[name] != now[name]]
    if differ:
        raise ValueError(f"the settings differ, so the times cannot be compared: {'; '.join(differ)}")


def machine_differences(old: BenchResult, new: BenchResult) -> list[str]:
    """The differences in machine, versions and repeats."""
    then, now = ({**result.machine, "repeats": result.repeats} for result in (old, new))
    differ = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name} {then.get(name)} -> {now.get(name)}" for name in differ]


def compare(old: BenchResult, new: BenchResult) -> list[Change]:
    """The change of each contender, in the order of the new result."""
    check_comparable(old.setting, new.setting)
    then, now = ({row.name: row for row in result.rows} for result in (old, new))
    return [Change(name, then.get(name), now.get(name)) for name in {**now, **then}]
