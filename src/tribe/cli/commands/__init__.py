"""Commands: one file each, which adds itself to the application with ``@app.command()``. All of them are loaded."""

import importlib
import pkgutil

from tribe.cli.app import app

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["app"]
