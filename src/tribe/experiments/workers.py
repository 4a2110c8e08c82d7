"""Jobs of the workers of `tribe.experiments.parallel`, in processes of this machine or of a cluster of Ray."""

import contextlib
import functools
import hashlib
import importlib
import inspect
import operator
import platform
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tribe import methods, norms
from tribe._version import __version__
from tribe.experiments.execution import ExperimentRunner, RunSettings
from tribe.experiments.experiment import Experiment
from tribe.experiments.provenance import from_file, is_ours
from tribe.experiments.runner import Progress
from tribe.experiments.store import Result
from tribe.experiments.workbench import Workbench
from tribe.io.files import Busy
from tribe.norms.named import find_class
from tribe.registry import Registry

VERSIONS = {"tribe": __version__, "torch": torch.__version__}  # that the numbers depend on
INTERVAL = 0.2  # seconds between two reports of progress
CLEAR_ERRORS = (ValueError, OSError, ImportError, torch.OutOfMemoryError)  # messages without their type
ExperimentProgress = Callable[[Experiment, int, int, float | None], None]  # batches done, in all, error so far


class Reply(NamedTuple):
    """The end of an attempt: a result, or why there is none."""

    result: Result | None = None
    failed: str = ""
    busy: bool = False
    warnings: tuple[str, ...] = ()


def failed(error: Exception, experiment: Experiment) -> Reply:
    """Return the end of an attempt that raised an error; the message names the line of custom code."""
    if isinstance(error, Busy):
        return Reply(busy=True)
    frames = traceback.extract_tb(error.__traceback__)
    files = set[str]()
    with contextlib.suppress(ValueError, OSError):  # the custom code itself may be what is missing here
        files = {str(custom.file) for custom in custom_code(experiment)}
    inside = [frame for frame in frames if str(Path(frame.filename).resolve()) in files]
    last = inside[-1:] or ([] if isinstance(error, CLEAR_ERRORS) else frames[-1:])
    place = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in last)
    return Reply(failed=error_message(error) + place)


def error_message(error: BaseException) -> str:
    """Return an error in one line."""
    message = " ".join(str(error).split())
    return message if isinstance(error, CLEAR_ERRORS) and message else f"{type(error).__name__}: {message}"


class CustomCode(NamedTuple):
    """A custom method, or the custom norm rule of a method, with the content of its file."""

    kind: Literal["method", "norm"]
    name: str  # in the registry
    module: str
    attribute: str
    file: Path
    content: bytes

    def register(self) -> None:
        """Register it in this process: from its package where that is installed, else from its file."""
        registry: Registry[Any] = methods.registry if self.kind == "method" else norms.registry
        with contextlib.suppress(OSError, ValueError):  # its file is gone, or its name is unknown here
            if Path(inspect.getfile(registry.get(self.name))).read_bytes() == self.content:
                return
        find = operator.attrgetter(self.attribute)
        try:
            cls = find(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            path = self.file
            if not path.is_file() or path.read_bytes() != self.content:
                path = Path(_folder().name) / hashlib.sha256(self.content).hexdigest() / path.name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(self.content)
            # The module is named by its path, so that a changed file replaces its older version in the registry.
            cls = find(from_file(path, f"tribe_{self.kind}_{hashlib.sha256(str(self.file).encode()).hexdigest()[:16]}"))
        if self.name not in registry.names():
            registry.register(self.name)(cls)


def custom_code(experiment: Experiment) -> tuple[CustomCode, ...]:
    """Return the custom norm rule and method of an experiment."""
    if experiment.method.code is None:
        return ()
    found = []
    rule = find_class(experiment.method.fields.get("rule"))
    for kind, cls in (("norm", rule), ("method", methods.get(experiment.method.name))):
        if cls is not None and not is_ours(cls):
            file = Path(inspect.getfile(cls)).resolve()
            name, content = str(getattr(cls, "name", "")), file.read_bytes()
            found.append(CustomCode(kind, name, cls.__module__, cls.__qualname__, file, content))  # type: ignore[arg-type]
    return tuple(found)


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder for files that were sent; it is removed with the process."""
    return tempfile.TemporaryDirectory(prefix="tribe-methods-")


class ExperimentJob(NamedTuple):
    """All that a worker needs, in plain data: an experiment, and the files of a custom method or norm rule."""

    experiment: Experiment  # without its components
    settings: RunSettings
    wait: bool
    data: str | None
    weights: tuple[tuple[str, str], ...]
    custom: tuple[CustomCode, ...]
    versions: dict[str, str]  # of the sender
    node: str | None  # of the sender, on Ray


def make_job(
    experiment: Experiment, settings: RunSettings, workbench: Workbench | None, wait: bool, node: str | None = None
) -> ExperimentJob:
    """Return the job of an experiment."""
    data, weights = (None, {}) if workbench is None else (workbench.data, workbench.weights)
    return ExperimentJob(
        experiment=replace(experiment, parts=None),
        settings=settings._replace(root=str(Path(settings.root).absolute())),
        wait=wait,
        data=None if data is None else str(data.expanduser().resolve()),
        weights=tuple((name, str(path.expanduser().resolve())) for name, path in weights.items()),
        custom=custom_code(experiment),
        versions=VERSIONS,
        node=node,
    )


def run_job(job: ExperimentJob, reports: Any) -> Reply:
    """Run a job; the message of an error names the machine."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            reply = Reply(_run_job(job, reports))
        except Exception as error:
            reply = failed(error, job.experiment)
    if reply.failed:
        reply = reply._replace(failed=f"on {platform.node()}: {reply.failed}")
    messages = (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
    return reply._replace(warnings=tuple(dict.fromkeys(messages)))


def _run_job(job: ExperimentJob, reports: Any) -> Result:
    if differ := "; ".join(f"{n} is {VERSIONS[n]}, not {v}" for n, v in job.versions.items() if VERSIONS[n] != v):
        raise ValueError(f"this worker would compute another result: {differ}. Install the same versions everywhere")
    for custom in job.custom:
        custom.register()
    experiment = job.experiment
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)  # building a data set computes, too
    runner = ExperimentRunner(job.settings, _workbench(job.data, experiment.device, job.weights))
    result = runner.run(experiment, _reporter(reports, experiment.id), job.wait)
    is_elsewhere = job.node is not None and job.node != ray_node()  # the sender may not share this folder
    return result if is_elsewhere else replace(result, memory={})


@functools.lru_cache(maxsize=2)
def _workbench(data: str | None, device: str, weights: tuple[tuple[str, str], ...]) -> Workbench:
    """Return the workbench of a worker: it runs many experiments, and reads data and networks once."""
    return Workbench(data, device, dict(weights))


def _reporter(reports: Any, name: str) -> Progress:
    """Return a function that reports the progress of an experiment, at intervals."""
    last = float("-inf")

    def report(done: int, of: int, wrong: float | None) -> None:
        nonlocal last
        if done == of or time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            with contextlib.suppress(Exception):  # a display must not cost a result
                reports.put((name, done, of, wrong))

    return report


def ray_node() -> str:
    """Return the id of this machine in a cluster of Ray."""
    return str(importlib.import_module("ray").get_runtime_context().get_node_id())
