# `make help` lists the targets. Everything runs in .venv, which the first target that needs it builds.

PYTHON ?= python3
# Words for pip when it installs torch, such as an index with CPU-only wheels: make setup TORCH_ARGS="--index-url URL"
TORCH_ARGS ?=
# Further words for `moefold train` and `moefold bench`: make train ARGS="run.steps=50 train.lr=1e-3"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UNIT := not parity and not e2e and not slow and not gpu
FAST := not slow and not gpu
# One thread per process: the tests start many ranks on few cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help setup train test check lint types rules unit e2e parity gpu bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv with everything that the other targets need

# Torch goes first and by itself, so that TORCH_ARGS say where it alone comes from.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "moefold needs Python 3.11 or newer; say which: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH_ARGS) 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install -q -e '.[dev,tensorboard]'
	@touch $@

train: $(STAMP) ## train the quickstart: eight ranks, attention and experts folded over them
	$(BIN)/moefold train recipes/quickstart.toml $(ARGS)

test: $(STAMP) ## run the whole fast suite: unit, parity and end to end
	$(PYTEST) -m "$(FAST)"

check: lint types rules ## check style, types and house rules; what runs is tested by `make test`, or by `make unit` alone

lint: $(STAMP) ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## check types
	$(BIN)/mypy

rules: $(STAMP) ## check the budgets and the import rules
	$(PYTEST) -q tests/frame

unit: $(STAMP) ## run the unit tests
	$(PYTEST) -q -m "$(UNIT)" --ignore=tests/frame

e2e: $(STAMP) ## run the command line from start to end
	$(PYTEST) -m "e2e and $(FAST)"

parity: $(STAMP) ## run every parity test, the wide sweep and the long runs included
	$(PYTEST) -m "(parity or slow) and not gpu"

gpu: $(STAMP) ## run the tests that need a GPU
	$(PYTEST) -m gpu

bench: $(STAMP) ## measure the training step against a plain implementation
	$(BIN)/moefold bench $(ARGS)

clean: ## remove .venv and every cache; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
