"""Model files that adapt: `export` writes one with torch, `Session` runs it with numpy and ONNX Runtime alone.

tribe.onnx.export(net, "net.onnx", (3, 32, 32))

session = tribe.onnx.Session("net.onnx")  # on a machine without torch
logits = session(images)                  # (N, 3, 32, 32) float32 in [0, 1]: predicts, then adapts
"""

from typing import TYPE_CHECKING, Any

from tribe.onnx.session import Session, StreamReport, StreamSnapshot
from tribe.onnx.states import ModelFileError

if TYPE_CHECKING:
    from tribe.onnx.exporting import export

__all__ = ["ModelFileError", "Session", "StreamReport", "StreamSnapshot", "export"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what needs torch when it is first used."""
        if name != "export":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tribe.onnx.exporting import export

        globals()[name] = export
        return export
