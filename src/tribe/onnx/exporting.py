"""Write a model file that adapts: images and state in, logits and next state out."""

import base64
import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from tribe._version import __version__
from tribe.core.backbone import Backbone
from tribe.core.bounds import bounded
from tribe.core.state import leaves
from tribe.io.files import check_file, write_atomically
from tribe.methods import Pipeline, create
from tribe.methods.bank import Bank
from tribe.methods.building import backbone_for, check_network
from tribe.methods.encoding import method_for_file
from tribe.onnx.one_pass import FOLLOWS, MOVES, OnePass
from tribe.onnx.surgery import put_behind_condition
from tribe.onnx.states import FORMAT, ModelFileError
from tribe.streams.adapter import Adapter

OPSET = 18
OBSERVED = "observed"  # the name of the condition in a graph
INSTEAD = (
    "A model file adapts by a forward pass alone: export tribe.adapt(net, 'bank', compare=0), which follows the stream "
    "in one pass"
)


class Graph(nn.Module):
    """A step whose state is a list of tensors, as exporters want it."""

    def __init__(self, step: OnePass, names: Sequence[str], prefix: str, masked: bool) -> None:
        super().__init__()
        self.step, self.names, self.prefix, self.masked = step, names, prefix, masked

    def forward(self, images: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Images (N, C, H, W), marks of real images (N,) if there are any, and the state."""
        valid, given = (tensors[0], tensors[1:]) if self.masked else (None, tensors)
        state = {name.removeprefix(self.prefix): t for name, t in zip(self.names, given, strict=True)}
        return self.step(images, valid, state)  # type: ignore[no-any-return]


def export(
    model: nn.Module | Backbone | Adapter,
    path: str | PathLike[str],
    shape: Sequence[int],
    *,
    valid: bool = False,
    uint8: bool = False,
    opset: int = OPSET,
    **fields: Any,
) -> None:
    """Write an ONNX file that adapts while it predicts.

    Args:
        model: an adapter with method `bank` and compare=0, whose state the file begins with; or a network, which gets
            that method.
        path: the file to write.
        shape: of an image, (C, H, W).
        valid: the file has an input of marks, False for padding.
        uint8: images are 0 to 255, and the file divides them.
        opset: the version of ONNX's operators.
        fields: the method's hyper-parameters, for a network.
    """
    check_file(path)
    net, method, state, frozen = _parts(model, fields)
    bank = Pipeline.of(method).method
    prefix = "" if bank is method else "method."
    named = leaves(state)
    moving = [prefix + name for name in MOVES]
    graph = Graph(OnePass(net, bank), moving, prefix, valid).eval()
    images = torch.rand(2 * bank.observe + 1, *shape)
    if uint8:
        images = (255 * images).to(torch.uint8)
    marks = (torch.ones(len(images), dtype=torch.bool),) if valid else ()
    given = (images, *marks, *(named[name] for name in moving))
    batch = torch.export.Dim("batch", min=1, max=2**16)
    dynamic = (({0: batch}), tuple([{0: batch}] * len(marks) + [None] * len(moving)))
    inputs = ["images", *["valid"] * valid, *moving]
    with torch.no_grad(), _quiet():
        program = torch.export.export(graph, given, dynamic_shapes=dynamic)
        made: Any = torch.onnx.export(
            program,
            input_names=inputs,
            output_names=["logits", *(f"next.{name}" for name in moving), OBSERVED],
            opset_version=opset,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    proto = made.model_proto
    put_behind_condition(proto.graph, OBSERVED, {f"next.{prefix}{name}": prefix + name for name in FOLLOWS})
    header = {
        "tribe": __version__,
        "method": method.name,
        "fields": method_for_file(method),
        "fingerprint": net.fingerprint(),
        "classes": bank.class_count,
        "shape": list(shape),
        "uint8": uint8,
        "frozen": frozen,
        "moving": moving,
        "state": _describe(state, bank.class_count),
    }
    start = base64.b64encode(save({name: _compact(t) for name, t in named.items()})).decode()
    metadata = {"tribe.format": FORMAT, "tribe.header": json.dumps(header), "tribe.start": start}
    del proto.metadata_props[:]
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    write_atomically(path, proto.SerializeToString())


def _parts(model: Any, fields: Mapping[str, Any]) -> tuple[Backbone, Any, Any, bool]:
    """Return the network, the method, its state, and whether it is frozen."""
    if isinstance(model, Adapter):
        if fields:
            raise TypeError(f"the adapter has its fields already: {', '.join(fields)}")
        net, method, state = model.net, model.method, model.snapshot().state
        frozen = model.info[0].frozen
        if model.streams != 1:
            raise ModelFileError("a model file holds one stream; the adapter has several")
    else:
        net = backbone_for(model, "bank")
        method = create("bank", **{"classes": net.classes, "compare": 0, "memory": 0, **fields})
        check_network(net, method)
        state, frozen = method.init(net), False
    bank = Pipeline.of(method).method
    if type(bank) is not Bank:
        raise ModelFileError(f"{method.name} cannot be exported. {INSTEAD}")
    if bank.compare:
        raise ModelFileError(f"bank with compare={bank.compare} compares with a second pass. {INSTEAD}")
    return net, method, state, frozen


def _describe(state: Any, classes: int) -> dict[str, Any]:
    """Return the shape, the type and the bounds of every tensor of a state."""
    described = {}
    for name, t, bounds in bounded(state, classes):
        ends = [None, None] if bounds is None else [bounds.low, bounds.high]
        described[name] = [list(t.shape), str(t.dtype).removeprefix("torch."), *ends]
    return described


def _compact(t: Tensor) -> Tensor:
    """Return a tensor with a single entry on each axis along which it is constant."""
    for axis in range(t.dim()):
        if t.shape[axis] > 1 and bool((t == t.narrow(axis, 0, 1)).all()):
            t = t.narrow(axis, 0, 1)
    return t.contiguous()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch and onnxscript print about their own work."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
