"""Charts in the colours of both schemes."""

import re
import xml.etree.ElementTree

import pytest

from tribe.experiments.plots import COLOURS
from website import charts

SVG = '<svg viewBox="0 0 10 5"><path style="fill: #FFFFFF; stroke: #000000"/><text>7</text></svg>'


def light_of(colour):
    """The relative luminance of WCAG."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_colour_of_a_series_stands_out_from_a_dark_page():
    ground = light_of(charts.GROUND)
    for colour in COLOURS:
        assert (light_of(charts.DARK[colour.lower()]) + 0.05) / (ground + 0.05) > 4.5, colour


def test_a_dark_chart_has_no_white_ground_and_no_black_words():
    assert len(charts.pictures()) == len(charts.names()) > 5
    for place, content in charts.pictures().items():
        root = xml.etree.ElementTree.fromstring(content)
        assert root.get("fill") == charts.INK, place
        used = set(re.findall(rb"#[0-9a-f]{6}", content)) - {b"#1e2129"}
        assert used
        assert not used & {b"#ffffff", b"#000000"}, place


def test_marks_in_a_bitmap_are_inverted_and_photographs_are_not():
    assert b"filter: invert" in charts.pictures()["pictures/normalisation.dark.svg"]
    assert b"filter: invert" not in charts.pictures()["pictures/day.dark.svg"]
    assert b"<image " in charts.pictures()["pictures/day.dark.svg"]


def test_a_colour_without_a_dark_counterpart_is_named():
    assert "#ff00ff" not in charts.DARK
    with pytest.raises(ValueError, match="#ff00ff"):
        charts.darkened(SVG.replace("#000000", "#FF00FF"))


def test_a_page_shows_both_variants_and_leaves_other_pictures_alone():
    page = charts.boxed("A\n\n![one\ntwo](../pictures/day.svg)\n\n![x](pictures/unknown.svg) ![y](a.png)\n")
    assert "![one two](../pictures/day.svg#only-light)" in page
    assert "![one two](../pictures/day.dark.svg#only-dark)" in page
    assert "![x](pictures/unknown.svg) ![y](a.png)" in page


def test_a_screenshot_has_a_dark_variant_beside_it():
    page = charts.boxed("![the page](pictures/server.png)")
    assert re.findall(r"!\[the page\]\((\S+)\)", page) == [
        "pictures/server.png#only-light",
        "pictures/server.dark.png#only-dark",
    ]
