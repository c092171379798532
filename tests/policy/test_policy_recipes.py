"""Rules of a policy that are recipes: which linear layers take them, and that they hold wherever other rules do."""

from __future__ import annotations

import copy
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes.kernels import needs_kernels
from torch import nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Policy, WeightCache
from castwise._recipes import recipe as recipes
from castwise._recipes.quantized_linear import linear
from castwise._recipes.recipe import RECIPES
from castwise.policy._module_rules import decide

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def warned_of() -> Iterator[None]:
    """That recipes are emulated here is one test's subject."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is emulated on this cpu", category=UserWarning)
        yield


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def by_recipe(model: nn.Module, rules: dict[Any, Any], **options: Any) -> dict[str, str]:
    decisions = decide(Policy(compute="bfloat16", modules=rules, **options), model)
    return {each.name: each.recipe for each in decisions if each.recipe}


def results(model: nn.Module, call: Callable[..., torch.Tensor], bound: Any, **options: Any) -> list[torch.Tensor]:
    """The output, and the gradients of the weights."""
    model.zero_grad()
    with castwise.autocast("cpu", policy=bound, **options):
        output = call(X)
    output.float().square().mean().backward()
    return [output.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


ROWWISE = "float8_rowwise"


@pytest.mark.parametrize(
    ("rules", "layers"),
    [
        ({"blocks.0.mlp.0": ROWWISE}, {"blocks.0.mlp.0"}),
        ({"blocks.*.mlp.*": ROWWISE}, {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}),
        ({"re:blocks\\.1\\..*": ROWWISE}, {"blocks.1.mlp.0", "blocks.1.mlp.2"}),
        ({Block: ROWWISE}, {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}),
        ({"blocks": ROWWISE, "blocks.1": "bfloat16"}, {"blocks.0.mlp.0", "blocks.0.mlp.2"}),
        ({"blocks.*": ROWWISE, "blocks.1.*": "bfloat16"}, {"blocks.0.mlp.0", "blocks.0.mlp.2"}),
        ({"blocks": ROWWISE, "blocks.1.mlp": "inherit"}, {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}),
        ({nn.Linear: f"{ROWWISE}?"}, {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}),
    ],
)
def test_a_rule_gives_its_recipe_to_the_linear_layers_that_it_names_or_that_are_within(
    rules: dict[Any, Any], layers: set[str]
) -> None:
    assert by_recipe(Model(), rules) == dict.fromkeys(layers, ROWWISE)


def test_other_modules_keep_the_rules_that_a_recipes_pattern_matches_too() -> None:
    rules = {nn.GELU: "float32", nn.LayerNorm: "float32", "blocks.*": ROWWISE}
    computes = {each.name: each.compute for each in decide(Policy(compute="bfloat16", modules=rules), Model())}
    assert computes["blocks.0.mlp.1"] == computes["blocks.0.norm"] == "float32"
    assert computes["blocks.0"] == computes["blocks.0.mlp.0"] == "bfloat16"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
def test_layers_compute_by_their_recipe_and_all_else_as_before(recipe: str, compute: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    x, dtype = torch.randn(4, 128), getattr(torch, compute)
    bound = Policy(compute=compute, modules={"0": recipe}, backend="emulated").bind(model)
    with castwise.autocast("cpu", policy=bound):
        ours = model(x)
    first: Any = model[0]
    with torch.autocast("cpu", dtype, enabled=compute != "float32"):
        theirs = model[2](model[1](linear(x.to(dtype), first.weight, first.bias, RECIPES[recipe], False)))
    assert ours.dtype is dtype
    assert torch.equal(ours, theirs)


def shared() -> nn.ModuleDict:
    """One layer in two containers."""
    layer = nn.Linear(32, 32)
    return nn.ModuleDict({"encoder": nn.Sequential(layer), "decoder": nn.Sequential(layer)})


@pytest.mark.parametrize("container", ["encoder", "decoder"])
def test_a_layer_in_two_containers_has_the_recipe_of_either_and_is_listed_so(container: str) -> None:
    model: Any = shared()
    policy = Policy(compute="bfloat16", modules={container: "nvfp4"}, backend="emulated")
    assert by_recipe(model, {container: "nvfp4"}) == {"encoder.0": "nvfp4", "decoder.0": "nvfp4"}
    layer = model["encoder"][0]
    expected = linear(X.bfloat16(), layer.weight, layer.bias, RECIPES["nvfp4"], False)
    with castwise.autocast("cpu", policy=policy.bind(model)):
        assert torch.equal(model["encoder"](X), expected)
        assert torch.equal(model["decoder"](X), expected)


@pytest.mark.parametrize("other", ["mxfp8", "float32"])
def test_containers_that_contradict_over_a_shared_layer_are_refused(other: str) -> None:
    with pytest.raises(ValueError, match=r"'encoder\.0' and 'decoder\.0' are the same module, .* one rule by name"):
        by_recipe(shared(), {"encoder": other, "decoder": "nvfp4"})
    if other == "float32":
        assert len(by_recipe(shared(), {"encoder": other, "decoder.0": "nvfp4"})) == 2


def test_within_a_module_in_fp32_operands_are_quantized_from_fp32() -> None:
    model = Model()
    bound = Policy(compute="bfloat16", modules={"blocks.0": "float32", "blocks.0.mlp.0": ROWWISE}).bind(model)
    seen = {}
    block: Any = model.blocks[0]
    block.mlp[0].register_forward_hook(lambda module, args, output: seen.update(dtype=output.dtype))
    results(model, model, bound)
    assert seen["dtype"] is torch.float32


def test_outputs_are_cast_as_those_of_other_rules() -> None:
    layer = nn.Linear(32, 32)
    bound = Policy(compute="bfloat16", modules={"": ROWWISE}, output="float32").bind(layer)
    with castwise.autocast("cpu", policy=bound):
        assert layer(X).dtype is torch.float32
    blocks: Any = nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(32, 32)])})
    rules = {"inner": "bfloat16", "inner.0": ROWWISE}
    with castwise.autocast("cpu", policy=Policy(compute="float32", modules=rules).bind(blocks)):
        assert blocks.inner[0](X).dtype is torch.float32


def test_a_parametrization_computes_in_the_region_around_the_recipe() -> None:
    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            half = weight @ (torch.eye(32) / 2)
            seen.append(half.dtype)
            return half.float()

    seen: list[torch.dtype] = []
    layer = nn.Linear(32, 32)
    nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
    bound = Policy(compute="bfloat16", modules={"": ROWWISE}, backend="emulated").bind(layer)
    seen.clear()
    with castwise.autocast("cpu", policy=bound):
        layer(X)
    assert seen == [torch.bfloat16]


def test_rules_for_ops_do_not_reach_into_a_recipe() -> None:
    model, ops = Model(), {"mm": "float16", "linear": "float32", "linalg.vector_norm": "float16"}
    block: Any = model.blocks[0]
    outputs = []
    for rules in ({}, ops):
        with castwise.autocast("cpu", policy=Policy("bfloat16", {"mlp.0": ROWWISE}, rules).bind(block)):
            outputs.append(block.mlp[0](X))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_runs_the_recipe_again(use_reentrant: bool) -> None:
    model = Model()
    bound = Policy(compute="bfloat16", modules={"blocks": ROWWISE}).bind(model)
    expected = results(model, model, bound)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return model.head(x)  # type: ignore[no-any-return]

    same(results(model, checkpointed, bound), expected)


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *[(recipe, "emulated") for recipe in ("float8_tensorwise", "float8_blockwise", "mxfp8", "nvfp4")],
        pytest.param("float8_rowwise_with_gw_hp", "torch", marks=needs_kernels),
        pytest.param("float8_rowwise", "torchao", marks=needs_kernels),
    ],
)
def test_compiled_models_compute_the_same_without_a_break(recipe: str, backend: str) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    bound = Policy(compute="bfloat16", modules={"0": recipe, "2": recipe}, backend=backend).bind(model)
    x = torch.randn(4, 128)
    expected = results(model, lambda _: model(x), bound)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    same(results(model, lambda _: compiled(x), bound), expected)


def test_inductor_computes_a_recipe_up_to_roundings_that_it_leaves_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU())  # each layer more is ten seconds of compiling
    bound = Policy(compute="bfloat16", modules={nn.Linear: "mxfp8"}).bind(model)
    expected = results(model, model, bound)
    torch._dynamo.reset()
    for mine, other in zip(results(model, torch.compile(model, fullgraph=True), bound), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.2, atol=0.1 * other.abs().max().item())


@needs_kernels
def test_torchaos_layers_compute_what_emulation_does() -> None:
    pytest.importorskip("torchao")
    model = Model()
    for recipe in [name for name, each in RECIPES.items() if each.capability]:
        of_backend = {
            backend: results(model, model, Policy("bfloat16", {"blocks": recipe}, backend=backend).bind(model))
            for backend in ("emulated", "torchao", "torch")
        }
        for backend in ("torchao", "torch"):
            for mine, other in zip(of_backend[backend], of_backend["emulated"], strict=True):
                torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def test_a_backend_without_torchao_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = Model()
    with pytest.raises(ImportError, match=r"pip install 'castwise\[torchao\]'"):
        Policy(compute="bfloat16", modules={"blocks": ROWWISE}, backend="torchao").bind(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_backend_that_is_missing_leaves_no_rules_of_other_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = Model()
    rules = {"blocks.0.norm": "float32", "blocks.1": ROWWISE}
    with pytest.raises(ImportError):
        Policy(compute="bfloat16", modules=rules, backend="torchao").bind(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_warning_that_is_an_error_leaves_no_rules() -> None:
    recipes.SETTLED.clear()
    model, policy = Model(), Policy(compute="bfloat16", modules={"blocks": ROWWISE})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="emulated on this cpu"):
            policy.bind(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_layer_whose_weight_is_no_parameter_takes_a_recipe() -> None:
    layer: Any = nn.Linear(32, 32, bias=False)
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.weight = weight
    policy = Policy(compute="bfloat16", modules={"": ROWWISE})
    assert f"{ROWWISE} (emulated)" in policy.explain(layer)
    with castwise.autocast("cpu", policy=policy.bind(layer)):
        assert torch.equal(layer(X), linear(X.bfloat16(), weight, None, RECIPES[ROWWISE], False))


def test_a_cache_keeps_quantized_weights_until_they_change() -> None:
    model = Model()
    bound = Policy(compute="bfloat16", modules={"blocks": ROWWISE}).bind(model)
    cache, optimizer = WeightCache(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        expected = results(model, model, bound)
        for _ in range(2):
            same(results(model, model, bound, weight_cache=cache), expected)
        report = cache.report()
        # Each weight and its transpose, once in each step.
        assert report.refreshes == 8 * (step + 1)
        assert report.hits == 8 * (step + 1)
        optimizer.step()
    assert {name for name in report.cached if "mlp" in name} == {
        f"blocks.{i}.mlp.{j}.weight" for i in (0, 1) for j in (0, 2)
    }
    assert report.nbytes == 2 * 2 * sum(  # in bf16, which holds all of their numbers
        layer.weight.numel() for layer in model.modules() if layer is not model.head and isinstance(layer, nn.Linear)
    )


def test_a_quantized_copy_that_is_stale_is_found() -> None:
    model = Model()
    bound = Policy(compute="bfloat16", modules={"blocks": ROWWISE}).bind(model)
    cache = WeightCache(model)
    results(model, model, bound, weight_cache=cache)
    block: Any = model.blocks[0]
    block.mlp[0].weight.data.mul_(2.0)

    def use_often() -> None:
        for _ in range(300):
            results(model, model, bound, weight_cache=cache)

    with pytest.raises(RuntimeError, match=r"the weight blocks\.0\.mlp\.0\.weight was changed"):
        use_often()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_stale_copy_of_a_weight_that_is_not_finite_now_is_found(value: float) -> None:
    model = Model()
    bound = Policy(compute="bfloat16", modules={"blocks": ROWWISE}).bind(model)
    cache = WeightCache(model, verify=True)
    results(model, model, bound, weight_cache=cache)
    block: Any = model.blocks[0]
    block.mlp[0].weight.data.fill_(value)
    with pytest.raises(RuntimeError, match=r"the weight blocks\.0\.mlp\.0\.weight was changed"):
        results(model, model, bound, weight_cache=cache)


def test_copies_and_files_of_a_model_and_a_policy_keep_the_recipes(tmp_path: Path) -> None:
    model = Model()
    policy = Policy(compute="bfloat16", modules={"blocks": f"{ROWWISE}?", "head": "float32"}, backend="emulated")
    for name in ("policy.toml", "policy.json"):
        policy.to_file(tmp_path / name)
        assert Policy.from_file(tmp_path / name) == policy
    bound = policy.bind(model)
    expected = results(model, model, bound)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    same(results(twin, twin, bound), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_quantized_as_they_are(dtype: torch.dtype) -> None:
    layer = nn.Linear(32, 32).to(dtype)
    bound = Policy(compute="bfloat16", modules={"": ROWWISE}).bind(layer)
    with castwise.autocast("cpu", policy=bound):
        output = layer(X)
    assert torch.equal(output, linear(X.bfloat16(), layer.weight, layer.bias, RECIPES[ROWWISE], False))


def test_shapes_that_a_recipe_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="recipe that it cannot use") as raised:
        Policy(compute="bfloat16", modules={"head": ROWWISE}).bind(Model())
    assert str(raised.value) == (
        "modules['head'] = 'float8_rowwise' gives 'head' a recipe that it cannot use: its weight has the shape "
        "(10, 32), but float8_rowwise needs multiples of 16. Write 'float8_rowwise?' to run such modules in the "
        "surrounding dtype, or give 'head' another rule"
    )
    with pytest.raises(
        ValueError, match=r"'blocks\.0\.mlp\.0' .* \(64, 32\), but float8_blockwise needs multiples of 128"
    ):
        Policy(compute="bfloat16", modules={"blocks": "float8_blockwise"}).bind(Model())


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("make", "rules", "text"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 16, 3)),
            {"0": ROWWISE},
            "'0' a recipe .*: its type is Conv2d, but recipes are for nn.Linear",
        ),
        (lambda: nn.Sequential(OwnForward(16, 16)), {"0": ROWWISE}, "this OwnForward has its own forward"),
        (lambda: nn.Sequential(nn.LazyLinear(16)), {"0": ROWWISE}, "its weight has no shape before the first batch"),
        (lambda: nn.Sequential(nn.Linear(16, 16).double()), {"0": ROWWISE}, r"its weight is torch\.float64"),
        (lambda: nn.Sequential(nn.GELU()), {"0": ROWWISE}, "gives no module a recipe: recipes are for nn.Linear"),
        (
            lambda: nn.Sequential(nn.Linear(16, 16)),
            {"0": ROWWISE, "": "mxfp8"},
            "modules\\[''\\] = 'mxfp8' gives no module a recipe",
        ),
        (
            lambda: nn.MultiheadAttention(16, 2),
            {"out_proj": ROWWISE},
            "whose forward torch.nn.MultiheadAttention never calls",
        ),
        (lambda: nn.MultiheadAttention(16, 2), {"": ROWWISE}, "gives no module a recipe"),
    ],
)
def test_what_cannot_take_a_recipe_is_refused(make: Callable[[], nn.Module], rules: dict[str, str], text: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=text):
        Policy(compute="bfloat16", modules=rules).bind(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_layer_with_a_recipe_takes_the_arguments_of_a_linear_layer() -> None:
    layer = nn.Linear(32, 32)
    bound = Policy(compute="bfloat16", modules={"": "mxfp8"}).bind(layer)
    with castwise.autocast("cpu", policy=bound):
        assert torch.equal(layer(input=X), layer(X))
        for args, kwargs in [((), {"nonsense": X}), ((X,), {"nonsense": X}), ((X, X), {}), ((), {}), ((None,), {})]:
            with pytest.raises(TypeError) as ours:
                layer(*args, **kwargs)
            with pytest.raises(TypeError) as theirs:
                nn.Linear.forward(layer, *args, **kwargs)
            assert str(ours.value) == str(theirs.value)


def test_a_forward_that_others_have_put_on_a_layer_is_not_passed_over() -> None:
    layer = nn.Linear(16, 16)
    layer.forward = lambda x: nn.Linear.forward(layer, x) + 1  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"is overridden on the instance \(by tests\.policy\.test_policy_recipes\)"):
        Policy(compute="bfloat16", modules={"": ROWWISE}).bind(layer)


def test_a_class_that_was_patched_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", functools.wraps(forward)(lambda self, x: forward(self, x) + 1))
    layer = nn.Linear(16, 16)
    text = f"nn.Linear.forward was replaced by {__name__}, which the recipe would bypass"
    with pytest.raises(ValueError, match=re.escape(text)):
        Policy(compute="bfloat16", modules={"": ROWWISE}).bind(layer)
    assert Policy(compute="bfloat16", modules={"": f"{ROWWISE}?"}).bind(layer).recipes == []


def test_wrong_recipes_and_backends_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ops\['linear'\] must be one of .* got 'mxfp8': recipes are only for nn.L"):
        Policy(compute="bfloat16", ops={"linear": "mxfp8"})
    with pytest.raises(ValueError, match=r"compute must be one of .* got 'mxfp8'"):
        Policy(compute="mxfp8")
    with pytest.raises(ValueError, match="got 'float8_rowvise'; did you mean 'float8_rowwise'"):
        Policy(compute="bfloat16", modules={"a": "float8_rowvise"})
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'emulated', 'torch', 'torchao', got 'cuda'"):
        Policy(compute="bfloat16", backend="cuda")
    with pytest.raises(ValueError, match=r"modules\['a'\] = 'nvfp4' can only be emulated, got backend='torch'"):
        Policy(compute="bfloat16", modules={"a": "nvfp4"}, backend="torch")


def test_explain_names_recipes_what_computes_them_and_who_does_not_take_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Policy(compute="bfloat16", modules={"blocks.0": "mxfp8", "head": "float8_rowwise?"}).explain(Model())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["blocks.0.mlp.0", "Linear", "2,112", "mxfp8", "(emulated)", "blocks.0", "(of", "blocks.0)"] in lines
    head = next(" ".join(line) for line in lines if line[0] == "head")
    assert head == (
        "head Linear 330 bfloat16 compute; not float8_rowwise: its weight has the shape (10, 32), but float8_rowwise "
        "needs multiples of 16"
    )


def test_explain_lists_layers_without_their_recipe_but_not_the_containers_of_layers() -> None:
    without = {
        each.name: each.without_recipe
        for each in decide(Policy("bfloat16", {"*": "mxfp8?"}), Model())
        if each.without_recipe is not None
    }
    assert "head" in without
    assert without["blocks.0.norm"] == "not mxfp8: its type is LayerNorm, but recipes are for nn.Linear"
    assert not {"", "blocks", "blocks.0", "blocks.0.mlp"} & without.keys()


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "meta"])
@pytest.mark.parametrize("backend", ["auto", "emulated", "torch"])
def test_what_computes_a_recipe_is_what_explain_says_on_each_type_of_device(backend: str, device: str) -> None:
    layer = nn.Linear(32, 32)
    Policy("bfloat16", {"": ROWWISE}, backend=backend).bind(layer)
    (rule,) = vars(layer)["forward"].rules.values()
    by_kernels = recipes.labelled(RECIPES[ROWWISE], backend, device) == f"{ROWWISE} (torch)"
    assert (device in rule.kernels_on) is by_kernels


def test_that_a_recipe_is_emulated_is_said_once() -> None:
    recipes.SETTLED.clear()
    rules = {"blocks": "float8_tensorwise"}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        Policy(compute="bfloat16", modules=rules).bind(Model())
        Policy(compute="bfloat16", modules=rules).bind(Model())
        Policy(compute="bfloat16", modules={"blocks": "mxfp8"}, backend="emulated").bind(Model())
    (only,) = warned
    assert str(only.message).startswith(
        "float8_tensorwise is emulated on this cpu: the results are those of the recipe"
    )
    assert only.filename == __file__


def test_torchs_kernels_are_off_by_name_and_once_on_a_device_for_which_torch_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipes, "WITHOUT_KERNELS", frozenset({"cpu"}))  # as with torch 2.11
    recipes.SETTLED.clear()
    model, rules = Model(), {"blocks": ROWWISE}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        bound = [Policy("bfloat16", rules, backend="torch").bind(model) for _ in range(2)]
    (only,) = warned
    assert str(only.message).startswith(
        f"{ROWWISE} is emulated on this cpu, as torch {torch.__version__} has no kernels for it there: "
    )
    assert only.filename == __file__
    text = str(Policy("bfloat16", rules, backend="torch").explain(model))
    assert f"{ROWWISE} (emulated)" in text
    assert f"{ROWWISE} (torch)" not in text
    same(
        results(model, model, bound[0]),
        results(model, model, Policy("bfloat16", rules, backend="emulated").bind(model)),
    )
