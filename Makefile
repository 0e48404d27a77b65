# Each target makes the virtual environment that it needs. The torch build is whichever one pip
# finds for the version in constraints.txt; to use another, install it into .venv beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# One thread per rank: the tests and the demo run several ranks on one machine.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: help install demo test lint clean

help:
	@echo "make demo   train a small language model on two ranks and watch it choose batch and layout"
	@echo "make test   run the tests"
	@echo "make lint   check style, types and the direction of imports"
	@echo "make clean  remove the virtual environment and caches (never runs/)"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once, some minutes)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/copus fit --config configs/demo.yaml

test: $(INSTALLED)
	@$(BIN)/python -m pytest

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
