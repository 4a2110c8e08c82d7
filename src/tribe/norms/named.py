"""A norm rule from text: its name, or its name with fields, such as ``robust(alpha=0.01)``. Plain data can hold it."""

import ast
import dataclasses
import functools
import re
from typing import Any

import torch

from tribe.norms import Norm, Stats, build, get, names


def split_text(text: str) -> tuple[str, str]:
    """Return the name, and the fields with their brackets.

    >>> split_text("robust(alpha=0.01)"), split_text("robust")
    (('robust', '(alpha=0.01)'), ('robust', ''))
    """
    match = re.fullmatch(r"([^()]+)(\(.*\))?", text.strip(), flags=re.DOTALL)
    if match is None:
        raise ValueError(f"{text!r} is not a norm rule: expected a name such as robust, or robust(alpha=0.01)")
    return match[1].strip(), match[2] or ""


def find_class(text: Any) -> type[Norm] | None:
    """Return the class of the rule that a text names; None if it is unknown.

    >>> find_class("robust(alpha=0.01)").__name__, find_class("mine"), find_class(None)
    ('Robust', None, None)
    """
    name = text.partition("(")[0].strip() if isinstance(text, str) else ""
    return get(name) if name in names() else None


def from_text(text: str, classes: int) -> Norm:
    """Return the rule that a text names, for a number of classes; raise if it does not follow the protocol.

    >>> from_text("robust(alpha=0.01)", 10)
    Robust(alpha=0.01)
    """
    return _build(get(split_text(text)[0]), text, classes)


@functools.lru_cache(maxsize=64)
def _build(cls: type[Norm], text: str, classes: int) -> Norm:
    """Build a rule and try it, once: a method asks for it in every step."""
    try:
        call: Any = ast.parse(f"rule{split_text(text)[1] or '()'}", mode="eval").body
        fields = {field.arg: ast.literal_eval(field.value) for field in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: Python's parser, of deep nesting
        call = None
    if call is None or call.args:
        raise ValueError(f"the fields of {text!r} cannot be read: expected plain values, such as robust(alpha=0.01)")
    if any(field.name == "classes" and field.init for field in dataclasses.fields(cls)):  # type: ignore[arg-type]
        fields.setdefault("classes", classes)
    norm: Norm = build(cls, "norm", fields)
    for labelled in (True, False):
        words = "with labels" if labelled else "without labels"
        try:
            problem = _problem(norm, labelled)
        except Exception as error:  # custom code may raise anything
            raise ValueError(f"the norm rule {text!r} failed {words}: {type(error).__name__}: {error}") from error
        if problem is not None:
            raise ValueError(f"the norm rule {text!r} cannot be used: {words} {problem}")
    return norm


def _problem(norm: Norm, labelled: bool, rows: int = 2, batch: int = 3, channels: int = 4) -> str | None:
    """Return why the results of a rule are unusable, for ordinary moments; None if they are not.

    A rule that returns NaN would make every prediction uniform, and nothing would be learned.
    """
    generator = torch.Generator().manual_seed(0)
    mean, var = (torch.rand(rows, batch, channels, generator=generator) + 0.1 for _ in range(2))
    stats = Stats(*(torch.rand(rows, norm.classes, channels, generator=generator) + 0.5 for _ in range(2)))
    valid, labels = torch.ones(rows, batch, dtype=torch.bool), torch.zeros(rows, batch, dtype=torch.int64)
    group = getattr(norm, "group", lambda labels, *_: labels)
    given = group(labels, valid, mean.dtype) if labelled else None
    out_mean, out_var, kept = norm(mean, var, 9, stats, given, valid, 1e-5)
    shapes = [tuple(t.shape) for t in (out_mean, out_var, *kept)]
    per_batch, per_class = [(rows, n, channels) for n in (1, batch)], (rows, norm.classes, channels)
    if any(shape not in per_batch for shape in shapes[:2]) or shapes[2:] != [per_class] * 2:
        return f"it returned the shapes {shapes}; expected {per_batch[0]} or {per_batch[1]}, and {per_class} to keep"
    if not all(bool(t.isfinite().all()) for t in (out_mean, out_var, *kept)) or bool((out_var + 1e-5 <= 0).any()):
        return "its statistics are not finite, or a variance is negative"
    if not norm.observes and not all(torch.equal(a, b) for a, b in zip((out_mean, out_var), stats, strict=True)):
        return "it returned other statistics than the stored ones, although its observes is False"
    return None
