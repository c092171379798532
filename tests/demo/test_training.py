from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from castwise.demo import hardware
from castwise.demo.corpus import Corpus
from castwise.demo.gpt import EMULATED, GPT
from castwise.demo.hardware import emulated_precisions
from castwise.demo.interrupt import StopOnInterrupt
from castwise.demo.memory import PeakMemory
from castwise.demo.ranks import Ranks
from castwise.demo.settings import CASTWISE, TORCH, Training
from castwise.demo.training import Trainer, digest

CPU = torch.device("cpu")


def trainer(library: str, precision: str = "fp16") -> Trainer:
    corpus = Corpus(bytes(n * n % 256 for n in range(5000)), EMULATED.context)
    return Trainer(Training(precision, library, EMULATED, steps=4), corpus, CPU, seed=0, ranks=Ranks(None, CPU))


def overflow_next(training: Trainer) -> None:
    """Raise the scale far above the largest fp16 number."""
    state = training.state_dict()
    state["scaler"]["scale"] = 2.0**40
    training.load_state_dict(state)


@pytest.mark.parametrize("library", [TORCH, CASTWISE])
def test_skipped_steps_are_counted_and_leave_the_weights_alone(library: str) -> None:
    overflowing = trainer(library)
    overflow_next(overflowing)
    before = {name: weight.clone() for name, weight in overflowing.state_dict()["model"].items()}
    steps = [overflowing.step() for _ in range(3)]
    assert [step.skipped for step in steps] == [1, 2, 3]
    assert [step.scale for step in steps] == [2.0**39, 2.0**38, 2.0**37]
    assert overflowing.result().skipped == 3
    for name, weight in overflowing.state_dict()["model"].items():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_libraries_see_the_same_batches_and_end_with_the_same_bits(precision: str) -> None:
    rivals = [trainer(library, precision) for library in (TORCH, CASTWISE)]
    losses = [[rival.step().loss for _ in range(4)] for rival in rivals]
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(5.545, abs=0.1)  # ln 256: nothing is known before the first step
    assert losses[0][3] < losses[0][0]
    results = [rival.result() for rival in rivals]
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].loss == results[1].loss


def test_a_trainer_goes_on_from_its_state_as_if_it_had_not_stopped() -> None:
    through, stopped, continued = trainer(CASTWISE), trainer(CASTWISE), trainer(CASTWISE)
    for each in (through, stopped):
        overflow_next(each)
    expected = [through.step() for _ in range(4)][3]
    stopped.step()
    stopped.step()
    continued.load_state_dict(stopped.state_dict())
    assert continued.steps_done == 2
    continued.step()
    step = continued.step()
    assert step.skipped > 0
    assert replace(step, seconds=0) == replace(expected, seconds=0)
    assert continued.result().weights_sha256 == through.result().weights_sha256


def test_the_digest_tells_apart_what_equality_does_not() -> None:
    model = GPT(EMULATED)
    bias = model.head.bias
    with torch.no_grad():
        bias.zero_()
        positive = digest(model.state_dict())
        bias.neg_()
    assert torch.equal(bias, torch.zeros_like(bias))
    assert digest(model.state_dict()) != positive


def test_no_byte_sees_the_bytes_after_it() -> None:
    model = GPT(EMULATED)
    tokens = torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20:] = 255
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert difference[:20].max() < 1e-6
    assert difference[20:].min() > 1e-4


def test_a_precision_many_times_slower_than_fp32_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: 0.6, torch.float16: 20.0}
    monkeypatch.setattr(hardware, "_matmul_seconds", seconds.__getitem__)
    assert emulated_precisions(CPU) == ["fp16"]
    assert emulated_precisions(torch.device("cuda")) == []


def test_a_busy_machine_does_not_hide_that_a_precision_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        under_load = emulated_precisions(CPU)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert under_load == emulated_precisions(CPU)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux keeps a mark that can be reset")
def test_the_peak_of_a_resumed_training_is_that_of_all_its_processes() -> None:
    first = trainer(CASTWISE)
    first.step()
    state = first.state_dict()
    assert state["peak_bytes"] >= 0
    resumed = trainer(CASTWISE)
    resumed.load_state_dict(state | {"peak_bytes": 2**40})
    resumed.step()
    assert resumed.result().peak_bytes == 2**40


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux keeps a mark that can be reset")
def test_the_peak_is_that_since_the_start_and_outlives_what_caused_it() -> None:
    before = torch.ones(2**26)
    del before
    peak = PeakMemory(CPU)
    temporary = torch.ones(2**24)
    del temporary
    assert peak.read() == pytest.approx(2**26, rel=0.1)


def test_ctrl_c_asks_first_and_insists_the_second_time() -> None:
    previous = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is previous
