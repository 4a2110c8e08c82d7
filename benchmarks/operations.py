"""Count the operations that a step launches: a GPU waits for each of them, so fewer and larger ones are faster.

The count runs on torch's meta device, where tensors have shapes but no values. Nothing is computed, and a step that
reads a value fails. ``python -m benchmarks.operations --model wrn28_10`` prints a table.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tribe
from tribe.core.state import tree_map
from tribe.experiments.bench.contenders import build
from tribe.experiments.bench.results import table

FREE = {
    "promote_types",
    "scalar_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
}


class Count(TorchDispatchMode):
    """Count the operations that reach the device; views and allocations do not."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


def count(network: str, method: str, classes: int, batch: int, streams: int = 1) -> Counter[str]:
    """Count the operations of one step, by name."""
    net = tribe.Backbone(build(network, classes)).to("meta")
    rule = tribe.methods.create(method, classes=classes)
    state = tree_map(lambda t: t.to("meta"), rule.init(net, streams))
    x = torch.empty(streams, batch, *tribe.models.architecture(network).shape, device="meta")
    with Count() as seen:
        rule.step(net, state, x, retired=tree_map(torch.empty_like, state))
    return seen.operations


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser("python -m benchmarks.operations", description=__doc__.partition("\n")[0])
    p.add_argument("--model", default="wrn28_10")
    p.add_argument("--method", action="append", help="default: source, tent and tribe")
    p.add_argument("--classes", type=int, default=10)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--streams", type=int, default=1)
    p.add_argument("--top", type=int, default=12, help="how many operations to list")
    o = p.parse_args(argv)
    for method in o.method or ["source", "tent", "tribe"]:
        seen = count(o.model, method, o.classes, o.batch, o.streams)
        cells = [(name, str(n)) for name, n in seen.most_common(o.top)]
        print(f"{o.model}, {method}: {seen.total()} operations a step\n\n{table(('', 'calls'), cells)}\n")


if __name__ == "__main__":
    main()
