"""Labels of frames in a CSV file: which frame, and which class it shows.

A line is a frame, by its number or its file, and a class, by its name or its number; ``?`` says that it shows another
class than both predictions, or that nobody can name it. A line without a label is a frame that is still to be labelled.
"""

import csv
import difflib
import io
from collections.abc import Iterable, Mapping
from os import PathLike

from tribe.fields import printable
from tribe.io.files import write_atomically
from tribe.trial.frames import Recording, csv_rows
from tribe.trial.trial import NEITHER, Trial, check_label

LABELS = "labels.csv"  # in the folder of a trial
HEADER = ("frame", "file", "label")
UNKNOWN = "?"
FRAMES, GIVEN = ("frame", "file", "name", "path", "image"), ("label", "class")  # names of columns
MOST_NAMES = 5000  # that are compared with a wrong one


def read_labels(path: str | PathLike[str], trial: Trial, recording: Recording) -> dict[int, int]:
    """Return the labels in a CSV file, frame -> class or `NEITHER`; ValueError says which line is wrong.

    Without a header, the columns are the frame and the label.
    """
    rows = csv_rows(path, "a CSV file of labels")
    frame_columns, label_column = [0], 1
    if rows and (head := [cell.lower() for cell in rows[0][1]]) and set(head) & {*GIVEN}:
        label_column = next(i for i, cell in enumerate(head) if cell in GIVEN)
        frame_columns = [i for i, cell in enumerate(head) if cell in FRAMES]
        rows = rows[1:]
        if not frame_columns:
            raise ValueError(f"{path}: no column says which frame; expected one named {' or '.join(FRAMES)}")
    frames, classes = _frames(recording, trial.frames), {name: k for k, name in enumerate(trial.classes)}
    labels: dict[int, int] = {}
    lines: dict[int, int] = {}
    for line, row in rows:
        cells = [row[i] for i in frame_columns if i < len(row) and row[i]]
        given = row[label_column] if label_column < len(row) else ""
        if not cells:
            raise ValueError(f"{path}, line {line}: it names no frame; expected its number or its file")
        if not given:
            continue
        place = f"{path}, line {line}"
        frame, label = _frame(cells[0], frames, place), _class(given, classes, place)
        try:
            check_label(frame, label, trial.frames, trial.classes)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if labels.setdefault(frame, label) != label:
            raise ValueError(
                f"{path} contradicts itself: frame {printable(cells[0])} is {_name(labels[frame], trial)} in line "
                f"{lines[frame]} and {_name(label, trial)} in line {line}. Remove one of them"
            )
        lines.setdefault(frame, line)
    return labels


def write_labels(path: str | PathLike[str], labels: Mapping[int, int], trial: Trial, recording: Recording) -> None:
    """Write labels, and then the frames that are still to be labelled, in the order of the draw; atomically."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(HEADER)
    for frame, label in labels.items():
        writer.writerow((frame, recording.name(frame), _name(label, trial)))
    for frame in trial.draw.tolist():
        if frame not in labels:
            writer.writerow((frame, recording.name(frame), ""))
    write_atomically(path, file.getvalue().encode())


def _frames(recording: Recording, count: int) -> dict[str, int | None]:
    """Return the number of each frame by its file; None for a name that several have."""
    found: dict[str, int | None] = {}
    for i in range(count):
        if name := recording.name(i):
            found[name] = None if name in found else i
    return found


def _frame(cell: str, frames: Mapping[str, int | None], place: str) -> int:
    """Return the number of the frame that a cell names."""
    if cell in frames:
        number = frames[cell]
        if number is None:
            raise ValueError(f"{place}: several frames are called {printable(cell)}; name it by its number")
        return number
    if cell.isdecimal() and len(cell) < 16:
        return int(cell)
    raise ValueError(f"{place}: there is no frame {printable(cell)!r}: {_hint(cell, frames, 'a number')}")


def _class(cell: str, classes: Mapping[str, int], place: str) -> int:
    """Return the number of the class that a cell names: by its name or, if no class has this name, by its number."""
    if cell == UNKNOWN:
        return NEITHER
    if cell in classes:
        return classes[cell]
    if cell.isdecimal() and len(cell) < 10:
        return int(cell)
    raise ValueError(f"{place}: there is no class {printable(cell)!r}: {_hint(cell, classes, UNKNOWN)}")


def _hint(cell: str, names: Iterable[str], other: str) -> str:
    """Return names that are like what was given, or the first ones."""
    known = [*names]
    near = difflib.get_close_matches(cell, known[:MOST_NAMES], n=3, cutoff=0.5) or known[:8]
    return f"expected a name such as {', '.join(map(printable, near))}, or {other}" if near else f"expected {other}"


def _name(label: int, trial: Trial) -> str:
    return UNKNOWN if label == NEITHER else trial.classes[label]
