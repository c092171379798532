"""Which rule of a policy decides the precision of each module.

Everything here depends on names and types only. `bound_policy` applies the decisions while modules run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from castwise._patches import OPS
from castwise._recipes.recipe import named as recipe_named
from castwise._recipes.recipe import why_not_for
from castwise._suggestions import nearest
from castwise._torch_private import children_in, wraps_checkpoint, wraps_compiled

if TYPE_CHECKING:
    from castwise.policy._policy import Policy

_MAYBE = "maybe:"
_KINDS = ("re:", "type:", "last:")


class Decision(NamedTuple):
    """A policy's decision for one module.

    Args:
        name: Qualified name without wrappers; "" for the model itself.
        module: The module, or the module inside a wrapper.
        value: The value of its rule: a dtype, "inherit" or "exclude"; None if no rule names the module.
        effective: The same, or the value of an enclosing container that has no forward, such as a ModuleList.
        compute: The dtype that the module computes in, its own or inherited from the enclosing modules.
        key: The rule that decided `compute`; None for the policy's default.
        around: Name of the enclosing module that `key` matches; None if it matches the module itself.
        recipe: Recipe for a linear layer's products, with operands in `compute`. `key` is then the recipe's rule.
        without_recipe: Why a module has no recipe although a rule with "?" gives it one.
    """

    name: str
    module: nn.Module
    value: str | None
    effective: str | None
    compute: str
    key: str | None
    around: str | None
    recipe: str | None = None
    without_recipe: str | None = None

    @property
    def device_of_weight(self) -> str:
        """The device `type` of a linear layer's weight, which need not be a parameter."""
        layer: Any = self.module
        return str(layer.weight.device.type)


def spelled(key: Any) -> Any:
    """Return a module rule's key as a string: types become "type:...", compiled expressions "re:..."."""
    if isinstance(key, type) and issubclass(key, nn.Module):
        return f"type:{_full_name(key)}"
    if isinstance(key, re.Pattern):
        flags = "".join(letter for letter in "aimsx" if key.flags & re.RegexFlag[letter.upper()])
        return f"re:(?{flags}){key.pattern}" if flags else f"re:{key.pattern}"
    return key


def decide(policy: Policy, model: nn.Module) -> list[Decision]:
    """Return a decision for every name of every module, outer modules first.

    Recipes and dtypes are decided separately. Rules with dtypes decide the dtype of every module, including the dtype
    around a recipe. Rules with recipes only decide which linear layers use a recipe.

    Raises:
        TypeError: `model` is not a module.
        ValueError: A key matches nothing, or rules contradict each other.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    named = list(named_modules(model))
    deciding: dict[str, str] = {}  # for the dtype
    scoping: dict[str, str] = {}  # for recipes: among all rules
    for key in sorted(policy.modules, key=_rank):  # a stable sort: among equals, the later rule decides
        for name in matches(key, named):
            scoping[name] = key
            if recipe_named(policy.modules[key]) is None:
                deciding[name] = key
    _check_none_is_overruled(policy, named, deciding, scoping)
    _agree_on_shared_modules(policy, named, deciding)
    _agree_on_shared_modules(policy, named, scoping)
    _check_forwards_are_called(model, named, scoping)
    recipes = _recipes(policy, named, scoping)
    decisions: dict[str, Decision] = {}
    for name, module in named:
        recipe = recipes.get(name)
        is_by_recipe = recipe is not None and recipe.why_not is None
        value = policy.modules[deciding[name]] if name in deciding and not is_by_recipe else None
        outer = decisions[name.rpartition(".")[0]] if name else None
        if value is not None and value != "inherit":
            compute, key, around = ("float32" if value == "exclude" else value), deciding[name], None
        elif outer is None:
            compute, key, around = policy.compute, None, None
        else:
            is_decided_there = outer.key is not None and outer.around is None
            compute, key, around = outer.compute, outer.key, outer.name if is_decided_there else outer.around
        effective = outer.effective if value is None and outer is not None and not _has_forward(outer.module) else value
        decision = Decision(name, module, value, effective, compute, key, around)
        if recipe is not None and is_by_recipe:
            decision = decision._replace(recipe=recipe.recipe, key=recipe.key, around=recipe.around)
        elif recipe is not None and (isinstance(module, nn.Linear) or not _holds_linear_layers(module)):
            decision = decision._replace(without_recipe=f"not {recipe.recipe}: {recipe.why_not}")
        decisions[name] = decision
    return list(decisions.values())


class _Given(NamedTuple):
    """A recipe that a rule gives a module, and the reason if the module cannot use it."""

    key: str
    recipe: str
    around: str | None
    why_not: str | None


def _recipes(policy: Policy, named: list[tuple[str, nn.Module]], scoping: Mapping[str, str]) -> dict[str, _Given]:
    """Return the recipes of linear layers by name, from rules for them or for enclosing modules.

    Raises:
        ValueError: A layer cannot use its recipe, a rule matches no linear layer, or rules for two names of one layer
            contradict each other.
    """
    given_recipes: dict[str, _Given] = {}
    scopes: dict[str, tuple[str, str] | None] = {}  # the key of the rule that applies, and the module that it names
    for name, module in named:
        scope = scopes.get(name.rpartition(".")[0]) if name else None
        is_named = name in scoping and policy.modules[scoping[name]] != "inherit"
        if is_named:
            scope = scoping[name], name
        scopes[name] = scope
        if scope is None or not (is_named or isinstance(module, nn.Linear)) or is_never_called(module):
            continue
        key, rule = scope[0], policy.modules[scope[0]]
        if recipe_named(rule) is None:
            continue
        recipe, why_not = rule.removesuffix("?"), why_not_for(module, rule)
        if why_not is None or rule.endswith("?"):
            given_recipes[name] = _Given(key, recipe, None if is_named else scope[1], why_not)
        elif isinstance(module, tuple(OPS)):
            raise ValueError(
                f"modules[{key!r}] = {rule!r} gives {name!r} a recipe that it cannot use: {why_not}. Write "
                f"{rule + '?'!r} to run such modules in the surrounding dtype, or give {name!r} another rule"
            )
    for key, rule in policy.modules.items():
        if (
            recipe_named(rule)
            and key in scoping.values()
            and not any(given.key == key for given in given_recipes.values())
        ):
            raise ValueError(f"modules[{key!r}] = {rule!r} gives no module a recipe: recipes are for nn.Linear")
    _agree_on_recipes_of_shared_layers(policy, named, scopes, given_recipes)
    return given_recipes


def _agree_on_recipes_of_shared_layers(
    policy: Policy,
    named: list[tuple[str, nn.Module]],
    scopes: Mapping[str, tuple[str, str] | None],
    given_recipes: dict[str, _Given],
) -> None:
    """Give all names of a layer the recipe that one of them has: the layer has one recipe wherever it is used."""
    for names_of_one in _names_by_module(named).values():
        taken = next(
            (
                given_recipes[name]
                for name in names_of_one
                if name in given_recipes and given_recipes[name].why_not is None
            ),
            None,
        )
        if taken is None:
            continue
        for name in names_of_one:
            scope = scopes[name]
            if scope is not None and policy.modules[scope[0]].removesuffix("?") != taken.recipe:
                raise ValueError(
                    f"{' and '.join(map(repr, names_of_one))} are the same module, but modules[{taken.key!r}] = "
                    f"{policy.modules[taken.key]!r} contradicts modules[{scope[0]!r}] = {policy.modules[scope[0]]!r}: "
                    "give the module one rule by name"
                )
            given_recipes[name] = taken


def matches(key: str, named: list[tuple[str, nn.Module]], where: str = "modules") -> list[str]:
    """Return the names of the modules that a key matches.

    Raises:
        ValueError: It matches none and does not begin with "maybe:", or its "re:" is not a valid expression.
    """
    bare = key.removeprefix(_MAYBE)
    kind = next((kind for kind in _KINDS if bare.startswith(kind)), "")
    pattern = bare.removeprefix(kind)
    names = _FINDERS[kind](pattern, named)
    if not names and not key.startswith(_MAYBE):
        if kind in {"type:", "last:"}:
            known = {cls.__name__ for _, module in named for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
        else:
            known = {name for name, _ in named}
        raise ValueError(f"{where}[{key!r}] matches no module of the model{nearest(pattern, sorted(known))}")
    return names


def _by_name(pattern: str, named: list[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, _ in named if name == pattern or fnmatchcase(name, pattern)]


def _by_expression(pattern: str, named: list[tuple[str, nn.Module]]) -> list[str]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"'re:{pattern}' is not a regular expression: {error}") from error
    return [name for name, _ in named if expression.fullmatch(name)]


def _by_type(pattern: str, named: list[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, module in named if _is_of_type(module, pattern)]


def _last(pattern: str, named: list[tuple[str, nn.Module]]) -> list[str]:
    linears = [
        name
        for name, module in named
        if _is_of_type(module, pattern) and any(param.ndim > 1 for param in module.parameters(recurse=False))
    ]
    return linears[-1:]


_FINDERS = {"": _by_name, "re:": _by_expression, "type:": _by_type, "last:": _last}


def _is_of_type(module: nn.Module, pattern: str) -> bool:
    """Return True if a pattern matches a module's type or a base class, by bare, full or imported name."""
    place, _, name = pattern.rpartition(".")
    imported = getattr(sys.modules.get(place), name, None)
    return any(
        cls is imported or fnmatchcase(cls.__name__, pattern) or fnmatchcase(_full_name(cls), pattern)
        for cls in type(module).__mro__
        if issubclass(cls, nn.Module)
    )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _rank(key: str) -> int:
    """Rank keys by how specific they are: types 0, patterns 1, names 2."""
    bare = key.removeprefix(_MAYBE)
    if bare.startswith(("type:", "last:")):
        return 0
    return 1 if bare.startswith("re:") or any(sign in bare for sign in "*?[") else 2


def named_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules under all of their names, outer ones first; a wrapper is replaced by the module inside."""
    while (wrapped := _wrapped(module)) is not None:
        module = wrapped
    yield name, module
    for part, child in children_in(module).items():
        if child is not None:
            yield from named_modules(child, f"{name}.{part}" if name else part)


def _wrapped(module: nn.Module) -> nn.Module | None:
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel, fsdp)):
        inner: nn.Module = module.module
        return inner
    if wraps_compiled(module) or wraps_checkpoint(module):
        return next(module.children())
    return dict(module.named_children()).get("_forward_module")  # Fabric's


def _check_none_is_overruled(
    policy: Policy, named: list[tuple[str, nn.Module]], deciding: Mapping[str, str], scoping: Mapping[str, str]
) -> None:
    for key, value in policy.modules.items():
        if key in deciding.values() or key in scoping.values():
            continue
        others = {scoping[name] for name in matches(key, named)}
        contrary = [other for other in others if policy.modules[other] != value]
        if contrary:
            raise ValueError(
                f"modules[{key!r}] = {value!r} contradicts modules[{contrary[0]!r}] = {policy.modules[contrary[0]]!r}, "
                "which overrides it everywhere: a name overrides a pattern, a pattern overrides a type, and a later "
                "rule overrides an earlier one"
            )


def is_never_called(module: nn.Module) -> bool:
    """Return True for the last layer of `nn.MultiheadAttention`, which uses its weights without calling it."""
    return isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _holds_linear_layers(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.Linear) for inner in module.modules())


def _has_forward(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward


def _check_forwards_are_called(
    model: nn.Module, named: list[tuple[str, nn.Module]], deciding: Mapping[str, str]
) -> None:
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ValueError(
                "DataParallel runs copies of the model in its own threads, where no policy is active: use "
                "DistributedDataParallel"
            )
    modules = dict(named)
    for name, key in deciding.items():
        outer = modules.get(name.rpartition(".")[0])
        if isinstance(outer, nn.MultiheadAttention) and name.endswith("out_proj") and _rank(key) > 0:
            raise ValueError(
                f"modules[{key!r}] names {name!r}, whose forward torch.nn.MultiheadAttention never calls: write the "
                "rule for the attention module"
            )


def _agree_on_shared_modules(policy: Policy, named: list[tuple[str, nn.Module]], deciding: dict[str, str]) -> None:
    """Give all names of a module the rule that decides one of them."""
    for names_of_one in _names_by_module(named).values():
        keys = [deciding[name] for name in names_of_one if name in deciding]
        if len(names_of_one) == 1 or not keys:
            continue
        rank = max(map(_rank, keys))
        first, *others = (key for key in keys if _rank(key) == rank)
        for key in others:
            if policy.modules[key] != policy.modules[first]:
                raise ValueError(
                    f"{' and '.join(map(repr, names_of_one))} are the same module, but modules[{first!r}] = "
                    f"{policy.modules[first]!r} contradicts modules[{key!r}] = {policy.modules[key]!r}"
                )
        deciding.update(dict.fromkeys(names_of_one, first))


def _names_by_module(named: list[tuple[str, nn.Module]]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, module in named:
        names.setdefault(id(module), []).append(name)
    return names
