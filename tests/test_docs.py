"""The code in the documents runs, the links work, and generated parts agree with the code and the results."""

import importlib.util
import inspect
import pkgutil
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tribe
from places import ROOT
from tribe.testing import images, small_network
from watching import digits, digits_network

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")]
)
NAME = re.compile(r"(?<![\w/.-])tribe(?:\.\w+)+(?!\.?\w*=)")  # not a field that is set, as in tribe.gamma=0.1


def ids(path):
    return str(path.relative_to(ROOT))


def page(name):
    return (ROOT / f"docs/{name}.md").read_text()


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


# -- code -------------------------------------------------------------------------------------------------------------


def test_the_readme_and_the_page_on_adapters_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tribe.preparing.preparing.MOST_SECONDS", 1.0)
    clean, labels = digits(0, 300)
    scope = {"net": digits_network(), "camera": clean[:128].split(64), "clean_images": clean, "labels": labels}
    (first,) = blocks("README.md")
    exec(first, scope)
    assert scope["logits"].shape == (64, 10)
    assert scope["model"].method.filter is not None
    assert scope["paper"].method.name == "tribe"
    scope = {"net": small_network(), "camera": [images(1, 6, seed)[0] for seed in range(3)]}
    (second,) = blocks("docs/adapters.md")
    exec(second, {**scope, "tribe": tribe, "images": images(4, 6)})


def test_the_page_on_deploying_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"tribe": tribe, "net": small_network(), "camera": [images(1, 6, seed)[0] for seed in range(3)]}
    scope |= {"two_images": images(1, 2)[0], "five_images": images(1, 5)[0]}
    first, *others = blocks("docs/deploying.md")
    (cameras,) = [block for block in others if "tribe.fleet(" in block]
    for code in (first, cameras):
        exec(code, dict(scope))


def test_the_page_of_commands_reproduces_a_stream(tmp_path, monkeypatch, capsys):
    """With files of the published layout, made small, and fresh weights of a network with the published names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path))
    draw = np.random.default_rng(0)
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C/labels.npy", np.tile(np.arange(10), 50))
    for name in tribe.scenarios.CIFAR_C:
        np.save(tmp_path / f"CIFAR-10-C/{name}.npy", draw.integers(256, size=(500, 32, 32, 3)).astype(np.uint8))
    save_file(tribe.models.create("wrn10_1").state_dict(), tmp_path / "wrn10_1_cifar10.safetensors")
    for block in blocks("docs/commands.md"):
        exec(block.replace("wrn28_10", "wrn10_1").replace("imbalance=100", "imbalance=5"), {"tribe": tribe})
        instance, category = re.findall(r"tensor\(([\d.]+)", capsys.readouterr().out)
        assert 0.5 < float(instance) <= 1
        assert 0.5 < float(category) <= 1


def test_the_corruption_of_contributing_is_applied():
    clean = images(1, 6)[0].clamp(0, 1)
    (block,) = blocks("CONTRIBUTING.md")
    try:
        exec(compile(block, "haze.py", "exec"), {"__name__": "haze"})
        mild, strong = (tribe.corruptions.apply(clean, "haze", severity, seed=1) for severity in (1, 5))
        again = tribe.corruptions.apply(clean[4:], "haze", 5, seed=1, index=torch.tensor([4, 5]))
        tribe.datasets.create("live-cifar10-c", corruptions=("haze",))
    finally:
        tribe.corruptions._families["common"].pop("haze", None)
    assert torch.equal(again, strong[4:])
    assert clean.mean() < mild.mean() < strong.mean()


# -- names, links and options ------------------------------------------------------------------------------------------


def resolves(name):
    """Whether a dotted name is a module, or something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_links_names_and_commands_of_a_page_exist(path):
    get_command = pytest.importorskip("typer.main").get_command
    from commands import app
    from reproduction.cli import app as reproduction_app

    text = path.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    if path.name == "CHANGELOG.md":  # it names what is gone
        return
    assert [name for name in NAME.findall(text) if not resolves(name)] == []
    modules = set(re.findall(r"python3? -m ([\w.]+)", text))
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    commands = get_command(app).commands | get_command(reproduction_app).commands
    for command, rest in re.findall(r"(?:`|^|\.venv/bin/)tribe ([a-z]+)\b([^`#\n]*)", text, re.M):
        assert command in commands, command
        found = commands[command]
        parts = [found, *getattr(found, "commands", {}).values()]  # of a group
        known = {option for part in parts for parameter in part.params for option in (*parameter.opts, "--help")}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known, f"tribe {command}{rest}"


def test_the_page_of_commands_names_every_command():
    get_command = pytest.importorskip("typer.main").get_command
    from commands import app

    text = page("commands")
    assert [name for name in get_command(app).commands if f"tribe {name}" not in text and f"`{name}`" not in text] == []


def test_the_main_job_plays_seven_methods_and_the_first_page_shows_them():
    """The peers that tie with TRIBE on this stream stay in the table, and so does what we recommend."""
    pytest.importorskip("typer")
    from tribe.cli.commands.run import run

    names = inspect.signature(run).parameters["methods"].default.split(",")
    assert names == ["source", "bn", "tent", "note", "rotta", "tribe", "bank+guard+time-checked"]
    assert re.findall(r"^([\w+-]+) +\d+\.\d\d +\d+\.\d\d$", page("start"), re.M) == names


def test_pages_agree_about_what_a_step_costs():
    for name in ("README.md", "docs/budget.md", "docs/performance.md"):
        text = " ".join((ROOT / name).read_text().split())
        assert "seven to ten times plain inference on a CPU" in text, name
        assert "channels-last" in text, name


def test_every_equation_has_a_function_and_a_test():
    rows = re.findall(r"^\| .*? \| `(tribe\.[\w.]+)` \| `([\w/]+\.py)::(\w+)` \|$", page("paper-to-code"), re.M)
    assert len(rows) >= 8
    for name, file, test in rows:
        assert resolves(name), name
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()


# -- generated parts ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # looks up every cell of every table
def test_the_tables_of_the_reproduction_are_those_of_the_results(tmp_path):
    from reproduction.document import write_document

    (tmp_path / "reproduction.md").write_text(page("reproduction"))
    write_document(ROOT / "results", tmp_path / "reproduction.md")
    assert (tmp_path / "reproduction.md").read_text() == page("reproduction"), "make pages"
    committed = {path.name: path.read_text() for path in (ROOT / "docs/reproduction").iterdir()}
    assert {path.name: path.read_text() for path in (tmp_path / "reproduction").iterdir()} == committed, "make pages"


def rows_of(text):
    rows = re.findall(r"^\| \[?`([\w-]+)`(?:\]\(\S+\))? \|(.*\|.*\|.*)$", text, re.M)
    return {name: [name, *cells.strip(" |").split(" | ")] for name, cells in rows}


METHOD_ROWS, FILTER_ROWS = map(rows_of, page("methods").split("| time filter |"))
VARIANT_ROWS = dict(re.findall(r"^\| `([\w+-]+)` \| ([^|]*) \|$", page("methods"), re.M))
assert all(len(rows) > 1 for rows in (METHOD_ROWS, FILTER_ROWS, VARIANT_ROWS)), "docs/methods.md has other columns"


@pytest.mark.parametrize("name", METHOD_ROWS)
def test_the_table_of_methods_says_what_is_measured(name):
    """`make docs` generates the page. A new method needs no row for the tests to pass; `make docs` adds it."""
    from website.methods import NETWORKS, measured, megabytes

    cells = METHOD_ROWS[name]
    forward, backward, adapts, keeps = measured(name)
    assert cells[2:4] == [adapts, keeps]
    assert cells[5:7] == [f"{forward:g}", f"{backward:g}"]
    assert cells[7] == megabytes(name, *next(iter(NETWORKS.values())))


@pytest.mark.parametrize("name", FILTER_ROWS)
def test_the_table_of_time_filters_says_what_they_are(name):
    from website.methods import filter_row

    assert [f"`{name}`", *FILTER_ROWS[name][1:]] == filter_row(name)


@pytest.mark.parametrize("variant", VARIANT_ROWS)
def test_the_table_of_variants_shows_their_fields(variant):
    fields = tribe.methods.get("selftrain").variants[variant]
    assert VARIANT_ROWS[variant] == (", ".join(f"{k}={v!r}" for k, v in fields.items()) or "all defaults")
