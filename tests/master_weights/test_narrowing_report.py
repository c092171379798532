"""`MasterWeights.narrowing_report`: finds code that reads a weight's dtype, as open_clip's `get_cast_dtype` does."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.master_weights.training import net, same_bits
from torch import nn, optim

import castwise
from castwise import MasterWeights, Policy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.c_fc, self.drop, self.c_proj = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Dropout(0.1),
            nn.Linear(32, 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.c_proj(self.drop(nn.functional.gelu(self.c_fc(self.norm(x)))))


class CastsEmbeddings(nn.Module):
    """Casts embeddings to the dtype of a linear layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.blocks = nn.Embedding(20, 16), nn.Sequential(Block(), Block())
        self.batch_norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor, *, scale: float = 1.0) -> Any:
        x = self.token(tokens).to(self.blocks[0].c_fc.weight.dtype)
        x = self.batch_norm((self.blocks(x) * scale).transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(x)}


TOKENS = torch.arange(18).view(2, 9)


def made(kind: type[nn.Module] = CastsEmbeddings) -> Any:
    torch.manual_seed(0)
    return kind()


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2)


def losses(model: nn.Module, optimizer: optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    values = []
    for _ in range(5):
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(TOKENS)["logits"].flatten(0, 1).float(), TOKENS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def test_code_that_reads_the_dtype_of_a_weight_is_named() -> None:
    model = made()
    optimizer = MasterWeights(adamw(model), model)
    report = optimizer.narrowing_report(model, TOKENS)
    assert not report.is_same
    assert report.differences == (("", "blocks"),)
    assert report.affected[:2] == ("", "blocks")
    assert "token" not in report.affected
    assert str(report).splitlines()[1] == "  the model itself, before it calls 'blocks'"
    plain = made()
    assert losses(model, optimizer) != losses(plain, adamw(plain))


def test_narrow_is_the_way_around() -> None:
    model, plain = made(), made()
    keep = Policy(compute="bfloat16", modules={"blocks.0.c_fc": "float32"}).bind(model)
    optimizer = MasterWeights(adamw(model), model, narrow=keep)
    assert {param.dtype for param in model.blocks[0].c_fc.parameters()} == {torch.float32}
    assert model.blocks[1].c_fc.weight.dtype is torch.bfloat16
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        assert optimizer.narrowing_report(model, TOKENS, scale=2.0).is_same
    assert optimizer.narrowing_report(model, TOKENS, scale=2.0).is_same  # in a region of its own
    assert losses(model, optimizer) == losses(plain, adamw(plain))
    assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())


def test_a_model_that_reads_no_weights_computes_the_same() -> None:
    model: Any = net()
    optimizer = MasterWeights(adamw(model), model)
    report = optimizer.narrowing_report(model, TOKENS)
    assert report.is_same
    assert str(report) == "All modules compute the same bits with 16-bit weights as with fp32 weights."


def test_modules_that_autocast_computes_in_fp32_are_named() -> None:
    model: Any = net()
    with torch.no_grad():
        model.norm.weight.add_(1e-3)
    optimizer = MasterWeights(adamw(model), model, narrow="all")
    report = optimizer.narrowing_report(model, TOKENS)
    assert report.differences[0] == ("token", None)


def test_the_report_changes_nothing() -> None:
    model = made()
    optimizer = MasterWeights(adamw(model), model)
    losses(model, optimizer)
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        model(TOKENS)["logits"].float().sum().backward()
    calls: list[str] = []
    model.head.register_forward_hook(lambda *_: calls.append("head"))
    hooks = [(dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in model.modules()]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    grads = [param.grad.clone() for param in model.parameters()]
    versions = [param._version for param in model.parameters()]
    states = torch.get_rng_state(), random.getstate()
    params = [*model.parameters()]
    for _ in range(2):
        optimizer.narrowing_report(model, TOKENS)
    with pytest.raises(TypeError):
        optimizer.narrowing_report(model, TOKENS, unknown=1)
    assert same_bits(model.state_dict(), before[0])
    after = optimizer.state_dict()["state"]
    assert all(same_bits(after[number], before[1][number]) for number in before[1])
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), grads, strict=True))
    assert [param._version for param in model.parameters()] == versions
    assert all(now is then for now, then in zip(model.parameters(), params, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert [(dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in model.modules()] == hooks
    assert calls == ["head"] * 4


class Noisy(nn.Module):
    """Adds noise from NumPy and Python, and what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = getattr(self, "seen", 0) + 2
        return self.linear(x) + np.random.rand() + random.random() + self.calls + self.seen


def test_noise_of_numpy_and_counters_are_no_difference_and_as_before() -> None:
    model = Noisy()
    before = np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index,union-attr]
    assert MasterWeights(adamw(model), model).narrowing_report(model, torch.ones(2, 4)).is_same
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before  # type: ignore[index,union-attr]
    assert model.calls == 0
    assert not hasattr(model, "seen")


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class FallsBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = Raises(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.fast(x)  # type: ignore[no-any-return]
        except NotImplementedError:
            return self.slow(x)  # type: ignore[no-any-return]


def test_a_module_that_raises_is_a_call_that_has_ended(recwarn: pytest.WarningsRecorder) -> None:
    model = made(FallsBack)
    optimizer = MasterWeights(adamw(model), model)
    report = optimizer.narrowing_report(model, torch.ones(2, 4))
    assert report.is_same
    assert [str(each.message) for each in recwarn if "hook" in str(each.message)] == []


class Shares(nn.Module):
    """One layer and one norm under two names, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.again, self.tied.weight, self.same_norm = self.first, self.first.weight, self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same_norm(self.tied(self.norm(self.again(self.first(x)))))  # type: ignore[no-any-return]


def test_shared_layers_and_weights_are_as_before() -> None:
    model = made(Shares)
    optimizer = MasterWeights(adamw(model), model)
    before = [*model.parameters(), *model.buffers()]
    values = [tensor.clone() for tensor in before]
    assert optimizer.narrowing_report(model, torch.ones(2, 4)).is_same
    after = [*model.parameters(), *model.buffers()]
    assert list(map(id, before)) == list(map(id, after))
    assert all(map(torch.equal, values, after))
    assert model.tied.weight is model.first.weight


def test_every_module_with_a_shared_weight_gets_the_fp32_one() -> None:
    class ReadsDtype(Shares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).to(self.tied.weight.dtype)

    model = made(ReadsDtype)
    optimizer = MasterWeights(adamw(model), model)
    assert not optimizer.narrowing_report(model, torch.ones(2, 4)).is_same


class CallsMore(nn.Module):
    """Calls a module only with 16-bit weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.second.weight.dtype is torch.bfloat16 else x


def test_other_calls_are_a_difference() -> None:
    model = made(CallsMore)
    report = MasterWeights(adamw(model), model).narrowing_report(model, torch.ones(2, 4))
    assert report.differences == (("", None),)


@dataclass
class Output:
    logits: torch.Tensor


class ReturnsAnObject(nn.Module):
    """Reads a weight's dtype after its last layer, and returns an object that torch's pytree does not open."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(logits=self.layer(x) * self.layer.weight.dtype.itemsize)


@pytest.mark.parametrize("kind", [Output, SimpleNamespace])
def test_differences_inside_a_returned_object_are_named(kind: Any) -> None:
    torch.manual_seed(0)
    model = ReturnsAnObject(kind)
    report = MasterWeights(adamw(model), model).narrowing_report(model, torch.randn(2, 4))
    assert report.affected == ("",)


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x.mul_(2))
        return output


def test_both_forwards_get_the_same_batch_from_a_model_that_writes_to_its_input() -> None:
    torch.manual_seed(0)
    model, x = WritesToItsInput(), torch.randn(2, 4)
    before = x.clone()
    assert MasterWeights(adamw(model), model).narrowing_report(model, x).is_same
    assert torch.equal(x, before)


def test_models_that_cannot_be_compared_are_refused() -> None:
    model = made(CallsMore)
    optimizer = MasterWeights(adamw(model), model)
    with pytest.raises(RuntimeError, match=r"^the model is compiled: give narrowing_report the model that"):
        optimizer.narrowing_report(torch.compile(model), torch.ones(2, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^the model has none of the weights of this MasterWeights"):
        optimizer.narrowing_report(net(), TOKENS)
