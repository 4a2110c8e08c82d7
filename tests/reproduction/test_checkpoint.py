"""Checkpoints of a training: any damage is refused with CheckpointError, before network or optimiser change."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from reproduction.train import CheckpointError, checkpoint

HISTORY = [{"epoch": 1, "loss": 0.5, "train": 0.8, "test": 0.75, "seconds": 2.0}]
IDENTITY = {"model": "tiny", "seed": 0}
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


def learner(optimizer="adam", momentum=0.9, width=3):
    """A network and its optimiser after a step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    made = (
        torch.optim.Adam(net.parameters(), 0.1)
        if optimizer == "adam"
        else torch.optim.SGD(net.parameters(), 0.1, momentum=momentum)
    )
    net(torch.rand(4, 2)).square().sum().backward()
    made.step()
    return net, made


@pytest.fixture
def path(tmp_path):
    checkpoint.save(tmp_path / "saved", *learner(), IDENTITY, HISTORY, {})
    return tmp_path / "saved"


def rewrite(path, metadata=None, tensors=None, without=()):
    """The same checkpoint with other contents, and without a digest, as older versions wrote it."""
    with safe_open(path, "pt") as file:
        header = {name: text for name, text in file.metadata().items() if name in ("identity", "history", "scaler")}
    header = {"format": json.dumps("tribe-training")} | header | (metadata or {})
    kept = {name: t for name, t in (load_file(path) | (tensors or {})).items() if name not in without}
    save_file(kept, path, {name: text for name, text in header.items() if name not in without})


def resume(path, **options):
    """Load a checkpoint, and fail if an error leaves something changed."""
    net, optimizer = learner(**options)
    before = json.dumps([str(net.state_dict()), str(optimizer.state_dict())])
    try:
        saved = checkpoint.read(path)
        checkpoint.restore(path, saved, net, optimizer, NO_SCALER)
    except CheckpointError:
        assert json.dumps([str(net.state_dict()), str(optimizer.state_dict())]) == before
        raise
    return net, optimizer


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_checkpoint_is_restored(tmp_path, optimizer, momentum):
    net, made = learner(optimizer, momentum)
    for p in net.parameters():
        p.data += 1
    checkpoint.save(tmp_path / "saved", net, made, IDENTITY, HISTORY, {})
    for older in (False, True):
        if older:
            rewrite(tmp_path / "saved")
        restored, again = resume(tmp_path / "saved", optimizer=optimizer, momentum=momentum)
        assert str(restored.state_dict()) == str(net.state_dict())
        one, other = (o.state_dict()["state"] for o in (again, made))
        assert str([sorted(one[i].items()) for i in one]) == str([sorted(other[i].items()) for i in other])


def test_every_flipped_bit_is_refused(path):
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    bits = [*range(0, 8 * header, 23), *range(8 * header, 8 * len(whole), 41)]
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"damaged|upgrade tribe|not a checkpoint"):
            checkpoint.read(path)
    assert len(bits) > 500


def test_a_damaged_name_of_the_digest_does_not_pass_for_an_older_file(path):
    path.write_bytes(path.read_bytes().replace(b'"digest"', b'"digesu"'))
    with pytest.raises(CheckpointError, match="damaged: it does not hold what was saved"):
        checkpoint.read(path)


ENTRY = HISTORY[0]
MALFORMED = {
    "no identity": ({"without": ["identity"]}, "identity"),
    "no history": ({"without": ["history"]}, "history"),
    "no scaler": ({"without": ["scaler"]}, "scaler"),
    "a history that is no list": ({"metadata": {"history": "{}"}}, "history is damaged.*expected a list"),
    "a history of numbers": ({"metadata": {"history": "[1]"}}, "history is damaged: 0 is 1; expected an object"),
    "an epoch without its loss": ({"metadata": {"history": '[{"epoch": 1}]'}}, "loss is missing"),
    "an epoch of text": ({"metadata": {"history": json.dumps([ENTRY | {"epoch": "1"}])}}, "0.epoch is '1'"),
    "a loss that is not finite": (
        {"metadata": {"history": json.dumps([ENTRY | {"loss": float("nan")}])}},
        "NaN is not",
    ),
    "an epoch twice": ({"metadata": {"history": json.dumps([ENTRY, ENTRY])}}, "expected epochs in order"),
    "a deep identity": ({"metadata": {"identity": "[" * 100_000}}, "identity is damaged"),
    "a scaler that is not used": ({"metadata": {"scaler": '{"scale": 2.0}'}}, "not hold the scaler of this precision"),
    "a weight missing": ({"without": ["net.0.weight"]}, "not hold this network: net.0.weight missing"),
    "a weight too many": ({"tensors": {"net.9.weight": torch.zeros(1)}}, "net.9.weight missing or unexpected"),
    "a weight of another shape": ({"tensors": {"net.0.weight": torch.zeros(3)}}, r"net.0.weight is \(3,\).*\(3, 2\)"),
    "a weight of another type": ({"tensors": {"net.0.weight": torch.zeros(3, 2).half()}}, "float16; expected"),
    "a weight of no plain type": (
        {"tensors": {"net.0.weight": torch.zeros(3, 2, dtype=torch.complex64)}},
        "holds torch.complex64; expected",
    ),
    "half of a parameter's state": ({"without": ["optimizer.0.exp_avg"]}, "optimizer.0.exp_avg missing"),
    "no optimiser state": (
        {"without": [f"optimizer.{i}.{n}" for i in range(4) for n in ("step", "exp_avg", "exp_avg_sq")]},
        "not hold the state of this optimiser",
    ),
    "the state of a parameter too many": ({"tensors": {"optimizer.4.step": torch.zeros(())}}, "optimizer.4.step"),
    "the state of a parameter without a number": ({"tensors": {"optimizer.x.step": torch.zeros(())}}, "optimizer.x"),
    "a state of another shape": ({"tensors": {"optimizer.0.exp_avg": torch.zeros(1)}}, "optimizer.0.exp_avg is"),
    "a tensor of neither": ({"tensors": {"notes": torch.zeros(1)}}, "notes missing or unexpected"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_checkpoint_is_refused(path, case):
    changes, message = MALFORMED[case]
    rewrite(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        resume(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 4}, "net.0.bias is"),
        ({"optimizer": "sgd"}, "not hold the state of this optimiser"),
        ({"optimizer": "sgd", "momentum": 0.0}, "not hold the state of this optimiser"),
    ],
)
def test_a_checkpoint_of_another_network_or_optimiser_is_refused(path, options, message):
    with pytest.raises(CheckpointError, match=message):
        resume(path, **options)


def test_a_parameter_that_never_had_a_gradient_has_no_state(path):
    rewrite(path, without=[f"optimizer.1.{name}" for name in ("step", "exp_avg", "exp_avg_sq")])
    _, optimizer = resume(path)
    assert set(optimizer.state_dict()["state"]) == {0, 2, 3}
