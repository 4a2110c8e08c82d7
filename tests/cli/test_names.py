"""Names are data: nothing in the name of a file, class, domain or method takes effect where it is shown."""

import json
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import assert_refused, succeeded, tribe_command
from reproduction import render
from reproduction.chart import draw_chart
from reproduction.compare import Comparison, Entry
from tribe import scenarios
from tribe.cli.output import messages
from tribe.experiments import plots
from tribe.experiments.bench import measurement, results
from tribe.experiments.record import Record
from tribe.fields import printable

NASTY = (
    "\x1b[31mred",
    "[bold]x[/nothing]",
    "[red]x",
    r"$\foo$",
    "a|b",
    "<b>&amp;",
    "two\nlines",
    "\u202egpj",
    "\x9b2J",
    "50%_#{}~^\\",
)
NAMES_OF_FOLDERS = tuple(name for name in NASTY if "/" not in name)
RAW = ("\x1b", "\u202e", "\x9b")  # that must not be anywhere

pytestmark = pytest.mark.usefixtures("nowhere")


def assert_shown(output, names=NASTY):
    """No raw character in a text that shows these names."""
    for character in RAW:
        assert character not in output, f"{character!r} is raw"
    joined = "".join(output.split())
    for name in names:
        assert "".join(printable(name).split()) in joined


def nasty_record():
    images = 4 * len(NASTY)
    domain, label = torch.arange(images) // 4, torch.arange(images) % 4
    spec = {
        "dataset": {"name": NASTY[0], "fields": {}},
        "model": {"name": NASTY[4], "fields": {}},
        "scenario": {"name": NASTY[2], "fields": {NASTY[1]: NASTY[6]}},
        "method": {"name": NASTY[5], "fields": {NASTY[7]: [NASTY[6]]}},
        "seed": 0,
    }
    return Record(domain, label, label * 0, torch.ones(images), torch.ones(images), NASTY, 4, spec)


@pytest.fixture
def pictures():
    """A folder of pictures with a class of each name."""
    image = pytest.importorskip("PIL.Image")
    for name in NAMES_OF_FOLDERS:
        folder = Path("pictures") / "day\x1b" / name
        folder.mkdir(parents=True)
        for i in range(2):
            image.fromarray(np.full((8, 8, 3), 40 * i, np.uint8)).save(folder / f"{i}\x1b.png")


def test_tables_and_charts_of_a_folder_show_the_names_of_classes(pictures, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    result = succeeded(tribe_command("schedule", "iid", "--dataset", "folder", "--data", "pictures"))
    assert_shown(result.stdout, (*NAMES_OF_FOLDERS, "day\x1b"))


def test_errors_show_the_name_of_a_file():
    assert_refused(tribe_command("report", "no\x1b[2Jwhere[red]"), r"no\x1b[2Jwhere[red]")


def test_warnings_are_printable_and_printed_once(capsys):
    with messages():
        for _ in range(2):
            warnings.warn("skipped \x1b[2J.png", stacklevel=1)
    assert capsys.readouterr().err == "warning: skipped \\x1b[2J.png\n"


def test_progress_and_table_show_the_name_of_a_method(registries):
    name = "[red]x\x1b[2J"
    text = "import tribe\nclass X(type(tribe.methods.create(\"source\"))):\n    '''Nothing.'''\n"
    Path("mine.py").write_text(f"{text}globals()[{name!r}] = X\n")
    options = ("--set", "dataset.corruptions=('impulse_noise',)", "--set", "scenario.imbalance=300", "--out", "out")
    result = tribe_command("run", "--methods", f"mine.py:{name}", *options)
    assert "\x1b" not in result.output
    assert printable(name.lower()) in result.output


def test_charts_draw_names_as_they_are():
    pytest.importorskip("matplotlib")
    record = nasty_record()
    plots.save(plots.errors({name: [record] for name in NASTY}, r"$\foo$"), "errors.svg")
    labels = [torch.arange(20) % 4 for _ in NASTY]
    plan = scenarios.create("continual", domains=NASTY).schedule(labels, 0)
    plots.save(plots.schedule(plan, labels, NASTY), "plan.svg")
    plots.save(plots.schedule(plan, labels, NASTY), "plan.pdf")
    for path in ("errors.svg", "plan.svg"):
        texts = [text for node in ElementTree.parse(path).iter() if (text := "".join(node.itertext()).strip())]
        for name in NASTY:
            assert printable(name) in texts, f"{path} does not show {name!r}"


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.add(tag)

    def handle_data(self, data):
        self.text += data


def test_the_page_of_a_report_shows_names_as_they_are():
    Path("runs").mkdir()
    nasty_record().save("runs/\x1b[2J.npz")
    Path("runs/\u202edamaged.npz").write_bytes(b"PK")
    result = tribe_command("report", "runs")
    assert result.exit_code == 1
    assert_shown(result.stdout + result.stderr, ("\u202edamaged.npz",))
    page = Path("report.html").read_text(encoding="utf-8")
    assert_shown(Elements(page).text, NASTY)
    assert_shown(page, ())


def nasty_comparison():
    entries = {(row, column): Entry(1.0 + i, 2.0, "%") for i, row in enumerate(NASTY) for column in NASTY}
    groups = dict.fromkeys(NASTY, "all")
    return Comparison("t", "tab:x", NASTY[5], NASTY, NASTY, entries, NASTY, {NASTY[0]: NASTY}, groups)


def test_markdown_and_latex_show_names_as_they_are():
    page = render.markdown(nasty_comparison())
    assert_shown(page, ())
    assert "<b>" not in page
    assert r"a\|b" in page
    assert len({line.replace(r"\|", "").count("|") for line in page.splitlines() if line.startswith("|")}) == 1
    table = render.latex(nasty_comparison())
    assert_shown(table, ())
    assert all(line.startswith(("%", "\\")) or line.endswith(r"\\") for line in table.splitlines())
    assert r"50\%\_\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in table
    assert r"\$\textbackslash{}foo\$" in table
    assert r"\textbf{1.00}" in table


def test_a_chart_of_the_paper_draws_names_as_they_are():
    pytest.importorskip("matplotlib")
    plots.save(draw_chart(nasty_comparison()), "chart.svg")
    assert r"$\foo$" in "".join(ElementTree.parse("chart.svg").getroot().itertext())


def test_the_table_of_a_benchmark_shows_names_as_they_are():
    setting = measurement.Setting("\x1b[2Jnet", (3, 8, 8), 4)
    row = measurement.BenchRow("\u202etent", 1.0, 0.1, {"plain": 2.0}, 1.0, 0.5, None, 3)
    data = results.to_data(measurement.BenchResult(setting, {"device": "\x9b"}, 3, 1.0, (row,)))
    Path("old.json").write_text(json.dumps(data))
    result = tribe_command("bench", "--compare", "old.json", "--model", "compact", "--methods", "source")
    assert_shown(result.output, ())


def test_a_diff_shows_names(tmp_path):
    one = nasty_record()
    one.save("a.npz")
    fields = {"name": NASTY[5], "fields": {NASTY[7]: [NASTY[3]], NASTY[6]: NASTY[8]}}
    one._replace(prediction=one.label, spec={**one.spec, "method": fields}).save("b.npz")
    result = succeeded(tribe_command("diff", "a.npz", "b.npz"))
    assert_shown(result.stdout, (*NASTY[:6], NASTY[8]))
