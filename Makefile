# `make help` lists the targets. Everything runs in .venv, which the first target that needs it builds.

PYTHON ?= python3
# Arguments for pip when it installs torch, such as an index with CPU-only wheels: make setup TORCH_ARGS="--index-url URL"
TORCH_ARGS ?=
# More arguments for `moefold train`, the benchmark and the GPU stages: make train ARGS="run.steps=50 train.lr=1e-3"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PLUGIN := $(VENV)/.plugin
# The GPU targets run without .venv where a Python has what moefold needs: make gpu READY= PY=python3
READY ?= $(STAMP)
PY ?= $(BIN)/python
UNIT := not parity and not e2e and not slow and not gpu
FAST := not slow and not gpu
CORE := mapping-of-8-ranks or rank-order or pipeline-layout or model- or dropping-dispatcher
# Number of test files that run at the same time: make test JOBS=1. Tests wait for processes that they start, so that
# one file more than the machine has cores keeps the cores busy.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# One thread per process: the tests start many ranks on few cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Whole files, in the order of tests/conftest.py.
ABREAST := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Each test process would compile all modules again. Empty means: not set.
export PYTHONDONTWRITEBYTECODE :=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help setup train test test-slow check lint types rules house golden unit e2e parity parity-core gpu kernel-table bench bench-gpu \
	bench-gpu-sweep recipes release-check docs docs-serve pictures clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv with everything that the other targets need

# Torch goes first and by itself, so that TORCH_ARGS say where it alone comes from.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "moefold needs Python 3.11 or newer; say which: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH_ARGS) 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install -q -e '.[dev,tensorboard]'
	@touch $@

# The packages whose parts the tests name; they are no part of what moefold installs. No network is asked.
$(PLUGIN): tests/plugin/pyproject.toml experiments/pyproject.toml $(STAMP)
	$(BIN)/python -m pip install -q --no-index --no-deps --no-build-isolation -e tests/plugin -e experiments
	@touch $@

train: $(STAMP) ## train the quickstart: eight ranks, attention and experts folded over them
	$(BIN)/moefold train recipes/quickstart.toml $(ARGS)

test: $(PLUGIN) ## run the fast suite: every feature once; wide sweeps are in parity, architecture rules in check
	$(PYTEST) $(ABREAST) -m "$(FAST)" --ignore=tests/architecture

check: lint types rules house golden ## check style, types, house rules and recorded facts; what runs is tested by `make test`, or by `make unit` alone

lint: $(STAMP) ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(PLUGIN) ## check types
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases --follow-imports=silent tools

rules: $(PLUGIN) ## check the budgets and the import rules
	$(PYTEST) -q tests/architecture

house: $(STAMP) ## count the debts of the structure: none may rise above tools/house.json (ARGS=--write: store falls)
	$(BIN)/python tools/house.py $(ARGS)

golden: $(STAMP) ## compare the facts of every recipe with tools/golden.jsonl (ARGS=--full: losses and names too)
	$(BIN)/python tools/golden.py $(ARGS)

unit: $(PLUGIN) ## run the unit tests
	$(PYTEST) $(ABREAST) -q -m "$(UNIT)" --ignore=tests/architecture

e2e: $(PLUGIN) ## run the command line from start to end
	$(PYTEST) $(ABREAST) -m "e2e and $(FAST)"

parity: $(PLUGIN) ## run every parity test, the wide sweep and the long runs included
	$(PYTEST) $(ABREAST) -m "(parity or slow) and not gpu"

# Every n-th of the sorted test files, so that each part has files of all folders.
SHARD ?= 1/1
test-slow: $(PLUGIN) ## run the slow tests, or the slow tests of every n-th file from the k-th on: make test-slow SHARD=2/20
	@files=$$(find tests experiments/tests -name 'test_*.py' | LC_ALL=C sort | awk -v shard='$(SHARD)' 'BEGIN { \
		split(shard, part, "/"); k = part[1]; n = part[2]; \
		if (shard !~ /^[0-9]+\/[0-9]+$$/ || k < 1 || k > n + 0) { \
			print "SHARD=" shard " is not k/n with 1 <= k <= n: make test-slow SHARD=2/20" > "/dev/stderr"; exit 2 } } \
		NR % n == k % n') && $(PYTEST) $(ABREAST) -m "slow and not gpu" $(ARGS) $$files

parity-core: $(STAMP) ## run a fixed part of the wide sweep: mappings and rank orders of 8 ranks, layouts of stages, kinds of models, dropping
	MOEFOLD_TESTS_ASK_TORCH=1 $(PYTEST) -n $(JOBS) -q -m slow -k "$(CORE)" tests/verify/test_parity.py

# Each ends within 10 minutes and goes on with the next call where it stopped, see docs/gpu.md.
HAS_PY = @command -v $(PY) > /dev/null \
	|| { echo "no Python at PY=$(PY); name one that has torch: make $@ READY= PY=python3; or build .venv: make setup" >&2; \
	exit 2; }
HALF_HOUR = $(PY) -m benchmarks.gpu_half_hour
gpu: $(READY) ## prove and measure on one GPU, the most valuable first, 10 minutes a call (READY= PY=python3: no .venv)
	$(HAS_PY)
	$(HALF_HOUR) proof $(ARGS)

kernel-table: $(STAMP) ## compile all Triton launches for Hopper and Blackwell, and store what they use; no GPU
	env -u TRITON_INTERPRET $(BIN)/python -m tests.gpu_static.kernel_table --write

bench: $(STAMP) ## measure the training step beside plain torch and transformers, with floors
	$(BIN)/python -m benchmarks.race.step $(ARGS)

bench-gpu: $(READY) ## compare two large shapes with other implementations on one GPU, within 10 minutes
	$(HAS_PY)
	$(HALF_HOUR) bench $(ARGS)

bench-gpu-sweep: $(READY) ## compare every large shape on one GPU, 10 minutes a call
	$(HAS_PY)
	$(HALF_HOUR) sweep $(ARGS)

# The site needs the packages of the extra `docs`, which its first build installs; building it needs no network.
# The variable silences the advice of mkdocs-material to try its successor.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
HAS_MKDOCS = @$(BIN)/python -c 'import material, mkdocstrings' 2> /dev/null || $(BIN)/python -m pip install -q -e '.[docs]'
docs: $(STAMP) ## build the documentation site into build/docs
	$(HAS_MKDOCS)
	$(MKDOCS) build --strict --clean

docs-serve: $(STAMP) ## show the site at http://127.0.0.1:8000, rebuilt when a page changes (ARGS="-a ADDRESS:PORT")
	$(HAS_MKDOCS)
	$(MKDOCS) serve $(ARGS)

recipes: $(STAMP) ## plan the recipes for 8 to 256 GPUs again, and write their table in docs/recipes.md (ARGS="olmoe": some)
	$(BIN)/python -m benchmarks.planned_recipes $(ARGS)

# Some need Chromium; the runs that they show are trained once, some minutes on a few cores.
pictures: $(STAMP) ## draw the pictures of README and the pages again
	$(BIN)/python docs/site/diagrams.py
	$(BIN)/python -m tests.docs.draw_pictures
	$(BIN)/python -m tests.board.draw_pictures

release-check: $(STAMP) ## check what a release needs: version, sdist, wheel, the quickstart from the installed wheel
	$(BIN)/python -m tests.release.check $(TORCH_ARGS)

clean: ## remove .venv and every cache; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
