"""`autocast`, entry by entry: what a region sets, what it puts back, and what it refuses."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import os
import pickle
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import castwise
from castwise.amp import autocast_mode
from castwise.amp.autocast_mode import autocast, autocast_decorator, is_autocast_available
from castwise.policy import BoundPolicy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def state() -> tuple[Any, ...]:
    """All of this thread's autocast state."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    devices = ("cpu", "cuda", "xpu")
    switches = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    return (*switches, torch.is_autocast_cache_enabled(), nesting)


@pytest.fixture(autouse=True)
def the_state_is_restored() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


def cpu() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def product_dtype() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_a_region_sets_all_four_switches_and_puts_them_back() -> None:
    before = state()
    with autocast("cpu", dtype=FP16, cache_enabled=False) as region:
        assert isinstance(region, autocast)
        assert cpu() == (True, FP16)
        assert state()[-2:] == (False, before[-1] + 1)
        assert product_dtype() is FP16
    assert state() == before
    assert product_dtype() is FP32


def test_regions_nest_in_every_mixture() -> None:
    with autocast("cpu", dtype=BF16):
        with autocast("cpu", dtype=FP16):
            assert product_dtype() is FP16
            with autocast("cpu", enabled=False):
                assert product_dtype() is FP32
                with autocast("cpu"):
                    assert product_dtype() is FP16, "the dtype defaults to the thread's present one"
            assert product_dtype() is FP16
        assert product_dtype() is BF16


def test_the_caches_switch_is_inherited_by_default() -> None:
    with autocast("cpu", cache_enabled=False), autocast("cpu"):
        assert not torch.is_autocast_cache_enabled()
        with autocast("cpu", cache_enabled=True):
            assert torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_cache_enabled()


def test_casts_are_kept_until_the_outermost_region_ends() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    x = torch.ones(2, 2)
    with autocast("cpu"):
        with autocast("cpu"):
            torch.mm(x, weight)
        weight.data.mul_(2)
        assert torch.mm(x, weight).sum().item() == 8.0, "the cast of the inner region is kept"
    with autocast("cpu"):
        assert torch.mm(x, weight).sum().item() == 16.0


@pytest.mark.parametrize("dtype", [BF16, FP16, None])
def test_one_region_entered_again_while_active_puts_back_what_torch_forgets(dtype: torch.dtype | None) -> None:
    before = state()
    theirs = torch.autocast("cpu", dtype=dtype)
    with theirs, theirs:
        pass
    assert torch.is_autocast_enabled("cpu"), "torch is right now; this test and the README can go"
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", before[0][1])
    ours = autocast("cpu", dtype=dtype)
    with ours, autocast("cpu", enabled=False), ours:
        with ours:
            assert cpu()[0]
        assert cpu()[0]
    assert state() == before


@pytest.mark.parametrize("region", [torch.autocast, autocast])
def test_casts_stay_if_the_function_that_clears_them_is_replaced(region: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    casts = []
    for _ in range(2):
        with region("cpu", dtype=BF16):
            casts.append((x @ weight).grad_fn.next_functions[1][0])
    clear()
    assert casts[0] is casts[1]


def test_one_region_shared_by_threads_gives_each_its_own_state_back() -> None:
    region = autocast("cpu", dtype=FP16)
    barrier = threading.Barrier(4)
    seen: list[Any] = []

    def work(outer: torch.dtype | None) -> None:
        with autocast("cpu", dtype=outer or BF16, enabled=outer is not None):
            before = cpu()
            for _ in range(20):
                barrier.wait()
                with region:
                    barrier.wait()
                    seen.append(cpu() == (True, FP16))
                barrier.wait()
                seen.append(cpu() == before)

    threads = [threading.Thread(target=work, args=(outer,)) for outer in (None, BF16, FP16, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 160
    assert region._entries == {}


def test_a_new_thread_starts_outside() -> None:
    seen: list[Any] = []
    with autocast("cpu"):
        thread = threading.Thread(target=lambda: seen.append(cpu()))
        thread.start()
        thread.join()
    assert seen == [(False, BF16)]


def test_a_decorated_function_runs_inside_and_is_still_itself() -> None:
    @autocast("cpu", dtype=FP16)
    def forward(x: torch.Tensor, *, twice: bool) -> Any:
        """Doc."""
        return cpu(), twice

    assert forward(torch.ones(1), twice=True) == ((True, FP16), True)
    assert forward.__doc__ == "Doc."
    assert list(inspect.signature(forward).parameters) == ["x", "twice"]
    assert autocast_decorator(autocast("cpu"), cpu)() == (True, BF16)
    assert autocast_decorator(torch.autocast("cpu"), cpu)() == (True, BF16)  # type: ignore[arg-type]  # it is as good


def test_a_decorated_function_that_calls_itself() -> None:
    @autocast("cpu", dtype=FP16)
    def depth(n: int) -> int:
        assert cpu() == (True, FP16)
        result = n if n == 0 else depth(n - 1) + 1
        assert cpu() == (True, FP16)
        return result

    assert depth(5) == 5


def test_what_cannot_be_called_cannot_be_decorated() -> None:
    with pytest.raises(TypeError, match=r"can decorate a function, got int; .*`with autocast\(...\):`"):
        autocast("cpu")(3)  # type: ignore[type-var]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_state_comes_back_after_an_exception(error: type[BaseException]) -> None:
    before = state()

    @autocast("cpu", dtype=FP16)
    def fail() -> None:
        with autocast("cpu", enabled=False, cache_enabled=False):
            raise error

    with pytest.raises(error):
        fail()
    assert state() == before


@pytest.mark.parametrize("ending", ["exhausted", "closed", "deleted", "thrown into"])
def test_the_state_comes_back_when_a_generator_ends(ending: str) -> None:
    before = state()

    def generate() -> Iterator[torch.dtype]:
        with autocast("cpu", dtype=FP16):
            yield product_dtype()
            yield product_dtype()

    generator = generate()
    assert next(generator) is FP16
    if ending == "exhausted":
        assert list(generator) == [FP16]
    elif ending == "closed":
        generator.close()
    elif ending == "deleted":
        del generator
    else:
        with pytest.raises(ValueError, match="x"):
            generator.throw(ValueError("x"))
    assert state() == before


def test_a_generator_closed_by_another_thread_leaves_that_threads_state_alone() -> None:
    def generate(region: Any) -> Iterator[None]:
        with region:
            yield

    def close_elsewhere(region: Any) -> tuple[Any, Any]:
        generator = generate(region)
        thread = threading.Thread(target=lambda: next(generator))
        thread.start()
        thread.join()
        with autocast("cpu", dtype=FP16):
            before = state()
            generator.close()
            return before, state()

    before, after = close_elsewhere(torch.autocast("cpu", dtype=BF16))
    assert after != before, "torch is right now"
    torch.autocast_increment_nesting()
    before, after = close_elsewhere(autocast("cpu", dtype=BF16))
    assert after == before


def test_a_region_cannot_be_left_before_it_was_entered() -> None:
    before = state()
    with pytest.raises(RuntimeError, match=r"^this autocast region was exited without being entered$"):
        autocast("cpu").__exit__(None, None, None)
    assert state() == before


def test_a_region_that_is_exited_twice_is_refused_because_casts_would_never_be_dropped_again() -> None:
    def exit_twice(region: Any) -> float:
        with region:
            pass
        region.__exit__(None, None, None)
        return output_after_zeroing()

    def output_after_zeroing() -> float:
        weight = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cpu"):
            torch.ones(2, 2) @ weight
        with torch.no_grad():
            weight.zero_()
        with torch.autocast("cpu"):
            return float((torch.ones(2, 2) @ weight).sum().detach())

    assert exit_twice(torch.autocast("cpu")) == 8.0, "torch is right now"
    torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
    with pytest.raises(RuntimeError, match=r"^this autocast region was exited without being entered$"):
        exit_twice(autocast("cpu"))
    assert output_after_zeroing() == 0.0


def test_every_setting_of_a_region_can_be_changed_until_it_is_entered_as_in_torch() -> None:
    def changed(region: Any) -> Any:
        region.fast_dtype, region._enabled, region._cache_enabled = FP16, False, False
        with region:
            return state()

    assert changed(autocast("cpu")) == changed(torch.autocast("cpu"))
    region = autocast("cpu")
    with pytest.raises(TypeError, match="cache_enabled must be a bool or None, got 3"):
        region._cache_enabled = 3
    assert region._cache_enabled is True
    with region:
        assert not any(hasattr(region, name) for name in ("prev", "prev_fastdtype", "prev_cache_enabled"))


# -- what is refused --------------------------------------------------------------------------------------------------

BAD = [
    (
        (torch.device("cpu"),),
        ValueError,
        "device_type must be a string such as 'cuda' or 'cpu', got device(type='cpu')",
    ),
    ((None,), ValueError, "device_type must be a string such as 'cuda' or 'cpu', got None"),
    (("vulkan",), RuntimeError, "torch has no autocast for device_type 'vulkan'"),
    (("warp drive",), RuntimeError, "torch has no autocast for device_type 'warp drive'"),
    (("cpu", "bfloat16"), TypeError, "dtype must be a torch.dtype such as torch.bfloat16, got 'bfloat16'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_arguments_that_make_no_region(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        autocast(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error), torch.autocast(*arguments):
            pass


def warned(region: Any, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = region(*arguments, **keywords)
    return made._enabled, made.fast_dtype, made.device, [(w.category, w.filename == __file__) for w in caught]


@pytest.mark.parametrize("name", ["enabled", "cache_enabled"])
@pytest.mark.parametrize("flag", [0, 1, "yes", torch.tensor(True)])
def test_flags_are_bools_before_anything_is_entered(name: str, flag: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a bool(, got| or None, got)"):
        autocast("cpu", **{name: flag})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_a_flag_that_is_true_but_no_bool_is_taken_where_the_region_is_disabled_anyway(dtype: torch.dtype) -> None:
    expected = warned(torch.autocast, "cpu", dtype, 1)
    assert warned(autocast, "cpu", dtype, 1) == expected
    assert expected[0] is False
    assert len(expected[3]) == 1


@pytest.mark.parametrize("dtype", [FP32, torch.float64, torch.int32, torch.complex64, BF16, FP16, None])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps", "hpu"])
def test_availability_and_dtypes_are_checked_as_torch_does(device: str, dtype: Any, enabled: bool) -> None:
    if not is_autocast_available(device):
        for region in (torch.autocast, autocast):
            with pytest.raises(RuntimeError):
                region(device, dtype, enabled)
        return
    expected = warned(torch.autocast, device, dtype, enabled)
    assert warned(autocast, device, dtype, enabled) == expected


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, None])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_is_asked_for_bfloat16(dtype: Any, enabled: bool, has_bf16: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    if enabled and dtype is BF16 and not has_bf16:
        with pytest.raises(RuntimeError):
            torch.autocast("cuda", dtype)
        with pytest.raises(RuntimeError, match=r"does not support torch\.bfloat16: use dtype=torch\.float16"):
            autocast("cuda", dtype)
    else:
        assert warned(autocast, "cuda", dtype, enabled) == warned(torch.autocast, "cuda", dtype, enabled)


def test_a_region_is_copied_and_pickled() -> None:
    region = autocast("cpu", dtype=FP16, cache_enabled=False)
    for twin in (copy.copy(region), copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with region, twin:
            assert (cpu(), torch.is_autocast_cache_enabled()) == ((True, FP16), False)
        assert cpu() == (False, BF16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_the_words_of_the_warnings() -> None:
    with pytest.warns(
        UserWarning, match=r"^CUDA is not available .*Disabling autocast\. The CPU has autocast\('cpu'\)$"
    ) as caught:
        autocast("cuda")
    assert [warning.filename for warning in caught] == [__file__]
    message = "autocast on 'cpu' supports torch.bfloat16, torch.float16, got torch.float32"
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        autocast("cpu", dtype=FP32)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps", "vulkan", "meta"])
def test_availability_is_what_torch_says(device: str) -> None:
    assert castwise.is_autocast_available(device) == torch.amp.is_autocast_available(device)


def test_an_unknown_backend_has_to_say_what_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise.amp._devices.custom_backend", lambda: "xpu")
    monkeypatch.setattr(torch, "xpu", object())
    with pytest.raises(RuntimeError, match="backend 'xpu' does not list the dtypes that it can autocast to: register"):
        autocast("xpu")
    backend = type("backend", (), {"get_amp_supported_dtype": staticmethod(lambda: [FP16])})
    monkeypatch.setattr(torch, "xpu", backend)
    assert autocast("xpu", dtype=FP16)._enabled
    with pytest.warns(UserWarning, match="supports torch.float16, got torch.bfloat16"):
        assert not autocast("xpu", dtype=BF16)._enabled


# -- TorchScript ------------------------------------------------------------------------------------------------------


def with_a_region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        inside = x @ x
        with torch.autocast("cpu", enabled=False):  # castwise's too, if it is installed
            off = inside.float() @ x
    return inside, off, x @ x


def with_a_deprecated_region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with castwise.cpu.amp.autocast():
        inside = x @ x
        with torch.cpu.amp.autocast(enabled=False):
            off = inside.float() @ x
    return inside, off, x @ x


TORCHS_DEPRECATED_REGION = torch.cpu.amp.autocast


def with_torchs_deprecated_region(x: torch.Tensor) -> torch.Tensor:
    with TORCHS_DEPRECATED_REGION():
        return x @ x


def with_cudas_region(x: torch.Tensor) -> torch.Tensor:
    with castwise.cuda.amp.autocast(dtype=torch.bfloat16):
        return x @ x


@pytest.fixture(params=["imported", "installed", "installed with a policy"])
def _use(request: pytest.FixtureRequest) -> Iterator[None]:
    policy = castwise.Policy(compute="bfloat16") if "policy" in request.param else None
    with contextlib.nullcontext() if request.param == "imported" else castwise.installed(policy=policy):
        yield


def scripted_anew(function: Callable[..., Any]) -> Any:
    """Script a function as in a new process."""
    torch.jit._state._clear_class_state()  # type: ignore[no-untyped-call]
    return torch.jit.script(function)


@pytest.mark.usefixtures("_use")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_regions_in_scripted_code_are_torchs() -> None:
    assert [y.dtype for y in scripted_anew(with_a_region)(torch.ones(2, 2))] == [BF16, FP32, FP32]


@pytest.mark.usefixtures("_use")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_deprecated_regions_in_scripted_code_are_torchs() -> None:
    try:
        scripted_anew(with_torchs_deprecated_region)
    except TypeError as error:
        assert sys.version_info >= (3, 13)
        pytest.skip(f"torch does not script its own: {error}")
    x = torch.ones(2, 2)
    assert [y.dtype for y in scripted_anew(with_a_deprecated_region)(x)] == [BF16, FP32, FP32]
    scripted = torch.jit.script(with_cudas_region)
    assert scripted(x).dtype is FP32
    assert "__torch__.torch.cuda.amp.autocast_mode.autocast = prim::CreateObject" in str(scripted.graph)


class DerivedRegion(castwise.autocast):
    """Has a name that TorchScript does not know, as a class derived from torch's has."""


def with_a_derived_region(x: torch.Tensor) -> torch.Tensor:
    with DerivedRegion("cpu", dtype=torch.bfloat16):
        return x @ x


def with_a_policy(x: torch.Tensor) -> torch.Tensor:
    with castwise.autocast("cpu", policy=None):
        return x @ x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_scripted_code_cannot_do_is_refused_and_does_not_run_in_fp32() -> None:
    with pytest.raises((RuntimeError, torch.jit.frontend.FrontendError)):
        torch.jit.script(with_a_derived_region)
    with pytest.raises(RuntimeError, match="Keyword argument policy unknown"):
        torch.jit.script(with_a_policy)
    with pytest.raises(RuntimeError, match=r"error: @autocast\(\) decorator is not supported in script mode$"):
        torch.jit.script(autocast("cpu")(with_a_region))


def test_the_name_in_scripted_code_is_that_of_torchs_classes_alone() -> None:
    """TorchScript reads the name of every class that it meets."""

    class Derived(castwise.autocast):
        pass

    assert not hasattr(Derived, "_jit_override_qualname")
    assert castwise.autocast._jit_override_qualname == "__torch__.torch.amp.autocast_mode.autocast"  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_is_made_as_under_torchs_region() -> None:
    linear, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    outputs = []
    for region in (torch.autocast, autocast):
        with region("cpu", cache_enabled=False), torch.no_grad():
            outputs.append(torch.jit.trace(linear, x)(x))
    assert outputs[0].dtype is outputs[1].dtype is BF16
    assert torch.equal(*outputs)


# -- policies, caches and backwards of a region ------------------------------------------------------------------------


MODEL = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))


def bound(**fields: Any) -> BoundPolicy:
    """A policy of a layer and a norm, which runs in fp32."""
    return castwise.Policy(**{"compute": "bfloat16", "modules": {"1": "float32"}, **fields}).bind(MODEL)


def dtypes() -> list[torch.dtype]:
    """Of what the layers return."""
    return [(y := MODEL[0](torch.ones(1, 4))).dtype, MODEL[1](y).dtype]


BF16, FP32 = torch.bfloat16, torch.float32


def test_a_policy_is_in_force_in_its_region_and_comes_back_after_one_within() -> None:
    outer, inner = bound(), bound(compute="float16", modules={"0": "float32"})
    with castwise.autocast("cpu", policy=outer):
        assert dtypes() == [BF16, FP32]
        with castwise.autocast("cpu", policy=inner):
            assert dtypes() == [FP32, FP32]
        assert dtypes() == [BF16, FP32]
        with castwise.autocast("cpu", dtype=BF16):
            assert dtypes() == [BF16, BF16], "no policy holds in a region without"
        assert dtypes() == [BF16, FP32]
    assert dtypes() == [FP32, FP32]
    outer.unbind()
    with pytest.raises(RuntimeError, match="bind"), castwise.autocast("cpu", policy=outer):
        pass


def test_a_decorated_function_returns_what_its_policy_says() -> None:
    policy = bound(output="float32")

    @castwise.autocast("cpu", policy=policy)
    def run(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    assert run(torch.ones(2, 2)).dtype is FP32
    assert castwise.autocast("cpu", dtype=BF16)(run.__wrapped__)(torch.ones(2, 2)).dtype is BF16  # type: ignore[attr-defined]  # of functools


def test_a_weight_cache_serves_regions_that_cast() -> None:
    layer = torch.nn.Linear(4, 4)
    cache = castwise.WeightCache(layer)
    for expected, options in ((0, {"enabled": False}), (2, {"dtype": BF16})):
        with torch.no_grad(), castwise.autocast("cpu", weight_cache=cache, **options):
            layer(torch.ones(1, 4))
        assert cache.report().refreshes == expected


class Extension:
    """One that says what it sees, and may fail."""

    def __init__(self, seen: list[Any], error: type[BaseException] | None = None) -> None:
        self.seen, self.error = seen, error

    def enter(self, region: Any) -> int:
        self.seen.append((cpu(), region._cache_enabled))
        if self.error is not None:
            raise self.error
        return len(self.seen)

    def leave(self, token: int) -> None:
        self.seen.append((token, cpu()))


def test_extensions_hold_where_the_switches_are_set_and_end_in_reverse_order() -> None:
    seen: list[Any] = []
    region = autocast("cpu", dtype=FP16, cache_enabled=False)
    region._extensions = (Extension(seen), Extension(seen))
    with pytest.raises(KeyboardInterrupt), region:
        raise KeyboardInterrupt
    assert seen == [((True, FP16), False)] * 2 + [(2, (True, FP16)), (1, (True, FP16))]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_extension_that_fails_leaves_nothing_entered(error: type[BaseException]) -> None:
    seen: list[Any] = []
    region = autocast("cpu", dtype=FP16)
    region._extensions = (Extension(seen), Extension(seen, error))
    before = state()
    with pytest.raises(error), region:
        pass
    assert (state(), region._entries) == (before, {})
    assert seen[2:] == [(1, (True, FP16))]


def test_a_region_knows_neither_policies_nor_weight_caches() -> None:
    tree = ast.parse(inspect.getsource(castwise.amp.autocast_mode))
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert "castwise.amp._observers" in imported
    assert not any(word in str(imported) for word in ("policy", "weight", "cast_floats"))


def entered_by(run: Any) -> list[tuple[str, str]]:
    """Return file and name of the functions of castwise that a call enters when it is warm."""
    run()
    root, entered = os.path.dirname(castwise.__file__), []

    def event(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            entered.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered


def test_a_plain_region_enters_eight_functions_in_two_files_at_most() -> None:
    def run() -> None:
        with autocast("cpu", dtype=BF16):
            pass

    entered = entered_by(run)
    assert len(entered) <= 8
    assert len({file for file, _ in entered}) <= 2
    assert ("__enter__", 1) in Counter(name for _, name in entered).items(), "what is counted is entered"


def test_a_region_that_was_entered_elsewhere_hides_no_error() -> None:
    region = castwise.autocast("cpu", dtype=BF16)
    thread = threading.Thread(target=region.__enter__)
    thread.start()
    thread.join()
    assert region.__exit__(ValueError, ValueError(), None) is False


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: castwise.autocast("cpu", policy=castwise.Policy("bfloat16")),
            TypeError,
            "policy must be a bound castwise.Policy or None, got Policy: write policy=policy.bind(model)",
        ),
        (
            lambda: castwise.autocast("cpu", policy="bf16"),
            TypeError,
            "policy must be a bound castwise.Policy or None, got str",
        ),
        (
            lambda: castwise.autocast("cpu", BF16, policy=bound()),
            ValueError,
            "a policy sets the dtype (bfloat16): leave out dtype=torch.bfloat16",
        ),
        (
            lambda: castwise.autocast("cpu")(3),
            TypeError,
            "autocast(...) can decorate a function, got int; to use it as a context manager, write "
            "`with autocast(...):`",
        ),
        (
            lambda: castwise.autocast("cpu", policy=bound())._cache_enabled,
            RuntimeError,
            "a compiled function enters a region with a policy that was created outside the function: "
            "create the region inside the function, or enter it outside",
        ),
    ],
)
def test_the_words_of_refusals(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"{re.escape(text)}$"):
        make()
    assert castwise.autocast("cpu", cache_enabled=False)._cache_enabled is False


def test_a_repr_shows_the_settings() -> None:
    region = castwise.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    assert repr(region) == "autocast('cpu', dtype=torch.bfloat16, enabled=True, cache_enabled=False)"
    model = torch.nn.Linear(2, 2)
    policy, cache = castwise.Policy("bfloat16"), castwise.WeightCache(model)
    shown = repr(castwise.autocast("cpu", policy=policy.bind(model), weight_cache=cache, cache_enabled=True))
    assert shown == f"autocast('cpu', policy=BoundPolicy({policy}), enabled=True, cache_enabled=True, weight_cache=...)"
    assert "enabled=False" in repr(castwise.autocast("cpu", enabled=False))
    assert "autocast object at" in repr(castwise.autocast.__new__(castwise.autocast))


# -- graphs of regions ------------------------------------------------------------------------------------------------


def product(x: torch.Tensor) -> torch.Tensor:
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        return x @ x


@pytest.mark.parametrize("ours", [False, True])
def test_a_graph_of_regions_runs_with_the_functions_of_either_library(ours: bool) -> None:
    graph = make_fx(product, pre_dispatch=True)(torch.ones(2, 2))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets[0] is torch.amp._enter_autocast
    assert targets[-1] is torch.amp._exit_autocast
    for node in graph.graph.nodes if ours else ():
        if node.op == "call_function" and hasattr(torch.amp, getattr(node.target, "__name__", "")):
            node.target = getattr(autocast_mode, node.target.__name__)
    graph.recompile()
    assert graph(torch.ones(2, 2)).dtype is BF16
    again = make_fx(graph, pre_dispatch=True)(torch.ones(2, 2))
    assert [node.target for node in again.graph.nodes if node.op == "call_function"] == targets
    assert again(torch.ones(2, 2)).dtype is BF16


def test_regions_that_are_entered_and_left_by_functions() -> None:
    for context in (contextlib.nullcontext(), torch.device("cpu")):
        with context:  # a mode sees the calls, as those of torch's functions
            region = autocast_mode._enter_autocast("cpu", FP16, True, False)
            assert type(region) is autocast_mode._UnmanagedAutocast
            assert (cpu(), torch.is_autocast_cache_enabled()) == ((True, FP16), False)
            autocast_mode._exit_autocast(region)
            assert cpu()[0] is False
