"""Show the comments behind fields in the API reference: an extension of griffe, which reads the code.

The code documents a field where it stands, ``eta: float = 0.01  # momentum of one instance``, or in comment lines above
it, and the fields of some named tuples with `tribe.fields.document`.
"""

import ast
import io
import re
import tokenize
from typing import Any

import griffe

TOOLS = re.compile(r"(noqa|type): *\S*(, *[A-Z]+\d+)* *")  # notes to ruff and mypy


class FieldComments(griffe.Extension):
    """Give attributes of classes without a docstring the text of their comment."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Read the comments of a module once it is loaded, and give each field its own."""
        if not isinstance(mod.filepath, list) and mod.filepath.suffix == ".py":
            source = "\n".join(mod.lines)
            comments, described = comments_of(source), described_fields(source)
            for item in list(mod.members.values()):
                if isinstance(item, griffe.Class):
                    self._describe(item, comments, described.get(item.name, {}))

    def _describe(self, item: griffe.Class, comments: dict[int, str], described: dict[str, str]) -> None:
        for name, member in item.members.items():
            if isinstance(member, griffe.Attribute) and member.docstring is None and member.lineno is not None:
                lines = range(member.lineno, (member.endlineno or member.lineno) + 1)
                text = described.get(name) or next((comments[n] for n in lines if n in comments), None)
                text = text or comments.get(-member.lineno)
                if text:
                    member.docstring = griffe.Docstring(text, parent=member)


def comments_of(source: str) -> dict[int, str]:
    """The comment behind the code of each line; under minus its number, the comment lines above a line of code."""
    found: dict[int, str] = {}
    above: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = TOOLS.sub("", token.string.lstrip("# ")) if token.type == tokenize.COMMENT else ""
        alone = token.line.lstrip().startswith("#")
        if text and alone:
            above.append(text)
        elif text:
            found[token.start[0]] = text
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT) and above:
            found[-token.start[0]] = " ".join(above)
            above = []
    return found


def described_fields(source: str) -> dict[str, dict[str, str]]:
    """What calls of `tribe.fields.document` say, by class and field."""
    found = {}
    for node in ast.parse(source).body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "document":
            texts = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
            found[ast.unparse(call.args[0])] = texts
    return found
