"""A job: an experiment as a worker process gets it, in plain data, and what the worker does with it."""

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
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from tribe import methods, norms
from tribe._version import __version__
from tribe.experiments.execution import run_experiment
from tribe.experiments.experiment import Experiment
from tribe.experiments.modules import from_file
from tribe.experiments.provenance import code_of
from tribe.experiments.runner import Progress
from tribe.experiments.shared import SharedPlays
from tribe.experiments.store import ENVIRONMENT, METRICS, SPEC, Result, find, record_name
from tribe.experiments.workbench import Workbench
from tribe.io.files import Busy, write_atomically
from tribe.norms.named import find_class
from tribe.registry import Registry

INTERVAL = 0.2  # seconds between two reports of progress
CLEAR_ERRORS = (ValueError, TypeError, OSError, ImportError)  # their messages say all; others need their type, too

Outcome = Result | Busy | str  # of one attempt; a string says what went wrong


def attempt(
    experiment: Experiment,
    root: Path,
    workbench: Workbench,
    progress: Progress | None,
    every: int,
    wait: bool,
    plays: SharedPlays | None = None,
) -> Outcome:
    """Run an experiment; an error is returned as a message."""
    try:
        return run_experiment(
            experiment, root, workbench=workbench, progress=progress, every=every, wait=wait, plays=plays
        )
    except Busy as busy:
        return busy
    except Exception as error:  # a custom method may raise anything; the others go on
        return error_message(error) + _line_of(error, experiment)


def error_message(error: BaseException) -> str:
    """An error in one line."""
    message = " ".join(str(error).split())
    return message if isinstance(error, CLEAR_ERRORS) and message else f"{type(error).__name__}: {message}"


def _line_of(error: Exception, experiment: Experiment) -> str:
    """The last line of a custom method, or of its custom norm rule, that an error passed through."""
    if experiment.method.code is None:
        return ""
    classes = methods.get(experiment.method.name), find_class(experiment.method.fields.get("rule"))
    files = {inspect.getfile(cls) for cls in classes if cls is not None}
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f" ({found[-1].filename}, line {found[-1].lineno})" if found else ""


# -- what is sent -----------------------------------------------------------------------------------------------------


class CustomMethod(NamedTuple):
    """A custom method, or the custom norm rule of a method, with the content of its file."""

    name: str
    module: str
    attribute: str
    file: str
    content: bytes
    kind: Literal["method", "norm"] = "method"

    @staticmethod
    def of(experiment: Experiment) -> "CustomMethod | None":
        """The method of an experiment; None: it is part of tribe."""
        if experiment.method.code is None:
            return None
        return CustomMethod._of_class(methods.get(experiment.method.name), "method")

    @staticmethod
    def norm_of(experiment: Experiment) -> "CustomMethod | None":
        """The norm rule of an experiment; None: it is part of tribe, or its method has no such field."""
        rule = None if experiment.method.code is None else find_class(experiment.method.fields.get("rule"))
        return None if rule is None else CustomMethod._of_class(rule, "norm")

    @staticmethod
    def _of_class(cls: type[Any], kind: Literal["method", "norm"]) -> "CustomMethod | None":
        if code_of(cls) is None:
            return None
        file = Path(inspect.getfile(cls)).resolve()
        return CustomMethod(cls.name, cls.__module__, cls.__qualname__, str(file), file.read_bytes(), kind)

    def register(self) -> None:
        """Register it in this process: from its package where that is installed, else from its file."""
        registry: Registry[Any] = methods.registry if self.kind == "method" else norms.registry
        if self.name in registry.names() and _bytes_of(registry.get(self.name)) == self.content:
            return
        find = operator.attrgetter(self.attribute)
        try:
            found = find(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            found = find(self._imported())
        if self.name not in registry.names():
            registry.register(self.name)(found)

    def _imported(self) -> ModuleType:
        path = Path(self.file)
        if not path.is_file() or path.read_bytes() != self.content:
            path = Path(_folder().name) / hashlib.sha256(self.content).hexdigest() / path.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self.content)
        # The module is named by its path, so that a changed file replaces its older version in the registry.
        return from_file(path, f"tribe_method_{hashlib.sha256(self.file.encode()).hexdigest()[:16]}")


def _bytes_of(cls: type) -> bytes | None:
    try:
        return Path(inspect.getfile(cls)).read_bytes()
    except OSError:
        return None


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder for files that were sent; removed with the process."""
    return tempfile.TemporaryDirectory(prefix="tribe-methods-")


class Job(NamedTuple):
    """All that a worker needs, in plain data."""

    spec: dict[str, Any]
    root: str
    data: str | None
    weights: tuple[tuple[str, str], ...]
    method: CustomMethod | None
    versions: dict[str, str]  # of the sender
    node: str  # of the sender
    every: int
    wait: bool
    norm: CustomMethod | None = None  # the rule of the method, if it is custom


class Reply(NamedTuple):
    """The answer of a worker, in plain data: an error of a custom class cannot be read where the class is unknown."""

    failed: str | None = None
    busy: bool = False
    warnings: tuple[str, ...] = ()
    files: Mapping[str, bytes] = {}  # of `result_files`, if the worker is on another machine


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    return {"tribe": __version__, "torch": torch.__version__}


# -- in a worker ------------------------------------------------------------------------------------------------------


def run_job(job: Job, board: Any) -> Reply:
    """Run a job. The message of an error names the machine."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            reply = _run_job(job, board)
        except Exception as error:
            reply = Reply(error_message(error))
    if reply.failed is not None:
        reply = reply._replace(failed=f"on {platform.node()}: {reply.failed}")
    messages = (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
    return reply._replace(warnings=tuple(dict.fromkeys(messages)))


def _run_job(job: Job, board: Any) -> Reply:
    own = versions()
    if own != job.versions:
        differ = "; ".join(f"{n} is {own[n]}, not {v}" for n, v in job.versions.items() if own[n] != v)
        return Reply(f"this worker would compute something else: {differ}. Install the same versions everywhere")
    for custom in (job.norm, job.method):
        if custom is not None:
            custom.register()
    experiment = Experiment.from_json(job.spec)
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)  # building a data set computes, too
    progress = ProgressSender(board, experiment.id)
    workbench = _workbench(job.data, experiment.device, job.weights)
    outcome = attempt(experiment, Path(job.root), workbench, progress, job.every, job.wait)
    progress.finish()
    if isinstance(outcome, Busy):
        return Reply(busy=True)
    if isinstance(outcome, str):
        return Reply(outcome)
    away = ray_library().get_runtime_context().get_node_id() != job.node
    return Reply(files=result_files(outcome) if away else {})


@functools.lru_cache(maxsize=2)
def _workbench(data: str | None, device: str, weights: tuple[tuple[str, str], ...]) -> Workbench:
    """A worker runs many experiments: it reads data and networks once."""
    return Workbench(data, device, dict(weights))


def result_files(result: Result) -> dict[str, bytes]:
    """The files of a result, or of its parts, by ``<id>/<name>`` in the order in which to write them.

    metrics.json comes last, as it marks a complete result.
    """
    paths = []
    for part in result.parts or (result,):
        records = (record_name(seed) for seed in part.experiment.seeds)
        paths += [part.folder / name for name in (SPEC, ENVIRONMENT, *records, METRICS)]
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths if path.exists()}


class ProgressSender:
    """Sends the progress of an experiment to the board: at intervals, and at the end."""

    def __init__(self, board: Any, experiment: str) -> None:
        self._board, self._experiment = board, experiment
        self._sent, self._last = float("-inf"), None

    def __call__(self, done: int, of: int, wrong: float | None) -> None:
        """Send the progress if the last update was long ago, or if this is the last batch."""
        if done == of or time.monotonic() - self._sent >= INTERVAL:
            self._sent = time.monotonic()
            self._last = self._board.update.remote(self._experiment, done, of, wrong)

    def finish(self) -> None:
        """Wait until the last update has arrived, so that none comes after the task has ended."""
        with contextlib.suppress(Exception):  # a display must not cost a result
            if self._last is not None:
                ray_library().get(self._last, timeout=10)


class ProgressBoard:
    """The latest progress of every worker, for one display; an actor of Ray."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, int, float | None]] = {}

    def update(self, experiment: str, done: int, of: int, wrong: float | None) -> None:
        """Set the progress of an experiment."""
        self._latest[experiment] = done, of, wrong

    def take(self) -> dict[str, tuple[int, int, float | None]]:
        """Return what changed since the last call."""
        latest, self._latest = self._latest, {}
        return latest


def store_files(experiment: Experiment, root: Path, files: Mapping[str, bytes]) -> Outcome:
    """Write a result that came from another machine, and load it."""
    found = find(experiment, root, verified=True, current=True)
    if found is None and files:
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(root / name, content)
        found = find(experiment, root, verified=True)
    return found or f"a worker finished it, but its results are not in {root / experiment.id}"


def ray_library() -> Any:
    """Ray, or an error that says how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        message = "running on several workers needs Ray, which is not installed: pip install 'tribe-tta[ray]'"
        raise ModuleNotFoundError(message) from error
