"""What holds while the modules of a bound model run: rules, regions within, backwards, copies and threads."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Policy, WeightCache
from castwise.amp._thread_state import THREAD
from castwise.policy import _bound_policy as bound_policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Spy(nn.Module):
    """Keeps what it is given, and the native state in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))
        out: torch.Tensor = self.linear(x)
        self.seen.append((state(), args, kwargs, out.dtype))
        return out


def state() -> str:
    return str(torch.get_autocast_dtype("cpu")).removeprefix("torch.") if torch.is_autocast_enabled("cpu") else "off"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = Spy(), Spy(), Spy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))  # type: ignore[no-any-return]

    def states(self) -> list[str]:
        return [seen[0] for spy in (self.a, self.b, self.c) for seen in spy.seen]


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 4)), generator=torch.Generator().manual_seed(1))


def same(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def region(model: nn.Module, **fields: Any) -> castwise.autocast:
    return castwise.autocast("cpu", policy=Policy(**{"compute": "bfloat16", **fields}).bind(model))


@pytest.fixture(autouse=True)
def nothing_is_left_in_force() -> Iterator[None]:
    yield
    assert THREAD.state is None
    assert not torch.is_autocast_enabled("cpu")


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("float32", "off"), ("exclude", "off"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("inherit", "bfloat16")],
)
def test_a_rule_holds_while_its_module_runs(rule: str, expected: str) -> None:
    model = Model()
    with region(model, modules={"b": rule}):
        model(x())
    assert model.states() == ["bfloat16", expected, "bfloat16"]
    dtype = FP32 if expected == "off" else getattr(torch, expected)
    assert [spy.seen[0][3] for spy in (model.a, model.b, model.c)] == [BF16, dtype, BF16]


def test_nothing_holds_outside_of_the_policy_s_region() -> None:
    model = Model()
    mine = Policy(compute="bfloat16", modules={"b": "float16"}, output="float16").bind(model)
    Policy(compute="bfloat16", modules={"a": "float16"}).bind(model)
    assert model(x()).dtype is FP32
    with castwise.autocast("cpu", dtype=BF16):
        assert model(x()).dtype is BF16
    with castwise.autocast("cpu", policy=mine, enabled=False):
        assert model(x()).dtype is FP32
    assert model.states() == ["off", "bfloat16", "off"] * 3


def test_the_innermost_named_module_wins_and_its_rule_ends_with_it() -> None:
    inner, outer = nn.Sequential(Spy(), Spy()), nn.Sequential()
    outer.extend([Spy(), inner, Spy()])
    model = nn.Sequential(outer, Spy())
    with region(model, modules={"0": "float32", "0.1": "float16", "0.1.1": "exclude"}):
        model(x())
    spies = [outer[0], inner[0], inner[1], outer[2], model[1]]
    assert [spy.seen[0][0] for spy in spies] == ["off", "float16", "off", "off", "bfloat16"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_rule_ends_when_its_forward_raises(error: type[BaseException]) -> None:
    model = Model()

    def fail(*_: Any) -> None:
        raise error

    hook = model.b.linear.register_forward_hook(fail)
    with region(model, modules={"b": "float16", "b.linear": "exclude"}, ops={"softmax": "float16"}):
        with pytest.raises(error):
            model(x())
        assert state() == "bfloat16"
        assert x().softmax(-1).dtype is FP16
        hook.remove()
        model.a.seen.clear()
        model(x())
    assert model.states() == ["bfloat16", "float16", "bfloat16"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_a_rule_ends_when_a_forward_that_is_run_again_raises(error: type[BaseException]) -> None:
    model = Checkpointed(RUNS["reentrant"])
    bound = Policy(compute="bfloat16", modules={"block": "float32"}, ops={"softmax": "float16"}).bind(model)
    with castwise.autocast("cpu", policy=bound):
        out = model(x().requires_grad_())

    def fail(*_: Any) -> None:
        raise error

    hook = model.block[1].register_forward_hook(fail)
    with castwise.autocast("cpu", dtype=BF16):
        with pytest.raises(error):
            out.float().sum().backward()
        assert (state(), THREAD.state, torch._C._len_torch_function_stack()) == ("bfloat16", None, 0)
    hook.remove()


def test_arguments_of_fp32_modules_are_cast_wherever_they_are() -> None:
    model = Spy()
    cache: list[Any] = []
    given = {"t": x().bfloat16(), "n": 3, "l": [x().half(), {"x": x().double()}], "i": torch.ones(1, dtype=torch.int64)}
    with region(model, modules={"": "float32"}):
        model(x().bfloat16(), cache, None, key=given)
    _, args, kwargs, _ = model.seen[0]
    assert args[0].dtype is FP32
    assert args[1] is cache  # nothing to cast in it: what a module adds to it reaches the caller
    key = kwargs["key"]
    assert (key["t"].dtype, key["n"], key["l"][0].dtype, key["l"][1]["x"].dtype) == (FP32, 3, FP32, torch.float64)
    assert key["i"] is given["i"]
    assert given["t"].dtype is BF16


class Applies(nn.Module):
    """Does something to its arguments."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, *args: Any) -> Any:
        return self.change(*args)


def test_what_a_module_puts_into_lists_and_dicts_reaches_the_caller() -> None:
    def write(x: torch.Tensor, aux: Any, names: Any) -> torch.Tensor:
        aux[0].append(x.sum())
        aux[0][0] = aux[0][1]
        names["new"] = x
        del names["old"]
        return x

    model = nn.ModuleList([Applies(write), Applies(write)])
    given = x().bfloat16()
    for rule in ("inherit", "float32"):
        first, second = given * 2, given * 3
        aux, names = [[first, second]], {"old": first, "kept": second}
        inner = aux[0]
        with region(model, modules={"1": rule}):
            model[1](given, aux, names)
        assert aux[0] is inner
        assert len(inner) == 3
        assert inner[0] is inner[1] is second
        assert list(names) == ["kept", "new"]
        assert (names["kept"] is second, names["new"] is given) == (True, True)


def test_layers_may_share_keys_and_values_in_a_dict() -> None:
    """As those of Gemma 4 do: huggingface/transformers#45663."""

    class Layer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.linear = number, nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, shared: dict[int, torch.Tensor]) -> torch.Tensor:
            shared[self.number] = self.linear(x)
            return x + shared[0]

    model = nn.ModuleList([Layer(number) for number in range(3)])
    shared: dict[int, torch.Tensor] = {}
    with region(model, modules={"1": "float32", "2": "float32"}):
        y = x()
        for layer in model:
            y = layer(y, shared)
    assert [tensor.dtype for tensor in shared.values()] == [BF16, FP32, FP32]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_is_given_twice_is_cast_once(mode: Any) -> None:
    tensor, items = torch.zeros(4, dtype=BF16), [torch.zeros(1, dtype=BF16)]
    model = nn.Sequential(Applies(lambda a, b, c, d: (a is b, c is d, a.dtype, c[0].dtype)))
    with mode(), region(model, modules={"0": "float32"}):
        assert model[0](tensor, tensor, items, items) == (True, True, FP32, FP32)


class NeedsArguments(OrderedDict[str, Any]):
    def __init__(self, must: int, other: int) -> None:
        super().__init__()
        self.must, self.other = must, other


class Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Pair(tuple[Any, Any]):
    def __new__(cls, one: Any, other: Any) -> Pair:
        return tuple.__new__(cls, (one, other))


def test_containers_of_all_kinds_pass() -> None:
    special, counts = NeedsArguments(1, 2), defaultdict(list, a=[x().bfloat16()])
    special["x"] = x().bfloat16()
    seen: list[Any] = []
    given = Attributes(y=x().bfloat16())
    model = nn.Sequential(Applies(lambda *args: seen.extend([*args, args[1]["b"]])))
    with region(model, modules={"0": "float32"}):
        model[0](special, counts, Pair(x().bfloat16(), 3), torch.Size([2]), x().bfloat16().max(0), given)
    assert seen[5].y.dtype is seen[5]["y"].dtype is FP32
    assert (type(seen[0]), seen[0].must, seen[0]["x"].dtype) == (NeedsArguments, 1, FP32)
    assert (type(seen[1]), seen[1]["a"][0].dtype, seen[6]) == (defaultdict, FP32, [])
    assert (type(seen[2]), type(seen[3]), seen[4].values.dtype) == (Pair, torch.Size, FP32)


def test_excluded_modules_have_no_rules_of_the_policy_and_fp32_ones_no_op_rules() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.dtype, bool]:
            out = torch.zeros(2, 4)
            try:
                out.index_copy_(0, torch.tensor([0, 1]), x.half())
            except RuntimeError:
                return x.softmax(-1).dtype, False
            return x.softmax(-1).dtype, True

    model = nn.ModuleDict({"fp32": Writes(), "excluded": Writes(), "low": Writes(), "other": Writes()})
    rules = {"fp32": "float32", "excluded": "exclude", "low": "float16"}
    with region(model, modules=rules, ops={"softmax": "bfloat16"}, in_place="cast"):
        got = {name: module(x()) for name, module in model.items()}
    assert got == {"fp32": (FP32, True), "excluded": (FP32, False), "low": (BF16, True), "other": (BF16, True)}


@dataclasses.dataclass
class Named:
    y: Any
    number: int = 3


def test_outputs_are_cast_also_of_decorated_functions() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return {"y": self.linear(x), "n": [1, x.double()], "c": Named((self.linear(x),))}

    model = Pair()
    bound = Policy(compute="bfloat16", output="float32").bind(model)
    with castwise.autocast("cpu", policy=bound):
        out = model(x())
        assert out["c"].y[0].dtype is FP32
        assert (out["y"].dtype, out["n"][1].dtype, model.linear(x()).dtype) == (FP32, torch.float64, BF16)
    out["y"].sum().backward()
    assert model.linear.weight.grad is not None

    @castwise.autocast("cpu", policy=bound)
    def double(x: torch.Tensor) -> torch.Tensor:
        return model.linear(x) * 2  # type: ignore[no-any-return]

    assert double(x()).dtype is FP32


def test_fp32_as_the_compute_dtype_leaves_autocast_to_rules() -> None:
    model = Model()
    with region(model, compute="float32", modules={"b": "bfloat16"}):
        model(x())
    assert model.states() == ["off", "bfloat16", "off"]


# -- regions within, and regions without a policy ---------------------------------------------------------------------


@pytest.mark.parametrize("library", [torch, castwise])
@pytest.mark.parametrize("options", [{"enabled": False}, {"dtype": FP16}])
def test_a_region_within_of_another_state_suspends_the_policy(library: Any, options: dict[str, Any]) -> None:
    model, outer = Model(), Model()
    copies = nn.ModuleList([model, outer])
    bound = Policy(compute="bfloat16", modules={"*.b": "float32"}, ops={"softmax": "bfloat16"}).bind(copies)
    with castwise.autocast("cpu", policy=bound):
        with library.autocast("cpu", **options):
            model(x())
            assert x().softmax(-1).dtype is FP32
        assert x().softmax(-1).dtype is BF16
        outer(x())
    assert model.states() == ["off" if "enabled" in options else "float16"] * 3
    assert outer.states() == ["bfloat16", "off", "bfloat16"]


def test_the_policy_of_a_region_within_takes_over() -> None:
    model = Model()
    with region(model, modules={"a": "float16"}, ops={"softmax": "bfloat16"}):
        with region(model, modules={"b": "float16"}):
            model(x())
            assert x().softmax(-1).dtype is FP32
        model(x())
        assert x().softmax(-1).dtype is BF16
    assert [[seen[0] for seen in spy.seen] for spy in (model.a, model.b, model.c)] == [
        ["bfloat16", "float16"],
        ["float16", "bfloat16"],
        ["bfloat16", "bfloat16"],
    ]


def test_a_region_may_be_entered_again_within_itself() -> None:
    model = Model()
    one = region(model, modules={"b": "float16"}, ops={"softmax": "bfloat16"})
    with one, one:
        model(x())
    with one:
        model(x())
    assert [seen[0] for seen in model.b.seen] == ["float16"] * 2


def test_threads_have_each_their_own_policy() -> None:
    model = Model().requires_grad_(False)
    policies = [{"modules": {name: "float16"}} for name in "abc"] * 2 + [{}, {}]
    expected = [Policy(compute="bfloat16", **fields).bind(model) for fields in policies]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            with castwise.autocast("cpu", policy=expected[number]):
                dtypes = [model.a(x()).dtype, model.b(x()).dtype, model.c(x()).dtype]
            want = [FP16 if policies[number].get("modules", {}).get(name) else BF16 for name in "abc"]
            if dtypes != want:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(policies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_module_that_calls_itself_where_the_policy_is_suspended() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            if depth:
                with torch.autocast("cpu", enabled=False):
                    self(x.float(), depth - 1)
            return self.linear(x)  # type: ignore[no-any-return]

    model = nn.ModuleDict({"tree": Tree()})
    model["copy"] = copy.deepcopy(model["tree"])
    with torch.no_grad(), region(model, modules={"tree": "float16"}):
        assert model["tree"](x(), 2).dtype is FP16
        assert state() == "bfloat16"


def test_a_region_without_a_policy_suspends_one_that_leaves_autocast_off() -> None:
    model = Model()
    with region(model, compute="float32", modules={"b": "bfloat16"}):
        with castwise.autocast("cpu", enabled=False):
            model(x())
        model(x())
    assert [seen[0] for seen in model.b.seen] == ["off", "bfloat16"]


@pytest.mark.parametrize(
    ("policy", "options", "error", "text"),
    [
        (Policy(compute="bfloat16"), {}, TypeError, r"got Policy: write policy=policy\.bind\(model\)"),
        ("bf16", {}, TypeError, "policy must be a bound castwise.Policy or None, got str"),
        (
            Policy(compute="bfloat16").bind(nn.Linear(1, 1)),
            {"dtype": BF16},
            ValueError,
            "leave out dtype=torch.bfloat16",
        ),
    ],
)
def test_regions_take_bound_policies_and_no_dtype(policy: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        castwise.autocast("cpu", policy=policy, **options)


# -- what torch does, torch does not do differently -------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 10)
        self.library: Any = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(tokens))
        h = h + self.attention(h, h, h)[0]
        for _ in range(2):  # the same weight twice
            h = self.part("first", self.first, h)
        h = self.part("second", self.second, h)
        return self.part("head", self.head, h)

    def part(self, name: str, module: nn.Module, h: torch.Tensor) -> torch.Tensor:
        if self.library is None or name not in self.library:
            return module(h)  # type: ignore[no-any-return]
        with torch.autocast("cpu", **self.library[name]):
            return module(h.float() if "enabled" in self.library[name] else h)  # type: ignore[no-any-return]


LOCKSTEP = {
    "bf16": ({}, {}),
    "a module in fp32": ({"head": "float32"}, {"head": {"enabled": False}}),
    "a module excluded": ({"second": "exclude"}, {"second": {"enabled": False}}),
    "a module in fp16": ({"second": "float16"}, {"second": {"dtype": FP16}}),
    "what holds anyway": ({"first": "bfloat16", "head": "inherit"}, {}),
    "all": ({"second": "float16", "head": "float32"}, {"second": {"dtype": FP16}, "head": {"enabled": False}}),
}
NATIVE_OPS = {"linear": "bfloat16", "matmul": "bfloat16", "cross_entropy": "float32", "mse_loss": "float32"}


@pytest.mark.parametrize("ops", [{}, NATIVE_OPS], ids=["", "ops as they are"])
@pytest.mark.parametrize(("modules", "regions"), LOCKSTEP.values(), ids=LOCKSTEP)
def test_a_policy_that_says_what_torch_does_is_torch_to_the_bit(modules: Any, regions: Any, ops: Any) -> None:
    if ops and "float16" in modules.values():
        ops = {name: dtype for name, dtype in ops.items() if dtype == "float32"}
    ours, theirs = Net(), Net()
    theirs.library = regions
    tokens = torch.randint(10, (3, 6), generator=torch.Generator().manual_seed(2))
    bound = Policy(compute="bfloat16", modules=modules, ops=ops).bind(ours)
    for _ in range(3):
        results = []
        for net, make in (
            (ours, lambda: castwise.autocast("cpu", policy=bound)),
            (theirs, lambda: torch.autocast("cpu", dtype=BF16)),
        ):
            with make():
                logits = net(tokens)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            results.append([logits, loss, *(param.grad for param in net.parameters())])
            with torch.no_grad():
                for param in net.parameters():
                    param -= 0.1 * param.grad
        same(*results)


def test_two_dtypes_of_one_weight() -> None:
    """Torch 2.13 has one cast for both: RuntimeError."""
    shared = nn.Linear(4, 4)

    def run(inner: Callable[[], Any], outer: Callable[[], Any]) -> torch.Tensor:
        with outer():
            first = shared(x())
            with inner():
                second = shared(first)
            return shared(second)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="must have the same dtype"):
        run(lambda: torch.autocast("cpu", dtype=FP16), lambda: torch.autocast("cpu", dtype=BF16))

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return shared(x)  # type: ignore[no-any-return]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return shared(self.inner(shared(x)))  # type: ignore[no-any-return]

    model = Outer()
    for _ in range(2):
        with region(model, modules={"inner": "float16"}):
            out = model(x())
        out.sum().backward()
        assert out.dtype is BF16


# -- backwards --------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Three blocks, the one in the middle with a run of the user's choice."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after, self.run = nn.Linear(4, 4), nn.Linear(4, 4), run
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Softmax(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.run(self.block, self.before(x)))  # type: ignore[no-any-return]


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 3).softmax(-1)


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "a function": lambda block, x: checkpoint(lambda x: block(x) * 2, x, use_reentrant=False),
    "nested": lambda block, x: checkpoint(
        lambda x: block[3](checkpoint(block[:3], x, use_reentrant=False)), x, use_reentrant=False
    ),
}
PLAIN: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "not reentrant": lambda block, x: block(x),
    "reentrant": lambda block, x: block(x),
    "a function": lambda block, x: block(x) * 2,
    "nested": lambda block, x: block[3](block[:3](x)),
}
POLICIES: dict[str, dict[str, Any]] = {
    "fp32 inside": {"modules": {"block.1": "float32", "block.3": "float16"}},
    "fp32 around": {"modules": {"block": "float32", "block.0": "bfloat16", "block.3": "float16"}},
    "ops": {"ops": {"softmax": "bfloat16", "layer_norm": "bfloat16"}},
    "ops and modules": {"modules": {"block.3": "float32"}, "ops": {"softmax": "bfloat16", "linear": "float16"}},
    "fp32 computing": {"compute": "float32", "modules": {"block.3": "bfloat16"}},
    "fp32 model": {"modules": {"": "float32", "block.0": "bfloat16"}},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
def test_a_forward_that_is_run_again_follows_the_policy(run: str, fields: dict[str, Any]) -> None:
    gradients = []
    for how in (RUNS[run], PLAIN[run]):
        model = Checkpointed(how)
        for inputs in (x(), x(3, 4)):  # the second forward runs before the first backward
            with region(model, **fields):
                out = model(inputs.requires_grad_())
            with castwise.autocast("cpu", dtype=BF16):
                model(inputs)
            out.float().square().sum().backward()
        gradients.append([param.grad for param in model.parameters()])
    same(*gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_is_run_again_follows_its_own_policy_of_two(reentrant: bool) -> None:
    gradients = []
    for again in (True, False):
        model = Checkpointed(RUNS["reentrant" if reentrant else "not reentrant"] if again else PLAIN["reentrant"])
        bound = [
            Policy(compute="bfloat16", modules={"block.1": "float32", "block.3": rule}).bind(model)
            for rule in ("float16", "float32")
        ]
        outs = []
        for one in bound:
            with castwise.autocast("cpu", policy=one):
                outs.append(model(x().requires_grad_()))
        for out in outs:
            out.float().square().sum().backward()
        gradients.append([param.grad for param in model.parameters()])
    same(*gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_is_run_again_where_the_policy_was_suspended(reentrant: bool) -> None:
    class Suspends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.again = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(self.first(x))
            with torch.autocast("cpu", enabled=False):
                return checkpoint(self.b, y, use_reentrant=reentrant) if self.again else self.b(y)  # type: ignore

    gradients = []
    for again in (True, False):
        model = Suspends()
        model.again = again
        with region(model, modules={"a": "float32", "b": "bfloat16"}):
            out = model(x().requires_grad_())
        out.sum().backward()
        gradients.append([param.grad for param in model.parameters()])
    same(*gradients)


def test_a_forward_without_the_policy_that_is_run_again_has_none() -> None:
    gradients = []
    for bind in (True, False):
        model = Checkpointed(RUNS["not reentrant"])
        bound = Policy(compute="bfloat16", modules={"block": "float32"}).bind(model)
        with castwise.autocast("cpu", dtype=BF16):
            plain = model(x())
        if bind:
            with castwise.autocast("cpu", policy=bound):
                model(x())
        plain.float().sum().backward()
        gradients.append([param.grad for param in model.parameters()])
    same(*gradients)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_a_backward_may_be_called_inside_of_the_region(inside: bool, reentrant: bool) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Softmax())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.again else self.block(x)  # type: ignore

    gradients = []
    for again in (True, False):
        inner = Inner()
        inner.again = again
        model = nn.Sequential(nn.Linear(4, 4), inner)
        with torch.no_grad():
            model[0].weight.fill_(0.3)
            model[0].bias.fill_(0.1)
        rules = {"modules": {"1": "float16", "1.block.1": "float32"}, "ops": {"softmax": "float32"}}
        with region(model, **rules):
            loss = model(x().requires_grad_()).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append([param.grad for param in model.parameters()])
    same(*gradients)


@pytest.mark.parametrize("run", ["plain", "context_fn"])
def test_a_function_that_is_run_again_needs_contexts_for_its_own_ops(run: str) -> None:
    def core(x: torch.Tensor) -> torch.Tensor:
        return (x * 5).bfloat16().softmax(-1) ** 2

    bound = Policy(compute="bfloat16", ops={"softmax": "float32"}).bind(model := nn.Linear(4, 4))
    options = {"context_fn": bound.checkpoint_contexts} if run == "context_fn" else {}
    with castwise.autocast("cpu", policy=bound):
        out = checkpoint(core, model(x()), use_reentrant=False, **options)
        model.zero_grad()
        core(model(x())).sum().backward()
    expected = [param.grad for param in model.parameters()]
    model.zero_grad()
    if run == "plain":
        with pytest.raises(torch.utils.checkpoint.CheckpointError):
            out.sum().backward()
        return
    out.sum().backward()
    for param, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is not None
        assert torch.equal(param.grad, gradient)


def test_a_region_of_another_thread_is_not_taken_for_that_of_a_forward() -> None:
    def gradients(other: bool, again: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        bound = Policy(compute="bfloat16", modules={"2": "float32"}).bind(model)
        results: list[Any] = []

        def with_policy() -> None:
            for _ in range(5):
                with castwise.autocast("cpu", policy=bound):
                    model(x())

        def without() -> None:
            with torch.autocast("cpu", dtype=BF16):
                given = x().requires_grad_()
                y = checkpoint(model, given, use_reentrant=True) if again else model(given)
            y.float().square().sum().backward()
            results.extend(param.grad for param in model.parameters())

        for work in [with_policy, without] if other else [without]:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return results

    for mine, other in zip(gradients(True, True), gradients(False, True), strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)


def test_an_interrupted_backward_leaves_no_policy_behind() -> None:
    model = Checkpointed(RUNS["not reentrant"])
    bound = Policy(compute="bfloat16", modules={"block": "float32"}).bind(model)
    with castwise.autocast("cpu", policy=bound):
        out = model(x())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.block[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        out.float().sum().backward()
    hook.remove()
    with torch.autocast("cpu", dtype=BF16):
        assert model.block[0](x()).dtype is BF16
        assert model(x()).dtype is BF16


@pytest.mark.parametrize("library", [torch, castwise])
def test_the_backward_of_a_custom_function_runs_in_its_module_s_state(library: Any) -> None:
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        @library.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        @library.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(state())
            return grad

    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Identity.apply(x)  # type: ignore[no-untyped-call,no-any-return]

    model = nn.Sequential(Custom(), Custom(), Custom(), Custom())
    with region(model, modules={"0": "float32", "1": "float16", "2": "exclude"}):
        out = model(x().requires_grad_())
    out.sum().backward()
    assert seen == ["bfloat16", "off", "float16", "off"]


# -- with the rest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
def test_a_weight_cache_changes_nothing(fields: dict[str, Any]) -> None:
    results = []
    for cached in (True, False):
        model = Checkpointed(RUNS["not reentrant"])
        cache = WeightCache(model) if cached else None
        bound = Policy(**{"compute": "bfloat16", **fields}).bind(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with castwise.autocast("cpu", policy=bound, weight_cache=cache):
                out = model(x())
            out.float().square().sum().backward()
            optimizer.step()
        with torch.no_grad(), castwise.autocast("cpu", policy=bound, weight_cache=cache):
            results.append([model(x()), *model.parameters()])
        if cache is not None and "fp32" not in str(fields.get("compute")):
            # A rule for the op of a layer takes the weight as it is, and a layer with a rule has its own forward.
            only_layers_with_a_rule = fields.get("compute") == "float32" or "" in fields.get("modules", {})
            is_served = "linear" not in fields.get("ops", {}) and not only_layers_with_a_rule
            assert (cache.report().refreshes > 0) is is_served
    same(*results)


def test_binding_again_gives_the_same_until_modules_change() -> None:
    model = Model()
    policy = Policy(compute="bfloat16", modules={"*.linear": "float16"})
    bound = policy.bind(model)
    assert Policy(compute="bfloat16", modules={"*.linear": "float16"}).bind(model) is bound
    model.b.linear = nn.Linear(4, 4)
    again = policy.bind(model)
    assert again is not bound
    assert [len(vars(spy.linear)["forward"].rules) for spy in (model.a, model.b, model.c)] == [1, 1, 1]
    with castwise.autocast("cpu", policy=again):
        assert model.b.linear(x()).dtype is FP16


def test_a_module_in_the_place_of_another_is_noticed_whatever_its_id() -> None:
    policy = Policy(compute="bfloat16", modules={"1": "float32"})
    for _ in range(20):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = policy.bind(model)
        del model[1]
        model.append(nn.Linear(4, 4))
        with castwise.autocast("cpu", policy=policy.bind(model)):
            assert model(x()).dtype is FP32
        with pytest.raises(RuntimeError, match="the policy was unbound, or bound again after the model changed"):
            castwise.autocast("cpu", policy=before)


def test_a_region_of_a_policy_that_is_not_bound_any_more_is_not_entered() -> None:
    one = region(model := Model(), modules={"b": "float16"})
    assert one._policy is not None
    one._policy.unbind()
    with pytest.raises(RuntimeError, match="bind it again"), one:
        pass
    assert state() == "off"
    assert model(x()).dtype is FP32


def test_lists_of_modules_hand_their_rule_on() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Spy(), Spy()]), "head": Spy()})
    with region(model, modules={"blocks": "float32", "blocks.1.linear": "float16"}):
        for module in (*model["blocks"], model["head"]):
            module(x())
    assert [module.seen[0][0] for module in (*model["blocks"], model["head"])] == ["off", "off", "bfloat16"]
    assert model["blocks"][1].seen[0][3] is FP32


def test_rules_that_could_not_hold_are_refused() -> None:
    attention = nn.MultiheadAttention(4, 1)
    with pytest.raises(ValueError, match=r"'out_proj', whose forward torch\.nn\.MultiheadAttention never calls"):
        Policy(compute="bfloat16", modules={"out_proj": "float32"}).bind(attention)
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), x()))
    with pytest.raises(ValueError, match="'1' is a ScriptModule, whose forward is fixed"):
        Policy(compute="bfloat16", modules={"1": "float32"}).bind(scripted)
    with pytest.raises(ValueError, match="is a ScriptModule"):
        Policy(compute="bfloat16", modules={"*": "float32"}).bind(scripted)
    assert "forward" not in vars(scripted[0])
    Policy(compute="bfloat16", modules={"0": "float32"}, ops={"softmax": "float32"}).bind(scripted)
    parallel = nn.DataParallel(nn.Linear(4, 4))
    parallel.device_ids = [0, 1]
    with pytest.raises(ValueError, match="DataParallel runs copies of the model in its own threads"):
        Policy(compute="bfloat16").bind(parallel)


def test_a_bound_model_is_freed() -> None:
    model = Model()
    bound = Policy(compute="bfloat16", modules={"b": "float16"}, output="float32").bind(model)
    gone = weakref.ref(model)
    with castwise.autocast("cpu", policy=bound):
        model(x())
    del model
    assert gone() is None, "by reference counts alone: memory of a device is waited for"


def test_a_deep_copy_follows_the_policy_too() -> None:
    model = Model()
    bound = Policy(compute="bfloat16", modules={"b": "float16"}, output="float32").bind(model)
    twin = copy.deepcopy(model)
    with castwise.autocast("cpu", policy=bound):
        out = twin(x())
    assert (twin.states(), model.states(), out.dtype) == (["bfloat16", "float16", "bfloat16"], [], FP32)


def test_a_pickled_model_is_not_bound() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    bound = Policy(compute="bfloat16", modules={"1": "float16"}, output="float32").bind(model)
    stored = pickle.dumps(model)
    assert b"castwise" not in stored, "the file is read where castwise is not installed"
    loaded = pickle.loads(stored)
    with castwise.autocast("cpu", policy=bound):
        assert loaded(x()).dtype is BF16
    with castwise.autocast("cpu", policy=bound.policy.bind(loaded)):
        assert (loaded(x()).dtype, loaded[1](x()).dtype) == (FP32, FP16)
    with pytest.raises(TypeError, match="a bound policy cannot be pickled or copied"):
        pickle.dumps(bound)


def test_unbinding_gives_back_every_forward() -> None:
    model = Model()
    policy = Policy(compute="bfloat16", modules={"b": "float16"}, ops={"softmax": "float32"}, output="float32")
    bound = policy.bind(model)
    bound.unbind()
    assert not any("forward" in vars(module) for module in model.modules())
    assert policy.bind(model) is not bound


def test_a_policy_that_changes_no_module_attaches_nothing() -> None:
    for fields in ({}, {"modules": {nn.Linear: "bfloat16", "b": "inherit"}}, {"ops": {"linear": "bfloat16"}}):
        model = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.LayerNorm(4)})
        model["c"] = nn.LayerNorm(4) if "ops" in fields else nn.Linear(4, 4)
        Policy(compute="bfloat16", **fields).bind(model)  # type: ignore[arg-type]  # of the dict above
        for module in model.modules():
            assert "forward" not in vars(module)
            assert not {**module._forward_hooks, **module._forward_pre_hooks}


def test_a_rule_of_the_region_s_own_dtype_holds_within_a_module_of_another() -> None:
    inner = Spy()
    model = nn.ModuleDict({"inner": inner, "outer": Applies(lambda x: inner(x))})
    with region(model, modules={"outer": "float32", "inner": "bfloat16"}):
        model["outer"](x())
    assert inner.seen[0][0] == "bfloat16"


def test_a_bound_model_looks_as_before() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
            return x * scale

    model = Net()
    signature = inspect.signature(model.forward)
    Policy(compute="bfloat16", modules={"": "float32"}).bind(model)
    assert inspect.signature(model.forward) == signature, "transformers' Trainer drops columns by it"
    assert list(model.state_dict()) == []
    assert repr(model) == "Net()"


def test_a_forward_that_another_library_has_put_on_a_module_is_kept() -> None:
    model = nn.Linear(4, 4)
    before = model.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return before(x) * 2

    model.forward = doubled  # type: ignore[method-assign]  # as accelerate does
    expected = model(x())
    first = Policy(compute="bfloat16", modules={"": "float32"}).bind(model)
    second = Policy(compute="bfloat16", modules={"": "float16"}).bind(model)
    with castwise.autocast("cpu", policy=first):
        assert torch.equal(model(x()), expected)
    with castwise.autocast("cpu", policy=second):
        assert model(x()).dtype is FP16
    first.unbind()
    with castwise.autocast("cpu", policy=second):
        assert model(x()).dtype is FP16
    second.unbind()
    assert model.forward is doubled


def test_a_bound_model_is_traced_and_exported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    bound = Policy(compute="bfloat16", modules={"1": "float32"}).bind(model)
    expected = model(x())
    assert torch.equal(torch.export.export(model, (x(),)).module()(x()), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.jit.trace(model, x())(x()), expected)
        bound.unbind()
        assert torch.equal(torch.jit.script(model)(x()), expected)


def test_vmap_and_grad_transforms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    bound = Policy(compute="bfloat16", modules={"1": "float32"}, ops={"linear": "bfloat16"}).bind(model)
    params = dict(model.named_parameters())

    def loss(params: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        with castwise.autocast("cpu", policy=bound):
            return torch.func.functional_call(model, params, row).float().square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x())
    for name, param in params.items():
        rows = []
        for row in x():
            model.zero_grad()
            loss(params, row).backward()
            assert param.grad is not None
            rows.append(param.grad)
        torch.testing.assert_close(got[name], torch.stack(rows), rtol=2e-2, atol=2e-2)


def test_data_types_other_than_floating_point_pass() -> None:
    model = nn.Embedding(4, 4)
    with region(model, modules={"": "float32"}):
        assert model(torch.tensor([1, 2])).dtype is FP32


# -- forwards that are run again, and what is left behind --------------------------------------------------------------


class Calls(nn.Module):
    """A layer that is checkpointed, perhaps in its own region; `seen` has the dtypes that it returns."""

    def __init__(self, layer: nn.Module, region: Any = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(layer, nn.Softmax(-1))  # a forward is run again until all that was saved is there
        self.region, self.seen = region, []
        layer.register_forward_hook(lambda module, args, result: self.seen.append(result.dtype))

    def forward(self, x: torch.Tensor) -> Any:
        with nullcontext() if self.region is None else self.region:
            return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(("inside", "ops"), [("0.inner", {}), ("0.inner.0", {"softmax": "float16"})])
def test_a_forward_that_is_run_again_where_another_region_has_the_dtype_of_the_policy_s(
    inside: str, ops: dict[str, str]
) -> None:
    model = nn.Sequential(Calls(nn.Linear(4, 4), torch.autocast("cpu", dtype=BF16)))
    bound = Policy(compute="bfloat16", modules={"0": "float16", inside: "float32"}, ops=ops).bind(model)
    with castwise.autocast("cpu", policy=bound):
        out = model(torch.ones(2, 4, requires_grad=True))
    out.float().sum().backward()
    assert model[0].seen == [BF16, BF16], "the policy is suspended, both times"


def test_op_rules_hold_no_longer_than_a_forward_that_is_run_again() -> None:
    model = nn.Sequential(Calls(nn.Linear(4, 4)))
    bound = Policy(compute="bfloat16", ops={"linear": "float16"}).bind(model)
    with castwise.autocast("cpu", policy=bound):
        out = model(torch.ones(2, 4, requires_grad=True))
    assert torch._C._len_torch_function_stack() == 0
    out.float().sum().backward()
    assert model[0].seen == [FP16, FP16]
    assert torch._C._len_torch_function_stack() == 0


def test_op_rules_hold_no_longer_than_a_module_that_is_run_again() -> None:
    modes = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        before = torch._C._len_torch_function_stack()
        x = model(x)
        modes.append((before, torch._C._len_torch_function_stack()))
        return x.square().exp()  # their gradients need what is computed here

    model = nn.Sequential(nn.Linear(4, 4))
    bound = Policy(compute="bfloat16", ops={"linear": "float16"}).bind(model)
    with castwise.autocast("cpu", policy=bound):
        out = checkpoint(twice, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
    out.float().sum().backward()
    assert modes == [(1, 1), (0, 0)]


def test_a_forward_of_another_thread_since_then_hides_none_that_is_run_again() -> None:
    model = nn.Sequential(Calls(nn.Linear(4, 4)))
    bound = Policy(compute="bfloat16", modules={"0.inner.0": "float16"}).bind(model)

    def forward() -> torch.Tensor:
        with castwise.autocast("cpu", policy=bound):
            return model(torch.ones(2, 4, requires_grad=True))  # type: ignore[no-any-return]

    out = forward()
    other = threading.Thread(target=forward)
    other.start()
    other.join()
    out.float().sum().backward()
    assert model[0].seen == [FP16, FP16, FP16]


def test_a_module_that_begins_its_region_is_distinguished_from_the_region() -> None:
    model = nn.Sequential(Calls(nn.Softmax(-1)))
    bound = Policy(compute="float32", modules={"0": "float32"}, ops={"softmax": "bfloat16"}).bind(model)
    with castwise.autocast("cpu", policy=bound):
        out = model(torch.rand(2, 4, requires_grad=True))
    out.sum().backward()
    assert model[0].seen == [FP32, FP32]
    assert not torch.equal(out, out.bfloat16().float()), "no op rule has held"


def test_contexts_of_a_policy_that_is_not_in_force_do_nothing() -> None:
    here, there = Policy("bfloat16").bind(nn.Linear(1, 1)), Policy("bfloat16").bind(nn.Linear(1, 1))
    with castwise.autocast("cpu", policy=here):
        assert there.checkpoint_contexts()[1]._state is None  # type: ignore[attr-defined]  # ours
        assert here.checkpoint_contexts()[1]._state is not None  # type: ignore[attr-defined]  # ours


# -- words, and what is looked at --------------------------------------------------------------------------------------


def test_what_a_bound_policy_says_of_itself() -> None:
    model = nn.Linear(1, 1)
    bound = Policy("bfloat16").bind(model)
    assert repr(bound) == f"BoundPolicy({Policy('bfloat16')!r})"
    text = "a bound policy cannot be pickled or copied: pickle or copy the policy and the model, and bind again"
    with pytest.raises(TypeError, match=f"^{text}$"):
        copy.copy(bound)
    bound.unbind()
    text = "the policy was unbound, or bound again after the model changed: bind it again"
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        bound.check_is_bound()
    with pytest.raises(TypeError, match=r"^model must be a torch\.nn\.Module, got int$"):
        bound_policy.bind(Policy("bfloat16"), 3)  # type: ignore[arg-type]  # the point


def test_a_second_name_that_is_gone_is_noticed() -> None:
    model = nn.Module()
    model.first = model.second = nn.Linear(1, 1)
    policy = Policy("bfloat16", modules={"second": "float32"})
    policy.bind(model)
    del model.second
    with pytest.raises(ValueError, match="matches no module"):
        policy.bind(model)


def test_weights_that_fsdp_gathers_in_another_dtype_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1), nn.Sequential(nn.LayerNorm(1)))
    )
    gathered: dict[nn.Module, Any] = {}
    monkeypatch.setattr(bound_policy, "fsdp_mixed_precision", gathered.get)

    def bind_with(dtypes: dict[str, Any], rules: dict[str, str]) -> None:
        gathered.clear()
        for name, dtype in dtypes.items():
            gathered[model.get_submodule(name)] = MixedPrecisionPolicy(param_dtype=dtype)
        Policy("bfloat16", modules=rules).bind(model).unbind()

    bind_with({"": None, "1": BF16}, {})
    bind_with({"": BF16, "1": None}, {"1": "float32"})
    bind_with({"1": BF16, "1.2": None}, {"1.2": "float32"})
    bind_with({"1": BF16}, {"1": "float32", "1.*": "bfloat16"})  # it has no weights of its own
    text = (
        "the policy runs '1.2.0' in float32, but FSDP gathers the weights of '1' in torch.bfloat16: "
        "shard with the policies that Policy.fsdp(...) yields, or give the module a rule"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        bind_with({"1": BF16}, {"1.2": "float32"})
