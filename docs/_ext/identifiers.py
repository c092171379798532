"""`{keywords}` and `{face}`: every public name of castwise and of torch.amp, with a link to its documentation.

Names come from the modules themselves, links from the `auto...` directives in `docs/reference`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from generated import directive
from sphinx.application import Sphinx

import castwise

REFERENCE = Path(__file__).parents[1] / "reference"
_MODULE = re.compile(r"^\.\. (?:py:|auto)module:: (castwise[\w.]*)", re.M)
_DIRECTIVE = re.compile(r"^\.\. auto(?:class|exception|function|data):: (castwise[\w.]*)", re.M)
_EXCLUDED = re.compile(r"^\.\. autoclass:: (castwise[\w.]*)\n(?:   :.*\n)*?   :exclude-members: (.*)", re.M)
_WITH_PARTS = re.compile(r"^\.\. autoclass:: (castwise[\w.]*)\n   :inherited-members:", re.M)

OURS = [
    *("castwise.cuda", "castwise.cpu"),
    *("castwise", "castwise.amp", "castwise.amp.autocast_mode", "castwise.amp.grad_scaler"),
    *("castwise.policies", "castwise.schedules", "castwise.monitor", "castwise.report", "castwise.diagnosis"),
    *(
        "castwise.checking",
        "castwise.comparison",
        "castwise.tuning",
        "castwise.tracing",
        "castwise.policy",
        "castwise.weights",
    ),
    *("castwise.master_weights", "castwise.distributed.fsdp", "castwise.cuda.amp", "castwise.cpu.amp"),
    *("castwise.cuda.amp.autocast_mode", "castwise.cuda.amp.grad_scaler", "castwise.cuda.amp.common"),
    *("castwise.cpu.amp.autocast_mode", "castwise.cpu.amp.grad_scaler"),
    "castwise.distributed.fsdp.sharded_grad_scaler",
    *(
        f"castwise.integrations.{name}"
        for name in ("accelerate", "lightning", "mlflow", "pytorch_lightning", "transformers", "wandb")
    ),
]
TORCHS = [
    *("torch.amp", "torch.amp.autocast_mode", "torch.amp.grad_scaler"),
    *("torch.cuda.amp", "torch.cuda.amp.autocast_mode", "torch.cuda.amp.grad_scaler", "torch.cuda.amp.common"),
    *("torch.cpu.amp", "torch.cpu.amp.autocast_mode", "torch.cpu.amp.grad_scaler"),
    "torch.distributed.fsdp.sharded_grad_scaler",
]


def public_names(module: ModuleType) -> list[str]:
    """Return a module's public names: `__all__`, and without it or in torch, also the names defined in AMP modules."""
    names = set(getattr(module, "__all__", ()))
    if not names or module.__name__.startswith("torch."):
        made_by = re.compile(rf"{re.escape(module.__name__)}$|torch\..*\b(amp|sharded_grad_scaler)\b")
        names |= {name for name, value in vars(module).items() if made_by.match(str(getattr(value, "__module__", "")))}
    return sorted(name for name in names if not name.startswith("_") and not inspect.ismodule(getattr(module, name)))


def members(found: Any) -> list[str]:
    """Return a class's public methods and properties, including those inherited within the same package."""
    if not inspect.isclass(found):
        return []
    package = found.__module__.partition(".")[0]
    left_out = set().union(*(internal().get(id(base), ()) for base in found.__mro__))
    return sorted(
        {
            name
            for base in found.__mro__
            if base.__module__.partition(".")[0] == package
            for name, value in vars(base).items()
            if not name.startswith("_")
            and name not in left_out
            and (inspect.isroutine(value) or isinstance(value, property))
        }
    )


def fields(found: Any) -> list[str]:
    """Return the fields of a dataclass or named tuple, or the members of an enum; the docstring describes them."""
    if not inspect.isclass(found):
        return []
    if dataclasses.is_dataclass(found):
        return [field.name for field in dataclasses.fields(found) if not field.name.startswith("_")]
    if issubclass(found, enum.Enum):
        return list(found.__members__)
    return list(found._fields) if issubclass(found, tuple) and hasattr(found, "_fields") else []


def places() -> dict[int, str]:
    """Return, by object id, the name under which the reference documents the object."""
    found = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for name in _DIRECTIVE.findall(page.read_text()):
            module, _, last = name.rpartition(".")
            found[id(getattr(import_module(module), last))] = name
    return found


def modules() -> set[str]:
    """Return the modules that have a page in the reference."""
    return {name for page in REFERENCE.glob("*.md") for name in _MODULE.findall(page.read_text())}


@functools.cache
def _with_parts() -> set[str]:
    """Return the classes that the reference documents with their inherited members."""
    return {name for page in REFERENCE.glob("*.md") for name in _WITH_PARTS.findall(page.read_text())}


@functools.cache
def internal() -> dict[int, set[str]]:
    """Return, by class id, the members that the class's page omits because only other packages call them."""
    found = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for name, left_out in _EXCLUDED.findall(page.read_text()):
            module, _, last = name.rpartition(".")
            found[id(getattr(import_module(module), last))] = set(left_out.split(", "))
    return found


def owner(member: str, found: Any, where: dict[int, str]) -> Any:
    """Return the class under which the reference documents a member; None if there is none."""
    made_by = next(base for base in found.__mro__ if member in vars(base))
    wholes = (base for base in found.__mro__ if issubclass(base, made_by) and where.get(id(base)) in _with_parts())
    return made_by if id(made_by) in where else next(wholes, None)


def _place(found: Any, where: dict[int, str], member: str = "") -> str:
    if id(found) in where:
        return where[id(found)] + (member and f".{member}")
    raise LookupError(f"docs/reference has no page for {found!r}")


def _of_module(name: str, where: dict[int, str]) -> dict[str, str]:
    """Return the names in a module, each with its name in the reference."""
    module = import_module(name)
    counterpart = import_module(name.replace("torch", "castwise", 1)) if name.startswith("torch") else module
    found = {}
    for public in public_names(module):
        theirs, ours = getattr(module, public), getattr(counterpart, public)
        found[f"{name}.{public}"] = _place(ours, where)
        for member in members(theirs):
            made_by = owner(member, ours, where)
            found[f"{name}.{public}.{member}"] = _place(made_by, where, member) if made_by else _place(ours, where)
        found |= {f"{name}.{public}.{field}": _place(ours, where) for field in fields(theirs)}
    return found


def keywords() -> dict[str, str]:
    """Return every public name, by module, with the name in the reference that documents it.

    Raises:
        LookupError: A name has no page.
    """
    where, with_page = places(), modules()
    found = {"torch.autocast": _place(castwise.autocast, where), "torch.GradScaler": _place(castwise.GradScaler, where)}
    for module in (*OURS, *TORCHS):
        found |= _of_module(module, where)
        ours = module.replace("torch", "castwise", 1) if module.startswith("torch.") else module
        if ours not in with_page:
            raise LookupError(f"docs/reference has no page for {ours}")
        found[module] = ours
    for name in where.values():  # names that are documented but not in these modules
        found.setdefault(name, name)
        module, _, last = name.rpartition(".")
        documented = getattr(import_module(module), last)
        for member in members(documented):
            found.setdefault(f"{name}.{member}", f"{name}.{member}")
        for field in fields(documented):
            found.setdefault(f"{name}.{field}", name)
    for name in with_page:
        found.setdefault(name, name)
    return found


def index() -> str:
    """Return a table of names, sorted by their last part, so that every `unscale_` is listed under u."""
    by_last_part: dict[str, list[str]] = {}
    for name, place in sorted(keywords().items()):
        by_last_part.setdefault(name.rpartition(".")[2], []).append(f"{{py:obj}}`{name} <{place}>`")
    rows = sorted(by_last_part.items(), key=lambda row: row[0].lower())
    return "\n".join(["| | |", "|---|---|", *(f"| {last} | {' '.join(links)} |" for last, links in rows)])


def face() -> str:
    """Return a table of castwise's top-level names, each with the first sentence of its docstring."""
    where, with_page = places(), modules()
    lines = ["| | |", "|---|---|"]
    for name in castwise.__all__:
        found = getattr(castwise, name)
        sentence = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        place = f"castwise.{name}" if f"castwise.{name}" in with_page else _place(found, where)
        shown = f"{{py:obj}}`{place}`"
        lines.append(f"| {shown} | {sentence} |")
    return "\n".join(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("keywords", directive(index))
    app.add_directive("face", directive(face))
    return {"parallel_read_safe": True}
