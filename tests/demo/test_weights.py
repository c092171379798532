"""`castwise demo --weights bf16-split`: the pair, what is said of it, and that it is compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.demo.test_errors import Refusal, refusal

from castwise._user_error import UserError
from castwise.demo.comparison import verdicts
from castwise.demo.corpus import Corpus
from castwise.demo.gpt import EMULATED
from castwise.demo.ranks import Ranks
from castwise.demo.settings import BF16_SPLIT, CASTWISE, FP32, Settings, Training
from castwise.demo.training import Result, Trainer

if TYPE_CHECKING:
    from tests.demo.conftest import Demo

__all__ = ["refusal"]
CPU = torch.device("cpu")


def trainer(weights: str) -> Trainer:
    corpus = Corpus(bytes(n * n % 256 for n in range(5000)), EMULATED.context)
    training = Training("bf16", CASTWISE, EMULATED, 4, weights)
    return Trainer(training, corpus, CPU, seed=0, ranks=Ranks(None, CPU))


def trained(weights: str) -> Result:
    training = trainer(weights)
    for _ in range(4):
        training.step()
    return training.result()


def test_the_pair_is_compared_and_its_bytes_are_said(demo: Demo) -> None:
    code, stdout, stderr = demo.run(
        *("--weights", "bf16-split", "--data", demo.text, "--out", demo.out, "--steps", 2, "--device", "cpu")
    )
    assert (code, stderr) == (0, "")
    assert "bf16-split: bit-identical to fp32 weights: yes\n" in stdout
    (folder,) = demo.out.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    fp32, split = summary["results"]
    assert summary["identical"] == {"bf16-split": True}
    assert (fp32["weights"], split["weights"]) == ("fp32", "bf16-split")
    assert fp32["weights_sha256"] == split["weights_sha256"]
    rows = [line.split() for line in stdout.splitlines() if line.lstrip().startswith(("fp32 ", "bf16-split "))]
    assert [row[-1] for row in rows] == ["18.0", "yes"]
    assert [line["weights"] for line in demo.metrics(folder)] == ["fp32"] * 2 + ["bf16-split"] * 2
    assert not (folder / "report.html").exists()


def test_a_parameter_takes_18_bytes_in_fp32_and_about_14_split() -> None:
    assert trained(FP32).stored_bytes == pytest.approx(4 + 2 + 4 + 8, abs=0.1)
    assert trained(BF16_SPLIT).stored_bytes == pytest.approx(2 + 2 + 2 + 8, abs=0.2)


@pytest.mark.parametrize("name", ["weights_sha256", "losses_sha256"])
def test_other_weights_or_losses_are_a_difference(name: str) -> None:
    fp32, split = trained(FP32), trained(BF16_SPLIT)
    assert verdicts([fp32, split]) == {"bf16-split": True}
    assert verdicts([fp32, replace(split, **{name: "another"})]) == {"bf16-split": False}


def test_16_bit_weights_go_on_from_their_state_as_if_they_had_not_stopped() -> None:
    stopped, continued = trainer(BF16_SPLIT), trainer(BF16_SPLIT)
    stopped.step()
    stopped.step()
    continued.load_state_dict(stopped.state_dict())
    continued.step()
    continued.step()
    result, through = continued.result(), trained(BF16_SPLIT)
    assert (result.weights_sha256, result.losses_sha256) == (through.weights_sha256, through.losses_sha256)
    assert math.isfinite(result.loss)


def test_other_weights_are_refused(refusal: Refusal) -> None:
    assert refusal("--weights", "bf16") == "--weights must be one of fp32, bf16-split, got 'bf16'"


def test_several_processes_are_refused(demo: Demo) -> None:
    settings = json.loads((demo.prepare(1, 1) / "settings.json").read_text())
    with pytest.raises(UserError, match="trains in one process: leave out --strategy"):
        Settings(**{**settings, "weights": BF16_SPLIT, "strategy": "ddp"})
