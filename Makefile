# `make run` and `make test` also install everything they need on a fresh clone.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help run reproduce serve test extras test-serve test-hostile test-kernels test-all test-slow check lint bench docs pages screenshots site dist dist-test clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(INSTALLED)  ## run the main job: real digits, corrupted in 15 ways, seven methods, a chart (offline, three minutes)
	$(BIN)/tribe run

reproduce: $(INSTALLED)  ## reproduce a table of the paper: make reproduce TABLE=cifar10; without TABLE, list them
	$(BIN)/tribe reproduce $(TABLE)

# Compiled files of package and tests go beside the environment, also where Python is told to write none: without them
# every process that a test starts compiles the package, and every worker all tests.
test: $(INSTALLED)  ## run the tests, without the slow ones
	PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath $(VENV))/pycache $(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 8 --dist worksteal

test-slow: extras  ## run the slow tests only
	$(BIN)/python -m pytest -m slow

serve: $(INSTALLED)  ## serve the embedded digits network on http://127.0.0.1:8000; streams are kept in runs/streams
	$(BIN)/tribe serve --data runs/streams

# Everything optional that a test can use and that needs no GPU. torchvision comes without its compiled part: it is
# built for other builds of torch.
EXTRAS := dev,digits,docs,grpc,models,onnx,pandas,ray,ray-serve,redis,serve,serve-fast,video
# Programs that tests call, and their packages where these have other names.
PROGRAMS := redis-server haproxy wrk chromium curl openssl nodejs npm promtool:prometheus systemd-analyze:systemd

$(VENV)/.extras: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' 'tritonclient[all]' transformers triton openvino
	@touch $@

# ONNX Runtime for browsers, for the page "Try it" and an example. The site without it says that it is missing.
ORT_WEB := onnxruntime-web@1.30.0
NPM := build/npm/.$(ORT_WEB)

$(NPM):
	@rm -rf build/npm && mkdir -p build/npm
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix build/npm $(ORT_WEB) && touch $@ \
	|| echo "npm did not install $(ORT_WEB): the site comes without the page \"Try it\""

extras: $(VENV)/.extras  ## install every package and program that tests can use (programs: with apt-get, as root)
	@missing=; for each in $(PROGRAMS); do command -v $${each%%:*} > /dev/null || missing="$$missing $${each##*:}"; done; \
	if [ -n "$$missing" ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $$missing > /dev/null; fi
	@$(MAKE) --no-print-directory $(NPM)

test-serve: extras  ## run all tests of the server, the slow ones too
	$(BIN)/python -m pytest tests/serve tests/hostile

test-hostile: extras  ## attack a server in all ways at once, and kill workers: tests/hostile/conftest.py says how long
	$(BIN)/python -m pytest -m slow -s tests/hostile tests/serve/test_worker_kills.py

test-kernels: extras  ## run the GPU kernels in Triton's interpreter, and compile them for five GPUs
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/core/test_kernels.py tests/core/test_kernel_proof.py tests/core/test_compiled_kernels.py tests/core/test_fusion.py -m "not slow" -n auto --maxprocesses 8

test-all: extras  ## run everything that a machine without a GPU can run; no other skip is allowed
	TRIBE_SKIPS="needs a GPU|make test-kernels" $(MAKE) test
	TRIBE_SKIPS="needs a GPU" $(MAKE) test-kernels

lint: $(INSTALLED)  ## check style and types: ruff, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## lint, then test

bench: $(INSTALLED)  ## measure speed and memory of the methods, as ratios to plain inference
	$(BIN)/python -m benchmarks --model resnet20
	$(BIN)/python -m benchmarks --model wrn16_4 --batch 16

docs: pages site  ## generate the pages that are made from code and results, then build the site

pages: $(INSTALLED)  ## generate the pages and drawings that are made from code and results
	$(BIN)/python tests/test_layers.py
	$(BIN)/python -m website.methods > docs/methods.md.new && mv docs/methods.md.new docs/methods.md
	for study in time health guard networks; do $(BIN)/python -m studies.$$study.run --render; done
	$(BIN)/tribe reproduce document --runs results --out docs/reproduction.md

screenshots: extras  ## take the pictures of pages that the documents show: a server, a trial, chromium
	$(BIN)/python tests/screenshots.py

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

site: $(VENV)/.docs $(NPM)  ## build the site into build/site; every link is checked. To look at it: open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(INSTALLED)  ## build the wheel and the source archive into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

dist-test: dist  ## install the wheel alone with Python 3.11, 3.12 and 3.13, as far as they are found, and use it
	$(BIN)/python tests/wheels.py dist/*.whl python3.11 python3.12 python3.13

clean:  ## remove the environment and caches
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
