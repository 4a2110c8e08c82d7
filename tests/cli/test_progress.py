"""How far long work is, where no terminal shows bars: lines on stderr, by the share that is done."""

import io
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("rich", reason="needs the extra cli: pip install '.[cli]'")

from rich.console import Console

from places import ROOT
from tribe.cli.output import SILENCE, Bars, experiment_bars

SHORT = ("--methods", "source,bn", "--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=400")
SHARE = re.compile(r"^run: (\d) of 2 runs: (\d+) %, ", re.MULTILINE)


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def said():
    """Bars without a terminal, their clock, and a function that returns the lines that they printed so far."""
    text, clock = io.StringIO(), Clock()
    bars = Bars(console=Console(file=text, width=200), get_time=clock)
    return bars, clock, lambda: text.getvalue().splitlines()


def test_a_run_whose_errors_go_to_a_file_says_how_far_it_is(tmp_path):
    with (tmp_path / "stderr").open("w") as stderr:
        path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        subprocess.run(
            [sys.executable, "-m", "tribe", "run", *SHORT, "--out", tmp_path / "runs"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            check=True,
        )
    text = (tmp_path / "stderr").read_text()
    found = [tuple(map(int, match)) for match in SHARE.findall(text)]
    assert found == sorted(found)
    assert len({share // 10 for _, share in found}) >= 5
    assert {runs for runs, _ in found} >= {0, 1}
    assert "\x1b" not in text


def test_a_line_appears_at_each_tenth_and_none_between(said):
    bars, _, lines = said
    task = bars.add_task("playing", total=1000)
    for done in range(1001):
        bars.update(task, completed=done)
    assert [line.partition(",")[0] for line in lines()] == [f"playing: {10 * tenth} %" for tenth in range(1, 10)]


def test_a_leap_is_one_line(said):
    bars, _, lines = said
    task = bars.add_task("playing", total=10)
    bars.advance(task, 7)
    assert [line.partition(",")[0] for line in lines()] == ["playing: 70 %"]


def test_without_a_tenth_a_line_appears_once_a_minute(said):
    bars, clock, lines = said
    unknown, quiet = bars.add_task("unknown", total=None), bars.add_task("quiet", total=4, quiet=True)
    bars.update(unknown, completed=1)
    bars.update(quiet, completed=2)
    assert lines() == []
    clock.now = SILENCE
    bars.update(unknown, completed=2)
    bars.update(quiet, completed=3)
    assert lines() == ["unknown: 0:01:00 so far"]
    clock.now = 2 * SILENCE
    bars.update(quiet, completed=3)
    assert lines()[1].startswith("quiet: 75 %, 0:02:00 so far")


def test_names_are_no_markup(said):
    bars, _, lines = said
    bars.advance(bars.add_task("[bold]x[/bold]", total=2))
    assert lines()[0].startswith("[bold]x[/bold]: 50 %")


def test_the_share_of_all_experiments_counts_those_that_are_running(capsys):
    with experiment_bars("sweep", 2, str) as bars:
        bars.progress("first", 1, 2, None)
        bars.progress("second", 1, 10, 0.5)
    lines = [line for line in capsys.readouterr().err.splitlines() if " so far" in line]
    assert [line.partition(",")[0] for line in lines] == ["sweep: 0 of 2 runs: 25 %", "sweep: 0 of 2 runs: 30 %"]
