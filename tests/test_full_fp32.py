"""References run in full fp32, whatever the program has set, and its settings are put back."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import backends, nn

import castwise
from castwise import Policy
from castwise._full_fp32 import full_fp32, full_fp32_products, is_reduced, programs_fp32
from castwise._recipes import quantized_linear
from castwise.diagnosis._fp32_rerun import ranges_in_float32

CUDNN: Any = backends.cudnn
MKLDNN: Any = backends.mkldnn
OPS = (backends.cuda.matmul, CUDNN.conv, CUDNN.rnn, MKLDNN.matmul, MKLDNN.conv, MKLDNN.rnn)


def older() -> list[Any]:
    """The settings of the older interface; a class of error where it is inconsistent with the newer one."""
    values: list[Any] = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: backends.cudnn.allow_tf32,
    ):
        try:
            values.append(read())
        except RuntimeError as error:
            values.append(type(error))
    return values


def settings() -> list[Any]:
    return [*(op.fp32_precision for op in (backends, CUDNN, MKLDNN, *OPS)), *older()]


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def high_and_a_convolution() -> None:
    torch.set_float32_matmul_precision("high")
    MKLDNN.conv.fp32_precision = "bf16"


def everything() -> None:
    backends.fp32_precision = "tf32"  # type: ignore[attr-defined]


def of_one_backend() -> None:
    CUDNN.fp32_precision = "tf32"
    CUDNN.rnn.fp32_precision = "ieee"
    MKLDNN.set_flags(None, None, None, "bf16")


def both_interfaces() -> None:
    torch.set_float32_matmul_precision("high")
    MKLDNN.matmul.fp32_precision = "bf16"
    backends.cuda.matmul.fp32_precision = "tf32"
    CUDNN.conv.fp32_precision = "ieee"


def nothing() -> None:
    pass


PROGRAMS = [medium, high_and_a_convolution, everything, of_one_backend, both_interfaces, nothing]


def reset() -> None:
    backends.fp32_precision = CUDNN.fp32_precision = "none"  # type: ignore[attr-defined]
    MKLDNN.set_flags(None, None, None, "none")
    torch.set_float32_matmul_precision("highest")
    for op in OPS:
        op.fp32_precision = "none"
    backends.cudnn.allow_tf32 = True


FROZEN = "__allow_nonbracketed_mutation_flag"  # False after `torch.backends.disable_global_flags()`, for ever


@pytest.fixture(autouse=True)
def defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(
        backends.flags_frozen.__globals__, FROZEN, True
    )  # other tests of this process may have called it
    reset()  # other tests of this process may have changed them
    before = settings()
    yield
    reset()
    assert settings() == before


@pytest.mark.parametrize("program", PROGRAMS)
def test_ops_compute_in_full_fp32_and_settings_are_put_back(program: Callable[[], None]) -> None:
    program()
    before = settings()
    with full_fp32():
        assert {op.fp32_precision for op in OPS} <= {"ieee", "none"}
        if program is not both_interfaces:  # code that reads the older interface goes on
            assert older()[:1] == ["highest"]
        with programs_fp32():
            assert settings() == before
            with full_fp32():
                assert {op.fp32_precision for op in OPS} <= {"ieee", "none"}
            assert settings() == before
        assert {op.fp32_precision for op in OPS} <= {"ieee", "none"}
    assert settings() == before
    with pytest.raises(KeyboardInterrupt), full_fp32():
        raise KeyboardInterrupt
    assert settings() == before
    everything()
    after = [op.fp32_precision for op in OPS]
    with full_fp32():
        pass
    assert [op.fp32_precision for op in OPS] == after


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_that_may_not_be_assigned_to_are_changed_and_put_back(
    program: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program()
    before = settings()
    with monkeypatch.context() as frozen:
        frozen.setitem(backends.flags_frozen.__globals__, FROZEN, False)
        with full_fp32():
            assert {op.fp32_precision for op in OPS} <= {"ieee", "none"}
        assert settings() == before


def test_the_older_interface_can_be_read_while_a_reference_runs() -> None:
    for program in (nothing, medium, high_and_a_convolution):
        program()
        with full_fp32():
            assert older() == ["highest", False, False]
            with backends.cudnn.flags(enabled=True):
                pass


def test_what_was_set_for_everything_still_is_afterwards() -> None:
    everything()
    with full_fp32():
        pass
    backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
    assert MKLDNN.conv.fp32_precision == "ieee"


def test_a_release_that_warns_about_the_older_interface_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    medium()
    before, set_precision = settings(), torch.set_float32_matmul_precision

    def warning(precision: str) -> None:
        set_precision(precision)
        warnings.warn("Please use the new API settings", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch, "set_float32_matmul_precision", warning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with full_fp32():
            assert MKLDNN.matmul.fp32_precision == "ieee"
    assert settings() == before


def test_threads_may_leave_in_any_order() -> None:
    medium()
    before, entered, go_on = settings(), threading.Event(), threading.Event()

    def reference() -> None:
        with full_fp32():
            entered.set()
            go_on.wait(30)

    thread = threading.Thread(target=reference)
    with full_fp32():
        thread.start()
        entered.wait(30)
    assert {op.fp32_precision for op in OPS} <= {"ieee", "none"}
    go_on.set()
    thread.join()
    assert settings() == before


def test_reduced_precision_is_that_of_the_program_and_of_the_device() -> None:
    assert not is_reduced("cpu")
    MKLDNN.conv.fp32_precision = "bf16"
    with full_fp32():
        assert is_reduced("cpu")
    with full_fp32_products():
        assert MKLDNN.conv.fp32_precision == "bf16"
    backends.cudnn.allow_tf32 = False
    assert (is_reduced("cpu"), is_reduced("cuda"), is_reduced("xpu")) == (True, False, True)


# -- who computes references -----------------------------------------------------------------------------------------


class Model(nn.Module):
    """Keeps in which precision it runs, and with which settings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 8)
        self.seen: list[tuple[bool, bool, str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_in_region = torch.is_autocast_enabled("cpu")
        self.seen.append((is_in_region, torch.is_grad_enabled(), torch.get_float32_matmul_precision()))
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 64, generator=generator), torch.randint(8, (32,), generator=generator)) for _ in range(count)
    ]


POLICIES = {"bf16": Policy(compute="bfloat16"), "fp32": Policy(compute="float32")}
LOSS = nn.functional.cross_entropy


def test_compare_runs_the_reference_in_full_fp32_and_policies_with_the_settings_of_the_program() -> None:
    exact = castwise.compare(Model(), batches(2), POLICIES, loss=LOSS)
    medium()
    before, model = settings(), Model()
    drift = castwise.compare(model, batches(2), POLICIES, loss=LOSS)
    assert settings() == before
    assert {which for is_in_region, _, which in model.seen if is_in_region} == {"medium"}
    assert {which for is_in_region, _, which in model.seen if not is_in_region} == {"highest", "medium"}
    assert drift["bf16"].summary.reference_loss == exact["bf16"].summary.reference_loss
    assert exact["fp32"].summary.relative_loss_error == 0.0
    with full_fp32():
        outputs = model(batches(1)[0][0])
    is_reduced_here = not torch.equal(model(batches(1)[0][0]), outputs)  # some CPUs have no such kernels
    introduced = [module.introduced for module in drift["fp32"].modules if module.introduced is not None]
    assert any(errors.relative_rms > 0 for errors in introduced) is is_reduced_here


def test_a_policy_as_the_reference_has_the_settings_of_the_program() -> None:
    medium()
    model = Model()
    castwise.compare(model, batches(1), {"fp32": POLICIES["fp32"]}, loss=LOSS, reference=POLICIES["bf16"])
    assert {which for _, _, which in model.seen} == {"medium"}


def test_tune_finds_the_losses_of_its_reference_in_full_fp32() -> None:
    medium()
    before, model = settings(), Model()
    castwise.tune(model, batches(2), loss=LOSS, formats=("bfloat16", "float32"))
    assert settings() == before
    first, others = model.seen[:2], model.seen[2:]
    assert [which for _, _, which in first] == ["highest"] * 2
    assert {which for is_in_region, _, which in others if is_in_region} == {"medium"}


def test_an_error_in_the_reference_puts_settings_back() -> None:
    medium()
    before = settings()

    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert torch.get_float32_matmul_precision() == "highest"
        raise OSError("no loss")

    with pytest.raises(OSError, match="no loss"):
        castwise.compare(Model(), batches(1), POLICIES, loss=fails)
    assert settings() == before


def test_diagnose_reruns_ops_in_full_fp32() -> None:
    medium()
    seen: list[str] = []

    def op(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return tensor * 2

    op._schema = torch.ops.aten.relu.default._schema  # type: ignore[attr-defined]
    op.tags = ()  # type: ignore[attr-defined]
    ranges_in_float32(op, (torch.ones(3, dtype=torch.bfloat16),), {})
    assert seen == ["highest"]
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("recipe", ["mxfp8", "float8_rowwise"])
def test_an_emulated_recipe_computes_in_full_fp32(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    product = quantized_linear._mm

    def noting(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return product(left, right)

    monkeypatch.setattr(quantized_linear, "_mm", noting)
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(256, 256)
        bound = Policy(compute="float32", modules={"": recipe}, backend="emulated").bind(layer)
        with castwise.autocast("cpu", policy=bound):
            output = layer(x)
        output.square().sum().backward()
        return [output.detach(), *(param.grad for param in layer.parameters() if param.grad is not None)]

    expected = run()
    medium()
    for ours, exact in zip(run(), expected, strict=True):
        assert torch.equal(ours, exact)
    assert seen == ["highest"] * 4  # the output and the gradient of the weight, in both runs
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.gpu
def test_a_reference_on_a_gpu_is_not_rounded_to_tf32() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).cuda()
    exact = (x.double() @ x.double()).cpu()
    errors = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        errors.append(((x @ x).double().cpu() - exact).abs().max().item())
        with full_fp32():
            errors.append(((x @ x).double().cpu() - exact).abs().max().item())
        errors.append(((x @ x).double().cpu() - exact).abs().max().item())
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors[1] < 1e-3
    if torch.cuda.get_device_capability() >= (8, 0):  # where there are units for TF32
        assert errors[0] == errors[2] > 4 * errors[1]
