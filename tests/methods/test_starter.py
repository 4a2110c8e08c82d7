"""The methods to start from: the example and the tutorial keep the contract."""

import re
import runpy

import pytest

from places import ROOT
from tribe.testing import check_method

TUTORIAL = ROOT / "docs/tutorials/add-a-method.md"
EXAMPLE = ROOT / "examples/my_method.py"


pytestmark = pytest.mark.usefixtures("registries")


def blocks():
    return dict(re.findall(r'```python title="(\w+)\.py"\n(.*?)```', TUTORIAL.read_text(), re.DOTALL))


def test_the_example_keeps_the_contract():
    check_method(runpy.run_path(str(EXAMPLE))["Confident"](classes=4))


def test_the_tutorial_shows_the_example():
    assert blocks()["my_method"].strip() in EXAMPLE.read_text()


def test_the_method_of_the_tutorial_keeps_the_contract(tmp_path):
    (tmp_path / "follow.py").write_text(blocks()["follow"])
    check_method(runpy.run_path(str(tmp_path / "follow.py"))["Follow"](classes=4))
