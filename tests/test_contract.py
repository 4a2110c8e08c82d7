"""Every registered method and norm against the contract. Never edited for a new component."""

import pytest

from tribe import methods, norms, scenarios
from tribe.testing import CLASSES, METHOD_CHECKS, NORM_CHECKS, SCENARIO_CHECKS


@pytest.mark.parametrize("check", METHOD_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", methods.names())
def test_method(name, check):
    check(methods.create(name, classes=CLASSES))


@pytest.mark.parametrize("check", NORM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", norms.names())
def test_norm(name, check):
    check(norms.create(name))


@pytest.mark.parametrize("check", SCENARIO_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", scenarios.names())
def test_scenario(name, check):
    check(scenarios.create(name))
