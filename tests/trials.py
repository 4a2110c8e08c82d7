"""Recordings and trials for tests: real digits under real corruptions, and tables that need no network."""

import numpy as np
import torch

import tribe
from tribe.data.datasets.files import mnist_test
from tribe.trial.recordings import open_recording
from tribe.trial.trial import Columns, Trial

DAY_AND_BLUR = (("", 150), ("motion_blur", 350), ("impulse_noise", 250), ("", 150))


def digits(parts=DAY_AND_BLUR, seed=0):
    """Frames (N, 28, 28) of bytes, and their classes: parts of a day, each in bursts of classes."""
    pixels, classes = mnist_test()
    chosen = np.random.default_rng(seed).permutation(len(classes))
    frames, labels, start = [], [], 0
    for corruption, count in parts:
        index = chosen[start : start + count]
        index, start = index[np.argsort(classes[index], kind="stable")], start + count
        x = torch.from_numpy(pixels[index]).reshape(-1, 1, 28, 28).float() / 255
        if corruption:
            x = tribe.corruptions.apply(x, corruption, 5, seed=seed)
        frames.append((255 * x[:, 0]).round().byte().numpy())
        labels.append(classes[index].astype(int))
    return np.concatenate(frames), np.concatenate(labels)


def digits_network():
    return tribe.models.load("compact", tribe.models.find("compact", "mnist"))


def recorded(folder, frames=24, size=(6, 8), name="frames.npy"):
    """A small recording of noise in an array file."""
    path = folder / name
    np.save(path, np.random.default_rng(0).integers(0, 256, (frames, *size, 3), dtype=np.uint8))
    return open_recording(path)


def table(source, adapted, confidences=(0.5, 0.5), classes=4, **fields):
    """A trial with these predictions."""
    source, adapted = np.array(source, np.int32), np.array(adapted, np.int32)
    differ = np.flatnonzero(source != adapted)
    rows = [
        [*sorted((source[i], adapted[i])), *(k for k in range(classes) if k not in (source[i], adapted[i]))][:9]
        for i in differ
    ]
    columns = Columns(
        source,
        adapted,
        *(np.broadcast_to(np.array(c, np.float32), source.shape).copy() for c in confidences),
        readable=np.ones(len(source), bool),
        candidates=np.array(rows, np.int32).reshape(len(differ), min(classes, 9)),
        times=np.zeros(0, np.int64),
    )
    names = tuple(fields.pop("names", map(str, range(classes))))
    about = {"place": "frames.npy", "digest": "0", "size": None, "stretch": False, "batch": 64}
    known = {"recording": about, "network": "n", "method": "m", "settings": "s", "windows": (), "events": ()}
    return Trial(classes=names, columns=columns, seconds=(1.0, 2.0), **{**known, **fields})
