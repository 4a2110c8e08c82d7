"""Make a model file smaller: weights of 16 bits, or convolutions in int8. Statistics and states stay in float32."""

import logging
import tempfile
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tribe.io.files import check_file, write_atomically
from tribe.onnx.running import Array
from tribe.onnx.session import Session
from tribe.onnx.states import ModelFileError
from tribe.onnx.surgery import all_reads

BATCH = 16  # images of a calibration run


def quantize(
    path: str | PathLike[str],
    target: str | PathLike[str],
    kind: Literal["float16", "int8"],
    images: Array | None = None,
) -> None:
    """Write a smaller copy of a model file.

    Args:
        path: a file that `tribe.onnx.export` wrote.
        target: the file to write.
        kind: "float16" stores the weights of convolutions and linear layers in 16 bits, half the size, and computes
            as before. "int8" also computes convolutions with integers of 8 bits.
        images: for int8, some hundred images (N, C, H, W) as the file takes them: they set the ranges of activations.
    """
    check_file(target)
    if kind not in ("float16", "int8"):
        raise ValueError(f"kind is 'float16' or 'int8'; got {kind!r}")
    session = Session(path)
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("quantize needs onnx: pip install 'tribe-tta[onnx]'", name="onnx") from error
    if kind == "float16":
        model = onnx.load(path)
        _halve(model.graph)
    else:
        if images is None:
            raise ValueError("int8 needs images, which set the ranges of activations: quantize(..., images=x)")
        model = _with_integers(path, session, images)
    write_atomically(target, model.SerializeToString())


def _halve(graph: Any) -> None:
    """Store the weights of convolutions and linear layers in float16; a runtime casts them once, when it opens them."""
    from onnx import TensorProto, helper, numpy_helper

    weights = {node.input[1] for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")}
    weights -= {name for name in weights if all_reads(graph).count(name) > 1}
    for tensor in graph.initializer:
        if tensor.name not in weights or tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        if np.abs(values).max(initial=0) > np.finfo(np.float16).max:
            raise ModelFileError(f"the weight {tensor.name} has numbers that float16 cannot hold")
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{name}.half"))
        graph.node.insert(0, helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT))


class _Images:
    """Images and the first state, as onnxruntime's calibration reads them."""

    def __init__(self, session: Session, images: Array) -> None:
        self._feeds = self._batches(session, images)

    def _batches(self, session: Session, images: Array) -> Iterator[Mapping[str, Array]]:
        for start in range(0, len(images), BATCH):
            batch, state = images[start : start + BATCH], session.state("calibration")
            yield session.given(batch) | {name: state[name] for name in session.moving}
            session(batch, stream="calibration")

    def get_next(self) -> Mapping[str, Array] | None:
        """Return the inputs of the next run; None: there are no more."""
        return next(self._feeds, None)


def _with_integers(path: str | PathLike[str], session: Session, images: Array) -> Any:
    """Return the model with convolutions of 8 bits, by onnxruntime's static quantisation."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    logging.getLogger().addFilter(_is_loud := lambda record: "pre-processing" not in record.getMessage())
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "int8.onnx"
            quantize_static(
                str(path),
                str(made),
                _Images(session, images),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=["Conv"],
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
            )
            model = onnx.load(made)
    finally:
        logging.getLogger().removeFilter(_is_loud)
    given = onnx.load(path)
    del model.metadata_props[:]
    model.metadata_props.extend(given.metadata_props)
    return model
