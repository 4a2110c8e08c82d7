"""Run an experiment: its result is found in the store, or computed there from the last checkpoint on."""

import contextlib
import datetime
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tribe.core.backbone import Backbone
from tribe.core.precision import float32_precision
from tribe.experiments import store
from tribe.experiments.experiment import Experiment, difference
from tribe.experiments.provenance import machine
from tribe.experiments.record import Record
from tribe.experiments.replay import replay
from tribe.experiments.runner import Progress, run
from tribe.experiments.scores import scores_of
from tribe.experiments.shared import SharedPlays, without_filter
from tribe.experiments.sources import changed, commit, files_of, sources_of
from tribe.experiments.store import CHECKPOINT, ENVIRONMENT, METRICS, SPEC, NewerResults, Result, set_aside
from tribe.experiments.stream import Stream
from tribe.experiments.workbench import Workbench, in_precision
from tribe.io.states import StateFileError
from tribe.methods import AnyMethod, Pipeline

EVERY = 50  # batches between checkpoints


def run_experiment(
    experiment: Experiment,
    root: str | PathLike[str],
    *,
    workbench: Workbench | None = None,
    progress: Progress | None = None,
    every: int = EVERY,
    wait: bool = True,
    force: bool = False,
    plays: SharedPlays | None = None,
    keep_outputs: bool = False,
) -> Result:
    """The result of an experiment, which is in ``root`` afterwards: found there, or computed.

    Args:
        experiment: what to compute.
        root: the folder of all results.
        workbench: where data and weights come from; what it builds must be what the experiment says.
        progress: called after every batch.
        every: batches between checkpoints.
        wait: for another process that computes the same; else `Busy` is raised.
        force: delete a result or checkpoint that is there, and compute it anew.
        plays: of a call with several experiments. Those that differ only in the time filter play their method once; its
            own result, without a filter, is then in ``root``, too.
        keep_outputs: also keep what the method returned, such as logits, in the records. A result whose records lack it
            is computed again.
    """
    try:
        shared = None if keep_outputs else plays  # a filter that is replayed returns no outputs
        return _run(experiment, Path(root), Options(workbench, progress, every, wait, force, shared, keep_outputs))
    finally:
        if plays is not None:
            plays.finish(experiment)


class Options(NamedTuple):
    """How an experiment is computed; none of it changes the result."""

    workbench: Workbench | None
    progress: Progress | None
    every: int
    wait: bool
    force: bool
    plays: SharedPlays | None
    keep_outputs: bool


def _run(experiment: Experiment, root: Path, options: Options) -> Result:
    folder = root / experiment.id
    if not options.force and (found := _find(experiment, root, options)) is not None:
        return found
    missing = experiment.seeds if options.force else store.missing_seeds(experiment, root)
    if missing and missing != experiment.seeds:  # the other seeds are there
        _run(experiment.with_seeds(missing), root, options)
        return _run(experiment, root, options)
    with store.locked(folder, options.wait):
        if options.force:
            _clear(folder, experiment)
        elif (found := _find(experiment, root, options)) is not None:
            return found  # computed by the process that was waited for
        elif other := _other_code(folder, experiment):
            _clear(folder, experiment)
            warnings.warn(f"the code of {other} has changed since {folder} was computed: computed again", stacklevel=2)
        _write_spec(folder, experiment)
        records = _sound_records(folder, experiment)
        if records is None or (options.keep_outputs and any(record.outputs is None for record in records)):
            records = _compute(root, experiment, options)
        return _finish(folder, experiment, records)


def _find(experiment: Experiment, root: Path, options: Options) -> Result | None:
    """The result in the store, if it has all that is asked for."""
    found = store.find(experiment, root, verified=True, current=True)
    if found is None or not options.keep_outputs:
        return found
    return found if found.has_records and all(record.outputs is not None for record in found.records()) else None


def _finish(folder: Path, experiment: Experiment, records: Sequence[Record]) -> Result:
    """Write the metrics of records that are on disk."""
    (folder / CHECKPOINT).unlink(missing_ok=True)  # not before the records are on disk
    _repair_environment(folder, experiment, records)
    scores = {"schema": store.SCHEMA, "id": experiment.id, "seeds": scores_of(records)}
    store.write_json(folder / METRICS, scores)
    return store.load(folder)


def _other_code(folder: Path, experiment: Experiment) -> str:
    """The components whose code has changed since files in a folder were written; empty: none."""
    try:
        roles = changed(store.read_environment(folder / ENVIRONMENT).get("code"), experiment)
    except (OSError, ValueError):
        return ""
    return " and ".join(f"the {role} {getattr(experiment, role).name}" for role in roles)


def _clear(folder: Path, experiment: Experiment) -> None:
    """Delete a result; metrics.json first, since without it the result is not finished."""
    records = (store.record_name(seed) for seed in experiment.seeds)
    for name in (METRICS, *records, ENVIRONMENT, CHECKPOINT):
        (folder / name).unlink(missing_ok=True)


def _write_spec(folder: Path, experiment: Experiment) -> None:
    """Write the spec into the folder; refuse a folder of a newer version."""
    path = folder / SPEC
    try:
        if store.read_spec(path) == experiment:
            return
        set_aside(path, "it is of another experiment")
    except FileNotFoundError:
        pass
    except NewerResults:
        raise
    except ValueError as error:
        set_aside(path, str(error))
    content = {"format": store.FORMAT, "schema": store.SCHEMA, "id": experiment.id, "spec": experiment.json()}
    store.write_json(path, content)


def _sound_records(folder: Path, experiment: Experiment) -> list[Record] | None:
    """The records, if all can be read; damaged ones are set aside."""
    found = []
    for seed in experiment.seeds:
        try:
            found.append(store.load_record(folder, experiment, seed))
        except FileNotFoundError:
            pass
        except ValueError as error:
            (folder / METRICS).unlink(missing_ok=True)  # else the JSON alone would count as complete
            set_aside(folder / store.record_name(seed), str(error))
    return found if len(found) == len(experiment.seeds) else None


def _repair_environment(folder: Path, experiment: Experiment, records: Sequence[Record]) -> None:
    """Where environment.json is lost, write what the records know."""
    path = folder / ENVIRONMENT
    try:
        store.read_environment(path)
        return
    except FileNotFoundError:
        pass
    except ValueError as error:
        set_aside(path, str(error))
    store.write_json(path, _environment(experiment, records, {}))


def _compute(root: Path, experiment: Experiment, options: Options) -> list[Record]:
    """Play the streams, or replay the filter over a play of the method alone; write environment and records."""
    e = experiment
    workbench = options.workbench or Workbench(device=e.device)
    components = workbench.prepare(e.dataset, e.model, e.scenario, e.method, images=e.images)
    built = Experiment.of_components(components, e.seeds, e.batch, e.precision, workbench.device.type, e.threads)
    if built != e:
        apart = "; ".join(difference(e, built))
        raise ValueError(f"experiment {e.id} cannot be computed here, where something differs: {apart}")
    net, method = in_precision(components.net, components.method, e.precision)
    stage = _Stage(root, net, e.stream(workbench), options)
    numbers = e.length(workbench) * (net.classes or len(components.dataset.classes))
    plays, force = options.plays, options.force
    shared = plays is not None and plays.is_shared(e, numbers, lambda other: force or store.find(other, root) is None)
    with float32_precision(e.precision), _threads(e.threads):
        if plays is not None and shared:
            records = _play_shared(stage, e, method, plays)
        else:
            records = _play(stage, e, method, options.keep_outputs)
        computer = machine(workbench.device)
    _write(root / e.id, e, records, computer, options.keep_outputs)
    return records


class _Stage(NamedTuple):
    """What the plays of a method with any filter have in common."""

    root: Path
    net: Backbone
    stream: Stream
    options: Options


def _play(stage: _Stage, experiment: Experiment, method: AnyMethod, keep_outputs: bool = False) -> list[Record]:
    """Play the streams, from the checkpoint in the experiment's folder on."""
    checkpoint = stage.root / experiment.id / CHECKPOINT
    play = partial(
        run,
        stage.net,
        method,
        stage.stream,
        seed=experiment.seeds,
        spec=store.record_spec(experiment),
        checkpoint=checkpoint,
        every=stage.options.every,
        keep_checkpoint=True,  # a disk that is full now must not cost the whole run
        keep_outputs=keep_outputs,
        progress=stage.options.progress,
        deterministic=stage.net.device.type == "cuda",  # a resumed stream must end with the same bits there, too
    )
    try:
        return play()
    except StateFileError as error:
        set_aside(checkpoint, str(error))
        return play()


def _play_shared(stage: _Stage, experiment: Experiment, method: AnyMethod, plays: SharedPlays) -> list[Record]:
    """The records of an experiment whose play others share; the first that needs the play takes it."""
    alone = without_filter(experiment)
    found = plays.find(alone)
    if found is None:
        found = (
            _play(stage, alone, method, keep_outputs=True) if alone == experiment else _play_alone(stage, alone, method)
        )
        plays.keep(alone, found)
    if (rule := Pipeline.of(method).filter) is None:
        return [record._replace(outputs=None) for record in found]
    spec, device = store.record_spec(experiment), stage.net.device
    return replay(found, rule, spec=spec, device=device, progress=stage.options.progress)


def _play_alone(stage: _Stage, alone: Experiment, method: AnyMethod) -> list[Record]:
    """Play the method of an experiment without its filter, in the folder of that experiment: it is a result, too."""
    folder = stage.root / alone.id
    with store.locked(folder, stage.options.wait):
        _write_spec(folder, alone)
        is_missing = store.find(alone, stage.root) is None
        records = _play(stage, alone, Pipeline.of(method).unfiltered, keep_outputs=True)
        if is_missing:
            _write(folder, alone, records, machine(stage.net.device))
            _finish(folder, alone, records)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return records


def _write(
    folder: Path,
    experiment: Experiment,
    records: Sequence[Record],
    computer: Mapping[str, Any],
    keep_outputs: bool = False,
) -> None:
    """Write the environment, then the records: see the layout."""
    store.write_json(folder / ENVIRONMENT, _environment(experiment, records, computer))
    for record in records:
        record.save(folder / store.record_name(record.spec["seed"]), outputs=keep_outputs)


def _environment(experiment: Experiment, records: Sequence[Record], computer: Mapping[str, Any]) -> dict[str, Any]:
    times = {str(record.spec["seed"]): record.seconds.double() for record in records}
    custom = {"files": found} if (found := files_of(experiment)) else {}
    return {
        "schema": store.SCHEMA,
        "id": experiment.id,
        "machine": computer,
        "seconds": sum(float(seconds.sum()) for seconds in times.values()),
        "seconds_per_image": {seed: float(seconds.mean()) for seed, seconds in times.items()},
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **({"code": commit() | sources_of(experiment) | custom} if computer else {}),
    }


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
