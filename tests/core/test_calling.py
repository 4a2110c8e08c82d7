"""An adapter is called as others call its network: with types, and inside a Hugging Face pipeline."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import tribe
from tribe.core.calling import LogitsOutput
from tribe.testing import images, small_network

X = images(1, 6, 0)[0]


class HuggingFace(nn.Module):
    """Takes images by name, and has a configuration, as models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = small_network(), SimpleNamespace(num_labels=4, id2label={0: "cat"})

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(pixel_values), loss=None)


def test_images_given_by_name_come_back_as_an_object_with_logits() -> None:
    by_name, by_position = tribe.adapt(HuggingFace()), tribe.adapt(HuggingFace())
    by_position.load_state_dict(by_name.state_dict())
    output, logits = by_name(pixel_values=X), by_position(X)
    assert isinstance(output, LogitsOutput)
    assert torch.equal(output.logits, logits)
    assert torch.equal(output["logits"], logits)
    assert by_name.digest() == by_position.digest()


@pytest.mark.parametrize("give", [lambda model: model(), lambda model: model(X, pixel_values=X)])
def test_images_are_given_once(give) -> None:
    model = tribe.adapt(HuggingFace())
    before = model.digest()
    with pytest.raises(TypeError, match="pixel_values"):
        give(model)
    assert model.digest() == before


def test_an_adapter_has_the_device_precision_and_configuration_of_its_network() -> None:
    net = HuggingFace().to(torch.bfloat16)
    for model in (tribe.adapt(net), tribe.adapt(nn.Sequential(tribe.Normalize([0.5] * 3, [0.5] * 3), net))):
        assert (model.device, model.dtype) == (torch.device("cpu"), torch.bfloat16)
        assert model.config.id2label == {0: "cat"}
    assert tribe.adapt(small_network()).config is None


TYPED = """
from typing import assert_type
import torch
import tribe
from tribe.core.calling import LogitsOutput

model = tribe.adapt(torch.nn.Identity())
x = torch.rand(2, 3)
assert_type(model(x), torch.Tensor)
assert_type(model(x, order=x), torch.Tensor)
assert_type(model(pixel_values=x).logits, torch.Tensor)
assert_type(model(pixel_values=x), LogitsOutput)
assert_type(model.predict(x), torch.Tensor)
model("images")  # the error that the test expects
"""


@pytest.mark.slow
def test_mypy_knows_what_an_adapter_takes_and_returns(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    source = Path(tribe.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), "typed.py"],
        cwd=tmp_path, env={"MYPYPATH": str(source), "PATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if "error" in line]
    assert [line.partition(":")[2].partition(":")[0] for line in lines if line.startswith("typed.py")] == ["14"], run
