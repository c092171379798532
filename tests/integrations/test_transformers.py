"""The Transformers Trainer under castwise trains what it trains without, and its callback tells of it."""

from __future__ import annotations

import gc
import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradScalerKwargs
from tests.integrations.regions import region_of_forward
from tests.monitor.recorded import records_in
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    IntervalStrategy,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import castwise
from castwise._mistakes.watch import WATCH
from castwise.integrations.accelerate import prepare
from castwise.integrations.transformers import ReportCallback
from castwise.monitor import Run

STEPS, BATCH = 4, 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:this CPU has no units for torch:UserWarning"),
    pytest.mark.filterwarnings("ignore:not replaced by castwise, because they already existed:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps the precision in the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def vit() -> PreTrainedModel:
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**size, image_size=8, patch_size=4, num_labels=3))


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens for a GPT-2, images for a ViT; the n-th that is loaded can be bad, a batch before it is needed."""

    def __init__(self, make: Callable[[], PreTrainedModel], bad: int | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 32, (4 * BATCH, 16), generator=generator)
        images = torch.randn(4 * BATCH, 3, 8, 8, generator=generator)
        if make is gpt2:
            self._rows = [{"input_ids": row, "labels": row} for row in tokens]
        else:
            self._rows = [{"pixel_values": row, "labels": row.sum().long() % 3} for row in images]
        self._bad, self._loaded = bad, 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._loaded += 1
        if self._loaded == self._bad:
            raise OSError("this row cannot be read")
        return self._rows[index]


def trainer(
    folder: Path,
    make: Callable[[], PreTrainedModel] = gpt2,
    *,
    bf16: bool = False,
    callbacks: Any = (),
    bad: int | None = None,
    **options: Any,
) -> Trainer:
    torch.manual_seed(0)
    settings = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "learning_rate": 0.01, **options}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        bf16=bf16,
        per_device_train_batch_size=BATCH,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    return Trainer(make(), args, train_dataset=Rows(make, bad), callbacks=list(callbacks))


def in_fp16(trainer: Trainer, init_scale: float = 2.0**16) -> Trainer:
    """Give a Trainer what it has in fp16 on a GPU, with the CPU for a device: Accelerate has no fp16 there."""
    trainer.accelerator.state._mixed_precision = "fp16"
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler_handler = GradScalerKwargs(init_scale=init_scale)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return trainer


def logged(trainer: Trainer) -> list[Any]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [[row.get(name) for name in names] for row in trainer.state.log_history if "loss" in row]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [param.detach() for param in trainer.model.parameters()]


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


# -- castwise.install() -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, vit])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_installed_it_trains_what_it_trains_without(bf16: bool, make: Any, tmp_path: Path) -> None:
    with castwise.installed():
        ours = trainer(tmp_path, make, bf16=bf16)
        ours.train()
        ours.evaluate(ours.train_dataset)
        region = region_of_forward(ours.model)
        assert WATCH.found == []
    theirs = trainer(tmp_path, make, bf16=bf16)
    theirs.train()
    assert logged(ours) == logged(theirs)
    assert len(logged(ours)) == STEPS
    assert are_equal(weights(ours), weights(theirs))
    if bf16:
        assert (type(region), type(region_of_forward(theirs.model))) == (castwise.autocast, torch.autocast)
        assert region.fast_dtype is torch.bfloat16
    else:
        assert region is None


def test_installed_its_scaler_is_castwises_and_trains_the_same(tmp_path: Path) -> None:
    """The scale is so high that steps are skipped at first."""
    with castwise.installed():
        ours = in_fp16(trainer(tmp_path), 2.0**20)
        ours.train()
        assert type(ours.accelerator.scaler) is castwise.GradScaler
        assert [mistake.name for mistake in WATCH.found] == ["schedule-advanced-on-skip"]
    theirs = in_fp16(trainer(tmp_path), 2.0**20)
    theirs.train()
    assert ours.accelerator.scaler.get_scale() == theirs.accelerator.scaler.get_scale() < 2.0**20
    assert are_equal(weights(ours), weights(theirs))
    assert str(logged(ours)) == str(logged(theirs))  # a norm is nan


# -- prepare(trainer.accelerator) -------------------------------------------------------------------------------


def test_a_trainers_accelerator_can_be_prepared(tmp_path: Path) -> None:
    ours = trainer(tmp_path, bf16=True)
    prepare(ours.accelerator)
    ours.train()
    theirs = trainer(tmp_path, bf16=True)
    theirs.train()
    assert type(region_of_forward(ours.model)) is castwise.autocast
    assert logged(ours) == logged(theirs)
    assert are_equal(weights(ours), weights(theirs))


def test_a_skipped_step_holds_the_learning_rate_and_is_explained(tmp_path: Path) -> None:
    """With the Trainer's own optimizer, a fused one, of whose skips Accelerate alone does not know."""
    report = ReportCallback(tmp_path / "run", every=1, on_nonfinite="diagnose", snapshots=True)
    run = in_fp16(trainer(tmp_path, callbacks=[report]), 2.0**20)
    prepare(run.accelerator)
    run.train()
    record = Run.read(tmp_path / "run")
    skipped = [step.skipped for step in record.steps]
    assert skipped[0]
    assert not skipped[-1]
    assert {step.cause for step in record.steps if step.skipped} == {castwise.Cause.OVERFLOW}
    assert len(record.diagnoses) == sum(skipped)
    assert {diagnosis.phase for diagnosis in record.diagnoses} == {"backward"}
    assert run.lr_scheduler.last_epoch == STEPS - sum(skipped)
    assert [step.loss for step in record.steps] == pytest.approx([row[1] for row in logged(run)], rel=1e-6)
    taken = [step.grad_norm for step in record.steps if not step.skipped]
    assert taken == pytest.approx([row[2] for row in logged(run) if math.isfinite(row[2])])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_resumed_training_continues_bit_for_bit_and_so_does_its_record(precision: str, tmp_path: Path) -> None:
    def run(folder: str, resume: str | None = None) -> Trainer:
        report = ReportCallback(tmp_path / folder)
        options = {"save_strategy": "steps", "save_steps": 2, "bf16": precision == "bf16"}
        made = trainer(tmp_path / "out", callbacks=[report], **options)
        if precision == "fp16":
            prepare(in_fp16(made, 2.0**20).accelerator)
        made.train(resume_from_checkpoint=resume)
        return made

    whole = run("whole")
    resumed = run("resumed", resume=str(tmp_path / "out" / "checkpoint-2"))
    assert are_equal(weights(resumed), weights(whole))
    assert [step.step for step in Run.read(tmp_path / "resumed").steps] == [3, 4]
    if precision == "fp16":
        state = whole.accelerator.scaler.state_dict()
        assert resumed.accelerator.scaler.state_dict() == state
        assert state["steps_skipped"] > 0


def test_a_resumed_training_keeps_the_trainers_numbers_whatever_its_scaler_knows(tmp_path: Path) -> None:
    def run(folder: str, resume: str | None = None) -> None:
        made = trainer(
            tmp_path / "out", callbacks=[ReportCallback(tmp_path / folder)], save_strategy="steps", save_steps=2
        )
        prepare(in_fp16(made).accelerator)
        made.train(resume_from_checkpoint=resume)

    run("whole")
    checkpoint = tmp_path / "out" / "checkpoint-2"
    (checkpoint / "scaler.pt").unlink()
    run("resumed", resume=str(checkpoint))
    assert [step.step for step in Run.read(tmp_path / "resumed").steps] == [3, 4]


# -- the callback -----------------------------------------------------------------------------------------------


def test_the_callback_records_every_step_and_changes_none(tmp_path: Path) -> None:
    options = {"bf16": True, "gradient_accumulation_steps": 2}
    report = ReportCallback(tmp_path / "run", every=2)
    run = trainer(tmp_path, callbacks=[report], **options)
    run.train()
    without = trainer(tmp_path, **options)
    without.train()
    assert logged(run) == logged(without)
    assert are_equal(weights(run), weights(without))
    record = Run.read(tmp_path / "run")
    assert record.ended
    assert [(step.step, step.loss) for step in record.steps] == [(1, None), (2, None), (3, None), (4, None)]
    assert [sample.step for sample in record.samples] == [1, 2, 4]
    assert record.settings["model"] == "GPT2LMHeadModel"
    assert "transformer.h.1.mlp.c_fc.weight" in record.samples[0].gradients
    assert "transformer.h.1.mlp.c_fc" in record.samples[1].activations
    page = tmp_path / "run" / "report.html"
    assert "transformer.h.1.mlp.c_fc" in page.read_text()
    page.unlink()
    report.close()
    assert not page.exists()  # nothing was left to do


def test_a_training_that_failed_is_reported_when_the_callback_is_closed(tmp_path: Path) -> None:
    report = ReportCallback(tmp_path / "run")
    run = trainer(tmp_path, callbacks=[report], bad=3 * BATCH + 1)
    with pytest.raises(OSError, match="cannot be read"):
        run.train()
    assert not (tmp_path / "run" / "report.html").exists()
    report.close()
    record = Run.read(tmp_path / "run")
    assert (record.ended, len(record.steps)) == (True, 2)
    assert (tmp_path / "run" / "report.html").exists()
    report.close()  # nothing is left to do
    assert Run.read(tmp_path / "run").steps == record.steps


def test_a_training_that_failed_is_reported_when_another_one_begins(tmp_path: Path) -> None:
    report = ReportCallback(tmp_path / "run")
    with pytest.raises(OSError, match="cannot be read"):
        trainer(tmp_path, callbacks=[report], bad=3 * BATCH + 1).train()
    trainer(tmp_path, callbacks=[report], max_steps=1).train()
    kinds = [record["kind"] for record in records_in(tmp_path / "run")]
    assert kinds.count("run") == kinds.count("end") == 2
    assert len(Run.read(tmp_path / "run").steps) == 1


def test_a_training_that_failed_is_reported_when_it_is_forgotten(tmp_path: Path) -> None:
    run = trainer(tmp_path, callbacks=[ReportCallback(tmp_path / "run")], bad=3 * BATCH + 1)
    with pytest.raises(OSError, match="cannot be read"):
        run.train()
    del run
    sys.last_value = sys.last_traceback = None
    gc.collect()
    assert (tmp_path / "run" / "report.html").exists()


FAILS = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[2])
from castwise.integrations.transformers import ReportCallback
from tests.integrations.test_transformers import BATCH, trainer
folder = Path(sys.argv[1])
trainer(folder, callbacks=[ReportCallback(folder / "run")], bad=3 * BATCH + 1).train()
"""


def test_a_training_that_failed_is_reported_when_the_process_ends(tmp_path: Path, warm_python: None) -> None:
    command = [sys.executable, "-c", FAILS, str(tmp_path), str(Path(__file__).parents[2])]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "\nOSError: this row cannot be read\ncastwise: " in failed.stderr
    assert len(Run.read(tmp_path / "run").steps) == 2
    assert (tmp_path / "run" / "report.html").exists()


def test_without_what_the_report_needs_there_is_a_warning_and_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    run = trainer(tmp_path, callbacks=[ReportCallback(tmp_path / "run")], max_steps=1)
    with pytest.warns(
        RuntimeWarning, match=r"could not write the report in .* \(the record is complete\): .*castwise\[report\]"
    ):
        run.train()
    assert Run.read(tmp_path / "run").ended


def test_torchs_scaler_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = in_fp16(trainer(tmp_path, callbacks=[ReportCallback(tmp_path / "run")]))
    with pytest.raises(TypeError, match=r"scales with torch.amp.grad_scaler.GradScaler, .*: call castwise.install\(\)"):
        run.train()


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("castwise.integrations.transformers", "transformers", "transformers"),
        ("castwise.integrations.accelerate", "accelerate.accelerator", "accelerate"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{module} needs .*: pip install 'castwise\[{extra}\]'"):
        importlib.import_module(module)


def test_an_evaluation_within_the_training_returns_what_it_returns_without(tmp_path: Path) -> None:
    class Encoder(PreTrainedModel):
        config_class = GPT2Config

        def __init__(self, config: GPT2Config) -> None:
            super().__init__(config)
            self.embedding = torch.nn.Embedding(config.vocab_size, 16)
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.encoder, self.head = torch.nn.TransformerEncoder(layer, 1), torch.nn.Linear(16, config.vocab_size)
            self.seen: list[torch.Tensor] = []

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
            features = self.encoder(self.embedding(input_ids))
            if not self.training:
                self.seen.append(features)
            logits = self.head(features)
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    seen = []
    for callbacks in ([], [ReportCallback(tmp_path / "run", every=1)]):
        run = trainer(tmp_path, gpt2, bf16=True, callbacks=callbacks)
        run.args.eval_strategy, run.args.eval_steps = IntervalStrategy.STEPS, 1
        torch.manual_seed(0)
        run.model = run.model_wrapped = Encoder(GPT2Config(vocab_size=32, attn_implementation="eager"))
        run.eval_dataset = Rows(gpt2)
        run.train()
        seen.append(run.model.seen)
    assert len(seen[0]) >= STEPS
    assert [each.dtype for each in seen[1]] == [each.dtype for each in seen[0]]
    assert are_equal(*seen)
