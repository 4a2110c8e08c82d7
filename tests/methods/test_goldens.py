"""Conformance: the numbers recorded from the implementation released with the paper, step by step.

`tests/goldens/methods*.npz` hold the first steps and are in the repository; where the full recordings lie beside it
(`../shared/goldens`) all steps are compared, and the parameters at the end.
"""

import numpy as np
import pytest
import torch

from places import DATA
from recordings import CASES, GOLDENS, RECORDED, TOLERANCE, replay

UNADAPTED = ("source", "bn", "lame")  # their states hold no parameters


def compare(data, file, name):
    logits, state = replay(data, name, *RECORDED[file][name])
    logits = logits.softmax(-1) if name == "lame" else logits  # the recording is of LAME's probabilities
    golden = torch.from_numpy(data[f"logits/{name}"])
    assert (logits[0] - golden).abs().max() <= TOLERANCE.get(name, 5e-5)
    assert torch.equal(logits[0].argmax(-1), golden.argmax(-1))
    return state


def affine_of(state):
    """The parameters whose end was recorded: the student's where there is one."""
    return getattr(state, "student", state).affine


@pytest.mark.parametrize(("file", "name"), CASES)
def test_first_steps_equal_the_recording(file, name):
    with np.load(DATA / f"{file}.npz") as data:
        compare(dict(data), file, name)


@pytest.mark.skipif(not GOLDENS.is_dir(), reason="the full recordings are not beside this clone")
@pytest.mark.parametrize(("file", "name"), CASES)
def test_all_steps_equal_the_recording(file, name):
    with np.load(GOLDENS / f"{file}_open.npz") as data:
        state = compare(dict(data), file, name)
        layer = "bn{}._bn" if name == "note" else "bn{}"
        if f"final/{name}/{layer.format(1)}.weight" in data and RECORDED[file][name][0] not in UNADAPTED:
            for field in ("weight", "bias"):
                final = np.concatenate([data[f"final/{name}/{layer.format(i)}.{field}"] for i in (1, 2, 3)])
                moved = getattr(affine_of(state), field)[0].numpy()
                assert np.abs(moved - final).max() <= {**TOLERANCE, "cotta": 1e-4}.get(
                    name, 2e-5
                )  # rounding of CPUs differs


def test_streams_together_equal_the_recording():
    """Eight streams of the recorded images at once are eight times the recording."""
    with np.load(DATA / "methods.npz") as data:
        logits, _ = replay(dict(data), "tribe_gamma", *RECORDED["methods"]["tribe_gamma"], streams=8)
        golden = torch.from_numpy(data["logits/tribe_gamma"])
        assert (logits - golden).abs().max() <= 5e-5
