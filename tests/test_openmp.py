"""On a busy machine, threads that wait must not take the time of those they wait for; only the command line decides."""

import os
import subprocess
import sys

import pytest

from tribe._openmp import setting

COMMAND = ["python", "/usr/local/bin/tribe", "run"]


@pytest.mark.parametrize(
    ("argv", "environment", "is_loaded", "expected"),
    [
        (COMMAND, {}, False, {"GOMP_SPINCOUNT": "10000"}),
        (["python", "-m", "tribe", "run"], {}, False, {"GOMP_SPINCOUNT": "10000"}),
        (COMMAND, {}, True, {}),
        (COMMAND, {"OMP_WAIT_POLICY": "ACTIVE"}, False, {}),
        (COMMAND, {"GOMP_SPINCOUNT": "7"}, False, {}),
        (["python", "mine.py"], {}, False, {}),
        (["python", "-c", "import tribe"], {}, False, {}),
    ],
)
def test_the_command_line_sets_it_unless_the_user_did(argv, environment, is_loaded, expected):
    assert setting(argv, environment, is_loaded) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="torch uses another OpenMP there")
def test_openmp_takes_the_setting():
    """GNU's OpenMP reads its variables when it is loaded, with torch: later is too late."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    words = [sys.executable, "-m", "tribe", "--version"]
    shown = subprocess.run(words, env=environment | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True)
    if "GOMP_SPINCOUNT" not in shown.stderr:
        pytest.skip("torch uses another OpenMP here")
    assert "GOMP_SPINCOUNT = '10000'" in shown.stderr
