"""The compiled codecs: the bits of torch's ops, by Inductor on the CPU; and what happens without a compiler."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.master_weights.training import buckets_of
from torch import nn

from castwise import MasterWeights
from castwise.master_weights import _codecs as codecs
from castwise.master_weights import _kernels as kernels
from castwise.master_weights import _master_weights as master_weights
from castwise.master_weights._codecs import (
    Chance,
    Split,
    _CompiledSplit,
    _CompiledSplitHalf,
    _PackedTies,
    _SplitHalf,
    _Stochastic,
    codec_kernels,
    half_kernels,
    rounding_kernel,
)

CPU = torch.device("cpu")
LOW_STATE = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU is a device for which the codecs of models of any size are compiled."""
    monkeypatch.setattr(codecs, "can_compile", lambda device: True)
    monkeypatch.setattr(master_weights, "WORTH_COMPILING", 0)
    yield
    codec_kernels.cache_clear()
    half_kernels.cache_clear()
    rounding_kernel.cache_clear()


def trained(steps: int = 3, nbytes: int = 4096, **options: Any) -> tuple[list[torch.Tensor], set[type]]:
    """Return what training leaves, in buckets of so many bytes that share or cut a layer, and the kinds of codec."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2001), nn.GELU(), nn.Linear(2001, 3))
    with buckets_of(nbytes):
        optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model, **options)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    state = [value for of_param in optimizer.state.values() for value in of_param.values()]
    fp32 = optimizer.fp32_state_dict(model)
    return [*fp32.values(), *state], {type(bucket.codec) for bucket in optimizer._buckets}


def are_equal(these: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, these, others))


def test_triton_kernels_are_as_few_as_the_simulated_accelerator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes the kernels of a GPU; that no Triton compiles them for a CPU it sees too late to matter."""
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "", raising=False)
    metrics = importlib.import_module("torch._inductor.metrics")
    values, residue = torch.empty(512, 8), torch.empty(512, 8, dtype=torch.int16)
    weights, ties = torch.empty(512, 8, dtype=torch.bfloat16), torch.empty(512, dtype=torch.uint8)
    flat, of_flat = torch.empty(2 * kernels.POOL), torch.empty(2 * kernels.POOL, dtype=torch.int16)
    half = torch.empty_like(flat, dtype=torch.float16)
    random = Chance(0).random_of(len(flat), CPU, "weights")
    calls: dict[Any, tuple[torch.Tensor, ...]] = {
        kernels.join: (weights, residue, ties, values),
        kernels.split: (values, weights, residue, ties),
        kernels.split_half: (flat, half, of_flat),
        kernels.round_by_chance: (flat, *random, torch.empty_like(flat, dtype=torch.bfloat16)),
    }
    for function, tensors in calls.items():
        metrics.reset()
        settings = torch._inductor.config.patch(cpu_backend="triton", fx_graph_cache=False)
        with settings, pytest.raises(Exception, match=r"triton|0 compatible backends"):
            torch.compile(function, fullgraph=True, dynamic=True)(*tensors)
        assert metrics.generated_kernel_count == 1, function


@pytest.mark.usefixtures("compiles")
def test_compiled_codecs_have_the_bits_of_torchs_ops_and_are_compiled_once_for_all_lengths() -> None:
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    assert codec_kernels(CPU) is not None
    assert rounding_kernel(CPU) is not None
    assert half_kernels(CPU) is not None
    assert counters["unique_graphs"] == 5
    chances = Chance(0), Chance(0)
    chances[0].compile_on({CPU})
    for length in (16, 1000, 4096, 150_000):
        ours, torchs = _CompiledSplit(length, CPU), Split(length, CPU)
        torchs._ties = _PackedTies(length, CPU)
        weights, expected = (torch.empty(length, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        for seed in range(3):
            values = torch.randn(length, generator=torch.Generator().manual_seed(seed))
            values[::5] = 1.00390625  # a tie
            with torch.no_grad():
                ours.encode(values, weights)
                torchs.encode(values, expected)
                assert torch.equal(weights, expected)
                assert are_equal([*ours.saved(0, length).values()], [*torchs.saved(0, length).values()])
                assert torch.equal(ours.decode(weights, torch.empty(length)), values)
                rounded = [chance.rounded(values, weights, "weights").float() for chance in chances]
                assert torch.equal(*rounded)
            for chance in chances:
                chance.count(CPU)
            values *= torch.exp2(torch.randint(-40, 20, (length,)).float())  # float16 represents few of these exactly
            values[:4] = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
            halves = _CompiledSplitHalf(length, CPU), _SplitHalf(length, CPU)
            low = [torch.empty(length, dtype=torch.float16) for _ in halves]
            with torch.no_grad():
                for codec, of_codec in zip(halves, low, strict=True):
                    codec.encode(values, of_codec)
                decoded = [codec.decode(low[0], torch.empty(length)) for codec in halves]
            torch.testing.assert_close(*low, rtol=0.0, atol=0.0, equal_nan=True)
            torch.testing.assert_close(*decoded, rtol=0.0, atol=0.0, equal_nan=True)
            is_number = values == values
            assert torch.equal(*(codec.saved(0, length)["half_residue"][is_number] for codec in halves))
    kinds: dict[type, dict[str, Any]] = {
        _CompiledSplit: {},
        _CompiledSplitHalf: {"dtype": torch.float16},
        _Stochastic: {"method": "stochastic", "state_dtype": LOW_STATE},
    }
    for kind, options in kinds.items():
        for nbytes in (4096, 400_000):
            compiled, used = trained(nbytes=nbytes, **options)
            assert kind in used
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(master_weights, "WORTH_COMPILING", 1 << 60)
                plain, used = trained(nbytes=nbytes, **options)
            assert not {_CompiledSplit, _CompiledSplitHalf} & used
            assert are_equal(compiled, plain)
    assert counters["unique_graphs"] == 5


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("fault", ["raises at once", "raises later", "has other bits"])
def test_without_a_compiler_that_works_torchs_ops_step_after_one_warning(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(master_weights, "WORTH_COMPILING", 1 << 60)
        expected, _ = trained()
    calls = [0]

    def compile_(function: Any, **options: Any) -> Any:
        def compiled(*tensors: torch.Tensor) -> None:
            calls[0] += 1
            if fault == "raises at once" or (fault == "raises later" and calls[0] > 5):
                raise OSError("no C compiler\nand a traceback")
            function(*tensors)
            if fault == "has other bits" and function is kernels.join:
                tensors[-1].view(torch.int32)[7] += 1

        return compiled

    codec_kernels.cache_clear()
    monkeypatch.setattr(torch, "compile", compile_)
    reason = "compiled code does not give the same bits" if fault == "has other bits" else "OSError: no C compiler"
    with pytest.warns(RuntimeWarning, match=f"is not compiled, so steps launch more kernels [(]{reason}[)]") as warned:
        weights, _ = trained()
    assert len(warned) == (1 if fault == "has other bits" else 2)  # one for each of two kernels
    assert are_equal(weights, expected)


def test_nothing_is_compiled_on_cpus_nor_for_few_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kernels.can_compile(CPU)
    assert codec_kernels(CPU) is half_kernels(CPU) is rounding_kernel(CPU) is None
    monkeypatch.setattr(codecs, "can_compile", lambda device: pytest.fail("asked for a compiler"))
    assert trained(1)[1] == {Split}
