"""The helper that sends signals to processes does so at the point that a test chooses."""

import signal

import pytest

from processes import Prints, Touches, interrupted, killed

COUNTS = """
import sys
from pathlib import Path
for i in range(5):
    print("line", i)
    Path(f"file{i}").write_text("x")
    Path(f"file{i}").rename(f"done{i}")
"""


@pytest.mark.parametrize(
    ("when", "files"),
    [
        (Prints("line 2"), ["done0", "done1"]),
        (Prints("line", 4), ["done0", "done1", "done2"]),
        (Touches("os.rename", "done1"), ["done0", "file1"]),
        (Touches("os.rename", "file", 2), ["done0", "file1"]),
        (Touches("open", "file0"), []),
    ],
)
@pytest.mark.parametrize("stop", [interrupted, killed])
def test_the_signal_arrives_at_the_point(tmp_path, stop, when, files):
    result = stop("-c", COUNTS, when=when, cwd=tmp_path)
    assert result.code == (-signal.SIGKILL if stop is killed else -signal.SIGINT)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert ("KeyboardInterrupt" in result.err) == (stop is interrupted)


def test_sigint_works_where_the_parent_ignores_it(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = interrupted("-c", COUNTS, when=Prints("line 0"), cwd=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.code == -signal.SIGINT


def test_a_process_that_is_not_killed_fails_the_test(tmp_path):
    with pytest.raises(AssertionError, match="it ended with 0 before"):
        killed("-c", COUNTS, when=Prints("line 9"), cwd=tmp_path)
