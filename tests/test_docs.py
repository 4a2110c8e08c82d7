"""What the documents show runs, and what they name exists."""

import importlib
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tribe
from places import ROOT
from tribe.testing import check_method, images, small_network


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"net": small_network(), "camera": [images(1, 6, seed)[0] for seed in range(3)]}
    first, second, _ = blocks("README.md")
    exec(first, scope)
    assert scope["logits"].shape == (6, 4)
    exec(second, {**scope, "tribe": tribe, "images": images(4, 6)})
    assert (tmp_path / "cameras.safetensors").is_file()


def test_the_readme_reproduces_a_stream(tmp_path, monkeypatch, capsys):
    """With files of the published layout, made small, and fresh weights of a network with the published names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path))
    draw = np.random.default_rng(0)
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C/labels.npy", np.tile(np.arange(10), 50))
    for name in tribe.scenarios.CIFAR_C:
        np.save(tmp_path / f"CIFAR-10-C/{name}.npy", draw.integers(256, size=(500, 32, 32, 3)).astype(np.uint8))
    block = blocks("README.md")[2].replace("wrn28_10", "wrn10_1").replace("imbalance=100", "imbalance=5")
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
        assert describe_corruption("common/haze")["summary"] == "Mix every image with white, up to a share of its own."
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


ROWS = re.findall(
    r"^\| .*? \| `(tribe\.[\w.]+)` \| `(\w+\.py)::(\w+)` \|$", (ROOT / "docs/paper-to-code.md").read_text(), re.M
)


def test_the_table_was_found():
    assert len(ROWS) >= 8


@pytest.mark.parametrize(("function", "file", "test"), ROWS)
def test_paper_to_code_names_what_exists(function, file, test):
    parts = function.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        break
    assert callable(found)
    assert f"def {test}(" in (ROOT / "tests" / file).read_text()


def test_decisions_are_numbered_and_every_dependency_has_a_line():
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [p.name[:4] for p in decisions] == [f"{i:04}" for i in range(1, len(decisions) + 1)]
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(d for group in project["optional-dependencies"].values() for d in group)]
    text = (ROOT / "docs/decisions/0006-dependencies.md").read_text()
    for dependency in named:
        name = re.split(r"[<>=\[]", dependency)[0]
        assert name == "tribe-tta" or f"**{name}**" in text, name


def test_torch_is_pinned_for_the_repository_only():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()
    assert '"torch>=2.11"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", tribe.methods.names())
def test_the_table_of_methods_says_what_is_measured(name):
    """docs/methods.md is generated; `python -m benchmarks.methods > docs/methods.md` brings it up to date."""
    from benchmarks.methods import NETWORKS, measured, megabytes

    page = (ROOT / "docs/methods.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |") and line.count("|") > 5]
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    forward, backward, adapts, keeps = measured(name)
    assert cells[2:4] == [adapts, keeps]
    assert cells[5:7] == [f"{forward:g}", f"{backward:g}"]
    assert cells[7] == megabytes(name, *next(iter(NETWORKS.values())))


def test_the_table_names_every_variant():
    page = (ROOT / "docs/methods.md").read_text()
    for variant in tribe.methods.variants():
        assert f"| `{variant.partition('/')[2]}` |" in page
