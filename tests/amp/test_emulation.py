"""Which formats a CPU emulates, and the warning about it."""

from __future__ import annotations

import json
import linecache
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from tests.warm_python import executable

from castwise.amp import _emulation as emulation
from castwise.amp._emulation import has_native, is_native_here

BF16, FP16 = torch.bfloat16, torch.float16
X86 = platform.machine() in {"x86_64", "AMD64"}
HELD_TO_AVX2 = pytest.mark.skipif(not X86, reason="the environment makes only an x86 CPU forget its units")

ZEN4 = {"avx512_bf16": True, "amx_bf16": False, "avx512_fp16": False, "amx_fp16": False, "avx_ne_convert": False}
SKYLAKE = {**ZEN4, "avx512_bf16": False}
SAPPHIRE_RAPIDS = {**ZEN4, "amx_bf16": True, "avx512_fp16": True}
SIERRA_FOREST = {**SKYLAKE, "avx_ne_convert": True}
GRAVITON3 = {"bf16": True, "sve_bf16": True, "fp16_arith": True}
RASPBERRY_PI4 = {"bf16": False, "sve_bf16": False, "fp16_arith": False}


@pytest.mark.parametrize(
    ("capabilities", "limit", "bf16", "fp16"),
    [
        pytest.param(ZEN4, None, True, False, id="zen4"),
        pytest.param(ZEN4, "AVX512_CORE_BF16", True, False, id="zen4 with all it has"),
        pytest.param(ZEN4, "AVX512_CORE", False, False, id="zen4 held to AVX512"),
        pytest.param(ZEN4, "avx2", False, False, id="zen4 held to AVX2"),
        pytest.param(ZEN4, "DEFAULT", True, False, id="zen4 held to nothing"),
        pytest.param(SKYLAKE, None, False, False, id="skylake"),
        pytest.param(SAPPHIRE_RAPIDS, None, True, True, id="sapphire rapids"),
        pytest.param(SAPPHIRE_RAPIDS, "AVX512_CORE_BF16", True, False, id="sapphire rapids held to bf16"),
        pytest.param(SAPPHIRE_RAPIDS, "AVX512_CORE_AMX", True, True, id="sapphire rapids with AMX"),
        pytest.param(SIERRA_FOREST, None, None, None, id="sierra forest"),
        pytest.param(GRAVITON3, None, True, True, id="graviton3"),
        pytest.param(RASPBERRY_PI4, None, False, False, id="raspberry pi 4"),
        pytest.param({"architecture": "s390x"}, None, None, None, id="s390x"),
    ],
)
def test_units_by_cpu(capabilities: dict[str, Any], limit: str | None, bf16: bool | None, fp16: bool | None) -> None:
    assert has_native(BF16, capabilities, limit) is bf16
    assert has_native(FP16, capabilities, limit) is fp16


@pytest.mark.skipif(not X86 or sys.platform != "linux", reason="reads Linux' account of an x86 CPU")
def test_this_cpu_is_seen_as_linux_sees_it() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    for dtype, names in ((BF16, {"avx512_bf16", "amx_bf16"}), (FP16, {"avx512_fp16", "amx_fp16"})):
        if "avx_ne_convert" not in flags:
            assert has_native(dtype, torch.cpu.get_capabilities()) is bool(flags & names)


# Cases in a process where every CPU for which oneDNN has kernels emulates both formats.
CASES = """
import json, sys, threading, warnings
import torch, castwise
from castwise.amp import _emulation as emulation

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
fp32_but_one = castwise.Policy("float32", modules={"1": "float16"}).bind(model)
x = torch.ones(1, 2)

def twice():
    for _ in range(2):
        castwise.autocast("cpu", dtype=torch.float16)

def both():
    with castwise.autocast("cpu"), castwise.autocast("cpu", dtype=torch.float16):
        pass

def disabled():
    castwise.autocast("cpu", dtype=torch.float16, enabled=False)
    castwise.autocast("cpu", dtype=torch.float32)
    castwise.autocast("cuda", dtype=torch.float16)

def with_a_policy():
    castwise.autocast("cpu", policy=fp32_but_one)

def from_threads():
    for _ in range(2):
        thread = threading.Thread(target=twice)
        thread.start()
        thread.join()

def compiled():
    def forward(x):
        with castwise.autocast("cpu", dtype=torch.float16):
            return model(x)
    fast = torch.compile(forward, fullgraph=True, backend="eager")
    assert fast(x).dtype is fast(x.sin()).dtype is torch.float16
    torch.compiler.reset()
    assert fast(x).dtype is torch.float16

found = {}
for case in (compiled, twice, both, disabled, with_a_policy, from_threads):  # first where nothing was settled yet
    emulation.SETTLED.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case()
    found[case.__name__] = [
        (str(w.message), w.category.__name__, w.filename, w.lineno) for w in caught if "emulated" in str(w.message)
    ]
print(json.dumps(found))
"""


Warned: TypeAlias = dict[str, list[tuple[str, str, str, int]]]


@pytest.fixture(scope="module")
def warned() -> Warned:
    """What each case was warned of: text, category, file and line."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([executable(), "-c", CASES], env=environment, capture_output=True, text=True, check=True)
    found: Warned = json.loads(run.stdout)
    return found


@HELD_TO_AVX2
def test_a_region_that_is_compiled_first_warns_of_its_format(warned: Warned) -> None:
    ((text, _, _, _),) = warned["compiled"]
    assert "torch.float16" in text


@HELD_TO_AVX2
@pytest.mark.parametrize("case", ["twice", "with_a_policy", "from_threads"])
def test_the_first_region_warns_of_its_format_and_no_later_one(case: str, warned: Warned) -> None:
    ((text, category, _, _),) = warned[case]
    assert "torch.float16" in text
    assert ": its ops are emulated, often ten or more times slower than in torch.float32;" in text
    assert text.endswith("use torch.float32, or see `castwise doctor`")
    assert category == "UserWarning"


@HELD_TO_AVX2
def test_each_format_is_reported_once(warned: Warned) -> None:
    bf16, fp16 = (text for text, *_ in warned["both"])
    assert "torch.bfloat16" in bf16
    assert ": its ops are emulated, two to ten or more times slower than in torch.float32;" in bf16
    assert "torch.float16" in fp16
    assert ": its ops are emulated, often ten or more times slower" in fp16


@HELD_TO_AVX2
def test_it_is_said_when_the_environment_leaves_units_unused(warned: Warned) -> None:
    (text, *_), _ = warned["both"]
    if emulation.units(BF16, torch.cpu.get_capabilities()):
        assert text.startswith(
            "torch does not use this CPU's units for torch.bfloat16, because of ONEDNN_MAX_CPU_ISA=AVX2:"
        )
    else:
        assert text.startswith("this CPU has no units for torch.bfloat16:")


@HELD_TO_AVX2
def test_the_line_is_that_of_the_region(warned: Warned) -> None:
    ((_, _, file, line),) = warned["twice"]
    assert file == "<string>"
    assert CASES.splitlines()[line - 1].strip() == 'castwise.autocast("cpu", dtype=torch.float16)'


@HELD_TO_AVX2
def test_a_disabled_region_warns_of_nothing(warned: Warned) -> None:
    assert warned["disabled"] == []


def test_what_this_cpu_has_units_for_is_not_warned_of() -> None:
    script = "import castwise, torch; [castwise.autocast('cpu', dtype=d) for d in (torch.bfloat16, torch.float16)]"
    run = subprocess.run([sys.executable, "-W", "always", "-c", script], capture_output=True, text=True, check=True)
    emulated = [dtype for dtype in (BF16, FP16) if is_native_here(dtype) is False]
    assert run.stderr.count("are emulated") == len(emulated)
    assert all(f"{dtype}: its ops" in run.stderr or f"{dtype}, because" in run.stderr for dtype in emulated)


def test_without_onednn_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert is_native_here.__wrapped__(BF16) is is_native_here.__wrapped__(FP16) is None


@pytest.mark.parametrize(
    ("dtype", "capabilities", "limit", "native", "message"),
    [
        (
            FP16,
            ZEN4,
            None,
            {BF16: True, FP16: False},
            "this CPU has no units for torch.float16: its ops are emulated, often ten or more times slower than in "
            "torch.float32; use torch.bfloat16, or see `castwise doctor`",
        ),
        (
            BF16,
            SKYLAKE,
            None,
            {},
            "this CPU has no units for torch.bfloat16: its ops are emulated, two to ten or more times slower than in "
            "torch.float32; use torch.float32, or see `castwise doctor`",
        ),
        (
            BF16,
            ZEN4,
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
            {},
            "torch does not use this CPU's units for torch.bfloat16, because of ONEDNN_MAX_CPU_ISA=AVX2: its ops are "
            "emulated, two to ten or more times slower than in torch.float32; use torch.float32, or see "
            "`castwise doctor`",
        ),
    ],
)
def test_the_warning_says_why_and_what_to_do(
    dtype: torch.dtype,
    capabilities: dict[str, bool],
    limit: tuple[str, str] | None,
    native: dict[torch.dtype, bool],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emulation, "limit_of_onednn", lambda: limit)
    monkeypatch.setattr(emulation, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(emulation, "is_native_here", lambda dtype: native.get(dtype, False))
    assert emulation._message(dtype) == message


@pytest.mark.parametrize(("limit", "is_native"), [(None, True), ("AVX2", False), ("AVX512_CORE_BF16", True)])
def test_what_onednn_may_use_is_asked_of_the_environment(
    limit: str | None, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "get_capabilities", lambda: {"avx512_bf16": True})
    for name in emulation.LIMITS:
        monkeypatch.delenv(name, raising=False)
    if limit is not None:
        monkeypatch.setenv(emulation.LIMITS[-1], limit)
    assert is_native_here.__wrapped__(BF16) is is_native


@pytest.mark.parametrize("is_native", [True, False, None])
def test_the_first_line_outside_castwise_is_warned_of_what_is_emulated_once(
    is_native: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "SETTLED", set())
    monkeypatch.setattr(emulation, "is_native_here", lambda dtype: is_native)

    def region() -> None:
        emulation.warn_if_emulated(FP16)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            region()
    message = [(str(each.message), linecache.getline(each.filename, each.lineno).strip()) for each in caught]
    assert message == (
        [] if is_native is not False else [(emulation._message(FP16), "emulation.warn_if_emulated(FP16)")]
    )
