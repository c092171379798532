"""Messages that programs match: castwise's warnings and errors begin with torch's, and are of torch's classes."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.forked import Python
from torch.amp.grad_scaler import OptState

import castwise
from castwise.amp import _torch_words as torch_words
from castwise.distributed.fsdp import sharded_grad_scaler

# What is provoked: of both libraries, by the same code.
TORCH = SimpleNamespace(amp=torch.amp, cuda=torch.cuda, cpu=torch.cpu)
TORCH.sharded = torch.distributed.fsdp.sharded_grad_scaler
CASTWISE = SimpleNamespace(amp=castwise.amp, cuda=castwise.cuda, cpu=castwise.cpu)
CASTWISE.sharded = sharded_grad_scaler


def optimizer(**kind: Any) -> torch.optim.Optimizer:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return torch.optim.Adam([param], **kind)


def scaler(library: Any, **keywords: Any) -> Any:
    made = library.amp.GradScaler("cpu", **keywords)
    made.scale(torch.ones(()))
    return made


def stepped(library: Any, *calls: str, **kind: Any) -> Any:
    made, adam = scaler(library), optimizer(**kind)
    for call in calls:
        getattr(made, call)(adam)
    return made


def with_fp16(library: Any) -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    scaler(library).unscale_(torch.optim.SGD([param]))


def with_fp16_sharded(library: Any) -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    set_sharded(library)._unscale_grads_(torch.optim.SGD([param]), ONE, torch.zeros(()), False)


class TakesScaler(torch.optim.SGD):
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        grad_scaler.unscale_(self)


def takes_scaler(library: Any) -> None:
    adam = optimizer()
    scaler(library).step(TakesScaler(adam.param_groups[0]["params"]))


def without_custom_fwd(library: Any) -> None:
    library.amp.custom_bwd(lambda ctx, grad: grad, device_type="cpu")(SimpleNamespace(_dtype=None), 1)


def entered(library: Any, **keywords: Any) -> None:
    with library.amp.autocast("cpu", **keywords):
        pass


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x


def scripted(library: Any) -> None:
    torch.jit.script(library.amp.autocast("cpu")(doubled))


def without_tensors(library: Any) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    sgd.param_groups[0]["params"] = [3]
    scaler(library)._unscale_grads_(sgd, torch.ones(()), torch.zeros(()), True)


def set_state(library: Any, **attributes: Any) -> Any:
    made = library.amp.GradScaler("cpu")
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def twice(library: Any, call: str, **kind: Any) -> None:
    made, adam = scaler(library), optimizer(**kind)
    getattr(made, call)(adam)
    getattr(made, call)(adam)


def unscaled_after_step(library: Any) -> None:
    made, adam = scaler(library), optimizer()
    made.step(adam)
    made.unscale_(adam)


def update_of(library: Any, new_scale: Any) -> None:
    stepped(library, "step").update(new_scale)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def sharded(library: Any, *calls: str, new_scale: Any = None) -> None:
    with one_rank():
        made, adam = set_sharded(library), optimizer()
        for call in calls:
            getattr(made, call)(adam)
        if new_scale is not None:
            made.update(new_scale)


ONE = torch.ones(())
PROVOCATIONS: dict[str, Callable[[Any], Any]] = {
    # regions
    "no device type": lambda library: library.amp.autocast(3),
    "no device": lambda library: library.amp.autocast("no device"),
    "no device, with a dtype": lambda library: library.amp.autocast("no device", dtype=torch.float16),
    "an empty device": lambda library: library.amp.autocast(""),
    "a device without autocast": lambda library: library.amp.autocast("meta"),
    "a device without autocast, with a dtype": lambda library: library.amp.autocast("fpga", dtype=torch.float16),
    "availability on no device": lambda library: library.amp.is_autocast_available("no device"),
    "cuda": lambda library: library.amp.autocast("cuda"),
    "cuda in bfloat16": lambda library: library.amp.autocast("cuda", dtype=torch.bfloat16),
    "deprecated cuda": lambda library: library.cuda.amp.autocast(),
    "float64": lambda library: library.amp.autocast("cpu", dtype=torch.float64),
    "float32 on xpu": lambda library: library.amp.autocast("xpu", dtype=torch.float32),
    "float32, deprecated": lambda library: library.cpu.amp.autocast(dtype=torch.float32),
    "enabled is no flag": lambda library: entered(library, enabled=1),
    "enabled is text": lambda library: entered(library, enabled="yes"),
    "cache_enabled is no flag": lambda library: entered(library, cache_enabled=1),
    "what cannot be called": lambda library: library.amp.autocast("cpu")(3),
    "a scripted function": scripted,
    "custom_fwd without a device type": lambda library: library.amp.custom_fwd(len, device_type=None),
    "custom_bwd without a device type": lambda library: library.amp.custom_bwd(len, device_type=3),
    "custom_bwd alone": without_custom_fwd,
    # scalers
    "a scaler without cuda": lambda library: library.amp.GradScaler(),
    "a deprecated scaler without cuda": lambda library: library.cuda.amp.GradScaler(),
    "a sharded scaler without cuda": lambda library: library.sharded.ShardedGradScaler(),
    "a growth factor of 1": lambda library: library.amp.GradScaler("cpu", growth_factor=1.0),
    "a growth factor in words": lambda library: library.amp.GradScaler("cpu", growth_factor="two"),
    "a backoff factor of 1": lambda library: library.amp.GradScaler("cpu", backoff_factor=1.0),
    "a backoff factor of 1, deprecated": lambda library: library.cpu.amp.GradScaler(backoff_factor=1.0),
    "a backoff factor of 1, sharded": lambda library: library.sharded.ShardedGradScaler("cpu", backoff_factor=1.0),
    "no loss": lambda library: scaler(library).scale(3.0),
    "no losses": lambda library: scaler(library).scale([ONE, 3.0]),
    "no loss among lazy ones": lambda library: list(scaler(library).scale(iter([ONE, 3.0]))),
    "no loss, sharded": lambda library: library.sharded.ShardedGradScaler("cpu").scale(3.0),
    "a tracker without a scale": lambda library: set_state(library, _growth_tracker=ONE).scale(ONE),
    "a scale without a tracker": lambda library: set_state(library, _scale=ONE).unscale_(optimizer()),
    "unscale_ before scale": lambda library: library.amp.GradScaler("cpu").unscale_(optimizer()),
    "step before scale": lambda library: library.amp.GradScaler("cpu").step(optimizer()),
    "update before scale": lambda library: library.amp.GradScaler("cpu").update(),
    "a check before scale": lambda library: library.amp.GradScaler("cpu")._check_inf_per_device(optimizer()),
    "update without a step": lambda library: scaler(library).update(),
    "unscale_ twice": lambda library: twice(library, "unscale_"),
    "step twice": lambda library: twice(library, "step"),
    "step twice, fused": lambda library: twice(library, "step", fused=True),
    "unscale_ after step": unscaled_after_step,
    "fp16 gradients": with_fp16,
    "a parameter that is no tensor": without_tensors,
    "an optimizer that takes the scaler": takes_scaler,
    "a new scale of two elements": lambda library: update_of(library, torch.ones(2)),
    "a new scale elsewhere": lambda library: update_of(library, torch.ones((), device="meta")),
    "a new scale with a gradient": lambda library: update_of(library, torch.ones((), requires_grad=True)),
    "a new scale, sharded": lambda library: set_sharded(library).update(torch.ones(2)),
    "a new scale of two elements, sharded": lambda library: sharded(library, "step", new_scale=torch.ones(2)),
    "a new scale elsewhere, sharded": lambda library: sharded(library, "step", new_scale=torch.ones((), device="meta")),
    "a new scale with a gradient, sharded": lambda library: sharded(
        library, "step", new_scale=torch.ones((), requires_grad=True)
    ),
    "update without a step, sharded": lambda library: set_sharded(library).update(),
    "unscale_ twice, sharded": lambda library: sharded(library, "unscale_", "unscale_"),
    "unscale_ after step, sharded": lambda library: sharded(library, "step", "unscale_"),
    "fp16 gradients, sharded": with_fp16_sharded,
    "ranks without a group": lambda library: set_sharded(library).step(optimizer()),
    "an empty state": lambda library: library.amp.GradScaler("cpu").load_state_dict({}),
    "a copy in an iteration": lambda library: copy.copy(stepped(library, "step")),
    "pickling in an iteration": lambda library: pickle.dumps(stepped(library, "unscale_")),
    "a replicator of meta": lambda library: library.sharded._GeneralMultiDeviceReplicator(ONE.to("meta")),
}

try:
    torch.autocast("cpu")(3)  # type: ignore[arg-type]
except TypeError:
    pass
else:  # torch 2.11 accepts what cannot be called
    del PROVOCATIONS["what cannot be called"]


def set_sharded(library: Any) -> Any:
    made = library.sharded.ShardedGradScaler("cpu")
    made.scale(ONE)
    return made


# What `castwise.install` tells of the programs here, and torch of TorchScript.
OTHERS = (
    *("an optimizer trains parameters", "the monitor skipped", "castwise does not look for mistakes any more"),
    "`torch.jit.script` is deprecated",
)


def outcome(library: Any, provoke: Callable[[Any], Any]) -> list[Any]:
    """The warnings (category, text, whether it names this file), and the error (class, text) if there is one."""
    error: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            provoke(library)
        except Exception as raised:
            error = [(type(raised), str(raised), True)]
    of_amp = [each for each in caught if not str(each.message).startswith(OTHERS)]
    return [
        (each.category, str(each.message), each.filename == __file__)
        for each in of_amp
        if each.category not in (castwise.MixedPrecisionMistake, DeprecationWarning)
    ] + error


def state() -> Any:
    switches = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return *switches, torch.is_autocast_cache_enabled(), nesting, list(warnings.filters)


def check(expected: list[Any], got: list[Any]) -> None:
    assert len(got) == len(expected), f"{got} is not {expected}"
    for (kind, text, _), (ours, our_text, names_the_line) in zip(expected, got, strict=True):
        assert issubclass(ours, kind)
        assert our_text.startswith(text)
        assert names_the_line


# An export node of torch's or TorchScript's deprecation is no message of mixed precision.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="provokes the messages of a machine without CUDA"),
]


@pytest.fixture(autouse=True)
def _torchs_region_is_left() -> Iterator[None]:
    """A region of torch's with a wrong flag stays half entered."""
    enabled, dtype, nesting = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), state()[-2]
    yield
    for _ in range(nesting, state()[-2], -1):
        torch.autocast_increment_nesting()
    for _ in range(nesting, state()[-2]):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(True)


@pytest.mark.parametrize("name", PROVOCATIONS)
def test_what_torch_says_castwise_says_first(name: str) -> None:
    expected = outcome(TORCH, PROVOCATIONS[name])
    assert expected, "torch says something"
    before = state()
    check(expected, outcome(CASTWISE, PROVOCATIONS[name]))
    assert state() == before


@pytest.mark.parametrize("name", PROVOCATIONS)
def test_it_is_torchs_where_castwise_is_installed(name: str) -> None:
    expected = outcome(TORCH, PROVOCATIONS[name])
    with castwise.installed():
        check(expected, outcome(TORCH, PROVOCATIONS[name]))


LEFT_OUT = {
    "fast_dtype must not be None": "TorchScript alone leaves out the dtype, and compiles torch's region",
    "Current CUDA Device does not support bfloat16": "test_a_gpu_without_bfloat16",
    "message": "test_backends_without_a_list_of_dtypes",
    "error_message": "before torch 2.13, the check of macOS is reached only for dtypes that were refused before",
    "_scale should not be None": "made in the line before",
    "_scale is None in": "checked by the call before",
    "Expected _scale": "checked by the call before",
    "_get_scale_async returned None": "asked only if there is a scale",
    "Closure use is not currently supported": "castwise supports it: see the differences",
    "No inf checks were recorded for this optimizer": "castwise steps: see the differences",
    "Expected supported device": "castwise scales on every device: see the differences",
}
"""Messages of torch's that no provocation brings about, by how they begin, with the reason or the test that does."""


def messages_of(module: Any) -> dict[tuple[str, int], tuple[str, range]]:
    """The raised errors, assertions with a text, and warnings in a module of torch's, by file and line."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
        elif isinstance(node, ast.Assert) and node.msg is not None:
            text = node.msg
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            text = node.args[0]
        else:
            continue
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        found[module.__file__, node.lineno] = re.sub("^[(]*f?['\"]", "", ast.unparse(text)), lines
    return found


def test_every_message_of_torchs_is_provoked_or_left_out_for_a_reason() -> None:
    modules = [torch.amp.autocast_mode, torch.amp.grad_scaler, TORCH.sharded, torch.cuda.amp.common]
    modules += [
        sys.modules[f"torch.{device}.amp.{of}"] for device in ("cpu", "cuda") for of in ("autocast_mode", "grad_scaler")
    ]
    messages = {place: message for module in modules for place, message in messages_of(module).items()}
    files, reached = {file for file, _ in messages}, set()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for provoke in PROVOCATIONS.values():
            outcome(TORCH, provoke)
    finally:
        sys.settrace(before)
    silent = [
        text for (file, _), (text, lines) in messages.items() if not any((file, line) in reached for line in lines)
    ]
    assert [text for text in silent if not text.startswith(tuple(LEFT_OUT))] == []
    assert len(messages) - len(silent) > 20


def test_a_sharded_scaler_scales_on_every_device() -> None:
    loss = torch.ones((), device="meta")
    with pytest.raises(AssertionError, match="Expected supported device, got meta"):
        TORCH.sharded.ShardedGradScaler("cpu").scale(loss)
    assert CASTWISE.sharded.ShardedGradScaler("cpu").scale(loss).device.type == "meta"


class Backend:
    """A device module, of which a function is missing."""


@pytest.mark.parametrize("module", [None, Backend])
def test_backends_without_a_list_of_dtypes(module: Any, tmp_path: Path) -> None:
    (tmp_path / "regions.py").write_text(f"""
import torch, castwise
module = {module and 'type("module", (), {})()'}
torch.utils.rename_privateuse1_backend("ours")
if module is not None:
    torch._register_device_module("ours", module)
errors = []
for region in (torch.autocast, castwise.autocast):
    try:
        region("ours")
    except AssertionError as error:
        errors.append(error)
theirs, ours = errors
assert str(ours).startswith(str(theirs)) and isinstance(ours, RuntimeError), ours
assert "get_amp_supported_dtype" in str(theirs)
try:
    torch.autocast("ours", enabled=False)
except AssertionError:  # although it needs nothing of the backend
    assert not castwise.autocast("ours", enabled=False)._enabled
else:
    raise SystemExit("torch is right now")
""")
    process = Python([tmp_path / "regions.py"])
    assert (process.communicate()[1], process.returncode) == ("", 0)


def test_a_gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    provoke = PROVOCATIONS["cuda in bfloat16"]
    expected = outcome(TORCH, provoke)
    assert [each[0] for each in expected] == [RuntimeError]
    check(expected, outcome(CASTWISE, provoke))


def test_an_error_is_of_both_classes_under_the_name_of_ours() -> None:
    with pytest.raises(AssertionError) as caught:
        castwise.GradScaler("cpu", growth_factor=0.5)
    assert isinstance(caught.value, ValueError)
    assert type(caught.value).__name__ == "ValueError"
    copied = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copied, ValueError)
    assert isinstance(copied, AssertionError)
    assert str(copied) == str(caught.value)


def test_without_an_error_of_torchs_there_are_castwises_words_alone() -> None:
    ours = ValueError("growth_interval must be an integer in [1, 2**63), got 0")
    assert torch_words.error(ours, lambda: None) is ours
    with pytest.raises(ValueError, match=f"^{ours}".replace("[", r"\[").replace(")", r"\)").replace("**", r"\*\*")):
        castwise.GradScaler("cpu", growth_interval=0)


def test_the_warnings_of_other_threads_are_left_alone() -> None:
    """To catch a warning changes the filters of the process, and forgets which warnings were shown."""
    seen: list[object] = []

    class Filters(list[Any]):
        def insert(self, *_: Any) -> None:
            seen.append("changed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "filters", Filters())
        patch.setattr(warnings, "catch_warnings", lambda *_, **__: seen.append("caught"))
        thread = threading.Thread(target=torch_words.warning_of_region, args=("ours", "cuda", torch.float16))
        thread.start()
        thread.join()
    assert not seen
    assert torch_words.warning_of_region("ours", "cpu", torch.float64).endswith("ours")


def test_a_step_that_is_refused_changes_nothing() -> None:
    made, adam = scaler(CASTWISE), optimizer()
    made.step(adam)
    weights = [param.clone() for group in adam.param_groups for param in group["params"]]
    records = dict(made._iteration.records)
    for call in (made.step, made.unscale_):
        with pytest.raises(RuntimeError):
            call(adam)
    assert made._iteration.records == records
    assert made._per_optimizer_states[id(adam)]["stage"] is OptState.STEPPED
    assert all(map(torch.equal, weights, adam.param_groups[0]["params"]))
