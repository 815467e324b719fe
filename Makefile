# Every target that needs Python makes .venv and installs what it needs, if that is not done or is out of date.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Asked to run, not only looked up: a launcher can be on the path for a Python that is not installed.
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
# -qq prints errors only.
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench docs clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train, kill, resume, compare: the proof in under 3 minutes
	$(BIN)/unbroken demo

test: $(STAMP) ## the tests, without the slow sweeps
	$(BIN)/python -m pytest

test-all: $(STAMP) ## the tests with the slow sweeps
	$(BIN)/python -m pytest -m ""

check: $(STAMP) ## lint, format and types; changes nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP) ## the speed table, peers side by side
	$(BIN)/python -m benchmarks

docs: $(STAMP) ## build the site into site/, and run every example in it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is in site/: open site/index.html, or serve it with $(BIN)/mkdocs serve."
	$(BIN)/python -m pytest -m "" tests/test_docs.py tests/test_site.py

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The builder is installed first, from the same pins, so that no part of the environment is left to chance.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing unbroken and what it needs into $(VENV) with $(PYTHON), which takes a minute or more ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e '.[dev,bench,docs]'
	@touch $@
