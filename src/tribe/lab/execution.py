"""Run an experiment: its result is found in the store, or computed there from the last checkpoint on."""

import contextlib
import datetime
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tribe.engine.precision import float32_precision
from tribe.lab import store
from tribe.lab.experiment import Experiment, difference
from tribe.lab.provenance import machine
from tribe.lab.record import Record
from tribe.lab.runner import Progress, run
from tribe.lab.store import CHECKPOINT, ENVIRONMENT, METRICS, SPEC, NewerResults, Result, set_aside
from tribe.lab.workbench import Workbench, in_precision
from tribe.storage.states import StateFileError

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
    """
    folder = Path(root) / experiment.id
    if not force and (found := store.find(experiment, root, verified=True)) is not None:
        return found
    with store.locked(folder, wait):
        if force:
            _clear(folder, experiment)
        elif (found := store.find(experiment, root, verified=True)) is not None:  # by the process that was waited for
            return found
        _write_spec(folder, experiment)
        records = _sound_records(folder, experiment)
        if records is None:
            records = _compute(folder, experiment, workbench or Workbench(device=experiment.device), progress, every)
        (folder / CHECKPOINT).unlink(missing_ok=True)  # not before the records are on disk
        _repair_environment(folder, experiment, records)
        scores = {"schema": store.SCHEMA, "id": experiment.id, "seeds": store.scores_of(records)}
        store.write_json(folder / METRICS, scores)
        return store.load(folder)


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


def _compute(
    folder: Path, experiment: Experiment, workbench: Workbench, progress: Progress | None, every: int
) -> list[Record]:
    """Play the streams, and write environment and records."""
    e = experiment
    components = workbench.prepare(e.dataset, e.model, e.scenario, e.method)
    built = Experiment.of_components(components, e.seeds, e.batch, e.precision, workbench.device.type, e.threads)
    if built != e:
        apart = "; ".join(difference(e, built))
        raise ValueError(f"experiment {e.id} cannot be computed here, where something differs: {apart}")
    checkpoint = folder / CHECKPOINT
    net, method = in_precision(components.net, components.method, e.precision)
    with float32_precision(e.precision), _threads(e.threads):
        play = partial(
            run,
            net,
            method,
            e.stream(workbench),
            seed=e.seeds[0],
            spec=store.record_spec(e),
            checkpoint=checkpoint,
            every=every,
            keep_checkpoint=True,  # a disk that is full now must not cost the whole run
            progress=progress,
            deterministic=workbench.device.type == "cuda",  # a resumed stream must end with the same bits there, too
        )
        try:
            records = play()
        except StateFileError as error:
            set_aside(checkpoint, str(error))
            records = play()
        computer = machine(workbench.device)
    store.write_json(folder / ENVIRONMENT, _environment(e, records, computer))  # before the records: see the layout
    for record in records:
        record.save(folder / store.record_name(record.spec["seed"]))
    return records


def _environment(experiment: Experiment, records: Sequence[Record], computer: Mapping[str, Any]) -> dict[str, Any]:
    times = {str(record.spec["seed"]): record.seconds.double() for record in records}
    return {
        "schema": store.SCHEMA,
        "id": experiment.id,
        "machine": computer,
        "seconds": sum(float(seconds.sum()) for seconds in times.values()),
        "seconds_per_image": {seed: float(seconds.mean()) for seed, seconds in times.items()},
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
