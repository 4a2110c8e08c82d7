"""Rewrite a model file for the processor of this machine, as a session does with ``tune=True``.

ONNX Runtime computes convolutions in a blocked order of channels (NCHWc), if their weights are constants. Weights that
are scaled in the graph are none, and a scale after a convolution leaves the blocked order and comes back. So the
runtime first compiles two versions of the network, whose statistics are placeholders that it takes for constants:

    plain       each normalisation is in the weights and the bias of its convolution
    observing   each normalisation is a convolution of single pixels after it; the moments are averages before it

Then values of the pass replace the placeholders: blocked weights are multiplied by the scale, by a model of its own
that runs when the statistics have moved. Images that are observed take the second network, all others the first. The
result suits this processor and this version of the runtime. So it is made when a file is opened, and never written.
"""

import json
import math
import tempfile
from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tribe.onnx.states import ModelFileError
from tribe.onnx.surgery import reads

MARK = 2**20  # a placeholder for layer i is the number MARK + i in all channels
BLOCKED = "com.microsoft.nchwc"
GIVEN = ("net.x", "net.scale", "net.shift", "net.chosen")  # what a network is given
MADE = ("net.logits", "net.moments")  # and what it returns


class FoldableNorm(NamedTuple):
    """A normalisation after a convolution."""

    node: int  # its place among the nodes
    convolution: int
    bias: Any  # of the convolution, an array (c,)
    scale: str
    shift: str


class Piece(NamedTuple):
    """Nodes with their constants, and apart from them the nodes that compute scaled weights."""

    nodes: list[Any]
    constants: list[Any]
    folding: Sequence[Any] = ()
    folded: Sequence[Any] = ()  # descriptions of these weights


class Tuned(NamedTuple):
    """Models as bytes. Folded weights are outputs of ``folding`` and inputs of ``model``."""

    model: bytes
    folding: bytes | None


def tune(path: str | PathLike[str]) -> Tuned:
    """Return models that compute what a model file does, for this machine; the file itself stays as it is."""
    import onnx
    from onnx import helper

    model = onnx.load(path)
    nodes = list(model.graph.node)
    produced = {name for node in nodes for name in node.output}
    splits = "net.chosen" in produced  # else every image is observed
    parts = {kind: _parts(nodes, f"net.{kind}") for kind in ("scale", "shift")}
    given = {*GIVEN, *parts["scale"], *parts["shift"]}
    inner = _ancestors(nodes, MADE, given)
    norms = _norms(nodes, inner, given, parts, model.graph.initializer)
    outer = {name for i in inner for name in nodes[i].input} & {value.name for value in model.graph.input}
    if not norms or outer:
        raise ModelFileError(f"{path} cannot be tuned: it has no normalisation after a convolution in float32")
    observing = _compiled(model, _observing(nodes, inner, norms, given), given, MADE, norms)
    statistics = _ancestors(nodes, given - {*GIVEN}, ())  # they serve the networks alone
    before = _ancestors(nodes, {"net.x", "net.chosen"} if splits else given, ())
    own = inner | statistics
    outside = {name for i, node in enumerate(nodes) if i not in own for name in reads(node)}
    shared = _ancestors(nodes, outside - {*MADE}, {*given, *MADE}) & own
    before |= shared & statistics
    rest = [node for i, node in enumerate(nodes) if i in shared - before or i not in own | before]
    known = {opset.domain for opset in model.opset_import}
    model.opset_import.extend(helper.make_opsetid(name, 1) for name in {"com.microsoft", BLOCKED} - known)
    chosen, folding = observing, None
    if splits:
        plain = _compiled(model, _plain(nodes, norms, given), given, MADE[:1], norms)
        observing = observing._replace(nodes=[*(nodes[i] for i in sorted(statistics - before)), *observing.nodes])
        chosen = _choice(plain, observing, json.loads(_metadata(model)["tribe.header"]))
        folding = _folding(model, [nodes[i] for i in sorted(statistics)], plain)
        model.graph.input.extend(plain.folded)
        model.graph.output.append(helper.make_tensor_value_info("observed", onnx.TensorProto.BOOL, []))
    constants = [*model.graph.initializer, *chosen.constants]
    del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
    model.graph.node.extend([*(nodes[i] for i in sorted(before)), *chosen.nodes, *rest])
    model.graph.initializer.extend(constants)
    return Tuned(model.SerializeToString(), folding)


def _folding(model: Any, nodes: Sequence[Any], plain: Piece) -> bytes:
    """Return a model that computes the weights of the plain network from a state."""
    from onnx import helper

    every = [*nodes, *plain.folding]
    wanted = {name for node in every for name in node.input}
    constants = [t for t in (*model.graph.initializer, *plain.constants) if t.name in wanted]
    inputs = [value for value in model.graph.input if value.name in wanted]
    graph = helper.make_graph(every, "folding", inputs, plain.folded, constants)
    made: bytes = helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version
    ).SerializeToString()
    return made


def _metadata(model: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def _ancestors(nodes: Sequence[Any], outputs: Collection[str], ends: Collection[str]) -> set[int]:
    """Return the places of the nodes that compute outputs from values at which the search ends."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.output}
    found: set[int] = set()
    pending = [name for name in outputs if name in makers]
    while pending:
        i = makers[pending.pop()]
        if i not in found:
            found.add(i)
            pending += [name for name in nodes[i].input if name in makers and name not in ends]
    return found


def _parts(nodes: Sequence[Any], name: str) -> list[str]:
    """Return the parts that a value is split into, one for each normalisation."""
    return next((list(node.output) for node in nodes if node.op_type == "Split" and node.input[0] == name), [])


def _norms(
    nodes: Sequence[Any], inner: set[int], given: Collection[str], parts: dict[str, list[str]], initializers: Any
) -> list[FoldableNorm]:
    """Return the normalisations whose input is a convolution that nothing else but the moments reads."""
    from onnx import numpy_helper

    values = {t.name: t for t in initializers}
    makers = {name: i for i, node in enumerate(nodes) for name in node.output}
    scales, shifts = parts["scale"], parts["shift"]
    forward = [name for i in _ancestors(nodes, MADE[:1], given) for name in nodes[i].input]
    found = []
    for i in sorted(inner):
        node = nodes[i]
        convolution = makers.get(node.input[0], -1) if node.op_type == "BatchNormalization" else -1
        if convolution < 0 or node.input[1] not in scales or nodes[convolution].op_type != "Conv":
            continue
        bias = values.get(nodes[convolution].input[2]) if len(nodes[convolution].input) > 2 else None
        if bias is not None and forward.count(node.input[0]) == 1:
            k = scales.index(node.input[1])
            found.append(FoldableNorm(i, convolution, numpy_helper.to_array(bias), scales[k], shifts[k]))
    return found


def _copies(nodes: Sequence[Any], places: Collection[int]) -> dict[int, Any]:
    copies = {}
    for i in sorted(places):
        copies[i] = type(nodes[i])()
        copies[i].CopyFrom(nodes[i])
    return copies


def _constant(name: str, values: Any) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.ascontiguousarray(values), name)


def _placeholder(k: int, norm: FoldableNorm) -> Any:
    return _constant(f"placeholder.{k}", np.full(len(norm.bias), MARK + k, np.float32))


def _plain(nodes: Sequence[Any], norms: Sequence[FoldableNorm], given: Collection[str]) -> Piece:
    """Return the network without moments, with a placeholder in place of each normalisation."""
    kept = _copies(nodes, _ancestors(nodes, MADE[:1], given))
    constants = []
    for k, norm in enumerate(norms):
        constants.append(_placeholder(k, norm))
        convolution, node = kept[norm.convolution], kept.pop(norm.node)
        convolution.input[2], convolution.output[0] = constants[-1].name, node.output[0]
    return Piece(list(kept.values()), constants)


def _observing(nodes: Sequence[Any], inner: set[int], norms: Sequence[FoldableNorm], given: Collection[str]) -> Piece:
    """Return the network with the moments of all images, and a placeholder in place of each normalisation."""
    from onnx import helper

    kept, constants = _copies(nodes, inner), []
    forward = _ancestors(nodes, MADE[:1], given)
    aliases: dict[str, str] = {"net.chosen": "net.chosen"}
    result = []
    for i, node in kept.items():
        for at, name in enumerate(node.input):
            node.input[at] = aliases.get(name, name)
        if i in forward or node.op_type not in ("Reshape", "Gather", "ReduceMean"):
            result.append(node)
        elif node.op_type == "Reshape" and node.input[0] == "net.chosen":
            aliases[node.output[0]] = "net.chosen"
        elif node.op_type == "Gather" and node.input[1] == "net.chosen":
            aliases[node.output[0]] = node.input[0]  # every image is chosen
        else:  # an average over pixels
            pooled = f"{node.output[0]}.pooled"
            result.append(helper.make_node("GlobalAveragePool", [node.input[0]], [pooled]))
            result.append(helper.make_node("Flatten", [pooled], [node.output[0]], axis=1))
    for k, norm in enumerate(norms):
        ones = _constant(f"ones.{k}", np.ones((len(norm.bias), 1, 1, 1), np.float32))
        constants += [ones, _placeholder(k, norm)]
        old = kept[norm.node]
        names = [old.input[0], ones.name, constants[-1].name]
        place = next(i for i, node in enumerate(result) if node is old)
        result[place] = helper.make_node("Conv", names, [old.output[0]], group=len(norm.bias), kernel_shape=[1, 1])
    return Piece(result, constants)


def _compiled(
    model: Any, piece: Piece, given: Collection[str], outputs: Sequence[str], norms: Sequence[FoldableNorm]
) -> Piece:
    """Let the runtime optimise a network, then put values of the pass in place of the placeholders."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    wanted = {name for node in piece.nodes for name in node.input}
    constants = [*piece.constants, *(t for t in model.graph.initializer if t.name in wanted)]
    shape = ["images", *json.loads(_metadata(model)["tribe.header"])["shape"]]
    inputs = [helper.make_tensor_value_info("net.x", TensorProto.FLOAT, shape)]
    inputs += [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, None)
        for n in sorted(given)
        if n in wanted and n != GIVEN[0]
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(piece.nodes, "network", inputs, results, constants)
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    graph = onnx.load_from_string(_optimised(alone.SerializeToString())).graph
    values, block = {t.name: t for t in graph.initializer}, _block_size()
    nodes: list[Any] = []
    folding: list[Any] = []
    folded: list[Any] = []
    for node in graph.node:
        bias = values.get(node.input[2]) if node.op_type in ("Conv", "FusedConv") and len(node.input) > 2 else None
        first = 0.0 if bias is None else float(numpy_helper.to_array(bias).flat[0])
        if bias is not None and first >= MARK:
            whole = numpy_helper.to_array(values[node.input[1]])
            weight = whole if outputs == MADE[:1] else None
            width = block if node.domain == BLOCKED else 1
            k = int(first) - MARK
            made = _scaled(node, norms[k], weight, whole.shape, bias.dims[0], width, f"{k}", graph.initializer)
            (nodes if weight is None else folding).extend(made)
            if weight is not None:
                shapes = zip(node.input[1:3], (whole.shape, bias.dims), strict=True)
                folded += [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(dims)) for n, dims in shapes]
        nodes.append(node)
    prefix = "plain." if outputs == MADE[:1] else "observing."
    used = {name for node in (*nodes, *folding) for name in node.input}
    kept = [t for t in graph.initializer if t.name in used]
    own = {t.name for t in kept} | {name for node in (*nodes, *folding) for name in node.output}
    own -= set(outputs)
    for value in folded:
        value.name = prefix + value.name
    for node in (*nodes, *folding):
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = prefix + name if name in own else name
    for t in kept:
        t.name = prefix + t.name
    return Piece(nodes, kept, folding, folded)


def _scaled(
    node: Any,
    norm: FoldableNorm,
    weight: Any,
    shape: tuple[int, ...],
    rows: int,
    width: int,
    name: str,
    initializers: Any,
) -> list[Any]:
    """Give a convolution scaled weights, or if it has none a scale alone; return the nodes that compute them.

    Blocked weights have the channels of a block last, and the blocks first.
    """
    from onnx import helper

    def constant(part: str, values: Any) -> str:
        initializers.append(_constant(f"{part}.{name}", values))
        return f"{part}.{name}"

    made = []

    def compute(kind: str, inputs: list[str], part: str, **attributes: Any) -> str:
        made.append(helper.make_node(kind, inputs, [f"{part}.{name}"], **attributes))
        return f"{part}.{name}"

    scale, shift, missing = norm.scale, norm.shift, rows - len(norm.bias)
    if weight is not None:
        own = compute("Mul", [scale, constant("bias", norm.bias)], "moved")
        shift = compute("Add", [own, shift], "shift")
    if missing:
        zeros = constant("zeros", np.zeros(missing, np.float32))
        scale = compute("Concat", [scale, zeros], "padded_scale", axis=0)
        shift = compute("Concat", [shift, zeros], "padded_shift", axis=0)
    final = constant("shape", np.array(shape, np.int64))
    if weight is not None:
        # Several rows of a block at once: a runtime multiplies long rows faster.
        weight = weight.reshape(rows // width, -1, width)
        together = math.gcd(weight.shape[1], 64)
        blocks = constant("blocks", np.array([rows // width, 1, 1, width], np.int64))
        tiled = constant("tiled", np.array([rows // width, 1, together, width], np.int64))
        longer = constant("longer", np.array([rows // width, 1, together * width], np.int64))
        scale = compute("Expand", [compute("Reshape", [scale, blocks], "factors"), tiled], "tiles")
        scale = compute("Reshape", [scale, longer], "rows")
        scale = compute(
            "Mul", [constant("weight", weight.reshape(rows // width, -1, together * width)), scale], "product"
        )
    node.input[1], node.input[2] = compute("Reshape", [scale, final], "weights"), shift
    return made


def _optimised(data: bytes) -> bytes:
    """Return a model as the runtime optimises it for this machine."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        return Path(options.optimized_model_filepath).read_bytes()


def _block_size() -> int:
    """Return how many channels a block has; 1 if the runtime does not use blocks here."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = np.arange(64, dtype=np.float32).repeat(64).reshape(64, 64, 1, 1)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64, 8, 8]) for name in "xy")
    conv = helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[1, 1])
    graph = helper.make_graph([conv], "probe", [x], [y], [_constant("w", weight)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    made = onnx.load_from_string(_optimised(model.SerializeToString())).graph
    (node,) = [node for node in made.node if node.op_type == "Conv"]
    if node.domain != BLOCKED:
        return 1
    flat = numpy_helper.to_array(next(t for t in made.initializer if t.name == node.input[1])).reshape(-1)
    return int(np.flatnonzero(flat == 0)[1])  # the first channel comes again with the next input


def _choice(plain: Piece, observing: Piece, header: dict[str, Any]) -> Piece:
    """Return nodes that pass observed images through one network and all others through the other."""
    from onnx import TensorProto, helper

    channels = next(shape[-1] for name, shape in header["shapes"].items() if name.endswith("stats.mean"))
    constants = [
        _constant("choice.zero", np.zeros(1, np.int64)),
        _constant("choice.axis", np.array([0], np.int64)),
        _constant("choice.none", np.array(0, np.int64)),
        _constant("choice.one", np.array(1, np.int64)),
    ]

    def node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> Any:
        return helper.make_node(kind, list(inputs), [f"choice.{output}"], **attributes)

    def branch(name: str, nodes: list[Any], results: dict[str, str], kept: Sequence[Any] = ()) -> Any:
        values = [helper.make_tensor_value_info(result, TensorProto.FLOAT, None) for result in results.values()]
        return helper.make_graph(nodes, name, [], values, kept)

    def choose(name: str, piece: Piece, index: str, widths: dict[str, int]) -> list[Any]:
        """Run a network on some images, if there are any."""
        used = {value for part in piece.nodes for value in part.input}
        select = helper.make_node("Gather", ["net.x", index], [f"{name}.x"], axis=0)
        results = {output: f"{name}.then.{output}" for output in widths}
        inside = [select]
        for part in piece.nodes:
            copy = type(part)()
            copy.CopyFrom(part)
            copy.input[:] = [f"{name}.x" if n == "net.x" else results.get(n, n) for n in part.input]
            copy.output[:] = [results.get(n, n) for n in part.output]
            inside.append(copy)
        other = {output: f"{name}.else.{output}" for output in widths}
        empty = [
            helper.make_node("Constant", [], [other[o]], value=_constant(o, np.zeros((0, w), np.float32)))
            for o, w in widths.items()
        ]
        some = [
            helper.make_node("Size", [index], [f"{name}.count"]),
            helper.make_node("Greater", [f"{name}.count", "choice.none"], [f"{name}.some"]),
        ]
        branches = {
            "then_branch": branch(f"{name}.pass", inside, results, [t for t in piece.constants if t.name in used]),
            "else_branch": branch(f"{name}.skip", empty, other),
        }
        outputs = [f"{name}.{output}" if output != "net.moments" else output for output in widths]
        return [*some, helper.make_node("If", [f"{name}.some"], outputs, **branches)]

    nodes = [
        node("Shape", ["net.x"], "count", end=1),
        helper.make_node(
            "ConstantOfShape", ["choice.count"], ["choice.unmarked"], value=_constant("v", np.zeros(1, np.int64))
        ),
        node("Expand", ["choice.one", "choice.size"], "ones"),
        node("ScatterElements", ["choice.unmarked", "net.chosen", "choice.ones"], "marked"),
        node("Equal", ["choice.marked", "choice.none"], "is_other"),
        node("NonZero", ["choice.is_other"], "places"),
        node("Squeeze", ["choice.places", "choice.axis"], "others"),
        *choose("observing", observing, "net.chosen", {"net.logits": header["classes"], "net.moments": 2 * channels}),
        *choose("plain", plain, "choice.others", {"net.logits": header["classes"]}),
        node("Concat", ["observing.net.logits", "plain.net.logits"], "logits", axis=0),
        node("Concat", ["net.chosen", "choice.others"], "order", axis=0),
        node("Squeeze", ["choice.count", "choice.axis"], "images"),
        node("Range", ["choice.none", "choice.images", "choice.one"], "range"),
        node("ScatterElements", ["choice.unmarked", "choice.order", "choice.range"], "back"),
        helper.make_node("Gather", ["choice.logits", "choice.back"], ["net.logits"], axis=0),
    ]
    nodes.insert(2, node("Shape", ["net.chosen"], "size"))
    return Piece(nodes, constants)
