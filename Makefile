# make demo      train a GPT-2 inside 40 % of its memory, beside plain PyTorch
# make test      lint, types, import contracts, tests
# make test-all  the same and the wide sweeps

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_TOOLS := pytest pytest-timeout hypothesis ruff mypy import-linter
OUTPUT ?= demo

# Measured programs are timed on the cores there are, and nothing is fetched from model hubs.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export MPLBACKEND := Agg

.PHONY: demo test test-all lint bench clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[cli,plot,hf,lightning,milp]" $(TEST_TOOLS)
	touch $@

demo: $(STAMP)
	$(BIN)/lowtide demo --output $(OUTPUT)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

bench: $(STAMP)
	$(BIN)/python -m benchmarks.step_time

clean:
	rm -rf $(VENV) $(OUTPUT) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
