"""`MasterWeights(compiled=True)`: the bits of steps that are not compiled, and which steps it leaves to them."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.master_weights.training import buckets_of
from torch import nn

from castwise import GradScaler, MasterWeights

pytest.importorskip("numba")  # an extra

from castwise.master_weights import _compiled_step as compiled_step
from castwise.master_weights._compiled_step import forms_of_torch

LOW_STATE = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
Pair = tuple[nn.Module, MasterWeights]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that could be compiled, whether it was."""
    steps: list[bool] = []
    take = compiled_step.take

    def counted(*args: Any) -> bool:
        steps.append(take(*args))
        return steps[-1]

    monkeypatch.setattr(compiled_step, "take", counted)
    return steps


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The steps are small, and threads that share a core would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pair(shapes: list[tuple[int, int]] | None = None, kind: Any = torch.optim.AdamW, **options: Any) -> list[Pair]:
    """Return equal models, whose second optimizer is compiled."""
    torch.manual_seed(0)
    inner = {name: options.pop(name) for name in ("lr", "weight_decay") if name in options}
    model = nn.ModuleList(nn.Linear(*shape) for shape in shapes or [(40, 30), (7, 5)])
    made = []
    for compiled in (False, True):
        own = copy.deepcopy(model)
        groups = [
            {"params": [param for param in own.parameters() if (param.dim() > 1) is is_matrix], "lr": lr}
            for is_matrix, lr in ((True, 0.01), (False, 0.003))
        ]
        made.append((own, MasterWeights(kind(groups, fused=True, **inner), own, compiled=compiled, **options)))
    return made


def fill(pairs: list[Pair], seed: int, *, scale: float = 1.0, without: int | None = None) -> None:
    """Give both models the same gradients."""
    for model, _ in pairs:
        generator = torch.Generator().manual_seed(seed)
        for index, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=generator).mul_(scale).to(param.dtype)
            param.grad = None if index == without else grad


def assert_same(pairs: list[Pair]) -> None:
    (model, optimizer), (other, compiled) = pairs
    ours, theirs = optimizer.fp32_state_dict(model), compiled.fp32_state_dict(other)
    for name, value in ours.items():
        same = value.view(torch.int32) == theirs[name].view(torch.int32)
        assert (same | (value.isnan() & theirs[name].isnan())).all(), name
    for param, of_other in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.nan_to_num(), of_other.nan_to_num())
        assert optimizer.state[param].keys() == compiled.state[of_other].keys()
        for name, value in optimizer.state[param].items():
            assert torch.equal(value.nan_to_num(), compiled.state[of_other][name].nan_to_num()), name


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_have_the_same_bits(seed: int, taken: list[bool]) -> None:
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 90), rng.randint(1, 90)) for _ in range(rng.randint(1, 5))]
    kind = rng.choice([torch.optim.AdamW, torch.optim.Adam])
    options: dict[str, Any] = {"state_dtype": LOW_STATE} if seed % 3 == 0 else {}
    with buckets_of(rng.choice([4 << 10, 16 << 10, 4 << 20])):
        pairs = pair(shapes, kind, weight_decay=0.1 if kind is torch.optim.AdamW else 0.0, **options)
    for step in range(8):
        fill(pairs, step, scale=rng.choice([1e-3, 1.0, 30.0]), without=rng.choice([None, None, 1]))
        if rng.random() < 0.5:
            norms = [optimizer.clip_grad_norm_(0.5) for _, optimizer in pairs]
            assert torch.equal(*norms)
        if rng.random() < 0.2:
            states = [optimizer.state_dict() for _, optimizer in pairs]
            for (_, optimizer), state in zip(pairs, reversed(states), strict=True):
                optimizer.load_state_dict(state)
        for _, optimizer in pairs:
            optimizer.step()
    assert_same(pairs)
    assert not taken[0]  # which creates state
    assert taken.count(True) >= 4


def test_fp32_weights_of_torchs_optimizer_have_the_same_bits() -> None:
    torch.set_num_threads(2)
    with buckets_of(64 << 10):
        model, compiled = pair([(300, 211)], weight_decay=0.1)[1]
    params = [nn.Parameter(value.clone()) for value in compiled.fp32_state_dict(model).values()]
    groups = [{"params": [param], "lr": lr} for param, lr in zip(params, (0.01, 0.003), strict=True)]
    plain = torch.optim.AdamW(groups, fused=True, weight_decay=0.1)
    for step in range(5):
        fill([(model, compiled)], step)
        for param, of_model in zip(params, model.parameters(), strict=True):
            assert of_model.grad is not None
            param.grad = of_model.grad.float()
        plain.step()
        compiled.step()
    assert all(map(torch.equal, params, compiled.fp32_state_dict(model).values()))


def test_ties_and_numbers_that_are_not_finite(taken: list[bool]) -> None:
    """Without a learning rate, weights stay what they are: all of them ties, and some NaN after an inf."""
    pairs = pair([(64, 50)], lr=0.0)
    odd_and_even = torch.arange(0x3F808000, 0x3F808000 + (3200 << 16), 1 << 16, dtype=torch.int32).view(torch.float32)
    for model, optimizer in pairs:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        values = {name: value.clone() for name, value in optimizer.fp32_state_dict(model).items()}
        values["0.weight"].view(-1).copy_(odd_and_even)
        optimizer.load_fp32_state_dict(model, values)
    for step in range(4):
        fill(pairs, step)
        if step == 2:
            for model, _ in pairs:
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.view(-1)[3] = float("inf")
        for _, optimizer in pairs:
            optimizer.step()
        assert_same(pairs)
    assert taken == [False, True, True, True]


def test_a_weight_that_is_written_to_is_stepped_from_its_new_value(taken: list[bool]) -> None:
    pairs = pair()
    for step in range(6):
        fill(pairs, step)
        for model, optimizer in pairs:
            weight = next(model.parameters())
            if step == 3:
                weight.data.mul_(1.5)  # which torch does not count
            if step == 4:
                with torch.no_grad():
                    weight[0, 0] = 0.3
            if step in (3, 4):
                with pytest.warns(UserWarning, match="written since the last step"):
                    optimizer.step()
            else:
                optimizer.step()
    assert_same(pairs)
    assert taken == [False, True, True, False, True, True]


def test_other_steps_are_left_to_the_other_way(taken: list[bool]) -> None:
    pairs = pair()

    def step(expected: list[bool], scalers: list[GradScaler] | None = None) -> None:
        taken.clear()
        for index, (_, optimizer) in enumerate(pairs):
            if scalers is None:
                optimizer.step()
            else:
                scalers[index].step(optimizer)
        assert_same(pairs)
        assert taken == expected

    fill(pairs, 0)
    step([False])
    fill(pairs, 1)
    for _, optimizer in pairs:
        optimizer.clip_grad_value_(0.5)
    step([False])
    scalers = [GradScaler("cpu", init_scale=4.0) for _ in pairs]
    for scaler in scalers:
        scaler.scale(torch.ones(()))
    fill(pairs, 2)
    step([], scalers)
    fill(pairs, 3)
    for model, _ in pairs:
        for param in model.parameters():
            assert param.grad is not None
            if param.dim() > 1:
                param.grad = param.grad.t().contiguous().t()
    step([False])
    fill(pairs, 4)
    for _, optimizer in pairs:
        optimizer.param_groups[0]["betas"] = (0.3, 0.9)
    step([False])
    for _, optimizer in pairs:
        optimizer.param_groups[0]["betas"] = (0.9, 0.9)
    step([True])


def test_a_step_counts_as_a_write() -> None:
    model, optimizer = pair([(3, 2)])[1]
    fill([(model, optimizer)], 0)
    optimizer.step()
    weight = next(model.parameters())
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = (x @ weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_go_on_with_the_same_bits(taken: list[bool]) -> None:
    pairs = pair()
    fill(pairs, 0)
    for _, optimizer in pairs:
        optimizer.step()
    pairs = [copy.deepcopy(each) for each in pairs]
    for step in (1, 2):
        fill(pairs, step)
        for _, optimizer in pairs:
            optimizer.step()
    assert_same(pairs)
    assert taken == [False, True, True]


@pytest.mark.parametrize("reason", ["rounds in another way on this machine", "numba raised NotImplementedError: jit"])
def test_where_kernels_are_of_no_use_steps_are_not_compiled(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise NotImplementedError("jit is off\nmore")

    if "numba" in reason:
        monkeypatch.setattr(compiled_step, "_tried", fail)
    else:
        monkeypatch.setattr(compiled_step, "_have_equal_bits", lambda a, b: False)
    forms_of_torch.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=reason):
            pairs = pair()
    finally:
        forms_of_torch.cache_clear()
    for step in range(2):
        fill(pairs, step)
        for _, optimizer in pairs:
            optimizer.step()
    assert_same(pairs)


def test_it_is_tried_in_fp32_whatever_the_default() -> None:
    forms = forms_of_torch()
    forms_of_torch.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert forms_of_torch() == forms
    finally:
        torch.set_default_dtype(torch.float32)


def test_vectors_of_16_cross_the_borders_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are right whatever elements torch steps in vectors."""
    layers = nn.ModuleList([nn.Linear(8, 1, bias=False), nn.Linear(2047, 1, bias=False)])
    optimizer = MasterWeights(torch.optim.AdamW(layers.parameters(), fused=True), layers, compiled=True)
    monkeypatch.setattr(compiled_step, "forms_of_torch", lambda: compiled_step.Forms(16, 1, 2))
    for step in range(3):
        fill([(layers, optimizer)], step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


def test_digests_write_nothing_and_compare_what_is_written() -> None:
    _, (layers, optimizer) = pair()
    (bucket,) = optimizer._buckets
    values = {name: torch.full_like(value, 1.00390625) for name, value in optimizer.fp32_state_dict(layers).items()}
    optimizer.load_fp32_state_dict(layers, values)  # ties, all of which are rounded down
    fill([(layers, optimizer)], 0)
    before = [param.detach().clone() for param in layers.parameters()]
    digests = compiled_step.digests_of(bucket)
    assert digests == bucket.digest
    assert all(map(torch.equal, before, layers.parameters()))
    next(layers.parameters()).data[1, 1] = 7.0
    assert compiled_step.digests_of(bucket) != digests


def test_a_forked_process_steps_in_the_other_way(warm_python: None) -> None:
    """OpenMP would end it."""
    script = """if True:
        import os
        import torch
        from castwise import MasterWeights
        torch.set_num_threads(1)
        layer = torch.nn.Linear(3, 2)
        optimizer = MasterWeights(torch.optim.AdamW(layer.parameters(), fused=True), layer, compiled=True)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        optimizer.step()
        if child := os.fork():
            print(os.waitpid(child, 0)[1])
        optimizer.step()
        if not child:
            other = torch.nn.Linear(3, 2)
            MasterWeights(torch.optim.AdamW(other.parameters(), fused=True), other, compiled=True)
        print(optimizer.fp32_state_dict(layer)["weight"].sum().item())
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    of_child, status, of_parent = done.stdout.split()
    assert status == "0"
    assert of_child == of_parent


@pytest.mark.parametrize("betas", [(0.5, 0.9), (0.50000001, 0.9), (0.0, 0.9), (0.9, 0.0), (1 - 1e-17, 0.9)])
def test_unusual_betas(betas: tuple[float, float]) -> None:
    pairs = pair()
    for _, optimizer in pairs:
        for group in optimizer.param_groups:
            group["betas"] = betas
    for step in range(4):
        fill(pairs, step, scale=10.0**step)
        for _, optimizer in pairs:
            optimizer.step()
    assert_same(pairs)


def test_weight_decay_that_is_not_decoupled() -> None:
    pairs = pair(weight_decay=0.1)
    for step in range(4):
        fill(pairs, step)
        for _, optimizer in pairs:
            for group in optimizer.param_groups:
                group["decoupled_weight_decay"] = False
            optimizer.step()
    assert_same(pairs)


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_torch_keeps_its_number_of_threads(layer: str, warm_python: None) -> None:
    """In a process of its own: numba starts its threads once."""
    script = """if True:
        import torch
        from castwise import MasterWeights
        torch.set_num_threads(1)
        layer = torch.nn.Linear(3, 2)
        optimizer = MasterWeights(torch.optim.AdamW(layer.parameters(), fused=True), layer, compiled=True)
        for _ in range(2):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
        print(torch.get_num_threads())
    """
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": layer}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("kind", "inner", "options", "given"),
    [
        (torch.optim.AdamW, {}, {}, r"AdamW\(fused=None\)"),
        (torch.optim.SGD, {"fused": True}, {}, r"SGD\(fused=True\)"),
        (torch.optim.AdamW, {"fused": True}, {"method": "stochastic"}, 'method="stochastic"'),
        (torch.optim.AdamW, {"fused": True}, {"dtype": torch.float16}, "dtype=torch.float16"),
        (torch.optim.AdamW, {"fused": True}, {"state_dtype": {"exp_avg": torch.bfloat16}}, "state_dtype="),
        (
            *(torch.optim.AdamW, {"fused": True, "betas": (0.5, 0.9)}),
            *({"state_dtype": dict.fromkeys(LOW_STATE, (torch.bfloat16, "nearest"))}, "state_dtype="),
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(kind: Any, inner: Any, options: Any, given: str) -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=f"compiled=True is for .*got .*{given}"):
        MasterWeights(kind(layer.parameters(), **inner), layer, compiled=True, **options)
    assert layer.weight.dtype is torch.float32


def test_numba_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(3, 2)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'castwise\[compiled\]'"):
        MasterWeights(torch.optim.AdamW(layer.parameters(), fused=True), layer, compiled=True)
