"""`trace`: which ops ran in which dtype, and what was cast."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Policy, WeightCache, policies
from castwise._demo.gpt import example
from castwise.policy._bound_policy import find_bound
from castwise.tracing import Cast, Trace


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def casts(seen: Trace) -> list[tuple[Any, ...]]:
    return [(c.module, c.phase, c.of, c.source, c.target, c.redundant, c.count, c.nbytes) for c in seen.casts]


def test_every_cast_of_a_forward_and_backward_is_counted() -> None:
    seen = castwise.trace(mlp(), torch.ones(3, 4), policy=policies.bf16)
    down, up = ("float32", "bfloat16"), ("bfloat16", "float32")
    assert casts(seen) == [
        ("0", "forward", "0.bias", *down, "", 1, 8 * 6),
        ("0", "forward", "0.weight", *down, "", 1, 32 * 6),
        ("0", "forward", "activation", *down, "", 1, 12 * 6),
        ("2", "forward", "2.bias", *down, "", 1, 2 * 6),
        ("2", "forward", "2.weight", *down, "", 1, 16 * 6),
        ("2", "backward", "gradient", *up, "", 2, 18 * 6),
        ("0", "backward", "gradient", *up, "", 2, 40 * 6),
    ]
    by_name = {(op.op, op.inputs): op for op in seen.ops}
    assert (by_name["aten.addmm", "bfloat16"].forward, by_name["aten.mm", "bfloat16"].backward) == (2, 3)
    assert by_name["aten.relu", "bfloat16"].output == "bfloat16"


def test_without_a_policy_the_region_around_holds() -> None:
    assert castwise.trace(mlp(), torch.ones(3, 4)).casts == ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = castwise.trace(mlp(), torch.ones(3, 4))
    assert around.of_weights() == castwise.trace(mlp(), torch.ones(3, 4), policy=policies.bf16).of_weights()


def test_what_a_weight_cache_removes_is_shown_on_the_gpt_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "castwise.weights._weight_cache._MIN_TRAINED", 0
    )  # else small weights are left to autocast in training
    model, tokens = example()
    cache = WeightCache(model)
    plain = castwise.trace(model, tokens, policy=policies.bf16)
    filling, filled = (castwise.trace(model, tokens, policy=policies.bf16, weight_cache=cache) for _ in range(2))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    nbytes = sum(6 * param.numel() for module in linear for param in module.parameters())
    assert plain.of_weights() == filling.of_weights() == (2 * len(linear), nbytes)
    assert filled.of_weights() == (0, 0)
    others = [cast for cast in plain.casts if cast.of in {"activation", "gradient"}]
    assert list(filled.casts) == others


def test_a_tensor_that_is_cast_twice_is_redundant() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x) + self.second(x)
            x.add_(1)
            return y + self.first(x)  # type: ignore[no-any-return]

    seen = castwise.trace(Twice().requires_grad_(False), torch.ones(3, 4), policy=policies.bf16)
    assert [cast[:3] + cast[5:7] for cast in casts(seen)] == [
        ("first", "forward", "first.weight", "", 1),
        ("first", "forward", "activation", "", 2),  # written between: other values
        ("second", "forward", "second.weight", "", 1),
        ("second", "forward", "activation", "cast before", 1),
        ("first", "forward", "first.weight", "cast before", 1),
    ]
    assert seen.redundant() == (2, 12 * 6 + 16 * 6)


@pytest.mark.parametrize(
    ("between", "redundant"),
    [
        (lambda low: low, "back again"),
        (lambda low: low.view(-1, 2).t(), "back again"),
        (lambda low: low * 2, ""),
        (lambda low: low.relu_(), ""),
    ],
)
def test_a_cast_back_with_nothing_between_is_redundant(between: Any, redundant: str) -> None:
    class There(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return between(x.bfloat16()).float()  # type: ignore[no-any-return]

    seen = castwise.trace(There(), torch.ones(3, 4))
    assert [(cast.source, cast.redundant) for cast in seen.casts] == [("float32", ""), ("bfloat16", redundant)]


def test_modules_are_named_in_the_backward_and_when_a_forward_is_run_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=False))  # type: ignore[no-any-return]

    seen = castwise.trace(Checkpointed(), torch.ones(3, 4, requires_grad=True), policy=policies.bf16)
    again = [cast for cast in seen.casts if cast.phase == "backward" and cast.of != "gradient"]
    assert {(cast.module, cast.of) for cast in again} == {("a", "a.weight"), ("a", "activation")}
    assert {cast.module for cast in seen.casts if cast.of == "gradient"} == {"a", "b"}


def test_module_rules_and_a_loss_are_seen() -> None:
    policy = Policy(compute="bfloat16", modules={"2": "float32"})
    seen = castwise.trace(mlp(), torch.ones(3, 4), policy=policy, loss_fn=lambda y: y.square().mean())
    assert Cast("2", "forward", "activation", "bfloat16", "float32", "", 1, 24 * 6) in seen.casts
    assert any(op.op == "aten.pow" and op.inputs == "float32" for op in seen.ops)


def test_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model(torch.randn(3, 4)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [(param.grad, param.grad.clone()) for param in model.parameters() if param.grad is not None]
    random = torch.get_rng_state()
    castwise.trace(model, torch.randn(3, 4), policy=policies.bf16)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for param, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert param.grad is gradient
        assert torch.equal(gradient, values)
    assert torch.equal(torch.get_rng_state(), random) is False  # torch.randn above, and nothing after it
    torch.set_rng_state(random)
    torch.randn(3, 4)
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    castwise.trace(model, torch.randn(3, 4), policy=policies.bf16)
    assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(RuntimeError):
        castwise.trace(model, torch.randn(3, 5), policy=policies.bf16)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert [param.grad for param in model.parameters()] == [gradient for gradient, _ in gradients]


def test_a_trace_is_a_table_and_a_dict() -> None:
    seen = castwise.trace(mlp(), torch.ones(3, 4), policy=policies.bf16)
    table = str(seen).splitlines()
    assert table[0].split() == ["module", "phase", "cast", "of", "dtypes", "count", "bytes", "redundant"]
    assert table[-3:] == [
        "9 casts, 768 bytes",
        "4 of weights, 348 bytes: a WeightCache keeps these",
        "0 redundant, 0 bytes",
    ]
    as_dict = json.loads(json.dumps(seen.as_dict()))
    assert as_dict["totals"]["weights"] == {"casts": 4, "nbytes": 348}
    assert as_dict["casts"][0] == {
        "module": "0",
        "phase": "forward",
        "of": "0.bias",
        "source": "float32",
        "target": "bfloat16",
        "redundant": "",
        "count": 1,
        "nbytes": 48,
    }


def test_outputs_of_any_kind_and_none_that_need_a_gradient() -> None:
    class Outputs(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"x": [x, 3], "i": torch.tensor(1)}

    seen = castwise.trace(Outputs(), torch.ones(3, 4), policy=policies.bf16)
    assert sum(op.backward for op in seen.ops) == 0
    seen = castwise.trace(Outputs(), torch.ones(3, 4, requires_grad=True), policy=policies.bf16)
    assert sum(op.backward for op in seen.ops) > 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: castwise.trace(3, torch.ones(1)), TypeError, "model must be a torch.nn.Module, got int"),
        (
            lambda: castwise.trace(mlp(), torch.ones(3, 4), weight_cache=WeightCache(mlp())),
            TypeError,
            "weight_cache needs a policy, whose region uses it: give policy=",
        ),
        (
            lambda: castwise.trace(mlp(), torch.ones(3, 4), policy="bf16"),
            TypeError,
            "policy must be a bound castwise.Policy or None, got str",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


def test_what_a_model_changes_otherwise_is_put_back_too() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return self.linear(x)  # type: ignore[no-any-return]

    model, given = Counts(), torch.ones(3, 4, requires_grad=True)
    castwise.trace(model, given, policy=Policy(compute="bfloat16", modules={"linear": "float32"}))
    assert model.calls == 0
    assert given.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_backward_is_traced_outside_of_the_callers_region() -> None:
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad * 2

    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        castwise.trace(Doubles(), torch.ones(3, 4, requires_grad=True))
    assert seen == [False]


def test_a_transposed_weight_is_that_weight_and_a_part_is_not_the_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
            kept[0] = x * 2
            return x @ self.token.weight.T + kept.float()[0]

    seen = castwise.trace(Tied(), torch.ones(3, 4), policy=policies.bf16)
    assert seen.of_weights()[0] == 1
    assert seen.redundant() == (0, 0)


class Calls(nn.Module):
    """A model that calls what it is given."""

    def __init__(self, do: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = do


def seen_of(do: Callable[..., Any], batch: Any, **settings: Any) -> list[tuple[Any, ...]]:
    """Of each cast what was cast to what, and whether it was redundant."""
    trace = castwise.trace(Calls(do), batch, **settings)
    return [(cast.of, cast.source, cast.target, cast.redundant, cast.count) for cast in trace.casts]


DOWN, UP = ("activation", "float32", "bfloat16"), ("activation", "bfloat16", "float32")


def test_a_batch_of_any_kind_reaches_the_model_as_it_does_in_diagnose() -> None:
    def do(x: torch.Tensor, times: int = 2, *, low: bool = True) -> Any:
        return x.bfloat16() * times if low else x / 0

    x = torch.ones(3, requires_grad=True)
    for batch in (x, (x,), (x, 3), {"x": x}, {"x": x, "times": 3}):
        assert seen_of(do, batch)[0] == (*DOWN, "", 1)
        assert not castwise.diagnose(Calls(do), lambda y: y.float().sum(), batch)
    assert seen_of(do, {"x": x, "low": False}) == []
    assert castwise.diagnose(Calls(do), lambda y: y.sum(), {"x": x, "low": False}).op == "aten.div"
    for call in (lambda: castwise.trace(Calls(do), [x]), lambda: castwise.diagnose(Calls(do), torch.sum, [x])):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == (
            "batch must be a tensor, a tuple of positional arguments, or a dict of keyword arguments, got list"
        )


def test_a_policy_that_was_bound_stays_so() -> None:
    model, policy = mlp(), Policy(compute="bfloat16", modules={"2": "float32"})
    bound = policy.bind(model)
    castwise.trace(model, torch.ones(3, 4), policy=policy)
    assert find_bound(policy, model) is bound
    bound.unbind()
    castwise.trace(model, torch.ones(3, 4), policy=policy)
    assert find_bound(policy, model) is None


def test_all_outputs_have_a_backward_and_none_may() -> None:
    def do(*leaves: torch.Tensor) -> Any:
        return {"outputs": [leaf.exp() for leaf in leaves]}

    def muls(count: int) -> int:
        trace = castwise.trace(Calls(do), tuple(torch.ones(2, requires_grad=True) for _ in range(count)))
        return sum(op.backward for op in trace.ops if op.op == "aten.mul")

    assert [muls(count) for count in (1, 2, 3)] == [1, 2, 3]
    assert castwise.trace(Calls(lambda x: x.argmax()), torch.ones(2, requires_grad=True)).casts == ()


def test_ops_are_counted_that_only_make_or_take_numbers() -> None:
    trace = castwise.trace(Calls(lambda x: x + torch.zeros(3) + x.bfloat16() + x.argmax()), torch.ones(3))
    counts = {(op.op, op.inputs, op.output): (op.forward, op.backward) for op in trace.ops}
    assert counts["aten.zeros", "", "float32"] == (1, 0)
    assert counts["aten.argmax", "float32", ""] == (1, 0)
    assert counts["aten.add", "float32, bfloat16", "float32"] == (1, 0)


def test_an_op_of_the_backward_alone_is_in_no_forward() -> None:
    trace = castwise.trace(mlp(), torch.ones(3, 4))
    (relu,) = [op for op in trace.ops if op.op == "aten.threshold_backward"]
    assert (relu.forward, relu.backward) == (0, 1)


def test_what_a_loss_casts_is_an_activation_of_no_module() -> None:
    trace = castwise.trace(mlp(), torch.ones(3, 4), policy=policies.bf16, loss_fn=lambda y: y.float().sum())
    (cast,) = [cast for cast in trace.casts if cast.phase == "forward" and cast.target == "float32"]
    assert (cast.module, cast.of) == ("", "activation")


def test_what_is_written_to_out_is_no_cast_any_more() -> None:
    def do(x: torch.Tensor) -> torch.Tensor:
        low = x.bfloat16()
        torch.mul(low, 2.0, out=low)
        return low.float()

    assert seen_of(do, torch.ones(3)) == [(*DOWN, "", 1), (*UP, "", 1)]


def test_a_cast_of_which_a_part_is_overwritten_by_another_is_no_cast_of_the_whole() -> None:
    def do(x: torch.Tensor) -> torch.Tensor:
        low = x.bfloat16()
        low[0] = x[0] * 2
        return low.float()

    assert seen_of(do, torch.ones(2, 3)) == [(*DOWN, "", 2), (*UP, "", 1)]


KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "coo": (torch.Tensor.to_sparse, 4),
    "csr": (torch.Tensor.to_sparse_csr, 4),
    "csc": (torch.Tensor.to_sparse_csc, 4),
    "bsr": (lambda x: x.to_sparse_bsr((2, 2)), 8),
    "bsc": (lambda x: x.to_sparse_bsc((2, 2)), 8),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:2]]), 24),
    "jagged": (lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), 24),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_hold_others_are_distinguished(kind: str) -> None:
    make, numbers = KINDS[kind]
    kept: list[torch.Tensor] = []

    def do(x: torch.Tensor) -> int:
        one, two = make(x), make(x * 2)
        kept.extend(tensor.to(torch.bfloat16) for tensor in (one, two, one))
        kept.append(make(torch.eye(4, dtype=torch.bfloat16)).float())
        return 0

    first, again, up = castwise.trace(Calls(do), torch.eye(4)).casts
    assert (up.source, up.redundant) == ("bfloat16", ""), "it was never fp32"
    assert (first.redundant, first.count, first.nbytes) == ("", 2, 2 * 6 * numbers)
    assert (again.redundant, again.count, again.nbytes) == ("cast before", 1, 6 * numbers)


def test_a_recipe_is_one_op_and_its_operands_are_casts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    policy = Policy(compute="bfloat16", modules={"0": "float8_rowwise", "2": "nvfp4"}, backend="emulated")
    cache = WeightCache(model)
    first, again = (castwise.trace(model, torch.randn(4, 32), policy=policy, weight_cache=cache) for _ in range(2))
    ops = {row.op: (row.inputs, row.output, row.forward, row.backward) for row in first.ops}
    both = ("bfloat16, float32", "bfloat16", 1, 1)
    assert ops["float8_rowwise (emulated)"] == ops["nvfp4 (emulated)"] == both
    assert not {"aten.mm", "aten.clamp_", "aten.linalg_vector_norm"} & ops.keys()
    quantized = {
        (row.module, row.phase, row.of, row.source): row for row in first.casts if row.target in ("e4m3", "e2m1")
    }
    assert {key: row.count for key, row in quantized.items()} == {
        ("0", "forward", "activation", "bfloat16"): 1,
        ("0", "forward", "0.weight", "float32"): 1,
        ("0", "backward", "gradient", "bfloat16"): 1,  # for the weight; none is wanted for the batch
        ("0", "backward", "activation", "bfloat16"): 1,
        ("2", "forward", "activation", "bfloat16"): 1,
        ("2", "forward", "2.weight", "float32"): 1,
        ("2", "backward", "gradient", "bfloat16"): 2,
        ("2", "backward", "2.weight", "float32"): 1,
        ("2", "backward", "activation", "bfloat16"): 1,
    }
    assert quantized["2", "forward", "2.weight", "float32"].nbytes == 64 * 32 * 4 + 64 * 32 // 2
    assert first.redundant() == (0, 0)
    kept = {row.of for row in again.casts if row.target in ("e4m3", "e2m1")}
    assert kept == {"activation", "gradient"}


def linear_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


MXFP8 = Policy(compute="bfloat16", modules={nn.Linear: "mxfp8"}, backend="emulated")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_by_a_recipe_counts_as_backward(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linear_layers()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.layers, x, use_reentrant=use_reentrant)

    seen = castwise.trace(Checkpointed(), torch.randn(4, 32).requires_grad_(), policy=MXFP8)
    (products,) = [op for op in seen.ops if op.op == "mxfp8 (emulated)"]
    assert (products.forward, products.backward) == (2, 4)
    quantized = [(cast.phase, cast.count) for cast in seen.casts if cast.target == "e4m3"]
    assert sum(count for phase, count in quantized if phase == "forward") == 4
    assert sum(count for phase, count in quantized if phase == "backward") == 4 + 8


def test_layers_of_other_models_that_compute_meanwhile_are_not_counted() -> None:
    other = linear_layers()
    bound = MXFP8.bind(other)

    def computes_elsewhere() -> None:
        with castwise.autocast("cpu", policy=bound):
            other(torch.randn(4, 32)).sum().backward()

    def loss(output: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=computes_elsewhere)
        thread.start()
        thread.join()
        return output.sum()

    model, x = linear_layers(), torch.randn(4, 32)
    assert castwise.trace(model, x, policy=MXFP8, loss_fn=loss) == castwise.trace(model, x, policy=MXFP8)
