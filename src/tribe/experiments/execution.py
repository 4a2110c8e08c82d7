"""Run an experiment: its result is read from the store, or computed from the last checkpoint on."""

import contextlib
import dataclasses
import datetime
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.precision import float32_precision
from tribe.experiments import metrics
from tribe.experiments.experiment import Experiment, difference
from tribe.experiments.provenance import code_of, commit, machine
from tribe.experiments.record import Record
from tribe.experiments.replay import replay
from tribe.experiments.runner import Progress, run
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.store import CHECKPOINT, Result, ResultStore, StreamResult, component_digests, locked, stale
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Parts, Workbench, in_precision
from tribe.io.states import StateFileError
from tribe.methods import AnyMethod, Pipeline

EVERY = 50  # batches between checkpoints
MOST_NUMBERS = 2**28  # outputs that are kept in memory: 1 GiB, such as 268,000 images of 1,000 classes


def run_experiment(
    experiment: Experiment,
    root: str | PathLike[str],
    *,
    workbench: Workbench | None = None,
    progress: Progress | None = None,
    every: int = EVERY,
    wait: bool = True,
    force: bool = False,
    keep_outputs: bool = False,
) -> Result:
    """Return the result of an experiment, which is in ``root`` afterwards.

    Args:
        experiment: What to compute.
        root: The folder of results.
        workbench: Where data and weights are, for an experiment whose components this process has not built.
        progress: Called after every batch.
        every: Batches between checkpoints.
        wait: For another process that computes the same; else `Busy` is raised.
        force: Compute it anew.
        keep_outputs: Also keep the outputs of the method, such as logits, in the records. A result whose records lack
            them is computed again.
    """
    runner = ExperimentRunner(root, workbench, every)
    return runner.run(experiment, progress=progress, wait=wait, force=force, keep_outputs=keep_outputs)


class ExperimentRunner:
    """Runs experiments, one after the other, with one store.

    Of experiments that differ in the time filter alone, the method is played once: a filter never feeds what the method
    learns, so it is replayed over the outputs of the method, whose own result is stored, too.

    Args:
        root: The folder of results.
        workbench: See `run_experiment`.
        every: Batches between checkpoints.
        planned: All experiments that will be run; those beside one another that share a play gain from it.
        command: The command line, kept with the results.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        workbench: Workbench | None = None,
        every: int = EVERY,
        planned: Iterable[Experiment] = (),
        command: Sequence[str] | None = None,
    ) -> None:
        self.store = ResultStore(root)
        self._workbench, self._every, self._command = workbench, every, command
        self._sharing = Counter(without_filter(experiment).id for experiment in planned)
        self._play: tuple[Experiment, list[Record]] | None = None  # the last one that others share, with its outputs

    def run(
        self,
        experiment: Experiment,
        *,
        progress: Progress | None = None,
        wait: bool = True,
        force: bool = False,
        keep_outputs: bool = False,
    ) -> Result:
        """Return the result of an experiment; see `run_experiment`."""
        result = None if force else self._stored(experiment, keep_outputs)
        if result is not None and result.experiment == experiment:
            return result
        folder = self.store.root / experiment.id
        with locked(folder / ".lock", wait):
            if force:
                (folder / CHECKPOINT).unlink(missing_ok=True)
            else:
                result = self._stored(experiment, keep_outputs)  # another process may have computed it meanwhile
            streams = {} if result is None else dict(result.streams)
            missing = [seed for seed in experiment.seeds if seed not in streams]
            memory: dict[int, Record] = {}
            if missing:
                played = self._compute(experiment.with_seeds(missing), folder, progress, keep_outputs)
                self.store.add(played)
                (folder / CHECKPOINT).unlink(missing_ok=True)  # not before the result is on the disk
                streams, memory = streams | dict(played.streams), dict(played.memory)
        return Result(experiment, self.store.root, {seed: streams[seed] for seed in experiment.seeds}, memory)

    def _stored(self, experiment: Experiment, keep_outputs: bool) -> Result | None:
        """Return the streams in the store that need not be computed again; None if there are none."""
        streams = self.store.streams_of(experiment)
        for seed in list(streams):
            alone = Result(experiment.with_seeds([seed]), self.store.root, {seed: streams[seed]})
            if roles := stale(alone):
                names = " and ".join(f"the {role} {getattr(experiment, role).name}" for role in roles)
                text = f"the code of {names} has changed since seed {seed} of {experiment.id} was computed"
                warnings.warn(f"{text}: computed again", stacklevel=3)
                del streams[seed]
            elif keep_outputs and not _has_outputs(alone):
                del streams[seed]
        return Result(experiment.with_seeds(tuple(streams)), self.store.root, streams) if streams else None

    def _compute(self, experiment: Experiment, folder: Path, progress: Progress | None, keep_outputs: bool) -> Result:
        """Play the streams, or replay the filter over a play of the method alone."""
        parts = experiment.parts or self._build(experiment)
        with float32_precision(experiment.precision), _threads(experiment.threads):
            net, method = in_precision(parts.net, parts.method, experiment.precision)
            stream = _stream(parts, experiment)
            alone = without_filter(experiment)
            is_shared = self._sharing[alone.id] > 1 and _outputs_fit(net, stream) and not keep_outputs
            rule = Pipeline.of(method).filter
            if is_shared and rule is not None:
                records = self._play_alone(alone, net, Pipeline.of(method).unfiltered, stream, progress)
                spec = experiment.record_spec()
                records = replay(records, rule, spec=spec, device=net.device, progress=progress)
            else:
                records = self._run(experiment, net, method, stream, folder, progress, keep_outputs or is_shared)
                if is_shared:
                    self._play = experiment, records
                    records = [record._replace(outputs=None) for record in records]
            return self._result(experiment, records, machine(net.device))

    def _play_alone(
        self, alone: Experiment, net: Backbone, method: AnyMethod, stream: Stream, progress: Progress | None
    ) -> list[Record]:
        """Return the records of a method without its filter, with its outputs; they are a result, too."""
        if self._play is not None and self._play[0] == alone:
            return self._play[1]
        folder = self.store.root / alone.id
        with locked(folder / ".lock", wait=True):
            records = self._run(alone, net, method, stream, folder, progress, True)
            if self._stored(alone, False) is None:
                bare = [record._replace(outputs=None) for record in records]
                self.store.add(self._result(alone, bare, machine(net.device)))
            (folder / CHECKPOINT).unlink(missing_ok=True)
        self._play = alone, records
        return records

    def _run(
        self,
        experiment: Experiment,
        net: Backbone,
        method: AnyMethod,
        stream: Stream,
        folder: Path,
        progress: Progress | None,
        keep_outputs: bool,
    ) -> list[Record]:
        """Play the streams from the checkpoint in a folder on; a checkpoint that cannot be used is set aside."""
        while True:
            try:
                return run(
                    net,
                    method,
                    stream,
                    seed=experiment.seeds,
                    spec=experiment.record_spec(),
                    checkpoint=folder / CHECKPOINT,
                    every=self._every,
                    keep_checkpoint=True,  # a disk that is full now must not cost the whole run
                    keep_outputs=keep_outputs,
                    progress=progress,
                    deterministic=net.device.type == "cuda",  # a resumed stream ends with the same bits there, too
                )
            except StateFileError as error:
                _set_aside(folder / CHECKPOINT, str(error))

    def _result(self, experiment: Experiment, records: list[Record], computer: dict[str, Any]) -> Result:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        common = {"machine": computer, "finished": now, **commit(), "code": component_digests(experiment)}
        common |= {} if self._command is None else {"command": list(self._command)}
        streams = {}
        for record in records:
            seconds = metrics.seconds_per_image(record).item()
            time = {"seconds_per_image": seconds if math.isfinite(seconds) else None}
            streams[record.spec["seed"]] = StreamResult(metrics.scores(record), common | time)
        return Result(experiment, self.store.root, streams, dict(zip(streams, records, strict=True)))

    def _build(self, experiment: Experiment) -> Parts:
        """Build the components of an experiment that was read from plain data."""
        e, workbench = experiment, self._workbench or Workbench(device=experiment.device, threads=experiment.threads)
        options: Any = {"seeds": e.seeds, "batch": e.batch, "precision": e.precision, "workbench": workbench}
        built = dataclasses.replace(
            Experiment.of(e.dataset, e.model, e.scenario, e.method, **options), threads=e.threads
        )
        if built != e:
            raise ValueError(f"experiment {e.id} cannot be computed here: {'; '.join(difference(e, built))}")
        assert built.parts is not None
        return built.parts


# -- filters ----------------------------------------------------------------------------------------------------------


def without_filter(experiment: Experiment) -> Experiment:
    """Return the experiment of the method alone; the same one if its method has no time filter."""
    name = methods.parse(experiment.method.name).unfiltered
    if name == experiment.method.name:
        return experiment
    try:
        own, classes = methods.field_names(name), methods.classes_of(name)
    except ValueError:  # a custom method that is unknown here
        return experiment
    fields = {field: value for field, value in experiment.method.fields.items() if field in own}
    return dataclasses.replace(experiment, method=ComponentSpec(name, fields, code_of(*classes)), parts=None)


def in_groups(experiments: Iterable[Experiment]) -> list[Experiment]:
    """Return experiments that share a play beside one another, where the first was; the method alone comes first."""
    groups: dict[Experiment, list[Experiment]] = {}
    for experiment in experiments:
        groups.setdefault(without_filter(experiment), []).append(experiment)
    return [e for alone, group in groups.items() for e in sorted(group, key=lambda e: e != alone)]


def _outputs_fit(net: Backbone, stream: Stream) -> bool:
    """Return whether the outputs of a play fit into memory."""
    return stream.images * (net.classes or len(stream.dataset.classes)) <= MOST_NUMBERS


def _has_outputs(result: Result) -> bool:
    try:
        return all(record.outputs is not None for record in result.records())
    except (OSError, ValueError):
        return False


# -- helpers ----------------------------------------------------------------------------------------------------------


def _stream(parts: Parts, experiment: Experiment) -> Stream:
    stream = parts.stream
    if stream.seeds == experiment.seeds:
        return stream
    return Stream(stream.dataset, stream.scenario, experiment.seeds, experiment.batch)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set_aside(path: Path, reason: str) -> None:
    """Rename a file that cannot be used, so that nothing is lost, and warn."""
    number = 1
    while (renamed := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.replace(path, renamed)
    warnings.warn(f"{reason}. It was set aside as {renamed.name}, and the run begins anew", stacklevel=3)
