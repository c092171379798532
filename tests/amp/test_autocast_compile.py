"""Regions under `torch.compile` and `torch.export`: no graph break, torch's bits, and the thread left as it was."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.thorough import THOROUGH
from torch.utils.checkpoint import checkpoint

import castwise

BF16, FP16 = torch.bfloat16, torch.float16
DECORATED = castwise.autocast("cpu", dtype=BF16)
READY = castwise.autocast("cpu", dtype=BF16)


def state() -> tuple[Any, ...]:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    switches = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return (*switches, torch.is_autocast_cache_enabled(), nesting)


@pytest.fixture(autouse=True)
def a_fresh_compiler_and_an_untouched_thread() -> Iterator[None]:
    torch.compiler.reset()
    before = state()
    yield
    assert state() == before


class Net(torch.nn.Module):
    """Two layers; `run` says where its region is, with torch's or our autocast."""

    def __init__(self, run: Callable[[Any, Any, torch.Tensor], torch.Tensor], library: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.run, self.library = run, library

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.library, x)


def inside(net: Any, library: Any, x: torch.Tensor) -> torch.Tensor:
    with library.autocast("cpu", dtype=BF16):
        return net.second(net.first(x).relu())


def inside_without_cache(net: Any, library: Any, x: torch.Tensor) -> torch.Tensor:
    with library.autocast("cpu", dtype=BF16, cache_enabled=False):
        return net.first(net.first(x).relu())


def part_of_it(net: Any, library: Any, x: torch.Tensor) -> torch.Tensor:
    with library.autocast("cpu", dtype=FP16):
        hidden = net.first(x)
    return net.second(hidden.float()).softmax(-1)


def two_dtypes(net: Any, library: Any, x: torch.Tensor) -> torch.Tensor:
    with library.autocast("cpu", dtype=BF16):
        hidden = net.first(x)
        with library.autocast("cpu", dtype=FP16):
            return net.second(hidden).float() + hidden


def in_a_checkpoint(net: Any, library: Any, x: torch.Tensor) -> torch.Tensor:
    def block(x: torch.Tensor) -> torch.Tensor:
        with library.autocast("cpu", dtype=BF16):
            return net.first(x).relu()

    return net.second(checkpoint(block, x, use_reentrant=False).float())


def around_a_checkpoint(net: Any, library: Any, x: torch.Tensor) -> torch.Tensor:
    with library.autocast("cpu", dtype=BF16):
        return net.second(checkpoint(net.first, x, use_reentrant=False))


PLACES = [inside, inside_without_cache, part_of_it, two_dtypes, in_a_checkpoint, around_a_checkpoint]


def results(net: Net, forward: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
    output = forward(x)
    output.float().sin().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in net.parameters())]
    net.zero_grad()
    return [output.dtype, output.tolist(), [None if grad is None else grad.tolist() for grad in grads]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_region_in_a_compiled_function(place: Any, backend: str) -> None:
    theirs = Net(place, torch)
    expected = results(theirs, theirs)
    ours = Net(place, castwise)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    assert results(ours, compiled) == expected
    assert results(ours, compiled) == expected


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_region_disabled_inside_an_enabled_one_in_the_forward(backend: str) -> None:
    # Forward only: in the backward torch.compile forgets inner regions (pytorch#179804), torch's own too.
    def place(net: Any, library: Any, x: torch.Tensor) -> torch.Tensor:
        with library.autocast("cpu", dtype=BF16):
            hidden = net.first(x)
            with library.autocast("cpu", enabled=False):
                return net.second(hidden.float())

    x = torch.linspace(-1, 1, 16).view(2, 8)
    expected = Net(place, torch)(x)
    got = torch.compile(Net(place, castwise), fullgraph=True, backend=backend)(x)
    assert got.dtype is torch.float32
    assert torch.equal(got, expected)


class Block(torch.nn.Module):
    """A block of a GPT. Dropout in the attention keeps torch from its fused kernel, whose backward casts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).view(4, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.2)
        x = x + self.out(attended.transpose(1, 2).reshape(4, 8, 16))
        return x + self.mlp(self.norm2(x))


class GPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.block = torch.nn.Embedding(17, 16), torch.nn.Embedding(8, 16), Block()
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.block(self.tokens(tokens) + self.positions(torch.arange(8)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def trained(library: Any, backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = GPT()
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(17, (4, 9))
        with library.autocast("cpu", dtype=BF16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


# Inductor is given the same graphs, and compiles C++ for half a minute.
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if THOROUGH else [])])
def test_a_compiled_gpt_ends_with_the_weights_it_has_under_torch(backend: str) -> None:
    assert all(map(torch.equal, trained(castwise, backend), trained(torch, backend)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("made", ["outside", "as a decorator", "around the call"])
def test_a_region_made_outside_of_the_compiled_function(made: str, backend: str) -> None:
    def place(net: Any, library: Any, x: torch.Tensor) -> torch.Tensor:
        if made == "outside":
            with READY:
                return net.first(x)
        return decorated(net, x) if made == "as a decorator" else net.first(x)

    @DECORATED
    def decorated(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.first(x)

    net = Net(place, castwise)
    compiled = torch.compile(net, fullgraph=True, backend=backend)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if made != "around the call":
            return compiled(x)
        with castwise.autocast("cpu", dtype=BF16):
            return compiled(x)

    def reference(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return net.first(x)

    expected = results(net, reference)
    assert expected[0] is BF16
    assert results(net, forward) == expected
    if made == "around the call":
        assert compiled(torch.ones(2, 8)).dtype is torch.float32


def test_the_graph_of_a_backend_names_castwises_regions() -> None:
    targets = []

    def backend(graph: Any, inputs: Any) -> Any:
        targets.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    for library in (torch, castwise):

        @torch.compile(backend=backend)
        def product(x: torch.Tensor, library: Any = library) -> torch.Tensor:
            with library.autocast("cpu", dtype=BF16):
                return x @ x

        assert product(torch.ones(2, 2)).dtype is BF16
    modes, region = torch.amp.autocast_mode, castwise.amp._traced_region
    assert targets[0][::2] == [modes._enter_autocast, modes._exit_autocast]
    assert targets[1][::2] == [region.enter, region.leave]


def test_no_graph_breaks_are_counted() -> None:
    net = Net(two_dtypes, castwise)
    explanation = torch._dynamo.explain(net)(torch.ones(2, 8))
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_changed_weight_is_used_in_the_next_call(backend: str) -> None:
    net = Net(inside, castwise)
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    x = torch.ones(2, 8)
    before = compiled(x)
    net.second.bias.data += 64
    after = compiled(x)
    assert torch.equal(after, Net.forward(net, x))
    assert not torch.equal(after, before)


def test_a_graph_break_inside_a_region_leaves_the_thread_as_it_was() -> None:
    before = state()

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        with castwise.autocast("cpu", dtype=BF16):
            y = x @ x
            torch._dynamo.graph_break()
            return y @ x

    for _ in range(3):
        assert broken(torch.ones(2, 2)).dtype is BF16
        assert state() == before


def test_an_exception_while_tracing_a_region_leaves_the_thread_as_it_was() -> None:
    before = state()

    @torch.compile(fullgraph=True, backend="eager")
    def failing(x: torch.Tensor) -> torch.Tensor:
        with castwise.autocast("cpu", dtype=BF16):
            torch._dynamo.graph_break()
            return x @ x

    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            failing(torch.ones(2, 2))
        assert state() == before


def test_a_region_that_warns_breaks_no_graph() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def unsupported(x: torch.Tensor) -> torch.Tensor:
        with castwise.autocast("cpu", dtype=torch.float32):
            return x @ x

    with pytest.warns(UserWarning, match="Disabling autocast"):
        assert unsupported(torch.ones(2, 2)).dtype is torch.float32


# -- more ways of writing a region ------------------------------------------------------------------------------------


def by_hand(library: Any, x: torch.Tensor) -> Any:
    region = library.autocast("cpu", dtype=BF16)
    region.__enter__()
    product = x @ x
    region.__exit__(None, None, None)
    return product, x @ x


def in_a_context_manager(library: Any, x: torch.Tensor) -> Any:
    @contextlib.contextmanager
    def lowered() -> Iterator[None]:
        with library.autocast("cpu", dtype=BF16):
            yield

    with lowered():
        product = x @ x
    return product, x @ x


def in_a_generator(library: Any, x: torch.Tensor) -> Any:
    def products() -> Iterator[torch.Tensor]:
        with library.autocast("cpu", dtype=BF16):
            yield x @ x
            yield x @ x

    return [*products(), x @ x]


def left_by_an_exception(library: Any, x: torch.Tensor) -> Any:
    try:
        with library.autocast("cpu", dtype=BF16):
            product = x @ x
            raise ValueError
    except ValueError:
        return product, x @ x


def entered_again(library: Any, x: torch.Tensor) -> Any:
    region = library.autocast("cpu", dtype=BF16)
    with region:
        first = x @ x
    with region:
        return first, x @ x


def of_a_function_that_calls_itself(library: Any, x: torch.Tensor) -> Any:
    def power(n: int) -> torch.Tensor:
        with library.autocast("cpu", dtype=BF16):
            return x @ x if n == 0 else power(n - 1) @ x

    return power(2), x @ x


def of_three_devices_dtypes_and_caches(library: Any, x: torch.Tensor) -> Any:
    with library.autocast("cuda", enabled=False), library.autocast("cpu", dtype=FP16, cache_enabled=False):
        first = x @ x
        with library.autocast("cpu"):
            second = x @ x
            with library.autocast("cpu", enabled=False):
                return first, second, x @ x


SPELLINGS = [by_hand, in_a_context_manager, in_a_generator, left_by_an_exception, entered_again]
SPELLINGS += [of_a_function_that_calls_itself, of_three_devices_dtypes_and_caches]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.__name__)
def test_a_spelling_of_a_region_is_compiled_once(spelling: Any) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.linspace(-1, 1, 16).view(4, 4)
    expected = spelling(torch, x)
    compiled = torch.compile(lambda x: spelling(castwise, x), fullgraph=True, backend=backend)
    for _ in range(3):
        got = compiled(x)
        assert [output.dtype for output in got] == [output.dtype for output in expected]
        assert all(map(torch.equal, got, expected))
    assert len(graphs) == 1


def test_a_backend_may_drop_dead_code() -> None:
    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph.forward

    net, x = Net(two_dtypes, castwise), torch.ones(2, 8)
    got = torch.compile(net, fullgraph=True, backend=backend)(x)
    assert torch.equal(got, Net(two_dtypes, torch)(x))


def test_one_region_entered_again_while_active_in_a_compiled_function() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x: torch.Tensor) -> Any:
        region = castwise.autocast("cpu", dtype=BF16)
        with region, castwise.autocast("cpu", enabled=False):
            with region:
                first = x @ x
            second = x @ x
        return first, second, x @ x

    x = torch.ones(2, 2)
    assert [output.dtype for output in compiled(x)] == [BF16, torch.float32, torch.float32]


def test_a_region_kept_in_a_module() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.region = castwise.autocast("cpu", dtype=FP16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.region:
                return x @ x

    module = copy.deepcopy(Module())
    assert torch.compile(module, fullgraph=True, backend="eager")(torch.ones(2, 2)).dtype is FP16
    assert module(torch.ones(2, 2)).dtype is FP16


def test_threads_run_a_compiled_function_in_their_own_regions() -> None:
    def products(x: torch.Tensor) -> Any:
        outer = x @ x
        with castwise.autocast("cpu", dtype=BF16):
            return outer, x @ x

    compiled = torch.compile(products, fullgraph=True, backend="eager")
    seen: dict[Any, Any] = {}

    def work(dtype: torch.dtype | None) -> None:
        with castwise.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            before = state()
            outputs = compiled(torch.ones(2, 2))
            seen[dtype] = [output.dtype for output in outputs], state() == before

    for dtype in (None, BF16, FP16):
        thread = threading.Thread(target=work, args=(dtype,))
        thread.start()
        thread.join()
    assert seen == {dtype: ([dtype or torch.float32, BF16], True) for dtype in (None, BF16, FP16)}


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_op_that_fails_in_a_compiled_region_leaves_the_thread_as_it_was(fullgraph: bool) -> None:
    before = state()

    @torch.compile(fullgraph=fullgraph, backend="aot_eager")
    def rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        with castwise.autocast("cpu", dtype=FP16, cache_enabled=False):
            product = x @ x
            if not fullgraph:
                torch._dynamo.graph_break()
            return torch.nn.functional.embedding(indices, product)

    assert rows(torch.ones(2, 2), torch.tensor([1])).dtype is FP16
    with pytest.raises(IndexError):
        rows(torch.ones(2, 2), torch.tensor([7]))
    assert state() == before


@pytest.mark.parametrize("outer", [None, False])
@pytest.mark.parametrize("fault", ["an error of one's own", "a break in a callee", "a branch on data"])
def test_a_trace_that_stops_inside_a_region_leaves_the_thread_as_it_was(fault: str, outer: bool | None) -> None:

    def callee(x: torch.Tensor) -> torch.Tensor:
        if fault == "a break in a callee":
            torch._dynamo.graph_break()
        if fault == "an error of one's own":
            raise ValueError("mine")
        return x @ x if fault != "a branch on data" or x.sum().item() > 0 else x

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> Any:
        with castwise.autocast("cpu", dtype=FP16, cache_enabled=False):
            inside = callee(x @ x)
        return inside, x @ x

    with castwise.autocast("cpu", enabled=False, cache_enabled=outer):
        before = state()
        for _ in range(3):
            if fault == "an error of one's own":
                with pytest.raises(ValueError, match="mine"):
                    compiled(torch.ones(2, 2))
            else:
                assert [output.dtype for output in compiled(torch.ones(2, 2))] == [FP16, torch.float32]
            assert state() == before


# -- torch.export -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_region(strict: bool) -> None:
    net, x = Net(inside, castwise), torch.linspace(-1, 1, 16).view(2, 8)
    program = torch.export.export(net, (x,), strict=strict)
    output = program.module()(x)
    assert output.dtype is BF16
    assert torch.equal(output, Net(inside, torch)(x))
    assert "castwise" not in program.graph_module.code, "the program has to run without castwise"


class Exported(torch.nn.Module):
    def __init__(self, spelling: Any, library: Any) -> None:
        super().__init__()
        self.spelling, self.library = spelling, library

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(self.spelling(self.library, x))


@pytest.mark.parametrize(
    ("spelling", "strict"),
    [
        pytest.param(spelling, strict, id=f"{spelling.__name__}-{strict}")
        for number, spelling in enumerate(SPELLINGS)
        for strict in (False, True)
        if THOROUGH or strict == number % 2
    ],
)
def test_exported_programs_keep_dtypes_and_bits_through_a_file(spelling: Any, strict: bool) -> None:
    x = torch.linspace(-1, 1, 16).view(4, 4)
    expected = spelling(torch, x)
    program = torch.export.export(Exported(spelling, castwise), (x,), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, program.run_decompositions(), torch.export.load(file)):
        got = exported.module()(x)
        assert [output.dtype for output in got] == [output.dtype for output in expected]
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("strict", [False, True])
def test_a_decorated_and_a_ready_region_are_exported(strict: bool) -> None:
    class Module(torch.nn.Module):
        @DECORATED
        def first(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

        def forward(self, x: torch.Tensor) -> Any:
            with READY:
                second = x @ x
            return self.first(x), second, x @ x

    x = torch.ones(2, 2)
    outputs = torch.export.export(Module(), (x,), strict=strict).module()(x)
    assert [output.dtype for output in outputs] == [BF16, BF16, torch.float32]
