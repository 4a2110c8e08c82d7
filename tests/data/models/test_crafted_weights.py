"""Weights files from elsewhere: each damage is a WeightsError, and none runs code."""

import json
import pickle
import struct
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from layouts import Malicious
from processes import run_limited
from tribe import models
from tribe.data.models.weights import SHIPPED, WeightsError, read


def saved(path, content, **options):
    torch.save(content, path, **options)
    return path


def itself(path):
    loop = {"epoch": 1}
    loop["state_dict"] = loop
    saved(path, loop)


def cut_short(path):
    path.write_bytes(saved(path, {"w": torch.zeros(999)}).read_bytes()[:-300])


def quantised(path):
    saved(path, {"w": torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)})


CRAFTED = {
    "a dictionary that contains itself": itself,
    "a zip file cut short": cut_short,
    "an empty file": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("weights\n" * 99),
    "a plain pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
    "a sparse tensor": lambda path: saved(path, {"w": torch.eye(3).to_sparse()}),
    "a quantised tensor": quantised,
    "a meta tensor": lambda path: saved(path, {"w": torch.zeros(3, device="meta")}),
    "a module": lambda path: saved(path, nn.Linear(2, 2)),
    "a pickle that makes a folder": lambda path: path.write_bytes(pickle.dumps(Malicious(str(path.parent / "trace")))),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about the storages of quantised tensors
@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_file_is_refused_and_runs_nothing(tmp_path, case):
    CRAFTED[case](tmp_path / "net.pt")
    with pytest.raises(WeightsError, match=r"net\.pt"):
        read(tmp_path / "net.pt")
    assert not (tmp_path / "trace").exists()


LOAD = """
from tribe import models
for path in sys.argv[1:]:
    try:
        models.load("compact", path)
    except models.WeightsError:
        print("refused")
"""


def test_small_files_that_claim_much_take_little_memory(tmp_path):
    head, weights = models.architecture("compact").head, models.create("compact").state_dict()
    save_file(weights | {f"{head}.weight": torch.zeros(2**29, 0)}, tmp_path / "empty.safetensors")
    save_file(weights | {f"{head}.weight": torch.zeros(4_000_000, 1).bool()}, tmp_path / "thin.safetensors")
    done = run_limited(LOAD, *sorted(tmp_path.iterdir()), megabytes=768)
    assert done.code == 0, done.err
    assert done.out.split() == ["refused"] * 2


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.0, float("nan")], [1.0, 1.0], "finite"),
        ([0.0, 0.0], [1.0, 0.0], "above 0"),
        ([0j, 0j], [1.0, 1.0], "finite"),
    ],
)
def test_constants_of_input_normalisation_that_cannot_be_used_are_refused(tmp_path, mean, std, message):
    weights = models.create("compact").state_dict() | {"mean": torch.tensor(mean), "std": torch.tensor(std)}
    torch.save(OrderedDict(weights), tmp_path / "net.pt")
    with pytest.raises(WeightsError, match=message):
        models.load("compact", tmp_path / "net.pt")


def header(content, data=b""):
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**40) + b"{}",
        header({"a": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}),
        header({"a": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
    ],
    ids=lambda content: f"{content[8:60]!r}",
)
def test_a_header_that_claims_what_the_file_does_not_hold_is_refused(tmp_path, content):
    (tmp_path / "net.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"net\.safetensors"):
        read(tmp_path / "net.safetensors")


@pytest.fixture
def with_card(tmp_path):
    for suffix in (".safetensors", ".json"):
        (tmp_path / f"net{suffix}").write_bytes((SHIPPED / f"compact_mnist{suffix}").read_bytes())
    return tmp_path / "net.safetensors"


def test_weights_that_are_not_those_of_their_card_are_refused(with_card):
    models.load("compact", with_card)
    whole = with_card.read_bytes()
    for place in (9, len(whole) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        with_card.write_bytes(flipped)
        with pytest.raises(WeightsError, match="sha256"):
            models.load("compact", with_card)


def test_another_json_file_beside_the_weights_is_no_card(with_card):
    with_card.with_suffix(".json").write_text("{}")
    models.load("compact", with_card)


@pytest.mark.parametrize("content", ['{"sha256": 3}', "[" * 100_000])
def test_a_damaged_card_is_refused(with_card, content):
    with_card.with_suffix(".json").write_text(content)
    with pytest.raises(WeightsError, match="damaged"):
        models.load("compact", with_card)
