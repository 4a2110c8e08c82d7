"""Play a time filter over the outputs of a method, without the method.

A filter stands behind a method and never feeds what it learns. So one play of the method serves any number of filters:

    filtered = replay(run(net, method, stream, keep_outputs=True), tribe.filters.create("time", within="batch"))
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tribe.core.moments import accumulation_dtype
from tribe.core.state import clone, select
from tribe.experiments.provenance import code_of
from tribe.experiments.record import Outputs, Record
from tribe.experiments.runner import Progress, RunningError, predictions
from tribe.experiments.spec import ComponentSpec, plain
from tribe.filters import TimeFilter
from tribe.methods import parse
from tribe.methods.encoding import encode_fields
from tribe.methods.pipeline import filter_logits


def replay(
    records: Sequence[Record],
    rule: TimeFilter,
    *,
    spec: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> list[Record]:
    """Return the records of a method with a filter, from those of the method alone: one for each stream.

    Predictions and confidences are exactly those of a run of the method with the filter. Seconds are those of the
    method alone, and what the filter takes here. The batches are those of the run, and a reset of the method is one of
    the filter.

    Args:
        records: All streams of one `run` with ``keep_outputs=True``.
        spec: Of the new records, but for their seeds; by default that of the method alone, with name and fields of the
            filter.
    """
    outputs = [_outputs(record) for record in records]
    if not outputs:
        return []
    values = outputs[0].values
    like = values.new_empty(0, dtype=accumulation_dtype(values.dtype), device=device)
    source, steps = rule.init(len(outputs), values.shape[1], like), max(len(kept.sizes) for kept in outputs)
    state, error = clone(source), RunningError()
    played = [
        record._replace(
            prediction=torch.empty_like(record.prediction),
            confidence=torch.empty_like(record.confidence),
            seconds=record.seconds.clone(),
            spec=_spec(record, rule, spec),
            outputs=None,
            watched=None,  # its estimates are of the answers before this filter
        )
        for record in records
    ]
    done = [0] * len(records)  # images of each stream
    parts = [kept.values.split(kept.sizes.tolist()) for kept in outputs]
    marks = [kept.valid.split(kept.sizes.tolist()) for kept in outputs]
    on_its_device = torch.cuda.device(device) if like.is_cuda else contextlib.nullcontext()  # where kernels launch
    for step in range(steps):
        values, valid = _batch(parts, step), _batch(marks, step)
        reset = torch.tensor([step < len(kept.reset) and bool(kept.reset[step]) for kept in outputs])
        begun = time.perf_counter()
        if reset.any():
            state = select(reset.to(device), clone(source), state)
        with on_its_device:
            output, state = filter_logits(rule, state, values.to(device), valid.to(device))
        confidence, prediction = predictions(output)
        seconds = (time.perf_counter() - begun) / max(int(valid.sum()), 1)
        for s, record in enumerate(played):
            here = slice(done[s], done[s] + int(valid[s].sum()))
            record.prediction[here] = prediction[s][valid[s]]
            record.confidence[here] = confidence[s][valid[s]].float()
            record.seconds[here] += seconds
            error.add(record.label[here], record.prediction[here])
            done[s] = here.stop
        if progress is not None:
            progress(step + 1, steps, error.share)
    return played


def _outputs(record: Record) -> Outputs:
    name = str(record.spec.get("method", {}).get("name"))
    if (method := parse(name).unfiltered) != name:
        raise ValueError(
            f"the record is of {name}, which has a time filter already: replay a filter over a record of {method}"
        )
    if record.outputs is None:
        raise ValueError(
            "a filter is replayed over the outputs of a method, and this record does not hold them: "
            "tribe.run(..., keep_outputs=True) and tribe run --logits keep them, and Record.save(path, outputs=True) "
            "writes them"
        )
    return record.outputs


def _batch(parts: Sequence[Sequence[Tensor]], step: int) -> Tensor:
    """Return a step of all streams, (S, B, ...), padded with zeros as `tribe.experiments.stream` pads batches."""
    rows = [part[step] if step < len(part) else part[0][:0] for part in parts]
    return pad_sequence(rows, batch_first=True)


def _spec(record: Record, rule: TimeFilter, given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is not None:
        return {**given, "seed": record.spec.get("seed")}
    method = record.spec.get("method", {})
    code = method.get("code") or code_of(type(rule), strict=False)
    fields = {**method.get("fields", {}), **plain(encode_fields(rule))}
    return {**record.spec, "method": ComponentSpec(f"{method.get('name')}+{rule.name}", fields, code).json()}
