# Two commands are all a newcomer needs: make demo, make test. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
WORKERS ?= 2
# Every arc of both machines must be taken by the ordinary tests.
ARCS := -p lifecycle.pytest_plugin --lifecycle-coverage --lifecycle-coverage-fail-under=100
# The folders that ordinary runs leave out are named, so that setting is replaced.
HEAVY := --override-ini addopts='--strict-markers --strict-config --import-mode=importlib'
# Floors 0 to 2 and the engine: every branch.
APART := 'lifecycle/metrics.py,lifecycle/pytest_plugin.py,lifecycle/__main__.py'
# Its own figures would be those of a tracer: it runs as it is.
TRAINING := tests/heavy/test_training_run.py
HELD := 'lifecycle/[a-z]*.py,lifecycle/log/*,lifecycle/engine/*,lifecycle/stores/*'

.PHONY: demo test test-all training deep check format live bench diagrams coverage clean help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## the main job on the embedded server, in under a minute
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## the ordinary tests: pip only, under 3 minutes on 2 cores
	$(BIN)/python -m pytest -q -n $(WORKERS) $(ARCS)

test-all: coverage training deep live  ## what needs more than pip: crashes, PostgreSQL, a browser, a real SGLang; and coverage

training: $(STAMP)  ## 20 steps over three dying workers behind the real router
	$(BIN)/python -m pytest $(TRAINING) -q $(HEAVY)

deep: $(STAMP)  ## the property tests of the whole with five times the examples
	LIFECYCLE_EXAMPLES=5 $(BIN)/python -m pytest -q -n $(WORKERS) --timeout 600 \
		tests/engine/test_whole.py tests/engine/test_collect_whole.py

live: $(STAMP)  ## the contract suite against a real SGLang and its router, on the CPU
	$(BIN)/python -m pytest -p tests.live.plugin tests/live tests/contract -q -p no:xdist $(HEAVY)

check: $(STAMP)  ## format, lint, types, floors, exports, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_floors.py tests/test_exports.py
	$(BIN)/lifecycle diagram --check diagrams/

format: $(STAMP)  ## mend what can be mended by itself
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format --quiet .

diagrams: $(STAMP)  ## draw the machines again after the table has changed
	$(BIN)/lifecycle diagram --write diagrams/

coverage: $(STAMP)  ## ordinary and heavy tests with branch coverage, held to its floors
	rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest -q -n $(WORKERS) --timeout 300
	$(BIN)/python -m coverage run -m pytest tests/heavy -q --ignore $(TRAINING) $(HEAVY)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --fail-under=90
	$(BIN)/python -m coverage report --fail-under=100 --include=$(HELD) --omit=$(APART)

bench: $(STAMP)  ## every row of the speed table, with its ratio
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) demo-out .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
