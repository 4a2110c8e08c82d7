"""Equations in pages: MathML without scripts, and words about commands that cannot be typeset."""

import re
import xml.etree.ElementTree

import pytest

pytest.importorskip("latex2mathml", reason="needs the extra docs: pip install '.[docs]'")

import tribe
from website import method_pages
from website.typesetting import mathml, typeset


def test_an_equation_becomes_mathml_with_its_number():
    page = typeset('<p>x</p><div class="arithmatex">\\[ a &lt; b, \\qquad c \\tag{5} \\]</div>')
    box = xml.etree.ElementTree.fromstring(page.removeprefix("<p>x</p>"))
    assert [part.tag.partition("}")[2] for part in box[0]] == ["math", "math"]
    assert "".join(box.itertext()).replace(" ", "") == "a<b,c(5)"
    inline = typeset('<span class="arithmatex">\\(p_b\\)</span>')
    assert inline.startswith("<math")
    assert 'display="inline"' in inline


def test_a_command_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="arg"):
        mathml(r"\arg\max_k p", "inline")


def test_methods_have_equations():
    """A new method need not: its page shows its docstring."""
    assert len(method_pages.equations()) >= 24
    assert set(method_pages.equations()) <= set(tribe.methods.names())


@pytest.mark.parametrize("name", method_pages.equations())
def test_the_page_of_a_method_has_equations_that_can_be_typeset(name):
    page = method_pages.page(name)
    equations = re.findall(r"(?m)^\$\$ (.*) \$\$$", page.partition("## Source")[0])
    assert len(equations) > 0
    assert all(mathml(re.sub(r"\\tag\{.*?\}", "", latex), "block").startswith("<math") for latex in equations)


def test_a_note_ends_where_code_begins():
    source = "x = 1  # NOTE: of one line\ny = 2\n# NOTE: of\n# two\nz = 3\n    NOTE: of a\n    docstring.\n\n    B."
    assert method_pages.notes_in(source) == ["of one line", "of two", "of a docstring."]


def test_blocks_of_names_are_lists_and_blocks_of_formulas_are_not():
    names = "Per batch:\n\n    predict    the teacher\n    learn      one step\n               of Adam"
    assert method_pages.listed(names) == "Per batch:\n\n- **predict** the teacher\n- **learn** one step of Adam"
    assert method_pages.listed("So\n\n    y = x + 1,  of x") == "So\n\n    y = x + 1,  of x"
