"""tribe: keep a deployed image classifier accurate while the world in front of it changes."""

__version__ = "0.1.0.dev0"
