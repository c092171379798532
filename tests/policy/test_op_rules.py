"""Rules for ops: their names, what they cast, what they leave, and writes in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from castwise import Policy
from castwise.policy._op_rules import (
    Rule,
    _with_source_cast,
    _writes_to_arguments,
    calls_no_rule,
    canonical,
    op_names,
    rules_of,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODEL = nn.Module()


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 4)), generator=torch.Generator().manual_seed(1))


def region(**fields: Any) -> castwise.autocast:
    return castwise.autocast("cpu", policy=Policy(**{"compute": "bfloat16", **fields}).bind(MODEL))


# -- names ------------------------------------------------------------------------------------------------------------

SPELLINGS = {
    "softmax": [
        "softmax", "torch.softmax", "torch.nn.functional.softmax", "nn.functional.softmax", "F.softmax",
        "torch.Tensor.softmax", "aten.softmax", "aten::softmax", "aten.softmax.int", "torch.ops.aten.softmax",
    ],
    "linalg_norm": ["linalg.norm", "torch.linalg.norm", "aten.linalg_norm", "linalg_norm"],
    "norm": ["norm", "torch.norm", "torch.functional.norm", "torch.Tensor.norm"],
}  # fmt: skip


@pytest.mark.parametrize(("op", "names"), SPELLINGS.items())
def test_an_op_has_many_names(op: str, names: list[str]) -> None:
    assert {canonical(name) for name in names} == {op}
    assert op in op_names()


CALLS: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": [
        lambda t: t.softmax(-1),
        lambda t: torch.softmax(t, -1),
        lambda t: F.softmax(t, dim=-1),
        lambda t: torch.special.softmax(t, -1),
        nn.Softmax(-1),
        lambda t: torch.softmax(input=t, dim=-1),
    ],
    "matmul": [lambda t: t @ t.T, lambda t: torch.matmul(t, t.T), lambda t: t.matmul(t.T)],
    "mul": [lambda t: t * t, lambda t: t.mul(t), lambda t: torch.mul(t, t), lambda t: 2.0 * t],
    "floor_divide": [lambda t: t // 3, lambda t: torch.floor_divide(t, 3)],
    "threshold": [lambda t: F.threshold(t, 0.1, 0.0), nn.Threshold(0.1, 0.0)],
    "div": [lambda t: t / 3, lambda t: 3 / t, lambda t: torch.div(t, 3)],
    "cat": [lambda t: torch.cat([t, t]), lambda t: torch.cat((t, t), dim=1)],
    "layer_norm": [nn.LayerNorm(4), lambda t: F.layer_norm(t, (4,))],
    "scaled_dot_product_attention": [lambda t: F.scaled_dot_product_attention(t[None], t[None], value=t[None])],
    "cross_entropy": [lambda t: nn.CrossEntropyLoss()(t, torch.tensor([0, 1]))],
    "einsum": [lambda t: torch.einsum("ij,kj->ik", t, t)],
    "linear": [nn.Linear(4, 3), lambda t: F.linear(t, torch.ones(3, 4, dtype=t.dtype))],
    "linalg.norm": [lambda t: torch.linalg.norm(t)],
    "sum": [lambda t: t.sum(), lambda t: torch.sum(t, 0)],
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("op", CALLS)
def test_a_rule_holds_for_all_ways_to_call_an_op(op: str, dtype: torch.dtype) -> None:
    for call in CALLS[op]:
        with region(ops={op: dtype}):
            got = call(x())
        params = list(getattr(call, "parameters", list)())
        for param in params:
            param.data = param.data.to(dtype)
        want = call(x().to(dtype))
        for param in params:
            param.data = param.data.float()
        assert got.dtype is dtype
        assert torch.equal(got, want)


def test_gradients_pass_the_casts() -> None:
    given = x().requires_grad_()
    with region(ops={"softmax": "bfloat16"}):
        given.softmax(-1)[0, 0].backward()
    expected = x().requires_grad_()
    expected.bfloat16().softmax(-1)[0, 0].backward()
    assert given.grad is not None
    assert torch.equal(given.grad, expected.grad)


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        (
            {"sofmax": "float32"},
            "ops['sofmax'] is not an op of this torch version; did you mean 'softmax'",
        ),
        ({"torch.nn.functional.layernorm": "float32"}, "did you mean 'layer_norm'"),
        ({"softmax_": "float32"}, "ops['softmax_'] is not an op"),
        ({"add_": "float32"}, "ops['add_'] is not an op"),
        ({"": "float32"}, "ops[''] is not an op"),
        (
            {"softmax": "float32", "F.softmax": "float16"},
            "ops['F.softmax'] = 'float16' contradicts ops['softmax'] = 'float32'",
        ),
    ],
)
def test_unknown_ops_and_contradictions_are_errors(ops: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Policy(compute="bfloat16", ops=ops).bind(nn.Linear(1, 1))


def test_two_spellings_may_agree() -> None:
    Policy(compute="bfloat16", ops={"softmax": "float32", "F.softmax": "float32"}).bind(nn.Linear(1, 1))


# -- what is left -----------------------------------------------------------------------------------------------------


def test_variants_that_write_are_left() -> None:
    kept = x()
    out = torch.empty(2, 4)
    with region(ops={"relu": "bfloat16", "dropout": "bfloat16", "mul": "bfloat16", "softmax": "bfloat16"}):
        for write in (
            nn.ReLU(inplace=True),
            lambda t: F.relu(t, inplace=True),
            lambda t: F.dropout(t, 0.5, True, True),
        ):
            assert write(kept) is kept
        kept *= 2
        kept.mul_(2)
        torch.mul(kept, 2, out=out)
        assert F.relu(kept).dtype is BF16
        assert nn.ReLU()(kept).dtype is BF16
        assert F.dropout(kept, 0.5, True).dtype is BF16
    assert (kept.dtype, out.dtype) == (FP32, FP32)


@pytest.mark.parametrize(
    ("op", "make"),
    [("batch_norm", nn.BatchNorm1d), ("instance_norm", lambda n: nn.InstanceNorm1d(n, track_running_stats=True))],
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("buffers", [FP32, BF16])
def test_running_statistics_are_written(op: str, make: Any, dtype: torch.dtype, buffers: torch.dtype) -> None:
    norm = make(4).to(buffers)
    given = x(8, 4, 2) + 3
    if buffers is BF16 and dtype is not BF16:
        given = given.bfloat16()
    with region(ops={op: dtype}):
        if norm.weight is not None and buffers is BF16 and dtype is not BF16:  # torch takes none beside another input
            with pytest.raises(RuntimeError, match="expect"):
                norm(given)
            return
        norm(given)
    assert norm.running_mean is not None
    assert norm.running_mean.abs().sum() > 0.5


def test_an_embedding_with_a_max_norm_scales_its_weight() -> None:
    embedding = nn.Embedding(4, 4, max_norm=0.1)
    with region(ops={"embedding": "bfloat16"}):
        embedding(torch.arange(4))
        assert nn.functional.embedding(torch.arange(2), x(4, 4)).dtype is BF16
    assert (embedding.weight.norm(dim=1) < 0.2).all()


@pytest.mark.parametrize(
    "name", ["setitem", "view", "getitem", "t", "detach", "to", "float", "register_hook", "retain_grad", "item", "size"]
)
def test_what_computes_nothing_new_has_no_rules(name: str) -> None:
    with pytest.raises(ValueError, match="is not an op of this torch version"):
        Policy(compute="bfloat16", ops={name: "float32"}).bind(nn.Linear(1, 1))


def test_ops_and_tensors_that_are_not_named_are_left() -> None:
    double, number, other = x().double(), torch.arange(4), torch.empty(2, device="meta")
    with region(ops={"mul": "float16", "softmax": "float16"}):
        assert (double * double).dtype is torch.float64
        assert (number * number).dtype is torch.int64
        assert (other * other).dtype is FP32
        assert (x() + x()).dtype is FP32
        assert F.linear(x(), x(4, 4)).dtype is BF16
        assert torch.is_autocast_enabled("cpu")


def test_autocast_is_as_it_was_after_an_op_that_raises() -> None:
    with region(ops={"softmax": "float32", "linear": "float16"}):
        with pytest.raises(IndexError):
            x().softmax(7)
        with pytest.raises(RuntimeError):
            F.linear(x(), x(3, 3))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is BF16


# -- writes in place --------------------------------------------------------------------------------------------------

INDEX = torch.tensor([1, 0])
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index_put_": lambda to, source: to.index_put_((INDEX,), source),
    "torch.index_put_(input=)": lambda to, source: torch.index_put_(input=to, indices=(INDEX,), values=source),
    "torch.index_put_": lambda to, source: torch.index_put_(to, (INDEX,), values=source),
    "index_copy_": lambda to, source: to.index_copy_(0, INDEX, source),
    "index_add_": lambda to, source: to.index_add_(0, INDEX, source, alpha=2),
    "index_reduce_": lambda to, source: to.index_reduce_(0, INDEX, source, "amax"),
    "scatter_add_": lambda to, source: to.scatter_add_(0, INDEX[:, None].expand(2, 4), source),
    "scatter_": lambda to, source: to.scatter_(0, INDEX[:, None].expand(2, 4), src=source),
    "scatter_reduce_": lambda to, source: to.scatter_reduce_(0, INDEX[:, None].expand(2, 4), source, "sum"),
    "masked_scatter_": lambda to, source: to.masked_scatter_(torch.ones(2, 4, dtype=torch.bool), source),
    "put_": lambda to, source: to.put_(torch.arange(8).view(2, 4), source),
    "x[i] = y": lambda to, source: to.__setitem__(INDEX, source),
    "x[mask] = y": lambda to, source: to.__setitem__(torch.tensor([True, True]), source),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(("to", "of"), [(FP32, BF16), (BF16, FP32)])
def test_a_write_casts_its_source_if_the_policy_says_so(write: Any, to: torch.dtype, of: torch.dtype) -> None:
    def written(source: torch.Tensor, **fields: Any) -> torch.Tensor:
        destination = torch.zeros(2, 4, dtype=to)
        with region(**fields):
            write(destination, source)
        return destination

    source = x().to(of).requires_grad_()
    with pytest.raises(RuntimeError):
        written(source)
    with pytest.raises(RuntimeError), torch.autocast("cpu", dtype=BF16):
        write(torch.zeros(2, 4, dtype=to), source)
    got = written(source, in_place="cast")
    expected = torch.zeros(2, 4, dtype=to)
    write(expected, source.detach().to(to))
    assert torch.equal(got, expected)
    got.sum().backward()
    assert source.grad is not None
    assert source.grad.dtype is of


def test_only_floating_point_sources_are_cast() -> None:
    with region(in_place="cast"), pytest.raises(RuntimeError):
        torch.zeros(2, 4).index_copy_(0, INDEX, torch.ones(2, 4, dtype=torch.int64))
    with region(in_place="cast"):
        destination = torch.zeros(2, 4)
        destination[0] = 3
        destination[INDEX] = 5.0
        destination.scatter_(0, INDEX[:, None], 7.0)
        assert destination[0].tolist() == [7.0, 5.0, 5.0, 5.0]


# -- what is called how ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "ops", "calls_none"),
    [
        (nn.Sequential(), {"linear": FP32}, True),
        (nn.Linear(1, 1), {"linear": FP32}, False),
        (nn.Linear(1, 1), {"gelu": FP32}, True),
        (nn.GELU(), {"linear": FP32}, True),
        (nn.Conv1d(1, 1, 1), {"conv_transpose1d": FP32}, True),
        (nn.ConvTranspose1d(1, 1, 1), {"conv_transpose1d": FP32}, False),
        (nn.Conv1d(1, 1, 1, padding=1, padding_mode="circular"), {"linear": FP32}, False),  # pads first
        (nn.Embedding(2, 2), {"linear": FP32}, True),
        (nn.Embedding(2, 2, max_norm=1.0), {"linear": FP32}, False),  # scales first
        (nn.Bilinear(1, 1, 1), {"linear": FP32}, False),  # unknown
    ],
)
def test_of_some_modules_it_is_known_that_no_rule_is_for_them(module: Any, ops: Any, calls_none: bool) -> None:
    rules = rules_of(Policy(compute="bfloat16", ops=ops))
    assert calls_no_rule(module, rules) is calls_none


@pytest.mark.parametrize(
    "write", [lambda t: F.relu(t, True), lambda t: F.relu(t, inplace=True), lambda t: F.hardtanh(t, -0.5, 0.5, True)]
)
def test_a_function_that_is_asked_to_write_to_its_argument_does(write: Any) -> None:
    given, expected = x(), x()
    with region(ops={"relu": "float16", "hardtanh": "float16"}):
        assert write(given) is given
        assert F.relu(given).dtype is FP16
    assert torch.equal(given, write(expected))


@pytest.mark.parametrize(
    ("args", "kwargs", "writes"),
    [
        ((0, 1.0, True), {}, True),
        ((0, 1.0, False), {}, False),
        ((0, 1.0), {"inplace": True}, True),
        ((0, 1.0), {"inplace": False}, False),
        ((0, 1.0), {}, False),
        ((0,), {}, False),
        ((0, 1.0, False), {"max_norm": 2.0}, True),
        ((0, 1.0, False, 2.0), {}, True),
        ((0, 1.0, False, None), {}, False),
    ],
)
def test_it_may_be_given_by_position_or_by_name(args: Any, kwargs: Any, writes: bool) -> None:
    """torch itself names them; Dynamo passes on what was called."""
    assert _writes_to_arguments(Rule(flags=(("inplace", 2), ("max_norm", 3))), args, kwargs) is writes


def test_what_is_written_to_out_is_computed_as_without_the_rule() -> None:
    out = torch.empty(2, 4)
    with region(ops={"mul": "bfloat16"}):
        torch.mul(x(), x(), out=out)
    assert torch.equal(out, x() * x())


@pytest.mark.parametrize(
    ("norm", "settings"),
    [
        (F.batch_norm, {}),
        (F.instance_norm, {}),
        (torch.batch_norm, {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}),
        (
            torch.instance_norm,
            {"weight": None, "bias": None, "use_input_stats": False, "momentum": 0.1, "eps": 1e-5},
        ),
    ],
)
def test_the_input_of_a_norm_with_statistics_may_be_given_by_name(norm: Any, settings: dict[str, Any]) -> None:
    mean, variance = torch.zeros(4), torch.ones(4)
    given = x(2, 4, 3)
    ops = {"batch_norm": "float16", "instance_norm": "float16"}
    with region(ops=ops):
        settings |= {"cudnn_enabled": False} if norm in {torch.batch_norm, torch.instance_norm} else {}
        by_name = norm(input=given, running_mean=mean, running_var=variance, **settings)
        by_place = norm(given, running_mean=mean, running_var=variance, **settings)
    assert by_name.dtype is by_place.dtype is FP16
    assert torch.equal(by_name, by_place)
    assert mean.dtype is FP32


def test_where_autocast_is_off_results_of_a_rule_are_fp32() -> None:
    with region(compute="float32", ops={"softmax": "bfloat16"}):
        got = x().softmax(-1)
    assert got.dtype is FP32
    assert torch.equal(got, x().bfloat16().softmax(-1).float())


def test_a_weight_that_a_rule_casts_is_not_taken_for_another_ops_cast() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with region(ops={"linear": "float16"}):
        assert F.linear(x(), weight).dtype is FP16
        assert torch.mm(x(), weight).dtype is BF16


class CountedCasts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rule", "casts"), [("bfloat16", 1), ("float16", 2)])
def test_autocast_keeps_the_casts_of_weights_where_a_rule_says_what_it_does(rule: str, casts: int) -> None:
    weight, given = nn.Parameter(torch.ones(4, 4)), x().to(getattr(torch, rule))
    with region(ops={"linear": rule}), CountedCasts() as counted:
        for _ in range(2):
            F.linear(given, weight)
    assert counted.count == casts


@pytest.mark.parametrize("rule", ["bfloat16", "float16", "float32"])
def test_arguments_given_by_name_reach_the_op(rule: str) -> None:
    dtype = getattr(torch, rule)
    with region(ops={"baddbmm": rule}):
        got = torch.baddbmm(torch.ones(1, 2, 2), x(1, 2, 4), x(1, 4, 2), beta=2.0, alpha=3.0)
    factors = torch.ones(1, 2, 2), x(1, 2, 4), x(1, 4, 2)
    want = torch.baddbmm(*(factor.to(dtype) for factor in factors), beta=2.0, alpha=3.0)
    assert torch.equal(got, want)


def test_under_another_region_calls_pass_as_they_are() -> None:
    with region(ops={"softmax": "bfloat16"}), torch.autocast("cpu", dtype=FP16):
        assert torch.equal(torch.softmax(x(), -1), x().softmax(-1))
        assert torch.softmax(x(), dim=-1).dtype is FP32
    with region(ops={"softmax": "bfloat16"}), region(ops={"sum": "bfloat16"}):
        assert torch.softmax(x(), -1).dtype is FP32
        assert x().sum().dtype is BF16


def test_names_are_those_of_ops_that_compute() -> None:
    names = op_names()
    assert torch.special.softmax in names["softmax"]
    assert torch.Tensor.__rmul__ in names["mul"]
    assert torch.Tensor.__matmul__ in names["matmul"]
    assert torch.unique in names["unique"]
    assert torch.Tensor.__rtruediv__ in names["div"]
    assert {F.threshold, torch.threshold} <= set(names["threshold"])
    assert torch.linalg.norm in names["linalg_norm"]
    assert torch.norm in names["norm"]
    views_and_questions = ("view", "size", "is_floating_point", "__get__")
    for name in (*views_and_questions, "relu_", "iadd", "_threshold", "_sparse_mask_projection", "batch_norm_stats"):
        assert name not in names
    assert all(len(functions) == len(set(functions)) for functions in names.values()), "each once"
    assert canonical("linalg") == "linalg"
    assert canonical("torch.nn.functional.softmax") == "softmax"


@pytest.mark.parametrize("by", [{"input": 0}, {"self": 0}, {}])
def test_the_destination_of_a_write_may_be_given_by_name(by: dict[str, int]) -> None:
    destination, source = torch.zeros(2, dtype=BF16), torch.ones(2)
    args, kwargs = ((), {next(iter(by)): destination, "source": source}) if by else ((destination, None, source), {})
    args, kwargs = _with_source_cast(args, kwargs, 2, "source")
    assert (kwargs["source"] if by else args[2]).dtype is BF16
