"""`MasterWeights` on a GPU, where its codecs are compiled by Triton, and where a graph captures its step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.master_weights.training import buckets_of
from torch import nn

from castwise import MasterWeights
from castwise.master_weights import _master_weights as master_weights
from castwise.master_weights._codecs import codec_kernels, half_kernels, rounding_kernel
from castwise.master_weights._kernels import can_compile

pytestmark = pytest.mark.gpu

LOW_STATE = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
OPTIONS: list[dict[str, Any]] = [{}, {"dtype": torch.float16}, {"method": "stochastic", "state_dtype": LOW_STATE}]


def made(**options: Any) -> tuple[nn.Sequential, MasterWeights]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2001), nn.GELU(), nn.Linear(2001, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True)
    return model, MasterWeights(optimizer, model, **options)


def fill_grads(model: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=draw).to(param)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.copy_(grad)


def results_of(model: nn.Module, optimizer: MasterWeights) -> list[torch.Tensor]:
    state = [value for of_param in optimizer.state.values() for value in of_param.values()]
    return [*optimizer.fp32_state_dict(model).values(), *state]


@pytest.mark.parametrize("options", OPTIONS)
def test_compiled_codecs_have_the_bits_of_torchs_ops_and_do_not_wait(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert can_compile(torch.device("cuda", 0)), "install triton: there is nothing to test without it"
    codec_kernels.cache_clear()
    half_kernels.cache_clear()
    rounding_kernel.cache_clear()
    results = []
    for worth in (0, 1 << 60):
        monkeypatch.setattr(master_weights, "WORTH_COMPILING", worth)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "a codec of MasterWeights is not compiled")
            model, optimizer = made(**options)
            for seed in range(5):
                fill_grads(model, seed)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if seed > 1 else "default")
                try:
                    optimizer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        results.append(results_of(model, optimizer))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("worth", [0, 1 << 60], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_captured_step_is_the_eager_one(options: dict[str, Any], worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_weights, "WORTH_COMPILING", worth)
    with buckets_of(1 << 16):  # which cut the weights
        (eager_model, eager), (model, optimizer) = made(**options), made(**options)
    side = torch.cuda.Stream()
    for seed in range(3):
        fill_grads(eager_model, seed)
        eager.step()
        fill_grads(model, seed)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for seed in range(3, 8):
        fill_grads(eager_model, seed)
        eager.step()
        fill_grads(model, seed)
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, eager_model.parameters(), model.parameters()))
