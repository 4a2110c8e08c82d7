"""Write a model file that adapts: images and state in, logits and next state out."""

import base64
import contextlib
import dataclasses
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from tribe._version import __version__
from tribe.core.backbone import Backbone
from tribe.core.bounds import bounded
from tribe.core.state import leaves
from tribe.fields import is_whole
from tribe.filters import TimeFilter
from tribe.filters.checked import Checked
from tribe.filters.markov import Markov
from tribe.health.prepared import Prepared, check_alone
from tribe.io.files import check_file, write_atomically
from tribe.methods import AnyMethod, Pipeline, get_fields
from tribe.methods.bank import Bank
from tribe.methods.building import backbone_for, build_method, check_network
from tribe.methods.encoding import method_for_file
from tribe.onnx.graph import ModelGraph, Options, first_frames
from tribe.onnx.one_pass import FOLLOWS
from tribe.onnx.states import FORMAT, ModelFileError
from tribe.onnx.surgery import fold_sums, hide_outputs, put_behind_condition, strip, translations
from tribe.onnx.tracing import explain
from tribe.streams.adapter import Adapter

OPSET, MOST_BYTES = 18, 2**26  # of a state that a file begins with
INSTEAD = "tribe.onnx.export(net, ...), or an adapter of tribe.adapt(net, 'bank', compare=0), follows the stream in one"
ALONE = "give the network and prepared=, or export a bank without it"


class ExportParts(NamedTuple):
    """The parts of a model file."""

    net: Backbone
    method: AnyMethod
    state: Any
    frozen: bool
    differs: tuple[str, ...] = ()  # from the prepared file

    @property
    def bank(self) -> Bank:
        """The method alone."""
        bank: Any = Pipeline.of(self.method).method
        return bank  # type: ignore[no-any-return]

    @property
    def filter(self) -> Markov | None:
        """The time filter, if there is one."""
        rule: Any = Pipeline.of(self.method).filter
        return rule  # type: ignore[no-any-return]


def export(
    model: nn.Module | Backbone | Adapter,
    path: str | PathLike[str],
    shape: Sequence[int] | None = None,
    *,
    prepared: Prepared | str | PathLike[str] | None = None,
    time: str | TimeFilter | None = None,
    valid: bool = False,
    uint8: bool = False,
    frames: bool = False,
    source_logits: bool = False,
    opset: int = OPSET,
    **fields: Any,
) -> None:
    """Write an ONNX file that adapts while it predicts.

    Args:
        model: an adapter with one stream of method `bank` with compare=0, and perhaps a time filter: the file begins
            with its state. Or a network, which gets that method.
        path: the file to write.
        shape: of an image, (C, H, W). None: that of the prepared file.
        prepared: a prepared file for a network, `tribe.prepare`: the file adapts as it says, as far as one forward pass
            goes, with the frame checks of its guard. `tribe.onnx.Session.differs` names what it leaves out.
        time: a time filter for a network, as for `tribe.adapt`.
        valid: the file takes marks of real images (N,), False for padding.
        uint8: it takes images of 0 to 255, and divides them by 255.
        frames: it does not learn from black, white, flat, frozen and noisy images, as a guard.
        source_logits: it returns the source's predictions, too, at the cost of a second pass.
        opset: the version of ONNX's operators.
        fields: hyper-parameters of `bank`, for a network.

    Raises:
        ModelFileError: the method needs more than a forward pass, or a layer of the network cannot be traced.
    """
    check_file(path)
    known = Prepared.of(prepared)
    if known is not None:
        check_alone(time=time, **fields)
        source, skips = _prepared_source(model, known)
        shape, frames = shape or known.inputs.shape, frames or skips
    else:
        source = _source(model, time, fields)
    if shape is None:
        raise ValueError("shape is that of an image, (C, H, W): a network does not say it")
    options = Options(valid, uint8, frames, source_logits)
    images = _example(source, shape, uint8)
    graph = ModelGraph(source.net, source.bank, source.filter, options).eval()
    first = leaves(source.state) | (first_frames() if frames else {})
    first = {name: t.clone(memory_format=torch.contiguous_format) for name, t in first.items()}  # usual strides
    marks = (torch.ones(len(images), dtype=torch.bool),) if valid else ()
    proto = _trace(graph, (images, *marks, *(first[name] for name in graph.names)), opset)
    prefix = next(iter(graph.bank_names)).removesuffix(FOLLOWS[0])
    put_behind_condition(proto.graph, "observed", {f"next.{prefix}{name}": prefix + name for name in FOLLOWS})
    hide_outputs(proto.graph, graph.named)
    for key, value in _metadata(source, shape, options, graph.names, first).items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    write_atomically(path, proto.SerializeToString())


def _source(model: Any, time: str | TimeFilter | None, fields: Mapping[str, Any]) -> ExportParts:
    """Return the parts of a model file, or say why there can be none."""
    if isinstance(model, Adapter):
        if fields or time is not None:
            raise TypeError("the adapter has a method already: its fields and time= are those of tribe.adapt")
        _check_method(model.method)
        if model.streams != 1:
            raise ModelFileError(f"a model file has one stream, and this adapter {model.streams}; a session has many")
        source = ExportParts(model.net, model.method, model.snapshot().state, model.info[0].frozen)
    else:
        net = backbone_for(model, "bank")
        method = build_method(net, "bank", time, None, {"compare": 0, **fields})
        check_network(net, method)
        _check_method(method)
        source = ExportParts(net, method, method.init(net), False)
    return _checked(source)


def _prepared_source(model: Any, prepared: Prepared) -> tuple[ExportParts, bool]:
    """Return the parts of a model file that adapts as a prepared file says, and whether it checks frames."""
    if isinstance(model, Adapter):
        raise TypeError("a prepared file is for a network, and this is an adapter: give one or the other")
    net = model if isinstance(model, Backbone) else Backbone(model)
    parts = Pipeline.of(prepared.build(net))
    method, guard, differs = parts.method, parts.guard, list[str]()
    if isinstance(method, Bank):
        given = get_fields(method)
        if given.get("learn_every"):
            differs.append(f"it does not learn by gradients (learn_every={given['learn_every']})")
        if method.compare:
            differs.append(
                f"it does not compare itself with the source (compare={method.compare}), nor remember places"
            )
        kept = {field.name: given[field.name] for field in dataclasses.fields(Bank)} | {"compare": 0}
        method = Bank(**kept)
    skips = guard is not None and guard.acts and guard.skip
    if guard is not None:
        words = "of the guard it has the checks of frames alone, image by image" if skips else "it has no guard"
        leans = "" if getattr(guard, "lean_half", None) is None else "does not lean on the source, "
        differs.append(f"{words}: it {leans}does not go back, raises no alarm and estimates no accuracy")
    built: AnyMethod = method if parts.filter is None else Pipeline(method, filter=parts.filter)
    _check_method(built)
    return _checked(ExportParts(net, built, built.init(net), False, tuple(differs))), skips


def _checked(source: ExportParts) -> ExportParts:
    """Return the parts, or refuse their network."""
    net = source.net
    if not net.has_statistics:
        raise ModelFileError(
            "the network has no BatchNorm layer with statistics, and without a backward pass nothing else adapts: "
            "tribe.adapt(net, 'tent') and others adapt LayerNorm and GroupNorm, in torch"
        )
    if net.device.type != "cpu" or net.dtype != torch.float32:
        raise ModelFileError(f"export takes a network on the CPU in float32; this one is on {net.device}, {net.dtype}")
    return source


def _check_method(method: AnyMethod) -> None:
    """Raise unless a forward pass computes the whole step of a method."""
    parts = Pipeline.of(method)
    if parts.rare is not None or type(parts.method) is not Bank:
        why = "predicts and keeps nothing" if parts.method.does_not_adapt else "needs more than a forward pass"
        raise ModelFileError(f"{method.name!r} cannot be a model file that adapts: it {why}. {INSTEAD}")
    if parts.method.compare:
        count = parts.method.compare
        raise ModelFileError(
            f"'bank' with compare={count} passes an image in {count} through the source, too. {INSTEAD}"
        )
    if parts.guard is not None:
        raise ModelFileError(
            f"{parts.guard.name!r} cannot be in a model file: {ALONE}; frames=True has its frame checks"
        )
    if parts.filter is not None and (type(parts.filter) not in (Markov, Checked) or parts.filter.uses_batch):
        raise ModelFileError(f"the time filter {parts.filter!r} cannot be in a model file; time='auto' can")


def _example(source: ExportParts, shape: Sequence[int], uint8: bool) -> Tensor:
    """Return images for tracing, and check that the network takes them."""
    if len(shape) != 3 or not all(is_whole(size, least=1) for size in shape):
        raise ValueError(f"shape is that of an image, (C, H, W); got {tuple(shape)}")
    count = 2 * source.bank.observe + 1
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))
    source.method.predict(source.net, source.state, x[None])
    return (255 * x).to(torch.uint8) if uint8 else x


def _trace(graph: ModelGraph, given: tuple[Tensor, ...], opset: int) -> Any:
    """Return the ONNX model of a graph; an error names the layer that cannot be traced."""
    try:
        import onnx
        import onnxscript  # noqa: F401  torch needs it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "export needs onnx and onnxscript: pip install 'tribe-tta[onnx]'", name=error.name
        ) from error
    newest = onnx.defs.onnx_opset_version()
    if not OPSET <= opset <= newest:
        raise ModelFileError(
            f"opset={opset}: expected {OPSET} to {newest}, the newest that onnx {onnx.__version__} knows"
        )
    # torch assumes 3 frames at least; what it writes holds for fewer.
    batch = torch.export.Dim("batch", min=3 if graph.options.frames else 1, max=2**16)
    dynamic = ({0: batch}, tuple({0: batch} if t.dtype == torch.bool else None for t in given[1:]))
    inputs = ["images", *["valid"] * graph.options.valid, *graph.names]
    with torch.no_grad(), _quiet():
        try:
            program = torch.export.export(graph, given, dynamic_shapes=dynamic)
            made: Any = torch.onnx.export(
                program,
                input_names=inputs,
                output_names=[*graph.outputs, *graph.named],
                opset_version=opset,
                custom_translation_table=translations(),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        except ModelFileError:
            raise
        except Exception as error:  # torch raises many kinds, for the code of the network
            raise explain(graph.step.network, given[0], error) from error
    proto = made.model_proto
    strip(proto)
    fold_sums(proto.graph)
    return proto


def _metadata(
    source: ExportParts, shape: Sequence[int], options: Options, moving: list[str], first: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return what a session reads: a header as JSON, and the first state as safetensors."""
    header = {
        "tribe": __version__,
        "method": source.method.name,
        "fields": method_for_file(source.method),
        "fingerprint": source.net.fingerprint(),
        "classes": source.bank.class_count,
        "shape": list(shape),
        "options": options._asdict(),
        "frozen": source.frozen,
        "differs": list(source.differs),
        "moving": moving,
        "state": _described(source),
        "shapes": {name: list(t.shape) for name, t in first.items()},
    }
    compact = {name: _compact(t) for name, t in first.items()}
    if sum(t.nbytes for t in compact.values()) > MOST_BYTES:
        raise ModelFileError(
            "the adapter's state is too large to be put into the file: export the network, and give the state to "
            "Session.load, a file of Adapter.save"
        )
    start = base64.b64encode(save(compact)).decode()
    return {"tribe.format": FORMAT, "tribe.header": json.dumps(header), "tribe.start": start}


def _described(source: ExportParts) -> dict[str, list[Any]]:
    """Return the type and the bounds of every tensor of a state."""
    described = {}
    for name, t, bounds in bounded(source.state, source.bank.class_count):
        ends: list[Any] = [None, None] if bounds is None else [bounds.low, bounds.high]
        ends = [None if end is None or math.isinf(end) else end for end in ends]  # JSON has no infinity
        described[name] = [str(t.dtype).removeprefix("torch."), *ends]
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
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
