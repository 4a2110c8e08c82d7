"""Helpers of all checks: equal runs, states that are saved, watched random generators, documentation."""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from tribe.core.state import digest, leaves, rebuild


def checks_of(module: Mapping[str, Any]) -> tuple[Callable[[Any], None], ...]:
    """Return the checks of a module, given its globals: all public functions that it defines, in their order."""
    functions = [value for name, value in module.items() if inspect.isfunction(value) and not name.startswith("_")]
    return tuple(function for function in functions if function.__module__ == module["__name__"])


class Played(NamedTuple):
    """A stream that was played: what came out batch by batch, and the state at its end."""

    outputs: list[Tensor]
    state: Any


def require_same(one: Played, other: Played, when: str) -> None:
    """Require the same bits of two runs."""
    assert all(map(torch.equal, one.outputs, other.outputs)), f"predictions differ {when}"
    assert digest(one.state) == digest(other.state), f"states differ {when}"


def require_no_graph(*tensors: Tensor) -> None:
    """Require that no tensor keeps an autograd graph alive."""
    assert not any(t.requires_grad for t in tensors), "a result still has a graph"


def saved_and_loaded(state: Any, fresh: Any) -> Any:
    """Save a state and load it again; ``fresh`` is another state of the same kind."""
    return rebuild(fresh, load(save({name: t.contiguous() for name, t in leaves(state).items()})))


def is_finite(state: Any) -> bool:
    """Return whether every number of a state is finite."""
    return all(bool(t.isfinite().all()) for t in leaves(state).values())


def require_same_layout(start: Any, end: Any) -> None:
    """Require that two states have the same tensors, with the same shapes and types."""
    before, after = leaves(start), leaves(end)
    assert before.keys() == after.keys(), f"the state lost or gained {sorted(before.keys() ^ after.keys())}"
    for name, t in before.items():
        old, new = (f"{tuple(u.shape)} of {u.dtype}" for u in (t, after[name]))
        assert old == new, f"{name} of the state was {old} and is {new}"


@contextmanager
def generators_stay() -> Iterator[None]:
    """Fail if the code inside draws from a global random generator, or seeds it."""
    torch.rand(1)  # advance each: otherwise seeding with the seed of a moment ago would not show
    np.random.random()
    random.random()
    before = _generators()
    yield
    for (owner, old), new in zip(before.items(), _generators().values(), strict=True):
        assert old == new, f"{owner} global generator moved"


def _generators() -> dict[str, Any]:
    """Return the states of the global generators."""
    return {
        "torch's": torch.get_rng_state().tolist(),
        "numpy's": [np.asarray(part).tolist() for part in np.random.get_state()],
        "Python's": random.getstate(),
    }


def seed_generators(seed: int) -> None:
    """Seed all global random generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def require_documentation(component: type[Any]) -> None:
    """Require a docstring of a class and of its module, a paper and a name."""
    module = inspect.getmodule(component)
    assert component.__doc__, "the class has no docstring"
    assert module is None or module.__name__ == "__main__" or module.__doc__, "the module has no docstring"
    assert getattr(component, "paper", ""), "no paper"
    assert getattr(component, "name", ""), "not registered: no name"
