"""Change the graph of a model file after torch has written it."""

from collections.abc import Collection, Mapping
from typing import Any


def put_behind_condition(graph: Any, condition: str, outputs: Mapping[str, str]) -> None:
    """Compute some outputs only where a condition holds; else each is a copy of the input that it is mapped to.

    Nodes that serve nothing but these outputs move into the branch.
    """
    from onnx import helper

    kept = {value.name for value in graph.output} - outputs.keys()
    users: dict[str, list[int]] = {}
    for i, node in enumerate(graph.node):
        for name in reads(node):
            users.setdefault(name, []).append(i)
    moved: set[int] = set()
    for i in reversed(range(len(graph.node))):
        made = [name for name in graph.node[i].output if name]
        used = all(name in outputs or (name not in kept and name in users) for name in made)
        if used and all(user in moved for name in made for user in users.get(name, ())):
            moved.add(i)
    shown = {value.name: value for value in graph.output}
    branch = [node for i, node in enumerate(graph.node) if i in moved]
    then_names, else_names = ([f"{name}.{kind}" for name in outputs] for kind in ("followed", "stayed"))
    renamed = dict(zip(outputs, then_names, strict=True))
    for node in branch:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = renamed.get(name, name)
    other = [helper.make_node("Identity", [b], [e]) for b, e in zip(outputs.values(), else_names, strict=True)]

    def subgraph(name: str, nodes: list[Any], results: list[str]) -> Any:
        values = []
        for output, result in zip(outputs, results, strict=True):
            value = type(shown[output])()
            value.CopyFrom(shown[output])
            value.name = result
            values.append(value)
        return helper.make_graph(nodes, name, [], values)

    branches = {
        "then_branch": subgraph("follow", branch, then_names),
        "else_branch": subgraph("stay", other, else_names),
    }
    choice = helper.make_node("If", [condition], list(outputs), name="follow_if_observed", **branches)
    rest = [node for i, node in enumerate(graph.node) if i not in moved]
    del graph.node[:]
    graph.node.extend([*rest, choice])


def hide_outputs(graph: Any, names: Collection[str]) -> None:
    """Keep values, and their names, and return them no more."""
    for value in [value for value in graph.output if value.name in names]:
        graph.output.remove(value)


def all_reads(graph: Any) -> list[str]:
    """Return every name that a graph reads, once for each time, and its outputs."""
    return [name for node in graph.node for name in reads(node)] + [value.name for value in graph.output]


def reads(node: Any) -> list[str]:
    """Return the names that a node reads, those in its subgraphs included."""
    inner = [
        name for attribute in node.attribute if attribute.HasField("g") for n in attribute.g.node for name in reads(n)
    ]
    return [*node.input, *inner]


def fold_sums(graph: Any) -> None:
    """Put what is added to each channel after a convolution into its bias, so that a runtime has less to do."""
    from onnx import numpy_helper

    values = {t.name: t for t in graph.initializer}
    convolutions = {node.output[0]: node for node in graph.node if node.op_type == "Conv"}
    every = all_reads(graph)
    for node in [node for node in graph.node if node.op_type == "Add"]:
        convolution, added = convolutions.get(node.input[0]), values.get(node.input[1])
        if convolution is None or added is None or every.count(node.input[0]) > 1:
            continue
        width = values[convolution.input[1]].dims[0] if convolution.input[1] in values else 0
        if list(added.dims) != [width, 1, 1]:
            continue
        bias = numpy_helper.to_array(added).reshape(-1)
        if len(convolution.input) > 2:
            if convolution.input[2] not in values:
                continue
            bias = bias + numpy_helper.to_array(values[convolution.input[2]])
            convolution.input.pop()
        convolution.input.append(f"{node.output[0]}.bias")
        graph.initializer.append(numpy_helper.from_array(bias, convolution.input[2]))
        convolution.output[0] = node.output[0]
        graph.node.remove(node)
    used = {name for node in graph.node for name in reads(node)}
    for tensor in [t for t in graph.initializer if t.name not in used]:
        graph.initializer.remove(tensor)


def strip(model: Any) -> None:
    """Remove what torch wrote for its own developers: stack traces and names of modules, twice the size of a graph."""
    for message in (model, model.graph):
        message.ClearField("metadata_props")
    pending = [model.graph]
    while pending:
        graph = pending.pop()
        for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
            for field in ("metadata_props", "doc_string"):
                part.ClearField(field)
        pending += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]


def translations() -> dict[Any, Any]:
    """Return operators of ONNX for those of torch that torch's exporter does not translate."""
    import torch
    from onnxscript import opset18

    op: Any = opset18

    def cummax(x: Any, dim: int) -> Any:
        """Return the largest number so far along the last axis, without its place, which nothing here reads."""
        size = op.Shape(x, start=-1)
        before = op.Trilu(op.Expand(op.CastLike(1, x), op.Concat(size, size, axis=0)), upper=0)
        least = op.ReduceMin(x, keepdims=1)
        seen = op.Where(op.Cast(before, to=9), op.Unsqueeze(x, [-2]), op.Unsqueeze(least, [-1]))
        largest = op.ReduceMax(seen, [-1], keepdims=0)
        return largest, largest

    return {torch.ops.aten.cummax.default: cummax}
