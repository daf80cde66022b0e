# `make help` lists the targets. Everything runs in .venv, which the first target that needs it builds.

PYTHON ?= python3
# Arguments for pip when it installs torch, such as an index with CPU-only wheels: make setup TORCH_ARGS="--index-url URL"
TORCH_ARGS ?=
# More arguments for `moefold train` and `moefold bench`: make train ARGS="run.steps=50 train.lr=1e-3"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UNIT := not parity and not e2e and not slow and not gpu
FAST := not slow and not gpu
CORE := mapping-of-8-ranks or rank-order or pipeline-layout
# Number of test files that run at the same time: make test JOBS=1
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
# One thread per process: the tests start many ranks on few cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Whole files, in the order of tests/conftest.py.
ABREAST := -n $(JOBS) --dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help setup train test check lint types rules unit e2e parity parity-core gpu kernel-table bench bench-gpu clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

test: $(STAMP) ## run the fast suite: every feature once; wide sweeps are in parity
	$(PYTEST) $(ABREAST) -m "$(FAST)"

check: lint types rules ## check style, types and house rules; what runs is tested by `make test`, or by `make unit` alone

lint: $(STAMP) ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## check types
	$(BIN)/mypy

rules: $(STAMP) ## check the budgets and the import rules
	$(PYTEST) -q tests/architecture

unit: $(STAMP) ## run the unit tests
	$(PYTEST) $(ABREAST) -q -m "$(UNIT)" --ignore=tests/architecture

e2e: $(STAMP) ## run the command line from start to end
	$(PYTEST) $(ABREAST) -m "e2e and $(FAST)"

parity: $(STAMP) ## run every parity test, the wide sweep and the long runs included
	$(PYTEST) $(ABREAST) -m "(parity or slow) and not gpu"

parity-core: $(STAMP) ## run a fixed part of the wide sweep: mappings and rank orders of 8 ranks, layouts of stages
	$(PYTEST) -n $(JOBS) -q -m slow -k "$(CORE)" tests/verify/test_parity.py

gpu: $(STAMP) ## run the tests that need a GPU
	$(PYTEST) -m gpu

kernel-table: $(STAMP) ## compile all Triton launches for Hopper and Blackwell, and store what they use; no GPU
	env -u TRITON_INTERPRET $(BIN)/python -m tests.gpu_static.kernel_table --write

bench: $(STAMP) ## measure the training step beside plain torch and transformers, with floors
	$(BIN)/moefold bench $(ARGS)

# Every large shape at 4,096 and 16,384 tokens, balanced and natural, and the sweeps: reports and bars in runs/bench-gpu.
GPU_SHAPES := mixtral-8x7b mixtral-8x22b qwen2-57b-a14b qwen3-30b-a3b deepseek-v3
GPU_BENCH := $(BIN)/moefold bench --force --device cuda --dtype bfloat16 --steps 20
bench-gpu: $(STAMP) ## the same of the large shapes on one GPU; reports and pictures in runs/bench-gpu
	mkdir -p runs/bench-gpu
	set -e; for shape in $(GPU_SHAPES); do for part in layer stack; do for tokens in 4096 16384; do \
		for routing in balanced natural; do name=runs/bench-gpu/$$shape-$$part-$$tokens-$$routing; \
		$(GPU_BENCH) --shape $$shape-$$part --tokens $$tokens --routing $$routing --json $$name.json --plot $$name.png; \
		done; done; done; done
	$(BIN)/moefold bench scaling --force --device cuda --dtype bfloat16 --shape qwen3-30b-a3b-layer --tokens 4096 8192 16384 \
		--json runs/bench-gpu/scaling.json --plot runs/bench-gpu/scaling.png

clean: ## remove .venv and every cache; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
