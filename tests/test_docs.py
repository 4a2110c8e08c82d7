"""The code in the documents runs, and every file and name that they mention exists."""

import ast
import importlib.util
import io
import re
import tokenize
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tribe
from places import ROOT
from tribe.testing import check_method, images, small_network


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_readme_and_the_page_on_adapters_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"net": small_network(), "camera": [images(1, 6, seed)[0] for seed in range(3)]}
    (first,) = blocks("README.md")
    exec(first, scope)
    assert scope["logits"].shape == (6, 4)
    (second,) = blocks("docs/adapters.md")
    exec(second, {**scope, "tribe": tribe, "images": images(4, 6)})
    assert (tmp_path / "cameras.safetensors").is_file()


def test_the_readme_fits_a_screen_and_names_what_a_newcomer_needs():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    for name in ("src/tribe/methods/tribe.py", "src/tribe/norms/balanced.py", "make run", "make test", "Apache-2.0"):
        assert name in text, name
    assert text.count("![") == len(re.findall(r"^\|-", text, re.M)) == 1, "one picture, one table"


def test_the_page_of_commands_shows_every_command():
    get_command = pytest.importorskip("typer.main").get_command
    from tribe.cli.commands import app

    shown = set(re.findall(r"^tribe (\w+)", (ROOT / "docs/commands.md").read_text(), re.M))
    assert shown == set(get_command(app).commands)


def test_the_page_on_deploying_runs(capsys):
    code, *_ = blocks("docs/deploying.md")
    camera = [images(1, 6, seed)[0] for seed in range(3)]
    exec(code, {"tribe": tribe, "net": small_network(), "camera": camera})
    shown = capsys.readouterr().out
    assert "changes since the source" in shown
    assert "RolledBack(streams=(0,)" in shown


def test_the_fleet_of_the_page_on_deploying_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in blocks("docs/deploying.md") if "tribe.fleet(" in block]
    scope = {"tribe": tribe, "net": small_network()}
    exec(code, scope | {"two_images": images(1, 2)[0], "five_images": images(1, 5)[0]}, scope)
    assert scope["logits"]["door"].shape == scope["plain"](images(1, 2)[0]).shape == (2, 4)
    assert tribe.load(tmp_path / "door.safetensors", scope["net"]).digest() == scope["cameras"].digest("door")


def test_the_page_of_commands_reproduces_a_stream(tmp_path, monkeypatch, capsys):
    """With files of the published layout, made small, and fresh weights of a network with the published names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path))
    draw = np.random.default_rng(0)
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C/labels.npy", np.tile(np.arange(10), 50))
    for name in tribe.scenarios.CIFAR_C:
        np.save(tmp_path / f"CIFAR-10-C/{name}.npy", draw.integers(256, size=(500, 32, 32, 3)).astype(np.uint8))
    (block,) = blocks("docs/commands.md")
    block = block.replace("wrn28_10", "wrn10_1").replace("imbalance=100", "imbalance=5")
    save_file(tribe.models.create("wrn10_1").state_dict(), tmp_path / "wrn10_1_cifar10.safetensors")
    exec(block, {"tribe": tribe})
    instance, category = re.findall(r"tensor\(([\d.]+)", capsys.readouterr().out)
    assert 0.5 < float(instance) <= 1
    assert 0.5 < float(category) <= 1


def test_the_method_of_contributing_fulfils_the_contract():
    code, check, _ = blocks("CONTRIBUTING.md")
    module = {"__name__": "__main__"}
    try:
        exec(compile(code, "nudge.py", "exec"), module)
        exec(check, module)
        adapter = tribe.adapt(small_network(), "nudge", rate=0.1)
        assert adapter(images(1, 6)[0]).shape == (6, 4)
        check_method(module["Nudge"]())
    finally:
        tribe.methods.registry._classes.pop("nudge", None)


def test_the_corruption_of_contributing_is_applied_listed_and_played():
    from tribe.cli.commands.list import describe_corruption

    clean = images(1, 6)[0].clamp(0, 1)
    before = clean.clone()
    try:
        exec(compile(blocks("CONTRIBUTING.md")[2], "haze.py", "exec"), {"__name__": "haze"})
        assert "common/haze" in tribe.corruptions.names()
        summary = "Mix every image with white; each image draws its own share."
        assert describe_corruption("common/haze")["summary"] == summary
        mild, strong = (tribe.corruptions.apply(clean, "haze", severity, seed=1) for severity in (1, 5))
        again = tribe.corruptions.apply(clean[4:], "haze", 5, seed=1, index=torch.tensor([4, 5]))
        tribe.datasets.create("live-cifar10-c", corruptions=("haze",))
    finally:
        tribe.corruptions.families._families["common"].pop("haze", None)
    assert torch.equal(clean, before)
    assert torch.equal(again, strong[4:])
    assert clean.mean() < mild.mean() < strong.mean()


def test_the_docstring_example_of_the_package_is_the_readme():
    for line in ("model = tribe.adapt(net)", "for images in camera:", "logits = model(images)"):
        assert line in tribe.__doc__
        assert line in blocks("README.md")[0]


# -- names and paths ---------------------------------------------------------------------------------------------------

PAGES = sorted([*ROOT.glob("*.md"), ROOT / "NOTICE", *(ROOT / "docs").rglob("*.md"), ROOT / "results/README.md"])
CODE_FOLDERS = ("src", "reproduction", "studies", "tests", "benchmarks", "examples", "website")
CODE = sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))
HOMES = (ROOT, ROOT / "src", ROOT / "src/tribe", ROOT / "tests")  # where a path in a text may start
FOLDERS = "src|reproduction|studies|tests|docs|benchmarks|examples|results|website"
PATH = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[\w./*-]*[\w*]|[\w./-]+/[\w.-]+\.(?:py|md|json|npz))(?:::(\w+))?")
NAME = re.compile(r"(?<![\w/.-])tribe(?:\.\w+)+(?!\.?\w*=)")  # not a field that is set, as in tribe.gamma=0.1
EXAMPLES = ("mine.py",)  # files that a reader would write


def ids(path):
    return str(path.relative_to(ROOT))


def resolves(name):
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def missing_paths(text, folder):
    """The paths in a text that are no file, and the tests that are not in theirs."""
    for path, test in PATH.findall(text):
        found = next((file for home in (folder, *HOMES) for file in home.glob(path)), None)
        if found is None:
            if Path(path).name not in EXAMPLES:
                yield path
        elif test and f"def {test}(" not in found.read_text():
            yield f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_what_a_page_mentions_exists(page):
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert list(missing_paths(text, page.parent)) == []
    assert [name for name in NAME.findall(text) if not resolves(name)] == []
    modules = set(re.findall(r"python3? -m ([\w.]+)", text))
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_in_a_page_have_the_options_that_it_shows(page):
    get_command = pytest.importorskip("typer.main").get_command
    from reproduction.cli import app as reproduction_app
    from tribe.cli.commands import app

    commands = get_command(app).commands | get_command(reproduction_app).commands
    for command, rest in re.findall(r"(?:`|^|\.venv/bin/)tribe ([a-z]+)\b([^`#\n]*)", page.read_text(), re.M):
        assert command in commands, command
        known = {option for parameter in commands[command].params for option in (*parameter.opts, "--help")}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known, f"tribe {command}{rest}"


def prose(source):
    """The docstrings and comments of a module. Other strings are data: they may name what does not exist."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(texts + [token.string for token in tokens if token.type == tokenize.COMMENT])


def test_what_comments_and_docstrings_mention_exists():
    missing = {}
    for file in CODE:
        text = prose(file.read_text())
        found = [
            path
            for path in missing_paths(text, file.parent)
            if re.match(r"(src|reproduction|tests|docs|benchmarks)/", path)
        ]
        found += [name for name in re.findall(r"`(tribe(?:\.\w+)+)`", text) if not resolves(name)]
        if found:
            missing[ids(file)] = found
    assert missing == {}


def test_every_equation_has_a_function_and_a_test():
    rows = re.findall(r"^\| .*? \| `(tribe\.[\w.]+)` \| `([\w/]+\.py::\w+)` \|$", page("paper-to-code"), re.M)
    assert len(rows) >= 8
    assert page("paper-to-code").count("| `tribe.") == len(rows), "each row is checked by the test above"


# -- pages that are generated ------------------------------------------------------------------------------------------


def page(name):
    return (ROOT / f"docs/{name}.md").read_text()


def test_decisions_are_numbered_and_every_dependency_has_a_line():
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [p.name[:4] for p in decisions] == [f"{i:04}" for i in range(1, len(decisions) + 1)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(d for group in project["optional-dependencies"].values() for d in group)]
    text = (ROOT / "docs/decisions/0006-dependencies.md").read_text()
    for dependency in named:
        name = re.split(r"[<>=\[]", dependency)[0]
        assert name == "tribe-tta" or f"**{name}**" in text, name


def test_torch_is_pinned_for_the_repository_only():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()
    assert '"torch>=2.11"' in (ROOT / "pyproject.toml").read_text()


def rows_of(text):
    rows = re.findall(r"^\| `([\w-]+)` \|(.*\|.*\|.*)$", text, re.M)
    return {name: [name, *cells.strip(" |").split(" | ")] for name, cells in rows}


METHOD_ROWS, FILTER_ROWS = map(rows_of, page("methods").split("| time filter |"))
VARIANT_ROWS = dict(re.findall(r"^\| `([\w+-]+)` \| ([^|]*) \|$", page("methods"), re.M))


def test_the_tables_of_methods_were_found():
    assert len(METHOD_ROWS) >= 15
    assert len(VARIANT_ROWS) >= 16
    assert len(FILTER_ROWS) >= 2


@pytest.mark.parametrize("name", METHOD_ROWS)
def test_the_table_of_methods_says_what_is_measured(name):
    """`make docs` generates the page. A new method needs no row for the tests to pass; `make docs` adds it."""
    from benchmarks.methods import NETWORKS, measured, megabytes

    cells = METHOD_ROWS[name]
    forward, backward, adapts, keeps = measured(name)
    assert cells[2:4] == [adapts, keeps]
    assert cells[5:7] == [f"{forward:g}", f"{backward:g}"]
    assert cells[7] == megabytes(name, *next(iter(NETWORKS.values())))


@pytest.mark.parametrize("name", FILTER_ROWS)
def test_the_table_of_time_filters_says_what_they_are(name):
    from benchmarks.methods import filter_row

    assert [f"`{name}`", *FILTER_ROWS[name][1:]] == filter_row(name)


@pytest.mark.parametrize("variant", VARIANT_ROWS)
def test_the_table_of_variants_shows_their_fields(variant):
    fields = tribe.methods.get("selftrain").variants[variant]
    assert VARIANT_ROWS[variant] == (", ".join(f"{k}={v!r}" for k, v in fields.items()) or "all defaults")
