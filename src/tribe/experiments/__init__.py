"""Experiments: streams, the loop that plays them, records, metrics, and the store of results."""
