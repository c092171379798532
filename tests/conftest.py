"""Hypothesis profiles (`--hypothesis-profile=long` is for a run by hand), and how tests share processes."""

import functools
import gc
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.thorough import THOROUGH
from tests.warm_python import with_frameworks

import castwise

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=150, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=30_000, **_COMMON)
settings.load_profile("thorough" if THOROUGH else "ci")
os.environ.pop("COLUMNS", None)  # which pytest-xdist sets, and tables in a pipe obey
# Inductor compiles a few kernels here: it needs no pool of processes, and no programs that try each instruction set.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@pytest.fixture(scope="session", autouse=True)
def _emulated_formats_were_warned_of() -> None:
    """Tests that compare our warnings with torch's must not meet the one that torch does not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.bfloat16, torch.float16):
            castwise.autocast("cpu", dtype=dtype)


_frozen_modules = 0


def pytest_runtest_setup() -> None:
    """Start each test from one seed, and keep what imports made from being searched.

    Castwise looks for models among all objects, in hundreds of tests.
    """
    global _frozen_modules
    torch.manual_seed(0)
    if len(sys.modules) > _frozen_modules + 100:
        importlib.import_module("torch._dynamo")  # as the first optimizer does
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


_OF_THE_BUILT_MANUAL = ("tests/docs/test_layout.py", "tests/docs/test_manual.py")


@functools.cache
def _has_shared_fixtures(file: Path) -> bool:
    """Return True if tests of a file share a fixture, which each process makes anew: some start ranks or a browser."""
    return 'scope="module"' in file.read_text()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests on the simulated accelerator, which need a process of their own, unless they are named."""
    if collection_path != Path(__file__).parent / "accelerator":
        return None
    named = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    return not any(path.is_relative_to(collection_path) for path in named)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One more than there are cores for us: many tests wait for a process, and for the disk."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork the processes from one that has imported what test files import: each would take 15 s of a core for it."""
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = with_frameworks()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # pytest-xdist's own groups (3.8) do not reach pytest 9.2's ids
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file in _OF_THE_BUILT_MANUAL:
                return "the built manual"
            # Blocks of a page use names of those before.
            return file if file.endswith(".md") or _has_shared_fixtures(config.rootpath / file) else nodeid

    return Scheduling(config, log)
