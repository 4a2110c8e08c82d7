"""Accuracy of a stream without labels, alarms, what changed, and the way back.

``tribe.adapt(net, health=True)`` watches: `Adapter.health` and `Adapter.events`. ``guard=True`` also acts. See
docs/health.md. ``history=True`` takes snapshots: ``rollback(images=500)`` returns to one, and ``compare`` says which
layers and classes moved. See docs/deploying.md.
"""

from tribe.health.calibration import Calibration, calibrate
from tribe.health.changes import ClassChange, Comparison, LayerChange, StreamChange
from tribe.health.guard import Guard, Watch
from tribe.health.history import History, Kept, RolledBack, Snapshot
from tribe.health.report import Event, Health, StreamInfo, StreamReport

__all__ = [
    "Calibration",
    "ClassChange",
    "Comparison",
    "Event",
    "Guard",
    "Health",
    "History",
    "Kept",
    "LayerChange",
    "RolledBack",
    "Snapshot",
    "StreamChange",
    "StreamInfo",
    "StreamReport",
    "Watch",
    "calibrate",
]
