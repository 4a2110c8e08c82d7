"""Model files that adapt: `export` writes one with torch, `Session` runs it with numpy and ONNX Runtime alone.

tribe.onnx.export(net, "net.onnx", (3, 32, 32))

session = tribe.onnx.Session("net.onnx")  # on a machine without torch
logits = session(images)                  # (N, 3, 32, 32) float32 in [0, 1]: predicts, then adapts
"""

import importlib
from typing import TYPE_CHECKING, Any

from tribe.onnx.session import Session, StreamSnapshot, StreamSummary
from tribe.onnx.states import ModelFileError
from tribe.onnx.triton import write_triton

if TYPE_CHECKING:
    from tribe.onnx.exporting import export
    from tribe.onnx.quantizing import quantize

__all__ = ["ModelFileError", "Session", "StreamSnapshot", "StreamSummary", "export", "quantize", "write_triton"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what needs torch or onnx when it is first used."""
        homes = {"export": "tribe.onnx.exporting", "quantize": "tribe.onnx.quantizing"}
        if name not in homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(importlib.import_module(homes[name]), name)
        return globals()[name]
