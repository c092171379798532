"""What is found out of this machine, as JSON, and as the documentation has it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise._doctor import checkup
from castwise._recipes.recipe import RECIPES, runs_natively
from castwise.amp._emulation import is_native_here

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "integrations" / "doctor.md"


def keys(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        for key, value in found.items():
            yield key
            yield from keys(value)
    elif isinstance(found, list):
        for value in found:
            yield from keys(value)


def test_every_key_is_documented_and_every_value_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "BUDGET_S", 0.2)
    found = checkup.examine().as_dict()
    text = DOCUMENTATION.read_text()
    assert [key for key in keys(found) if f"`{key}`" not in text] == []
    assert json.loads(json.dumps(found)) == found
    cpu = found["devices"][0]
    assert (cpu["device"], cpu["threads"]) == ("cpu", torch.get_num_threads())
    assert [entry["format"] for entry in cpu["formats"]] == ["fp32", "bf16", "fp16"]
    assert [entry["native"] for entry in cpu["formats"]] == [
        True,
        *map(is_native_here, (torch.bfloat16, torch.float16)),
    ]
    assert cpu["capability"] is cpu["memory_bytes"] is None
    assert cpu["recipes"] == dict.fromkeys(RECIPES, False)


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((8, 0), []),
        ((8, 9), ["float8_tensorwise"]),
        ((9, 0), ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"]),
    ],
)
def test_recipes_are_native_from_some_capability_on(
    capability: tuple[int, int], native: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert [name for name, recipe in RECIPES.items() if runs_natively(recipe, "cuda")] == native


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="limits only an x86 CPU")
def test_where_onednn_may_not_use_units_the_formats_are_emulated_and_slow() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "castwise", "doctor", "--json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    cpu = json.loads(run.stdout)["devices"][0]
    assert cpu["limit"] == "ONEDNN_MAX_CPU_ISA=AVX2"
    _, *low = cpu["formats"]
    assert [(entry["format"], entry["native"]) for entry in low] == [("bf16", False), ("fp16", False)]
    assert all(entry["times_fp32"]["median"] < 0.7 for entry in low)
    assert (cpu["recommendation"]["policy"], cpu["recommendation"]["schedule"]) == (None, None)
    assert cpu["recommendation"]["policy_reason"].startswith("bf16 is emulated, at 0.")


@pytest.mark.gpu
def test_a_gpu_is_examined() -> None:
    found = checkup.examine().as_dict()["devices"]
    assert [device["device"] for device in found] == ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    gpu = found[1]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert tuple(gpu["capability"]) == torch.cuda.get_device_capability(0)
    assert gpu["memory_bytes"] == torch.cuda.get_device_properties(0).total_memory
    assert gpu["recommendation"]["policy"] == ("bf16" if gpu["capability"] >= (8, 0) else "fp16")
