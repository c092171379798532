"""`WeightCache`: the outputs and gradients of a region without it, bit for bit, whatever happens to the weights."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import WeightCache
from castwise.policy._op_rules import LOW_PRECISION_OPS
from castwise.weights import _weight_cache as weight_cache
from castwise.weights import _weight_copies as weight_copies

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True, scope="module")
def trained_weights_of_any_size_are_cached() -> Any:
    """All models of this file are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_cache, "_MIN_TRAINED", 0)
        yield


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def region(cache: WeightCache | None, dtype: torch.dtype = BF16, **options: Any) -> castwise.autocast:
    return castwise.autocast("cpu", dtype=dtype, weight_cache=cache, **options)


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


def output(model: Callable[[torch.Tensor], torch.Tensor], cache: WeightCache | None) -> torch.Tensor:
    with torch.no_grad(), region(cache):
        return model(X)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [param.grad for param in model.parameters()]


# -- a change is seen -------------------------------------------------------------------------------------------------


def step(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Sequential], None]:
    def change(model: nn.Sequential) -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer(model.parameters(), lr=0.1, **options).step()  # type: ignore[call-arg]

    return change


def reassign(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.ones(8, 4))


def swap(model: nn.Sequential) -> None:
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(8, 4)))


def swap_averages(model: nn.Sequential) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(mlp().double().float())
    for param, of_average in zip(model.parameters(), average.module.parameters(), strict=True):
        param.data, of_average.data = of_average.data * 2, param.data


def from_vector(model: nn.Sequential) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 2, model.parameters())


def in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += 1.0


def other_memory(model: nn.Sequential) -> None:
    for param in model.parameters():
        for _ in range(8):  # new memory likes to be where the old was
            param.data = param.data * 2


def freed_memory(model: nn.Sequential) -> None:
    """The address is that of before, and so is the version."""
    for param in model.parameters():
        shape, param.data = param.shape, torch.empty(0)
        param.data = torch.full(shape, 2.0)


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "fused AdamW": step(torch.optim.AdamW, fused=True),
    "foreach AdamW": step(torch.optim.AdamW, foreach=True),
    "for-loop AdamW": step(torch.optim.AdamW, foreach=False),
    "fused SGD": step(torch.optim.SGD, fused=True),
    "in place": in_place,
    "load_state_dict": lambda model: model.load_state_dict({k: v * 2 for k, v in mlp().state_dict().items()}),
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(
        {k: v * 2 for k, v in mlp().state_dict().items()}, assign=True
    ),
    "swap_tensors": swap,
    "another Parameter": reassign,
    "nn.init": lambda model: nn.init.ones_(model[0].weight),
    "averages swapped in": swap_averages,
    "vector_to_parameters": from_vector,
    "other memory by .data": other_memory,
    "memory that was freed": freed_memory,
    ".to(float64) and back": lambda model: model.to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_changed_weight_is_cast_again(change: Callable[[nn.Sequential], Any], mode: Any) -> None:
    model = mlp()
    cache = WeightCache(model)
    for _ in range(3):
        with mode(), region(cache):
            got = model(X)
        with mode(), region(None):
            same(got, model(X))
        change(model)


def test_an_unchanged_weight_is_not_cast_again() -> None:
    model = mlp()
    cache = WeightCache(model)
    for _ in range(5):
        output(model, cache)
    report = cache.report()
    assert (report.refreshes, report.hits) == (4, 16)
    assert report.cached == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert report.nbytes == sum(param.nbytes for param in model.parameters()) // 2


def test_writes_through_data_are_seen_when_declared_or_verified() -> None:
    model = mlp()
    cache, verifying = WeightCache(model, verify=False), WeightCache(model, verify=True)
    before = output(model, cache)
    output(model, verifying)
    model[2].weight.data.mul_(2)
    same(output(model, cache), before)  # as documented
    with pytest.raises(RuntimeError, match=r"the weight 2\.weight was changed in a way that leaves no trace"):
        output(model, verifying)
    for stale in (cache, verifying):
        stale.invalidate()
        same(output(model, stale), output(model, None))


# -- training ---------------------------------------------------------------------------------------------------------


class Many(nn.Module):
    """Weights that are used twice, tied, transposed, sliced, and with ops of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.free = nn.Parameter(torch.randn(4, 4))
        self.slope = nn.Parameter(torch.tensor([0.25]))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.second(self.first(x))) + self.first(x)
        x = x @ self.free + torch.matmul(x, self.free.t()) + functional.linear(x, self.free[:, :], bias=None)
        x = self.conv(x.unsqueeze(1)).mean(1)
        x = functional.prelu(x, self.slope) + torch.addmm(self.second.bias, x, self.free)
        attended, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        return self.norm(attended[0] + x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_training_is_bit_for_bit_that_without_a_cache(dtype: torch.dtype, cache_enabled: bool, fused: bool) -> None:
    models = [Many(), Many()]
    caches = [WeightCache(models[0]), None]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused) for model in models]
    for iteration in range(4):
        for model, cache, optimizer in zip(models, caches, optimizers, strict=True):
            optimizer.zero_grad()
            for _ in range(1 + iteration % 2):  # accumulated
                with region(cache, dtype, cache_enabled=cache_enabled):
                    loss = model(X).float().square().sum()
                loss.backward()
            optimizer.step()
        same(gradients(models[0]), gradients(models[1]))
        same([*models[0].parameters()], [*models[1].parameters()])
    cache = caches[0]
    assert cache is not None
    assert cache.report().hits > 0


@pytest.mark.parametrize("kind", ["retain_graph", "after a step", "double backward", "checkpoint", "reentrant"])
def test_odd_backwards_are_those_without_a_cache(kind: str) -> None:
    def run(cached: bool) -> Any:
        model = mlp()
        cache = WeightCache(model) if cached else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = X.clone().requires_grad_()
        for _ in range(2):
            with region(cache):
                if kind in ("checkpoint", "reentrant"):
                    y = checkpoint(model, x, use_reentrant=kind == "reentrant")
                else:
                    y = model(x)
                loss = y.float().square().sum()
            if kind == "retain_graph":
                loss.backward(retain_graph=True)
            if kind == "double backward":
                (grad,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
                loss = grad.square().sum()
            if kind == "after a step":  # the old graph has saved what the weights were
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                optimizer.step()
                with region(cache):
                    model(x)
            loss.backward()
            optimizer.step()
        return [*model.parameters(), x.grad]

    same(run(True), run(False))


def test_a_frozen_base_with_adapters() -> None:
    def run(cached: bool) -> Any:
        base = mlp().requires_grad_(False)
        adapters = nn.ModuleList([nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)])
        model = nn.ModuleList([base, adapters])
        cache = WeightCache(model) if cached else None
        optimizer = torch.optim.SGD(adapters.parameters(), lr=0.1)
        for _ in range(3):
            with region(cache):
                y = base(X) + adapters[1](adapters[0](X))
            y.float().square().sum().backward()
            optimizer.step()
        if cache is not None:
            assert cache.report().refreshes == 4 + 2 * 3
        return [*model.parameters()]

    torch.manual_seed(0)
    ours = run(True)
    torch.manual_seed(0)
    same(ours, run(False))


def test_a_frozen_weight_that_changes_before_the_backward() -> None:
    def run(cached: bool) -> Any:
        model = mlp().requires_grad_(False)
        cache = WeightCache(model) if cached else None
        x = X.clone().requires_grad_()
        for _ in range(2):
            with region(cache):
                loss = model(x).float().square().sum()
            in_place(model)
            output(model, cache)  # casts again
            loss.backward()
        return x.grad

    same(run(True), run(False))


# -- regions ----------------------------------------------------------------------------------------------------------


def test_nested_regions_of_two_dtypes() -> None:
    model = mlp()
    cache = WeightCache(model)
    with region(cache):
        outer = model(X)
        with region(None, FP16):
            inner = model(X)
        with castwise.autocast("cpu", enabled=False):
            assert model(X).dtype is torch.float32
        with region(cache, FP16):
            same(model(X), inner)
        same(model(X), outer)
    assert (outer.dtype, inner.dtype) == (BF16, FP16)
    (outer.float().sum() + inner.float().sum()).backward()
    with region(None):
        separate = model(X)
    with region(None, FP16):
        separate = separate.float() + model(X)
    same(outer.float() + inner, separate)


def test_no_grad_then_training_then_a_change_in_one_region() -> None:
    def run(cached: bool) -> Any:
        model = mlp()
        cache = WeightCache(model) if cached else None
        outputs = []
        with region(cache, cache_enabled=cached):  # torch's own would be stale after the change
            with torch.no_grad():
                outputs.append(model(X))
            with torch.inference_mode():
                outputs.append(model(X).clone())
            outputs.append(model(X))
            with torch.no_grad():
                model[0].weight.mul_(2)
            outputs.append(model(X))
            with torch.no_grad():
                outputs.append(model(X))
        sum(output.float().sum() for output in outputs).backward()
        return [torch.cat([output.detach() for output in outputs]), *gradients(model)]

    ours, theirs = run(True), run(False)
    same(ours[0], theirs[0])
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=2e-2, atol=2e-2)


def test_a_region_with_a_cache_can_be_entered_again_and_left_by_an_exception() -> None:
    model = mlp()
    shared = region(WeightCache(model))
    with torch.no_grad():
        with shared, shared:
            first = model(X)
        with pytest.raises(KeyError), shared:
            raise KeyError
        assert model(X).dtype is torch.float32
        same(shared(model)(X), first)


def test_threads_share_a_cache() -> None:
    model = mlp()
    cache, expected = WeightCache(model), output(model, None)
    failures = []

    def infer() -> None:
        for _ in range(50):
            if not torch.equal(output(model, cache), expected):
                failures.append(threading.get_ident())

    threads = [threading.Thread(target=infer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.report().refreshes == 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_right_inside_and_outside_of_the_region(backend: str) -> None:
    model = mlp()
    cache, expected = WeightCache(model), output(model, None)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with region(cache):
            return model(x)  # type: ignore[no-any-return]

    with torch.no_grad():
        same(torch.compile(inside, fullgraph=True, backend=backend)(X), expected)
        with region(cache):
            same(torch.compile(model, fullgraph=True, backend=backend)(X), expected)
    torch._dynamo.reset()


def test_transformed_functions_are_left_alone() -> None:
    model = mlp()
    cache = WeightCache(model)
    params = dict(model.named_parameters())

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, X).float().square().sum()

    with region(cache):
        ours = torch.func.grad(loss)(params)
    with region(None):
        same(ours, torch.func.grad(loss)(params))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_mapped_functions_are_left_alone(mode: Any) -> None:
    model = mlp()
    cache = WeightCache(model)
    with mode():
        for _ in range(2):
            with region(cache):
                ours, plain = torch.func.vmap(model)(X), model(X)
            with region(None):
                same(ours, torch.func.vmap(model)(X))
                same(plain, model(X))


def test_a_weight_of_another_shape_or_layout() -> None:
    model = mlp()
    cache = WeightCache(model)
    output(model, cache)
    for weight in (torch.ones(1, 4), torch.ones(6, 4), torch.ones(4, 6).t(), torch.ones(6, 8)[:, ::2]):
        model[0].weight.data, model[0].bias.data = weight, torch.ones(len(weight))
        for _ in range(2):
            same(output(model[0], cache), output(model[0], None))
        size = (len(weight) + weight.numel() * (weight.stride(-1) != 2) + 8 * 4 + 4) * 2
        assert cache.report().nbytes == size
    assert cache.report().refused == {"0.weight": "not dense in memory"}


# -- what is held -----------------------------------------------------------------------------------------------------


def test_copies_are_freed_with_the_model_and_with_the_weight() -> None:
    model = mlp()
    cache = WeightCache(model)
    output(model, cache)
    model[0] = nn.Linear(4, 8)
    gc.collect()
    assert cache.report().nbytes == 2 * (8 * 4 + 4)
    del model
    gc.collect()
    assert cache.report().nbytes == 0


def test_copies_and_pickles_are_empty() -> None:
    model = mlp()
    cache = WeightCache(model)
    expected = output(model, cache)
    for twin in (copy.deepcopy(cache), copy.copy(cache)):
        assert twin.report().nbytes == 0
        same(output(model, twin), expected)
    both, twin = copy.deepcopy((model, cache))
    same(output(both, twin), expected)
    assert twin.report().cached
    both, twin = pickle.loads(pickle.dumps((model, cache)))
    same(output(both, twin), expected)
    assert twin.report().cached


class Wrapped(nn.Parameter):
    pass


def test_what_is_not_cached_is_reported_and_right() -> None:
    model = mlp()
    model[0].weight = Wrapped(model[0].weight.detach())
    model[2].bias = nn.Parameter(model[2].bias.detach().bfloat16())
    cache = WeightCache(model)
    same(output(model, cache), output(model, None))
    assert cache.report().refused == {
        "0.weight": "of the subclass Wrapped",
        "2.bias": "torch.bfloat16 and not torch.float32",
    }
    assert cache.report().cached == []  # a layer is cached as a whole
    foreign = mlp()
    same(output(foreign, cache), output(foreign, None))
    assert cache.report().refreshes == 0


def test_arguments_that_make_no_cache() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        WeightCache([])  # type: ignore[arg-type]
    for verify in (1, "always", None):
        with pytest.raises(ValueError, match=f"verify must be 'rolling', True or False, got {verify!r}"):
            WeightCache(mlp(), verify=verify)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weight_cache must be a castwise\.WeightCache or None, got Sequential"):
        castwise.autocast("cpu", weight_cache=mlp())  # type: ignore[arg-type]


def test_every_op_runs_in_low_precision_under_autocast() -> None:
    """A copy instead of a weight is right only in ops that would cast the weight."""
    weight = torch.ones(1, 1)
    arguments = {
        "addmm": [weight] * 3,
        "baddbmm": [weight[None]] * 3,
        "bmm": [weight[None]] * 2,
        "prelu": [weight, weight[0]],
    }
    for op in LOW_PRECISION_OPS:
        name = op.__name__
        if name.startswith("conv"):
            shape = [1] * (2 + int(name[-2]))
            given = [torch.ones(shape), torch.ones(shape)]
        else:
            given = arguments.get(name, [weight, weight])
        with torch.autocast("cpu", dtype=BF16):
            assert op(*given).dtype is BF16, name


# -- random programs --------------------------------------------------------------------------------------------------

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.sampled_from(list(MODES)), st.sampled_from([BF16, FP16])),
        st.tuples(st.just("forward"), st.just("grad"), st.just(BF16)),
        st.tuples(st.just("change"), st.sampled_from(list(CHANGES))),
        st.tuples(st.just("backward")),
        st.tuples(st.just("step"), st.booleans()),
        st.tuples(st.just("freeze"), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=14,
)


class Twice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self[2](self[1](self[0](x)))
        return x


class Functional(nn.Sequential):
    """Weights, views of them and transposed ones, in ops that are no modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(torch.addmm(self[0].bias, x.to(self[0].bias.dtype), self[0].weight.t()))
        return nn.functional.linear(x, self[2].weight[:, :8], bias=self[2].bias) @ self[2].weight


class Both(nn.Sequential):
    """Weights in their layers and by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(super().forward(x), self[0].weight, self[0].bias)
        return self[2](x) @ self[2].weight + self[2].bias.sum()


MODELS: list[type[nn.Sequential]] = [nn.Sequential, Twice, Functional, Both]
POLICIES: list[dict[str, Any]] = [
    {},
    {"modules": {"2": "float32"}},
    {"modules": {"0": "float16", "2": "exclude"}},
    {"modules": {"": "float32", "2": "bfloat16"}, "output": "float32"},
    {"ops": {"linear": "float16", "gelu": "float32"}},
]


class Program:
    """A model, perhaps with a cache, and graphs that wait for their backward."""

    def __init__(self, cached: bool, kind: type[nn.Sequential] = nn.Sequential, fields: Any = None) -> None:
        self.model = kind(*mlp())
        self.fields = fields or {}
        self.cache = WeightCache(self.model) if cached else None
        self.losses: list[torch.Tensor] = []

    def take(self, call: str, *arguments: Any) -> Any:
        if call == "forward":
            mode, dtype = arguments
            policy = castwise.Policy(compute=str(dtype).removeprefix("torch."), **self.fields).bind(self.model)
            around: Any = castwise.autocast("cpu", policy=policy, weight_cache=self.cache)
            if self.cache is None and not self.fields:
                around = torch.autocast("cpu", dtype=dtype)
            with MODES[mode](), around:
                y = self.model(X)
            if y.requires_grad:
                self.losses.append(y.float().square().sum())
            return y.detach().clone()
        if call == "change":
            # torch swaps no weights that a graph or a freeze is upon.
            if arguments[0] != "swap_tensors" or (not self.losses and self.model[0].weight.requires_grad):
                CHANGES[arguments[0]](self.model)
        elif call == "backward" and self.losses:
            try:
                self.losses.pop(0).backward()
            except RuntimeError as error:
                return str(error)[:60]
        elif call == "step":
            params = [param for param in self.model.parameters() if param.grad is not None]
            if params:
                torch.optim.AdamW(params, lr=0.01, fused=arguments[0]).step()
        elif call == "freeze":
            param = list(self.model.parameters())[arguments[0]]
            param.requires_grad_(not param.requires_grad)
        return None


@given(PROGRAM, st.sampled_from(MODELS), st.sampled_from(POLICIES))
def test_random_programs_are_those_without_a_cache(
    program: list[Any], kind: type[nn.Sequential], fields: dict[str, Any]
) -> None:
    ours, theirs = Program(True, kind, fields), Program(False, kind, fields)
    for call in program:
        got, expected = ours.take(*call), theirs.take(*call)
        assert type(got) is type(expected)
        same([got] if isinstance(got, torch.Tensor) else [], [expected] if isinstance(got, torch.Tensor) else [])
        if isinstance(got, str):
            assert got == expected
            return  # some gradients may have been added, in any order
        same([*ours.model.parameters()], [*theirs.model.parameters()])
        same(gradients(ours.model), gradients(theirs.model))


# -- each way to see a change is needed -------------------------------------------------------------------------------


def sees(change: Callable[[nn.Sequential], Any]) -> Callable[[], None]:
    return lambda: test_a_changed_weight_is_cast_again(change, torch.no_grad)


MUTANTS: dict[str, tuple[str, Any, Callable[[], None]]] = {
    "steps of optimizers": ("_weight_cache._invalidate_written", lambda _: None, sees(CHANGES["fused AdamW"])),
    "invalidate": (
        "_weight_cache.WeightCache.invalidate",
        lambda _: None,
        test_writes_through_data_are_seen_when_declared_or_verified,
    ),
    "verify": (
        "_weight_copies.Copy.differs",
        lambda *_: False,
        test_writes_through_data_are_seen_when_declared_or_verified,
    ),
}


@pytest.mark.parametrize(("name", "broken", "test"), MUTANTS.values(), ids=MUTANTS)
def test_without_it_a_test_fails(
    name: str, broken: Any, test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test()
    monkeypatch.setattr(f"castwise.weights.{name}", broken)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        test()


def test_weights_that_cannot_be_watched_are_left_to_autocast_and_named() -> None:
    with torch.inference_mode():
        model = nn.ModuleList([nn.Linear(4, 4, bias=False)])
    cache = WeightCache(model)
    same(output(model[0], cache), output(model[0], None))
    assert cache.report().refused == {"0.weight": "created in inference mode, where writes are not counted"}


# -- what is held, and for how long ------------------------------------------------------------------------------------


def run(model: nn.Module, cache: WeightCache) -> None:
    with torch.no_grad(), castwise.autocast("cpu", dtype=torch.bfloat16, weight_cache=cache):
        model(torch.ones(1, 4))


def test_a_weight_that_leaves_the_model_is_forgotten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    cache = WeightCache(model)
    gone = model[0].weight
    run(model, cache)
    assert cache.report().nbytes == 64
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    run(model, cache)  # meets the new one
    run(model, cache)
    assert cache.report().nbytes == 64
    assert cache.report().refreshes == 3
    del model[0]
    gc.collect()
    assert cache.report().nbytes == 32
    del gone
    gc.collect()
    assert raised == []


@pytest.mark.parametrize("cached", ["model", "part"])
def test_weights_that_fsdp2_gathers_are_left_to_autocast(cached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "_MIN_TRAINED", 0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        outputs = []
        for with_cache in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            fully_shard(model[0])
            fully_shard(model, reshard_after_forward=False)  # so that the second layer is gathered between forwards
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            cache = WeightCache(model if cached == "model" else model[1]) if with_cache else None
            for training in (True, False, True, False, False):
                with torch.set_grad_enabled(training), castwise.autocast("cpu", torch.bfloat16, weight_cache=cache):
                    outputs.append(model(X))
                if training:
                    outputs[-1].sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert cache is None or cache.report().nbytes == 0
    finally:
        torch.distributed.destroy_process_group()
    for expected, got in zip(outputs[:5], outputs[5:], strict=True):
        same(got, expected)


def test_why_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("sparse", "hooked", "plain")})
    model["far"] = nn.Linear(2, 2, bias=False, device="meta")
    model["subclass"], model["norm"] = Scaled(2, 2, bias=False), nn.LayerNorm(2)
    model["sparse"].weight = nn.Parameter(torch.eye(2).to_sparse())
    model["hooked"].forward = lambda input: input
    assert WeightCache(model).report().refused == {
        "far.weight": "torch.strided on meta",
        "sparse.weight": "torch.sparse_coo on cpu",
        "subclass.weight": "of a Scaled, not a plain Linear",
        "hooked.weight": "of a Linear with its own forward",
    }
    monkeypatch.setattr(weight_copies, "is_fsdp_flattened", lambda weight: True)
    plain = nn.Linear(1, 1, bias=False)
    assert WeightCache(plain).report().refused == {"weight": "managed by FullyShardedDataParallel"}


def test_a_region_of_another_device_leaves_weights_alone() -> None:
    model = nn.Linear(4, 4)
    cache = WeightCache(model)
    with torch.no_grad(), region(None), autocast_enabled("cuda"):
        cache.enter(types.SimpleNamespace(device="cuda"))
        try:
            same(model(X), functional.linear(X, model.weight, model.bias))
        finally:
            cache.leave(None)
    assert cache.report().nbytes == 0


@contextmanager
def autocast_enabled(device: str) -> Iterator[None]:
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


def test_a_write_that_leaves_no_trace_is_reported_with_every_name_of_the_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    cache = WeightCache(model, verify=True)
    run(model, cache)
    model[0].weight.data.fill_(3.0)
    text = (
        "the weight 0.weight = 1.weight was changed in a way that leaves no trace, such as a write through .data, "
        "and its old value may have been used since: call WeightCache.invalidate() after such a write"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        run(model, cache)


def test_copies_keep_their_options_and_know_whose_weights_they_keep() -> None:
    model = nn.Linear(4, 4, bias=False)
    cache = WeightCache(model, verify=False)
    twin = copy.deepcopy(cache)
    assert twin.__getstate__() == {"model": model, "verify": False}
    both = copy.deepcopy({"model": model, "cache": cache})
    assert both["cache"].__getstate__()["model"] is both["model"]
    loaded = pickle.loads(pickle.dumps(cache)).__getstate__()
    assert loaded["verify"] is False
    del model, both
    gc.collect()
    assert copy.deepcopy(cache).__getstate__()["model"] is None
