"""A norm rule from text: its name, or its name with fields, such as ``robust(alpha=0.01)``. Plain data can hold it."""

import ast
import dataclasses
import functools
import re
from typing import Any

import torch
from torch import Tensor

from tribe.norms import Norm, Stats, build, get, names

ROWS, BATCH, CHANNELS = 2, 3, 4  # of the trial


def split_text(text: str) -> tuple[str, str]:
    """The name, and the fields with their brackets.

    >>> split_text("robust(alpha=0.01)"), split_text("robust")
    (('robust', '(alpha=0.01)'), ('robust', ''))
    """
    found = re.fullmatch(r"([^()]+)(\(.*\))?", text.strip(), flags=re.DOTALL)
    if found is None:
        raise ValueError(f"{text!r} names no norm rule: expected a name such as robust, or robust(alpha=0.01)")
    return found[1].strip(), found[2] or ""


def find_class(text: Any) -> type[Norm] | None:
    """The class of the rule that a text names; None if it names none.

    >>> find_class("robust(alpha=0.01)").__name__, find_class("of mine"), find_class(None)
    ('Robust', None, None)
    """
    name = text.partition("(")[0].strip() if isinstance(text, str) else ""
    return get(name) if name in names() else None


def from_text(text: str, classes: int) -> Norm:
    """The rule that a text names, for so many classes; one that does not keep the protocol is refused.

    >>> from_text("robust(alpha=0.01)", 10)
    Robust(alpha=0.01)
    """
    return _build(get(split_text(text)[0]), text, classes)


@functools.lru_cache(maxsize=64)
def _build(cls: type[Norm], text: str, classes: int) -> Norm:
    """Build a rule and try it, once: a method asks for it in every step."""
    fields = _fields(text, split_text(text)[1])
    if any(field.name == "classes" and field.init for field in dataclasses.fields(cls)):  # type: ignore[arg-type]
        fields.setdefault("classes", classes)
    norm: Norm = build(cls, "norm", fields)
    _try(norm, text)
    return norm


def _fields(text: str, bracket: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f{bracket or '()'}", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(
            f"the fields of {text!r} cannot be read: expected plain values by name, such as robust(alpha=0.01)"
        ) from None


def _try(norm: Norm, text: str) -> None:
    """Call a rule with ordinary numbers, with labels and without; refuse one that fails or returns what is unusable.

    A rule that returns NaN would make every prediction uniform, and nothing would be learned.
    """
    generator = torch.Generator().manual_seed(0)
    mean, var = (torch.rand(ROWS, BATCH, CHANNELS, generator=generator) + 0.1 for _ in range(2))
    stats = Stats(*(torch.rand(ROWS, norm.classes, CHANNELS, generator=generator) + 0.5 for _ in range(2)))
    valid = torch.ones(ROWS, BATCH, dtype=torch.bool)
    for labels in (torch.zeros(ROWS, BATCH, dtype=torch.int64), None):
        if labels is not None and (group := getattr(norm, "group", None)) is not None:
            labels = group(labels, valid, mean.dtype)
        given = "without labels" if labels is None else "with labels"
        try:
            found = norm(mean, var, 9, stats, labels, valid, 1e-5)
        except Exception as error:  # custom code may raise anything
            raise ValueError(f"the norm rule {text!r} failed {given}: {type(error).__name__}: {error}") from error
        if why := _unusable(found, norm.classes) or _unobserved(norm, found, stats):
            raise ValueError(f"the norm rule {text!r} cannot be used: {given} {why}")


def _unobserved(norm: Norm, found: tuple[Tensor, Tensor, Stats], stats: Stats) -> str | None:
    """Why a rule that says it does not observe does; None: it returns what is stored. Nothing calls such a rule."""
    if norm.observes or all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(found[:2], stats, strict=True)):
        return None
    return "it returned other statistics than the stored ones, although its observes is False: set observes = True"


def _unusable(found: Any, classes: int) -> str | None:
    """What is wrong with what a rule returned; None: nothing."""
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], Stats)):
        return f"it returned {_kind(found)}; expected the mean, the variance, and the Stats to keep"
    mean, var, kept = found
    per_batch = {(ROWS, 1, CHANNELS), (ROWS, BATCH, CHANNELS)}
    for name, part, shapes in (
        ("mean", mean, per_batch),
        ("variance", var, per_batch),
        ("mean to keep", kept.mean, {(ROWS, classes, CHANNELS)}),
        ("variance to keep", kept.var, {(ROWS, classes, CHANNELS)}),
    ):
        if not isinstance(part, Tensor) or tuple(part.shape) not in shapes:
            return f"its {name} is {_kind(part)}; expected the shape {' or '.join(map(str, sorted(shapes)))}"
        if not bool(part.isfinite().all()):
            return f"its {name} is not finite for ordinary moments: it holds {part[~part.isfinite()][0].item()}"
    return None if bool((var + 1e-5 > 0).all()) else f"its variance is negative: {float(var.min()):.3g}"


def _kind(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
