"""How the page "Try it" is built, where all it needs is there, and where it is not."""

import pytest

pytest.importorskip("mkdocs", reason="needs the extra docs: pip install '.[docs]'")

import numpy as np

from tribe import datasets
from website import hooks, playing


def test_a_site_without_the_runtime_says_so_and_has_no_files(monkeypatch, tmp_path):
    monkeypatch.setattr(playing, "RUNTIME", tmp_path)
    assert playing.files() == {}
    assert "onnxruntime-web" in playing.markdown()
    assert "<script" not in playing.markdown()


def test_the_digits_are_of_the_test_set_with_their_labels():
    packed = np.frombuffer(playing.digits(), np.uint8)
    labels, pixels = packed[:2000], packed[2000:].reshape(2000, 28, 28)
    mnist = datasets.create("mnist")
    index = mnist.labels("clean").new_tensor([0, 5, 9995])
    assert labels[[0, 1, 1999]].tolist() == mnist.labels("clean")[index].tolist()
    assert (pixels[[0, 1, 1999]] == (255 * mnist.images("clean", index)[:, 0]).round().numpy()).all()
    assert np.bincount(labels).min() > 150


def test_the_page_has_a_place_for_its_part():
    assert hooks.PLAY in (playing.ROOT / "docs/play.md").read_text()
