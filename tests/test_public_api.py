"""Every public name with its signature, in one file, so that a change of the public API shows in its diff.

To write `public_api.txt` anew, run `python tests/test_public_api.py`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import castwise

RECORDED = Path(__file__).with_name("public_api.txt")
MODULES = [
    "castwise",
    *(
        "castwise.amp",
        "castwise.amp.autocast_mode",
        "castwise.amp.grad_scaler",
        "castwise.cuda.amp",
        "castwise.cpu.amp",
    ),
    *("castwise.cuda.amp.autocast_mode", "castwise.cuda.amp.grad_scaler", "castwise.cuda.amp.common"),
    *("castwise.cpu.amp.autocast_mode", "castwise.cpu.amp.grad_scaler"),
    *("castwise.distributed.fsdp", "castwise.distributed.fsdp.sharded_grad_scaler"),
    *("castwise.schedules", "castwise.policies", "castwise.policy", "castwise.weights", "castwise.master_weights"),
    *("castwise.tracing", "castwise.diagnosis", "castwise.comparison", "castwise.tuning", "castwise.checking"),
    *("castwise.monitor", "castwise.report"),
]
# Those of frameworks, which not every machine has.
INTEGRATIONS = [
    f"castwise.integrations.{name}"
    for name in ("accelerate", "lightning", "mlflow", "pytorch_lightning", "transformers", "wandb")
]


def signature(found: Any) -> str:
    if inspect.isclass(found) and issubclass(found, Enum):
        return ""  # differs between versions of Python
    try:
        text = re.sub(r"ForwardRef\(('[^']*')[^)]*\)", r"\1", str(inspect.signature(found)))  # of a named tuple
        return re.sub(r"(: |-> )(['\"])(.*?)\2(?=[,)\s]|$)", r"\1\3", text)
    except (TypeError, ValueError):
        return ""


def members(cls: type, listed: Mapping[int, str]) -> Iterator[str]:
    """The public members that castwise defines in a class, or in base classes that are not listed themselves."""
    bases = [
        base for base in reversed(cls.__mro__) if base.__module__.split(".")[0] == "castwise" and id(base) not in listed
    ]
    defined = {name: value for base in [*bases, cls] for name, value in vars(base).items() if name[0] != "_"}
    for name, value in sorted(defined.items()):
        function = getattr(value, "__func__", value)  # of a static or class method
        yield f"    {name}{signature(function) if inspect.isfunction(function) else ''}"


def entries(modules: Iterable[str]) -> Iterator[str]:
    listed: dict[int, str] = {}
    for module in map(importlib.import_module, modules):
        for name in sorted(module.__all__):
            found, path = getattr(module, name), f"{module.__name__}.{name}"
            if inspect.ismodule(found):
                continue
            if id(found) in listed:
                yield f"{path} is {listed[id(found)]}"
            elif inspect.isclass(found):
                bases = [listed[id(base)] for base in found.__mro__ if id(base) in listed]
                yield f"{path}{signature(found)}{' extends ' + bases[0] if bases else ''}"
                yield from members(found, listed)
            else:
                yield f"{path}{signature(found) if inspect.isroutine(found) else ''}"
            listed.setdefault(id(found), path)


def recorded(modules: list[str], others: list[str]) -> list[str]:
    """The lines of the file that belong to some modules and not to others, with those of members."""
    lines, is_wanted = [], False
    for line in RECORDED.read_text().splitlines():
        if not line.startswith(" "):
            module = max((name for name in [*modules, *others] if line.startswith(f"{name}.")), key=len)
            is_wanted = module in modules
        lines += [line] if is_wanted else []
    return lines


def test_the_public_api_is_the_recorded_one() -> None:
    assert list(entries(MODULES)) == recorded(MODULES, INTEGRATIONS)


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_an_integration_is_the_recorded_one(module: str) -> None:
    pytest.importorskip(module.rpartition(".")[2])
    assert list(entries([module])) == recorded([module], [*MODULES, *INTEGRATIONS])


def test_a_changed_signature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(castwise.report, "write_report", lambda runs, *, title: None)
    assert "castwise.report.write_report(runs, *, title)" in entries(["castwise.report"])


def test_every_public_module_is_listed() -> None:
    faces = {name for name in dir(castwise) if inspect.ismodule(getattr(castwise, name))}
    assert faces - {module.split(".")[1] for module in MODULES if "." in module} == {"integrations"}
    assert [f"castwise.integrations.{name}" for name in dir(castwise.integrations)] == INTEGRATIONS


if __name__ == "__main__":
    lines = [*entries(MODULES), *(line for module in INTEGRATIONS for line in entries([module]))]
    RECORDED.write_text("\n".join(lines) + "\n")
