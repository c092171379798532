"""`custom_fwd` and `custom_bwd`, for both kinds of `torch.autograd.Function`, and `_cast`."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import castwise
from castwise.amp.autocast_mode import _cast

CPU, BF16, FP16, FP32 = "cpu", torch.bfloat16, torch.float16, torch.float32


class Pair(NamedTuple):
    first: Any
    second: Any


def product(library: Any, cast_inputs: torch.dtype | None) -> type[torch.autograd.Function]:
    """A matrix product whose forward is given the context; matmul is an op that autocast lowers."""

    class Product(torch.autograd.Function):
        @staticmethod
        @library.custom_fwd(device_type=CPU, cast_inputs=cast_inputs)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @library.custom_bwd(device_type=CPU)
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            if not torch.compiler.is_compiling():
                seen.append((torch.is_autocast_enabled(CPU), torch.get_autocast_dtype(CPU), a.dtype))
            return grad @ b.t().to(grad.dtype), a.t().to(grad.dtype) @ grad

    return Product


def separate_product(library: Any, cast_inputs: torch.dtype | None) -> type[torch.autograd.Function]:
    """The same with a separate `setup_context`, as `torch.func` needs it."""

    class Product(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        @library.custom_fwd(device_type=CPU, cast_inputs=cast_inputs)
        def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        backward = product(library, cast_inputs).backward

    return Product


seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    seen.clear()
    yield
    assert not torch.is_autocast_enabled(CPU)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 3, generator=draw), torch.randn(3, 3, generator=draw)
    return a.requires_grad_(), b.requires_grad_()


STATES = {
    "outside": {"enabled": False, "dtype": BF16},
    "in bf16": {"enabled": True, "dtype": BF16},
    "in fp16": {"enabled": True, "dtype": FP16},
}


def run(function: type[torch.autograd.Function], state: str, region: Any = castwise.autocast) -> list[Any]:
    """Forward in a state, backward out of it: output, gradients, and what the backward saw."""
    a, b = operands()
    with region(CPU, **STATES[state]):
        output = function.apply(a, b)
    grads = torch.autograd.grad(output.float().sin().sum(), (a, b))
    assert vars(a) == vars(b) == {}, "something was written on the user's tensors"
    return [output.dtype, output.tolist(), [(grad.dtype, grad.tolist()) for grad in grads], seen.pop()]


@pytest.mark.parametrize("cast_inputs", [None, FP32, FP16])
@pytest.mark.parametrize("state", STATES)
def test_a_forward_with_context_does_what_torchs_does(state: str, cast_inputs: torch.dtype | None) -> None:
    expected = run(product(torch.amp, cast_inputs), state, torch.autocast)
    assert run(product(castwise, cast_inputs), state) == expected


@pytest.mark.parametrize("cast_inputs", [None, FP32, FP16])
@pytest.mark.parametrize("state", STATES)
def test_a_separate_context_does_the_same(state: str, cast_inputs: torch.dtype | None) -> None:
    expected = run(product(torch.amp, cast_inputs), state, torch.autocast)
    function = separate_product(castwise, cast_inputs)
    assert run(function, state) == expected
    setup_context = function.setup_context
    assert run(function, state) == expected
    assert function.setup_context is setup_context


def test_torch_writes_on_the_users_tensor_and_fails_in_the_backward() -> None:
    a, b = operands()
    output = separate_product(torch.amp, None).apply(a, b)
    assert set(vars(a)) == {"_dtype", "_fwd_used_autocast"}
    with pytest.raises(AttributeError, match="_fwd_used_autocast"):
        output.sum().backward()


@pytest.mark.parametrize("cast_inputs", [None, FP32, FP16])
def test_functions_under_vmap_and_grad(cast_inputs: torch.dtype | None) -> None:
    function = separate_product(castwise, cast_inputs)
    twin = separate_product(castwise, cast_inputs)
    batch = torch.randn(5, 3, 3)
    b = operands()[1].detach()

    def loss(apply: Callable[..., torch.Tensor], a: torch.Tensor) -> torch.Tensor:
        return apply(a, b).float().sin().sum()

    with castwise.autocast(CPU, dtype=BF16):
        products = torch.func.vmap(function.apply, in_dims=(0, None))(batch, b)
        grad = torch.func.grad(lambda a: loss(function.apply, a))(batch[0])
        grads = torch.func.vmap(torch.func.grad(lambda a: loss(function.apply, a)))(batch)
        one_by_one = [twin.apply(a, b) for a in batch]
        for index, a in enumerate(batch):
            leaf = a.clone().requires_grad_()
            (expected,) = torch.autograd.grad(loss(twin.apply, leaf), leaf)
            torch.testing.assert_close(grads[index], expected)
            if index == 0:
                assert torch.equal(grad, expected)
    torch.testing.assert_close(products, torch.stack(one_by_one))


def test_double_backward() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        @castwise.custom_fwd(device_type=CPU)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @castwise.custom_bwd(device_type=CPU)
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    x = torch.tensor(3.0, requires_grad=True)
    with castwise.autocast(CPU):
        y = Square.apply(x)
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (6.0, 2.0)


@pytest.mark.parametrize("late", [False, True])
def test_functions_derived_from_a_decorated_one(late: bool) -> None:
    base = separate_product(castwise, None)

    def derive() -> type[torch.autograd.Function]:
        class Derived(base):  # type: ignore[misc,valid-type]
            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.save_for_backward(*inputs)
                ctx.own = True

        return Derived

    early = derive()
    run(base, "in bf16")
    assert run(derive() if late else early, "in bf16") == run(base, "in bf16")


def test_a_setup_context_inherited_from_a_plain_base() -> None:
    class Base(torch.autograd.Function):
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

    class Derived(Base):
        forward = separate_product(castwise, None).forward
        backward = separate_product(castwise, None).backward

    before = vars(Base)["setup_context"]
    assert run(Derived, "in bf16") == run(product(torch.amp, None), "in bf16", torch.autocast)
    assert vars(Base)["setup_context"] is before


@pytest.mark.parametrize("inner", [None, FP32, FP16])
@pytest.mark.parametrize("outer", [None, FP32, FP16])
@pytest.mark.parametrize("first", ["base", "derived"])
def test_a_derived_function_with_a_forward_of_its_own(first: str, outer: Any, inner: Any) -> None:
    base = separate_product(castwise, outer)

    class Derived(base):  # type: ignore[misc,valid-type]
        forward = separate_product(castwise, inner).forward

    expected = {cls: run(product(torch.amp, cast), "in fp16", torch.autocast) for cls, cast in [(base, outer)]}
    expected[Derived] = run(product(torch.amp, inner), "in fp16", torch.autocast)
    for cls in (base, Derived) if first == "base" else (Derived, base):
        assert run(cls, "in fp16") == expected[cls]


@pytest.mark.parametrize("inner", [None, FP32, FP16])
@pytest.mark.parametrize("outer", [None, FP32, FP16])
def test_a_setup_context_that_calls_the_one_it_overrides(outer: Any, inner: Any) -> None:
    base = separate_product(castwise, outer)

    class Derived(base):  # type: ignore[misc,valid-type]
        forward = separate_product(castwise, inner).forward

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            base.setup_context(ctx, inputs, output)

    run(base, "in fp16")
    for _ in range(2):
        assert run(Derived, "in fp16") == run(product(torch.amp, inner), "in fp16", torch.autocast)


def test_a_derived_function_with_a_plain_forward_that_calls_the_decorated_one() -> None:
    base = separate_product(castwise, FP32)

    class Derived(base):  # type: ignore[misc,valid-type]
        @staticmethod
        def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return base.forward(a, b)

    assert run(Derived, "in bf16") == run(product(torch.amp, FP32), "in bf16", torch.autocast)


def test_a_forward_does_not_keep_a_function_alive_that_had_it() -> None:
    forward = separate_product(castwise, None).forward

    def use() -> weakref.ref[Any]:
        function = separate_product(castwise, None)
        function.forward = forward
        run(function, "in bf16")
        return weakref.ref(function)

    function = use()
    gc.collect()
    assert function() is None


@pytest.mark.parametrize("make", [product, separate_product])
def test_torchs_backward_decorator_can_follow_our_forward(make: Any) -> None:
    function = make(castwise, None)
    function.backward = product(torch.amp, None).backward
    assert run(function, "in bf16") == run(product(torch.amp, None), "in bf16", torch.autocast)


def test_our_backward_decorator_can_follow_torchs_forward() -> None:
    function = product(torch.amp, FP16)
    function.backward = product(castwise, None).backward
    assert run(function, "in fp16") == run(product(torch.amp, FP16), "in fp16", torch.autocast)


def test_a_decorator_with_its_function_is_one_without() -> None:
    def forward(ctx: Any, x: torch.Tensor) -> torch.dtype:
        """Doc."""
        return (x @ x).dtype

    for decorated in (
        castwise.custom_fwd(forward, device_type=CPU, cast_inputs=FP16),
        castwise.custom_fwd(device_type=CPU, cast_inputs=FP16)(forward),
    ):
        assert (decorated.__name__, decorated.__doc__, decorated.__wrapped__) == ("forward", "Doc.", forward)
        with castwise.autocast(CPU):
            assert decorated(type("Context", (), {"save_for_backward": None})(), torch.ones(2, 2)) is FP16


def test_torch_fails_under_vmap() -> None:
    batch, b = torch.randn(5, 3, 3), operands()[1].detach()
    with pytest.raises(AttributeError, match="_fwd_used_autocast"):
        torch.func.vmap(torch.func.grad(lambda a: separate_product(torch.amp, None).apply(a, b).sum()))(batch)


@pytest.mark.parametrize("state", STATES)
def test_a_function_with_a_vmap_rule_of_its_own(state: str) -> None:
    class Product(separate_product(castwise, None)):  # type: ignore[misc]
        generate_vmap_rule = False

        @staticmethod
        def vmap(info: Any, in_dims: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
            return Product.apply(a, b), 0

    batch, b = torch.randn(5, 3, 3), operands()[1].detach()
    with castwise.autocast(CPU, **STATES[state]):
        got = torch.func.vmap(Product.apply, in_dims=(0, None))(batch, b)
        assert torch.equal(got, batch @ b)


@pytest.mark.parametrize("make", [product, separate_product])
def test_threads_do_not_see_each_others_state(make: Any) -> None:
    function = make(castwise, None)
    expected = {state: run(function, state)[:3] for state in STATES}
    wrong: list[Any] = []

    def work(state: str) -> None:
        for _ in range(50):
            a, b = operands()
            with castwise.autocast(CPU, **STATES[state]):
                output = function.apply(a, b)
            grads = torch.autograd.grad(output.float().sin().sum(), (a, b))
            got = [output.dtype, output.tolist(), [(grad.dtype, grad.tolist()) for grad in grads]]
            if got != expected[state]:
                wrong.append((state, got))

    threads = [threading.Thread(target=work, args=(state,)) for state in [*STATES, *STATES]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("make", [product, separate_product])
@pytest.mark.parametrize("cast_inputs", [None, FP32])
@pytest.mark.parametrize("state", STATES)
def test_functions_compiled_without_a_graph_break(make: Any, cast_inputs: torch.dtype | None, state: str) -> None:
    torch.compiler.reset()
    function = make(castwise, cast_inputs)
    expected = run(function, state)[:3]
    a, b = operands()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with castwise.autocast(CPU, **STATES[state]):
            return function.apply(a, b)

    output = compiled(a, b)
    grads = torch.autograd.grad(output.float().sin().sum(), (a, b))
    assert [output.dtype, output.tolist(), [(grad.dtype, grad.tolist()) for grad in grads]] == expected


def test_a_backward_without_its_forward_says_what_to_do() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @castwise.custom_bwd(device_type=CPU)
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    with pytest.raises(RuntimeError, match=re.escape("decorate forward with custom_fwd(device_type='cpu')")):
        Half.apply(torch.ones(1, requires_grad=True)).backward()


@pytest.mark.parametrize("decorator", [castwise.custom_fwd, castwise.custom_bwd])
def test_the_device_type_has_to_be_a_string(decorator: Any) -> None:
    with pytest.raises(ValueError, match=r"device_type must be a string such as 'cuda' or 'cpu', got device\("):
        decorator(device_type=torch.device(CPU))


def test_arguments_of_all_kinds_reach_the_forward_cast() -> None:
    received: dict[str, Any] = {}

    class Collect(torch.autograd.Function):
        @staticmethod
        @castwise.custom_fwd(device_type=CPU, cast_inputs=FP16)
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            received["args"] = args
            return args[0].float().sum()

        @staticmethod
        @castwise.custom_bwd(device_type=CPU)
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad.expand(2), *[None] * 7

    one = torch.ones(2)
    marker = object()
    with castwise.autocast(CPU):
        Collect.apply(one.requires_grad_(), 3, "text", None, [one, {"key": one}], Pair(one, "x"), one.double(), marker)
    tensor, number, text, nothing, nested, pair, double, other = received["args"]
    assert (tensor.dtype, number, text, nothing, other) == (FP16, 3, "text", None, marker)
    assert (nested[0].dtype, nested[1]["key"].dtype) == (FP16, FP16)
    assert (type(pair), pair.first.dtype, pair.second) == (Pair, FP16, "x")
    assert double.dtype is torch.float64


def test_a_function_whose_first_argument_is_no_tensor() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        @castwise.custom_fwd(device_type=CPU)
        def forward(factor: float, x: torch.Tensor) -> torch.Tensor:
            return x * factor

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.factor = inputs[0]

        @staticmethod
        @castwise.custom_bwd(device_type=CPU)
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return None, grad * ctx.factor

    x = torch.ones(2, requires_grad=True)
    Scale.apply(3.0, x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
    with pytest.raises(AttributeError, match="'float' object has no attribute '_dtype'"):
        torch.amp.custom_fwd(lambda factor: factor, device_type=CPU)(3.0)


def test_keyword_arguments_of_a_plain_function_are_cast() -> None:
    @castwise.custom_fwd(device_type=CPU, cast_inputs=FP16)
    def forward(*, x: torch.Tensor) -> torch.dtype:
        return x.dtype

    assert forward(x=torch.ones(1)) is FP32
    with castwise.autocast(CPU):
        assert forward(x=torch.ones(1)) is FP16


# -- _cast ------------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(torch.ones(2, dtype=dtype) for dtype in (FP16, BF16, FP32, torch.float64, torch.int64, torch.bool)),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, device="meta"),
    [torch.ones(1), [torch.ones(1), "x"]],
    (torch.ones(1), 2, None),
    {"a": torch.ones(1), 3: {"b": [torch.ones(1)]}},
    collections.OrderedDict(a=torch.ones(1)),
    {"x"},
    range(3),
    "text",
    b"bytes",
    numpy.ones(3, dtype=numpy.float32),
    None,
    1.5,
    torch.Size([1, 2]),
    torch.ones(2, 2).max(0),
    ...,
]


def listing(value: Any) -> Any:
    """Spell a value out, with the type of each part."""
    if isinstance(value, torch.Tensor):
        return "Tensor", value.dtype, value.device.type
    if isinstance(value, dict):
        return type(value), {key: listing(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [listing(part) for part in value]
    if isinstance(value, Iterator):
        return "iterator", [listing(part) for part in value]
    return id(value)


@pytest.mark.parametrize(("value", "dtype"), list(itertools.product(VALUES, [FP16, FP32])), ids=str)
def test_casting_gives_what_torchs_gives(value: Any, dtype: torch.dtype) -> None:
    expected = torch.amp.autocast_mode._cast(value, CPU, dtype)
    assert listing(_cast(value, CPU, dtype)) == listing(expected)


def test_a_function_may_take_nothing() -> None:
    assert castwise.amp.custom_fwd(lambda: 3, device_type="cpu")() == 3


@pytest.mark.parametrize("function", [torch.add, max])
def test_a_builtin_that_shows_no_parameters_is_decorated_as_torch_does(function: Any) -> None:
    ours, torchs = (library.custom_fwd(function, device_type=CPU) for library in (castwise, torch.amp))
    arguments = torch.ones(1), torch.zeros(1)
    assert torch.equal(ours(*arguments), torchs(*arguments))


def test_tensors_that_are_keys_are_cast_too() -> None:
    for cast in (_cast, torch.amp.autocast_mode._cast):
        ((key, value),) = cast({torch.ones(1): torch.ones(1)}, CPU, FP16).items()
        assert key.dtype is value.dtype is FP16


def test_a_generator_is_cast_as_it_is_read() -> None:
    read: list[int] = []
    values = (read.append(1) or torch.ones(1) for _ in range(3))  # type: ignore[func-returns-value]
    cast = _cast(values, CPU, FP16)
    assert not read
    assert [value.dtype for value in cast] == [FP16] * 3


def test_a_named_tuple_keeps_its_type_which_torch_cannot_do() -> None:
    with pytest.raises(TypeError):
        torch.amp.autocast_mode._cast(Pair(torch.ones(1), 2), CPU, FP16)
    cast = _cast(Pair(torch.ones(1), 2), CPU, FP16)
    assert type(cast) is Pair
    assert (cast.first.dtype, cast.second) == (FP16, 2)


def test_a_packed_sequence_keeps_its_type() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    cast = _cast(packed, CPU, FP16)
    assert type(cast) is type(packed)
    assert (cast.data.dtype, cast.batch_sizes.tolist()) == (FP16, [2, 1])


def test_a_context_may_be_any_object_that_forward_calls_ctx() -> None:
    for library in (torch.amp, castwise):

        class Doubled(torch.autograd.Function):
            @staticmethod
            @library.custom_fwd(device_type=CPU)
            def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
                ctx.factor = 2
                return a * ctx.factor

            @staticmethod
            @library.custom_bwd(device_type=CPU)
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * ctx.factor

        doubled = types.SimpleNamespace()
        with torch.autocast(CPU, dtype=FP16):
            Doubled.forward(doubled, torch.ones(2))
        assert Doubled.backward(doubled, torch.ones(2)).tolist() == [2.0, 2.0]
        assert (doubled._fwd_used_autocast, doubled._dtype) == (True, FP16)


def separate(decorate: Callable[[Any], Any]) -> Any:
    """A mixin for Functions: forward, with a decorator above castwise's, and a separate `setup_context`."""

    class Doubled:
        @staticmethod
        @decorate
        @castwise.custom_fwd(device_type=CPU)
        def forward(a: torch.Tensor) -> torch.Tensor:
            return a * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        @castwise.custom_bwd(device_type=CPU)
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (2 if torch.is_autocast_enabled(CPU) else 1)

    return Doubled


def gradient(function: Any) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    with castwise.autocast(CPU):
        y = function.apply(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return grad.tolist()


def test_a_separate_context_under_another_decorator_of_forward() -> None:
    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            calls.append(args)
            return function(*args)

        return call

    calls: list[Any] = []

    class Function(separate(counted), torch.autograd.Function):  # type: ignore[misc]
        pass

    assert gradient(Function) == [2.0, 2.0]
    assert len(calls) == 1


def test_a_forward_is_shared_with_functions_that_are_made_later() -> None:
    mixin = separate(lambda function: function)
    for _ in range(3):

        class Function(mixin, torch.autograd.Function):  # type: ignore[misc,valid-type]
            pass

        assert gradient(Function) == [2.0, 2.0]
        assert gradient(Function) == [2.0, 2.0]
