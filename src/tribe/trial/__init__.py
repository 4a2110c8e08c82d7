"""Try an adapting model on recorded frames: what it changes, what it costs, and whether it helps."""
