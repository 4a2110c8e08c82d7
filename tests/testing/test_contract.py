"""Every registered component against the contract. Never edited for a new one."""

import pytest

import layouts
from tribe import filters, methods, norms
from tribe.data import datasets, scenarios
from tribe.testing import DATASET_CHECKS, FILTER_CHECKS, METHOD_CHECKS, NORM_CHECKS, SCENARIO_CHECKS, ready, small

# Learning, time, and probabilities; test_pipeline.py composes every method with a filter.
FILTERED = "source+time", "tribe+time", "lame+cofa"
RARE = "tribe+rare", "tent+rare", "rotta+rare+guard", "cotta+rare+time"  # tests/methods/test_rare.py has every method


@pytest.mark.parametrize("check", METHOD_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [*methods.names(), *methods.variants(), *FILTERED, *RARE])
def test_method(name, check):
    check(small(ready(name)))


@pytest.mark.parametrize("check", NORM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", norms.names())
def test_norm(name, check):
    check(norms.create(name))


@pytest.mark.parametrize("check", FILTER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [*filters.names(), "time within batch"])
def test_filter(name, check):
    check(filters.create("time", within="batch") if name == "time within batch" else filters.create(name))


@pytest.mark.parametrize("check", METHOD_CHECKS, ids=lambda check: check.__name__)
def test_method_with_packed_statistics(check):
    check(ready("tribe", class_stats="packed"))


@pytest.mark.parametrize("check", SCENARIO_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", scenarios.names())
def test_scenario(name, check):
    check(scenarios.create(name))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return layouts.write(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("check", DATASET_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", datasets.names())
def test_dataset(name, check, published):
    check(layouts.made(name, published))
