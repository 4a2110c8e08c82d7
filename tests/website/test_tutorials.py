"""The code of the site's start and tutorials runs, and prints what the pages show."""

import re
from pathlib import Path

import pytest
from page_runner import blocks, lines_not_printed, run_page

from commands import tribe_command
from places import ROOT

TUTORIALS = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/tutorials").glob("*.md"))


def test_every_tutorial_is_run_here():
    """A new tutorial needs a test below."""
    named = re.findall(r'"(tutorials/[\w-]+\.md)"', Path(__file__).read_text())
    assert set(TUTORIALS) - {"tutorials/index.md"} <= set(named)


def test_lines_that_differ_in_more_than_numbers_are_found():
    printed = "│ tribe │ 10.97 │\n│ bn    │ 76.53 │\n"
    assert list(lines_not_printed("│ tribe  │ 11.0 │\n│ bn │ 7 │\n", printed)) == []
    assert list(lines_not_printed("│ bn │ 76.53 │\n│ tribe │ 10.97 │\n", printed)) == ["│ tribe │ 10.97 │"]
    assert list(lines_not_printed("│ tent │ 10.97 │", printed)) == ["│ tent │ 10.97 │"]


def test_five_minutes(nowhere, tmp_path):
    install = (
        "python3 -m venv .venv",
        ".venv/bin/pip install -c constraints.txt -e '.[dev]'",
        "source .venv/bin/activate",
    )
    run_page("start.md", tmp_path, skip=(*install, "make run", "tribe report runs -o report.html"))


@pytest.mark.slow  # trains a network, plays 5,000 images
def test_adapt_your_own_network(nowhere, tmp_path):
    run_page("tutorials/own-network.md", tmp_path)


@pytest.mark.slow  # ten commands that play streams
def test_your_own_images_compare_methods_and_read_a_report(nowhere, tmp_path):
    """They go on where the page before ended, as a reader does."""
    for page in ("tutorials/own-images.md", "tutorials/compare-methods.md", "tutorials/read-a-report.md"):
        run_page(page, tmp_path)
    html = (tmp_path / "report.html").read_text()
    text = (ROOT / "docs/tutorials/read-a-report.md").read_text()
    parts = re.findall(r"\*\*([^*]+)\*\*", text)
    assert len(parts) >= 8
    assert [part for part in parts if f">{part}" not in html] == []


def test_the_method_of_the_tutorial_is_played(nowhere, tmp_path, few_digits):
    """Its file alone, on few images; the whole page is below."""
    (file,) = [block for block in blocks("tutorials/add-a-method.md") if block.title == "follow.py"]
    (tmp_path / file.title).write_text(file.code)
    short = ("--set", "scenario.imbalance=1000000", "--set", "dataset.corruptions=motion_blur", "--data", few_digits)
    result = tribe_command("run", "--methods", "source,follow.py:Follow", *short)
    assert result.exit_code == 0, result.stderr
    assert "follow" in result.stdout


@pytest.mark.slow  # plays streams to four methods, and a table of the paper
def test_add_a_method(nowhere, tmp_path):
    run_page("tutorials/add-a-method.md", tmp_path)


@pytest.mark.slow  # computes part of a table
def test_reproduce_a_table(nowhere, tmp_path):
    (tmp_path / "results").symlink_to(ROOT / "results")
    run_page("tutorials/reproduce-a-table.md", tmp_path)
    assert "Balanced BN" in (tmp_path / "norms.md").read_text()
    assert list((tmp_path / "kept").iterdir())
