"""What is deprecated in `torch.cuda.amp` and `torch.cpu.amp`: the same names, with torch's words, where torch warns."""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import castwise

NAMES = [
    *("cuda.amp.autocast", "cuda.amp.custom_fwd", "cuda.amp.custom_bwd", "cuda.amp.autocast_mode._cast"),
    *("cuda.amp.GradScaler", "cuda.amp.GradScaler.__init__"),
    *("cpu.amp.autocast", "cpu.amp.GradScaler", "cpu.amp.GradScaler.__init__"),
]


@pytest.mark.parametrize("name", NAMES)
def test_tools_find_torchs_message_where_torch_has_one(name: str) -> None:
    theirs, ours = operator.attrgetter(name)(torch), operator.attrgetter(name)(castwise)
    assert getattr(ours, "__deprecated__", None) == getattr(theirs, "__deprecated__", None)
    assert hasattr(ours, "__deprecated__") is (not name.endswith("GradScaler"))


def define_a_region(amp: Any) -> Any:
    class Derived(amp.autocast):  # type: ignore[misc]
        pass

    return Derived


def define_a_scaler(amp: Any) -> Any:
    class Derived(amp.GradScaler):  # type: ignore[misc]
        pass

    return Derived


USES: dict[str, Callable[[Any], Any]] = {
    "a region": lambda amp: amp.autocast(enabled=False),
    "a class of regions": define_a_region,
    "a region of such a class": lambda amp: silently(define_a_region, amp)(enabled=False),
    "a class of classes of regions": lambda amp: type("Derived", (silently(define_a_region, amp),), {}),
    "a scaler": lambda amp: amp.GradScaler(enabled=False),
    "a class of scalers": define_a_scaler,
    "a scaler of such a class": lambda amp: define_a_scaler(amp)(enabled=False),
    "no scaler": lambda amp: amp.GradScaler(1.0, 2.0, 3.0, 4, 5, 6),
    "decorators": lambda amp: hasattr(amp, "custom_fwd") and (amp.custom_fwd(len), amp.custom_bwd(len)),
    "casts": lambda amp: hasattr(amp.autocast_mode, "_cast") and amp.autocast_mode._cast([1], torch.float16),
}


def silently(function: Callable[[Any], Any], argument: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(argument)


def warnings_of(use: Callable[[Any], Any], amp: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(TypeError):
        warnings.simplefilter("always")
        use(amp)
    return caught


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("installed", ["", "installed", "installed with settings"])
def test_a_use_warns_where_torch_warns_and_begins_with_its_words(device: str, use: str, installed: str) -> None:
    torchs, ours = (getattr(library, device).amp for library in (torch, castwise))
    expected = warnings_of(USES[use], torchs)
    settings: dict[str, Any] = {"policy": castwise.Policy("bfloat16"), "schedule": castwise.schedules.Static()}
    with castwise.installed(**settings if "settings" in installed else {}) if installed else contextlib.nullcontext():
        got = warnings_of(USES[use], torchs if installed else ours)
    assert len(got) == len(expected)
    for warning, torchs_warning in zip(got, expected, strict=True):
        assert warning.category is torchs_warning.category is FutureWarning
        assert str(warning.message).startswith(str(torchs_warning.message))
        assert (warning.filename, warning.lineno) == (torchs_warning.filename, torchs_warning.lineno)


def test_the_uses_are_all_that_torch_warns_of() -> None:
    counts = {use: len(warnings_of(function, torch.cuda.amp)) for use, function in USES.items()}
    assert counts == {
        "a region": 1,
        "a class of regions": 1,
        "a region of such a class": 0,
        "a class of classes of regions": 1,
        "a scaler": 1,
        "a class of scalers": 0,
        "a scaler of such a class": 1,
        "no scaler": 1,
        "decorators": 2,
        "casts": 1,
    }


CODE = """
import torch
from {library}.cpu import amp as cpu_amp
from {library}.cuda import amp

with amp.autocast():
    pass
with cpu_amp.autocast():
    pass
amp.custom_fwd(len)
amp.custom_bwd(len)
amp.autocast_mode._cast(1, torch.float16)
amp.GradScaler()
cpu_amp.GradScaler.__init__
torch.amp.GradScaler()
"""


# Only what the deprecated names are made of is checked: all that torch imports takes half a minute.
NEAR = ("torch", "torch.amp.*", "torch.cpu.*", "torch.cuda.*", "castwise.*", "typing_extensions")
MYPY_INI = "[mypy]\nfollow_imports = skip\n" + "".join(f"[mypy-{name}]\nfollow_imports = normal\n" for name in NEAR)


@pytest.mark.text  # seconds of type checking, of what is written in decorators
def test_a_type_checker_reports_what_it_reports_for_torch(tmp_path: Path) -> None:
    for library in ("torch", "castwise"):
        (tmp_path / f"uses_{library}.py").write_text(CODE.format(library=library))
    (tmp_path / "mypy.ini").write_text(MYPY_INI)
    command = [sys.executable, "-m", "mypy", "--enable-error-code", "deprecated", "uses_torch.py", "uses_castwise.py"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    of_torch, of_castwise = (
        re.findall(rf"^uses_{library}.py:(\d+): error: .* is deprecated: ", printed, re.MULTILINE)
        for library in ("torch", "castwise")
    )
    assert of_torch == of_castwise
    assert len(of_castwise) >= 5, printed
    assert "is deprecated: use castwise.autocast('cuda', ...)" in printed


def test_signatures_are_still_those_of_the_classes() -> None:
    for name in NAMES:
        ours, theirs = (operator.attrgetter(name)(library) for library in (castwise, torch))
        parameters = [
            list(inspect.signature(each.__init__ if inspect.isclass(each) else each).parameters)
            for each in (ours, theirs)
        ]
        assert parameters[0] == parameters[1], name
