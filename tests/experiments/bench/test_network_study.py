"""The study of networks that others wrote plays a little, and its page agrees with its results."""

from benchmarks import network_study
from benchmarks.pages import rendered

from places import ROOT


def test_the_page_agrees_with_the_results():
    page = (ROOT / "docs" / "networks.md").read_text()
    assert rendered(page, "network_study", network_study.BLOCKS) == page, (
        "run: python -m benchmarks.network_study --render"
    )


def test_a_few_images_are_played_to_every_method(few_digits, tmp_path):
    options = ["--model", "compact", "--dataset", "live-mnist-c", "--data", str(few_digits), "--out", str(tmp_path)]
    options += ["--corruptions", "fog,stripe", "--every", "40", "--methods", "source,bn", "--device", "cpu"]
    network_study.main(options)
    text = network_study.errors(tmp_path)
    assert "**compact** (6 BatchNormReLU), 50 images a domain, batch 64, scenario `ptta`" in text
    assert "|  | clean | fog | stripe | mean of 2 corruptions |" in text
    assert [line.split(" | ")[0] for line in text.splitlines()[4:]] == ["| TEST", "| BN"]
