# Everything that a person or CI runs. Needs python3 (3.10 or newer) and make; the rest is made.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
HF_STAMP := $(VENV)/.stamp-hf

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-hf check clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv with the package (editable) and the development tools

demo: $(STAMP)  ## train a small MoE with and without a fault, and say what it cost
	$(BIN)/moc demo

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest

test-hf: $(HF_STAMP)  ## run the tests that need transformers (the extra `hf`)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/hf

check: $(STAMP)  ## format, lint, types, import contracts, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_docs.py

clean:  ## remove what tools left, but not .venv
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist

# A .venv that is there without a stamp, or broken off half-way, is completed and not destroyed:
# `python -m venv` over a folder only adds what is missing. pip takes what it is configured to.
$(STAMP): pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or two, about 1.2 GB"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q src
	touch $@

$(HF_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,hf]'
	touch $@
