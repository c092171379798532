"""Run all training runs of a demo in turn, starting from the last checkpoint in its folder.

The order of writing makes a kill at any moment harmless: metrics reach the disk first, then a checkpoint with their
length replaces the previous one. Metrics written after the last checkpoint are cut off, and their steps repeated.
"""

from __future__ import annotations

import gc
import math
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from castwise._user_error import UserError
from castwise.demo import checkpoint
from castwise.demo.checkpoint import Checkpoint
from castwise.demo.corpus import Corpus
from castwise.demo.display import Display
from castwise.demo.gpt import EMULATED
from castwise.demo.interrupt import StopOnInterrupt
from castwise.demo.ranks import Ranks
from castwise.demo.run_folder import CHECKPOINT, METRICS, SUMMARY, MetricsFile, write_json
from castwise.demo.settings import CASTWISE, FP32, TORCH, Settings, Training
from castwise.demo.training import Result, Step, Trainer


def compare(folder: Path, settings: Settings, corpus: Corpus, display: Display, ranks: Ranks) -> list[Result]:
    """Finish a run and return all its results.

    Raises:
        KeyboardInterrupt: On Ctrl-C, after a checkpoint of the last step is saved.
        UserError: The folder's checkpoint or metrics are damaged, or cannot be written.
    """
    with StopOnInterrupt() as stop, display:
        return _Comparison(folder, settings, corpus, display, stop, ranks).run()


class _Comparison:
    """The training loops and their shared state."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        corpus: Corpus,
        display: Display,
        stop: StopOnInterrupt,
        ranks: Ranks,
    ) -> None:
        self._folder, self._settings, self._corpus, self._ranks = folder, settings, corpus, ranks
        self._display, self._stop = display, stop
        loaded = checkpoint.load(folder / CHECKPOINT)
        self._metrics: MetricsFile | None = None  # only on the rank that writes
        ranks.first(lambda: self._open_metrics(loaded.metrics_bytes))
        self._results = _results(loaded, settings, folder / CHECKPOINT)
        self._unfinished = loaded.trainer

    def _open_metrics(self, n_bytes: int) -> None:
        self._metrics = MetricsFile(self._folder / METRICS, n_bytes)

    def run(self) -> list[Result]:
        with nullcontext() if self._metrics is None else closing(self._metrics):
            self._warm_up()
            for training in self._settings.runs()[len(self._results) :]:
                self._results.append(self._train(training))
                self._save(None)
        return self._results

    def _warm_up(self) -> None:
        """Take a small step in each precision, so that the first run is not slowed by loading torch's kernels."""
        for training in self._settings.runs():
            if training.library == CASTWISE:
                self._trainer(replace(training, size=EMULATED)).step()
        # A process's first optimizer is kept alive by a cycle of torch's lazy imports; later ones are freed at once.
        gc.collect()

    def _trainer(self, training: Training) -> Trainer:
        device = torch.device(self._settings.device)
        return Trainer(training, self._corpus, device, self._settings.seed, self._ranks)

    def _train(self, training: Training) -> Result:
        trainer = self._trainer(training)
        self._restore(trainer)
        self._display.start(training, trainer.steps_done)
        while trainer.steps_done < training.steps:
            step = trainer.step()
            if self._metrics is not None:
                self._metrics.append(metrics_line(training, step))
            self._display.step(step)
            is_last = self._ranks.any_(self._stop.requested)
            if is_last or step.number % self._settings.checkpoint_every == 0:
                self._save(trainer.state_dict())
            if is_last:
                raise KeyboardInterrupt
        return trainer.result()

    def _restore(self, trainer: Trainer) -> None:
        state, self._unfinished = self._unfinished, None
        if state is None:
            return
        try:
            trainer.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            path = self._folder / CHECKPOINT
            raise UserError(f"{path} does not fit the model in the run's settings: delete it to start over") from error

    def _save(self, trainer: dict[str, Any] | None) -> None:
        if self._metrics is None:
            return
        results = [asdict(result) for result in self._results]
        checkpoint.save(self._folder / CHECKPOINT, Checkpoint(results, trainer, self._metrics.sync()))


def _results(loaded: Checkpoint, settings: Settings, path: Path) -> list[Result]:
    """Return the results of the training runs that were finished when a checkpoint was saved."""
    hints = get_type_hints(Result)
    wanted = settings.runs()[: len(loaded.results)]
    fits = len(wanted) == len(loaded.results) and all(
        record.keys() == hints.keys()
        and all(isinstance(record[name], hint) for name, hint in hints.items())
        and all(record[name] == getattr(training, name) for name in ("precision", "library", "weights"))
        for record, training in zip(loaded.results, wanted, strict=True)
    )
    if not fits:
        raise UserError(f"{path} does not fit the run's settings: delete it to start over")
    return [Result(**record) for record in loaded.results]


def metrics_line(training: Training, step: Step) -> dict[str, object]:
    """Return one line of `metrics.jsonl`; `skipped` counts from the first step, `time` is in seconds since 1970."""
    return {
        "precision": training.precision,
        "library": training.library,
        "weights": training.weights,
        "step": step.number,
        "loss": step.loss if math.isfinite(step.loss) else None,  # JSON has no NaN
        "tokens_per_s": round(training.size.tokens / step.seconds, 1),
        "scale": step.scale,
        "skipped": step.skipped,
        "time": round(time.time(), 3),
    }


def verdicts(results: list[Result]) -> dict[str, bool]:
    """Return by precision whether castwise and torch.amp ended with the same bits.

    For weights other than fp32, compare them with fp32 weights, including the losses of all steps.
    """
    others = {result.weights: result for result in results if result.weights != FP32}
    if others:
        (fp32,) = (result for result in results if result.weights == FP32)
        return {name: _bits(result) == _bits(fp32) for name, result in others.items()}
    digests = {(result.precision, result.library): result.weights_sha256 for result in results}
    return {
        precision: digests[precision, CASTWISE] == digests[precision, TORCH]
        for precision in dict.fromkeys(precision for precision, _ in digests)
    }


def _bits(result: Result) -> tuple[str, str, float]:
    return result.weights_sha256, result.losses_sha256, result.loss


def write_summary(folder: Path, settings: Settings, results: list[Result]) -> dict[str, Any]:
    """Write the table's contents and the digests behind its verdict to `summary.json`, and return them."""
    summary = {
        "settings": settings.to_json(),
        "results": [asdict(result) for result in results],
        "identical": verdicts(results),
    }
    write_json(folder / SUMMARY, summary)
    return summary
