PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Your own clips for `make demo`: a folder of videos with .txt captions, or a dataset.json/.jsonl/.csv.
CLIPS ?=
# How many test files run at a time. Many start two to four processes of their own; each takes up to 2 GB.
TEST_JOBS ?= 2
# Whole files, because their tests share models and runs; in their order, because the quick ones at the end fill the gaps.
PYTEST := $(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: setup demo demo-data test test-all check clean

setup: $(STAMP)

# constraints.txt pins what the project is tested with; torch takes the build that pip offers on this machine
# (CUDA from PyPI on a GPU machine).
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, this is {sys.version}. Set PYTHON=, e.g. make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo-data: setup
	$(BIN)/python scripts/make_demo_data.py --output demo $(if $(CLIPS),--clips "$(CLIPS)")

demo: setup
	$(BIN)/python scripts/demo.py $(if $(CLIPS),--clips "$(CLIPS)")

test: setup
	$(PYTEST) -m "not slow"

test-all: setup
	$(PYTEST)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf demo outputs
