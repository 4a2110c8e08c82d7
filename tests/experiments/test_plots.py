"""Charts are drawn from records and schedules, and say what these hold."""

import re

import pytest
import torch

from tribe import scenarios
from tribe.experiments import plots
from tribe.experiments.record import Record

pytest.importorskip("matplotlib")

DOMAINS = ("fog@5", "snow@5")


def record(wrong, seed=0):
    """Four images a domain; the first `wrong` of each domain are misclassified."""
    label = torch.tensor([0, 0, 1, 2] * 2)
    prediction = torch.where(torch.arange(4).repeat(2) < wrong, 3, label)
    domain = torch.tensor([0] * 4 + [1] * 4)
    return Record(domain, label, prediction, torch.ones(8), torch.ones(8), DOMAINS, 4, {"seed": seed})


def test_lines_are_the_domain_errors_and_the_map_the_class_counts():
    figure = plots.errors({"source": [record(4)], "tribe": [record(0, 0), record(2, 1)]}, "a title")
    above, below = figure.axes[:2]
    lines = {line.get_label(): line.get_ydata().tolist() for line in above.get_lines()}
    assert lines == {"source: 100.0 %": [100.0, 100.0], "tribe: 25.0 %": [25.0, 25.0]}, "the mean over two seeds"
    assert above.get_title() == "a title"
    shown = torch.as_tensor(below.get_images()[0].get_array().filled()).expm1().round()
    assert shown.T.tolist() == [[2, 1, 1, 0], [2, 1, 1, 0]]
    assert [tick.get_text() for tick in below.get_xticklabels()] == list(DOMAINS)


def test_a_schedule_shows_counts_and_local_balance():
    labels = [torch.arange(10).repeat(30)] * 2
    scenario = scenarios.create("continual", domains=DOMAINS)
    plan = scenario.schedule(labels, 0)
    above, below = plots.schedule(plan, labels, DOMAINS).axes[:2]
    assert torch.as_tensor(above.get_images()[0].get_array().filled()).expm1().round().unique().tolist() == [30]
    balance = below.get_lines()[0].get_ydata()
    assert torch.equal(torch.as_tensor(balance), scenarios.local_balance(plan, labels))


def test_files_by_their_ending_and_the_same_bytes_for_the_same_picture(tmp_path):
    for ending, start in ((".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")):
        paths = [tmp_path / f"{i}{ending}" for i in range(2)]
        for path in paths:
            plots.save(plots.errors({"source": [record(1)]}), path)
        assert paths[0].read_bytes().startswith(start)
        if ending == ".svg":
            assert paths[0].read_bytes() == paths[1].read_bytes()
            assert re.search(r"instance error", paths[0].read_text())
    with pytest.raises(ValueError, match=r"\.svg, \.png, \.pdf"):
        plots.save(plots.errors({"source": [record(1)]}), tmp_path / "chart.txt")


def test_heat_maps_show_numbers_labels_and_the_cells_that_are_marked():
    errors = torch.tensor([[20.0, 21.5], [float("nan"), 30.0]])
    marks = {"best with labels": (0, 0), "best without": (1, 1)}
    figure = plots.heat_maps({"error": errors, "score": errors / 100}, ["1", "$2"], ["a", "b"], ("lr", "eta"), marks)
    left, right = figure.axes[:2]
    assert [text.get_text() for text in left.texts] == ["20.00", "21.50", "30.00"], "nothing where it is not known"
    assert [text.get_text() for text in right.texts] == ["0.2000", "0.2150", "0.3000"]
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["1", r"\$2"]
    assert (left.get_xlabel(), left.get_ylabel(), left.get_title()) == ("lr", "eta", "error")
    boxes = [(box.get_label(), round(box.get_x()), round(box.get_y())) for box in left.patches]
    assert boxes == [("best with labels", 0, 0), ("best without", 1, 1)]


def test_error_against_cost_has_a_line_through_the_budgets_of_each_method():
    bursts = {"source": [(1.0, 50.0)], "tent": [(3.0, 40.0), (1.5, 45.0)]}
    figure = plots.error_against_cost({"in bursts": bursts, "iid": {"tent": [(1.5, 44.0)]}})
    left, right = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.get_lines()}
    assert lines == {"source": [[1.0, 50.0]], "tent": [[1.5, 45.0], [3.0, 40.0]]}, "in the order of the costs"
    assert [axes.get_title() for axes in (left, right)] == ["in bursts", "iid"]
    assert left.get_lines()[1].get_color() == right.get_lines()[0].get_color(), "a method has one colour"
    assert left.get_xscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["source", "tent"]
