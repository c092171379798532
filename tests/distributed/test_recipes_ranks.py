"""Recipes of 8 and 4 bits in two real processes, under DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import run

RECIPES = ["float8_tensorwise", "float8_rowwise_with_gw_hp", "mxfp8", "nvfp4"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(Path(__file__).with_name("recipes_worker.py"), 2, tmp_path_factory.mktemp("ranks") / "store", "")


@pytest.mark.parametrize("recipe", RECIPES)
def test_sharded_and_replicated_weights_are_quantized_alike(recipe: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        results = rank["recipes"][recipe]
        assert results["DDP"]["losses"][-1] < results["DDP"]["losses"][0]
        for how in ("FSDP2", "FSDP2 cached"):
            assert results[how]["losses"] == results["DDP"]["losses"]
            assert results[how]["weights"] == results["DDP"]["weights"]
    assert ranks[0]["recipes"][recipe]["DDP"]["weights"] == ranks[1]["recipes"][recipe]["DDP"]["weights"]


def test_weights_of_layers_with_a_recipe_are_gathered_as_they_are(ranks: list[dict[str, Any]]) -> None:
    units = ranks[0]["recipes"]["mxfp8"]["FSDP2"]["gathered"]
    assert units == ["None", "None", "torch.bfloat16"]  # those of two layers with a recipe, then the rest


def test_weights_that_are_gathered_in_16_bits_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["error"] == (
        "the policy quantizes the weight of '0' by mxfp8, but FSDP gathers the weights of '' already rounded to "
        "torch.bfloat16: shard with the policies that Policy.fsdp(...) yields"
    )
