# On a fresh machine, run `make demo` or `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# How long idle OpenMP threads spin before they sleep. With libgomp's default of 300,000 rounds, torch stalls if another
# process is busy: 15 steps of the demo on two cores take 10 s alone and over 120 s with another process, or 41 s with
# this setting.
export GOMP_SPINCOUNT ?= 10000
# Unset, so that modules are compiled once and not again in each of hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test tests thorough accelerator gpu lint docs bench foreign coverage newest oldest versions pythons clean

demo: .venv/.ready
	$(BIN)/castwise demo

# Two at a time, because lint and the accelerator's tests keep one core busy each.
test: .venv/.ready
	$(MAKE) --jobs 2 accelerator lint tests

TESTS := not gpu and not text
# One thread per process, because most tests are too small for more. tests/conftest.py sets the number of processes.
tests: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 -m "$(TESTS)"

# Before a release: all tests, with whole sweeps of which `make tests` runs a part (tests/thorough.py).
thorough: export CASTWISE_THOROUGH := 1
thorough: tests

# In a process of its own, because the simulated accelerator is the one device that torch lets extensions add. Builds it
# first (half a minute) unless torch's extension cache has it. Skipped without g++ or ninja.
accelerator: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/accelerator

# On a machine with a GPU: its tests, and the benchmarks that matter there. Needs no .venv and no network.
gpu:
	$(PYTHON) -m benchmarks.gpu

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# Builds the manual in docs/_build/html, and runs the tests of what is written in it and in the code. Only files that have
# such tests are named: to collect all others takes half a minute in each process.
docs: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 -m text \
		tests/docs $$(grep -rl 'mark\.text' tests --include='*.py')

# Line and branch coverage of amp/ and distributed/. Fails below 95% of either.
coverage: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.core_coverage

# Before a release: all tests, except the manual's, with the newest and the oldest torch that castwise is tested with; the
# small set with every torch; the light tests with every Python that is installed as `python3.x`. One at a time, each makes
# an environment (about 3 GB to download, 6 GB on disk) and removes it again.
newest:
	$(PYTHON) benchmarks/torch_versions.py 2.15 --all

oldest:
	$(PYTHON) benchmarks/torch_versions.py 2.11 --all

versions:
	$(PYTHON) benchmarks/torch_versions.py

pythons:
	$(PYTHON) benchmarks/torch_versions.py --pythons

# Takes over an hour on two cores. Use an idle machine.
bench: .venv/.ready
	$(BIN)/python -m benchmarks --full --out benchmarks/results
	$(BIN)/python -m benchmarks.doctor
	$(BIN)/python -m benchmarks.fidelity
	$(BIN)/python -m benchmarks.fault_finding
	$(BIN)/python -m benchmarks.broken_scripts
	$(BIN)/python -m benchmarks.checked_changes
	$(BIN)/python -m benchmarks.checked_settings
	$(BIN)/python -m benchmarks.named_ops
	$(BIN)/python -m benchmarks.bisected
	$(BIN)/python -m benchmarks.check_cost
	$(BIN)/python -m benchmarks.planted_precision
	$(BIN)/python -m benchmarks.planted_spikes
	$(BIN)/python -m benchmarks.watching_cost
	$(BIN)/python -m benchmarks.tune
	$(BIN)/python -m benchmarks.recipes
	$(BIN)/python -m benchmarks.gradient_exponents
	$(BIN)/python -m benchmarks.ranks_apart
	$(BIN)/python -m benchmarks.gradient_sums
	$(BIN)/python -m benchmarks.weight_programs
	$(BIN)/python -m benchmarks.readme
	$(BIN)/python examples/compare_schedules.py --write
	$(BIN)/python examples/run_notebook.py
	for each in loss_scaling number_formats ranks step_traffic weight_bits recipes first_page terminal; do $(BIN)/python docs/pictures/$$each.py || exit 1; done

# Third-party code under torch.amp and under castwise. ONLY=peft runs the rows with "peft" in their names and writes nothing;
# with AGAIN=1 it replaces these rows in the result file.
foreign: .venv-foreign/.ready
	.venv-foreign/bin/python benchmarks/foreign/compare.py --only "$(ONLY)" $(if $(AGAIN),--again)
	.venv-foreign/bin/python examples/ray_train.py

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
