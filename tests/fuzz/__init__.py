"""Damaged files of every kind."""
