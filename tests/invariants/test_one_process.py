"""Scripts of one process under `castwise.install`: of each that breaks an invariant, that one is named; of the correct
ones nothing is reported but notes."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import castwise
from castwise.monitor import InvariantRecord
from castwise.monitor._run_files import read_runs

BROKEN = sorted((Path(__file__).parent / "scripts").glob("*.py"), key=lambda path: path.name)
CORRECT = sorted((Path(__file__).parent / "correct").glob("*.py"), key=lambda path: path.name)


def broken_in(script: Path, out: Path, **options: Any) -> list[InvariantRecord]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        castwise.install(out, **options)
        try:
            runpy.run_path(str(script))
        finally:
            castwise.uninstall()
    return [record for run in read_runs([out]) for record in run.invariants]


@pytest.fixture(autouse=True)
def _without_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page, which takes longer than the scripts."""
    monkeypatch.setattr("castwise.report._summary.write_report", lambda runs, page, **_: page)


@pytest.mark.parametrize("script", BROKEN, ids=lambda path: path.stem)
def test_the_invariant_that_a_script_breaks_is_named_and_no_other(script: Path, tmp_path: Path) -> None:
    expected, _, last = script.read_text().splitlines()[0].removeprefix("# broken: ").partition(" by step ")
    found = broken_in(script, tmp_path)
    assert {record.name for record in found if record.severity == "warning"} == {expected}
    assert all(record.step <= int(last or 21) for record in found)  # at the second check


@pytest.mark.parametrize("script", CORRECT, ids=lambda path: path.stem)
def test_correct_scripts_break_none(script: Path, tmp_path: Path) -> None:
    assert [record for record in broken_in(script, tmp_path) if record.severity != "note"] == []


SAVED = """
import torch
from torch.distributed import checkpoint as folders

torch.manual_seed(0)
path, resumes, fault = {path!r}, {resumes}, {fault!r}
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
def load_folder():
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    other = torch.optim.AdamW(model.parameters(), lr=0.0)
    other.step()
    other.zero_grad()
    state = {{**other.state_dict(), "param_groups": optimizer.state_dict()["param_groups"]}}
    checkpoint = {{"model": {{k: v.clone() for k, v in model.state_dict().items()}}, "optimizer": state}}
    folders.load(checkpoint, checkpoint_id=path)
    return checkpoint
if resumes:
    checkpoint = torch.load(path) if path.endswith(".pt") else load_folder()
    if fault != "weights":
        model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if fault == "averages":
        for state in optimizer.state.values():
            state["exp_avg_sq"].zero_()
for _ in range(6 if resumes else 200):
    x = torch.randn(256, 8)
    (model(x).squeeze(1) - 3.0 * x.sum(1)).square().mean().add(0.5).backward()
    optimizer.step()
    optimizer.zero_grad()
if not resumes:
    checkpoint = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    if path.endswith(".pt"):
        torch.save(checkpoint, path)
    else:
        folders.save(checkpoint, checkpoint_id=path)
"""


def test_a_run_that_resumes_continues_the_loss_and_the_averages_of_the_run_that_saved_its_file(tmp_path: Path) -> None:
    path, script = tmp_path / "checkpoint.pt", tmp_path / "script.py"

    def apart(*, resumes: bool = True, fault: str = "") -> list[str]:
        script.write_text(SAVED.format(path=str(path), resumes=resumes, fault=fault))
        found = broken_in(script, tmp_path / "runs", on_nonfinite="diagnose")
        return [record.text for record in found if record.name == "resumed-apart"]

    assert apart(resumes=False) == []
    assert apart() == []
    (recorded,) = (tmp_path / "runs").glob("*/saved_files.jsonl")
    with recorded.open("a") as file:  # which no reader is to trust
        file.write(
            f'[\n{"[" * 100_000}\n{{"size": 1e999, "loss": null, "averages": {{}}, "step": 1e999}}\n{{}}\n\x00\n"'
        )
    (loss,) = apart(fault="weights")
    assert re.match(r"the loss of the 3 steps up to 3 is at least \d+ sigmas above the 0\.5\d* that it was", loss)
    assert re.search(r"when checkpoint.pt was saved, after step 200 of \d{8}-\S+\.$", loss)
    (averages,) = apart(fault="averages")
    assert averages.startswith("at step 1, exp_avg_sq of AdamW has the norm 0, and had ")
    (tmp_path / "copy.pt").write_bytes(path.read_bytes())
    path = tmp_path / "copy.pt"  # of which no run has recorded anything
    assert apart(fault="weights") == []
    path = tmp_path / "folder"  # of torch.distributed.checkpoint
    assert apart(resumes=False) == apart() == []
    (loss,) = apart(fault="weights")
    assert re.search(r"when folder was saved, after step 200 of \d{8}-\S+\.$", loss)
