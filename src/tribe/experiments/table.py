"""The columns of the records of a run, batch after batch."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from tribe.experiments.record import Record
from tribe.experiments.stream import Batch, Stream
from tribe.experiments.trace import Trace
from tribe.experiments.watched import Watched
from tribe.health.alarms import KINDS

WATCHED, TRACED = "watched.", "trace."  # the names of columns of `Watched` and `Trace` begin with these


class RecordTable:
    """The columns of the records so far.

    Args:
        streams: How many records there will be.
        observed: Additional columns, (S,) each, as `append` gets them.
    """

    def __init__(self, streams: int, observed: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        whole, real = torch.empty(0, dtype=torch.int64), torch.empty(0)
        start = {"domain": whole, "label": whole, "prediction": whole, "confidence": real, "seconds": real}
        start |= {name: values[:0] for name, values in observed.items()}
        self.columns = [{name: [values] for name, values in start.items()} for _ in range(streams)]
        self._rows = [0] * streams
        self._wrong = self._labelled = 0

    @staticmethod
    def of(columns: Sequence[Mapping[str, Tensor]]) -> "RecordTable":
        """Return the table with these columns."""
        table = RecordTable(len(columns))
        table.columns = [{name: [values] for name, values in column.items()} for column in columns]
        table._rows = [len(column["label"]) for column in columns]
        for column in columns:
            table._count(column["label"], column["prediction"])
        return table

    def append(
        self,
        batch: Batch,
        prediction: Tensor,
        confidence: Tensor,
        seconds: float,
        observed: Mapping[str, Tensor],
    ) -> None:
        """Add the valid images of a batch, and the columns observed after it, (S,) each."""
        for s, column in enumerate(self.columns):
            valid = batch.valid[s]
            times = torch.full(valid.shape, seconds)
            others = (values[s].expand(valid.shape) for values in observed.values())
            rows = (batch.domain[s], batch.y[s], prediction[s], confidence[s].float(), times, *others)
            for name, values in zip(column, rows, strict=True):
                column[name].append(values[valid])
            self._rows[s] += int(valid.sum())
        self._count(batch.y[batch.valid], prediction[batch.valid])

    def _count(self, label: Tensor, prediction: Tensor) -> None:
        labelled = label >= 0
        self._wrong += int((label != prediction)[labelled].sum())
        self._labelled += int(labelled.sum())

    def error(self) -> float | None:
        """Return the error so far; None without labels."""
        return self._wrong / self._labelled if self._labelled else None

    def rows(self) -> tuple[int, ...]:
        """Return the number of images of each stream."""
        return tuple(self._rows)

    def cut(self, rows: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield all columns by name, without what an interrupted batch added after these rows."""
        for s, column in enumerate(self.columns):
            for name, parts in column.items():
                parts[:] = [torch.cat(parts)[: rows[s]]]
                yield f"{s}.{name}", parts[0]

    def records(self, stream: Stream, spec: Mapping[str, Any]) -> list[Record]:
        """Return a record for each stream."""
        records = []
        for column, seed in zip(self.columns, stream.seeds, strict=True):
            whole = {name: torch.cat(parts) for name, parts in column.items()}
            health, traced = (
                {name.removeprefix(prefix): whole.pop(name) for name in column if name.startswith(prefix)}
                for prefix in (WATCHED, TRACED)
            )
            records.append(
                Record(
                    **cast(Any, whole),
                    domains=stream.domains,
                    classes=len(stream.dataset.classes),
                    spec={**spec, "seed": seed},
                    watched=Watched(**health, kinds=KINDS) if health else None,
                    trace=Trace(**traced) if traced else None,
                )
            )
        return records
