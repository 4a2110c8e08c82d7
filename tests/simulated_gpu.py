"""A GPU that is not there: CPU tensors claim to be on one, and its graphs repeat recorded operations without Python.

Inside `on_gpu` the library takes its branches for a GPU. `simulate` replaces the functions of torch.cuda below
`torch.cuda.graph`, `torch.cuda.stream` and `torch.cuda.device`, which stay torch's own. A capture refuses what CUDA
refuses: to read a value, and to copy a constant from the host. Work on another stream is not recorded.
"""

import contextlib
import threading

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
WAITS = frozenset({"_local_scalar_dense", "item", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"})

_here = threading.local()  # of each thread: its mode, its current device, and its current stream of each device


class OnGpu(TorchFunctionMode):
    """Tensors on the CPU claim to be on a GPU, and what is to be made there is made on the CPU."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.device = torch.device("cuda", index)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == Tensor.device.__get__:
            device = func(*args)
            return self.device if device == CPU else device
        if func == Tensor.is_cuda.__get__:
            return not args[0].is_meta
        return func(*map(_real, args), **{name: _real(value) for name, value in (kwargs or {}).items()})


def _real(value):
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


@contextlib.contextmanager
def on_gpu(index: int = 0):
    """Let this thread's tensors on the CPU claim to be on a GPU."""
    _here.mode = OnGpu(index)
    try:
        with _here.mode:
            yield
    finally:
        _here.mode = None


class Stream:
    """A stream takes part in the capture of another as soon as it waits for it."""

    def __init__(self, device=None, priority: int = 0) -> None:
        self.device = torch.device("cuda", _index(device))

    def wait_stream(self, other: "Stream") -> None:
        if Graph.capturing is not None and other in Graph.capturing.streams:
            Graph.capturing.streams.add(self)


class Graph:
    """Records the operations of a thread on its streams; `replay` repeats them on the same memory."""

    capturing: "Graph | None" = None  # in the whole process, as in torch

    def capture_begin(self, *_, **__) -> None:
        if Graph.capturing is not None:
            raise RuntimeError("another capture is under way")
        self.streams, self.mode, Graph.capturing = {_current_stream()}, Recording(self), self
        self.mode.__enter__()

    def capture_end(self) -> None:
        self.mode.__exit__(None, None, None)
        Graph.capturing = None
        if self.mode.refused:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, results in self.mode.operations:
                again = tree_leaves(func(*args, **kwargs))
                for old, new in zip(results, again, strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)


class Recording(TorchDispatchMode):
    """The operations of a capture: the function, its arguments and its results."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, self.operations, self.refused = graph, [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (name := func.overloadpacket.__name__) in WAITS:
            self.refused = True  # CUDA notices; at the end, too
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if name == "lift_fresh":  # torch notices
            raise RuntimeError("cannot copy between CPU and CUDA tensors when stream is capturing")
        result = func(*args, **kwargs)
        if _current_stream(_here.mode.device) in self.graph.streams and not func.is_view:
            self.operations.append((func, args, kwargs, tree_leaves(result)))
        return result


def _index(device=None, *_, **__) -> int:
    index = getattr(device, "index", device)
    return _current_device() if index is None else index


def _current_device() -> int:
    return getattr(_here, "index", 0)


def _exchange_device(index: int) -> int:
    before, _here.index = _current_device(), index
    return before


def _current_stream(device=None) -> Stream:
    streams = _here.__dict__.setdefault("streams", {})
    return streams.setdefault(_index(device), Stream(device))


def _set_stream(stream: Stream) -> None:
    _current_stream()
    _here.index = stream.device.index
    _here.streams[stream.device.index] = stream


def simulate(patch) -> None:
    """Replace what `tribe` and torch's contexts call of CUDA, with pytest's monkeypatch."""
    for name, stand_in in {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_stream": _current_stream,
        "set_stream": _set_stream,
        "current_device": _current_device,
        "is_current_stream_capturing": lambda: (
            Graph.capturing is not None and _current_stream() in Graph.capturing.streams
        ),
        "graph_pool_handle": object,
        "synchronize": lambda: None,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "_get_device_index": _index,
    }.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    patch.setattr(torch.cuda.graph, "default_capture_stream", None)
    backward = torch.autograd._engine_run_backward

    def run_backward(*args, **kwargs):  # torch takes the mode off around torch.autograd.grad
        with getattr(_here, "mode", None) or contextlib.nullcontext():
            return backward(*args, **kwargs)

    patch.setattr(torch.autograd, "_engine_run_backward", run_backward)
