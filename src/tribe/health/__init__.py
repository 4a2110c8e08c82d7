"""What changed in an adapter, and the way back: snapshots, a bounded history of them, and comparisons.

``tribe.adapt(net, history=True)`` takes snapshots while it learns; ``rollback("2h")`` returns to one, and ``compare``
says which layers and classes moved. See docs/deploying.md.
"""

from tribe.health.ages import Age, parse_age
from tribe.health.calibration import Calibration, calibrate
from tribe.health.changes import ClassChange, Comparison, LayerChange, StreamChange, compare_states
from tribe.health.estimate import Estimate, EstimateState, Estimator
from tribe.health.guard import Guard, Guarded
from tribe.health.history import History, Kept, RolledBack
from tribe.health.recorder import Recorder
from tribe.health.snapshots import Snapshot, StreamInfo, check_snapshot, copy_like, describe_streams

__all__ = [
    "Age",
    "Calibration",
    "ClassChange",
    "Comparison",
    "Estimate",
    "EstimateState",
    "Estimator",
    "Guard",
    "Guarded",
    "History",
    "Kept",
    "LayerChange",
    "Recorder",
    "RolledBack",
    "Snapshot",
    "StreamChange",
    "StreamInfo",
    "calibrate",
    "check_snapshot",
    "compare_states",
    "copy_like",
    "describe_streams",
    "parse_age",
]
