"""Weights files from elsewhere: each damage is a WeightsError, and none takes much memory or time."""

import json
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from limited import run_limited
from tribe import models
from tribe.data.models.weights import SHIPPED, WeightsError, read
from tribe.testing import small_network


def saved(path, content, **options):
    torch.save(content, path, **options)
    return path


def with_pickle(path, source, replace=lambda data: data, compression=zipfile.ZIP_STORED):
    """A copy of a file of torch.save with another pickle."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, replace(old.read(name)) if name.endswith("data.pkl") else old.read(name))
    return path


@pytest.mark.parametrize("legacy", [False, True])
def test_state_dicts_and_training_checkpoints_are_read(tmp_path, legacy):
    net = small_network()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    view = torch.arange(12.0).view(3, 4).T[1:]
    contents = {
        "plain": dict(net.state_dict()),
        "ordered": net.state_dict(),
        "parameters": dict(net.named_parameters()),
        "envelope": {
            "state_dict": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "milestones": Counter([3, 3, 5]),
            "epoch": 3,
            "best": 0.5,
            "note": None,
            "shape": torch.Size([1, 2]),
            "history": [1.0, (2, True)],
        },
        "view": {"w": view, "half": view.half(), "again": view, "none": torch.zeros(0, 3), "one": torch.tensor(True)},
    }
    for name, content in contents.items():
        options = {"_use_new_zipfile_serialization": False} if legacy else {}
        path = saved(tmp_path / "net.pt", content, **options)
        expected = content["state_dict"] if name == "envelope" else content
        found = read(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found), name


def itself(path):
    loop = {"epoch": 1}
    loop["state_dict"] = loop
    saved(path, loop)


def in_a_ring(path):
    one, two = {"epoch": 1}, {"epoch": 2}
    one["model"], two["state_dict"] = two, one
    saved(path, one)


def cut_short(path):
    path.write_bytes(saved(path, {"w": torch.zeros(999)}).read_bytes()[:-300])


def cut_short_legacy(path):
    saved(path, {"w": torch.zeros(999)}, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-300])


def of_another_size(path):
    source = saved(path.with_suffix(".source"), {"w": torch.zeros(4)})
    with_pickle(path, source, lambda data: data.replace(b"cpuq\x06K\x04", b"cpuq\x06J\x00\x00\x00\x40"))


def beyond_its_storage(path):
    source = saved(path.with_suffix(".source"), {"w": torch.zeros(4)})
    with_pickle(path, source, lambda data: data.replace(b"QK\x00K\x04\x85", b"QK\x00J\x00\x00\x00\x40\x85"))


def bomb(path):
    source = saved(path.with_suffix(".source"), {"w": torch.zeros(1 << 26)})
    with_pickle(path, source, compression=zipfile.ZIP_DEFLATED)
    source.unlink()


def with_the_pickle(path, data):
    source = saved(path.with_suffix(".source"), {"w": torch.zeros(4)})
    with_pickle(path, source, lambda _: data)


def bytearray_bomb(path):
    with_the_pickle(path, b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.")


def tensor_bomb(path):
    with_the_pickle(path, b"\x80\x02ctorch\nTensor\nJ\xff\xff\xff\x7f\x85R.")


def exponential_key(path):
    with_the_pickle(path, b"\x80\x02}K\x01\x85" + b"q\x00h\x00\x86" * 60 + b"K\x01s.")


def exponential_set(path):
    with_the_pickle(path, b"\x80\x02cbuiltins\nset\n]K\x01\x85" + b"q\x00h\x00\x86" * 60 + b"a\x85R.")


def deep(path):
    with_the_pickle(path, b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".")


def quantised(path):
    saved(path, {"w": torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)})


CRAFTED = {
    "a dictionary that contains itself": (itself, "holds no state dict"),
    "two dictionaries that contain each other": (in_a_ring, "holds no state dict"),
    "a zip file cut short": (cut_short, "cut short"),
    "an old file cut short": (cut_short_legacy, "cut short|more bytes than the file"),
    "an empty file": (lambda path: path.write_bytes(b""), "cut short"),
    "text": (lambda path: path.write_text("weights\n" * 99), "cut short|not begin|operation"),
    "a plain pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "not begin"),
    "a sparse tensor": (lambda path: saved(path, {"w": torch.eye(3).to_sparse()}), "a sparse tensor: save"),
    "a compressed sparse tensor": (lambda path: saved(path, {"w": torch.eye(3).to_sparse_csr()}), "a sparse tensor"),
    "a quantised tensor": (quantised, "a quantised tensor: save"),
    "a meta tensor": (lambda path: saved(path, {"w": torch.zeros(3, device="meta")}), "meta device, which has no"),
    "a tensor of 8 bits": (lambda path: saved(path, {"w": torch.zeros(3).to(torch.float8_e5m2)}), "unusual type"),
    "a module": (lambda path: saved(path, nn.Linear(2, 2)), "Python objects beside tensors"),
    "a storage of another size": (of_another_size, "says 1073741824 numbers, and the file does not"),
    "a tensor beyond its storage": (beyond_its_storage, "larger than its storage of 4 numbers"),
    "compressed records": (bomb, "its records are compressed"),
    "a call that allocates bytes": (bytearray_bomb, "Python objects beside tensors"),
    "a call that allocates a tensor": (tensor_bomb, "it calls torch.Tensor"),
    "a key that takes exponential time": (exponential_key, "key of a dictionary"),
    "a set that takes exponential time": (exponential_set, "a set of something"),
    "a deep tuple": (deep, "holds no state dict|cut short"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_file_is_refused_in_words(tmp_path, case):
    make, message = CRAFTED[case]
    make(tmp_path / "net.pt")
    with pytest.raises(WeightsError, match=message):
        read(tmp_path / "net.pt")


LOAD = """
from tribe import models
for path in sys.argv[1:]:
    try:
        models.load("compact", path)
    except models.WeightsError:
        print("refused")
"""


def test_small_files_that_claim_much_take_little_memory(tmp_path):
    net = models.create("compact")
    head = models.architecture("compact").head
    weights = net.state_dict()
    many = 2**29
    crafted = {
        "expanded.pt": {**weights, f"{head}.weight": torch.zeros(1).expand(many, 16)},
        "mean.pt": {**weights, "mean": torch.zeros(1).expand(many), "std": torch.ones(1).expand(many)},
    }
    for name, content in crafted.items():
        torch.save(content, tmp_path / name)
    save_file(weights | {f"{head}.weight": torch.zeros(many, 0)}, tmp_path / "classes.safetensors")
    save_file(weights | {f"{head}.weight": torch.zeros(4_000_000, 1).bool()}, tmp_path / "thin.safetensors")
    for name in ("bytearray", "bomb"):
        {"bytearray": bytearray_bomb, "bomb": bomb}[name](tmp_path / f"{name}.pt")
    paths = sorted(path for path in tmp_path.iterdir() if path.suffix in (".pt", ".safetensors"))
    done = run_limited(LOAD, *paths, megabytes=768)
    assert done.code == 0, done.err
    assert done.out.split() == ["refused"] * len(paths)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.0, float("nan")], [1.0, 1.0], "not a finite mean and std"),
        ([0.0, 0.0], [1.0, 0.0], "expected numbers above 0"),
        ([0j, 0j], [1.0, 1.0], "not a finite mean and std"),
    ],
)
def test_constants_of_input_normalisation_that_cannot_be_used_are_refused(tmp_path, mean, std, message):
    weights = models.create("compact").state_dict() | {"mean": torch.tensor(mean), "std": torch.tensor(std)}
    torch.save(OrderedDict(weights), tmp_path / "net.pt")
    with pytest.raises(WeightsError, match=message):
        models.load("compact", tmp_path / "net.pt")


# -- safetensors and cards --------------------------------------------------------------------------------------------


def header(content, data=b""):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 2**40) + b"{}", r"header has 1,099,511,627,776 bytes; expected at most"),
        (header(b"{" + ONE + b"," + ONE + b"}", bytes(4)), "the same key twice"),
        (header(b"{" + ONE + b"}", bytes(2)), "incomplete|offset|buffer"),
        (header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}), "incomplete|offset|buffer"),
        (header({"a": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}), "not a safetensors file"),
        (header(b'{"a":' + b"[" * 100_000), "nested too deeply|damaged"),
        (
            header({"a": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
            "holds torch.float8_e5m2",
        ),
        (header(b"{" + b" " * 100_000_000 + b"}"), r"header has 100,000,002 bytes; expected at most"),
    ],
)
def test_a_header_that_claims_what_the_file_does_not_hold_is_refused(tmp_path, content, message):
    (tmp_path / "net.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=message):
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
        with pytest.raises(WeightsError, match=r"not the file that net\.json describes.*Get both files again"):
            models.load("compact", with_card)


@pytest.mark.parametrize("content", ["{}", "[1]", '{"sha256": 3}'])
def test_another_json_file_beside_the_weights_is_no_card(with_card, content):
    with_card.with_suffix(".json").write_text(content)
    models.load("compact", with_card)


def test_a_damaged_card_is_refused(with_card):
    with_card.with_suffix(".json").write_text("[" * 100_000)
    with pytest.raises(WeightsError, match=r"net\.json is damaged.*Get it again, or remove it"):
        models.load("compact", with_card)


def test_a_shape_that_torch_cannot_represent_is_named_with_the_file(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "net.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(WeightsError, match=r"net\.safetensors.*shapes"):
        read(tmp_path / "net.safetensors")


def test_a_zip_file_without_its_start_is_named_with_the_file(tmp_path):
    torch.save(small_network().state_dict(), tmp_path / "net.pt")
    content = (tmp_path / "net.pt").read_bytes()
    (tmp_path / "net.pt").write_bytes(b"PK\x03\x04" + content[1000:])  # the directory has places before the start
    with pytest.raises(WeightsError, match=r"net\.pt.*damaged"):
        read(tmp_path / "net.pt")
