"""Experiments that differ only in the time filter share one play of their method: the filters are replayed."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from tribe import methods
from tribe.experiments.experiment import Experiment
from tribe.experiments.provenance import code_of
from tribe.experiments.record import Record
from tribe.experiments.spec import ComponentSpec

MOST_NUMBERS = 2**28  # outputs that are kept in memory: 1 GiB, such as 268,000 images of 1,000 classes


def without_filter(experiment: Experiment) -> Experiment:
    """The experiment of the method alone; the same one if its method has no time filter."""
    name = methods.parse(experiment.method.name).unfiltered
    if name == experiment.method.name:
        return experiment
    try:
        own, classes = methods.field_names(name), methods.classes_of(name)
    except ValueError:  # a custom method that is unknown here
        return experiment
    fields = {field: value for field, value in experiment.method.fields.items() if field in own}
    return dataclasses.replace(experiment, method=ComponentSpec(name, fields, code_of(*classes)))


def in_groups(experiments: Iterable[Experiment]) -> list[Experiment]:
    """Experiments that share a play next to one another, where the first of them was; the method alone comes first."""
    groups: dict[Experiment, list[Experiment]] = {}
    for experiment in experiments:
        groups.setdefault(without_filter(experiment), []).append(experiment)
    return [e for alone, group in groups.items() for e in sorted(group, key=lambda e: e != alone)]


class SharedPlays:
    """What the methods of some experiments returned, kept while an experiment with a filter needs it.

    Args:
        experiments: all that will be run.
    """

    def __init__(self, experiments: Iterable[Experiment]) -> None:
        self._waiting = {experiment: without_filter(experiment) for experiment in experiments}
        self._kept: dict[Experiment, list[Record]] = {}  # by the experiment of the method alone

    def is_shared(self, experiment: Experiment, numbers: int, is_missing: Callable[[Experiment], bool]) -> bool:
        """Whether an experiment is played together with others.

        Args:
            experiment: about to be computed.
            numbers: that its method returns: images times classes.
            is_missing: whether another experiment has to be computed, too.
        """
        alone = without_filter(experiment)
        if alone in self._kept:
            return True
        held = sum(record.outputs.values.numel() for plays in self._kept.values() for record in plays if record.outputs)
        others = [e for e, inner in self._waiting.items() if inner == alone and e != experiment]
        return held + numbers <= MOST_NUMBERS and any(map(is_missing, others))

    def find(self, alone: Experiment) -> Sequence[Record] | None:
        """The records of a method alone, with its outputs."""
        return self._kept.get(alone)

    def keep(self, alone: Experiment, records: Sequence[Record]) -> None:
        """Keep the records of a method alone, with its outputs."""
        self._kept[alone] = list(records)

    def finish(self, experiment: Experiment) -> None:
        """Forget an experiment, and what it was kept for."""
        self._waiting.pop(experiment, None)
        self._kept = {alone: kept for alone, kept in self._kept.items() if alone in self._waiting.values()}
