"""The file that a run resumes from: the method's state, and the columns of the records so far."""

import time
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from tribe.core.state import clone, leaves, rebuild
from tribe.experiments.outputs import OutputTable
from tribe.experiments.table import RecordTable
from tribe.io import tensors as tensor_file
from tribe.io.files import check_file
from tribe.io.json_files import Where
from tribe.io.states import StateFileError

CHECKPOINT = tensor_file.Kind(
    "tribe-run",
    1,
    {"step": Where(int, lambda step: step >= 0, "a number of batches"), "run": str},
    noun="checkpoint of a run",
    advice="Remove it, or name another",
    error=StateFileError,
)
SLOW = 0.5  # seconds for a checkpoint that are too many to spend whenever they are due


class RunCheckpoint:
    """The file that a run resumes from.

    Args:
        path: The file.
        identity: A hash of all that the run depends on; the checkpoint of another run is refused.
        outputs: The outputs of the method, if the run keeps them.
    """

    def __init__(self, path: str | PathLike[str], identity: str, outputs: OutputTable | None = None) -> None:
        check_file(path)  # before the work, not after it
        self.path, self._identity, self._outputs = Path(path), identity, outputs
        self.saved = 0  # batches in the file
        self._due = 0.0  # no checkpoint before this time

    def save_if_due(self, table: RecordTable, state: Any, rows: Sequence[int], step: int) -> None:
        """Save, unless the last save took long and was not long ago."""
        begun = time.perf_counter()
        if begun >= self._due:
            self.save(table, state, rows, step)
            took = time.perf_counter() - begun
            self._due = time.perf_counter() + 10 * took if took > SLOW else 0.0

    def save(self, table: RecordTable, state: Any, rows: Sequence[int], step: int) -> None:
        """Write the state, and the first rows of the table, atomically."""
        tensors = {f"state.{name}": t for name, t in leaves(state).items()}
        tensors |= {f"record.{name}": column for name, column in table.cut(rows)}
        if self._outputs is not None:
            tensors |= {f"outputs.{name}": values for name, values in self._outputs.cut(step)}
        tensor_file.write(self.path, CHECKPOINT, {"step": step, "run": self._identity}, tensors)
        self.saved = step

    def save_or_warn(self, table: RecordTable, state: Any, rows: Sequence[int], step: int) -> None:
        """Save; a full disk must not hide that the user stopped the run."""
        try:
            self.save(table, state, rows, step)
        except OSError as error:
            warnings.warn(f"{error}. The run goes on from batch {self.saved}, not {step}", stacklevel=3)

    def resume(self, source: Any, start: RecordTable, batches: int) -> tuple[Any, RecordTable, int]:
        """Return state, table and batches done, from the file; without one, those of the start.

        Args:
            source: The state before the first batch.
            start: The table before the first batch.
            batches: How many the run has in all.

        Raises:
            StateFileError: The file is damaged, or of another run.
        """
        if not self.path.exists():
            return clone(source), start, 0
        header, tensors = tensor_file.read(self.path, CHECKPOINT)
        if header["run"] != self._identity:
            raise StateFileError(f"{self.path} is the checkpoint of another run. {CHECKPOINT.advice}")
        if header["step"] > batches:
            raise StateFileError(
                f"{self.path} is damaged: {header['step']} of {batches} batches are done. {CHECKPOINT.advice}"
            )
        outputs = {name.removeprefix("outputs."): t for name, t in tensors.items() if name.startswith("outputs.")}
        if self._outputs is not None and not outputs:
            raise StateFileError(f"{self.path} is of a run that did not keep outputs. {CHECKPOINT.advice}")
        if self._outputs is None:  # a run that kept outputs may go on without
            tensors = {name: t for name, t in tensors.items() if not name.startswith("outputs.")}
        like = {} if self._outputs is None else self._outputs.like(header["step"], outputs)
        self._check(tensors, source, start, like)
        if self._outputs is not None:
            self._outputs.resume(outputs)
        state = rebuild(source, {name: tensors[f"state.{name}"].to(t.device) for name, t in leaves(source).items()})
        rows = enumerate(start.columns)
        table = RecordTable.of([{name: tensors[f"record.{s}.{name}"] for name in column} for s, column in rows])
        self.saved = header["step"]
        return state, table, self.saved

    def _check(
        self, tensors: Mapping[str, Tensor], source: Any, start: RecordTable, outputs: Mapping[str, Tensor]
    ) -> None:
        """Refuse tensors that are not a state like the source's, outputs, and columns of equal length."""
        like = {f"outputs.{name}": t for name, t in outputs.items()}
        like |= {f"state.{name}": t for name, t in leaves(source).items()}
        for s, columns in enumerate(start.columns):
            labels = tensors.get(f"record.{s}.label")
            rows = labels.shape if labels is not None and labels.dim() == 1 else (0,)
            like |= {f"record.{s}.{name}": empty.new_empty(rows) for name, (empty,) in columns.items()}
        tensor_file.check_like(self.path, CHECKPOINT, "the state and records of this run", tensors, like)
