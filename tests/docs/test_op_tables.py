"""What the manual says of each op is what torch's own lists for its tests say."""

from __future__ import annotations

from typing import Any

import hypothesis
import op_tables
import pytest
import torch

# This import of torch's loads its own hypothesis profile, for all tests of this process.
_profile = hypothesis.settings.get_current_profile_name()
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists  # noqa: E402

hypothesis.settings.load_profile(_profile)


@pytest.fixture(scope="module")
def rules() -> dict[str, dict[str, str]]:
    return {device: op_tables.rules(device) for device in ("cpu", "cuda")}


def listed(lists: Any, kind: str) -> set[str]:
    """The names of the ops in torch's lists of a kind, as far as they are those of ops."""
    names = {entry[0] for name, entries in vars(lists).items() if kind in name for entry in entries}
    return {name.strip("_") if name.startswith("__") else name for name in names}


def agree(rules: dict[str, str], names: set[str], kinds: set[str]) -> int:
    """How many of these ops the table has, all of a kind."""
    found = {name: rules[name] for name in names if name in rules}
    assert set(found.values()) <= kinds, found
    return len(found)


def test_ops_of_a_cpu(rules: dict[str, dict[str, str]]) -> None:
    lists = AutocastCPUTestLists(torch.device("cpu"))
    assert agree(rules["cpu"], listed(lists, "_16"), {op_tables.LOW}) >= 10
    assert agree(rules["cpu"], listed(lists, "_fp32"), {op_tables.FP32}) >= 10
    assert agree(rules["cpu"], listed(lists, "promote"), {op_tables.WIDEST}) >= 2


def test_ops_of_a_gpu(rules: dict[str, dict[str, str]]) -> None:
    lists = AutocastTestLists(torch.device("cpu"))  # only the names matter
    fp32 = {op_tables.FP32, op_tables.RESULT, f"{op_tables.FP32}, {op_tables.RESULT}"}
    assert agree(rules["cuda"], listed(lists, "_fp16"), {op_tables.LOW}) >= 10
    assert agree(rules["cuda"], listed(lists, "_fp32"), fp32) >= 30
    assert agree(rules["cuda"], listed(lists, "promote"), {op_tables.WIDEST}) >= 5
    assert rules["cuda"]["binary_cross_entropy"] == op_tables.REFUSED


def test_no_region_is_left_behind(rules: dict[str, dict[str, str]]) -> None:
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")
    assert torch.is_autocast_cache_enabled()
    assert torch.get_autocast_dtype("cuda") is torch.float16


def test_an_op_without_a_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot determine"):
        op_tables.rule(torch.ops.aten.relu.default, "cpu")
