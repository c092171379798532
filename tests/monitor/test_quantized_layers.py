"""Samples of layers with recipes of 8 and 4 bits: what is lost of their operands, against fp64 by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Monitor, Policy
from castwise._recipes.listeners import LISTENERS
from castwise._recipes.recipe import RECIPES
from castwise.monitor import Run
from castwise.monitor._quantized_layers import _measured


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.Linear(128, 4))


def recorded(folder: Path, recipe: str, steps: int = 2, scale: float = 1.0) -> tuple[list[Any], torch.Tensor, Any]:
    """The samples of a run, its batch, and its model."""
    net = model()
    bound = Policy("bfloat16", {"0": recipe, "2": recipe}, backend="emulated").bind(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    batch = torch.randn(8, 128)
    with Monitor(net, optimizer, every=1, sinks=[folder]):
        for _ in range(steps):
            with torch.no_grad(), castwise.autocast("cpu", policy=bound):
                net(torch.full((8, 128), 1e3))  # a validation
            with castwise.autocast("cpu", policy=bound):
                loss = net(batch).float().square().mean()
            (scale * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [sample.to_json() for sample in Run.read(folder).samples], batch, net


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sample_says_what_was_lost_of_each_operand(recipe: str, tmp_path: Path) -> None:
    samples, batch, net = recorded(tmp_path, recipe)
    assert len(samples) == 2
    layers = samples[-1]["quantized"]
    assert set(layers) == {"0", "2"}
    assert layers["0"]["recipe"] == f"{recipe} (emulated)"
    assert "grad_output" not in layers["0"]  # the gradient of the batch is not needed
    of = RECIPES[recipe]
    operands = {"input": (batch.bfloat16(), of.output[0]), "weight": (net[0].weight.detach(), of.output[1])}
    for name, (operand, scaling) in operands.items():
        kept, given = scaling.dequantize_(scaling.quantize(operand)).double(), operand.double()
        expected = ((kept - given).norm() / given.norm()).item()
        assert layers["0"][name]["relative_error"] == pytest.approx(expected, rel=1e-3)
        assert layers["0"][name]["flushed"] == pytest.approx(
            ((kept == 0) & (given != 0)).double().mean().item(), rel=1e-3
        )
        assert layers["0"][name]["saturated"] == 0.0
        low, high = layers["0"][name]["scale"]
        assert low <= 2 * given.abs().max().item() / scaling.numbers.largest  # a power of two, in some recipes
        assert given.abs().max().item() / scaling.numbers.largest <= high * 1.001
    assert layers["2"]["grad_output"]["relative_error"] > 0


def test_what_gradients_lose_is_seen(tmp_path: Path) -> None:
    """e5m2 has five bits of exponent: in one tensor of very different gradients the small ones become zero."""
    net = model()
    bound = Policy("bfloat16", {"2": "float8_tensorwise"}, backend="emulated").bind(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    weights = torch.logspace(0, -12, 128)
    with Monitor(net, optimizer, every=1, sinks=[tmp_path]):
        with castwise.autocast("cpu", policy=bound):
            loss = (net[2](net[1](net[0](torch.randn(8, 128)))).float() * weights).sum()
        loss.backward()
        optimizer.step()
    (sample,) = Run.read(tmp_path).samples
    lost = sample.quantized["2"].grad_output
    assert lost is not None
    becomes_zero = weights < 2.0**-17 / 57344  # half of the smallest number, where the largest weight becomes 57344
    assert 0.05 < becomes_zero.float().mean().item() < 0.95
    assert lost.flushed == pytest.approx(becomes_zero.float().mean().item(), abs=1e-4)


def test_numbers_that_are_not_finite_are_recorded(tmp_path: Path) -> None:
    samples, *_ = recorded(tmp_path, "float8_rowwise", scale=float("inf"))
    assert math.isnan(samples[0]["quantized"]["2"]["grad_output"]["relative_error"])


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e30])
def test_the_relative_error_is_that_of_any_magnitude(scale: float) -> None:
    operand, scaling = (
        torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * scale,
        RECIPES["mxfp8"].output[0],
    )
    kept = scaling.dequantize_(scaling.quantize(operand)).double()
    expected = ((kept - operand).norm() / operand.double().norm()).item()
    assert 0.01 < expected < 0.1
    error = _measured(operand, scaling, scaling.quantize(operand))[2].item()
    assert error == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_of_zeros_nothing_is_lost(recipe: str) -> None:
    operand = torch.zeros(128, 128)
    for scaling in (*RECIPES[recipe].output, *RECIPES[recipe].grad_input):
        saturated, flushed, error, *_ = _measured(operand, scaling, scaling.quantize(operand)).tolist()
        assert (saturated, flushed, error) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_is_measured_once(use_reentrant: bool, tmp_path: Path) -> None:
    plain, *_ = recorded(tmp_path / "plain", "mxfp8")
    net = model()
    bound = Policy("bfloat16", {"0": "mxfp8", "2": "mxfp8"}, backend="emulated").bind(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with Monitor(net, optimizer, every=1, sinks=[tmp_path / "again"]):
        for _ in range(2):
            with castwise.autocast("cpu", policy=bound):
                x = torch.randn(8, 128, requires_grad=True)
                loss = checkpoint(net, x, use_reentrant=use_reentrant).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    samples = Run.read(tmp_path / "again").samples
    assert set(samples[0].quantized) == set(plain[0]["quantized"])


def test_nothing_is_reported_without_an_observer(tmp_path: Path) -> None:
    recorded(tmp_path, "mxfp8")
    assert not LISTENERS


def test_a_run_without_recipes_has_no_such_entry(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with Monitor(net, optimizer, every=1, sinks=[tmp_path]):
        net(torch.randn(8, 128)).sum().backward()
        optimizer.step()
    assert "quantized" not in Run.read(tmp_path).samples[0].to_json()
