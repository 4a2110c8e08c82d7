"""Prepare a trained network for deployment: choose how it adapts, calibrate it, and measure what to expect.

prepared = tribe.prepare(net, images, labels)       # or: tribe prepare --model ... --dataset ...
prepared.save("net.tribe")
model = tribe.adapt(net, "net.tribe")
"""

from tribe.health.prepared import Card, CardRow, Cost, Inputs, Prepared, PreparedError
from tribe.preparing.preparing import prepare

__all__ = ["Card", "CardRow", "Cost", "Inputs", "Prepared", "PreparedError", "prepare"]
