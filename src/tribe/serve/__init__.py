"""Serve one network to many cameras over the network."""
