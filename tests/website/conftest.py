"""The site, built once for all tests of it."""

import os
import subprocess
import sys

import pytest

from places import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of a site that was built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder
