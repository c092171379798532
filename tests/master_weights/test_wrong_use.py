"""What other code does to weights and optimizers behind the back of `MasterWeights`: found, or harmless."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.master_weights.training import SMALL_BUCKETS, Net, buckets_of, net, same_bits, train, wrapped
from torch import nn, optim

import castwise
from castwise import GradScaler, MasterWeights


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2)


WRITES: dict[str, Callable[[Net], object]] = {
    "part of .data": lambda model: model.up.weight.data[:, :8].zero_(),
    "all of .data": lambda model: setattr(model.up.weight, "data", torch.zeros_like(model.up.weight)),
    "numpy": lambda model: model.up.weight.data.view(torch.int16).numpy().fill(0),
    "in place": lambda model: nn.init.zeros_(model.up.weight),
    "another order": lambda model: model.up.weight.detach().copy_(model.up.weight.detach().flip(0)),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("steps", [0, 2])
def test_writes_are_found_also_where_torch_counts_none(how: str, steps: int) -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, steps)
    WRITES[how](model)
    written = model.up.weight.detach().clone().float()
    with pytest.warns(UserWarning, match="(weight was|weights were) written since the last step of MasterWeights"):
        weights = optimizer.fp32_state_dict(model)
    assert torch.equal(weights["up.weight"], written)
    train(model, optimizer, 1)
    assert all(value.isfinite().all() for value in optimizer.fp32_state_dict(model).values())


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("has_grad", [True, False])
def test_writes_are_found_by_the_step_that_meets_them(how: str, has_grad: bool) -> None:
    model = net()
    optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.1), model)  # one bucket
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.0
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model.up.weight.grad = torch.ones_like(model.up.weight) if has_grad else None
    WRITES[how](model)
    written = model.up.weight.detach().clone()
    with pytest.warns(
        UserWarning, match="(weight was|weights were) written since the last step of MasterWeights"
    ) as caught:
        optimizer.step()
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        assert torch.equal(optimizer.fp32_state_dict(model)["up.weight"], written.float())
    assert torch.equal(model.up.weight, written)


def test_a_write_makes_no_other_bucket_forget() -> None:
    model = net()
    with buckets_of(1 << 14):
        optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, 2)
    exact = optimizer.fp32_state_dict(model)
    optimizer.param_groups[0]["lr"] = 0.0
    model.up.weight.data.zero_()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match=r"^some of 2 weights were written .* \('up.weight', 'up.bias'\)"):
        optimizer.step()  # the two share a bucket
    after = optimizer.fp32_state_dict(model)
    exact["up.weight"].zero_()
    assert torch.equal(after["up.bias"], exact["up.bias"].bfloat16().float())
    exact["up.bias"] = after["up.bias"]
    assert same_bits(after, exact)


def test_weights_that_are_written_after_a_checkpoint_was_loaded_are_not_those_it_is_for() -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as Accelerate's prepare() does
    with torch.no_grad():
        model.up.weight.zero_()
    with pytest.warns(UserWarning, match="weight was written"):
        assert not optimizer.fp32_state_dict(model)["up.weight"].any()


def test_a_copy_of_an_optimizer_with_a_scheduler_steps_its_own_weights() -> None:
    model, optimizer = wrapped(adamw)
    optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: None)
    train(model, optimizer, 1)
    before = optimizer.fp32_state_dict(model)
    for twin, its_optimizer in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        train(twin, its_optimizer, 1)
        assert not same_bits(its_optimizer.fp32_state_dict(twin), before)
        assert same_bits(optimizer.fp32_state_dict(model), before)


def test_copies_keep_ties() -> None:
    model = nn.Linear(40, 30)
    nn.init.constant_(model.weight, 1.00390625)  # rounds down to 1, and is a tie
    optimizer = MasterWeights(adamw(model.parameters()), model)
    for twin, its_optimizer in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        for param in twin.parameters():
            param.grad = torch.zeros_like(param)
        its_optimizer.param_groups[0]["weight_decay"] = 0.0
        its_optimizer.step()
        assert its_optimizer.fp32_state_dict(twin)["weight"].eq(1.00390625).all()


def test_a_first_step_that_is_interrupted_leaves_no_state_of_a_part() -> None:
    model, optimizer = wrapped(lambda params: optim.SGD(params, lr=0.1, momentum=0.9))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    calls = []
    step = optim.SGD.step.__wrapped__  # type: ignore[attr-defined]

    def interrupting(self: Any, closure: None = None) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        interrupting.hooked = False  # type: ignore[attr-defined]
        patch.setattr(optim.SGD, "step", interrupting)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    cut = [weight for weight in optimizer._weights if weight.is_cut]
    assert cut
    assert not any(optimizer.state.get(weight.param) for weight in cut if weight.kept_digests is not None)
    optimizer.step()
    assert all(value.isfinite().all() for value in optimizer.fp32_state_dict(model).values())
    buffers = [optimizer.state[weight.param]["momentum_buffer"] for weight in cut]
    assert all(buffer.abs().amax() <= 2 for buffer in buffers)


def test_another_memory_format_is_found() -> None:
    model: Any = nn.Sequential(nn.Conv2d(4, 8, 3))
    optimizer = MasterWeights(adamw(model.parameters()), model)
    model.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match=r"^'0.weight' was .* strides \(36, 9, 3, 1\), .* strides \(36, 1, 12, 4\)"):
        optimizer.step()


def test_a_parameter_that_left_its_group_is_named() -> None:
    model, optimizer = wrapped(adamw)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if p is not model.up.bias]
    with pytest.raises(RuntimeError, match=r"^'up.bias' is no longer in any group"):
        optimizer.step()
    assert same_bits(model.state_dict(), weights)


class Nested(optim.Optimizer):
    """As SAM and Lookahead are made: another optimizer with the same groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step()


class OwnList(optim.Optimizer):
    """Steps parameters that it has noted in its constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.mine = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.mine:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)


def test_optimizers_that_reach_the_parameters_by_another_way_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^Nested wraps the optimizer in its attribute 'base': give MasterWeights"):
        wrapped(Nested)
    model, optimizer = wrapped(OwnList)
    with pytest.raises(RuntimeError, match=r"^OwnList has written to parameters from its own list"):
        train(model, optimizer, 1)


class Assigns(optim.Optimizer):
    """Puts new weights elsewhere."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - 0.1 * param.grad


def test_weights_that_an_optimizer_puts_elsewhere_are_stepped() -> None:
    plain = net()
    expected = train(plain, Assigns(plain.parameters()), 4)
    for nbytes in (SMALL_BUCKETS, 1 << 20):
        model = net()
        with buckets_of(nbytes):
            optimizer = MasterWeights(Assigns(model.parameters()), model)
        assert train(model, optimizer, 4) == expected
        assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())


def test_fp16_gradients_are_unscaled_by_the_step_alone() -> None:
    model, optimizer = wrapped(adamw, dtype=torch.float16)
    scaler = GradScaler("cpu")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.") as caught:
        scaler.unscale_(optimizer)
    text = "MasterWeights unscales in its step: to clip, call scaler.clip_grad_norm_(optimizer, ...) instead"
    assert str(caught.value).partition("gradients.")[2].strip() == text
    assert all(param.grad is not None and (param.grad == 1).all() for param in model.parameters())
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)


def test_scaled_gradients_are_not_clipped_as_if_they_were_not() -> None:
    model, optimizer = wrapped(adamw)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.zeros(2, 5, dtype=torch.int64)).float().square().mean()
    scaler.scale(loss).backward()
    optimizer.clip_grad_norm_(1.0)
    weights = optimizer.fp32_state_dict(model)
    with pytest.raises(RuntimeError, match=r"^the gradients are scaled, but were clipped as if they were not"):
        scaler.step(optimizer)
    assert same_bits(optimizer.fp32_state_dict(model), weights)


class Standardized(nn.Conv1d):
    """Computes with its weight before autocast sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        return nn.functional.conv1d(x, weight, self.bias, padding=1)


class Gained(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.gain = nn.Parameter(torch.ones(8))


def test_layers_that_do_more_with_their_weights_keep_them_in_fp32() -> None:
    model: Any = nn.ModuleDict({"std": Standardized(4, 4, 3), "gained": Gained(), "patched": nn.Linear(4, 4)})
    model["patched"].forward = lambda x: x @ model["patched"].weight
    model["normed"] = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    model["attention"] = nn.MultiheadAttention(4, 2)
    MasterWeights(adamw(model.parameters()), model)
    low = {name for name, param in model.named_parameters() if param.dtype is torch.bfloat16}
    assert low == {
        *("gained.weight", "gained.bias", "normed.bias", "attention.out_proj.weight", "attention.out_proj.bias")
    }


def test_an_optimizer_with_nothing_to_do_is_reported_of() -> None:
    model, other = net(), net()
    with pytest.warns(UserWarning, match=r"^MasterWeights has nothing to do"):
        MasterWeights(adamw(other.parameters()), model)
    with pytest.raises(ValueError, match=r"^'token.weight' is torch.float16 already: give dtype=torch.float16, or"):
        MasterWeights(adamw((half := net().half()).parameters()), half)


def test_a_model_is_made_16_bit_before_it_is_wrapped() -> None:
    model = net()
    MasterWeights.narrow_(model)
    optimizer = MasterWeights(adamw(model.parameters()), model)
    assert model.up.weight.dtype is torch.bfloat16
    assert model.norm.weight.dtype is torch.float32
    assert torch.equal(optimizer.fp32_state_dict(model)["up.weight"], net().up.weight.bfloat16().float())
    with pytest.raises(ValueError, match=r"^dtype must be one of"):
        MasterWeights.narrow_(model, torch.float32)


def test_two_optimizers_of_one_model_load_a_checkpoint_together() -> None:
    def pair() -> tuple[Net, list[MasterWeights]]:
        model = net()
        first = [param for name, param in model.named_parameters() if "up" in name]
        rest = [param for name, param in model.named_parameters() if "up" not in name]
        return model, [MasterWeights(adamw(params), model) for params in (first, rest)]

    model, optimizers = pair()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for each in optimizers:
        each.step()
    saved = {}
    for each in optimizers:
        for name, value in each.fp32_state_dict(model).items():
            saved[name] = (
                value
                if value.dtype is torch.float32 and (name not in saved or saved[name].dtype is not torch.float32)
                else saved.get(name, value)
            )
    again, loaded = pair()
    loaded[0].load_fp32_state_dict(again, saved)
    for name in ("up.weight", "down.weight"):
        fp32 = [each.fp32_state_dict(again)[name] for each in loaded]
        assert any(torch.equal(value, saved[name]) for value in fp32 if value.dtype is torch.float32)
    with pytest.raises(ValueError, match=r"^the model has none of the weights of this MasterWeights"):
        loaded[0].fp32_state_dict(net())


def test_checkpoints_of_another_choice_of_weights_are_refused() -> None:
    model, everything = wrapped(adamw, narrow="all")
    train(model, everything, 1)
    saved = everything.state_dict()
    _, optimizer = wrapped(adamw)
    with pytest.raises(ValueError, match=r"^the checkpoint has bits of a 16-bit weight for parameter 0, which is fp32"):
        optimizer.load_state_dict(saved)
    plain = adamw((low := net().bfloat16()).parameters())
    plain.load_state_dict(saved)  # which casts residues to bfloat16
    with pytest.raises(
        ValueError,
        match=r"is torch.bfloat16 in the checkpoint, not torch.\w+: another optimizer loaded and cast it.* remove the "
        "entries that begin with 'master_weights.'",
    ):
        wrapped(adamw, narrow="all")[1].load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match=r"^the optimizer has state of a MasterWeights for 'token.weight': load"):
        MasterWeights(plain, low)
    with pytest.raises(ValueError, match=r'^the state_dict of an optimizer must have "state" and "param_groups"'):
        optimizer.load_state_dict({"a": 1})


def test_low_state_is_rounded_apart_for_each_weight() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    low = {"momentum_buffer": torch.bfloat16}
    optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.0, momentum=0.9), model, state_dtype=low)
    buffers = []
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.3)
        optimizer.step()
        buffers += [optimizer.state[param]["momentum_buffer"].clone() for param in model.parameters()]
    assert not torch.equal(buffers[2], buffers[3])


def test_low_state_is_rounded_to_nearest_if_asked() -> None:
    def buffer(rounding: str) -> torch.Tensor:
        model = nn.Linear(64, 64, bias=False)
        wished = {"momentum_buffer": (torch.bfloat16, rounding)}
        optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.0, momentum=0.9), model, state_dtype=wished)
        model.weight.grad = torch.full_like(model.weight, 0.3)
        for _ in range(2):
            optimizer.step()
        found: torch.Tensor = optimizer.state[model.weight]["momentum_buffer"]
        return found

    first = torch.tensor(0.3).bfloat16().float()
    assert buffer("nearest").eq((first * 0.9 + first).bfloat16()).all()
    assert len(buffer("stochastic").unique()) == 2
    with pytest.raises(
        ValueError, match=r"^the rounding of state_dtype\['exp_avg'\] must be one of 'stochastic', 'nearest'"
    ):
        wrapped(adamw, state_dtype={"exp_avg": (torch.bfloat16, "up")})


def test_state_that_is_there_already_is_stored_as_wished() -> None:
    model = net()
    inner = adamw(model.parameters())
    train(model, inner, 2)
    optimizer = MasterWeights(inner, model, state_dtype={"exp_avg": torch.bfloat16})
    assert optimizer.state[model.up.weight]["exp_avg"].dtype is torch.bfloat16
    assert optimizer.state[model.up.weight]["exp_avg_sq"].dtype is torch.float32
    train(model, optimizer, 1)


class OnlyInTraining(optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert self.param_groups[0].get("train_mode"), "not in train mode"
        super().step()

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True


def test_names_of_state_are_not_checked_of_an_optimizer_that_cannot_step_yet() -> None:
    model, optimizer = wrapped(
        lambda params: OnlyInTraining(params, lr=0.1, momentum=0.9), state_dtype={"momentum_buffer": torch.bfloat16}
    )
    optimizer.train()
    train(model, optimizer, 1)
    assert optimizer.state[model.up.weight]["momentum_buffer"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"generator": 3}, TypeError, r"^generator must be a torch.Generator, got int"),
        ({"state_dtype": ["exp_avg"]}, TypeError, r"^state_dtype must be a mapping from state names"),
    ],
)
def test_types_of_settings(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        wrapped(adamw, **settings)
    gc.collect()


@pytest.mark.parametrize("how", ["as it is", "copied", "pickled"])
def test_the_inner_optimizer_cannot_be_stepped_alone(how: str) -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 1)
    if how != "as it is":
        again = copy.deepcopy if how == "copied" else lambda both: pickle.loads(pickle.dumps(both))
        model, optimizer = again((model, optimizer))
    before = optimizer.fp32_state_dict(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    for step in (optimizer.inner.step, lambda: scaler.step(optimizer.inner)):
        with pytest.raises(RuntimeError, match=r"this AdamW is inside a MasterWeights.*call step\(\) of the Master"):
            step()
    assert same_bits(before, optimizer.fp32_state_dict(model))
    optimizer.step()
    assert not same_bits(before, optimizer.fp32_state_dict(model))


def test_an_optimizer_may_be_stepped_alone_when_its_master_weights_are_gone() -> None:
    model, optimizer = wrapped(adamw)
    inner = optimizer.inner
    del optimizer
    gc.collect()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    inner.step()
    castwise.MasterWeights(inner, model)
    assert len(inner._optimizer_step_pre_hooks) == 1


def test_no_deprecated_name_of_torch_is_touched(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = nn.Linear(4, 4)
            castwise.MasterWeights(torch.optim.SGD(model.parameters(), 0.1), model)
    finally:
        torch.distributed.destroy_process_group()


def test_sums_over_ranks_need_ddp_and_compensation() -> None:
    model, optimizer = wrapped(adamw)
    not_in_ddp: Any = model
    with pytest.raises(TypeError, match=r"^model must be a DistributedDataParallel, got Net"):
        optimizer.sum_over_ranks(not_in_ddp)
    in_ddp = object.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(
        ValueError, match=r'^sum_over_ranks keeps bits beside gradients: give MasterWeights accumulate="co'
    ):
        optimizer.sum_over_ranks(in_ddp)
    model, optimizer = wrapped(adamw, accumulate="compensated")
    vars(in_ddp)["gradient_as_bucket_view"] = True
    with pytest.raises(ValueError, match=r"^gradients must not be views of DDP's buckets"):
        optimizer.sum_over_ranks(in_ddp)
