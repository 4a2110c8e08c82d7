"""A release says the same everywhere: version, date, authors; and its wheel works alone."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import tribe
import wheels
from places import ROOT


@pytest.fixture(scope="module")
def citation():
    yaml = pytest.importorskip("yaml", reason="needs the extra dev: pip install '.[dev]'")
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_names_this_version(citation):
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == tribe.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"] == [{"name": "The tribe developers"}]


def test_the_changelog_begins_with_this_version(citation):
    version, date = re.search(r"^## ([\w.]+) \(([\d-]+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()
    assert version == tribe.__version__
    assert date == citation["date-released"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("build", reason="needs the extra dev: pip install '.[dev]'")
    try:
        return wheels.built(tmp_path_factory.mktemp("dist"))
    except wheels.Failed as error:
        if "No matching distribution" in str(error) or "Could not find a version" in str(error):
            pytest.skip("hatchling cannot be downloaded here")
        raise


@pytest.mark.slow  # builds the wheel, and downloads hatchling
def test_the_wheel_holds_the_package_and_nothing_else(built):
    files = set(zipfile.ZipFile(built[0]).namelist())
    package = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {name for name in files if ".dist-info/" not in name} == {
        path.relative_to(ROOT / "src").as_posix() for path in package
    }
    information = {name.partition(".dist-info/")[2] for name in files if ".dist-info/" in name}
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE"} <= information


@pytest.mark.slow  # makes an environment and installs torch
def test_the_wheel_works_alone(built, tmp_path):
    found = wheels.check(built[0], sys.executable, tmp_path)
    assert f"{tribe.__version__}: " in found or "not installed, not run" in found


@pytest.mark.slow  # runs tests of the unpacked source archive
def test_the_source_archive_can_run_its_tests(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} >= {"LICENSE", "NOTICE", "CITATION.cff", "Makefile", "results"}
    chosen = ("tests/test_docs.py", "tests/test_release.py", "tests/test_layers.py", "tests/norms")
    command = (sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *chosen)
    path = f"{folder / 'src'}:{folder / 'tests'}:{folder}"
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
