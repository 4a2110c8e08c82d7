"""The tree shows the layers: imports point one way, from a room to those below it, and no two modules need each other.

An import counts wherever it stands: at the top of a file, inside a function, or for a type checker only. The drawing in
CONTRIBUTING is made from `LAYERS`: ``python tests/test_layers.py`` writes it.
"""

import ast
import functools
from graphlib import CycleError, TopologicalSorter

import pytest

from places import ROOT

SOURCE = ROOT / "src" / "tribe"

LAYERS = (  # from the lowest to the highest; a package imports itself and what is below it
    (("_version", "_openmp", "registry", "fields"), "the version, names of components, checks of their fields"),
    (("core",), "network, slots, state, random numbers, kernels, capture"),
    (("io",), "files: one container for tensors, atomic writes, locks"),
    (("norms", "data"), "norm rules; data sets, corruptions, scenarios, networks"),
    (("knowledge", "filters"), "statistics of the source data; time filters"),
    (("methods",), "how a classifier adapts"),
    (("health",), "estimate, alarms, guard, history"),
    (("streams", "diagnosis"), "named states: adapt, load, fleet, doctor"),
    (("preparing",), "one file for a deployment: method, calibration, what to expect"),
    (("onnx",), "model files that adapt, and a session that needs no torch"),
    (("experiments", "trial"), "streams of data, runs, records, results, report, bench; recorded frames, tried"),
    (("testing",), "the contract"),
    (("tribe",), "the public API: tribe/__init__.py"),
    (("serve",), "an inference server for many streams"),
    (("cli",), "the command line"),
    (("__main__",), "python -m tribe"),
)
LEVEL = {room: level for level, (rooms, _) in enumerate(LAYERS) for room in rooms}
START, END = "<!-- layers: python tests/test_layers.py -->\n", "<!-- /layers -->\n"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def module(path):
    """The dotted name of a file of the package."""
    return ".".join(("tribe", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


FILES = {module(path): path for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def imports(name):
    """The modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in FILES}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively; the package uses absolute names"
            if node.module in FILES:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inside & FILES.keys() or {node.module}
    return found - {name}


def room(name):
    """The room that a module is in; the package itself is one."""
    return name.split(".")[1] if "." in name else name


def drawing():
    """The layers as a picture in text, the highest first."""
    width = max(len("  ".join(rooms)) for rooms, _ in LAYERS)
    lines = [f"    {'  '.join(rooms):{width}}   {words}" for rooms, words in reversed(LAYERS)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down(name):
    here = LEVEL[room(name)]
    up = {other for other in imports(name) if LEVEL[room(other)] > here}
    beside = {other for other in imports(name) if LEVEL[room(other)] == here and room(other) != room(name)}
    assert not up, f"{name} is below {', '.join(sorted(up))}"
    assert not beside or here == 0, f"{name} imports its neighbour {', '.join(sorted(beside))}"


def test_no_two_modules_need_each_other():
    # A package's __init__ collects its parts, and every part is in its package: that alone is no cycle.
    found_in = {name: imports(name) for name in FILES}
    graph = {name: {other for other in found if not name.startswith(f"{other}.")} for name, found in found_in.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"a cycle: {' -> '.join(error.args[1])}") from None


def test_every_room_has_a_place():
    assert {room(name) for name in FILES} == LEVEL.keys()


def test_the_drawing_shows_these_layers():
    _, _, rest = CONTRIBUTING.read_text().partition(START)
    assert rest.partition(END)[0].strip("\n") == drawing().strip("\n"), "run: python tests/test_layers.py"


if __name__ == "__main__":
    before, _, rest = CONTRIBUTING.read_text().partition(START)
    CONTRIBUTING.write_text(f"{before}{START}\n{drawing()}\n{END}{rest.partition(END)[2]}")
