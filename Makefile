# Two commands do all the set-up on a fresh clone: `make run` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help run test test-slow check lint bench clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(INSTALLED)  ## the main job: real digits, corrupted in 15 ways, four methods, a chart (offline, about a minute)
	$(BIN)/tribe run

test: $(INSTALLED)  ## the test suite, without the slow tests
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 8 --dist worksteal

test-slow: $(INSTALLED)  ## the slow tests only, those on Ray among them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## ruff, mypy, tests

bench: $(INSTALLED)  ## speed and memory of the methods, as ratios to plain inference in one run
	$(BIN)/python -m benchmarks --model resnet20
	$(BIN)/python -m benchmarks --model wrn16_4 --batch 16

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
