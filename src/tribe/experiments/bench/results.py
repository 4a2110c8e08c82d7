"""Read, compare and show results."""

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

from tribe.experiments.bench.measurement import BenchResult, BenchRow, Setting
from tribe.io import json_files
from tribe.io.json_files import Where

SCHEMA = 1
KIND = "tribe bench"
TIME = Where(float, lambda ms: ms > 0, "a positive number")
OTHER_TYPES: dict[Any, Any] = {  # their schemas; other types of fields are their own schema
    tuple[int, ...]: [int],
    dict[str, float]: {...: float},
    dict[str, Any]: dict,
    int | None: (int, None),
    str | None: (str, None),
}


def _schema_of(cls: Any) -> dict[str, Any]:
    return {name: OTHER_TYPES.get(kind, kind) for name, kind in get_type_hints(cls).items()}


RESULT = {
    **_schema_of(BenchResult),
    "setting": _schema_of(Setting),
    "rows": [{**_schema_of(BenchRow), "ms_per_image": TIME}],
}


def to_data(result: BenchResult) -> dict[str, Any]:
    """A result as plain data, as in a file."""
    return {"kind": KIND, "schema": SCHEMA, **dataclasses.asdict(result)}


def read(path: str | PathLike[str]) -> BenchResult:
    """Read a result that `tribe bench --json` wrote, on any machine."""
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


def compare(old: BenchResult, new: BenchResult) -> dict[str, float | None]:
    """The new time of each contender divided by the old one, in the order of the new result; None: one lacks it."""
    then, now = ({row.name: row.ms_per_image for row in result.rows} for result in (old, new))
    return {name: now[name] / then[name] if name in now and name in then else None for name in {**now, **then}}


def show(result: BenchResult) -> str:
    """A result as a table, with the setting above it and notes below it."""
    kinds = list(result.rows[0].times) if result.rows else []
    eager = [row for row in result.rows if row.capture_disabled_reason]
    notes = [f"{row.name}: not captured in CUDA graphs: {row.capture_disabled_reason}" for row in eager]
    if any(row.peak_bytes is None for row in result.rows):
        notes.append("peak: unknown; this system does not let a process reset the high-water mark of its memory")
    ratios = [f"x {kind}" for kind in kinds]
    header = ("", "ms/image", "spread", *ratios, "TFLOP/s", "of matmul", "peak", "state")
    lines = [_title(result), "", table(header, [_cells(row, kinds) for row in result.rows])]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _title(result: BenchResult) -> str:
    at, computer = result.setting, result.machine
    load = f"{at.streams} stream{'s' * (at.streams > 1)} x {at.batch} images of {'x'.join(map(str, at.shape))}"
    first = f"{at.model}, {at.classes} classes, {load}, {at.precision}"
    if at.device.startswith("cuda"):
        first += f", graphs {'on' if at.graphs else 'off'}, kernels {'on' if at.kernels else 'off'}"
    second = f"{computer.get('device')}, {computer.get('threads')} threads, torch {computer.get('torch')}"
    rate = f"matrix products {result.matmul_tflops:.3g} TFLOP/s, {result.repeats} repeats"
    return f"{first}\n{second}, tribe {computer.get('tribe')}; {rate}"


def _cells(row: BenchRow, kinds: Sequence[str]) -> tuple[str, ...]:
    return (
        row.name,
        milliseconds(row.ms_per_image),
        f"{row.spread:.0%}",
        *(f"{row.times[kind]:.2f}" for kind in kinds),
        f"{row.tflops:.3g}",
        f"{row.share:.0%}",
        size(row.peak_bytes),
        size(row.state_bytes),
    )


def show_changes(old: BenchResult, new: BenchResult) -> str:
    """The changes as a table, with the differences in machine and versions above it."""
    header = ("", "ms/image then", "ms/image now", "now / then", "x plain then", "x plain now")
    differences = machine_differences(old, new)
    title = f"compared; {', '.join(differences)}" if differences else "compared, on the same machine and versions"
    cells = []
    for name, ratio in compare(old, new).items():
        rows = [next((row for row in result.rows if row.name == name), None) for result in (old, new)]
        times = ("-" if row is None else f"{milliseconds(row.ms_per_image)} ±{row.spread / 2:.0%}" for row in rows)
        plain = ("-" if row is None or "plain" not in row.times else f"{row.times['plain']:.2f}" for row in rows)
        cells.append((name, *times, "-" if ratio is None else f"{ratio:.2f}", *plain))
    return f"{title}\n\n{table(header, cells)}"


def milliseconds(value: float) -> str:
    """Milliseconds with four significant digits; more would be noise.

    >>> milliseconds(12.3456), milliseconds(0.0123456)
    ('12.35', '0.01235')
    """
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"


def size(count: int | None) -> str:
    """A number of bytes with its unit.

    >>> size(44), size(63_400), size(2_719_000_000)
    ('44 B', '63.4 kB', '2,719.0 MB')
    """
    if count is None:
        return "n/a"
    return f"{count} B" if count < 1e3 else f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in (header, ["-" * w for w in widths], *rows)
    )
