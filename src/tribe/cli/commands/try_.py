"""``tribe try``: play recorded frames through a network and through the model that adapts it. Does adapting help?"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import tribe
from tribe.cli.commands import app
from tribe.cli.custom import method_name
from tribe.cli.networks import DIGITS, load_network, name_of_network
from tribe.cli.options import AsJson, Device, Weights, parse_overrides
from tribe.cli.output import Bars, make_table, messages, print_json, shown
from tribe.core.precision import choose_device
from tribe.fields import printable
from tribe.health.prepared import SUFFIX
from tribe.io.files import check_folder, read_regular
from tribe.trial.frames import Recording
from tribe.trial.labels import LABELS, read_labels, write_labels
from tribe.trial.page import LabelServer, LabelSession
from tribe.trial.recordings import open_recording
from tribe.trial.replay import play, settings_of
from tribe.trial.trial import SUMMARY, Trial
from tribe.trial.verdict import ERROR, MATTERS

FRAMES: Sequence[str] = ("every", "stretch", "skip")  # fields of --set
TRIAL: Sequence[str] = ("batch", "seed", "error", "matters")
USUAL = "bank+time-checked"  # how a network adapts without a prepared file
MOST_NAMES = 2**22  # bytes of a file of class names


@app.command("try")
def try_(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="[NET.TRIBE] FRAMES",
            help="A prepared file, `tribe prepare`, if there is one. Then frames in order: a folder of pictures, a "
            "list of paths (.txt, .csv), an array (.npy, .npz) or a video.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Network: a name (`tribe list models`), timm/NAME or file.py:attribute.",
            show_default="the prepared file's, or the embedded network of digits",
        ),
    ] = None,
    weights: Weights = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="How it adapts: a name, `tribe list methods`, or file.py:Class; +time: a time filter.",
            show_default="bank+time-checked, or what the prepared file says",
        ),
    ] = None,
    health: Annotated[
        Path | None,
        typer.Option(help="A calibration, `tribe source health`.", show_default="none: no accuracy is estimated"),
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Names of the classes, one a line.", show_default="their numbers")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Resize every frame to cover HEIGHTxWIDTH, and cut the middle.", show_default="as they are"),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="CSV of labels: frame or file, class.", show_default="labels.csv in the folder of --out"),
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="Show the frames on a page, and label them there.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the trial; the same one is not played again.", show_default="trials/NAME"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A field of the method (bank.gamma=0.1), of the frames (frames.every=5, frames.stretch=True, "
            "frames.skip=True) or of the trial (trial.batch=32, trial.matters=0.02, trial.error=0.05). Repeatable.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Play the frames again.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Play recorded frames as they are and adapted: where they differ, the cost, the alarms, and whether it helps.

    Labels of a few frames, drawn at random from those that differ, decide: on a page (--page), or in labels.csv.
    """
    with messages():
        *before, recording = places
        if len(before) > 1 or recording.suffix == SUFFIX:
            given = " ".join(map(str, places))
            raise ValueError(f"expected recorded frames, and before them a prepared file if there is one; got {given}")
        prepared = before[0] if before else None
        if prepared is not None and (method is not None or health is not None):
            raise ValueError(f"{prepared} says how the network adapts: leave out --method and --health")
        adapts = method_name(method or USUAL)
        fields = parse_overrides(settings, [*([adapts] if prepared is None else []), "frames", "trial"])
        for part, known in (("frames", FRAMES), ("trial", TRIAL)):
            if unknown := sorted(fields[part].keys() - {*known}):
                raise ValueError(f"--set {part}.{unknown[0]}: expected one of {', '.join(known)}")
        folder = Path("trials", recording.resolve().stem) if out is None else out
        check_folder(folder)
        if prepared is None:
            tried = _from_options(model, weights, adapts, health, fields[adapts], device)
        else:
            tried = _from_file(prepared, model, weights, device)
        opened = open_recording(recording, size=_size(size), shape=tried.shape, **fields["frames"])
        names = list(tried.classes) or None if classes is None else _names(classes)
        trial = _trial(opened, tried.adapter, folder, names, fields["trial"], force)
        trial = trial.labelled(_labels(trial, opened, folder, labels))
        trial.save(folder)
        write_labels(folder / LABELS, trial.labels, trial, opened)
        if page:
            trial = _serve_page(trial, opened, folder)
        trial.save(folder)
        if prepared is not None:
            _write_verdict(prepared, trial)
    if as_json:
        print_json({**trial.json(), "folder": str(folder)})
    else:
        _show(trial, folder, page)


class Tried(NamedTuple):
    """The model that is tried, and its frames."""

    adapter: tribe.Adapter
    shape: tuple[int, ...] | None  # of the images that it takes; None: not known
    classes: tuple[str, ...]  # names; empty if none are known


def _from_file(prepared: Path, model: str | None, weights: Path | None, device: str) -> Tried:
    """Return the adapter of a prepared file, on the network that it names."""
    ready = tribe.Prepared.load(prepared)
    net, _ = load_network(name_of_network(prepared, ready, model), weights)
    return Tried(tribe.adapt(net.to(choose_device(device)), ready), ready.inputs.shape, ready.class_names)


def _from_options(
    model: str | None, weights: Path | None, method: str, health: Path | None, fields: dict[str, Any], device: str
) -> Tried:
    """Return an adapter of a method and a network that options name."""
    net, shape = load_network(model or DIGITS[0], weights)
    watch = True if health is None else health
    return Tried(tribe.adapt(net.to(choose_device(device)), method, health=watch, **fields), shape, ())


def _write_verdict(prepared: Path, trial: Trial) -> None:
    """Write the verdict into the prepared file, in place of an earlier one of the same frames."""
    known, verdict = tribe.Prepared.load(prepared), trial.verdict
    if verdict.answer == "undecided" and not verdict.labels:
        return
    digest, name = trial.recording["digest"], Path(trial.recording["place"]).name
    others = tuple(one for one in known.verdicts if one.get("digest") != digest)
    found = {**verdict.json(), "recording": name, "digest": digest, "words": f"{name}: {verdict.words}"}
    dataclasses.replace(known, verdicts=others).with_verdict(found).save(prepared)


def _trial(
    opened: Recording,
    adapter: tribe.Adapter,
    folder: Path,
    names: list[str] | None,
    fields: dict[str, Any],
    force: bool,
) -> Trial:
    """Return the trial in the folder, if it is of these frames and this model, or play it."""
    known = Trial.load(folder) if (folder / SUMMARY).exists() and not force else None
    spec = opened.spec()
    if known is not None:
        held = dict(known.recording)
        wanted = {**spec, "place": held["place"], "batch": fields.get("batch", 64)}
        same = all(held.get(key) == value for key, value in wanted.items())
        if same and (known.network, known.settings) == (adapter.net.fingerprint(), settings_of(adapter)):
            opened.times = known.columns.times.tolist()
            if names is not None and len(names) != len(known.classes):
                raise ValueError(f"the network has {len(known.classes)} classes; expected as many names: {len(names)}")
            return dataclasses.replace(
                known,
                recording={**held, "place": spec["place"]},
                classes=tuple(names or map(str, range(len(known.classes)))),
                seed=fields.get("seed", 0),
                error=fields.get("error", ERROR),
                matters=fields.get("matters", MATTERS),
            )
        if held["digest"] != spec["digest"] and (folder / LABELS).exists():
            raise ValueError(
                f"{folder} holds a trial of other frames, {held['place']}, and its labels: give another --out, or "
                "remove it"
            )
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} frames")
    with Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("playing", total=opened.length)
        return play(
            opened,
            adapter,
            classes=names,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
            **fields,
        )


def _labels(trial: Trial, opened: Recording, folder: Path, given: Path | None) -> dict[int, int]:
    """Return the labels in the folder and in the file of --labels, which must not contradict each other."""
    own = folder / LABELS
    kept = read_labels(own, trial, opened) if own.exists() else {}
    if given is None or given.resolve() == own.resolve():
        return kept
    more = read_labels(given, trial, opened)
    if wrong := next((frame for frame in more if kept.get(frame, more[frame]) != more[frame]), None):
        raise ValueError(f"{given} and {own} contradict each other: they say different classes of frame {wrong}")
    return {**kept, **more}


def _serve_page(trial: Trial, opened: Recording, folder: Path) -> Trial:
    """Show the page until Ctrl-C; return the trial with all labels."""
    session = LabelSession(trial, opened, folder / LABELS)
    server = LabelServer(session)
    Console(stderr=True).print(f"open {server.url} - Ctrl-C ends it", soft_wrap=True, highlight=False, markup=False)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return session.trial


def _show(trial: Trial, folder: Path, page: bool) -> None:
    console, rows = Console(), []
    for i, name in enumerate(("source", "adapted")):
        one = trial.estimate(name)
        text = "not known" if one is None else f"{_percent(one.accuracy)} ({_percent(one.low)} to {_percent(one.high)})"
        rows.append((name, text, f"{1e3 * trial.seconds[i]:.2f}", f"{1 if i == 0 else trial.ratio:.1f}"))
    console.print(make_table([""], ["estimated accuracy, %", "ms / frame", "x source"], rows))
    kinds = Counter(event.kind for event in trial.events)
    alarms = ", ".join(f"{kind} {count}" for kind, count in kinds.items()) or "none"
    share = _percent(len(trial.differing) / trial.frames)
    lines = [f"they differ on {len(trial.differing):,} of {trial.frames:,} frames ({share} %); alarms: {alarms}"]
    lines += trial.remarks
    for line in lines:
        console.print(shown(line), soft_wrap=True)
    style = {"helps": "bold green", "harms": "bold red"}.get(trial.verdict.answer, "bold")
    console.print(trial.verdict.words, style=style, soft_wrap=True, highlight=False, markup=False)
    if trial.verdict.answer == "undecided":
        last = "" if page else "the same command with --page, or "
        console.print(printable(f"label frames: {last}the lines without a label in {folder / LABELS}, in their order"))
    elif waiting := len(set(trial.draw.tolist()) & trial.labels.keys()) - trial.counted:
        console.print(f"{waiting} labels do not count yet: of frames that the draw has not reached")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _size(text: str | None) -> tuple[int, int] | None:
    """Return height and width of --size: "224" or "240x320"."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and 0 < int(part) < 2**15 for part in parts):
        raise ValueError(f"--size is HEIGHTxWIDTH in pixels, such as 240x320, or one number for a square; got {text!r}")
    return int(parts[0]), int(parts[-1])


def _names(path: Path) -> list[str]:
    names = [line.strip() for line in read_regular(path, MOST_NAMES).decode("utf-8-sig").splitlines() if line.strip()]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path} names the class {printable(twice)} twice; expected a different name for each class")
    return names
