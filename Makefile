# Every target sets itself up: a machine with Python is all it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo compare lint types test unit e2e clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	touch $@

setup: $(STAMP)

demo: setup
	$(BIN)/plait demo

compare: setup
	$(BIN)/plait demo --compare

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest tests

e2e: setup
	$(BIN)/python -m pytest e2e

test: lint types setup
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
