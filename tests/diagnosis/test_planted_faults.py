"""Faults at random places of a model in training: `diagnose` names each, and blames nothing where there is none.

Whether a planted fault has come to anything is not taken from castwise: a plain step says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.mixture import (
    BATCH,
    BLOCKS,
    EXPERTS,
    TOKENS,
    WIDTH,
    Mixture,
    backward,
    batches,
    is_finite,
    linears,
    loss_of,
    trained,
    with_multiplied_gradient,
)
from tests.thorough import THOROUGH
from torch import Tensor, nn

import castwise
from castwise.diagnosis import Diagnosis, diagnose

FP16, BF16 = torch.float16, torch.bfloat16
LINEARS = linears(Mixture())

steps = st.integers(0, 3)
seeds = st.integers(0, 2**16)
blocks = st.integers(0, BLOCKS - 1)
checkpointing = st.sampled_from([None, True, False])
few = settings(max_examples=12 if THOROUGH else 5)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more here than the work that they would share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def diagnosed(model: Mixture, scaler: Any, dtype: torch.dtype, x: Tensor | None = None) -> Diagnosis:
    """Diagnose a step, which has to be found exactly if a plain step is not finite."""
    x = next(batches()) if x is None else x
    random = torch.get_rng_state()
    model.zero_grad()
    finite = is_finite(model, backward(model, x, dtype, castwise.GradScaler("cpu", init_scale=scaler.get_scale())))
    model.zero_grad()
    torch.set_rng_state(random)
    with castwise.autocast("cpu", dtype=dtype):
        found = diagnose(model, loss_of, x, scaler)
    assert found.found is not finite
    return found


def plant(module: nn.Module, change: Any) -> None:
    """Let a module return something else."""
    forward = module.forward
    module.forward = lambda x: change(forward(x))  # type: ignore[method-assign]


# -- no fault ---------------------------------------------------------------------------------------------------------


@settings(max_examples=20 if THOROUGH else 8)
@given(seeds, steps, st.sampled_from([FP16, BF16, torch.float32]), checkpointing, st.booleans())
def test_nothing_is_blamed_in_clean_runs(
    seed: int, step: int, dtype: torch.dtype, use_reentrant: bool | None, in_training: bool
) -> None:
    low = BF16 if dtype is torch.float32 else dtype
    model, scaler = trained(seed, step, low, use_reentrant)
    found = diagnosed(model.train(in_training), scaler, low)
    assert not found, str(found)


# -- faults of the forward --------------------------------------------------------------------------------------------


def is_tried(found: Diagnosis) -> bool:
    """Return True if fp32 is advised where it helps or could not be tried, and nothing where no format helps."""
    if found.remedy == "float32":
        return found.tried.startswith(("finite", "untried"))
    return found.remedy == "" and "no format helps" in found.advice


@few
@given(seeds, steps, st.sampled_from(LINEARS), checkpointing)
def test_weights_that_fp16_cannot_hold(seed: int, step: int, name: str, use_reentrant: bool | None) -> None:
    model, scaler = trained(seed, step, FP16, use_reentrant)
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(1e7)  # type: ignore[operator, union-attr]
    found = diagnosed(model, scaler, FP16)
    if found or ".experts." not in name:
        assert (found.phase, found.module, found.op, found.remedy) == ("forward", name, "aten.to", "float32")
        assert name in found.advice  # with the modules that overflow next
        assert found.tried.startswith(("finite", "untried"))  # checkpointed code cannot always be run again


@few
@given(seeds, steps, st.sampled_from(LINEARS), st.sampled_from([FP16, BF16]), checkpointing)
def test_a_module_whose_output_overflows(
    seed: int, step: int, name: str, dtype: torch.dtype, use_reentrant: bool | None
) -> None:
    model, scaler = trained(seed, step, dtype, use_reentrant)
    plant(model.get_submodule(name), lambda y: y * 1e30 * 1e30)
    found = diagnosed(model, scaler, dtype)
    if found or ".experts." not in name:
        assert (found.phase, found.module, found.op, found.value) == ("forward", name, "aten.mul", "inf")
        # Of bf16 it is the second product that overflows, as it would in fp32.
        assert found.remedy == "code" if dtype is BF16 else is_tried(found)


@few
@given(seeds, steps, blocks, st.integers(0, EXPERTS - 1), st.sampled_from(["0", "2"]), checkpointing)
def test_one_expert_is_blamed_if_a_token_goes_to_it(
    seed: int, step: int, block: int, expert: int, layer: str, use_reentrant: bool | None
) -> None:
    model, scaler = trained(seed, step, FP16, use_reentrant)
    name = f"blocks.{block}.moe.experts.{expert}.{layer}"
    plant(model.get_submodule(name), lambda y: y * 1e30)
    moe, tokens = model.get_submodule(f"blocks.{block}.moe"), list[list[int]]()
    moe.register_forward_hook(lambda *_: tokens.append([*moe.tokens_of]))  # type: ignore[misc, arg-type, union-attr]
    found = diagnosed(model, scaler, FP16)
    is_used = tokens[0][expert] > 0  # in the replay; remedies are tried later
    assert found.found is is_used
    if is_used:
        assert (found.phase, found.module) == ("forward", name)
        assert is_tried(found)


@few
@given(seeds, steps, blocks, st.integers(0, TOKENS - 1), st.sampled_from([FP16, BF16]), checkpointing)
def test_a_row_of_attention_that_is_masked_altogether(
    seed: int, step: int, block: int, row: int, dtype: torch.dtype, use_reentrant: bool | None
) -> None:
    model, scaler = trained(seed, step, dtype, use_reentrant)
    model.blocks[block].attn.masked_row = row  # type: ignore[union-attr, assignment]
    found = diagnosed(model, scaler, dtype)
    assert (found.phase, found.module, found.op) == ("forward", f"blocks.{block}.attn", "aten.softmax")
    assert found.inputs[0].inf > 0


@few
@given(seeds, steps, blocks, checkpointing)
def test_scores_that_overflow_before_the_softmax(seed: int, step: int, block: int, use_reentrant: bool | None) -> None:
    model, scaler = trained(seed, step, FP16, use_reentrant)
    model.blocks[block].attn.gain = 1e12  # type: ignore[union-attr, assignment]
    found = diagnosed(model, scaler, FP16)
    name = f"blocks.{block}.attn"
    assert (found.phase, found.module, found.op, found.remedy) == ("forward", name, "aten.mul", "float32")


# -- faults of the backward -------------------------------------------------------------------------------------------


@few
@given(seeds, steps, st.sampled_from(LINEARS), st.sampled_from([FP16, BF16]), checkpointing)
def test_a_module_whose_gradient_overflows(
    seed: int, step: int, name: str, dtype: torch.dtype, use_reentrant: bool | None
) -> None:
    model, scaler = trained(seed, step, dtype, use_reentrant)
    plant(model.get_submodule(name), lambda y: with_multiplied_gradient(with_multiplied_gradient(y)))
    found = diagnosed(model, scaler, dtype)
    if found or ".experts." not in name:
        assert (found.phase, found.module, found.op, found.value) == ("backward", name, "aten.mul", "inf")
        assert found.remedy != "scale"


@few
@given(seeds, steps, st.integers(30, 100), checkpointing)
def test_a_scale_that_is_too_high(seed: int, step: int, exponent: int, use_reentrant: bool | None) -> None:
    model, _ = trained(seed, step, FP16, use_reentrant)
    found = diagnosed(model, castwise.GradScaler("cpu", init_scale=2.0**exponent), FP16)
    assert (found.phase, found.remedy) == ("backward", "scale")
    assert "lower the scale" in str(found)


# -- faults of data and weights ---------------------------------------------------------------------------------------


@few
@given(
    seeds,
    steps,
    st.tuples(st.integers(0, BATCH - 1), st.integers(0, TOKENS - 1), st.integers(0, WIDTH - 1)),
    st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    st.sampled_from([FP16, BF16]),
    checkpointing,
)
def test_a_bad_value_in_the_data(
    seed: int, step: int, index: tuple[int, ...], value: float, dtype: torch.dtype, use_reentrant: bool | None
) -> None:
    model, scaler = trained(seed, step, dtype, use_reentrant)
    x = next(batches())
    x[index] = value
    found = diagnosed(model, scaler, dtype, x)
    assert (found.phase, found.argument, found.index, found.value) == ("input", "0", index, str(value))
    assert found.remedy == "input"


@few
@given(seeds, steps, st.data(), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.sampled_from([FP16, BF16]))
def test_a_weight_that_is_not_finite(
    seed: int, step: int, data: st.DataObject, value: float, dtype: torch.dtype
) -> None:
    model, scaler = trained(seed, step, dtype)
    name, param = data.draw(st.sampled_from(list(model.named_parameters())), label="parameter")
    index = tuple(data.draw(st.integers(0, size - 1)) for size in param.shape)
    with torch.no_grad():
        param[index] = value
    found = diagnosed(model, scaler, dtype)  # not found where its expert is not used, or -inf is as good as a mask
    if found:
        assert (found.phase, found.parameter, found.module) == ("weight", name, name.rpartition(".")[0])
        assert (found.index, found.value, found.remedy) == (index, str(value), "weight")
    else:
        assert ".experts." in name or value == -torch.inf
