"""`benchmarks/recipes.py`: it trains by each recipe, and sees which layer `tune` leaves out."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
from tests.benchmarks.test_learning import AtOnce


@pytest.fixture
def recipes() -> Any:
    return importlib.import_module("benchmarks.recipes")


def test_recipes_learn_something_else_than_bf16(recipes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "VALIDATION_BATCHES", 1)
    monkeypatch.setattr(recipes, "SIZE", replace(recipes.SIZE, batch=2))
    monkeypatch.setattr(recipes, "METHODS", ["bf16", "mxfp8, last block in bf16", "nvfp4"])
    methods = recipes.measure(AtOnce(), [0, 1], steps=2)
    losses = [found["values"] for found in methods.values()]
    assert all(len(of_seeds) == 2 for of_seeds in losses)
    assert len({tuple(of_seeds) for of_seeds in losses}) == len(losses)
    assert all(len(found["training loss, means of 25 steps"]) == 1 for found in methods.values())


def test_tune_leaves_out_the_layer_with_an_outlier(recipes: Any) -> None:
    assert all(recipes.left_out(seed) for seed in range(3))
