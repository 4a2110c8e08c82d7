"""Work beside the main work of a step: a second branch of a CUDA graph, for many small launches that need not wait.

A fast GPU waits for small launches, and what watches a step is hundreds of them. While a step is captured, `SideStream`
records its work on a second stream, so that the graph has a branch that runs while the network computes. Otherwise the
work is done at once. The results are the same.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
HIGH = -1  # priority of the second stream: its launches are short, and need a place among those of the network

_streams: dict[torch.device, torch.cuda.Stream] = {}


class SideStream:
    """A branch beside the main work, from its first call until `join`.

    All tensors that it reads must be kept until then: memory that the main work frees is used again by the main work.
    """

    def __init__(self, device: torch.device) -> None:
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            if device not in _streams:  # made in the steps before a recording
                _streams[device] = torch.cuda.Stream(device, priority=HIGH)
            self._side = _streams[device] if torch.cuda.is_current_stream_capturing() else None

    def __call__(self, work: Callable[[], T]) -> T:
        """Do work that may read all that was computed so far; what it returns may be used after `join`."""
        if self._side is None:
            return work()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            return work()

    def join(self) -> None:
        """Let the main work wait for the branch."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
