# `make demo` and `make test` are all that a fresh machine needs; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# Idle OpenMP threads spin for so long before they sleep; libgomp's own 300,000 rounds stall torch beside another
# busy process (15 steps of the demo on two cores: 10 s alone, over 120 s beside one; with this 10 s and 41 s).
export GOMP_SPINCOUNT ?= 10000
# What is imported is compiled once, at its first import; where this is set each of hundreds of processes would do it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint docs bench foreign coverage clean

demo: .venv/.ready
	$(BIN)/castwise demo

# In processes of one thread each (tests/conftest.py says how many): most tests are too small for more.
test: .venv/.ready lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: .venv/.ready
	$(BIN)/sphinx-build -W --keep-going -n -q docs docs/_build/html

# Lines and branches of amp/ and distributed/; fails under 95% of either.
coverage: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/core_coverage.py

# About half an hour on two cores, best with nothing else running.
bench: .venv/.ready
	$(BIN)/castwise bench --full --out benchmarks/results
	$(BIN)/python benchmarks/doctor.py
	$(BIN)/python benchmarks/fidelity.py
	$(BIN)/python benchmarks/fault_finding.py
	$(BIN)/python benchmarks/planted_precision.py
	$(BIN)/python benchmarks/tune.py
	$(BIN)/python benchmarks/recipes.py
	$(BIN)/python benchmarks/gradient_exponents.py
	$(BIN)/python benchmarks/ranks_apart.py
	$(BIN)/python benchmarks/readme.py
	$(BIN)/python examples/compare_schedules.py --write
	for each in loss_scaling number_formats ranks step_traffic weight_bits recipes; do $(BIN)/python docs/pictures/$$each.py || exit 1; done

# Other people's code under torch.amp and under castwise; ONLY=peft runs the rows with that in their names, and writes nothing.
foreign: .venv-foreign/.ready
	.venv-foreign/bin/python benchmarks/foreign/compare.py --only "$(ONLY)"

FOREIGN := benchmarks/foreign
.venv-foreign/.ready: pyproject.toml $(FOREIGN)/requirements.txt $(FOREIGN)/constraints.txt
	$(PYTHON) -m venv .venv-foreign
	.venv-foreign/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(FOREIGN)/constraints.txt \
		-r $(FOREIGN)/requirements.txt -e '.[report,lightning,transformers]'
	.venv-foreign/bin/python -m pip download --quiet --disable-pip-version-check -c $(FOREIGN)/constraints.txt \
		--no-deps --no-binary :all: --dest .venv-foreign/sdists accelerate timm
	for each in .venv-foreign/sdists/*.tar.gz; do tar -xzf $$each -C .venv-foreign/sdists || exit 1; done
	touch $@

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-foreign .nox build dist docs/_build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -prune -exec rm -rf {} +
