"""Run an experiment: its result is read from the store, or computed from the last checkpoint on."""

import contextlib
import dataclasses
import datetime
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch

from tribe.core.backbone import Backbone
from tribe.core.precision import float32_precision
from tribe.experiments import metrics
from tribe.experiments.experiment import Experiment, difference
from tribe.experiments.provenance import commit, machine
from tribe.experiments.record import Record
from tribe.experiments.runner import Progress, run
from tribe.experiments.store import CHECKPOINT, Result, ResultStore, StreamResult, changed, component_digests
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Parts, Workbench, in_precision
from tribe.io.files import exclusive
from tribe.io.states import StateFileError
from tribe.methods import AnyMethod

EVERY = 50  # batches between checkpoints


class RunSettings(NamedTuple):
    """The settings of a computation; none of them changes a result."""

    root: str | PathLike[str]  # the folder of results
    every: int = EVERY  # batches between checkpoints
    force: bool = False  # compute anew what is there
    keep_outputs: bool = False  # keep logits in the records; a result whose records lack them is computed again
    command: Sequence[str] | None = None  # the command line, kept with the results


class ExperimentRunner:
    """Runs experiments, one after the other, with one store."""

    def __init__(self, settings: RunSettings, workbench: Workbench | None = None) -> None:
        self.store = ResultStore(settings.root)
        self.settings, self.workbench = settings, workbench

    def run(self, experiment: Experiment, progress: Progress | None = None, wait: bool = True) -> Result:
        """Return the result of an experiment, which is in the store afterwards.

        ``wait``: for another process that computes the same; else `Busy` is raised.
        """
        settings, folder = self.settings, self.store.root / experiment.id
        streams = {} if settings.force else self._stored(experiment)
        memory: Mapping[int, Record] = {}
        if len(streams) < len(experiment.seeds):
            folder.mkdir(parents=True, exist_ok=True)
            with exclusive(folder / ".lock", wait=wait, busy=f"another process is computing {folder}"):
                if settings.force:
                    (folder / CHECKPOINT).unlink(missing_ok=True)
                else:
                    streams = self._stored(experiment)  # another process may have computed it meanwhile
                if missing := [seed for seed in experiment.seeds if seed not in streams]:
                    played = self._compute(dataclasses.replace(experiment, seeds=tuple(missing)), progress)
                    self.store.add(played)
                    (folder / CHECKPOINT).unlink(missing_ok=True)  # not before the result is on the disk
                    streams, memory = streams | dict(played.streams), played.memory
        return Result(experiment, self.store.root, {seed: streams[seed] for seed in experiment.seeds}, memory)

    def _stored(self, experiment: Experiment) -> dict[int, StreamResult]:
        """Return the streams in the store that need not be computed again."""
        streams = self.store.streams_of(experiment)
        for seed, stream in list(streams.items()):
            if roles := changed(experiment, stream.environment.get("code") or {}):
                names = " and ".join(f"the {role} {getattr(experiment, role).name}" for role in roles)
                text = f"the code of {names} has changed since seed {seed} of {experiment.id} was computed"
                warnings.warn(f"{text}: computed again", stacklevel=3)
                del streams[seed]
            elif self.settings.keep_outputs:
                outputs = None
                with contextlib.suppress(OSError, ValueError):
                    outputs = Result(experiment, self.store.root, {seed: stream}).records()[0].outputs
                if outputs is None:
                    del streams[seed]
        return streams

    def _compute(self, experiment: Experiment, progress: Progress | None) -> Result:
        parts = experiment.parts or self._build(experiment)
        stream = parts.stream
        if stream.seeds != experiment.seeds:
            stream = Stream(stream.dataset, stream.scenario, experiment.seeds, experiment.batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(float32_precision(experiment.precision))
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(experiment.threads or torch.get_num_threads())
            net, method = in_precision(parts.net, parts.method, experiment.precision)
            records = self._run(experiment, net, method, stream, progress)
            return self._result(experiment, records, machine(net.device))

    def _run(
        self, experiment: Experiment, net: Backbone, method: AnyMethod, stream: Stream, progress: Progress | None
    ) -> list[Record]:
        """Play the streams from the last checkpoint on; one that cannot be used is set aside."""
        path = self.store.root / experiment.id / CHECKPOINT
        savable = method.not_savable_because is None  # else an interrupted run begins anew
        while True:
            try:
                return run(
                    net,
                    method,
                    stream,
                    seed=experiment.seeds,
                    spec=experiment.json() | {"experiment": experiment.id},
                    checkpoint=path if savable else None,
                    every=self.settings.every,
                    keep_checkpoint=True,  # a disk that is full now must not cost the whole run
                    keep_outputs=self.settings.keep_outputs,
                    progress=progress,
                    # A resumed stream ends with the same bits on a GPU, too.
                    deterministic=net.device.type == "cuda",
                    realtime=experiment.realtime,
                )
            except StateFileError as error:
                names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
                renamed = path.rename(next(name for name in names if not name.exists()))
                warnings.warn(f"{error}. It was set aside as {renamed.name}, and the run begins anew", stacklevel=2)

    def _result(self, experiment: Experiment, records: list[Record], computer: dict[str, Any]) -> Result:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        common = {"machine": computer, "finished": now, **commit(), "code": component_digests(experiment)}
        common |= {} if self.settings.command is None else {"command": list(self.settings.command)}
        streams = {}
        for record in records:
            seconds = metrics.seconds_per_image(record).item()
            time = {"seconds_per_image": seconds if math.isfinite(seconds) else None}
            streams[record.spec["seed"]] = StreamResult(metrics.scores(record), common | time)
        return Result(experiment, self.store.root, streams, dict(zip(streams, records, strict=True)))

    def _build(self, experiment: Experiment) -> Parts:
        """Build the components of an experiment that was read from plain data."""
        e, workbench = experiment, self.workbench or Workbench(device=experiment.device, threads=experiment.threads)
        options: Any = {"seeds": e.seeds, "batch": e.batch, "precision": e.precision, "workbench": workbench}
        options |= {"realtime": e.realtime}
        built = dataclasses.replace(
            Experiment.of(e.dataset, e.model, e.scenario, e.method, **options), threads=e.threads
        )
        if built != e:
            raise ValueError(f"experiment {e.id} cannot be computed here: {'; '.join(difference(e, built))}")
        assert built.parts is not None
        return built.parts
