"""Commands: each file adds a command to the application with ``@app.command()``. All files are imported."""

import importlib
import pkgutil

from tribe.cli.app import app

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["app"]
