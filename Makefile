# The front door for every developer task. Nothing needs to be set up by hand before any of these.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON := .venv/bin/python
SETUP := scripts/setup.sh scripts/build_native.py pyproject.toml hatch_build.py

.PHONY: help run test test-all test-unit check bench native clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

run: .venv/installed native ## set up what is missing, then show an environment at work
	@$(PYTHON) scripts/demo.py

test: .venv/installed-dev native ## every test that proves the product, after installing what they need
	@scripts/setup_test_deps.sh
	@$(PYTHON) -m tests

test-all: .venv/installed-dev native ## `make test` and the soaks: kills, failpoints, histories, mixed load, machines
	@scripts/setup_test_deps.sh
	@scripts/setup_newest_python.sh || true
	@$(PYTHON) -m tests --all

test-unit: .venv/installed-dev ## the tests that need nothing but Python
	$(PYTHON) -m pytest tests/unit

check: .venv/installed-dev ## style, types, import rules, generated code, C warnings
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	$(PYTHON) scripts/generate_sync.py --check
	$(PYTHON) scripts/generate_cli_docs.py --check
	$(PYTHON) scripts/generate_api_docs.py --check
	$(PYTHON) scripts/generate_grpc.py --check
	$(PYTHON) scripts/generate_requirements.py --check
	$(PYTHON) scripts/generate_security.py --check
	$(PYTHON) scripts/build_native.py --check

bench: .venv/installed-bench native ## measure beside bubblewrap, runc and Docker, in one run
	@scripts/setup_test_deps.sh bench
	@$(PYTHON) -m benchmarks

native: .venv/installed ## compile the native program, if its sources changed
	@$(PYTHON) scripts/build_native.py

clean: ## remove everything that the other targets made
	rm -rf .venv .cache build dist src/skerry/_native .mypy_cache .ruff_cache .pytest_cache \
	    .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: $(SETUP)
	@scripts/setup.sh
	@touch $@

.venv/installed-dev: $(SETUP)
	@scripts/setup.sh dev
	@touch .venv/installed $@

.venv/installed-bench: $(SETUP)
	@scripts/setup.sh dev bench
	@touch .venv/installed .venv/installed-dev $@
