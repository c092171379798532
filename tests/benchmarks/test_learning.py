"""`benchmarks/learning.py`: it sees which weights learn what fp32 ones learn, and says what it left out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest


class AtOnce(Executor):
    """Runs what it is given when it is given it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Any:
    script = importlib.import_module("benchmarks.learning")
    monkeypatch.setattr(script, "version", lambda package: None)  # torchao compiles for a minute
    monkeypatch.setattr(script, "VALIDATION_BATCHES", 1)
    return script


@pytest.mark.parametrize(("name", "bytes_"), [("AdamW", (18, 8, 14, 12)), ("Muon", (16, 7, 12, 10))])
def test_split_weights_are_found_identical_and_bare_ones_are_not(learning: Any, name: str, bytes_: Any) -> None:
    methods = learning.measure(name, AtOnce(), [0, 1], steps=2)["methods"]
    same = {key: row["seeds identical to fp32 weights"] for key, row in methods.items() if "minus fp32 weights" in row}
    assert (same["split"], same["bf16 weights"], same["stochastic"]) == (2, 0, 0)
    taken = [methods[key]["bytes per parameter"] for key in ("fp32 weights", "bf16 weights", "split", "stochastic")]
    assert taken == pytest.approx(bytes_, abs=1.0)


def test_what_is_not_installed_is_left_out_and_said_to_be(learning: Any) -> None:
    methods = learning.measure("AdamWScheduleFree", AtOnce(), [0, 1], steps=1)["methods"]
    assert {row["skipped"] for row in methods.values()} == {"left out: schedulefree is not installed"}


def test_a_peer_that_fails_is_said_to(learning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no kernel\nmore")

    monkeypatch.setattr(learning, "train", fail)
    assert learning.attempt("AdamW", learning.TORCHAO, 0, 1) == "fails on this CPU: RuntimeError: no kernel"
    with pytest.raises(RuntimeError, match="no kernel"):
        learning.attempt("AdamW", "split", 0, 1)
