# `make demo` and `make test` are all that a fresh machine needs; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# Idle OpenMP threads sleep instead of spinning: beside another busy process on two cores the demo is 8 times faster.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint bench clean

demo: .venv/.ready
	$(BIN)/castwise demo

test: .venv/.ready lint
	$(BIN)/python -m pytest

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.ready
	$(BIN)/python benchmarks/autocast_overhead.py

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
