"""Mutants for tests of the contract: a healthy component with one bug."""

import dataclasses


def mutant(wrong, healthy, **changes):
    """Return a copy of a component, whose class has these members in place of its own; ``wrong`` is its docstring."""
    cls = type("Mutant", (type(healthy),), {"__doc__": wrong, **changes})
    if not dataclasses.is_dataclass(healthy):
        return cls()
    return cls(**{field.name: getattr(healthy, field.name) for field in dataclasses.fields(healthy) if field.init})


def name_of(part):
    """Name a mutant by what is wrong in it."""
    return part if isinstance(part, str) else type(part).__doc__
