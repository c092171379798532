"""`Policy`: which module and which op runs in which precision, as a value that can be compared, hashed and stored.

A policy holds names only. `bind` looks them up in a model and in the installed torch, and raises for unknown names.
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
from castwise._notebook import in_notebook
from castwise._recipes.recipe import BACKENDS, RECIPES
from castwise._recipes.recipe import named as recipe_named
from castwise._suggestions import listed, nearest
from castwise.policy._bound_policy import BoundPolicy, bind
from castwise.policy._module_rules import spelled

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_COMPUTE = ("float16", "bfloat16", "float32")
_MODULE_RULES = (*_COMPUTE, "inherit", "exclude", *RECIPES)
_IN_PLACE = ("raise", "cast")
_LARGEST = 2**20  # bytes of a file


class FrozenRules(Mapping[str, str]):
    """An immutable, hashable mapping whose order matters: later patterns override earlier ones."""

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
        return FrozenRules, (tuple(self.items()),)  # string hashes differ between processes

    def __repr__(self) -> str:
        return repr(self._dict)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The precision of a model's modules and ops, for `castwise.autocast(..., policy=policy.bind(model))`.

    A dtype is one of the names `"float16"`, `"bfloat16"` and `"float32"`, or a `torch.dtype`. Modules and ops without a
    rule run as in `torch.autocast` with the dtype `compute`.

    A module rule applies while the module's forward runs, including when activation checkpointing reruns it.
    Submodules follow it unless they have a rule themselves. Its value is one of:

    * `"float16"`, `"bfloat16"`: run as in a nested autocast region of that dtype that does not cache casts of weights.
    * `"float32"`: turn autocast and op rules off, and cast floating-point arguments (except fp64) to fp32, including
      those in tuples, lists, dicts and dataclasses. Changes that the module makes to lists and dicts reach the caller.
      In-place writes to a tensor that was cast do not.
    * `"exclude"`: the same, but without `in_place`. The module runs as if there were no policy.
    * `"inherit"`: run as outside the module, to exempt it from a wider pattern.
    * an 8-bit or 4-bit recipe, for the `nn.Linear` that the key matches, or for those inside the module it matches:
      `"float8_tensorwise"`, `"float8_rowwise"`, `"float8_rowwise_with_gw_hp"`, `"float8_blockwise"`, `"mxfp8"` or
      `"nvfp4"`. The output and both gradients are products of operands quantized by the recipe. Operands and results
      have the surrounding dtype, and the weight is unchanged. A `"?"` after the recipe leaves layers that cannot use it
      in the surrounding dtype.

    Where autocast is off, outputs of modules and ops that a rule ran in low precision are cast to fp32.

    The key of a module rule is a qualified name or a glob of names (`"blocks.*.norm"`; `*` also matches dots); `"re:"`
    and a regular expression for the whole name; a module type; or `"type:"` and a glob of type names (`"type:*Norm*"`),
    which also matches base classes. `"last:"` and a glob of type names, as in `"last:Linear"`, is the last registered
    module of these types that has a weight with two or more dimensions. Names do not include wrappers (DDP, FSDP,
    `torch.compile`, checkpointing). A name overrides a pattern, a pattern overrides a type or a `"last:"`, and a later
    rule overrides an earlier one. A key that begins with `"maybe:"` may match nothing.

    An op rule casts the arguments of an op to a dtype and runs it with autocast off. It applies to calls in the model's
    code (`x.softmax(-1)`, `torch.softmax` and `F.softmax` alike), except inside `"float32"` and `"exclude"` modules. It
    does not apply to in-place or `out=` variants, nor to the internals of torch functions. If a function rather than a
    module is checkpointed, op rules for its own ops need `use_reentrant=False` and `BoundPolicy.checkpoint_contexts`.
    Without the latter torch raises; a reentrant checkpoint reruns the ops without rules.

    Rules do not apply in a region that a module's own code opens. Do not checkpoint inside such a region if its dtype
    is `compute` and the module has a rule with another dtype: the checkpoint is rerun with the module's rules, and
    torch raises, or computes wrong gradients with `use_reentrant=True`.

    A checkpoint around modules with rules causes a graph break in compiled code, unless
    `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint` is set.

    A policy is active only in the thread that entered the region.

    In inference on a CPU, torch runs `nn.TransformerEncoder`, `nn.TransformerEncoderLayer` and `nn.MultiheadAttention`
    as one fused op. Under autocast its values and dtype differ from those of the separate modules. A policy leaves the
    fused op alone unless a rule changes something inside such a module; then its submodules run separately.

    Args:
        compute: Dtype of the region; `"float32"` leaves autocast off except where a rule turns it on.
        modules: Dtypes by module.
        ops: Dtypes by op: `"softmax"`, `"torch.nn.functional.softmax"`, `"aten.softmax"`, `"linalg.norm"`, ...
        output: Dtype of the floating-point outputs (except fp64) of the bound model and of functions that the region
            decorates; None, the default, leaves them unchanged.
        in_place: `"cast"` casts a floating-point source to the destination's dtype in `index_put_`, `index_copy_`,
            `index_add_`, `index_reduce_`, `scatter_`, `scatter_add_`, `scatter_reduce_`, `masked_scatter_`, `put_` and
            `x[i] = y`. With `"raise"`, the default, torch raises if the dtypes differ.
        backend: The implementation of recipes. `"emulated"` runs anywhere: it quantizes, dequantizes and multiplies in
            fp32, or in bf16 where that is exact. `"torch"` uses `torch.nn.functional.scaled_mm`, and `"torchao"` uses
            torchao's `Float8Linear` (the extra `castwise[torchao]`); both support the first three recipes. `"auto"`,
            the default, uses torch's kernels on devices with units for the recipe. `"auto"` and `"torch"`, which has no
            kernels on CPUs before torch 2.12, warn once if they emulate.

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
                    f"modules[{key!r}] = {rule!r} can only be emulated, got backend={self.backend!r}, which supports "
                    f"{listed([name for name, recipe in RECIPES.items() if recipe.capability])}"
                )

    def bind(self, model: nn.Module) -> BoundPolicy:
        """Look up all names in a model and apply the rules to it. Bind again after adding or replacing modules.

        Binding the same model again returns the same object, but compares the names and types of all modules, so bind
        before a loop. Each module that a rule changes gets a `forward` attribute, which does nothing outside the
        policy's regions. Deep copies of the model also follow the policy; pickled copies do not. Call
        `BoundPolicy.unbind` before code that needs the original `forward`: `torch.jit.script`, `copy.copy`,
        `nn.DataParallel`.

        Raises:
            TypeError: `model` is not a `torch.nn.Module`.
            ValueError: A key matches no module; an op is unknown; rules contradict each other (for two spellings of an
                op or two names of one module, or others override a rule everywhere); FSDP gathers the weights of a
                module in a dtype other than the one it computes in; a rule would have no effect (`nn.DataParallel`, a
                `ScriptModule`, the `out_proj` of `nn.MultiheadAttention`); or a layer cannot use its recipe (its input
                and output sizes are not multiples of 16 or of the block, it is a convolution, or it has a custom
                forward).
            ImportError: The backend is "torchao", which is not installed.

        Warns:
            UserWarning: The backend "auto" emulates a recipe; once per process and recipe.
        """
        return bind(self, model)

    def explain(self, model: nn.Module, units: Iterable[Any] | None = None) -> str:
        """Print each module's type, number of own parameters, compute dtype, and the rule that decided the dtype.

        In a notebook, nothing is printed, because the notebook shows the result as a table.

        Args:
            model: The model, which is not changed. Raises the errors of `bind`.
            units: As for `fsdp`; adds a column with the dtype in which FSDP2 gathers the module's parameters.

        Returns:
            The text.
        """
        from castwise.policy import _explanation as explanation

        text = explanation.table(self, model, units)
        if not in_notebook():
            print(text)
        return text

    def fsdp(
        self, model: nn.Module, units: Iterable[Any], *, reduce_dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
        """Yield the modules for FSDP2 to shard, inner ones first, each with its mixed-precision policy:

        ```python
        for module, mp_policy in policy.fsdp(model, [nn.LayerNorm, Block]):
            fully_shard(module, mp_policy=mp_policy)
        ```

        The parameters of a unit are gathered in a low precision if all of them are used in it, that is, if all modules
        with parameters in the unit are linear layers and convolutions that compute in it. Otherwise they are gathered
        in their own dtype. Autocast does not cast the weights of norms and embeddings, so make norms separate units.
        Inputs are not cast, because the region casts them. The outputs of the model are cast to `output`.

        Args:
            model: The model. Raises the errors of `bind`.
            units: Keys, as in `modules`, such as module types. Each module that one matches becomes a unit.
            reduce_dtype: Dtype in which gradients are reduced over the ranks.
        """
        from castwise.policy import _fsdp_units as fsdp_units

        return fsdp_units.policies(self, model, units, reduce_dtype)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a file in the format of `to_file`, of at most 1 MiB.

        Args:
            path: A file whose name ends in `.toml` or `.json`.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not TOML or JSON, or not a policy; the message names the file.
            ModuleNotFoundError: The file is TOML, and on Python 3.10 the package `tomli` is not installed.
        """
        path = Path(path)
        kind, content = _kind(path), path.read_bytes()
        try:
            if len(content) > _LARGEST:
                raise ValueError(f"a policy file may have at most {_LARGEST:,} bytes, got {len(content):,}")
            text = content.decode("utf-8-sig")
            fields = json.loads(text, object_pairs_hook=_without_repeats) if kind == ".json" else _toml().loads(text)
            if not isinstance(fields, dict):
                raise ValueError(f"expected a table of fields, got {type(fields).__name__}")
            known = [field.name for field in dataclasses.fields(cls)]
            for name in fields:
                if name not in known:
                    raise ValueError(f"unknown field {name!r}: fields are {listed(known)}{nearest(name, known)}")
            if "compute" not in fields:
                raise ValueError("the field 'compute' is missing")
            return cls(**fields)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a file atomically.

        Args:
            path: A name that ends in `.toml` or `.json`. An existing policy is replaced.

        Raises:
            FileExistsError: The file exists and does not begin as those that this method writes.
            OSError: The file cannot be written.
            ValueError: The name has another ending.
        """
        path = Path(path)
        text = self._as_json() if _kind(path) == ".json" else self._as_toml()
        _files.replace(path, text.encode(), "a policy", is_policy)

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
        raise ValueError(f"{where} must be one of {listed(allowed)}, got {name!r}: recipes are only for nn.Linear")
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


def is_policy(head: bytes) -> bool:
    """Return True for the start of a file that `Policy.to_file` has written."""
    return head.startswith((b'compute = "', b'{\n  "compute": "'))


def _kind(path: Path) -> str:
    if path.suffix not in {".toml", ".json"}:
        raise ValueError(f"a policy file must end in .toml or .json, got {str(path)!r}")
    return path.suffix


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"a name occurs twice in: {listed(name for name, _ in pairs)}")
    return fields


def _toml() -> Any:
    for name in ("tomllib", "tomli"):  # the first since Python 3.11
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pass
    raise ModuleNotFoundError("Python 3.10 reads TOML only with the package tomli: pip install tomli, or use .json")


def _quoted(text: str) -> str:
    """Return a TOML string: the JSON string with U+007F escaped, which TOML requires."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
