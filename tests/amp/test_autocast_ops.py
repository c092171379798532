"""Every op on torch's own lists gives the same bits and dtypes under our region as under torch's."""

from __future__ import annotations

import sys
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch

import castwise

if find_spec("expecttest") is None:  # which torch imports for its own tests, and a machine with a GPU may lack
    sys.modules["expecttest"] = SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)  # type: ignore[assignment]
# This import of torch's loads its own hypothesis profile, for all tests of this process.
_profile = hypothesis.settings.get_current_profile_name()
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists  # noqa: E402

hypothesis.settings.load_profile(_profile)

LOW = [torch.bfloat16, torch.float16]


def ops_of(lists: Any) -> list[tuple[str, Any]]:
    """All entries, each with the name of its list."""
    found = []
    for name, entries in sorted(vars(lists).items()):
        if isinstance(entries, list) and entries and isinstance(entries[0], tuple):
            # torch's own tests skip einsum, too: its equation does not fit its operands.
            entries = [entry for entry in entries if not isinstance(entry[1], str)]
            found += [(name, entry) for entry in entries]
            # Some have the same arguments a second time, in fp16.
            seconds = ((entry[0], extra) for entry in entries for extra in entry[2:] if isinstance(extra, tuple))
            found += [(name, second) for second in seconds if isinstance(second[1][0], (torch.Tensor, tuple))]
    return found


def call(name: str, entry: Any) -> list[Any]:
    """Run an entry (op, arguments, options...) wherever it is found: in torch, torch.nn.functional, or on a tensor."""
    op, arguments, *rest = entry
    keywords = next((extra for extra in rest if isinstance(extra, dict)), {})
    if not isinstance(arguments, tuple):
        arguments = (arguments,)
    outputs = []
    modules = [torch, torch._C._nn, torch._C._linalg, torch.nn.functional, torch.Tensor]
    places = [torch.Tensor] if name.startswith("methods") else modules
    for place in places:
        function = getattr(place, op, None)
        if function is not None:
            torch.manual_seed(0)
            outputs.append(function(*arguments, **keywords))
            break
    else:
        raise AssertionError(f"torch has no {op}, which {name} lists")
    return outputs


def outcome(region: Any, device: str, dtype: torch.dtype, name: str, entry: Any) -> Any:
    with region(device, dtype=dtype):
        try:
            return bits(call(name, entry))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return type(error), str(error)


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # uint8 compares NaN with NaN, and -0.0 with 0.0, as bits.
        return value.dtype, tuple(value.shape), value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, (list, tuple)):
        return [bits(part) for part in value]
    return value


CPU_OPS = ops_of(AutocastCPUTestLists(torch.device("cpu")))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("index", range(len(CPU_OPS)), ids=lambda index: f"{CPU_OPS[index][0]}-{CPU_OPS[index][1][0]}")
def test_ops_on_a_cpu(index: int, dtype: torch.dtype) -> None:
    name, entry = CPU_OPS[index]
    expected = outcome(torch.autocast, "cpu", dtype, name, entry)
    assert outcome(castwise.autocast, "cpu", dtype, name, entry) == expected


def test_the_lists_are_the_whole_of_torchs() -> None:
    assert {"torch_16", "nn_16", "torch_fp32", "nn_fp32", "torch_need_autocast_promote"} <= {n for n, _ in CPU_OPS}
    assert len(CPU_OPS) > 60


@pytest.mark.parametrize("index", range(len(CPU_OPS)), ids=lambda index: f"{CPU_OPS[index][0]}-{CPU_OPS[index][1][0]}")
def test_each_op_runs_and_a_region_changes_it_unless_it_only_promotes(index: int) -> None:
    name, entry = CPU_OPS[index]
    # `cat` and `stack` of fp16 tensors refuse a bf16 region, and the other way round.
    inside = [outcome(castwise.autocast, "cpu", dtype, name, entry) for dtype in LOW]
    assert any(isinstance(result, list) for result in inside)
    outside = outcome(lambda *_, **__: torch.enable_grad(), "cpu", torch.bfloat16, name, entry)
    assert (outside in inside) == ("promote" in name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_ops_on_a_gpu(dtype: torch.dtype) -> None:
    lists = AutocastTestLists(torch.device("cuda"))
    different = []
    for name, entry in ops_of(lists):
        expected = outcome(torch.autocast, "cuda", dtype, name, entry)
        if outcome(castwise.autocast, "cuda", dtype, name, entry) != expected:
            different.append((name, entry[0]))
    assert different == []
