"""One small prepared file of the embedded network of digits, for all tests here."""

import pytest

import tribe
from tribe.core.backbone import Backbone
from watching import SOME, digits, digits_network


@pytest.fixture(scope="session")
def net():
    return Backbone(digits_network())


@pytest.fixture(scope="session")
def prepared(net):
    names, origin = tuple(map(str, range(10))), {"model": "compact", "dataset": "mnist"}
    return tribe.prepare(net, *digits(0, 300), class_names=names, method="bank", origin=origin, **SOME)


@pytest.fixture
def path(prepared, tmp_path):
    """The file itself."""
    prepared.save(tmp_path / "net.tribe")
    return tmp_path / "net.tribe"
