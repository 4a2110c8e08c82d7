"""Streams together, with the same bits as each alone: what depends on the size of a batch runs stream by stream.

On a CPU, a convolution or a matrix product of one image may use another algorithm than one of sixty-four, and its last
bits differ. A few functions, such as `sigmoid`, compute the numbers at the end of a tensor in another way than the
rest. In the context of `Apart` these operations get the images of one stream at a time, as if the stream were alone.
All other operations treat every number in the same way wherever it stands, and run on all streams at once. That saves
most of the time: a step of a small network is thousands of small operations, and few of them are in the list.

Each operation in the list treats the parts of its first axis independently, so splitting it never changes its meaning.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

NONE = (None, None, None)
ONLY_INPUT = (True, False, False)  # the gradients that are wanted: not those of weight and bias
ALIGNED = 64  # bytes: a new tensor starts at a multiple, and matrix products may depend on it
CONVOLUTIONS: dict[Any, int] = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}  # and the axes of their input
CONVOLUTIONS |= {torch.conv1d: 3, torch.conv2d: 4, torch.conv3d: 5}
CONVOLUTIONS |= {F.conv_transpose1d: 3, F.conv_transpose2d: 4, F.conv_transpose3d: 5}
PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
BY_PLACE = {  # elementwise functions whose last bits depend on the place of a number in its tensor
    *(torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.silu, F.mish, F.softplus, F.elu, F.selu, F.celu, F.gelu),
    *(torch.selu, torch.celu, torch.atan2, Tensor.atan2, F.logsigmoid, torch.pow, Tensor.pow),
    *(Tensor.__pow__, Tensor.__rpow__, Tensor.pow_, Tensor.__ipow__, Tensor.sigmoid_),
}
NORMS_OF_ROWS = torch.linalg.vector_norm
ATTENTION = F.scaled_dot_product_attention
LISTED = {*CONVOLUTIONS, *PRODUCTS, *BY_PLACE, F.linear, NORMS_OF_ROWS, ATTENTION}
PLAIN_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}
IN_PLACE = {Tensor.pow_, Tensor.__ipow__, Tensor.sigmoid_}


class Apart(TorchFunctionMode):
    """In this context, operations that depend on the size of a batch run for each of ``streams`` streams apart."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, split if it is in the list."""
        kwargs = kwargs or {}
        if func not in LISTED or not (rows := self._rows(func, args, kwargs)):
            return func(*args, **kwargs)
        if func in PLAIN_CONVOLUTIONS and not kwargs and _is_frozen(*args):
            return _Convolution.apply(args[0], self.streams, func, args[1:])  # type: ignore[no-untyped-call]
        split = {i: args[i].chunk(self.streams) for i in rows}
        if func not in BY_PLACE:
            split = {i: [_aligned(t) for t in parts] for i, parts in split.items()}
        results = [
            func(*(split[i][s] if i in split else value for i, value in enumerate(args)), **kwargs)
            for s in range(self.streams)
        ]
        return args[0] if func in IN_PLACE else torch.cat(results)

    def _rows(self, func: Any, args: Any, kwargs: Any) -> list[int]:
        """The positions of the arguments to split; none: the call stays whole."""
        if func in BY_PLACE:
            return self._divisible(args, _elementwise_rows(args))
        if not args or not isinstance(args[0], Tensor):
            return []
        first = args[0]
        if func in CONVOLUTIONS:
            fits = first.dim() == CONVOLUTIONS[func]
            return self._divisible(args, [0] if fits else [])
        if func is F.linear:
            return self._divisible(args, [0] if first.dim() >= 2 else [])
        if func in PRODUCTS:
            return self._divisible(args, _product_rows(first, args[1]))
        if func is ATTENTION and len(args) == 3 and kwargs.get("attn_mask") is None:
            return self._divisible(args, [0, 1, 2] if first.dim() >= 3 else [])
        if func is NORMS_OF_ROWS and first.dim() == 2 and kwargs.get("dim") in (1, -1):
            return self._divisible(args, [0])
        return []

    def _divisible(self, args: Any, rows: Iterable[int]) -> list[int]:
        chosen = [i for i in rows if args[i].dim()]
        sizes = {len(args[i]) for i in chosen}
        whole = len(sizes) == 1 and self.streams > 1 and all(n and n % self.streams == 0 for n in sizes)
        return chosen if whole else []


def _product_rows(a: Tensor, b: Tensor) -> list[int]:
    """Which factors of a matrix product have a leading axis of streams; none if each number is one multiplication."""
    if a.dim() >= 2 and a.shape[-1] == 1:
        return []
    if a.dim() == b.dim() == 2:
        return [0]  # each row of the product comes from a row of a
    if a.dim() >= 3 and b.dim() <= 2:
        return [0]
    return [0, 1] if a.dim() == b.dim() >= 3 and len(a) == len(b) else []


def _elementwise_rows(args: Any) -> list[int]:
    """Which arguments of an elementwise function have the leading axis of the result."""
    tensors = {i: t for i, t in enumerate(args) if isinstance(t, Tensor)}
    axes = max((t.dim() for t in tensors.values()), default=0)
    leading = {i: len(t) for i, t in tensors.items() if t.dim() == axes and axes}
    most = max(leading.values(), default=0)
    return [i for i, n in leading.items() if n == most]


def _aligned(t: Tensor) -> Tensor:
    """The tensor, or a copy that starts where a new tensor would."""
    return t if t.data_ptr() % ALIGNED == 0 or t.dim() < 2 else t.clone()


def _is_frozen(x: Tensor, weight: Tensor, bias: Tensor | None = None, *settings: Any) -> bool:
    """Whether a convolution needs no gradient of its weights, and has all its settings in numbers."""
    numbers = len(settings) == 4 and not isinstance(settings[1], str)
    return numbers and not weight.requires_grad and (bias is None or not bias.requires_grad)


class _Convolution(torch.autograd.Function):
    """A convolution with frozen weights for each stream apart: one node of the graph, not one for each stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, streams: int, func: Any, others: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, *others[:2])
        ctx.streams, ctx.settings = streams, others[2:]
        return torch.cat([func(_aligned(part), *others) for part in x.chunk(streams)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight, bias = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        rest = (weight, None if bias is None else bias.shape, stride, padding, dilation, False, [0] * (x.dim() - 2))
        parts = zip(g.chunk(ctx.streams), x.chunk(ctx.streams), strict=True)
        backward = torch.ops.aten.convolution_backward
        return torch.cat([backward(_aligned(a), _aligned(b), *rest, groups, ONLY_INPUT)[0] for a, b in parts]), *NONE
