"""The functions of the package that open or decode files, found in its code.

An opener is a function that reads bytes of a file or decodes them: of Python, numpy, torch, safetensors or Pillow, and
every function of `tribe.io` that calls one. A function that calls an opener is a reader.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

SOURCE = ROOT / "src"
WRITERS = ("tribe.io.files.", "tribe.io.files.")
METHODS = frozenset(("open", "read_bytes", "read_text", "readinto"))  # of any object: a path, a module of Pillow
CALLS = frozenset(
    (
        *("open", "io.open", "os.open", "os.fdopen", "mmap.mmap", "linecache.getlines"),
        *(
            "json.load",
            "json.loads",
            "json.JSONDecoder",
            "tomllib.load",
            "tomllib.loads",
            "csv.reader",
            "csv.DictReader",
        ),
        *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open"),
        *("pickletools.genops", "configparser.ConfigParser", "xml.etree.ElementTree.parse", "sqlite3.connect"),
        *(
            "zipfile.ZipFile",
            "zipfile.is_zipfile",
            "zipfile.Path",
            "tarfile.open",
            "tarfile.TarFile",
            "shutil.unpack_archive",
        ),
        *(
            "gzip.open",
            "gzip.decompress",
            "gzip.GzipFile",
            "bz2.open",
            "bz2.decompress",
            "lzma.open",
            "lzma.decompress",
        ),
        *("zlib.decompress", "zlib.decompressobj"),
        *("numpy.load", "numpy.fromfile", "numpy.memmap", "numpy.loadtxt", "numpy.genfromtxt"),
        *("numpy.lib.format.open_memmap", "numpy.lib.format.read_array", "numpy.lib.format.read_magic"),
        *("torch.load", "torch.jit.load", "torch.hub.load", "torch.hub.load_state_dict_from_url", "torch.from_file"),
        *("torch.UntypedStorage.from_file", "safetensors.safe_open", "safetensors.deserialize"),
        *("safetensors.torch.load", "safetensors.torch.load_file", "safetensors.torch.load_model"),
        *("safetensors.numpy.load", "safetensors.numpy.load_file", "PIL.Image.open", "PIL.Image.frombytes"),
    )
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> dict[str, str]:
    """What each imported name of a module stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: alias.asname and alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full or name for name, full in found.items()}


def dotted(node: ast.expr) -> str | None:
    """The text of a name with dots."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return None if inner is None else f"{inner}.{node.attr}"


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, list[ast.Call]]]:
    """Each function of a module, nested ones as part of the outer one, and its calls; the rest is ``prefix`` itself."""
    loose = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}.{node.name}", [call for call in ast.walk(node) if isinstance(call, ast.Call)]
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}.{node.name}")
        else:
            loose += [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    yield prefix, loose


def writes(call: ast.Call) -> bool:
    """Whether the call opens a file to write it: its mode says so."""
    modes = [node.value for node in (*call.args, *(k.value for k in call.keywords)) if isinstance(node, ast.Constant)]
    return any(isinstance(mode, str) and len(mode) <= 3 and set(mode) & set("wxa") for mode in modes)


@functools.cache
def calls() -> dict[str, set[str]]:
    """The full names of what each function of the package calls; a method of any object begins with a dot."""
    found: dict[str, set[str]] = {}
    for path in sorted((SOURCE / "tribe").rglob("*.py")):
        tree, module = ast.parse(path.read_text()), module_name(path)
        names = imported(tree)
        own = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
        for function, made in functions(tree, module):
            called = found.setdefault(function, set())
            for call in (call for call in made if not writes(call)):
                if text := dotted(call.func):
                    first, _, rest = text.partition(".")
                    full = names.get(first) or own.get(first) or first
                    called.add(f"{full}.{rest}" if rest else full)
                if isinstance(call.func, ast.Attribute):
                    called.add(f".{call.func.attr}")
    return found


def readers() -> set[str]:
    """The functions of the package, outside of `tribe.io`, that call an opener."""
    found, openers = calls(), set(CALLS) | {f".{name}" for name in METHODS}
    while True:
        reading = {f for f, called in found.items() if called & openers and not f.startswith(WRITERS)}
        shared = {function for function in reading if function.startswith("tribe.io.")}
        if shared <= openers:
            return reading - shared
        openers |= shared
