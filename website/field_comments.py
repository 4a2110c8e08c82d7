"""Show comments of fields, and examples as code, in the API reference: an extension of griffe, which reads the code.

The code documents a field on its line, ``eta: float = 0.01  # momentum of one instance``, or in comment lines above it.
"""

import io
import re
import tokenize
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)(>>> .*(?:\n.*\S.*)*)", re.MULTILINE)  # up to an empty line, whatever its indent
TOOLS = re.compile(r"(noqa|type): *\S*(, *[A-Z]+\d+)* *")  # notes to ruff and mypy


class FieldComments(griffe.Extension):
    """Give attributes without a docstring the text of their comment, and put examples into blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of a docstring: Markdown would take their prompts for quotes, and brackets for links."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Read the comments of a module once it is loaded, and give each field its own."""
        if isinstance(mod.filepath, list) or mod.filepath.suffix != ".py":
            return
        comments = comments_of("\n".join(mod.lines))
        classes = [item for item in mod.members.values() if isinstance(item, griffe.Class)]
        for member in (member for item in classes for member in item.members.values()):
            if isinstance(member, griffe.Attribute) and member.docstring is None and member.lineno is not None:
                lines = range(member.lineno, (member.endlineno or member.lineno) + 1)
                text = next((comments[n] for n in lines if n in comments), comments.get(-member.lineno))
                if text:
                    member.docstring = griffe.Docstring(text, parent=member)


def fenced(text: str) -> str:
    r"""Return a docstring whose examples are blocks of code, with the indent that they had.

    >>> fenced("Say so.\n\nExample:\n    >>> 1 + 1\n    2")
    'Say so.\n\nExample:\n    ```pycon\n    >>> 1 + 1\n    2\n    ```'
    """
    return EXAMPLE.sub(r"\1```pycon\n\1\2\n\1```", text)


def comments_of(source: str) -> dict[int, str]:
    """Return the comment on each line of code; under minus its number, the comment lines above it."""
    found: dict[int, str] = {}
    above: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = TOOLS.sub("", token.string.lstrip("# ")) if token.type == tokenize.COMMENT else ""
        if text and token.line.lstrip().startswith("#"):
            above.append(text)
        elif text:
            found[token.start[0]] = text
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT) and above:
            found[-token.start[0]] = " ".join(above)
            above = []
    return found
