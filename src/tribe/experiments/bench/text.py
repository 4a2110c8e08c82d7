"""Results as tables in plain text."""

from collections.abc import Sequence

from tribe.experiments.bench.measurement import BenchResult, BenchRow
from tribe.experiments.bench.results import Change


def show(result: BenchResult) -> str:
    """A result as a table, with the setting above it and notes below it."""
    kinds = list(result.rows[0].times) if result.rows else []
    ratios = [f"x {kind}" for kind in kinds]
    header = ("", "ms/image", "spread", *ratios, "TFLOP/s", "of matmul", "peak", "state")
    return "\n".join([_title(result), "", table(header, [_cells(row, kinds) for row in result.rows]), *_notes(result)])


def _title(result: BenchResult) -> str:
    at, computer = result.setting, result.machine
    load = f"{at.streams} stream{'s' * (at.streams > 1)} x {at.batch} images of {'x'.join(map(str, at.shape))}"
    switches = [f"graphs {_on(at.graphs)}", f"kernels {_on(at.kernels)}"] if at.device.startswith("cuda") else []
    first = ", ".join([at.model, f"{at.classes} classes", load, at.precision, *switches])
    second = f"{computer.get('device')}, {computer.get('threads')} threads, torch {computer.get('torch')}"
    rate = f"matrix products {result.matmul_tflops:.3g} TFLOP/s, {result.repeats} repeats"
    return f"{first}\n{second}, tribe {computer.get('tribe')}; {rate}"


def _on(value: bool) -> str:
    return "on" if value else "off"


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


def _notes(result: BenchResult) -> list[str]:
    eager = [row for row in result.rows if row.capture_disabled_reason]
    notes = [f"{row.name}: not captured in CUDA graphs: {row.capture_disabled_reason}" for row in eager]
    if any(row.peak_bytes is None for row in result.rows):
        notes.append("peak: unknown; this system does not let a process reset the high-water mark of its memory")
    return ["", *notes] if notes else []


def show_changes(changes: Sequence[Change], differences: Sequence[str]) -> str:
    """The changes as a table, with the differences in machine and versions above it."""
    header = ("", "ms/image then", "ms/image now", "now / then", "x plain then", "x plain now")
    title = f"compared; {', '.join(differences)}" if differences else "compared, on the same machine and versions"
    return f"{title}\n\n{table(header, [_change_cells(change) for change in changes])}"


def _change_cells(change: Change) -> tuple[str, ...]:
    rows = (change.old, change.new)
    then, now = ("-" if row is None else f"{milliseconds(row.ms_per_image)} ±{row.spread / 2:.0%}" for row in rows)
    before, after = ("-" if row is None or "plain" not in row.times else f"{row.times['plain']:.2f}" for row in rows)
    return change.name, then, now, "-" if change.ratio is None else f"{change.ratio:.2f}", before, after


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
