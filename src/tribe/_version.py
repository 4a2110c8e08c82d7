"""The version, in one place: the package, its files and its wheel read it here."""

__version__ = "0.2.0"
