"""Optimizer states in 8 bits: what the codes keep, how they decay, and which steps and checkpoints leave them alone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.master_weights.training import net, train, wrapped
from torch import nn, optim

import castwise
from castwise import MasterWeights
from castwise.master_weights._codecs import Chance
from castwise.master_weights._low_state import BLOCK, Blockwise, decode, encode

LOW = {"exp_avg": "int8_blockwise", "exp_avg_sq": "int8_blockwise"}
MAKE: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, torch.dtype]]] = {
    "AdamW": (lambda params: optim.AdamW(params, lr=1e-2), {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}),
    "fused AdamW": (
        lambda params: optim.AdamW(params, lr=1e-2, fused=True),
        {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8},
    ),
    "AMSGrad": (
        lambda params: optim.AdamW(params, lr=1e-2, amsgrad=True),
        {"exp_avg": torch.int8, "max_exp_avg_sq": torch.uint8},
    ),
    "SGD": (lambda params: optim.SGD(params, lr=0.1, momentum=0.9), {"momentum_buffer": torch.int8}),
    "RMSprop": (lambda params: optim.RMSprop(params, lr=1e-3), {"square_avg": torch.uint8}),
    "Adadelta": (
        lambda params: optim.Adadelta(params, lr=1.0),
        {"square_avg": torch.uint8, "acc_delta": torch.uint8},
    ),
    "Adafactor": (lambda params: optim.Adafactor(params, lr=1e-2), {}),
    "Muon": (
        lambda params: optim.Muon([param for param in params if param.dim() == 2], lr=1e-3),
        {"momentum_buffer": torch.int8},
    ),
}


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2, fused=True)


def encoded(values: torch.Tensor, dtype: torch.dtype, random: torch.Tensor | None) -> torch.Tensor:
    codes, scales = torch.empty(values.shape, dtype=dtype), torch.empty(len(values) // BLOCK)
    encode(values, random, codes, scales, torch.empty_like(values))
    return decode(codes, scales, torch.empty_like(values))


def states(optimizer: MasterWeights) -> list[torch.Tensor]:
    of_params = [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]
    blockwise = [value for state in of_params for value in state.values() if isinstance(value, Blockwise)]
    return [tensor for value in blockwise for tensor in (value.codes, value.scales)]


def all_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


@pytest.mark.parametrize(("dtype", "relative"), [(torch.int8, 4 / 127), (torch.uint8, 8 / 255)])
def test_codes_keep_numbers_of_all_magnitudes(dtype: torch.dtype, relative: float) -> None:
    torch.manual_seed(0)
    power = torch.rand(64 * BLOCK) * 4  # four decades
    values = 10.0**-power * (torch.randn(len(power)).sign() if dtype is torch.int8 else 1.0)
    root = (values.abs().view(-1, BLOCK) / values.abs().view(-1, BLOCK).amax(1, keepdim=True)).view(-1)
    root = root.pow(0.25 if dtype is torch.int8 else 0.125)
    for random, steps in ((None, 0.5), (Chance(0).words(len(values), values.device, "a"), 1.0)):
        kept = encoded(values, dtype, random)
        error = (kept - values).abs() / values.abs()
        assert (error <= 1.4 * relative * steps / root).all()
        largest = values.abs().view(-1, BLOCK).argmax(1, keepdim=True)
        assert torch.equal(kept.view(-1, BLOCK).gather(1, largest), values.view(-1, BLOCK).gather(1, largest))
        assert torch.equal(kept.sign(), values.sign())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_what_a_code_stands_for_gets_the_same_code(dtype: torch.dtype) -> None:
    codes = torch.arange(BLOCK, dtype=torch.int32).to(dtype).repeat(64)
    codes[codes == -128] = 0
    scales = torch.logspace(-42, 38, 64)
    values = decode(codes, scales, torch.empty(len(codes)))
    for seed in range(20):
        random = Chance(seed).words(len(codes), codes.device, "a")
        again, of_blocks = torch.empty_like(codes), torch.empty_like(scales)
        encode(values, random, again, of_blocks, torch.empty_like(values))
        assert torch.equal(of_blocks, scales)
        normal = scales > 1e-20  # smaller ones lose their products with the scale, not their codes
        assert torch.equal(again.view(64, BLOCK)[normal], codes.view(64, BLOCK)[normal])


def test_zeros_stay_and_infinities_show() -> None:
    values = torch.zeros(3 * BLOCK)
    values[BLOCK], values[2 * BLOCK] = torch.inf, torch.nan
    for dtype in (torch.int8, torch.uint8):
        kept = encoded(values, dtype, Chance(0).words(len(values), values.device, "a")).view(3, BLOCK)
        assert kept[0].eq(0.0).all()
        assert not kept[1:].isfinite().any()


def test_averages_decay_also_where_others_do_not() -> None:
    def average(*, by_chance: bool) -> float:
        """Return a second moment after 401 steps, the first with a gradient, in blocks whose first gradient stays 1."""
        chance, length = Chance(0), 16 * BLOCK
        codes, scales = torch.zeros(length, dtype=torch.uint8), torch.zeros(16)
        is_first = torch.arange(length) % BLOCK == 0
        for step in range(401):
            chance.taken = step
            squares = torch.ones(length) if step == 0 else is_first.float()
            exact = 0.999 * decode(codes, scales, torch.empty(length)) + 0.001 * squares
            random = chance.words(length, exact.device, "exp_avg_sq") if by_chance else None
            encode(exact, random, codes, scales, torch.empty(length))
        return decode(codes, scales, torch.empty(length))[~is_first].mean().item()

    expected = 0.001 * 0.999**400
    assert average(by_chance=True) == pytest.approx(expected, rel=0.1)
    assert average(by_chance=False) > 1.2 * expected


@pytest.mark.parametrize("name", MAKE)
def test_state_of_any_optimizer_is_kept_in_8_bits(name: str) -> None:
    make, dtypes = MAKE[name]
    if not dtypes:
        with pytest.raises(ValueError, match=r"keeps no state 'row_var' with the shape of its weights"):
            wrapped(make, state_dtype={"row_var": "int8_blockwise"})
        return
    model, optimizer = wrapped(make, state_dtype=dict.fromkeys(dtypes, "int8_blockwise"))
    fp32, of_fp32 = wrapped(make)
    losses, expected = train(model, optimizer, 8), train(fp32, of_fp32, 8)
    assert sum(losses) == pytest.approx(sum(expected), rel=0.03)
    weight = model.up.weight
    found = {key: value.codes.dtype for key, value in optimizer.state[weight].items() if isinstance(value, Blockwise)}
    assert found == dtypes
    assert any(weight.is_cut for weight in optimizer._weights) is (name != "Muon")


def test_an_optimizer_that_steps_all_weights_at_once_has_8_bits() -> None:
    class Own(optim.AdamW):
        pass

    settings: dict[str, Any] = {"state_dtype": LOW}
    model, optimizer = wrapped(lambda params: Own(params, lr=1e-2), **settings)
    known, of_known = wrapped(lambda params: optim.AdamW(params, lr=1e-2), **settings)
    losses, expected = train(model, optimizer, 20), train(known, of_known, 20)
    assert losses[:2] == expected[:2]
    assert sum(losses[-5:]) == pytest.approx(sum(expected[-5:]), rel=0.03)


def test_a_parameter_takes_8_bytes_beside_its_gradient() -> None:
    model = nn.Linear(1024, 512)
    optimizer = MasterWeights(adamw(model.parameters()), model, state_dtype=LOW)
    for _ in range(2):
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            model(torch.ones(2, 1024)).float().sum().backward()
        optimizer.step()
    memory = optimizer.memory()
    assert memory["state"] <= (2 + 2 * 4 / 256 + 0.01) * memory["parameters"]
    assert memory["weights"] + memory["kept"] + memory["gradients"] + memory["state"] <= 8.1 * memory["parameters"]


def test_weights_without_gradients_keep_their_state() -> None:
    model, optimizer = wrapped(adamw, state_dtype=LOW)
    train(model, optimizer, 3)
    still = [param for name, param in model.named_parameters() if "up" in name]
    before = copy.deepcopy([optimizer.state[param] for param in still])
    for param in model.parameters():
        param.grad = None if any(param is it for it in still) else torch.ones_like(param)
    for _ in range(3):
        optimizer.step()
    for param, earlier in zip(still, before, strict=True):
        for name in LOW:
            assert torch.equal(optimizer.state[param][name].codes, earlier[name].codes)
            assert torch.equal(optimizer.state[param][name].scales, earlier[name].scales)


def test_a_checkpoint_holds_the_state_in_fp32_and_gives_back_the_codes() -> None:
    model, optimizer = wrapped(adamw, state_dtype=LOW)
    train(model, optimizer, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    number = [param is model.up.weight for param in model.parameters()].index(True)
    assert saved["state"][number]["exp_avg_sq"].dtype is torch.float32
    assert saved["state"][number]["exp_avg_sq"].shape == model.up.weight.shape
    again, loaded = wrapped(adamw, state_dtype=LOW)
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved)
    assert all_equal(states(loaded), states(optimizer))
    plain = net()
    of_plain = adamw(plain.parameters())
    of_plain.load_state_dict(optimizer.inner.__class__.state_dict(of_plain) | {"state": saved["state"]})
    train(plain, of_plain, 1)
    _, in_bf16 = wrapped(adamw, state_dtype=dict.fromkeys(LOW, torch.bfloat16))
    in_bf16.load_state_dict(saved)
    copied = copy.deepcopy(optimizer)
    assert all_equal(states(copied), states(optimizer))


def test_state_that_is_there_already_is_stored_in_8_bits() -> None:
    model = net()
    inner = adamw(model.parameters())
    train(model, inner, 2)
    expected = inner.state[model.up.weight]["exp_avg"].clone()
    optimizer = MasterWeights(inner, model, state_dtype=LOW)
    kept = optimizer.state[model.up.weight]["exp_avg"].fp32(model.up.weight)
    torch.testing.assert_close(kept, expected, rtol=0.05, atol=float(expected.abs().amax()) * 1e-3)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (("int8_blockwise", "nearest"), r"^the rounding of state_dtype\['exp_avg'\] must be one of 'stochastic', got"),
        ("int8_blokwise", r"^state_dtype\['exp_avg'\] must be one of .*'int8_blockwise', got 'int8_blokwise'"),
    ],
)
def test_other_8_bits_are_refused(wanted: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wrapped(adamw, state_dtype={"exp_avg": wanted})
