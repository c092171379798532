"""While a region lasts, layers of a model have a forward of their own: nothing else may notice."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

import castwise
from castwise import Policy, WeightCache
from castwise.weights import _weight_cache as weight_cache

BF16, FP16 = torch.bfloat16, torch.float16


def region(cache: WeightCache | None, dtype: torch.dtype = BF16, **options: Any) -> castwise.autocast:
    return castwise.autocast("cpu", dtype=dtype, weight_cache=cache, **options)


def native() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


def mlp(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def trained_weights_of_any_size_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "_MIN_TRAINED", 0)


# -- what is served ---------------------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3), (2, 7)),
    "Conv1d, circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 7)),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding="valid", groups=2), (2, 7, 7)),
    "Conv2d, channels last": (lambda: nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), (2, 7, 7)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2, bias=False), (2, 5, 5, 5)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 7)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 3, output_padding=1, stride=2), (2, 5, 5)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 4, 4, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("trained", [True, False])
def test_convolutions_are_served(name: str, trained: bool, trained_weights_of_any_size_are_cached: None) -> None:
    make, shape = CONVOLUTIONS[name]
    layers = [make().requires_grad_(trained)]
    layers.append(copy.deepcopy(layers[0]))
    x = torch.randn(2, *shape)
    cache = WeightCache(layers[0])
    for _ in range(2):
        with region(cache):
            ours = layers[0](x)
        with native():
            theirs = layers[1](x)
        same(ours, theirs)
        if trained:
            ours.float().square().sum().backward()
            theirs.float().square().sum().backward()
    same([param.grad for param in layers[0].parameters()], [param.grad for param in layers[1].parameters()])
    assert cache.report().refreshes == cache.report().hits == len(list(layers[0].parameters()))


def test_an_argument_of_a_transposed_convolution_goes_through() -> None:
    layer, x = nn.ConvTranspose2d(2, 3, 3, stride=2), torch.randn(1, 2, 5, 5)
    with torch.no_grad(), region(WeightCache(layer)):
        ours = layer(x, output_size=[12, 12])
    with torch.no_grad(), native():
        same(ours, layer(x, output_size=[12, 12]))


def test_an_attribute_that_changes_counts() -> None:
    layer, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5)
    cache = WeightCache(layer)
    for padding in ((0, 0), (1, 1)):
        layer.padding = padding
        with torch.no_grad(), region(cache):
            ours = layer(x)
        with torch.no_grad(), native():
            same(ours, layer(x))


def test_parameters_are_inputs_as_well() -> None:
    model, queries = mlp(), nn.Parameter(X)
    cache = WeightCache(model)
    with torch.no_grad(), region(cache):
        ours = model(queries)
    with torch.no_grad(), native():
        same(ours, model(queries))
    assert cache.report().refreshes == 4


def test_a_module_that_comes_later_is_served() -> None:
    model = mlp()
    cache = WeightCache(model)
    for change in (
        lambda: model.append(nn.Linear(4, 4)),
        lambda: model.__setitem__(0, nn.Linear(4, 8)),
        lambda: model.insert(0, nn.Sequential(nn.Linear(4, 4))),
    ):
        change()
        for _ in range(2):
            with torch.no_grad(), region(cache):
                ours = model(X)
            with torch.no_grad(), native():
                same(ours, model(X))
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        assert len(cache.report().cached) == 2 * len(linear)


def test_a_lazy_layer_is_served_once_it_has_a_weight() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))
    cache = WeightCache(model)
    with torch.no_grad():
        for _ in range(2):
            with region(cache):
                model(X)
    assert cache.report().cached == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_default_device_changes_nothing() -> None:
    model = mlp()
    cache = WeightCache(model)
    with torch.no_grad(), torch.device("cpu"), region(cache):
        model(X)
    assert cache.report().refreshes == 4


@pytest.mark.parametrize(
    ("ops", "casts"), [({"gelu": "float32"}, 4), ({"linear": "float16"}, 0), ({"linear": "float32"}, 0)]
)
def test_an_op_rule_for_the_layer_wins(ops: dict[str, str], casts: int) -> None:
    outputs = []
    for cached in (True, False):
        model = mlp()
        cache = WeightCache(model) if cached else None
        bound = Policy(compute="bfloat16", ops=ops).bind(model)
        with torch.no_grad(), castwise.autocast("cpu", policy=bound, weight_cache=cache):
            outputs.append(model(X))
        if cache is not None:
            assert cache.report().refreshes == casts
    same(*outputs)


# -- what is left to autocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("mask", [None, torch.tensor([[False, False, True], [False] * 3])])
def test_the_inference_fast_path_of_an_encoder_is_taken(grad: Any, mask: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    # With a mask and nested tensors torch.autocast raises on a CPU.
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=mask is None).eval(), torch.randn(2, 3, 8)
    with grad(), region(WeightCache(model)):
        ours = model(x, src_key_padding_mask=mask)
    with grad(), native():
        theirs = model(x, src_key_padding_mask=mask)
    assert ours.dtype is theirs.dtype
    same(ours, theirs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_decoder_and_attention_give_autocasts_bits(grad: Any, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    model, x = nn.ModuleList([layer, attention]), torch.randn(2, 3, 8)
    with grad(), region(WeightCache(model)):
        ours = layer(x, x), *attention(x, x, x)
    with grad(), native():
        same(ours, (layer(x, x), *attention(x, x, x)))


class Int8(torch.Tensor):
    """A weight in 8 bits that takes the call of `linear`, as torchao's subclasses do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            input, weight, bias = args
            with torch._C.DisableTorchFunctionSubclass():
                return func(input.float(), weight.as_subclass(torch.Tensor) / 127, None) + bias
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_that_takes_the_call_gets_an_uncast_bias() -> None:
    model = mlp()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter((layer.weight.detach() * 127).round().as_subclass(Int8))
    cache = WeightCache(model)
    with torch.no_grad(), region(cache):
        ours = model(X)
    with torch.no_grad(), native():
        same(ours, model(X))
    assert cache.report().cached == []


def test_a_trace_has_weights_and_no_copies() -> None:
    model = mlp()
    with torch.no_grad(), region(WeightCache(model)):
        model(X)
        traced = torch.jit.trace(model, X, check_trace=False)
    with torch.no_grad(), native():
        plain = torch.jit.trace(mlp(), X, check_trace=False)
    assert re.sub(r"\.___torch_mangle_\d+", "", f"{traced.graph}") == re.sub(
        r"\.___torch_mangle_\d+", "", f"{plain.graph}"
    )
    model[0].weight.data.zero_()
    with torch.no_grad(), native():
        same(traced(X), model(X))


def test_a_script_has_no_forward_of_ours() -> None:
    model = mlp()
    with torch.no_grad(), region(WeightCache(model)):
        ours = torch.jit.script(model)(X)
    with torch.no_grad(), native():
        same(ours, torch.jit.script(mlp())(X))


def test_an_export_has_no_copies() -> None:
    model = mlp()
    for strict in (True, False):
        with torch.no_grad(), region(WeightCache(model)):
            model(X)
            program = torch.export.export(model, (X,), strict=strict)
        assert set(program.state_dict) == set(model.state_dict())
        assert not program.constants
        assert not [node for node in program.graph.nodes if node.op == "get_attr" and "tensor" in node.target]


def wrapped_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)  # type: ignore[return-value]  # a module


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("compiled", [wrapped_whole, in_place])
def test_a_compiled_model_is_compiled_once_for_regions_with_and_without_a_cache(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    model = compiled(mlp())
    cache = WeightCache(model)
    with torch.no_grad():
        with region(None):
            expected = model(X)
        with region(cache), torch.compiler.set_stance("fail_on_recompile"):
            same(model(X), expected)
    torch._dynamo.reset()


def test_compiled_layers_are_left_alone() -> None:
    model = mlp()
    model[0].compile(backend="aot_eager")
    model[2].forward = torch.compile(model[2].forward, backend="aot_eager")
    with torch.no_grad(), region(WeightCache(model)):
        ours = model(X)
    with torch.no_grad(), native():
        same(ours, mlp()(X))
    torch._dynamo.reset()


def test_out_of_hand_written_products_is_filled() -> None:
    weight = nn.Linear(4, 4, bias=False)
    out = torch.empty(3, 4, dtype=BF16)
    with torch.no_grad(), region(WeightCache(weight)):
        torch.mm(X.bfloat16(), weight.weight.bfloat16(), out=out)
    with torch.no_grad():
        same(out, torch.mm(X.bfloat16(), weight.weight.bfloat16()))


def spectral(model: nn.Sequential) -> None:
    torch.manual_seed(1)
    parametrizations.spectral_norm(model[0].eval())


def halved(model: nn.Sequential) -> None:
    class Half(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    parametrize.register_parametrization(model[0], "weight", Half())


def pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)


def of_another_class(model: nn.Sequential) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model[0].__class__ = Doubled


def wrapped(model: nn.Sequential) -> None:
    """What accelerate's `add_hook_to_module` does."""
    before = model[0].forward
    model[0].forward = lambda input: before(input) + 1


@pytest.mark.parametrize("change", [spectral, halved, pruned, of_another_class, wrapped])
@pytest.mark.parametrize("inside", [True, False])
def test_a_layer_that_stops_being_plain_is_autocasts(change: Callable[[nn.Sequential], None], inside: bool) -> None:
    model, other = mlp(), mlp()
    cache = WeightCache(model)
    with torch.no_grad():
        with region(cache):
            model(X)
            if inside:
                change(model)
                model(X)
        if not inside:
            change(model)
        change(other)
        for _ in range(2):
            with region(cache):
                ours = model(X)
            with native():
                same(ours, other(X))
    if change is wrapped:
        same(model(X), other(X))


# -- patched classes ---------------------------------------------------------------------------------------------------


def cubed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A patch that reads the weight, so that it shows in which precision it got it."""

    @functools.wraps(forward)
    def patched(module: nn.Module, input: torch.Tensor, *args: Any) -> Any:
        weight = module.weight if not args else args[0]
        return forward(module, input, *args) * (1 + weight.square().mean().float())

    return patched


class Convolved(nn.Module):
    """A layer of each kind that a cache serves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.conv = nn.Linear(6, 6), nn.Conv1d(3, 3, 3)
        self.back = nn.ConvTranspose1d(3, 3, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.back(self.conv(self.line(input)))  # type: ignore[no-any-return]


IMAGES = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(2))

PATCHES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "forward of nn.Linear": (nn.Linear, "forward", cubed),
    "forward of nn.ConvTranspose1d": (nn.ConvTranspose1d, "forward", cubed),
    "forward of nn.Conv1d, a partial function": (
        nn.Conv1d,
        "forward",
        lambda forward: functools.partialmethod(cubed(forward)),
    ),
    "a method that forward calls": (nn.Conv1d, "_conv_forward", cubed),
    "the op that forward calls": (
        functional,
        "linear",
        lambda linear: lambda input, weight, bias: linear(input, weight, bias) + weight.sum().float(),
    ),
}


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_a_patch_is_noticed_in_the_next_region_and_so_is_its_end(
    name: str, grad: Any, monkeypatch: pytest.MonkeyPatch, trained_weights_of_any_size_are_cached: None
) -> None:
    model, (owner, attribute, patch) = Convolved(), PATCHES[name]
    cache = WeightCache(model)

    def check() -> int:
        before = cache.report().hits
        for _ in range(2):
            with grad(), region(cache):
                ours = model(IMAGES)
            with grad(), native():
                same(ours, model(IMAGES))
        return cache.report().hits - before

    check()
    of_all = check()
    with monkeypatch.context() as patched:
        patched.setattr(owner, attribute, patch(getattr(owner, attribute)))
        of_the_others = check()
        assert 0 < of_the_others < of_all
    assert check() == of_all


def test_a_class_that_was_patched_before_the_import_is_the_users() -> None:
    """With a decorator that copies the names of torch's forward."""
    code = """
import functools
import torch
from torch import nn

forward = nn.Linear.forward

@functools.wraps(forward)
def tripled(self, input):
    return forward(self, input) * 3

nn.Linear.forward = tripled
import castwise

model, x = nn.Linear(4, 4), torch.randn(3, 4)
cache = castwise.WeightCache(model)
with torch.no_grad():
    with castwise.autocast("cpu", dtype=torch.bfloat16, weight_cache=cache):
        ours = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours, model(x))
print(cache.report().refused["weight"])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert printed.stdout == "of a Linear, but nn.Linear.forward was replaced by __main__\n", printed.stderr


def test_a_patch_counts_while_a_region_is_open_from_the_next_region_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Convolved()
    cache = WeightCache(model)
    with torch.no_grad(), region(cache):
        model(IMAGES)
        monkeypatch.setattr(nn.Linear, "forward", cubed(nn.Linear.forward))
        with region(cache):
            ours = model(IMAGES)
        after = model(IMAGES)
    with torch.no_grad(), native():
        same(ours, model(IMAGES))
        same(after, ours)
    assert not set(vars(model.line)) & {"forward", "__getstate__"}


def test_a_method_of_one_layer_is_the_users() -> None:
    """As programs do that make images which can be tiled."""
    model = Convolved()
    cache = WeightCache(model)
    model.conv._conv_forward = cubed(nn.Conv1d._conv_forward).__get__(model.conv)  # type: ignore[method-assign]
    for _ in range(2):
        with torch.no_grad(), region(cache):
            ours = model(IMAGES)
        with torch.no_grad(), native():
            same(ours, model(IMAGES))


def test_a_report_names_what_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WeightCache(Convolved())
    assert cache.report().refused == {}
    model = Convolved()
    cache = WeightCache(model)
    monkeypatch.setattr(nn.Conv1d, "_conv_forward", cubed(nn.Conv1d._conv_forward))
    monkeypatch.setattr(functional, "linear", functools.partial(functional.linear))
    text = {
        "line": "of a Linear, but nn.functional.linear was replaced by partial",
        "conv": f"of a Conv1d, but nn.Conv1d._conv_forward was replaced by {__name__}",
    }
    assert cache.report().refused == {f"{layer}.{of}": text[layer] for layer in text for of in ("weight", "bias")}


# -- inside a region no other code sees it -------------------------------------------------------------------------


def dumped(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"castwise" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": dumped,
    "copy of a layer": lambda model: nn.Sequential(*map(copy.copy, model.children())),
    "deepcopy of a layer": lambda model: nn.Sequential(*map(copy.deepcopy, model.children())),
    "replica": lambda model: nn.Sequential(*[layer._replicate_for_data_parallel() for layer in model.children()]),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_made_in_a_region_is_that_of_a_plain_model(name: str) -> None:
    model = mlp()
    attributes = [set(vars(layer)) for layer in model]
    with torch.no_grad(), region(WeightCache(model)):
        before = model(X)
        twin = COPIES[name](model)
        assert [set(vars(layer)) - {"_is_replica"} for layer in twin] == attributes
        if name == "replica":
            return
        with torch.no_grad():
            for param in twin.parameters():
                param.zero_()
        assert twin(X).abs().sum() == 0
        same(model(X), before if name != "copy of a layer" else twin(X))
        assert [*model.state_dict()] == [*twin.state_dict()]


def test_a_layer_is_as_before_after_a_region() -> None:
    model = mlp()
    before = [dict(vars(layer)) for layer in model]

    def interrupted() -> None:
        with region(WeightCache(model)):
            model(X)
            assert "forward" in vars(model[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [dict(vars(layer)) for layer in model] == before


def test_two_caches_of_one_model_do_not_meet() -> None:
    model = mlp()
    first, second = WeightCache(model), WeightCache(model[0])
    with torch.no_grad():
        with native():
            expected = model(X)
        with region(first), region(second):
            same(model(X), expected)
        with region(second):
            with region(first):
                same(model(X), expected)
            same(model(X), expected)
    assert not any("forward" in vars(layer) for layer in model)


def test_a_generator_that_is_left_late_leaves_nothing() -> None:
    model = mlp()
    cache = WeightCache(model)

    def outputs() -> Iterator[torch.Tensor]:
        with region(cache):
            yield model(X)
            yield model(X)

    with torch.no_grad():
        with native():
            expected = model(X)
        generator = outputs()
        same(next(generator), expected)
        with region(cache):
            same(model(X), expected)
            same(next(generator), expected)
            generator.close()
        torch.set_autocast_enabled("cpu", False)  # regions that are left in the order they were entered in leave it on
        assert not any("forward" in vars(layer) for layer in model)
        same(model(X), mlp()(X))


def test_hooks_see_a_layer_as_ever() -> None:
    model = mlp()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with torch.no_grad(), region(WeightCache(model)):
        ours = model(X)
    with torch.no_grad(), native():
        same(ours, model(X))
    same(*seen)


# -- threads ----------------------------------------------------------------------------------------------------------


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_thread_outside_of_any_region_computes_in_fp32() -> None:
    model = mlp()
    cache = WeightCache(model)
    expected = model(X).detach()

    def outside() -> torch.Tensor:
        return model(X).detach()  # type: ignore[no-any-return]

    def in_a_region_of_torch() -> torch.Tensor:
        with torch.no_grad(), native():
            return model(X)  # type: ignore[no-any-return]

    with torch.no_grad(), region(cache):
        ours = model(X)
        used = cache.report().hits
        same(in_thread(outside), expected)
        same(in_thread(in_a_region_of_torch), ours)
        assert cache.report().hits == used


def test_a_region_goes_on_when_that_of_another_thread_ends() -> None:
    model = mlp()
    cache = WeightCache(model)
    entered, left, results = threading.Event(), threading.Event(), []

    def first() -> None:
        with torch.no_grad(), region(cache):
            model(X)
            entered.set()
            left.wait(60)
            results.append(model(X))

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(60)
    with torch.no_grad(), region(cache):
        results.append(model(X))
    uses = cache.report().hits
    left.set()
    thread.join()
    same(results[0], results[1])
    assert cache.report().hits == uses + 4
    assert not any("forward" in vars(layer) for layer in model)


def test_threads_train_copies_of_one_model_beside_each_other() -> None:
    """Hogwild without the races: each thread has gradients of its own."""
    model, failures = mlp().requires_grad_(False), []
    cache = WeightCache(model)

    def gradient(cached: bool) -> torch.Tensor:
        x = X.clone().requires_grad_()
        with region(cache if cached else None):
            model(x).float().square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(False)

    def many() -> None:
        for _ in range(30):
            if not torch.equal(gradient(True), expected):
                failures.append(threading.get_ident())

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- training ---------------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Uses a weight in its layer and by hand, as tied heads do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.layer(self.layer(x)), self.layer.weight, self.layer.bias) @ self.layer.weight


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("repeat", [1, 2])
def test_the_graph_is_autocasts_own(
    cache_enabled: bool, around: bool, repeat: int, trained_weights_of_any_size_are_cached: None
) -> None:
    gradients = []
    for cached in (True, False):
        model, other = ByHand(), ByHand()
        cache = WeightCache(model) if cached else None
        for _ in range(3):
            losses = []
            with castwise.autocast("cpu", dtype=BF16, enabled=around):
                if around:
                    losses.append(model(X).float().square().sum())
                for _ in range(repeat):
                    with region(cache, cache_enabled=cache_enabled):
                        y = model(X) + other(X)
                        losses.append(y.float().square().sum() + model(y).float().sum())
            sum(losses).backward()  # type: ignore[union-attr]
        gradients.append([param.grad for param in model.parameters()])
        if cache is not None:
            assert cache.report().hits > 0
    same(*gradients)


@pytest.mark.parametrize("inside", [True, False])
def test_two_backwards_of_one_region(inside: bool, trained_weights_of_any_size_are_cached: None) -> None:
    gradients = []
    for cached in (True, False):
        model = mlp()
        cache = WeightCache(model) if cached else None
        for _ in range(2):
            with region(cache):
                losses = [model(X * scale).float().square().sum() for scale in (1, 2)]
                if inside:
                    losses.pop(0).backward()
                    losses.append(model(X).float().sum())
            for loss in losses:
                loss.backward()
        gradients.append([param.grad for param in model.parameters()])
    same(*gradients)


def test_small_trained_weights_are_autocasts_while_gradients_are_wanted() -> None:
    model = mlp()
    cache = WeightCache(model)
    for _ in range(2):
        with region(cache):
            model(X)
    assert cache.report().refreshes == 0
    with torch.no_grad(), region(cache):
        model(X)
    assert cache.report().refreshes == 4


def test_a_large_trained_weight_is_cast_once_for_all_micro_batches() -> None:
    gradients, x = [], torch.randn(2, 1024)
    for cached in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 4))
        cache = WeightCache(model) if cached else None
        for _ in range(3):
            with region(cache):
                loss = model(x).float().square().sum()
            loss.backward()
        gradients.append([param.grad for param in model.parameters()])
        if cache is not None:
            assert "0.weight" in cache.report().cached
            assert cache.report().refreshes == 2
    same(*gradients)


@pytest.mark.parametrize("policy", ["save", "recompute"])
def test_selective_checkpointing_sees_the_ops_of_autocast(
    policy: str, trained_weights_of_any_size_are_cached: None
) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = policy == "save" and op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    gradients = []
    for cached in (True, False):
        model = mlp()
        cache = WeightCache(model) if cached else None
        for _ in range(2):
            with region(cache):
                y = checkpoint(
                    model,
                    X.clone().requires_grad_(),
                    use_reentrant=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(decide),
                )
            y.float().square().sum().backward()
        gradients.append([param.grad for param in model.parameters()])
    same(*gradients)
