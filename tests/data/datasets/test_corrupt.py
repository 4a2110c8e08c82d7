"""Corrupted data sets that are written, killed, gone on with and read back; the clean sets are small but official."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import pty
import shutil
import signal

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from PIL import Image

import layouts
import tribe
from commands import refused, tribe_command
from layouts import WNIDS
from processes import Prints, Process, Touches, ended, interrupted
from tribe import corruptions, datasets
from tribe.data.datasets.files import MissingData
from tribe.data.datasets.generation import generate
from tribe.data.images import read_image
from tribe.data.scenarios import CIFAR_C, MNIST_C
from tribe.io.files import exclusive

N = layouts.PER
BLOCK = N * 32 * 32 * 3


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The clean sets in their official binary formats."""
    root, draw = tmp_path_factory.mktemp("clean"), np.random.default_rng(0)
    layouts.write_cifar_binary(root, draw)
    layouts.write_mnist(root / "mnist", draw)
    return root


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A small validation set: JPEGs of several sizes, one grey, in a folder a class."""
    root, draw = tmp_path_factory.mktemp("val"), np.random.default_rng(1)
    for name, sizes in ((WNIDS[1], [(300, 260), (230, 400)]), (WNIDS[0], [(260, 280)])):
        (root / name).mkdir()
        for i, (width, height) in enumerate(sizes):
            coarse = Image.fromarray(draw.integers(256, size=(8, 8, 3), dtype=np.uint8)).resize((width, height))
            (coarse.convert("L") if i else coarse).save(root / name / f"val_{i}.JPEG", "JPEG")
    return root


def call(*args):
    return tribe_command("corrupt", *args)


def stopped_at(event, *args, **fields):
    """Press Ctrl-C when the first images are made ("advance"), or the first domain ("finish")."""

    def stop(domain, images, of):
        if (images > 0) == (event == "advance"):
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        generate(*args, progress=stop, **fields)


def tree(folder):
    """Every visible file below a folder, by content; nothing hidden but the lock may be left."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files if path.name.startswith(".")} <= {".lock"}
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != ".lock"}


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "CIFAR-10-C"), ("cifar100", "CIFAR-100-C")])
def test_cifar_is_written_as_published_and_read_back(clean, tmp_path, name, folder):
    chosen = ("--severity", "1-5", "--corruptions", "fog,jpeg_compression")
    assert call(name, "--data", clean, "--out", tmp_path, *chosen).exit_code == 0
    source = datasets.create(name, data=str(clean))
    images = source.images("clean", torch.arange(N))
    labels = np.load(tmp_path / folder / "labels.npy")
    assert (labels.dtype, labels.shape) == (np.uint8, (5 * N,))
    assert np.array_equal(labels, np.tile(source.labels(), 5))
    data = datasets.create(f"{name}-c", data=str(tmp_path), corruptions=("fog",), severities=(1, 2, 3, 4, 5))
    for corruption in ("fog", "jpeg_compression"):
        array = np.load(tmp_path / folder / f"{corruption}.npy")
        assert (array.dtype, array.shape) == (np.uint8, (5 * N, 32, 32, 3))
        expected = [corruptions.apply(images, corruption, s, family="common") for s in range(1, 6)]
        expected = np.floor(torch.cat(expected).permute(0, 2, 3, 1).numpy() * np.float32(255))
        assert np.array_equal(array, expected)
        file = io.BytesIO()
        np.save(file, array)
        assert (tmp_path / folder / f"{corruption}.npy").read_bytes() == file.getvalue(), "as numpy itself writes it"
    fog = np.load(tmp_path / folder / "fog.npy")
    for severity in range(1, 6):
        read = (data.images(f"fog@{severity}", torch.arange(N)) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        assert np.array_equal(read, fog[(severity - 1) * N : severity * N])
        assert torch.equal(data.labels(f"fog@{severity}"), source.labels())


def test_mnist_is_written_as_published_and_read_back(clean, tmp_path):
    summary = generate("mnist", data=str(clean), out=str(tmp_path))
    assert summary.made == [f"{name}@5" for name in MNIST_C]
    source = datasets.create("mnist", data=str(clean))
    data = datasets.create("mnist-c", data=str(tmp_path))
    for name in MNIST_C:
        array = np.load(tmp_path / "mnist_c" / name / "test_images.npy")
        labels = np.load(tmp_path / "mnist_c" / name / "test_labels.npy")
        assert (array.dtype, array.shape) == (np.uint8, (N, 28, 28, 1))
        assert (labels.dtype, labels.shape) == (np.int64, (N,))
        expected = corruptions.apply(source.images("clean", torch.arange(N)), name, 5, family="mnist")
        assert np.array_equal(array, np.rint(expected.permute(0, 2, 3, 1).numpy() * np.float32(255)))
        assert torch.equal(data.labels(name), source.labels())
        assert np.array_equal((data.images(name, torch.tensor([3])) * 255).round()[0, 0], array[3, :, :, 0])


def test_the_default_is_the_benchmark_at_severity_5_below_the_data_root(clean, tmp_path, monkeypatch):
    (tmp_path / "cifar-10-batches-bin").symlink_to(clean / "cifar-10-batches-bin")
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path))
    result = call("cifar10", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["folder"] == str(tmp_path / "CIFAR-10-C")
    assert told["made"] == [f"{name}@5" for name in CIFAR_C]
    assert (told["there"], told["images"]) == ([], N)
    assert told["seconds"] > 0
    assert "fog@5: done" in result.stderr.splitlines()
    assert datasets.create("cifar10-c").images("frost@5", torch.tensor([0])).shape == (1, 3, 32, 32)


def test_made_json_tells_how_it_was_made(clean, tmp_path):
    args = ("cifar10", "--data", clean, "--corruptions", "fog", "--severity", 3, "--seed", 7)
    for out in ("a", "b"):
        assert call(*args, "--out", tmp_path / out).exit_code == 0
    made = json.loads((tmp_path / "a/CIFAR-10-C/made.json").read_text())
    block = (tmp_path / "a/CIFAR-10-C/fog.npy").read_bytes()[-3 * BLOCK : -2 * BLOCK]
    record = np.fromfile(clean / "cifar-10-batches-bin/test_batch.bin", np.uint8).reshape(N, -1)
    assert made == {
        "schema": 1,
        "dataset": "cifar10",
        "images": N,
        "clean": hashlib.sha256(record[:, 0].astype(np.int64).tobytes() + record[:, 1:].tobytes()).hexdigest(),
        "seed": 7,
        "family": "common",
        "rounding": "down",
        "blocks": {
            "fog@3": {
                "sha256": hashlib.sha256(block).hexdigest(),
                "device": "cpu",
                "torch": torch.__version__,
                "tribe": tribe.__version__,
            }
        },
    }
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    generate("mnist", data=str(clean), out=str(tmp_path), corruptions=["fog"])
    assert json.loads((tmp_path / "mnist_c/made.json").read_text())["rounding"] == "nearest"


def test_severities_not_asked_for_are_holes_that_the_reader_refuses(clean, tmp_path):
    generate("cifar10", data=str(clean), out=str(tmp_path), corruptions=["fog"], severities=[4])
    path = tmp_path / "CIFAR-10-C/fog.npy"
    assert path.stat().st_size == 128 + 5 * BLOCK
    assert path.stat().st_blocks * 512 < 2.5 * BLOCK
    data = datasets.create("cifar10-c", data=str(tmp_path), corruptions=("fog", "snow"), severities=(3, 4))
    assert data.images("fog@4", torch.tensor([0])).any()
    again = f"tribe corrupt cifar10 --severity 3 --corruptions fog --data {tmp_path}"
    wanted = f"fog@3 was not made in .*; there: fog@4. Make it with `{again}`"
    for read in (data.labels, lambda domain: data.images(domain, torch.tensor([0]))):
        with pytest.raises(MissingData, match=wanted):
            read("fog@3")
    with pytest.raises(MissingData, match="--severity 4 --corruptions snow"):
        data.labels("snow@4")
    # the command that the reader names makes it, for the same reader to read
    (tmp_path / "cifar-10-batches-bin").symlink_to(clean / "cifar-10-batches-bin")
    assert call("cifar10", "--severity", 3, "--corruptions", "fog", "--data", tmp_path).exit_code == 0
    assert data.images("fog@3", torch.tensor([0])).any()


def test_severities_are_added_to_those_that_are_there(clean, tmp_path):
    fields = {"data": str(clean), "corruptions": ["fog", "glass_blur"]}
    generate("cifar10", out=str(tmp_path / "whole"), severities=[1, 3, 5], **fields)
    for severities, made in (([5], 2), ([1, 5], 2), ([3], 2), ([5, 1], 0)):
        summary = generate("cifar10", out=str(tmp_path / "parts"), severities=severities, **fields)
        assert len(summary.made) == made
        assert len(summary.there) == 2 * len(severities) - made
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


# -- interruptions -----------------------------------------------------------------------------------------------------


def killed_everywhere(args, out):
    """Run a command again and again, killed before its first, second, ... touch of a folder, until one ends well."""
    for event in ("open", "os.mkdir", "os.rename"):
        for count in itertools.count(1):
            process = ended("-m", "tribe", *args, when=Touches(event, str(out), count), number=signal.SIGKILL)
            if process.code == 0:
                break
            assert process.code == -signal.SIGKILL, process.err
            yield


@pytest.mark.parametrize("name", ["cifar10", "imagenet"])
def test_killed_at_any_moment_it_goes_on(name, clean, pictures, tmp_path):
    data = clean if name == "cifar10" else pictures
    args = ["corrupt", name, "--data", data, "--corruptions", "contrast,brightness", "--out"]
    assert call(*args[1:], tmp_path / "whole").exit_code == 0
    reference, out, kills = tree(tmp_path / "whole"), tmp_path / "killed", 0
    for _ in killed_everywhere([*args, out], out):
        kills += 1
        if kills % 3 == 0:  # else the next one finds what several killed ones have left
            assert call(*args[1:], out).exit_code == 0
            assert tree(out) == reference
            shutil.rmtree(out)
    assert kills > 12
    assert tree(out) == reference


def test_killed_while_adding_a_severity_nothing_is_lost(clean, tmp_path):
    generate("cifar10", severities=[5], data=str(clean), corruptions=["contrast"], out=str(tmp_path))
    before = np.load(tmp_path / "CIFAR-10-C/contrast.npy")[-N:]
    args = ["corrupt", "cifar10", "--data", clean, "--out", tmp_path, "--corruptions", "contrast", "--severity", "1,2"]
    kills = 0
    for _ in killed_everywhere(args, tmp_path):
        kills += 1
        data = datasets.create("cifar10-c", data=str(tmp_path), corruptions=("contrast",))
        read = (data.images("contrast@5", torch.arange(N)) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        assert np.array_equal(read, before)
    assert kills > 5
    made = datasets.create("cifar10-c", data=str(tmp_path), corruptions=("contrast",), severities=(1,))
    assert made.images("contrast@1", torch.tensor([0])).any()


@pytest.mark.parametrize(
    ("options", "same"), [((), "the same command"), (("--force",), "the same command without --force")]
)
def test_stopped_by_hand_it_says_how_to_go_on(clean, tmp_path, options, same):
    args = ("corrupt", "cifar10", "--data", clean, "--out", tmp_path, *options)
    stopped = interrupted("-m", "tribe", *args, when=Prints("done\n"))
    assert stopped.code == 130, stopped.err
    *before, last = stopped.err.splitlines()
    assert last == f"stopped; {same} continues"
    assert set(before) == {"motion_blur@5: done"}
    result = call("cifar10", "--data", clean, "--out", tmp_path)
    assert result.exit_code == 0
    assert "motion_blur@5: done" in result.stderr
    assert "1 already there" in result.stdout


def test_what_the_dead_left_is_removed_and_what_is_damaged_is_made_again(clean, tmp_path):
    fields = {"data": str(clean), "corruptions": ["fog", "contrast"]}
    generate("cifar10", out=str(tmp_path), **fields)
    folder = tmp_path / "CIFAR-10-C"
    whole = tree(folder)
    (folder / ".made.json.99.tmp").write_bytes(b"half")
    (folder / "labels.npy").write_bytes(b"")
    (folder / "fog.npy").write_bytes(whole["fog.npy"][:-1])
    (folder / "contrast.npy").write_bytes(whole["contrast.npy"][:-1] + bytes([whole["contrast.npy"][-1] ^ 1]))
    summary = generate("cifar10", out=str(tmp_path), **fields)
    assert (summary.made, summary.there) == (["fog@5", "contrast@5"], [])
    assert tree(folder) == whole


def test_two_writers_do_not_meet(clean, tmp_path):
    (tmp_path / "CIFAR-10-C").mkdir()
    with exclusive(tmp_path / "CIFAR-10-C/.lock"):
        done = ended("-m", "tribe", "corrupt", "cifar10", "--data", clean, "--out", tmp_path)
        assert done.code == 2
        assert "another process is writing to" in done.err
    assert not list(tmp_path.rglob("*.npy"))
    generate("cifar10", data=str(clean), out=str(tmp_path), corruptions=["fog"])


def test_what_others_may_read_is_for_the_umask_to_say(clean, tmp_path):
    before = os.umask(0o022)
    try:
        generate("cifar10", data=str(clean), out=str(tmp_path), corruptions=["contrast"])
    finally:
        os.umask(before)
    for name in ("contrast.npy", "labels.npy", "made.json"):
        assert (tmp_path / "CIFAR-10-C" / name).stat().st_mode & 0o777 == 0o644


# -- a full disk -------------------------------------------------------------------------------------------------------


def on_a_full_disk(*args, limit):
    """Run the command where no file can grow beyond a limit; return its message."""
    done = ended("-m", "tribe", "corrupt", *args, limits={"RLIMIT_FSIZE": limit})
    assert done.code == 2, done.err
    return done.err


def test_a_full_disk_is_told_and_what_is_finished_is_kept(clean, tmp_path):
    args = ("cifar10", "--data", clean, "--out", tmp_path)
    assert call(*args, "--severity", 1, "--corruptions", "contrast").exit_code == 0
    whole = tree(tmp_path)
    more = ("--severity", "1,5", "--corruptions", "contrast,fog")
    message = on_a_full_disk(*args, *more, limit=4 * BLOCK)
    assert message.startswith("contrast@1: done\nerror: ")
    assert f"{tmp_path / 'CIFAR-10-C/contrast.npy'} could not be written: File too large." in message
    assert "It needs 0.1 MB, and " in message
    assert "MB are free. The finished domains are kept" in message
    kept = datasets.create("cifar10-c", data=str(tmp_path), corruptions=("contrast",), severities=(1,))
    assert kept.digest("contrast@1") == json.loads(whole["CIFAR-10-C/made.json"])["blocks"]["contrast@1"]["sha256"]
    assert call(*args, *more).exit_code == 0


def test_a_full_disk_stops_pictures_too(pictures, tmp_path):
    args = ("imagenet", "--data", pictures, "--out", tmp_path, "--corruptions", "contrast,gaussian_noise")
    message = on_a_full_disk(*args, limit=20_000)
    assert "gaussian_noise/5/n01440764/val_0.JPEG could not be written: File too large" in message
    assert "made.json" in tree(tmp_path / "ImageNet-C")
    assert call(*args).exit_code == 0


def test_too_little_room_is_told_before_the_work(clean, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 15 * BLOCK - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    args = ("cifar10", "--data", clean, "--out", tmp_path)
    assert refused(call(*args), "too little room", "0.9 MB", "Use another --out")
    assert not list(tmp_path.rglob("fog.npy"))
    usage.free += 1
    assert call(*args).exit_code == 0, "holes need no room"


# -- folders made otherwise --------------------------------------------------------------------------------------------


def test_another_seed_or_clean_set_is_refused_unless_forced(clean, tmp_path):
    args = ("cifar10", "--out", tmp_path, "--corruptions", "fog,contrast")
    assert call(*args, "--data", clean).exit_code == 0
    before = tree(tmp_path)
    assert refused(call(*args, "--data", clean, "--seed", 1), "was made with seed 0, not 1", "--out", "--force")
    other = tmp_path / "other/cifar-10-batches-bin"
    other.mkdir(parents=True)
    record = (clean / "cifar-10-batches-bin/test_batch.bin").read_bytes()
    (other / "test_batch.bin").write_bytes(record[:-1] + bytes([record[-1] ^ 1]))
    assert refused(call(*args, "--data", other.parent), "was made with clean set, sha256", "--force")
    assert {k: v for k, v in tree(tmp_path).items() if not k.startswith("other")} == before
    forced = ("--corruptions", "fog", "--seed", 1, "--force")
    assert call("cifar10", "--data", clean, "--out", tmp_path, *forced).exit_code == 0
    assert json.loads((tmp_path / "CIFAR-10-C/made.json").read_text())["seed"] == 1
    assert tree(tmp_path)["CIFAR-10-C/fog.npy"] != before["CIFAR-10-C/fog.npy"]
    data = datasets.create("cifar10-c", data=str(tmp_path))
    with pytest.raises(MissingData, match="contrast@5 was not made"):  # that of the other seed
        data.labels("contrast@5")


def test_a_published_archive_is_read_as_complete_and_never_written_over(clean, tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(5 * N, np.uint8))
    np.save(folder / "fog.npy", np.ones((5 * N, 32, 32, 3), np.uint8))
    before = tree(folder)
    assert datasets.create("cifar10-c", data=str(tmp_path)).images("fog@5", torch.tensor([0])).any()
    assert refused(call("cifar10", "--data", clean, "--out", tmp_path), "but no made.json", "published", "--force")
    assert tree(folder) == before
    assert call("cifar10", "--data", clean, "--out", tmp_path, "--force", "--corruptions", "fog").exit_code == 0
    assert tree(folder)["fog.npy"] != before["fog.npy"]


def test_force_makes_again(clean, tmp_path):
    fields = {"data": str(clean), "out": str(tmp_path), "corruptions": ["fog"]}
    generate("cifar10", severities=[1, 5], **fields)
    before = tree(tmp_path)
    assert generate("cifar10", **fields, force=True).made == ["fog@5"]
    assert tree(tmp_path) == before
    (tmp_path / "CIFAR-10-C/made.json").write_text("{")
    with pytest.raises(ValueError, match=r"made.json is damaged: .* make it again"):
        generate("cifar10", **fields)
    assert generate("cifar10", severities=[1, 5], **fields, force=True).made == ["fog@1", "fog@5"]
    assert tree(tmp_path) == before


# -- readers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "made", "folder"),
    [
        ("cifar10-c", "cifar10 --severity 5", "CIFAR-10-C"),
        ("cifar100-c", "cifar100 --severity 5", "CIFAR-100-C"),
        ("mnist-c", "mnist", "mnist_c"),
    ],
)
def test_missing_data_names_the_command(tmp_path, name, made, folder):
    data = datasets.create(name, data=str(tmp_path))
    words = f"looked for {tmp_path / folder}.*run `tribe corrupt {made} --data {tmp_path}`.*https://zenodo.org/records/"
    with pytest.raises(MissingData, match=words):
        data.labels(data.domains[0])


def test_a_half_written_folder_names_the_command(clean, tmp_path):
    stopped_at("advance", "cifar10", data=str(clean), out=str(tmp_path))
    assert "gaussian_noise@5" not in json.loads((tmp_path / "CIFAR-10-C/made.json").read_text())["blocks"]
    with pytest.raises(MissingData, match=r"fog@5 was not made in .*; there: none yet. Make it with `tribe corrupt"):
        datasets.create("cifar10-c", data=str(tmp_path)).labels("fog@5")
    for path in (tmp_path / "CIFAR-10-C").glob("*.*"):
        path.unlink()
    with pytest.raises(MissingData, match=r"labels not found.*make it with `tribe corrupt cifar10 --severity 5"):
        datasets.create("cifar10-c", data=str(tmp_path)).labels("fog@5")


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
@pytest.mark.parametrize(
    ("name", "file", "again"),
    [
        ("cifar10", "CIFAR-10-C/fog.npy", "cifar10 --severity 5 --corruptions fog"),
        ("mnist", "mnist_c/fog/test_images.npy", "mnist --corruptions fog"),
    ],
)
def test_a_file_of_the_wrong_size_names_the_command(clean, tmp_path, name, file, again, change):
    generate(name, data=str(clean), out=str(tmp_path), corruptions=["fog"])
    path = tmp_path / file
    path.write_bytes(change(path.read_bytes()))
    data = datasets.create(f"{name}-c", data=str(tmp_path), corruptions=("fog",))
    with pytest.raises(ValueError, match=rf"{path}.*make it with `tribe corrupt {again} --data {tmp_path}`"):
        data.images(data.domains[0], torch.tensor([0]))


# -- requests that cannot be met ---------------------------------------------------------------------------------------

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["cifra10"], ["unknown data set 'cifra10'", "did you mean 'cifar10'"]),
        (["cifar10", "--severity", "6"], ["--severity is 1 to 5", "'6'"]),
        (["cifar10", "--severity", "5-1"], ["--severity is 1 to 5", "'5-1'"]),
        (["cifar10", "--severity", "x"], ["--severity is 1 to 5", "'x'"]),
        (["mnist", "--severity", "3"], ["single strength", "severity 5", "got 3"]),
        (["cifar10", "--corruptions", "fgo"], ["unknown corruption 'fgo'", "did you mean 'fog'"]),
        (["cifar10", "--corruptions", "stripe"], ["unknown corruption 'stripe'"]),
        (["cifar10", "--corruptions", ","], ["names none"]),
        (["cifar10", "--device", "tpu"], ["unknown device 'tpu'"]),
        (["cifar10", "--seed", "-1"], ["a seed is at least 0"]),
        pytest.param(["cifar10", "--device", "cuda"], ["use cpu"], marks=without_cuda),
        (["cifar10", "--data", "none"], ["not found", "none/cifar-10-batches-bin/test_batch.bin", "--data"]),
    ],
)
def test_bad_requests(clean, tmp_path, args, words):
    assert refused(call("--data", clean, "--out", tmp_path, *args), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_cuda_writes_the_same_up_to_rounding(clean, tmp_path):
    for device in ("cpu", "cuda"):
        generate("cifar10", data=str(clean), out=str(tmp_path / device), device=device)
    for name in CIFAR_C:
        cpu, cuda = (np.load(tmp_path / device / f"CIFAR-10-C/{name}.npy").astype(int) for device in ("cpu", "cuda"))
        assert (np.abs(cpu - cuda) > 1).mean() < 1e-3


def test_a_terminal_sees_a_bar(clean, tmp_path):
    terminal, end = pty.openpty()
    command = ("-m", "tribe", "corrupt", "cifar10", "--data", clean, "--out", tmp_path)
    process = Process(*command, stdout=end, stderr=end, env={"TERM": "xterm", "COLUMNS": "120"})
    os.close(end)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the command is
        while part := os.read(terminal, 4096):
            seen += part
    os.close(terminal)
    assert process.end().code == 0
    assert b"reading the clean set" in seen
    assert b"%" in seen
    assert b"CIFAR-10-C: 15 made in" in seen


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_pictures_are_prepared_corrupted_and_stored_as_published(pictures, tmp_path):
    args = ("imagenet", "--data", pictures, "--out", tmp_path, "--corruptions")
    assert call(*args, "contrast,fog", "--severity", "2,5").exit_code == 0
    paths = [pictures / WNIDS[0] / "val_0.JPEG", *(pictures / WNIDS[1] / f"val_{i}.JPEG" for i in range(2))]
    for name in ("contrast", "fog"):
        for severity in (2, 5):
            for i, path in enumerate(paths):
                x = read_image(path, resize=256, crop=224)[None] / 255
                expected = corruptions.apply(x, name, severity, index=torch.tensor([i])).mul(255).byte()[0]
                file = io.BytesIO()
                Image.fromarray(expected.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=85)
                place = tmp_path / "ImageNet-C" / name / str(severity) / path.parent.name / path.name
                with Image.open(file) as one, Image.open(place) as other:
                    assert other.format == "JPEG"
                    assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 3
    made = json.loads((tmp_path / "ImageNet-C/made.json").read_text())
    assert sorted(made["blocks"]) == ["contrast@2", "contrast@5", "fog@2", "fog@5"]
    again = call(*args, "fog", "--severity", 5, "--json")
    assert json.loads(again.stdout)["there"] == ["fog@5"]
    assert refused(call(*args, "fog", "--seed", 1), "seed 0, not 1")


def test_pictures_that_are_none(tmp_path):
    (tmp_path / "val/n01440764").mkdir(parents=True)
    args = ("imagenet", "--data", tmp_path / "val", "--out", tmp_path / "out")
    assert refused(call(*args), "holds no images in its class folders")
    (tmp_path / "val/n01440764/a.JPEG").write_bytes(b"no picture")
    assert refused(call(*args, "--corruptions", "fog"), "a.JPEG cannot be read as an image")
    assert set(tree(tmp_path / "out")) == {"ImageNet-C/made.json"}


def test_cropped_pictures_are_not_cropped_again(tmp_path):
    (tmp_path / "val/0001").mkdir(parents=True)
    path = tmp_path / "val/0001/a.jpg"
    Image.fromarray(np.random.default_rng(0).integers(256, size=(224, 224, 3), dtype=np.uint8)).save(path)
    generate("imagenet", data=str(tmp_path / "val"), out=str(tmp_path), corruptions=["brightness"], severities=[1])
    expected = corruptions.apply(read_image(path)[None] / 255, "brightness", 1).mul(255).byte()[0]
    made = read_image(tmp_path / "ImageNet-C/brightness/1/0001/a.jpg")
    assert (made.float() - expected).abs().mean() < 20, "only the JPEG compression"
    (tmp_path / "val/0001/b.jpg").write_bytes(path.read_bytes())
    for i in range(40):  # the sample of sizes misses the odd one
        shutil.copy(path, tmp_path / f"val/0001/c{i}.jpg")
    Image.new("RGB", (300, 300)).save(tmp_path / "val/0001/b.jpg")
    with pytest.raises(ValueError, match=r"b\.jpg is 300x300 pixels, and the others 224x224"):
        generate("imagenet", data=str(tmp_path / "val"), out=str(tmp_path / "b"), corruptions=["brightness"])


def test_the_data_root_is_the_place_of_clean_and_corrupted_pictures(pictures, tmp_path, monkeypatch):
    shutil.copytree(pictures, tmp_path / "imagenet/val")
    result = call("imagenet", "--data", tmp_path, "--corruptions", "contrast", "--json")
    assert json.loads(result.stdout)["folder"] == str(tmp_path / "ImageNet-C")
    monkeypatch.setenv("TRIBE_DATA", str(tmp_path / "root"))
    result = call("imagenet", "--data", pictures, "--corruptions", "contrast", "--json")
    assert json.loads(result.stdout)["folder"] == str(tmp_path / "root/ImageNet-C"), "not among the clean ones"
    assert tree(tmp_path / "root/ImageNet-C") == tree(tmp_path / "ImageNet-C")


def test_pictures_that_are_cut_short_or_gone_are_made_again(pictures, tmp_path):
    fields = {"out": str(tmp_path / "a"), "corruptions": ["contrast", "brightness"]}
    stopped_at("finish", "imagenet", data=str(pictures), **fields)
    folder = tmp_path / "a/ImageNet-C"
    (folder / "brightness/5/n01440764/val_0.JPEG").write_bytes(b"")
    path = folder / "brightness/5/n01443537/val_0.JPEG"
    path.write_bytes(path.read_bytes()[:-100])
    assert generate("imagenet", data=str(pictures), **fields).made == ["brightness@5"]
    (folder / "contrast/5/n01443537/val_1.JPEG").unlink()
    assert generate("imagenet", data=str(pictures), **fields).made == ["contrast@5"]
    generate("imagenet", data=str(pictures), **fields | {"out": str(tmp_path / "b")})
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_force_removes_pictures_of_another_set(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "val")
    shutil.copy(tmp_path / "val/n01440764/val_0.JPEG", tmp_path / "val/n01440764/more.JPEG")
    args = ("imagenet", "--out", tmp_path, "--corruptions", "contrast", "--data")
    assert call(*args, tmp_path / "val").exit_code == 0
    assert refused(call(*args, pictures), "was made with clean set", "--force")
    assert call(*args, pictures, "--force").exit_code == 0
    assert not list(tmp_path.glob("ImageNet-C/*/5/n01440764/more.JPEG"))
