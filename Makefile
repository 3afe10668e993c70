# The commands of this repository.  Each sets up .venv first when it is missing or out of date.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
NAME ?=
RECIPE ?= quickstart
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Idle threads of numeric libraries must sleep, not spin: on few cores spinning stalls everything 10-100x.
export OMP_WAIT_POLICY := PASSIVE
# Nothing phones home.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export RAY_USAGE_STATS_ENABLED := 0
export MLFLOW_DISABLE_TELEMETRY := true
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help
help: ## What there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.PHONY: demo
demo: $(STAMP) ## Train the embedded model on a simulated spot fleet and write its report (RECIPE=name for another)
	@$(BIN)/spotlight train $(RECIPE)

.PHONY: setup
setup: $(STAMP) ## Make .venv and install everything

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here: install Python 3.11 or newer, or say make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), Spotlight needs 3.11 or newer: say make PYTHON=python3.11" >&2; exit 2; }
	@echo "Setting up $(VENV) (once, three to six minutes and 3 GB)..."
	@# Asked of pip, not of python: an interrupted venv has python and no pip.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "error: cannot make $(VENV): install Python's venv module (Debian: apt install python3-venv)" >&2; exit 2; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.PHONY: lint
lint: $(STAMP) ## Style, types and the directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: $(STAMP) ## Bring the code into the one style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: test
test: lint ## Lint, then every fast test, with coverage
	@# Two at a time, a file at one place: what a file sets up once stays set up once.
	$(BIN)/python -m pytest -m "not slow and not soak" -n 2 --dist loadfile --cov --cov-report=term --cov-fail-under=85

.PHONY: test-slow
test-slow: $(STAMP) ## The tests that take minutes or a browser
	$(BIN)/python -m pytest -m "slow and not soak" --ignore=tests/core/executor
	@# A process of its own for the file that runs Ray itself: Ray ends one whose former cluster's server has been
	@# silent for a minute.
	$(BIN)/python -m pytest -m "slow and not soak" tests/core/executor/test_live_fleet.py

.PHONY: test-soak
test-soak: $(STAMP) ## The tests that take minutes each: kills of everything, long random schedules
	@# Likewise: one process a file.
	@set -e; for file in $$(grep -rl "mark.soak" tests); do $(BIN)/python -m pytest -m soak $$file; done

.PHONY: bench
bench: $(STAMP) ## Measure against the baselines (NAME=denoise_steps_per_second for one)
	@$(BIN)/python -m tests.benchmarks.run $(NAME)

.PHONY: clean
clean: ## Remove caches and build leftovers; runs/ and .venv stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis htmlcov
	@rm -f .coverage .coverage.*
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
