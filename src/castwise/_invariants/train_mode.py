"""`train-eval-mode`: models are trained in training mode, validated in evaluation mode, and dropout draws again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from castwise._invariants.invariant import Violation
from castwise._torch_private import is_jit_tracing

_DROPOUT = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
_BATCH_NORM = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_EVAL_STEPS = 3  # in evaluation mode after steps in training mode, until it is reported
_ALL_EVAL_STEPS = 10  # from the start
_FORWARDS = 3  # without gradients between two steps, for them to be a validation
_STEPS_BETWEEN = 5  # at least, between two validations: what happens around each step is a part of training
_SAME_DRAWS = 3  # steps in a row that begin with one random state


class TrainMode:
    """Looks at the mode of a model in its forwards, and at the random state before and after them.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._was_training: bool | None = None  # in the last forward with gradients; None: not seen
        self._train_steps = self._eval_steps = 0
        self._forwards = 0  # in training mode without gradients since the last step
        self._validations: list[int] = []  # the numbers of steps before validations in training mode
        self._states: list[bytes] = []
        self._state: bytes | None = None
        self._has_checked_draws = True

    def forward(self, model: nn.Module, *_: Any) -> None:
        """Look at a forward of the model that begins."""
        if is_jit_tracing():
            return
        if torch.is_grad_enabled():
            self._was_training = model.training
            if not self._has_checked_draws and self._state is None and model.training:
                self._state = self._random_state()
        elif model.training and (self._forwards >= _FORWARDS or self._kinds(active=True)):
            self._forwards += 1  # not in `update_bn`, which sets the momentum of BatchNorm to None for as long

    def stepping(self, step: int, *, looks_at_draws: bool) -> Iterator[Violation]:
        """Look at what happened before a step.

        Args:
            step: Its number.
            looks_at_draws: Whether the random states of the next step are compared.
        """
        is_training = self._model.training if self._was_training is None else self._was_training
        self._was_training = None
        yield from self._of_validation(step)
        yield from self._of_steps(step, is_training)
        yield from self._of_draws(step)
        self._has_checked_draws = not looks_at_draws

    def _of_steps(self, step: int, is_training: bool) -> Iterator[Violation]:
        if is_training:
            self._train_steps, self._eval_steps = self._train_steps + 1, 0
            return
        self._eval_steps += 1
        if self._eval_steps == _EVAL_STEPS and self._train_steps and self._kinds(active=False):
            yield Violation(
                "train-eval-mode",
                f"from step {step - _EVAL_STEPS + 1:,} on, the model is trained in evaluation mode, and before in "
                f"training mode: {self._kinds(active=False)}.",
                "Call model.train() after each validation, before the next step.",
            )
        elif self._eval_steps == _ALL_EVAL_STEPS and not self._train_steps and self._kinds(active=False):
            yield Violation(
                "train-eval-mode",
                f"all {step:,} steps were taken in evaluation mode: {self._kinds(active=False)}.",
                "Call model.train() before training, unless this is intended; from_pretrained returns models in "
                "evaluation mode.",
                "note",
            )

    def _of_validation(self, step: int) -> Iterator[Violation]:
        forwards, self._forwards = self._forwards, 0
        kinds = self._kinds(active=True) if forwards >= _FORWARDS and self._train_steps else ""
        if not kinds:
            return
        self._validations.append(step)
        if len(self._validations) == 2 and step - self._validations[0] >= _STEPS_BETWEEN:
            yield Violation(
                "train-eval-mode",
                f"before step {step:,}, the model computed {forwards:,} batches without gradients in training mode, "
                f"as before step {self._validations[0]:,}: {kinds}.",
                "Call model.eval() before validation, and model.train() after it.",
            )

    def _of_draws(self, step: int) -> Iterator[Violation]:
        state, self._state = self._state, None
        if state is None:
            self._states = []
            return
        has_drawn = self._random_state() != state
        self._states = [*self._states, state][-_SAME_DRAWS:] if has_drawn else []
        if len(self._states) == _SAME_DRAWS and len(set(self._states)) == 1 and self._has(_DROPOUT, active=True):
            yield Violation(
                "train-eval-mode",
                f"steps {step - _SAME_DRAWS + 1:,} to {step:,} begin with the same random state, so dropout leaves out "
                "the same elements in each step.",
                "Set the seed once, before the loop.",
            )

    def _random_state(self) -> bytes | None:
        param = next(self._model.parameters(), None)
        device = torch.device("cpu") if param is None else param.device
        try:
            if device.type == "cpu":
                return bytes(torch.get_rng_state().numpy())
            return bytes(torch.get_device_module(device).get_rng_state(device).numpy())
        except (AttributeError, RuntimeError):  # no such device, or a graph is being captured
            return None

    def _kinds(self, *, active: bool) -> str:
        """Return what modules in training mode do, or those in evaluation mode do not; empty if there are none."""
        dropout, norm = self._has(_DROPOUT, active=active), self._has(_BATCH_NORM, active=active)
        if active:
            parts = ["dropout is on"] * dropout + ["validation batches go into BatchNorm's statistics"] * norm
        else:
            parts = ["dropout is off"] * dropout + ["BatchNorm's statistics stand still"] * norm
        return " and ".join(parts)

    def _has(self, kind: tuple[type[nn.Module], ...], *, active: bool) -> bool:
        return any(
            isinstance(module, kind) and module.training == active and _matters(module)
            for module in self._model.modules()
        )


def _matters(module: Any) -> bool:
    """Return True if a module computes something else in training."""
    if isinstance(module, _DROPOUT):
        return bool(module.p)
    return bool(module.track_running_stats) and module.momentum is not None
