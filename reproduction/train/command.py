"""``tribe train``: train a source network from the published images."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from reproduction.train import DEFAULT, AugMix, Progress, Trained, TrainingError, change, preset
from reproduction.train import train as train_network
from reproduction.train.loop import SAVE_EVERY, OnProgress
from reproduction.train.setup import open_files
from tribe.cli.options import AsJson, DataRoot, Device
from tribe.cli.output import fail, print_json, print_message
from tribe.data.datasets.locations import data_root

PRESET = "the preset's"  # the default of what a preset sets


def train(
    dataset: Annotated[str, typer.Argument(help="Data set: mnist, cifar10 or cifar100.")],
    model: Annotated[str | None, typer.Option(help="Network, see `tribe list models`.", show_default=PRESET)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Weights, a .safetensors file.", show_default="DATA/weights/MODEL_DATASET.safetensors"),
    ] = None,
    name: Annotated[
        str, typer.Option("--preset", help="Recipe: fast, or mnist's paper, cifar10's full, cifar100's augmix.")
    ] = DEFAULT,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images.", show_default=PRESET)] = None,
    batch: Annotated[int | None, typer.Option(help="Images a step.", show_default=PRESET)] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.", show_default=PRESET)] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.", show_default=PRESET)] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.", show_default=PRESET)] = None,
    cutout: Annotated[int | None, typer.Option(help="Side of a square that is set to 0, in pixels.")] = None,
    augmix: Annotated[bool, typer.Option("--augmix", help="AugMix and its consistency loss.")] = False,
    seed: Annotated[int, typer.Option(help="Of initial weights, order and augmentation.")] = 0,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32, tf32, bf16 or fp16.")] = "auto",
    channels_last: Annotated[
        bool | None, typer.Option("--channels-last/--no-channels-last", help="Memory layout.", show_default="on GPUs")
    ] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint beside the output, if there is one.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing weights, or start over.")] = False,
    save_every: Annotated[
        float, typer.Option(help="Seconds between checkpoints at least, written at the end of an epoch.")
    ] = SAVE_EVERY,
    data: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Train a source network; write its weights and a card. With --resume, continue an interrupted training."""
    try:
        chosen = preset(dataset, name)
        changes = {"epochs": epochs, "batch": batch, "lr": lr, "optimizer": optimizer, "weight_decay": weight_decay}
        mixing = (chosen.recipe.augmix or AugMix()) if augmix else None
        recipe = change(chosen.recipe, **changes, cutout=cutout, augmix=mixing)
        model = model or chosen.model
        target = out or _default_out(model, dataset, data)
        if resume and not open_files(target, resume=resume, force=force).checkpoint.exists():
            print_message(
                "warning", f"there is no checkpoint of {target} to continue: training starts from the beginning"
            )
        with _show_progress(f"{model} on {dataset}", recipe.epochs) as progress:
            trained = train_network(
                model,
                dataset,
                recipe,
                data=None if data is None else str(data),
                out=target,
                resume=resume,
                force=force,
                seed=seed,
                device=device,
                precision=precision,
                channels_last=channels_last,
                compile=compile_,
                save_every=save_every,
                progress=progress,
            )
    except (ValueError, TypeError, OSError, ImportError, TrainingError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; --resume continues from the last checkpoint")
        raise typer.Exit(130) from None
    if as_json:
        print_json(trained.card)
    else:
        Console().print(_summary(trained), soft_wrap=True, highlight=False)


def _default_out(model: str, dataset: str, data: Path | None) -> Path:
    """DATA/weights/MODEL_DATASET.safetensors; the data set is not repeated if the model's name ends with it."""
    root = data_root(None if data is None else str(data))
    folder = root / "weights"
    if root.is_dir():  # otherwise the data is missing too, and opening it gives the better message
        folder.mkdir(exist_ok=True)
    stem = model.replace("/", "_")
    return folder / f"{stem if stem.endswith(f'_{dataset}') else f'{stem}_{dataset}'}.safetensors"


def _summary(trained: Trained) -> str:
    card = trained.card
    return (
        f"{card['model']} on {card['dataset']}: {100 * trained.accuracy:.2f} % of {card['images']['test']:,} test "
        f"images correct after {len(card['history'])} epochs, {card['seconds']:.0f} s\n{trained.path}"
    )


@contextlib.contextmanager
def _show_progress(title: str, epochs: int) -> Iterator[OnProgress]:
    """Show a bar on a terminal, or else print a line an epoch; both on stderr."""
    if not sys.stderr.isatty():
        yield _print_epoch
        return
    with Bar(BarColumn(12), TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{title}: reading images", total=epochs)
        yield lambda p: bar.update(task, completed=p.epoch - 1 + p.step / p.steps, description=_describe(p))


def _print_epoch(p: Progress) -> None:
    if p.done:
        print(f"epoch {_describe(p)}", file=sys.stderr, flush=True)


def _describe(p: Progress) -> str:
    """The progress in less than 70 characters, which fits beside the bar."""
    test = "" if p.test is None else f" test {100 * p.test:.2f}%"
    minutes, seconds = divmod(round(p.left), 60)
    left = f"{minutes}:{seconds:02} left"
    return f"{p.epoch}/{p.epochs} loss {p.loss:.4f} train {100 * p.train:.2f}%{test} {p.speed:,.0f} images/s {left}"
