from __future__ import annotations

import sys

import pytest
import torch

from castwise._demo import hardware
from castwise._demo.corpus import Corpus
from castwise._demo.gpt import EMULATED, GPT
from castwise._demo.hardware import emulated_precisions
from castwise._demo.memory import PeakMemory
from castwise._demo.training import CASTWISE, MASTER_WEIGHTS, TORCH, Result, Trainer, Training

CPU = torch.device("cpu")


def trainer(library: str, precision: str = "fp16") -> Trainer:
    corpus = Corpus(bytes(n * n % 256 for n in range(5000)), EMULATED.context)
    return Trainer(Training(precision, library, EMULATED, steps=4), corpus, CPU)


def trained(library: str, precision: str = "fp16") -> Result:
    """The result of four steps."""
    run = trainer(library, precision)
    for _ in range(4):
        assert run.step() > 0
    return run.result()


@pytest.mark.parametrize("library", [TORCH, CASTWISE])
def test_skipped_steps_are_counted_and_leave_the_weights_alone(library: str) -> None:
    overflowing = trainer(library)
    overflowing.step()
    before = overflowing.result()
    scaler = overflowing._scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**40})  # far above the largest fp16 number
    skipped = []
    for _ in range(3):
        overflowing.step()
        skipped.append(overflowing.skipped)
    assert skipped == [1, 2, 3]
    after = overflowing.result()
    assert after.skipped == 3
    assert all(torch.equal(weight, before.weights[name]) for name, weight in after.weights.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_libraries_see_the_same_batches_and_end_with_the_same_bits(precision: str) -> None:
    theirs, ours = (trained(library, precision) for library in (TORCH, CASTWISE))
    assert ours.has_bits_of(theirs)
    assert ours.losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: nothing is known before the first step
    assert ours.losses[3] < ours.losses[0]
    assert ours.loss == theirs.loss


def test_precisions_are_told_apart() -> None:
    results = [trained(CASTWISE, precision) for precision in ("fp32", "bf16", "fp16")]
    assert len({result.loss for result in results}) == 3


def test_16_bit_weights_end_with_the_bits_of_fp32_weights_in_four_bytes_less() -> None:
    fp32, split = trained(CASTWISE, "bf16"), trained(MASTER_WEIGHTS, "bf16")
    assert split.has_bits_of(fp32)
    assert fp32.stored_bytes == pytest.approx(4 + 2 + 4 + 8, abs=0.1)
    assert split.stored_bytes == pytest.approx(2 + 2 + 2 + 8, abs=0.2)


def test_no_byte_sees_the_bytes_after_it() -> None:
    model = GPT(EMULATED)
    tokens = torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20:] = 255
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:20].max() < 1e-6
    assert difference[20:].min() > 1e-4


@pytest.mark.parametrize(("is_native", "emulated"), [(True, []), (False, ["bf16", "fp16"]), (None, ["bf16", "fp16"])])
def test_a_precision_without_known_units_is_emulated(
    is_native: bool | None, emulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "is_native_here", lambda dtype: is_native)
    assert emulated_precisions(CPU) == emulated
    assert emulated_precisions(torch.device("cuda")) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux keeps a mark that can be reset")
def test_the_peak_is_that_since_the_start_and_outlives_what_caused_it() -> None:
    before = torch.ones(2**26)
    del before
    peak = PeakMemory(CPU)
    temporary = torch.ones(2**24)
    del temporary
    assert peak.read() == pytest.approx(2**26, rel=0.1)
