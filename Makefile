# `make demo` and `make test` are all that a fresh machine needs; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# Idle OpenMP threads spin for so long before they sleep; libgomp's own 300,000 rounds stall torch beside another
# busy process (15 steps of the demo on two cores: 10 s alone, over 120 s beside one; with this 10 s and 41 s).
export GOMP_SPINCOUNT ?= 10000
# Tests start hundreds of processes, which would each compile all that they import where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint docs bench coverage mutants clean

demo: .venv/.ready
	$(BIN)/castwise demo

# A process a core, of one thread each: most tests are too small for more.
test: .venv/.ready lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.ready
	$(BIN)/sphinx-build -W --keep-going -n -q docs docs/_build/html

# Lines and branches of amp/ and distributed/; fails under 95%.
coverage: .venv/.ready
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest --hypothesis-profile=quick tests/amp tests/cpu tests/cuda tests/distributed
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Faults planted in some modules of the core, one at a time: the tests must notice. Takes long; what was run before is not run again.
mutants: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutants.py

# About half an hour on two cores, best with nothing else running.
bench: .venv/.ready
	$(BIN)/castwise bench --full --out benchmarks/results
	$(BIN)/python benchmarks/doctor.py
	$(BIN)/python benchmarks/fidelity.py
	$(BIN)/python benchmarks/fault_finding.py
	$(BIN)/python examples/compare_schedules.py --write

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .nox build dist docs/_build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* mutants
	find . -name __pycache__ -prune -exec rm -rf {} +
