"""`Policy`: which module and which op runs in which precision, as a value that can be compared, hashed and stored.

A policy knows names only. `bind` looks them up in a model and in the running torch, and is where a name that is not
there is an error.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castwise import _files
from castwise._suggestions import listed, nearest
from castwise.policy.bound_policy import BoundPolicy, bind
from castwise.policy.module_rules import spelled
from castwise.recipes.recipe import BACKENDS, RECIPES
from castwise.recipes.recipe import named as recipe_named

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_COMPUTE = ("float16", "bfloat16", "float32")
_MODULE_RULES = (*_COMPUTE, "inherit", "exclude", *RECIPES)
_IN_PLACE = ("raise", "cast")
_LARGEST = 2**20  # bytes of a file


class FrozenRules(Mapping[str, str]):
    """An immutable, hashable mapping whose order counts: of two patterns for one module the later one decides."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._dict = dict(pairs)
        self._hash = hash(tuple(self._dict.items()))

    def __getitem__(self, name: str) -> str:
        return self._dict[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenRules) and list(self.items()) == list(other.items())

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return FrozenRules, (tuple(self.items()),)  # another process has other hashes

    def __repr__(self) -> str:
        return repr(self._dict)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The precision of a model's modules and ops, for `castwise.autocast(..., policy=policy.bind(model))`.

    A dtype is a name, `"float16"`, `"bfloat16"` or `"float32"`, or a `torch.dtype`. Modules and ops without a rule run
    as in `torch.autocast` with the dtype `compute`.

    A module rule holds while the module's forward runs, also when activation checkpointing runs it again. Inner modules
    follow it unless a rule names them. It is one of

    * `"float16"`, `"bfloat16"`: as in a nested autocast region of that dtype, which keeps no casts of weights;
    * `"float32"`: autocast and op rules are off, and floating-point arguments (fp64 excepted; tuples, lists, dicts and
      dataclasses are looked into) are cast to fp32. Lists and dicts that the module changes are changed for the caller,
      but what it writes in place to a tensor that was cast stays with the cast;
    * `"exclude"`: the same, and `in_place` does not hold either: the module runs as if there were no policy;
    * `"inherit"`: as outside the module, to exempt it from a wider pattern;
    * a recipe of 8 or 4 bits, for the `nn.Linear` that it names and for those inside what it names:
      `"float8_tensorwise"`, `"float8_rowwise"`, `"float8_rowwise_with_gw_hp"`, `"float8_blockwise"`, `"mxfp8"` or
      `"nvfp4"`. The output and both gradients are products of operands that are quantized as the recipe says. Operands
      and results are in the dtype around the layer, and the weight stays what it is. With a `"?"` behind it, layers
      that cannot take the recipe stay in the dtype around them.

    Where autocast is off, outputs of modules and ops that a rule ran in a low precision are cast to fp32.

    A module's key is its qualified name, which may be a glob (`"blocks.*.norm"`; `*` matches dots, too), `"re:"` and a
    regular expression for all of the name, a module type, or `"type:"` and a glob of type names (`"type:*Norm*"`, of
    the type or one it derives from). `"last:"` and such a glob, as in `"last:Linear"`, is the last module of those that
    was registered and has a weight of two or more dimensions. Names are those of the model without wrappers (DDP, FSDP,
    `torch.compile`, checkpointing). A name decides over a pattern, a pattern over a type or a `"last:"`, and a later
    rule over an earlier one. `"maybe:"` before a key lets it match nothing.

    An op rule runs an op on arguments cast to a dtype, with autocast off. It holds for calls that the model's code
    makes (`x.softmax(-1)`, `torch.softmax`, `F.softmax` alike) where `"float32"` and `"exclude"` do not hold, but not
    for variants that write in place or to `out=`, nor for what functions of torch do inside themselves. A function that
    is checkpointed, rather than a module, needs `use_reentrant=False` and `BoundPolicy.checkpoint_contexts` for its own
    ops: without the latter torch raises, and a reentrant checkpoint runs them again without rules.

    In a region that a module's own code begins, no rule holds. Make no checkpoint in there if the module has a rule of
    another dtype than `compute`, and the region the dtype of `compute`: it is run again with the rules of the modules
    in it. torch then raises an error, or with `use_reentrant=True` computes wrong gradients.

    A checkpoint around modules with rules breaks the graph of compiled code, unless
    `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint` is set.

    A policy is active in the thread that has entered the region.

    Torch runs `nn.TransformerEncoder`, `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` by one fused op in
    inference on a CPU, whose values and dtype under autocast are others than those of the modules one by one. A policy
    leaves that alone unless a rule changes something inside such a module, which then runs one by one.

    Args:
        compute: Dtype of the region; `"float32"` leaves autocast off where no rule says otherwise.
        modules: Dtypes by module.
        ops: Dtypes by op: `"softmax"`, `"torch.nn.functional.softmax"`, `"aten.softmax"`, `"linalg.norm"`, ...
        output: Dtype of the floating-point results (except fp64) of the bound model, and of functions that the region
            decorates; None, the default, leaves them.
        in_place: `"cast"` lets `index_put_`, `index_copy_`, `index_add_`, `index_reduce_`, `scatter_`, `scatter_add_`,
            `scatter_reduce_`, `masked_scatter_`, `put_` and `x[i] = y` write a floating-point source of another dtype:
            it is cast to the destination's. `"raise"`, the default, leaves the error to torch.
        backend: What computes recipes. `"emulated"` computes them anywhere: it quantizes, dequantizes and multiplies in
            fp32, or in bf16 where that is exact. `"torch"` uses `torch.nn.functional.scaled_mm`, and `"torchao"` its
            `Float8Linear` (the extra `castwise[torchao]`); both have the first three recipes. `"auto"`, the default,
            uses torch's kernels on devices with units for the recipe, and warns once where it emulates.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A dtype, `in_place` or `backend` is not one of those allowed, or the backend lacks a recipe.

    Example:
        >>> import castwise
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
        >>> policy = castwise.Policy(compute="bfloat16", modules={nn.LayerNorm: "float32"}, output="float32")
        >>> with castwise.autocast("cpu", policy=policy.bind(model)):
        ...     model(torch.ones(1, 4)).dtype
        torch.float32
        >>> text = policy.explain(model)
        module  type        parameters  computes in  decided by
        (root)  Sequential           0  bfloat16     compute
        0       Linear              20  bfloat16     compute
        1       LayerNorm            8  float32      type:torch.nn.modules.normalization.LayerNorm
        2       Linear              10  bfloat16     compute
        outputs: float32
    """

    compute: str
    modules: Mapping[Any, Any] = dataclasses.field(default_factory=FrozenRules)
    ops: Mapping[str, Any] = dataclasses.field(default_factory=FrozenRules)
    output: str | None = None
    in_place: str = "raise"
    backend: str = "auto"

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("compute", _dtype("compute", self.compute, _COMPUTE))
        put("modules", _rules("modules", self.modules, _MODULE_RULES))
        put("ops", _rules("ops", self.ops, _COMPUTE))
        if self.output is not None:
            put("output", _dtype("output", self.output, _COMPUTE))
        if self.in_place not in _IN_PLACE:
            raise ValueError(f"in_place must be one of {listed(_IN_PLACE)}, got {self.in_place!r}")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {listed(BACKENDS)}, got {self.backend!r}")
        for key, rule in self.modules.items():
            recipe = recipe_named(rule)
            if recipe and self.backend in ("torch", "torchao") and recipe.capability is None:
                raise ValueError(
                    f"modules[{key!r}] = {rule!r} is emulated alone, got backend={self.backend!r}: that runs "
                    f"{listed([name for name, each in RECIPES.items() if each.capability])}"
                )

    def bind(self, model: nn.Module) -> BoundPolicy:
        """Look up all names in a model. Bind again after adding or replacing modules.

        Binding the same model again returns the same object, but checks all names: bind before a loop, not in it. A
        module that a rule changes gets a `forward` attribute, which does nothing outside of the policy's regions; deep
        copies of the model follow the policy, too, and pickled ones do not. Take it off with `BoundPolicy.unbind` for
        what needs the module's own: `torch.jit.script`, `copy.copy`, `nn.DataParallel`.

        Raises:
            TypeError: `model` is not a `torch.nn.Module`.
            ValueError: A key matches no module, an op is unknown, rules contradict each other (two spellings of an op,
                two names of one module, a rule that others overrule everywhere), FSDP gathers the weights of a
                module in another dtype than it computes in, a rule could not hold (`nn.DataParallel`, a
                `ScriptModule`, the `out_proj` of `nn.MultiheadAttention`), or a layer cannot take its recipe (16, or
                the block, does not divide its inputs and outputs; it is a convolution; it has a forward of its own).
            ImportError: The backend is "torchao", and it is not installed.

        Warns:
            UserWarning: The backend "auto" emulates a recipe; once a process for each.
        """
        return bind(self, model)

    def explain(self, model: nn.Module, units: Iterable[Any] | None = None) -> str:
        """Print by module: type, its own parameters, dtype of its computation, and the rule that decided it.

        Args:
            model: As for `bind`, whose errors are raised. The model is not changed.
            units: As for `fsdp`: adds a column with the dtype in which FSDP2 gathers the module's parameters.

        Returns:
            What it prints.
        """
        from castwise.policy import explanation

        text = explanation.table(self, model, units)
        print(text)
        return text

    def fsdp(
        self, model: nn.Module, units: Iterable[Any], *, reduce_dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
        """Yield the modules for FSDP2 to shard, inner modules first and the model last, each with its mixed-precision
        policy:

        ```python
        for module, mp_policy in policy.fsdp(model, [nn.LayerNorm, Block]):
            fully_shard(module, mp_policy=mp_policy)
        ```

        The parameters of a unit are gathered in a low precision if all of them are used in that one: the unit's modules
        that have some are linear layers and convolutions which compute in it. Otherwise, as beside a norm or an
        embedding, whose weights autocast does not cast, they are gathered in their own dtype: make norms units of their
        own. Inputs stay as they are, since the region casts; the outputs of the model are cast to `output`.

        Args:
            model: As for `bind`, whose errors are raised.
            units: Keys, as in `modules`, of the modules that become a unit each, such as types of modules.
            reduce_dtype: Dtype in which gradients are reduced over the ranks.
        """
        from castwise.policy import fsdp_units

        return fsdp_units.policies(self, model, units, reduce_dtype)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a file, as `to_file` writes it, of at most 1 MiB.

        Args:
            path: A file whose name ends in `.toml` or `.json`.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not TOML or JSON, or not a policy; the text names the file.
            ModuleNotFoundError: Python 3.10 reads TOML only with the package `tomli`.
        """
        path = Path(path)
        kind, content = _kind(path), path.read_bytes()
        try:
            if len(content) > _LARGEST:
                raise ValueError(f"a policy has at most {_LARGEST:,} bytes, got {len(content):,}")
            text = content.decode("utf-8-sig")
            fields = json.loads(text, object_pairs_hook=_without_repeats) if kind == ".json" else _toml().loads(text)
            if not isinstance(fields, dict):
                raise ValueError(f"expected a table of fields, got {type(fields).__name__}")
            known = [field.name for field in dataclasses.fields(cls)]
            for name in fields:
                if name not in known:
                    raise ValueError(f"unknown field {name!r}, fields are {listed(known)}{nearest(name, known)}")
            if "compute" not in fields:
                raise ValueError("the field 'compute' is missing")
            return cls(**fields)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a file, whole or not at all.

        Args:
            path: A name that ends in `.toml` or `.json`; a file of that name is replaced.

        Raises:
            OSError: The file cannot be written.
            ValueError: The name ends otherwise.
        """
        path = Path(path)
        text = self._as_json() if _kind(path) == ".json" else self._as_toml()
        _files.replace(path, text.encode())

    def _fields(self) -> dict[str, Any]:
        return {
            field.name: dict(value) if isinstance(value, FrozenRules) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        }

    def _as_json(self) -> str:
        return json.dumps(self._fields(), indent=2) + "\n"

    def _as_toml(self) -> str:
        fields = self._fields()
        lines = [f"{name} = {_quoted(value)}" for name, value in fields.items() if isinstance(value, str)]
        for table, rules in fields.items():
            if isinstance(rules, dict) and rules:
                lines += ["", f"[{table}]", *(f"{_quoted(key)} = {_quoted(dtype)}" for key, dtype in rules.items())]
        return "\n".join(lines) + "\n"


def _dtype(where: str, value: object, allowed: tuple[str, ...]) -> str:
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if not isinstance(name, str):
        raise TypeError(f"{where} must be one of {listed(allowed)}, got {value!r}")
    is_recipe = recipe_named(name) is not None
    if is_recipe and allowed is not _MODULE_RULES:
        raise ValueError(f"{where} must be one of {listed(allowed)}, got {name!r}: recipes are for modules, nn.Linear")
    if name not in allowed and not is_recipe:
        raise ValueError(f"{where} must be one of {listed(allowed)}, got {name!r}{nearest(name, allowed)}")
    return name


def _rules(where: str, given: object, allowed: tuple[str, ...]) -> FrozenRules:
    if not isinstance(given, Mapping):
        raise TypeError(f"{where} must be a mapping, got {type(given).__name__}")
    rules: dict[str, str] = {}
    for key, value in given.items():
        name = spelled(key) if where == "modules" else key
        if not isinstance(name, str):
            raise TypeError(f"a key of {where} must be a string, got {key!r}")
        if name in rules:
            raise ValueError(f"{where} has two rules for {name!r}")
        rules[name] = _dtype(f"{where}[{name!r}]", value, allowed)
    return FrozenRules(rules.items())


def _kind(path: Path) -> str:
    if path.suffix not in {".toml", ".json"}:
        raise ValueError(f"a policy's file must end in .toml or .json, got {str(path)!r}")
    return path.suffix


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"a name is there twice: {listed(name for name, _ in pairs)}")
    return fields


def _toml() -> Any:
    for name in ("tomllib", "tomli"):  # the first since Python 3.11
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pass
    raise ModuleNotFoundError("Python 3.10 reads TOML only with the package tomli: pip install tomli, or use .json")


def _quoted(text: str) -> str:
    """Write a TOML string: JSON's, except that TOML wants U+007F escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
