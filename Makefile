# Needs Python >= 3.10 and make; everything else is set up on the first call.
#
#   make demo                 PYTHON=python3.12 make test
#
# TORCH says which build of PyTorch is installed, first and alone. The version is the one pinned in
# constraints.txt; pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) say where a CPU build lies.

find_python = for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done
PYTHON ?= $(shell $(find_python))
TORCH ?= $(shell grep '^torch==' constraints.txt)
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
# What is never imported need not be compiled: it takes pip a minute and more.
PIP_INSTALL := -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
SOURCES := $(wildcard src tests benchmarks experiments examples docs)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all lint format types short long pytest rounding versions surface release browser bench zoo docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

venv: .venv/.stamp ## set up .venv: torch, everything the tests and demo need, this package
	@echo ".venv is ready"

# scikit-matter, which the tests compare with, asks for an older scikit-learn than the rest: it comes alone.
.venv/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python >= 3.10 found. Install one, or name it: make PYTHON=/path/to/python3 venv"; exit 1; }
	@echo "Setting up .venv with $(PYTHON) (once, a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "$(PYTHON) cannot make virtual environments (Debian and Ubuntu: install python3-venv)."; exit 1; }
	@echo "  1/2 $(TORCH)"
	@$(BIN)/python $(PIP_INSTALL) "$(TORCH)"
	@echo "  2/2 rigidities and its tools"
	@$(BIN)/python $(PIP_INSTALL) -e ".[dev]"
	@! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(BIN)/python $(PIP_INSTALL) --no-deps skmatter
	@touch $@

demo: .venv/.stamp ## error bars on two small data sets: a table and two figures, in seconds
	@$(BIN)/rigidities demo $(ARGS)

test: lint types short ## lint, format check, types, and the tests that guard every room: minutes

test-all: long ## the tests that `make test` leaves to it; CI runs both

lint: .venv/.stamp ## ruff: rules and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: .venv/.stamp ## let ruff fix and format the sources
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: .venv/.stamp ## mypy, strict, on src
	$(BIN)/mypy

# One thread a worker: two workers with torch's default threads would fight over the cores. Compiled
# modules are kept, whatever the shell says: many tests start processes that import torch.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

short: .venv/.stamp
	$(PYTEST) --part short $(ARGS)

long: .venv/.stamp browser
	$(PYTEST) --part long $(ARGS)

pytest: .venv/.stamp browser ## all tests and doctests, or some: ARGS="-k name"
	$(PYTEST) $(ARGS)

# A seed's net differs between processors and numbers of threads; so it does here. Slow kernels, another
# order of summation, and other seeds stand in for the machines that are not at hand.
rounding: .venv/.stamp ## the tests under other roundings: threads, kernels, seeds
	OMP_NUM_THREADS=2 MPLBACKEND=Agg $(BIN)/python -m pytest $(ARGS)
	ATEN_CPU_CAPABILITY=default $(MAKE) pytest
	ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE $(MAKE) pytest
	$(MAKE) pytest ARGS='--moved-seeds 1 $(ARGS)'

# TORCHES="2.4.0 2.15.0" PYTHONS=python3.12 choose; KEEP=1 keeps the environments.
versions: ## the tests, and frozen modules compiled and exported, on the oldest, 2.11, pinned and newest PyTorch
	@WORKERS=$(WORKERS) sh tests/support/versions.sh $(ARGS)

release: .venv/.stamp ## build wheel and source archive into dist/, and try both (ARGS go to the archive's tests)
	@TORCH="$(TORCH)" WORKERS=$(WORKERS) sh tests/support/release.sh $(ARGS)

surface: .venv/.stamp ## write the public surface into docs/reference/surface.txt, which a test compares
	$(BIN)/python -m tests.support.surface > docs/reference/surface.txt
	git diff --stat docs/reference/surface.txt

# The tests of the HTML report and of the site drive it; without one they are left out, with a word at the end.
browser: ## find Chromium or, as root on Debian, install it
	@sh tests/support/get_browser.sh

bench: .venv/.stamp .venv-rivals/.stamp .venv-metatrain/.stamp ## speed and memory against the bare model and the rivals
	$(BIN)/python -m benchmarks $(ARGS)

# laplace-torch pulls torchvision, whose wheel may not fit the installed build of torch; without it, it imports.
.venv-rivals/.stamp: benchmarks/rivals/laplace-requirements.txt constraints.txt | .venv/.stamp
	@echo "Setting up .venv-rivals (once, a minute or two) ..."
	@test -x .venv-rivals/bin/python || $(BIN)/python -m venv .venv-rivals
	@.venv-rivals/bin/python $(PIP_INSTALL) "$(TORCH)"
	@.venv-rivals/bin/python $(PIP_INSTALL) -r benchmarks/rivals/laplace-requirements.txt
	@.venv-rivals/bin/python -m pip uninstall -qq --yes torchvision
	@touch $@

# metatrain fits the pins too, but brings some thirty packages.
.venv-metatrain/.stamp: benchmarks/rivals/metatrain-requirements.txt constraints.txt | .venv/.stamp
	@echo "Setting up .venv-metatrain (once, a minute or two) ..."
	@test -x .venv-metatrain/bin/python || $(BIN)/python -m venv .venv-metatrain
	@.venv-metatrain/bin/python $(PIP_INSTALL) "$(TORCH)"
	@.venv-metatrain/bin/python $(PIP_INSTALL) -r benchmarks/rivals/metatrain-requirements.txt
	@touch $@

zoo: .zoo-venv/.stamp ## models of other libraries against brute force, in minutes; writes the table of docs/models.md
	OMP_NUM_THREADS=1 MPLBACKEND=Agg .zoo-venv/bin/python -m pytest tests/foreign $(ARGS)

# All by name and without dependencies: some of these libraries pin others to versions that do not fit together.
.zoo-venv/.stamp: tests/foreign/requirements.txt pyproject.toml constraints.txt
	@echo "Setting up .zoo-venv (once, some minutes) ..."
	@test -x .zoo-venv/bin/python || $(PYTHON) -m venv .zoo-venv
	@.zoo-venv/bin/python $(PIP_INSTALL) "$(TORCH)"
	@.zoo-venv/bin/python $(PIP_INSTALL) --no-deps -r tests/foreign/requirements.txt
	@.zoo-venv/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

docs: .venv/.stamp ## build the documentation into site/, to be opened from disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html"

clean: ## remove environments, caches and what the commands wrote
	rm -rf .venv .venv-rivals .venv-metatrain .venv-versions .venv-release .zoo-venv .mypy_cache .ruff_cache .pytest_cache .hypothesis site dist build rigidities-demo experiments/results-quick
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
