"""Run a file that belongs to no package as a module."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class _UncachedLoader(SourceFileLoader):
    """Compiles the file every time: a cache of bytecode misses an edit of the same size within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def from_file(path: Path, name: str) -> ModuleType:
    """Run a file as the module ``name``; not the file's own name, which a loaded module may have."""
    path = path.absolute()  # in tracebacks, and for `inspect`
    sys.path.insert(0, str(path.resolve().parent))  # a script can import its neighbours, as when Python runs it
    spec = importlib.util.spec_from_file_location(name, path, loader=_UncachedLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
