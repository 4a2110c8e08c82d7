"""Write a model repository for Triton Inference Server, whose sequence batcher keeps the state of each stream."""

import shutil
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from tribe.io.files import check_folder
from tribe.onnx.session import Session

TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64", "uint8": "TYPE_UINT8", "bool": "TYPE_BOOL"}


def write_triton(path: str | PathLike[str], folder: str | PathLike[str], name: str = "tribe") -> Path:
    """Write a model repository with a model file: ``folder/name/1/model.onnx``, its configuration and first state.

    A sequence of requests with one correlation id is a stream. Triton keeps its state and begins it with the files in
    ``initial_state``.
    """
    session = Session(path)
    check_folder(folder)
    place = Path(folder) / name
    (place / "1").mkdir(parents=True, exist_ok=True)
    (place / "initial_state").mkdir(exist_ok=True)
    first = session.state()
    for tensor in session.moving:
        (place / "initial_state" / tensor).write_bytes(np.ascontiguousarray(first[tensor]).tobytes())
    shutil.copyfile(path, place / "1" / "model.onnx")
    (place / "config.pbtxt").write_text(_config(session, name))
    return place


def _config(session: Session, name: str) -> str:
    """Return the text of ``config.pbtxt``."""
    header, first = session.header, session.state()
    options = header["options"]
    images = _tensor("images", "uint8" if options["uint8"] else "float32", [-1, *header["shape"]])
    inputs = [images, *([_tensor("valid", "bool", [-1])] if options["valid"] else [])]
    outputs = [_tensor(output, "float32", [-1, header["classes"]]) for output in session.predictions]
    states = [_state(tensor, first[tensor]) for tensor in session.moving]
    return f"""name: "{name}"
backend: "onnxruntime"
max_batch_size: 0
input [
{_listed(inputs)}
]
output [
{_listed(outputs)}
]
sequence_batching {{
  max_sequence_idle_microseconds: 60000000
  direct {{ }}
  state [
{_listed(states)}
  ]
}}
instance_group [ {{ kind: KIND_CPU }} ]
"""


def _tensor(name: str, kind: str, shape: list[int]) -> str:
    return f'  {{ name: "{name}" data_type: {TYPES[kind]} dims: {shape} }}'


def _state(name: str, value: "np.ndarray[Any, Any]") -> str:
    kind, shape = TYPES[str(value.dtype)], list(value.shape)
    begin = f'{{ name: "{name}" data_type: {kind} dims: {shape} data_file: "{name}" }}'
    names = f'input_name: "{name}" output_name: "next.{name}"'
    return f"    {{ {names} data_type: {kind} dims: {shape} initial_state: {begin} }}"


def _listed(parts: list[str]) -> str:
    return ",\n".join(parts)
