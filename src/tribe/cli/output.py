"""Print results, tables and JSON on stdout; errors, warnings and progress on stderr."""

import contextlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from tribe.experiments.bench.measurement import BenchProgress
from tribe.experiments.experiment import Experiment
from tribe.experiments.parallel import ExperimentProgress, Failure
from tribe.experiments.spec import plain
from tribe.experiments.statistics import spread
from tribe.experiments.store import Result
from tribe.fields import printable
from tribe.io.files import write_atomically


def fail(message: str) -> NoReturn:
    """Print an error message and exit with status 2."""
    print_message("error", message)
    raise typer.Exit(2)


def print_message(kind: Literal["error", "warning"], message: str, console: Console | None = None) -> None:
    """Print a message on stderr as one paragraph: messages of other libraries contain line breaks and indents."""
    colour = {"error": "bold red", "warning": "bold yellow"}[kind]
    text = Text.assemble((f"{kind}: ", colour), printable(" ".join(message.split())))
    (console or Console(stderr=True)).print(text, soft_wrap=True)


def note(message: str) -> None:
    """Print a remark on stderr."""
    Console(stderr=True).print(printable(message), style="yellow", soft_wrap=True, markup=False, highlight=False)


@contextlib.contextmanager
def messages(console: Console | None = None, redirect: bool = True) -> Iterator[None]:
    """Run the work of a command: an error that explains itself becomes a message and exits with status 2.

    A warning is printed as a message, and once. What other code prints goes to stderr, because programs read results
    on stdout: print those after this block, or without ``redirect``.
    """
    printed: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in printed:
            printed.add(str(message))
            print_message("warning", str(message), console)

    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr if redirect else sys.stdout):
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        try:
            yield
        except BrokenPipeError:  # of stdout; see tribe.cli.main
            raise
        except (ValueError, TypeError, OSError, ImportError) as error:
            fail(str(error))


@contextlib.contextmanager
def message_on_interrupt(runs: Path) -> Iterator[None]:
    """Turn Ctrl-C into a message that the work can be resumed, and exit with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"stopped; finished work is in {runs}, and the same command resumes from there")
        raise typer.Exit(130) from None


WIDE = 240  # columns of a table that does not go to a terminal
ERRORS = ("instance_error", "category_error")
HEADER = ("instance error, %", "category error, %", "ms / image")


def shown(name: str) -> Text:
    """Return a name for a table or a line: neither markup nor control characters in it take effect."""
    return Text(printable(name))


def make_table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table with columns of text and columns of numbers; no cell is read as markup."""
    right = (Column(shown(name), justify="right") for name in numbers)
    table = Table(*(Column(shown(name)) for name in texts), *right)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else shown(cell) for cell in row))
    return table


def result_cells(result: Result) -> list[Text]:
    """Return the cells of `HEADER` for a result."""
    time = 1e3 * fmean(result.values("seconds_per_image"))
    return [*(Text(percent(result.values(key))) for key in ERRORS), Text(f"{time:.2f}")]


def percent(shares: Sequence[float]) -> str:
    """Return the errors of some seeds as the text of a cell.

    >>> percent([0.25]), percent([0.1, 0.3]), percent([float("nan")])
    ('25.00', '20.00 ± 14.14', 'no labels')
    """
    return "no labels" if any(map(math.isnan, shares)) else str(spread([100 * share for share in shares]))


def wide_console() -> Console:
    """Return a console for tables: as wide as the terminal, or wide where stdout is not one."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def print_json(data: Any) -> None:
    """Print JSON on stdout."""
    typer.echo(json.dumps(plain(data), indent=2, allow_nan=False))


def write_json(data: Mapping[str, Any], file: str | None, *more: Path) -> None:
    """Write a summary to ``--json FILE``, where - is stdout, and to more files."""
    content = json.dumps(plain(data), indent=1).encode()
    for path in (*more, *([] if file is None or file == "-" else [Path(file)])):
        write_atomically(path, content)
    if file == "-":
        print_json(data)


class Bars(Progress):
    """Bars of long work on stderr; where that is no terminal, a line at each tenth that is done, or once a minute.

    Of a task with the field ``quiet`` there is a line once a minute only.
    """

    def __init__(self, *columns: str | ProgressColumn, console: Console | None = None, **options: Any) -> None:
        super().__init__(*columns, console=console or Console(stderr=True), **options)
        self._tenths: dict[TaskID, int] = {}  # that were said
        self._said = self.get_time()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, and say how far it is."""
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Count what is done of a task, and say how far it is."""
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        if self.console.is_terminal:
            return
        with self._lock:
            task = next(task for task in self.tasks if task.id == task_id)
            tenth = min(int(10 * task.completed / task.total), 9) if task.total else 0  # at the end the bar is printed
            further = tenth > self._tenths.get(task_id, 0) and not task.fields.get("quiet")
            if not further and self.get_time() - self._said < SILENCE:
                return
            self._tenths[task_id], self._said = tenth, self.get_time()
            share = f"{task.percentage:.0f} %, " if task.total else ""
            left = f", {_clock(task.time_remaining)} left" if task.time_remaining is not None else ""
            line = f"{task.description}: {share}{_clock(task.elapsed or 0)} so far{left}"
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


SILENCE = 60  # seconds without a line, at most, while work goes on and no terminal shows a bar
MOST_BARS = 20  # with more experiments, the bar of a finished one is removed


class Followers(NamedTuple):
    """The callbacks of `tribe.experiments.parallel.run_all`."""

    progress: ExperimentProgress
    done: Callable[[Experiment, Result | Failure], None]
    played: set[Experiment]  # those that were played, not read from the store
    results: dict[Experiment, Result]  # of those that are finished


@contextlib.contextmanager
def experiment_bars(title: str, count: int, name_of: Callable[[Experiment], str]) -> Iterator[Followers]:
    """Show a bar for all of ``count`` experiments and one for each that is running; warnings appear between them."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with messages(console), Bars(*columns, console=console) as progress:
        total = progress.add_task(f"{title}: 0 of {count} runs", total=count)
        bars: dict[Experiment, TaskID] = {}
        played, results = set[Experiment](), dict[Experiment, Result]()
        finished = set[Experiment]()
        shares: dict[Experiment, float] = {}  # that are done

        def follow(experiment: Experiment, done: int, of: int, wrong: float | None) -> None:
            error = "" if wrong is None else f": error {100 * wrong:.1f} %"
            name = printable(name_of(experiment))
            if experiment not in bars:
                bars[experiment] = progress.add_task(name, quiet=True)
                played.add(experiment)
            progress.update(bars[experiment], completed=done, total=of, description=name + error)
            shares[experiment] = done / max(of, 1)
            progress.update(total, completed=sum(shares.values()))

        def done(experiment: Experiment, outcome: Result | Failure) -> None:
            if isinstance(outcome, Failure):
                print_message("error", f"{name_of(experiment)}: {outcome.reason}", console)
            else:
                results[experiment] = outcome
            if count > MOST_BARS and experiment in bars:
                progress.remove_task(bars.pop(experiment))
            finished.add(experiment)
            shares[experiment] = 1
            words = f"{title}: {len(finished)} of {count} runs"
            progress.update(total, completed=sum(shares.values()), description=words)

        yield Followers(follow, done, played, results)


@contextlib.contextmanager
def timing_bar() -> Iterator[BenchProgress]:
    """Show a bar that is drawn between timings only: a thread that draws would disturb them."""
    name = TextColumn("{task.description:14}", markup=False)
    columns = (name, BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("building", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=printable(name), refresh=True)

        yield show
