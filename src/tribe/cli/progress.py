"""Progress bars of many experiments: one for all of them, and one for each that is running."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tribe.cli.output import print_message, stdout_to_stderr
from tribe.experiments.experiment import Experiment
from tribe.experiments.parallel import Failure
from tribe.experiments.store import Result
from tribe.experiments.workers import ExperimentProgress
from tribe.fields import printable

MOST_BARS = 20  # with more experiments, the bar of a finished one is removed


class Followers(NamedTuple):
    """The callbacks of `tribe.experiments.parallel.run_all`."""

    progress: ExperimentProgress
    done: Callable[[Experiment, Result | Failure], None]
    played: set[Experiment]  # those that were played, not read from the store


@contextlib.contextmanager
def experiment_bars(title: str, count: int, name_of: Callable[[Experiment], str]) -> Iterator[Followers]:
    """Show bars on stderr; warnings appear between them, and what other code prints goes to stderr.

    Args:
        title: Of the bar for all experiments.
        count: How many there are.
        name_of: What to call one of them.
    """
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with print_warnings() as console, stdout_to_stderr(), Progress(*columns, console=console) as progress:
        total = progress.add_task(f"{title}: 0 of {count} runs", total=count)
        bars: dict[Experiment, TaskID] = {}
        played: set[Experiment] = set()

        def follow(experiment: Experiment, done: int, of: int, wrong: float | None) -> None:
            error = "" if wrong is None else f": error {100 * wrong:.1f} %"
            name = printable(name_of(experiment))
            if experiment not in bars:
                bars[experiment] = progress.add_task(name)
                played.add(experiment)
            progress.update(bars[experiment], completed=done, total=of, description=name + error)

        def done(experiment: Experiment, outcome: Result | Failure) -> None:
            if isinstance(outcome, Failure):
                print_message("error", f"{name_of(experiment)}: {outcome.reason}", progress.console)
            if count > MOST_BARS and experiment in bars:
                progress.remove_task(bars.pop(experiment))
            progress.advance(total)
            finished = int(progress.tasks[0].completed)
            progress.update(total, description=f"{title}: {finished} of {count} runs")

        yield Followers(follow, done, played)


@contextlib.contextmanager
def print_warnings() -> Iterator[Console]:
    """Print each warning in a line, and once, such as the name of a damaged file."""
    console, printed = Console(stderr=True), set[str]()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in printed:
            printed.add(str(message))
            console.print(printable(f"warning: {message}"), style="yellow", markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield console


@contextlib.contextmanager
def message_on_interrupt(runs: Path) -> Iterator[None]:
    """Turn Ctrl-C into a message that the work can be resumed, and exit with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        message = f"stopped; finished work is in {runs}, and the same command resumes from there"
        Console(stderr=True).print(message, soft_wrap=True, markup=False, highlight=False)
        raise typer.Exit(130) from None
