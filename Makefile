# One command each, on a machine that has only Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(VENV)/.lab
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2

.PHONY: help setup test test-slow lint typecheck docs demo clean
help:            ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */	/'

setup: $(STAMP)  ## the environment in .venv, for developers
$(LAB): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedlaw needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 2; }
	@echo "setting up $(VENV): torch and the laboratory, a minute or two"
	$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[lab]'
	@touch $@

$(STAMP): $(LAB)
	@echo "setting up $(VENV): what the tests need, a minute or two more"
	@$(PIP) --editable '.[dev]'
	@touch $@

lint: $(STAMP)   ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP) ## mypy --strict
	$(BIN)/mypy

test: lint typecheck ## ruff, mypy and the fast tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-slow: $(STAMP) ## the tests that take minutes
	$(BIN)/python -m pytest -q -m slow --durations=10 -rs -s

docs: $(STAMP)   ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

demo: $(LAB)     ## FedAvg, Krum and FedLAW side by side under attack
	$(BIN)/fedlaw demo

clean:           ## remove what make made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
