# make demo      train a GPT-2 inside 40 % of its memory, beside plain PyTorch
# make test      lint, types, import contracts, tests
# make test-all  the same, the wide sweeps, the native core under sanitizers and 40 mutants of the sources
# make sanitize  the native core with its own checks: addresses, undefined behaviour, and threads for the counter
# make mutation  MUTANTS=200 SEED=1: more of them; what no test notices goes to build/mutation.md
# make gpu       all that needs an accelerator: tests, a sweep, the comparison at real sizes, the demo; see docs/devices.md
# make docs      the documentation as a site, its examples executed, in docs/_build/html

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_TOOLS := sphinx furo myst-parser
TEST_TOOLS := pytest pytest-timeout pytest-xdist hypothesis ruff mypy import-linter build
NATIVE_TOOLS := cmake ninja nanobind
OUTPUT ?= demo
MUTANTS ?= 40
SEED ?= 0

# Tests of one file share what they captured, so files are dealt out whole, in the order of their names: dealt out by the
# number of their tests, as is usual, files of few long ones would come last, to one worker alone.
WORKERS ?= 2
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Measured programs are timed on the cores there are, and nothing is fetched from model hubs.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export MPLBACKEND := Agg

# Where Python is told not to write down what it compiled, every process that tests start compiles all sources, and pytest
# rewrites the assertions of all files in every worker.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all sanitize mutation lint docs bench gpu clean

$(STAMP): pyproject.toml constraints.txt src/lowtide/version.py $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all]" $(TEST_TOOLS)
	touch $@

demo: $(STAMP)
	$(BIN)/lowtide demo --output $(OUTPUT)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(TESTS) -m "not slow"

test-all: lint
	$(TESTS)
	$(MAKE) sanitize
	$(MAKE) mutation

# The package again in build/sanitized, with an extension that ends the process where it goes wrong. The interpreter itself is
# built without, so the library comes first in it, and what it leaves behind at its end is not looked at. Exceptions that cross
# the extension need their own library loaded beside it.
SANITIZED := build/sanitized
CONFIGURE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python)
CHECKED := tests/solve/test_timeline.py tests/solve/test_blocks.py tests/solve/test_greedy.py tests/solve/test_compact.py \
	tests/solve/test_recombine.py tests/solve/test_bounds.py tests/solve/test_steps.py tests/solve/test_moving.py \
	tests/solve/test_pofo.py tests/solve/test_memory_paths.py tests/place/test_place.py tests/memory/test_cpu_allocator.py \
	tests/memory/test_arena.py tests/capture/test_unchanged.py

sanitize: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(NATIVE_TOOLS)
	$(CONFIGURE) -DLOWTIDE_SANITIZE=thread -S native -B build/threads
	$(BIN)/cmake --build build/threads --target counter_test
	build/threads/counter_test
	$(CONFIGURE) -DLOWTIDE_SANITIZE=address,undefined -S native -B build/checked
	$(BIN)/cmake --build build/checked --target _native --parallel $(WORKERS)
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -R src/lowtide $(SANITIZED)
	rm -f $(SANITIZED)/lowtide/_native.*.so
	$(BIN)/cmake --install build/checked --prefix $(SANITIZED)
	PYTHONPATH=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 OMP_NUM_THREADS=1 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -q -m "not slow" -p no:cacheprovider -o timeout=0 $(CHECKED)

# A suite that notices less than three of four mutants has gone blind somewhere.
mutation: $(STAMP)
	mkdir -p build
	$(BIN)/python -m tests.mutation --mutants $(MUTANTS) --seed $(SEED) --workers $(WORKERS) --least 0.75 --output build/mutation.md

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(DOCS_TOOLS)
	$(BIN)/python docs/execute.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --conf-dir docs --builder html . docs/_build/html

bench: $(STAMP)
	$(BIN)/python -m benchmarks.step_time

gpu: $(STAMP)
	@$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf $(VENV) $(OUTPUT) build docs/_build src/lowtide/_native.*.so .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
