# Everything a fresh clone needs: Python >= 3.11 with pip, and make. `make help` lists the commands.
#
# The first command makes .venv and installs the package with all extras; a later one installs nothing until
# pyproject.toml or constraints.txt changes. Another interpreter: `make demo PYTHON=python3.12`.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

# Some systems package Python without ensurepip; its pip then installs another one into .venv.
MAKE_VENV_WITHOUT_ENSUREPIP = { $(PYTHON) -m venv --without-pip .venv && \
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check pip; }

.PHONY: help demo test check format bench clean
.DEFAULT_GOAL := help

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s%s\n", $$1, $$2}' Makefile

demo: $(INSTALLED) ## train on real data under a hard memory cap: the whole mini-batch dies, micro-batches fit
	$(BIN)/anybatch demo

test: $(INSTALLED) ## run the tests
	$(BIN)/pytest -n logical --maxprocesses 4

check: $(INSTALLED) ## formatting, lint, types and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## format the code and fix what the linter can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(INSTALLED) ## measure every claim that has a benchmark
	@set -e; for claim in benchmarks/*/main.py; do echo "== $$claim"; $(BIN)/python $$claim; done

clean: ## remove .venv and what the tools leave behind
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "anybatch needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`." \
		"Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Setting up .venv (once; a few minutes, mostly torch)"
	@$(PYTHON) -m venv .venv >/dev/null 2>&1 || $(MAKE_VENV_WITHOUT_ENSUREPIP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check]'
	@touch $@
