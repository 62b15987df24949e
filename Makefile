PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Your own clips for `make demo`: a folder of videos with .txt captions, or a dataset.json/.jsonl/.csv.
CLIPS ?=

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
	$(BIN)/python -m pytest -q -m "not slow"

test-all: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf demo outputs
