"""`MasterWeights` against fp32 weights under autocast, on the same numbers and bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.master_weights.training import SMALL_BUCKETS, Net, batches, buckets_of, net, same_bits, train, wrapped
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import castwise
from castwise import GradScaler, MasterWeights, Policy
from castwise.master_weights import _parameter_clipping as parameter_clipping

BF16 = torch.bfloat16
ADAMW: Callable[..., optim.Optimizer] = lambda params: optim.AdamW(params, lr=1e-2, fused=True)  # noqa: E731


def _optimizers() -> dict[str, Callable[..., optim.Optimizer]]:
    found: dict[str, Callable[..., optim.Optimizer]] = {}

    def add(name: str, cls: Any, **options: Any) -> None:
        found[f"{cls.__name__}, {name}"] = lambda params: cls(params, lr=1e-2, **options)

    classes: list[Any] = [optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD]
    classes += [optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD]
    for cls in classes:
        add("loop", cls, foreach=False)
        add("foreach", cls, foreach=True)
        if cls in (optim.Adagrad, optim.Adam, optim.AdamW, optim.SGD):
            add("fused", cls, fused=True)
    add("amsgrad", optim.Adam, amsgrad=True, fused=True)
    add("momentum", optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True)
    add("centered", optim.RMSprop, centered=True, momentum=0.9)
    add("maximize", optim.AdamW, maximize=True)
    add("decoupled", optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1)
    add("by parameter", optim.Adafactor)

    class Unknown(optim.AdamW):
        """Nothing is known of a subclass: it is called once a step, with everything."""

    add("subclass", Unknown, fused=True)
    return found


OPTIMIZERS = _optimizers()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_trains_as_with_fp32_weights(name: str) -> None:
    make, steps = OPTIMIZERS[name], 300 if name in ("AdamW, fused", "SGD, foreach") else 12
    plain = net()
    expected = train(plain, make(plain.parameters()), steps)
    model, optimizer = wrapped(make)
    assert train(model, optimizer, steps) == expected
    assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())
    assert model.up.weight.dtype is torch.bfloat16
    for param, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, of_plain.to(param.dtype))


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has no Muon")
def test_muon_sees_whole_matrices() -> None:
    def step(params: Any) -> optim.Optimizer:
        return optim.Muon([param for param in params if param.dim() == 2], lr=1e-2)

    plain = net()
    expected = train(plain, step(plain.parameters()), 8)
    model, optimizer = wrapped(step)
    assert train(model, optimizer, 8) == expected
    assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())


def test_capturable_counts_of_steps_are_kept() -> None:
    plain = net()
    expected = optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    train(plain, expected, 5)
    model, optimizer = wrapped(ADAMW)
    train(model, optimizer, 5)
    assert [each["step"] for each in optimizer.state.values()] == [torch.tensor(5.0)] * len(optimizer.state)
    for param, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
        for name, value in expected.state[of_plain].items():
            assert torch.equal(optimizer.state[param][name], value)


class KeepsStateInItsGroup(optim.Optimizer):
    """As schedule-free optimizers do: a second call in one step would change what the first one has done."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "calls": 0, "norm": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            grads = [param.grad for param in group["params"] if param.grad is not None]
            group["norm"] = torch.stack([grad.norm() for grad in grads]).norm().item()
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / (group["norm"] * group["calls"]))

    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.999)


def test_an_optimizer_nobody_knows_sees_everything_at_once() -> None:
    plain = net()
    other = KeepsStateInItsGroup(plain.parameters())
    expected = train(plain, other, 10)
    model, optimizer = wrapped(KeepsStateInItsGroup)
    assert train(model, optimizer, 10) == expected
    assert optimizer.param_groups[0]["calls"] == other.param_groups[0]["calls"] == 10
    other.eval()
    optimizer.eval()
    assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())
    assert not hasattr(optimizer, "train")
    assert not hasattr(wrapped(ADAMW)[1], "eval")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("enabled", [True, False])
def test_scaling_clipping_and_skipping_have_the_same_bits(fused: bool, clip: float | None, enabled: bool) -> None:
    results = []
    for with_master in (False, True):
        make: Callable[..., optim.Optimizer] = lambda params: optim.AdamW(params, lr=1e-2, fused=fused)  # noqa: E731
        if with_master:
            model, optimizer = wrapped(make)
        else:
            model = net()
            optimizer = make(model.parameters())  # type: ignore[assignment]
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled=enabled)
        bad = (lambda step: step % 7 == 3) if enabled else (lambda step: False)
        numbers = train(model, optimizer, 20, scaler=scaler, clip=clip, bad=bad)
        weights = optimizer.fp32_state_dict(model) if with_master else model.state_dict()
        results.append((str(numbers), scaler.get_scale(), {name: weights[name].tolist() for name in weights}))
    assert results[0] == results[1]


def test_torchs_own_scaler_finds_an_optimizer_that_unscales_by_itself() -> None:
    results = []
    for scaler in (GradScaler("cpu", init_scale=64.0), torch.amp.GradScaler("cpu", init_scale=64.0)):
        model, optimizer = wrapped(ADAMW)
        numbers = train(model, optimizer, 10, scaler=scaler, bad=lambda step: step == 4)  # type: ignore[arg-type]
        results.append((numbers, optimizer.fp32_state_dict(model)))
    assert results[0][0] == results[1][0]
    assert same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("method", ["split", "stochastic"])
@pytest.mark.parametrize("state_dtype", [None, *({"exp_avg": it, "exp_avg_sq": it} for it in (BF16, "int8_blockwise"))])
def test_a_skipped_step_changes_no_bit(method: str, state_dtype: Any) -> None:
    model, optimizer = wrapped(ADAMW, method=method, state_dtype=state_dtype)
    train(model, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = GradScaler("cpu")
    train(model, optimizer, 1, scaler=scaler, bad=lambda step: True)
    assert scaler.step_skipped
    assert same_bits(model.state_dict(), weights)
    after = optimizer.state_dict()
    assert all(same_bits(before["state"][number], after["state"][number]) for number in before["state"])


@pytest.mark.parametrize("method", ["split", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_a_device_did_not_step_change_no_bit(method: str, dtype: torch.dtype) -> None:
    """Where the host does not know of a skip, weights are decoded and encoded all the same."""
    model, optimizer = wrapped(lambda params: optim.AdamW(params, lr=1e-2), method=method, dtype=dtype)
    train(model, optimizer, 3, dtype=dtype)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    with torch.no_grad():
        for bucket in optimizer._buckets:
            views = optimizer._workspace.views_of(bucket)
            assert not bucket.decode(views)
            bucket.encode(views, bucket.segments)
    assert same_bits(model.state_dict(), before[0])
    after = optimizer.state_dict()["state"]
    assert all(same_bits(after[number], before[1][number]) for number in after)


def test_half_precision_unscales_in_fp32() -> None:
    model, optimizer = wrapped(lambda params: optim.SGD(params, lr=0.5), dtype=torch.float16)
    assert model.up.weight.dtype is torch.float16
    scaler = GradScaler("cpu", init_scale=2.0**16)
    plain = net()
    reference = optim.SGD(plain.parameters(), lr=0.5)
    numbers = train(model, optimizer, 8, scaler=scaler, dtype=torch.float16)
    expected = train(plain, reference, 8, scaler=GradScaler("cpu", init_scale=2.0**16), dtype=torch.float16)
    assert numbers == expected
    weights = optimizer.fp32_state_dict(model)
    for name, value in plain.state_dict().items():
        assert (weights[name] - value).abs().amax() <= 2.0**-39  # small weights are held in fixed point


def test_gradients_are_unscaled_after_a_scaled_step() -> None:
    for fused in (True, False):
        model, optimizer = wrapped(lambda params: optim.AdamW(params, fused=fused))  # noqa: B023
        scaler = GradScaler("cpu", init_scale=1024.0)
        batch = next(batches(1))
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaled = [param.grad.clone() for param in model.parameters()]
        scaler.step(optimizer)
        for param, grad in zip(model.parameters(), scaled, strict=True):
            assert torch.equal(param.grad, grad / 1024)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_complex_gradients_are_no_pairs_of_real_ones_beside_16_bit_weights(norm_type: float) -> None:
    norms = []
    for with_master in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Linear(3, 2)
        model.phase = nn.Parameter(torch.tensor([3.0 + 4.0j]))
        model.gain = nn.Parameter(torch.ones(1))
        optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
        if with_master:
            optimizer = MasterWeights(optimizer, model)
        scaler = GradScaler("cpu", init_scale=64.0)
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(4, 3)).float().sum() + model.phase.abs().sum() + model.gain.sum()
        scaler.scale(loss).backward()
        norms.append(scaler.clip_grad_norm_(optimizer, 1.0, norm_type=norm_type).item())
    assert norms[0] == norms[1]


def test_clipping_by_torch_rounds_and_warns_and_ours_does_not() -> None:
    warned: list[str] = []

    def norm_of(how: str) -> tuple[float, dict[str, Any]]:
        model, optimizer = wrapped(ADAMW) if how != "fp32" else (net(), None)
        optimizer = optimizer or ADAMW(model.parameters())
        for batch in batches(3):
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch).float().square().mean()
            loss.backward()
            if how == "ours":
                norm = optimizer.clip_grad_norm_(0.1)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            warned.extend(str(warning.message).partition(",")[0] for warning in caught)
            optimizer.zero_grad()
        return norm.item(), optimizer.fp32_state_dict(model) if how != "fp32" else model.state_dict()

    (norm, weights), (ours, same) = map(norm_of, ("fp32", "ours"))
    assert warned == []
    rounded, other = norm_of("torch")
    assert len(warned) == 1
    assert warned[0].startswith("gradients of MasterWeights were multiplied by 0.0008")
    assert ours == norm != rounded
    assert same_bits(same, weights)
    assert not same_bits(other, weights)


def test_sums_that_are_clipped_by_parameters_after_each_backward_are_clipped_once_with_a_warning() -> None:
    def train(clip: Callable[[Net, Any, bool], object]) -> tuple[dict[str, Any], list[str]]:
        model, optimizer = wrapped(ADAMW)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                for micro_batch, batch in enumerate(batches(2, 2 * step)):
                    with castwise.autocast("cpu", dtype=torch.bfloat16):
                        model(batch).float().square().mean().backward()
                    clip(model, optimizer, micro_batch == 1)
                optimizer.step()
                optimizer.zero_grad()
        return optimizer.fp32_state_dict(model), [str(warning.message) for warning in caught]

    def after_the_last(model: Net, optimizer: Any, is_last: bool) -> None:
        if is_last:
            optimizer.clip_grad_norm_(0.1)

    def after_each(model: Net, optimizer: Any, is_last: bool) -> None:
        parameter_clipping.clip_grad_norm_([*model.parameters()], 0.1)

    def and_written(model: Net, optimizer: Any, is_last: bool) -> None:
        if is_last:
            parameter_clipping.clip_grad_norm_([*model.parameters()], 0.1)
            torch._foreach_mul_([param.grad for param in model.parameters()], 1.0)

    expected, warned = train(after_the_last)
    assert warned == []
    for clip in (after_each, and_written):
        weights, warned = train(clip)
        assert same_bits(weights, expected)
        assert len(warned) == 1
        assert warned[0].startswith("gradients of MasterWeights were clipped before the last backward added to them")


def test_clipping_is_for_the_gradients_there_were() -> None:
    model, optimizer = wrapped(ADAMW)

    def backward() -> None:
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            model(next(batches(1))).float().square().mean().backward()

    backward()
    optimizer.clip_grad_norm_(0.1)
    backward()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"^a backward has added to gradients after clip_grad_norm_\(\)"):
        optimizer.step()
    assert same_bits(model.state_dict(), weights)
    backward()
    optimizer.clip_grad_norm_(1e-30)
    optimizer.zero_grad()
    backward()
    optimizer.step()  # not clipped: these are others
    assert not same_bits(model.state_dict(), weights)
    with pytest.raises(ValueError, match=r"^max_norm must be a number >= 0, got -1"):
        optimizer.clip_grad_norm_(-1)
    model.up.weight.grad.fill_(torch.inf)
    with pytest.raises(RuntimeError, match=r"^the norm of order 2.0 of the gradients is inf"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_gradients_in_higher_precision_are_clipped_with_the_others(norm_type: float) -> None:
    results = []
    for with_master in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Linear(30, 20)
        model.exact = nn.Parameter(torch.full((3,), 1 / 3, dtype=torch.float64))
        model.phase = nn.Parameter(torch.tensor([3.0 + 4.0j]))
        optimizer: Any = optim.SGD(model.parameters(), lr=0.1)
        if with_master:
            optimizer = MasterWeights(optimizer, model)
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(4, 30)).float().sum()
        (loss + model.exact.sum() + model.phase.abs().sum()).backward()
        if with_master:
            norm = optimizer.clip_grad_norm_(0.5, norm_type)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
        optimizer.step()
        results.append((norm, optimizer.fp32_state_dict(model) if with_master else model.state_dict()))
    (norm, weights), (ours, same) = results
    assert ours.dtype is norm.dtype is torch.float64
    assert ours.item() == pytest.approx(norm.item(), rel=1e-6)
    for name, value in weights.items():
        assert same[name].dtype is value.dtype
        assert torch.allclose(same[name], value, rtol=1e-6, atol=1e-9)


def clipped_and_stepped(
    *, with_master: bool, clip: Callable[[Net, Any], list[Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """Return what clipping returned, and the fp32 weights after a step."""
    model = net()
    optimizer: Any = optim.SGD(model.parameters(), lr=1.0)
    if with_master:
        optimizer = MasterWeights(optimizer, model)
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        model(next(batches(1))).float().square().mean().backward()
    norms = clip(model, optimizer if with_master else None)
    optimizer.step()
    return norms, optimizer.fp32_state_dict(model) if with_master else model.state_dict()


@pytest.mark.parametrize("bounds", [(0.1, 100.0), (100.0, 0.1), (0.2, 0.1), (0.1, 0.2)])
@pytest.mark.parametrize("by_value", [False, True])
def test_a_gradient_that_is_clipped_twice_keeps_to_both_bounds(by_value: bool, bounds: tuple[float, float]) -> None:
    def clip(model: Net, optimizer: MasterWeights | None) -> list[float]:
        clip_value: Any = nn.utils.clip_grad_value_ if optimizer is None else optimizer.clip_grad_value_
        clip_norm: Any = nn.utils.clip_grad_norm_ if optimizer is None else optimizer.clip_grad_norm_
        first = () if optimizer is not None else ([*model.parameters()],)
        if by_value:
            clip_value(*first, bounds[0] / 100)
        norms = [clip_norm(*first, bound) for bound in bounds]
        if by_value:
            clip_value(*first, bounds[1] / 100)
        return [norm.item() for norm in norms]

    (norms, weights), (ours, same) = (clipped_and_stepped(with_master=each, clip=clip) for each in (False, True))
    assert ours == norms
    assert same_bits(same, weights)


def test_some_of_the_parameters_are_clipped_by_their_own_norm() -> None:
    def clip(model: Net, optimizer: MasterWeights | None) -> list[float]:
        norms = []
        for params in ([*model.up.parameters()], [model.down.weight, model.norm.weight], [*model.parameters()]):
            norm = None if optimizer is None else parameter_clipping.clip_grad_norm_(params, 0.01)
            norms.append(nn.utils.clip_grad_norm_(params, 0.01) if norm is None else norm)
        if optimizer is None or not parameter_clipping.clip_grad_value_([model.down.weight], 1e-5):
            nn.utils.clip_grad_value_([model.down.weight], 1e-5)
        return [norm.item() for norm in norms]

    (norms, weights), (ours, same) = (clipped_and_stepped(with_master=each, clip=clip) for each in (False, True))
    assert ours == norms
    assert same_bits(same, weights)


def test_two_optimizers_are_clipped_by_one_norm() -> None:
    results = []
    for with_master in (False, True):
        model = net()
        first, second = [*model.up.parameters()], [*model.down.parameters()]
        optimizers: list[Any] = [optim.SGD(first, lr=1.0), optim.SGD(second, lr=1.0)]
        if with_master:
            optimizers[0] = MasterWeights(optimizers[0], model)
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            model(next(batches(1))).float().square().mean().backward()
        norm = parameter_clipping.clip_grad_norm_([*second, *first], 0.1) if with_master else None
        assert (norm is None) is not with_master
        norm = nn.utils.clip_grad_norm_([*second, *first], 0.1) if norm is None else norm
        for optimizer in optimizers:
            optimizer.step()
        fp32 = optimizers[0].fp32_state_dict(model) if with_master else model.state_dict()
        results.append((norm.item(), fp32))
    assert results[0][0] == results[1][0]
    assert same_bits(results[0][1], results[1][1])
    assert parameter_clipping.clip_grad_norm_(second, 0.1) is None  # no MasterWeights has these
    assert not parameter_clipping.clip_grad_value_(second, 0.1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["value", "norm, value", "unscale, norm", "unscale, value", "value, unscale"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_clips_in_fp32(enabled: bool, how: str, fused: bool) -> None:
    results = []
    for with_master in (False, True):
        model = net()
        optimizer: Any = optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        if with_master:
            optimizer = MasterWeights(optimizer, model)
        scaler, numbers = GradScaler("cpu", init_scale=4096.0, growth_interval=2, enabled=enabled), list[Any]()
        for step, batch in enumerate(batches(5)):
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch).float().square().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1.0) if enabled else loss).backward()
            for call in how.split(", "):
                if call == "unscale":
                    scaler.unscale_(optimizer)
                elif call == "value":
                    scaler.clip_grad_value_(optimizer, 0.001)
                else:
                    numbers.append(str(scaler.clip_grad_norm_(optimizer, 0.1)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((numbers, optimizer.fp32_state_dict(model) if with_master else model.state_dict()))
    assert results[0][0] == results[1][0]
    assert same_bits(results[1][1], results[0][1])


def test_a_scaler_does_not_measure_what_it_clips_by_value_later() -> None:
    model, optimizer = wrapped(ADAMW)
    scaler = GradScaler("cpu")
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        scaler.scale(model(next(batches(1))).float().square().mean()).backward()
    scaler.clip_grad_value_(optimizer, 0.1)
    with pytest.raises(RuntimeError, match=r"^the gradients are clipped by value in the step: call"):
        scaler.clip_grad_norm_(optimizer, 0.1)


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda grad: grad.mul_(0.3), "multiplied by 0.3"),
        (lambda grad: grad.clamp_(-1e-4, 1e-4), "limited to 0.0001"),
        (lambda grad: grad.mul_(0.25), None),  # without rounding
        (lambda grad: grad.mul_(1.0), None),
        (lambda grad: grad.add_(torch.linspace(0, 1e-2, grad.numel()).view_as(grad)), None),
        (lambda grad: grad.mul_(torch.nan), None),
    ],
)
def test_gradients_that_are_clipped_in_16_bits_are_warned_of(change: Callable[[Any], Any], how: str | None) -> None:
    model, optimizer = wrapped(ADAMW)
    warned = []
    for batch in batches(4):
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            model(batch).float().square().mean().backward()
        for param in model.parameters():
            change(param.grad)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        warned += [str(warning.message) for warning in caught]
        optimizer.zero_grad()
    assert len(warned) == (how is not None)
    for message in warned:
        assert message.startswith(f"gradients of MasterWeights were {how} in torch.bfloat16 since the backward")
        assert "optimizer.clip_grad_norm_(max_norm)" in message


def test_rare_clipping_in_16_bits_is_warned_of_where_gradients_are_written_to_in_each_step() -> None:
    model, optimizer = wrapped(ADAMW)
    warned = []
    for step, batch in enumerate(batches(14)):
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            model(batch).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 if step in (10, 12) else 1e6)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        warned += [(step, str(warning.message).partition(" were ")[0]) for warning in caught]
        optimizer.zero_grad()
    assert warned == [(10, "gradients of MasterWeights")]


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_compensated_sums_have_the_bits_of_fp32_sums(set_to_none: bool, micro_batches: int) -> None:
    def accumulate(model: Net, optimizer: Any, clip: Callable[[], torch.Tensor]) -> list[float]:
        norms = []
        for step in range(4):
            for batch in batches(micro_batches, micro_batches * step):
                with castwise.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(batch).float().square().mean() / micro_batches
                loss.backward()
            norms.append(clip().item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return norms

    plain = net()
    expected = accumulate(plain, ADAMW(plain.parameters()), lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    model, optimizer = wrapped(ADAMW, accumulate="compensated")
    assert accumulate(model, optimizer, lambda: optimizer.clip_grad_norm_(0.1)) == expected
    assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())
    rounded, of_rounded = wrapped(ADAMW)
    accumulate(rounded, of_rounded, lambda: of_rounded.clip_grad_norm_(0.1))
    is_same = same_bits(of_rounded.fp32_state_dict(rounded), plain.state_dict())
    assert is_same is (micro_batches == 1)


@pytest.mark.parametrize("frozen", [range(2), range(1, 4)], ids=["until a step", "from a step on"])
def test_a_layer_that_is_frozen_for_some_steps_ends_as_with_fp32_weights(frozen: range) -> None:
    def train(make: Callable[[Net], Any]) -> Any:
        model = net()
        model.conv.requires_grad_(0 not in frozen)
        optimizer = make(model)
        for step in range(6):
            model.conv.requires_grad_(step not in frozen)
            for batch in batches(2, 2 * step):
                with castwise.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(batch).float().square().mean() / 2
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict() if isinstance(optimizer, optim.AdamW) else optimizer.fp32_state_dict(model)

    expected = train(lambda model: ADAMW(model.parameters()))
    assert same_bits(
        train(lambda model: MasterWeights(ADAMW(model.parameters()), model, accumulate="compensated")), expected
    )


def test_a_scaler_clips_compensated_sums_by_the_norm_of_fp32_sums() -> None:
    def train(model: Net, optimizer: Any) -> list[float]:
        scaler, norms = GradScaler("cpu", init_scale=2.0**10), []
        for step in range(4):
            for batch in batches(3, 3 * step):
                with castwise.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(batch).float().square().mean() / 3
                scaler.scale(loss).backward()
            norms.append(scaler.clip_grad_norm_(optimizer, 0.1).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return norms

    plain, (model, optimizer) = net(), wrapped(ADAMW, accumulate="compensated")
    assert train(model, optimizer) == train(plain, ADAMW(plain.parameters()))
    assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())


def test_compensation_needs_memory_from_the_second_micro_batch_until_the_step() -> None:
    model, optimizer = wrapped(ADAMW, accumulate="compensated")
    measured = []
    for batch in batches(3):
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            model(batch).float().square().mean().backward()
        measured.append(optimizer.memory()["gradients"])
    in_bf16 = 2 * optimizer.memory()["parameters"]
    assert measured == [in_bf16, 2 * in_bf16, 2 * in_bf16]
    optimizer.step()
    assert optimizer.memory()["gradients"] == in_bf16


def test_compensation_drops_what_belongs_to_other_gradients() -> None:
    model, optimizer = wrapped(lambda params: optim.SGD(params, lr=1.0), accumulate="compensated")
    before = {name: value.clone() for name, value in optimizer.fp32_state_dict(model).items()}
    for batch in batches(2):
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            model(batch).float().square().mean().backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.fill_(0.5)
    optimizer.step()
    after = optimizer.fp32_state_dict(model)
    assert all(torch.equal(after[name], before[name] - 0.5) for name in before)


def test_compensated_sums_that_are_not_finite_stay_so() -> None:
    layer = nn.Linear(1, 4, bias=False)
    optimizer = MasterWeights(optim.SGD(layer.parameters(), lr=1.0), layer, accumulate="compensated")
    weight, infinite = layer.weight, float("inf")
    largest = torch.finfo(torch.bfloat16).max
    for row in ([infinite, infinite, float("nan"), largest], [1.0, -infinite, 1.0, largest]):
        torch.autograd.backward(weight, torch.tensor(row, dtype=torch.bfloat16).view(4, 1))
    assert weight.grad is not None
    assert [str(value) for value in weight.grad.flatten().tolist()] == ["inf", "nan", "nan", "inf"]
    copied = copy.deepcopy((layer, optimizer))[1]
    assert [*copied.param_groups[0]["params"][0].shape] == [4, 1]
    optimizer.step()
    assert not weight.isfinite().any()


def test_compensation_is_for_bf16() -> None:
    model = net()
    for options in ({"dtype": torch.float16}, {"grad_dtype": torch.float32}):
        if "grad_dtype" in options and not hasattr(torch.Tensor, "grad_dtype"):
            continue
        settings: dict[str, Any] = options
        with pytest.raises(ValueError, match=r'^accumulate="compensated" is for bfloat16 gradients'):
            MasterWeights(ADAMW(model.parameters()), model, accumulate="compensated", **settings)
    with pytest.raises(ValueError, match=r"^accumulate must be one of 'plain', 'compensated', got 'compensate'"):
        MasterWeights(ADAMW(model.parameters()), model, accumulate="compensate")


def test_accumulation_in_fp32_is_exact() -> None:
    def accumulate(model: Net, optimizer: Any) -> dict[str, Any]:
        for step in range(4):
            for batch in batches(3, 3 * step):
                with castwise.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(batch).float().square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.fp32_state_dict(model) if isinstance(optimizer, MasterWeights) else model.state_dict()

    plain = net()
    expected = accumulate(plain, ADAMW(plain.parameters()))
    assert not same_bits(accumulate(*wrapped(ADAMW)), expected)
    if hasattr(torch.Tensor, "grad_dtype"):
        model, optimizer = wrapped(ADAMW, grad_dtype=torch.float32)
        assert same_bits(accumulate(model, optimizer), expected)
        assert optimizer.memory()["gradients"] == 0
    else:
        with pytest.raises(ValueError, match=r"^grad_dtype=torch.float32 needs torch >= 2.13"):
            wrapped(ADAMW, grad_dtype=torch.float32)


# -- which parameters --------------------------------------------------------------------------------------------------


def test_what_autocast_does_not_cast_stays_fp32() -> None:
    model, optimizer = wrapped(ADAMW)
    low = {name for name, param in model.named_parameters() if param.dtype is torch.bfloat16}
    assert low == {"conv.weight", "conv.bias", "up.weight", "up.bias", "down.weight", "down.bias"}
    assert optimizer.memory()["parameters"] == sum(dict(model.named_parameters())[name].numel() for name in low)


def test_all_narrows_everything_and_leaves_what_it_cannot() -> None:
    model = net()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.exact = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.warns(UserWarning, match=r"^MasterWeights leaves these parameters unchanged: exact \(torch.float64\)"):
        optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.1), model, narrow="all")
    kept = {name for name, param in model.named_parameters() if param.dtype is not torch.bfloat16}
    assert kept == {"phase", "exact"}
    train(model, optimizer, 2)


def test_a_policy_says_which() -> None:
    model = net()
    bound = Policy(compute="bfloat16", modules={"up": "float32"}).bind(model)
    MasterWeights(ADAMW(model.parameters()), model, narrow=bound)
    assert model.up.weight.dtype is torch.float32
    assert model.down.weight.dtype is torch.bfloat16
    half = net()
    MasterWeights(ADAMW(half.parameters()), half, narrow=Policy(compute="bfloat16").bind(half), dtype=torch.float16)
    assert {param.dtype for param in half.parameters()} == {torch.float32}


@pytest.mark.parametrize("first", ["policy", "weights"])
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_of_a_module_that_a_rule_has_in_fp32_compute_in_fp32(first: str, compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    policy = Policy(compute="bfloat16", modules={"1": "float32"})
    bound = policy.bind(model) if first == "policy" else None
    optimizer = MasterWeights(optim.SGD(model.parameters(), lr=0.1), model, narrow="all")
    bound = bound or policy.bind(model)
    x = torch.randn(3, 8)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with castwise.autocast("cpu", policy=bound):
        inner = model[0](x)
        out = run(x)
    assert inner.dtype is torch.bfloat16
    assert out.dtype is torch.float32
    expected = nn.functional.linear(inner.float(), model[1].weight.float(), model[1].bias.float())
    assert torch.equal(out, expected)
    out.sum().backward()
    optimizer.step()


@pytest.mark.parametrize("module", [nn.MultiheadAttention(4, 2), nn.Embedding(4, 4), nn.LayerNorm(4)])
def test_all_kinds_of_16_bit_weights_compute_in_fp32_where_a_rule_says_so(module: nn.Module) -> None:
    model = nn.ModuleDict({"it": module})
    x = torch.arange(4) if isinstance(module, nn.Embedding) else torch.ones(2, 3, 4)
    args = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    bound = Policy(compute="bfloat16", modules={"it": "float32"}).bind(model.bfloat16())
    with castwise.autocast("cpu", policy=bound):
        out = module(*args)
    plain = copy.deepcopy(module).float()
    vars(plain).pop("forward")
    expected = plain(*args)
    got, wanted = (each[0] if isinstance(each, tuple) else each for each in (out, expected))
    assert got.dtype is torch.float32
    assert torch.equal(got, wanted)


def test_a_weight_cache_with_nothing_to_do_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    MasterWeights(optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.warns(UserWarning, match=r"^the weights of all layers are 16-bit already, so autocast casts none"):
        cache = castwise.WeightCache(model)
    assert cache.report().refused["0.weight"] == "torch.bfloat16 and not torch.float32"


def test_a_model_that_is_16_bit_already_learns_as_fp32_from_there() -> None:
    model = net().bfloat16()
    with buckets_of(SMALL_BUCKETS):
        optimizer = MasterWeights(ADAMW(model.parameters()), model)
    plain = net().bfloat16().float()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    assert same_bits(optimizer.fp32_state_dict(model), start)
    train(model, optimizer, 20)
    assert optimizer.memory()["parameters"] == sum(param.numel() for param in model.parameters())
    lost = optim.AdamW((pure := net().bfloat16()).parameters(), lr=1e-6)
    train(pure, lost, 5)
    assert torch.equal(pure.norm.weight, net().bfloat16().norm.weight)  # 1 + 1e-6 is 1 in bfloat16
    small = net().bfloat16()
    keeps = MasterWeights(optim.AdamW(small.parameters(), lr=1e-6), small)
    train(small, keeps, 5)
    assert not torch.equal(keeps.fp32_state_dict(small)["norm.weight"], torch.ones(101))


def test_channels_last_and_other_dense_layouts() -> None:
    results = []
    for with_master in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Conv2d(4, 40, 3), nn.Conv2d(40, 8, 3)).to(memory_format=torch.channels_last)
        optimizer: Any = ADAMW(model.parameters())
        if with_master:
            with buckets_of(SMALL_BUCKETS):
                optimizer = MasterWeights(optimizer, model)
        for _ in range(4):
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(2, 4, 8, 8)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(optimizer.fp32_state_dict(model) if with_master else model.state_dict())
    assert same_bits(*results)


# -- around it ---------------------------------------------------------------------------------------------------------


def test_groups_and_state_are_those_of_the_inner_optimizer() -> None:
    model, optimizer = wrapped(ADAMW)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state
    assert isinstance(optimizer, optim.Optimizer)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin.param_groups is twin.inner.param_groups
    assert twin.param_groups[0]["params"][0] is next(twin_model.parameters())
    assert train(twin_model, twin, 3) == train(model, optimizer, 3)


def test_hooks_run_once_a_step() -> None:
    model, optimizer = wrapped(ADAMW)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.inner.register_step_post_hook(lambda *_: calls.append("inner"))
    handle = register_optimizer_step_post_hook(lambda of, *_: calls.append(type(of).__name__))
    train(model, optimizer, 1)
    handle.remove()
    assert calls == ["before", "after", "inner", "MasterWeights"]


def test_step_hooks_get_the_arguments_that_the_hooks_before_them_returned() -> None:
    _, optimizer = wrapped(ADAMW)
    given = []

    def closure() -> torch.Tensor:
        given.append("closure")
        return torch.ones(())

    optimizer.register_step_pre_hook(lambda of, args, kwargs: ((*args[:1], closure), kwargs))
    optimizer.inner.register_step_pre_hook(lambda of, args, kwargs: given.append(args == (optimizer, closure)))
    optimizer.register_step_post_hook(lambda of, args, kwargs: given.append(of is optimizer))
    optimizer.step()
    assert given == [True, "closure", True]


def test_a_step_hook_must_return_two_values_as_in_torch() -> None:
    model, optimizer = wrapped(ADAMW)
    plain = ADAMW(net().parameters())
    before = [param.clone() for param in model.parameters()]
    for stepped in (optimizer, plain):
        stepped.register_step_pre_hook(lambda *_: "other")
        with pytest.raises(
            RuntimeError, match=r"must return None or a tuple of \(new_args, new_kwargs\), but got other"
        ):
            stepped.step()
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))


def test_schedulers_work_made_before_or_after() -> None:
    results = []
    for when in ("plain", "before", "after"):
        model = net()
        optimizer: Any = ADAMW(model.parameters())
        scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20) if when != "after" else None
        if when != "plain":
            with buckets_of(SMALL_BUCKETS):
                optimizer = MasterWeights(optimizer, model)
        scheduler = scheduler or optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            numbers = train(model, optimizer, 10, after=scheduler.step)
        results.append((numbers, optimizer.param_groups[0]["lr"]))
    assert results[0] == results[1] == results[2]


def test_step_scheduler_follows_taken_steps() -> None:
    model, optimizer = wrapped(ADAMW)
    scheduler, scaler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5), GradScaler("cpu")
    bad = {2, 3}
    train(
        *(model, optimizer, 6),
        scaler=scaler,
        bad=bad.__contains__,
        after=lambda: scaler.step_scheduler(scheduler),
    )
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**4


def test_groups_are_added() -> None:
    results = []
    for with_master in (False, True):
        model = net()
        first = [param for name, param in model.named_parameters() if "up" not in name]
        optimizer: Any = ADAMW(first)
        if with_master:
            with buckets_of(SMALL_BUCKETS):
                optimizer = MasterWeights(optimizer, model)
        numbers = train(model, optimizer, 2)
        model.zero_grad()
        optimizer.add_param_group({"params": model.up.parameters(), "lr": 1e-3})
        results.append(numbers + train(model, optimizer, 4))
    assert results[0] == results[1]
    assert model.up.weight.dtype is torch.bfloat16


def test_parameters_without_gradients_stay_as_they_are() -> None:
    results = []
    for with_master in (False, True):
        model = net()
        optimizer: Any = ADAMW(model.parameters())
        if with_master:
            optimizer = MasterWeights(optimizer, model)
        train(model, optimizer, 2)
        for step in range(3):
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                x = model.token(torch.arange(9)[None])
                loss = (model.up(x) if step % 2 else model.down(model.up(x))).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(optimizer.fp32_state_dict(model) if with_master else model.state_dict())
    assert same_bits(*results)


def test_the_compiled_model_sees_plain_tensors() -> None:
    model, optimizer = wrapped(ADAMW)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = train(*wrapped(ADAMW), 3)
    assert train(compiled, optimizer, 3) == pytest.approx(expected, rel=1e-2)
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


def test_averaged_models_average_the_weights_there_are() -> None:
    model, optimizer = wrapped(ADAMW)
    average = optim.swa_utils.AveragedModel(model)
    train(model, optimizer, 3, after=lambda: average.update_parameters(model))
    assert average.module.up.weight.dtype is torch.bfloat16
    train(model, optimizer, 1)


def test_low_state_is_stored_low_and_computed_in_fp32() -> None:
    low = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    model, optimizer = wrapped(ADAMW, state_dtype=low)
    losses = train(model, optimizer, 60)
    state = optimizer.state[model.up.weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["step"].dtype) == (*low.values(), torch.float32)
    assert optimizer.state[model.norm.weight]["exp_avg"].dtype is torch.float32
    plain = net()
    expected = train(plain, ADAMW(plain.parameters()), 60)
    assert sum(losses[-10:]) == pytest.approx(sum(expected[-10:]), rel=0.02)
    memory = optimizer.memory()
    assert memory["state"] < 4.01 * memory["parameters"]
    again = train(*wrapped(ADAMW, state_dtype=low), 60)
    other = train(*wrapped(ADAMW, state_dtype=low, generator=torch.Generator().manual_seed(7)), 60)
    assert losses == again != other


def test_the_bytes_of_each_setting() -> None:
    low = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    limits = {("split", None): 14.2, ("split", "low"): 10.2, ("stochastic", "low"): 8.1}
    for (method, state), limit in limits.items():
        model = nn.Linear(300, 200)
        optimizer = MasterWeights(ADAMW(model.parameters()), model, method=method, state_dtype=low if state else None)
        for _ in range(2):
            optimizer.step()
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                model(torch.ones(2, 300)).float().sum().backward()
        memory = optimizer.memory()
        kept = sum(memory[name] for name in ("weights", "kept", "gradients", "state"))
        assert kept <= limit * memory["parameters"]
        assert 0 < memory["workspace"] <= (20 if state else 12) * memory["parameters"]


def test_stochastic_rounding_learns_nearly_as_well() -> None:
    plain = net()
    expected = train(plain, optim.AdamW(plain.parameters(), lr=1e-3), 80)
    losses = train(*wrapped(lambda params: optim.AdamW(params, lr=1e-3), method="stochastic"), 80)
    assert sum(losses[-10:]) == pytest.approx(sum(expected[-10:]), rel=0.02)


# -- bad input ---------------------------------------------------------------------------------------------------------


def refused(error: type[Exception], text: str, make: Callable[[Net], object]) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=text):
        make(model)
    assert same_bits(model.state_dict(), before)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        (
            {"dtype": torch.float32},
            ValueError,
            r"^dtype must be one of torch.bfloat16, torch.float16, got torch.float32",
        ),
        ({"method": "splt"}, ValueError, r"^method must be one of .* got 'splt'; did you mean 'split'\?"),
        ({"narrow": "norms"}, TypeError, r'^narrow must be None, "all" or a bound policy'),
        ({"narrow": Policy(compute="bfloat16")}, TypeError, r"^narrow must be .* \(Policy.bind\(model\)\), got Policy"),
        ({"grad_dtype": torch.float16}, ValueError, r"^grad_dtype must be one of 'param', torch.float32"),
        (
            {"state_dtype": {"exp": torch.bfloat16}},
            ValueError,
            r"^AdamW keeps no state 'exp' .* 'exp_avg', 'exp_avg_sq'",
        ),
        ({"state_dtype": {"exp_avg": torch.int8}}, ValueError, r"^state_dtype\['exp_avg'\] must be one of"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    refused(error, text, lambda model: MasterWeights(ADAMW(model.parameters()), model, **settings))


def test_optimizers_that_cannot_be_wrapped() -> None:
    refused(TypeError, r"^MasterWeights wraps a torch.optim.Optimizer, got Linear", lambda m: MasterWeights(m.up, m))  # type: ignore[arg-type]
    refused(TypeError, r"cannot wrap LBFGS", lambda m: MasterWeights(optim.LBFGS(m.parameters()), m))
    refused(TypeError, r"cannot wrap SparseAdam", lambda m: MasterWeights(optim.SparseAdam(m.parameters()), m))
    refused(
        *(ValueError, r"cannot wrap a differentiable optimizer"),
        lambda m: MasterWeights(optim.SGD(m.parameters(), differentiable=True), m),
    )
    refused(
        TypeError, r"^model must be a torch.nn.Module, got list", lambda m: MasterWeights(ADAMW(m.parameters()), [])
    )  # type: ignore[arg-type]


def test_a_parameter_is_in_one_wrapper() -> None:
    model, optimizer = wrapped(ADAMW)
    with pytest.raises(ValueError, match=r"^'conv.weight' is in another MasterWeights already"):
        MasterWeights(ADAMW(model.parameters()), model)
    with pytest.raises(TypeError, match=r"^MasterWeights cannot wrap a MasterWeights"):
        MasterWeights(optimizer, model)


def test_a_wrapper_that_is_gone_leaves_its_parameters() -> None:
    model, optimizer = wrapped(ADAMW)
    del optimizer
    MasterWeights(ADAMW(model.parameters()), model)


def test_a_weight_that_does_not_fit_float16() -> None:
    def make(model: Net) -> None:
        with torch.no_grad():
            model.up.weight[0, 0] = 1e5
        MasterWeights(ADAMW(model.parameters()), model, dtype=torch.float16)

    model = net()
    with pytest.raises(ValueError, match=r"^'up.weight' has a weight of magnitude 100000, but float16 ends at 65504"):
        make(model)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_a_closure_is_called_once_before_anything_is_stepped() -> None:
    expected = train(*wrapped(ADAMW), 4)
    model, optimizer = wrapped(ADAMW)
    scaled, of_scaled = wrapped(ADAMW)
    scaler = GradScaler("cpu", init_scale=64.0)
    losses: list[list[float]] = [[], []]
    for batch in batches(4):
        for its_model, its_optimizer, its_losses in ((model, optimizer, losses[0]), (scaled, of_scaled, losses[1])):

            def closure(its_model: Net = its_model, its_optimizer: MasterWeights = its_optimizer) -> torch.Tensor:
                its_optimizer.zero_grad()
                with castwise.autocast("cpu", dtype=torch.bfloat16):
                    logits = its_model(batch[:, :-1])  # noqa: B023
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())  # noqa: B023
                (scaler.scale(loss) if its_model is scaled else loss).backward()
                return loss

            if its_model is scaled:
                weights = {name: value.clone() for name, value in of_scaled.fp32_state_dict(scaled).items()}
                assert scaler.step(of_scaled, lambda: closure() * float("inf")) is None
                scaler.update(64.0)
                assert same_bits(of_scaled.fp32_state_dict(scaled), weights)
                its_losses.append(scaler.step(of_scaled, closure).item())
                scaler.update()
            else:
                its_losses.append(optimizer.step(closure).item())
    assert losses == [expected, expected]


def test_closures_that_may_be_called_anytime_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^MasterWeights takes no closure for KeepsStateInItsGroup"):
        wrapped(KeepsStateInItsGroup)[1].step(lambda: 1.0)
    model, optimizer = wrapped(ADAMW)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.up.weight.grad = torch.ones_like(model.up.weight).to_sparse()
    with pytest.raises(TypeError, match=r"^'up.weight' has a gradient of layout torch.sparse_coo"):
        optimizer.step()
    assert same_bits(model.state_dict(), weights)
    model.up.weight.grad = None
    optimizer.step(closure=None)


def test_a_model_that_was_cast_is_found_at_the_next_step() -> None:
    model, optimizer = wrapped(ADAMW)
    model.float()
    with pytest.raises(RuntimeError, match=r"^'conv.weight' was torch.bfloat16 .* and is torch.float32"):
        optimizer.step()


def test_a_weight_written_from_outside_is_taken_as_it_is_with_one_warning() -> None:
    model, optimizer = wrapped(ADAMW)
    train(model, optimizer, 2)
    exact = optimizer.fp32_state_dict(model)
    with torch.no_grad():
        model.up.bias.fill_(0.5)
    with pytest.warns(UserWarning, match=r"^1 weight was written since the last step of MasterWeights \('up.bias'\): "):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = optimizer.fp32_state_dict(model)
        optimizer.step()
    assert torch.equal(after["up.bias"], torch.full((101,), 0.5))
    after["up.bias"] = exact["up.bias"]
    assert same_bits(after, exact)


def test_a_step_that_fails_leaves_the_groups_and_the_weights() -> None:
    class Fails(optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            raise FloatingPointError("as optimizers may")

    model, optimizer = wrapped(lambda params: Fails(params, lr=0.1))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert same_bits(model.state_dict(), before[0])
    assert optimizer.state_dict()["param_groups"] == before[1]["param_groups"]


def test_its_repr_says_what_it_is() -> None:
    text = repr(wrapped(ADAMW)[1])
    assert text.startswith("MasterWeights(AdamW (\nParameter Group 0")
    assert text.endswith(", dtype=torch.bfloat16, method='split')")
