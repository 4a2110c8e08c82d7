"""Study how well accuracy is estimated without labels: TRIBE and four other methods on five kinds of stream.

``python -m studies.health.run --data data --model resnet20 --weights FILE ``

The images are put into one file (``--pack``) unless it is there, so that a machine without data sets can play them.
Methods play streams and what calibrates; what they say is kept in a file in ``--records``, after every stream, and a
study that is stopped goes on there. ``--play-only`` ends here. Then each method is calibrated, and every window of 500
images gives the true accuracy and the estimates; results go to a JSON file in ``--out``. That part needs the file of
records only: ``--score FILE``. ``--render`` writes the tables of README.md.

For a GPU on a machine without data sets: two packs of 50 MB, made from the clean test sets in half a minute each, then
a few minutes for each network there, and the rest anywhere. Seeds 1 to 4 are for choosing, 5 to 8 for the tables.

    P=runs/health; S="--per 120 --live --data DATA"
    python -m studies.health.run $S --dataset cifar10-c --pack $P/pack_cifar10-c.safetensors --pack-only
    python -m studies.health.run $S --dataset cifar100-c --pack $P/pack_cifar100-c.safetensors --pack-only

    G="--device cuda --precision bf16 --records $OUT --play-only --seeds 1 2 3 4 5 6 7 8"  # on the GPU
    python -m studies.health.run $G --pack $P/pack_cifar10-c.safetensors --model wrn28_10 --weights FILE
    python -m studies.health.run $G --pack $P/pack_cifar100-c.safetensors --model resnext29 --weights FILE

    python -m studies.health.compare $OUT/records_*.safetensors  # variants of the estimate, on seeds 1 to 4
    python -m studies.health.run --score $OUT/records_*.safetensors  # the tables, on seeds 5 to 8
    python -m studies.health.run --render
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from studies import pages
from studies.health import pack as packs
from studies.health import play as records
from studies.health import score, tables
from studies.health.pack import Pack
from studies.health.play import REHEARSAL, Played
from studies.health.tables import METHODS, STREAMS
from studies.play import Clock, add_options
from tribe import methods, models
from tribe.core.backbone import Backbone
from tribe.core.precision import choose_device, float32_precision, precision_on
from tribe.experiments.provenance import machine
from tribe.experiments.spec import ComponentSpec
from tribe.experiments.workbench import Workbench, in_precision, trained_on
from tribe.health.calibration import fit_temperature
from tribe.health.playing import side_by_side
from tribe.health.probe import source_logits

FOLDER = Path(__file__).parent
SEEDS = 5, 6, 7, 8  # not those that anything was chosen with: 1 to 4


def open_pack(o: argparse.Namespace) -> Pack:
    """Read the pack; make it first if it is not there."""
    path = o.pack or o.records / f"pack_{o.dataset}.safetensors"
    if not path.exists():
        data = Workbench(o.data, "cpu").dataset(ComponentSpec(f"live-{o.dataset}" if o.live else o.dataset))
        name = trained_on(data)
        clean = Workbench(o.clean or o.data, "cpu").dataset(ComponentSpec(name, {"split": "test"}))
        path.parent.mkdir(parents=True, exist_ok=True)
        packs.save(path, packs.make(data, clean, o.dataset, name, o.per))
    return packs.load(path)


def play(pack: Pack, o: argparse.Namespace) -> Path:
    """Play what has not been played; the file of records."""
    clock, device = Clock(), choose_device(o.device)
    precision = precision_on(device, o.precision)
    weights = o.weights or models.find(o.model, pack.trained_on, o.data)
    net = Backbone(models.load(o.model, weights).to(device))
    net, _ = in_precision(net, methods.create("source"), precision)
    images, labels = (t[: o.limit] for t in pack.clean)
    logits = source_logits(net, images.float().div(255))
    temperature = fit_temperature(logits, labels)
    header: dict[str, Any] = {"dataset": pack.dataset, "model": o.model, "domains": list(pack.shown.domains)}
    header["conditions"] = [[name, str(severity)] for name, severity in pack.conditions]
    header |= {
        "machine": machine(device),
        "settings": {"precision": precision, "per": pack.per, "held_out": len(pack.clean[1])},
    }
    o.records.mkdir(parents=True, exist_ok=True)
    path: Path = o.records / f"records_{pack.dataset}_{o.model}.safetensors"
    played = records.load(path).played if path.exists() else {}
    clock.say(f"{o.model} on {device}: {100 * (logits.argmax(1) == labels).float().mean():.1f} % right, clean")
    for stream, keys in plays(pack, o):
        missing = [m for m in o.methods if any(f"{m}/{name}/{seed}" not in played for name, seed in keys)]
        if not missing:
            continue
        if stream == REHEARSAL:
            orders = [name.removeprefix(f"{REHEARSAL}-") for name, _ in keys]
            batches = records.rehearsal_batches(pack, orders, device, o.limit)
        else:
            batches = records.stream_batches(pack, stream, o.seeds, device, o.limit)
        source = records.watch_source(net, batches, temperature)
        for name in missing:
            method = methods.create(name, **{**methods.get(name).presets.get(pack.trained_on, {})})
            columns = records.watch_method(net, method, batches, source, temperature, keys[0][1])
            for (of, seed), found in zip(keys, columns, strict=True):
                played[f"{name}/{of}/{seed}"] = Played(name, of, seed, found)
            right = torch.cat([c["prediction"] == c["label"] for c in columns]).float()
            clock.say(f"{stream}, {name}: {len(right)} images, {100 * right.mean():.1f} % right")
        records.save(path, header, (logits, labels), played)
    return path


def plays(pack: Pack, o: argparse.Namespace) -> list[tuple[str, list[tuple[str, int]]]]:
    """What plays side by side: streams of calibration of equal length, then all seeds of a kind of stream."""
    groups = side_by_side(pack.plans)
    found = [(REHEARSAL, [(f"{REHEARSAL}-{plan.order}", 0) for plan in group]) for group in groups]
    return [*found, *((stream, [(stream, seed) for seed in o.seeds]) for stream in o.streams)]


# -- command line ------------------------------------------------------------------------------------------------------


def words(text: str) -> tuple[str, ...]:
    """Split at commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    style = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m studies.health.run", description=__doc__, formatter_class=style)
    add_options(p)
    p.set_defaults(out=FOLDER / "results")
    p.add_argument("--clean", type=Path, help="root of the clean data set (default: --data)")
    p.add_argument("--methods", type=words, default=METHODS, help="with commas (default: %(default)s)")
    p.add_argument("--streams", type=words, default=STREAMS, help="with commas (default: %(default)s)")
    p.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the streams (default: %(default)s)")
    p.add_argument("--per", type=int, default=1000, help="images of each domain (default: %(default)s)")
    p.add_argument("--pack", type=Path, help="file with all images; made if there is none (default: in --records)")
    p.add_argument("--live", action="store_true", help="corrupt clean images for the pack: the files of --dataset")
    p.add_argument("--pack-only", action="store_true", help="play nothing")
    p.add_argument("--records", type=Path, default=Path("runs/health"), help="folder for what methods say")
    p.add_argument("--play-only", action="store_true", help="score nothing")
    p.add_argument("--score", type=Path, nargs="+", help="files of records to score together; play nothing")
    p.add_argument("--render", action="store_true", help="write the tables of README.md, and play nothing")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    o = options(argv)
    if o.render:
        pages.render(FOLDER, tables.BLOCKS)
        return
    if o.pack_only:
        pack = open_pack(o)
        print(f"{pack.dataset}: {len(pack.shown.domains)} domains, {len(pack.plans)} streams that calibrate")
        return
    files = o.score
    if not files:
        with float32_precision(o.precision):
            files = [play(open_pack(o), o)]
        print(f"records: {files[0]}, {files[0].stat().st_size / 2**20:.1f} MiB")
    for found in [] if o.play_only else score.gather(files):
        print(f"written to {score.score(found, o.out, o.seeds)}")


if __name__ == "__main__":
    main()
