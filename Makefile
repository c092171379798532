# `make demo` and `make test` are all that a fresh machine needs; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# Idle OpenMP threads spin for so long before they sleep; libgomp's own 300,000 rounds stall torch beside another
# busy process (15 steps of the demo on two cores: 10 s alone, over 120 s beside one; with this 10 s and 41 s).
export GOMP_SPINCOUNT ?= 10000

.PHONY: demo test lint bench coverage mutants clean

demo: .venv/.ready
	$(BIN)/castwise demo

# A process a core, of one thread each: most tests are too small for more.
test: .venv/.ready lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Lines and branches of amp/ and distributed/; fails under 95%.
coverage: .venv/.ready
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest --hypothesis-profile=quick tests/amp tests/cpu tests/cuda tests/distributed
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Faults planted in the core, one at a time: the tests must notice. Takes long; what was run before is not run again.
mutants: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutants.py

bench: .venv/.ready
	$(BIN)/python benchmarks/autocast_overhead.py
	$(BIN)/python benchmarks/step_cost.py
	$(BIN)/python benchmarks/scale_out.py
	$(BIN)/python benchmarks/weight_cache.py
	$(BIN)/python benchmarks/policy_overhead.py
	$(BIN)/python benchmarks/monitor_cost.py
	$(BIN)/python -m pip install --quiet 'transformers>=4.40' && $(BIN)/python benchmarks/fault_finding.py

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .nox build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* mutants
	find . -name __pycache__ -prune -exec rm -rf {} +
