"""Methods and settings, and which of them are captured in CUDA graphs: whole, or in segments."""

import tribe
from tribe.testing import ready

METHODS = [(name, {}) for name in tribe.methods.names()]
METHODS += [("selftrain", dict(fields)) for fields in tribe.methods.get("selftrain").variants.values()]
FILTERS = [("tribe+time", {"evidence_on": 0}), ("source+time", {"evidence_on": 0, "within": "batch"})]  # on soon
METHODS += [("tribe", {"class_stats": "packed"}), *FILTERS, ("tent+cofa", {}), ("rotta+time", {"evidence_on": 0})]
LEARNS = {"skip": False}  # the small images are noise, which a guard would not let a method learn from
METHODS += [("tribe+guard", {}), ("tribe+guard", {**LEARNS, "good_every": 6}), ("tribe+watch", {"probe": 2})]
METHODS += [("tent+guard", LEARNS), ("source+guard", {}), ("tribe+guard+time", LEARNS), ("rotta+guard", LEARNS)]
CAPTURABLE = [(name, fields) for name, fields in METHODS if ready(name, **fields).capture == "whole"]
IN_SEGMENTS = [(name, fields) for name, fields in METHODS if ready(name, **fields).capture == "segments"]
