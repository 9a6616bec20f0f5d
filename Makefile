# The commands that people, CI and the container images share. `make serve` and `make test` need Python 3.11+ and pip only.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Extra arguments for pip, for example a private index.
PIP_EXTRA ?=
# Whose clients choose their policy: for your own machine.
CONFIG ?= examples/policies/local.yaml
DOCS ?=
ARGS ?=
# How many processes run tests. Each wants a core and up to 3 GB of memory.
WORKERS ?= 2
# A file's tests stay together, as they share fixtures; tests/conftest.py says in which order the files are taken.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help install install-dev models serve demo check test test-fast format clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-14s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "promptsluice needs Python 3.11 or newer; set PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: a later resolver run must not pull in another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_EXTRA) -c constraints.txt torch
	$(BIN)/python -m pip install -q $(PIP_EXTRA) -c constraints.txt -e '.[client]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q $(PIP_EXTRA) -c constraints.txt -e '.[client,dev]'
	@touch $@

install: $(VENV)/.installed ## Create the virtual environment with everything that serving needs

install-dev: $(VENV)/.installed-dev ## The same, with the tools for tests

models: install ## Fetch the default chat model and embedder into the cache
	$(BIN)/promptsluice models pull smollm2-135m-instruct
	$(BIN)/promptsluice models pull all-minilm-l6-v2

serve: models ## Start the gateway on the embedded model (CONFIG=policies.yaml for your own policy file)
	$(BIN)/promptsluice serve --config $(CONFIG) $(ARGS)

demo: models ## Ask ten questions under three policies and print the table (DOCS=folder of Markdown)
	$(BIN)/promptsluice demo $(if $(DOCS),--docs $(DOCS)) $(ARGS)

check: install-dev ## Lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: check models ## Lint, types and the whole test suite
	$(PYTEST) $(ARGS)

test-fast: install-dev ## Only the tests that take less than half a second each
	$(PYTEST) -m 'not slow' $(ARGS)

format: install-dev ## Write the code in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
