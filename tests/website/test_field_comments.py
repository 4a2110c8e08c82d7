"""Docstrings on their way into the API reference, rendered as MkDocs does."""

import pytest

pytest.importorskip("griffe", reason="needs the extra docs: pip install '.[docs]'")
pytest.importorskip("markdown", reason="needs the extra docs: pip install '.[docs]'")

import griffe
import markdown

from places import ROOT
from website.field_comments import FieldComments, fenced

SECTION = "Add.\n\nExample:\n    >>> for i in [1](2):\n    ...     print(i)\n    1\n\n    Then:\n\n    >>> 2\n    2\n"
FREE = "Add.\n\n>>> [1](2)\n[1]\n\nMore words.\n"


def rendered(text):
    """The HTML of a docstring's parts; mkdocstrings renders each by itself."""
    docstring = griffe.Docstring(fenced(text), parser="google")
    values = [getattr(part.value, "description", part.value) for part in docstring.parse()]
    return "\n".join(markdown.markdown(value, extensions=["pymdownx.superfences"]) for value in values)


@pytest.mark.parametrize(("text", "blocks"), [(SECTION, 2), (FREE, 1)])
def test_an_example_is_code_and_the_words_around_it_are_none(text, blocks):
    page = rendered(text)
    assert "<blockquote>" not in page
    assert page.count("<pre>") == blocks
    assert "<a " not in page  # of [1](2)
    inside = page.split("<pre>")[1:]
    assert all("words" not in block.partition("</pre>")[0] for block in inside)
    assert "&gt;&gt;&gt;" not in "".join(block.partition("</pre>")[2] for block in inside)


def test_every_docstring_of_the_package_is_free_of_quotes():
    package = griffe.load("tribe", search_paths=[ROOT / "src"], extensions=griffe.load_extensions(FieldComments()))
    shown, waiting = 0, [package]
    while waiting:
        item = waiting.pop()
        waiting += [member for member in item.members.values() if not member.is_alias]
        if item.docstring is not None and ">>> " in item.docstring.value:
            shown += 1
            docstring = griffe.Docstring(item.docstring.value, parser="google")
            values = [getattr(part.value, "description", part.value) for part in docstring.parse()]
            text = "\n\n".join(value for value in values if isinstance(value, str))
            assert "<blockquote>" not in markdown.markdown(text, extensions=["pymdownx.superfences"]), item.path
    assert shown > 20
