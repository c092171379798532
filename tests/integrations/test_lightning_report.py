"""`ReportCallback` in Lightning's Trainer: the record of a training and its report, however it ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.plugins.precision as of_trainer
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.integrations.lightning_training import (
    PRECISIONS,
    QUIET,
    SILENT,
    STEPS,
    Regression,
    batches,
    fit,
    ours,
    same,
    theirs,
)
from tests.integrations.test_lightning_optimizers import Pair

from castwise.integrations.lightning import ReportCallback
from castwise.monitor import Run

pytestmark = QUIET


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "fp16": (lambda: ours("16-mixed"), lambda: theirs("16-mixed")),
    "bf16": (lambda: ours("bf16-mixed"), lambda: theirs("bf16-mixed")),
    "lightning's bf16": (lambda: theirs("bf16-mixed"),) * 2,
    "lightning's fp32": (of_trainer.Precision,) * 2,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_is_recorded_and_not_changed(kind: str, tmp_path: Path) -> None:
    plugin, reference = (make() for make in KINDS[kind])
    watched = fit(plugin, callbacks=[ReportCallback(tmp_path, every=4)])
    assert same(watched["state_dict"], fit(reference)["state_dict"])
    recorded = Run.read(tmp_path)
    assert [step.step for step in recorded.steps] == list(range(1, STEPS + 1))
    skipped = {step.step for step in recorded.steps if step.skipped}
    assert [sample.step for sample in recorded.samples] == sorted({1, 2, 4, 8, 12} | skipped)
    assert recorded.ended
    assert "net.0" in (tmp_path / "report.html").read_text()
    if kind == "fp16":
        assert len(skipped) == watched["MixedPrecision"]["steps_skipped"] > 0


@pytest.fixture
def _sigint() -> Iterator[None]:
    """Puts back what Lightning turns off for good when it is interrupted."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint")
@pytest.mark.parametrize(
    ("error", "raised"), [(KeyError, KeyError), (KeyboardInterrupt, SystemExit)], ids=["fails", "is interrupted"]
)
def test_a_training_that_does_not_end_by_itself_has_its_report(
    error: type[BaseException], raised: type[BaseException], tmp_path: Path
) -> None:
    class Failing(pl.Callback):
        def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if trainer.global_step == 3:
                raise error

    with pytest.raises(raised):
        fit(ours("16-mixed"), callbacks=[ReportCallback(tmp_path), Failing()])
    assert len(Run.read(tmp_path).steps) == 3
    assert Run.read(tmp_path).ended
    assert (tmp_path / "report.html").is_file()


def test_a_training_that_fails_before_its_first_step_fails_with_its_own_error(tmp_path: Path) -> None:
    class Failing(Regression):
        def on_fit_start(self) -> None:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fit(ours("16-mixed"), Failing(), callbacks=[ReportCallback(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_training_goes_on_in_the_record(precision: str, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(ours(precision), data=batches(5), enable_checkpointing=True, callbacks=[saving, ReportCallback(tmp_path)])
    checkpoint = tmp_path / "epoch=0.ckpt"
    fit(ours(precision), data=batches(5), max_epochs=2, ckpt_path=checkpoint, callbacks=[ReportCallback(tmp_path)])
    assert [step.step for step in Run.read(tmp_path).steps] == list(range(1, 11))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_have_the_numbers_of_the_trainer(precision: str, tmp_path: Path) -> None:
    """Which counts a batch without a loss, for which the scaler takes no step."""
    done = fit(ours(precision), Regression(skip=5), callbacks=[ReportCallback(tmp_path)])
    assert done["global_step"] == Run.read(tmp_path).steps[-1].step == STEPS


@pytest.mark.parametrize("how", ["in turn", "after all"])
def test_the_last_steps_of_two_optimizers_are_in_the_record(how: str, tmp_path: Path) -> None:
    done = fit(ours("16-mixed"), Pair(how), callbacks=[ReportCallback(tmp_path)])
    assert len(Run.read(tmp_path).steps) == done["global_step"] == 2 * STEPS


def test_skipped_steps_are_diagnosed(tmp_path: Path) -> None:
    fit(ours("16-mixed"), callbacks=[ReportCallback(tmp_path, on_nonfinite="diagnose", snapshots=True)])
    recorded = Run.read(tmp_path)
    skipped = [step.step for step in recorded.steps if step.skipped]
    assert [found.step for found in recorded.diagnoses] == skipped
    assert "lower the scale" in recorded.diagnoses[0].advice


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_without_the_extra_the_training_goes_on_and_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [each for each in sys.modules if each.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.warns(RuntimeWarning, match=r"the record is complete\): .*castwise\[report\]"):
        fit(ours("16-mixed"), callbacks=[ReportCallback(tmp_path)])
    assert len(Run.read(tmp_path).steps) == STEPS
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.warns(RuntimeWarning, match=r"the record is complete\): .*report\.html"):
        fit(ours("16-mixed"), callbacks=[ReportCallback(tmp_path)])


def test_torchs_scaler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"got torch\.amp\.grad_scaler\.GradScaler: use castwise\.GradScaler"):
        fit(theirs("16-mixed"), callbacks=[ReportCallback(tmp_path)])


@pytest.mark.parametrize("on_nonfinite", [None, "diagnose"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_validation_within_the_training_returns_what_it_returns_without(
    precision: Any, on_nonfinite: Any, tmp_path: Path
) -> None:
    class Encoder(Regression):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.net = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 1), torch.nn.Linear(8, 1))
            self.seen: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return 100.0 * (self.net(batch[0][None])[0] - batch[1]).pow(2).mean()  # not by way of forward

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(self.net[0](batch[0][None]))  # of a dtype that tells of the fused kernel

    seen = []
    for callbacks in ([], [ReportCallback(tmp_path, every=1, on_nonfinite=on_nonfinite)]):
        torch.manual_seed(0)
        module = Encoder()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            plugins=ours(precision),
            max_epochs=1,
            enable_checkpointing=False,
            callbacks=callbacks,
            val_check_interval=2,
            **SILENT,
        )
        trainer.fit(module, batches(), batches(1))
        seen.append(module.seen)
    assert len(seen[0]) > STEPS // 2
    assert [each.dtype for each in seen[1]] == [each.dtype for each in seen[0]]
    assert all(map(torch.equal, *seen))
