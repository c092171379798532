"""Programs in float64: whatever dtypes they ask for, and with the random numbers of float32."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import castwise
from castwise.checking import _convolutions
from castwise.checking._promotion import exact_arithmetic


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2),
        lambda: torch.tensor([0.1], dtype=torch.float32),
        lambda: torch.zeros(2, dtype=torch.bfloat16),
        lambda: torch.ones(2).float(),
        lambda: torch.ones(2).to(torch.bfloat16),
        lambda: torch.arange(3).half(),
        lambda: torch.ones(2).type(torch.float16),
        lambda: torch.softmax(torch.ones(2), 0, dtype=torch.float32),
        lambda: torch.softmax(torch.ones(2).bfloat16(), 0, dtype=torch.float32),
        lambda: torch.ones(2).sum(dtype=torch.float32),
        lambda: torch.from_numpy(np.ones(2, dtype=np.float32)) * 3,
        lambda: torch.cat([torch.from_numpy(np.ones(2, dtype=np.float32))] * 2),
        lambda: torch.ones(2)[(torch.tensor([True, False]),)] * torch.from_numpy(np.ones(1, dtype=np.float16)),
        lambda: torch.ops.prims.convert_element_type(torch.ones(2), torch.bfloat16),
        lambda: torch.nn.Linear(2, 2).bfloat16().weight,
        lambda: torch.nn.Linear(2, 2)(torch.from_numpy(np.ones(2, dtype=np.float32))),
    ],
)
def test_whatever_dtype_is_asked_for_is_float64(make: Callable[[], torch.Tensor]) -> None:
    with exact_arithmetic():
        assert make().dtype == torch.float64
    assert torch.ones(1).dtype == torch.float32


def test_loaded_tensors_are_those_of_the_file_in_float64(tmp_path: Path) -> None:
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
    saved = {name: torch.randn(6)[1::2].to(dtype) for name, dtype in dtypes.items()}
    torch.save(saved, tmp_path / "saved.pt")
    model = torch.nn.Linear(3, 1)
    with exact_arithmetic():
        loaded = torch.load(tmp_path / "saved.pt")
        model.load_state_dict({"weight": loaded["float32"].view(1, 3), "bias": torch.zeros(1)})
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor.double()), name
        assert loaded[name].dtype is torch.float64


@pytest.mark.parametrize("layer", [torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d])
def test_convolutions_of_another_dtype_than_their_input_are_float64(layer: type[torch.nn.Module]) -> None:
    """A layer made before is float32, and so is a batch that a worker of a data loader sends."""
    narrow, batch = layer(1, 1, 1), torch.ones(1, 1, *[1] * int(layer.__name__[4]))
    with exact_arithmetic():
        for module, x in ((narrow, batch.double()), (layer(1, 1, 1), batch)):
            assert module(x).dtype == torch.float64


@pytest.mark.parametrize("limit", [1, 200, 10**9])
@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        torch.nn.Conv1d(4, 2, 3, bias=False),
        torch.nn.ConvTranspose2d(4, 3, 2),
    ],
)
def test_convolutions_of_parts_of_a_batch_are_those_of_the_batch(
    layer: torch.nn.Module, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts fit into the cache, for which the kernel of float64 is several times faster."""
    monkeypatch.setattr("castwise.checking._convolutions._COLUMNS", limit)
    layer = layer.double()
    x = torch.rand(5, 4, *[7] * (layer.weight.dim() - 2), dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)
    with exact_arithmetic():
        found = torch.autograd.grad(layer(x).square().sum(), inputs)
        (of_layer,) = torch.autograd.grad(layer(x.detach()).square().sum(), [inputs[1]])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_layer, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (torch.nn.Conv2d(16, 17, 3, padding=1), (32, 32)),
        (torch.nn.Conv2d(17, 16, (3, 2), padding=(2, 1), dilation=(2, 1), bias=False), (40, 41)),
        (torch.nn.Conv1d(16, 16, 9), (1024,)),
        (torch.nn.Conv3d(16, 16, (1, 3, 3), padding="same"), (3, 16, 32)),
    ],
)
def test_convolutions_of_large_images_are_sums_of_products(
    layer: torch.nn.Module, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original = [], _convolutions._shifted
    monkeypatch.setattr(_convolutions, "_shifted", lambda *args: calls.append(args) or original(*args))
    layer = layer.double()
    x = torch.rand(2, layer.in_channels, *sizes, dtype=torch.float64, requires_grad=True)
    inputs, results = [x, *layer.parameters()], layer(x)
    expected = torch.autograd.grad(results.square().sum(), inputs)
    with exact_arithmetic():
        found = layer(x)
        grads = torch.autograd.grad(found.square().sum(), inputs)
    torch.testing.assert_close(found, results, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 2


@pytest.mark.parametrize("region", [torch.autocast, castwise.autocast])
def test_a_region_does_not_round(region: Callable[..., torch.autocast]) -> None:
    with exact_arithmetic():
        x, w = torch.full((2, 3), 1 / 3, dtype=torch.float64), torch.full((3, 2), 1 / 7, dtype=torch.float64)
        with region("cpu", dtype=torch.bfloat16):
            found = x @ w
    assert torch.equal(found, x @ w)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(100),
        lambda: torch.randn(100),
        lambda: torch.empty(100).normal_(),
        lambda: torch.empty(10, 10).t().uniform_(),
        lambda: torch.empty(100).exponential_(),
        lambda: torch.rand_like(torch.ones(100)),
        lambda: torch.normal(torch.zeros(100), 1.0),
        lambda: torch.bernoulli(torch.full((100,), 0.3)),
        lambda: functional.dropout(torch.ones(100), 0.5),
        lambda: torch.native_dropout(torch.ones(100), 0.5, True)[0],
        lambda: torch.randint(0, 9, (100,)),
        lambda: torch.randperm(100),
        lambda: torch.multinomial(torch.arange(1.0, 50.0), 20),
        lambda: torch.nn.Linear(10, 10).weight.detach(),
    ],
)
def test_random_numbers_are_those_of_float32(draw: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    expected = draw()
    torch.manual_seed(0)
    with exact_arithmetic():
        found = draw()
    assert found.dtype == (torch.float64 if expected.is_floating_point() else expected.dtype)
    assert torch.equal(found.to(expected.dtype), expected)


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, castwise.GradScaler])
def test_scalers_and_optimizers_step_as_in_float64(kind: dict[str, bool], scaler: type[torch.amp.GradScaler]) -> None:
    def step(dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.arange(1, 6, dtype=dtype) / 3)
        optimizer, scale = torch.optim.AdamW([param], lr=0.1, **kind), scaler("cpu", init_scale=4.0)
        for _ in range(2):
            optimizer.zero_grad()
            scale.scale((param**2).sum()).backward()
            scale.step(optimizer)
            scale.update()
        return param.detach()

    with exact_arithmetic():
        found = step(torch.float32)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, step(torch.float64), rtol=1e-12, atol=0)


def test_the_default_dtype_is_put_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), exact_arithmetic():
        _ = 1 / 0
    assert torch.get_default_dtype() == torch.float32


def test_tensors_of_another_process_are_read_as_they_are_and_widened() -> None:
    """As those of a data loader's workers that are not forked, which is the default of Python 3.14."""
    values = torch.randn(3, 4)
    sent = bytes(ForkingPickler.dumps(values))
    with exact_arithmetic():
        received = pickle.loads(sent)
        doubled = received * 2
    assert torch.equal(received, values)
    assert doubled.dtype is torch.float64
    assert torch.equal(doubled, values.double() * 2)
