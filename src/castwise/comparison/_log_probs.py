"""Differences between the log-probabilities that two runs of a model give to the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_IGNORED = -100  # the target that torch's cross_entropy ignores
_ROWS = 4096  # tokens whose logits are cast to fp64 at once


@dataclass(frozen=True)
class LogProbDrift:
    """Log-probabilities of the target tokens under a policy, compared with those of the reference.

    With r = p_reference / p_policy for each token, the ratio that a trainer clips if the policy is that of its rollout;
    in `compare_log_probs`, r = p_model / p_recorded (Schulman 2020, "Approximating KL divergence", treating the tokens
    as samples from the policy, or from the engine that recorded them):

    Args:
        tokens: Number of tokens compared; targets of -100 are ignored.
        mean_difference: Mean of `|log r|`, in nats.
        largest_difference: Largest `|log r|`, in nats.
        kl_k1: Mean of -log r, an unbiased estimate of KL(policy || reference), which may be negative.
        kl_k3: Mean of r - 1 - log r, an unbiased estimate that is never negative.
        outside_band: Share of tokens whose ratio is outside `clip_band`.
        band: The value of `clip_band`.
    """

    tokens: int
    mean_difference: float
    largest_difference: float
    kl_k1: float
    kl_k3: float
    outside_band: float
    band: tuple[float, float]


class LogProbSums:
    """Accumulates figures over the tokens of any number of batches.

    Args:
        band: The smallest and largest ratio that a clipped objective does not clip.
    """

    def __init__(self, band: tuple[float, float]) -> None:
        self._band = band
        self._tokens = self._outside = 0
        self._log_ratio = self._magnitude = self._k3 = self._largest = 0.0

    def add(self, sampler: torch.Tensor, other: torch.Tensor) -> None:
        """Add tokens.

        Args:
            sampler: Their log-probabilities under what they are treated as samples from, in fp64.
            other: Their log-probabilities under what is compared with it.
        """
        if not sampler.numel():
            return
        log_ratio = other - sampler
        ratio = log_ratio.exp()
        low, high = self._band
        self._tokens += log_ratio.numel()
        # NaN counts as outside.
        self._outside += int((~((ratio >= low) & (ratio <= high))).sum())
        self._log_ratio += float(log_ratio.sum())
        self._magnitude += float(log_ratio.abs().sum())
        self._k3 += float((log_ratio.expm1() - log_ratio).sum())
        largest = float(log_ratio.abs().max())
        self._largest = math.nan if math.isnan(largest) else max(self._largest, largest)

    def drift(self) -> LogProbDrift | None:
        """Return the figures; None if there were no tokens."""
        if not self._tokens:
            return None
        tokens = self._tokens
        return LogProbDrift(
            tokens,
            self._magnitude / tokens,
            self._largest,
            -self._log_ratio / tokens,
            self._k3 / tokens,
            self._outside / tokens,
            self._band,
        )


def token_log_probs(outputs: Any, targets: Any) -> torch.Tensor | None:
    """Return the log-probabilities of target tokens under logits, in fp64; None if the arguments are not such a pair.

    Args:
        outputs: Logits of shape (..., classes); an object or mapping with `logits`; or a tuple or list that begins with
            logits.
        targets: Class indices of shape (...).

    Example:
        >>> token_log_probs(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp()
        tensor([0.5000], dtype=torch.float64)
    """
    logits = logits_of(outputs)
    if logits is None or not isinstance(targets, torch.Tensor) or targets.dtype is not torch.int64:
        return None
    if not logits.is_floating_point() or logits.ndim < 2 or logits.shape[:-1] != targets.shape:
        return None
    rows, wanted = logits.detach().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    if bool(((wanted != _IGNORED) & ((wanted < 0) | (wanted >= rows.shape[1]))).any()):
        return None
    counted = wanted != _IGNORED
    rows, wanted = rows[counted], wanted[counted].unsqueeze(-1)
    log_probs = [
        rows[start : start + _ROWS].double().log_softmax(-1).gather(-1, wanted[start : start + _ROWS]).squeeze(-1)
        for start in range(0, len(rows), _ROWS)
    ]
    return torch.cat(log_probs) if log_probs else None


def logits_of(outputs: Any) -> torch.Tensor | None:
    """Return the logits in a model's outputs, see `token_log_probs`; None if there are none."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif isinstance(outputs, (tuple, list)):
        outputs = outputs[0] if outputs else None
    elif not isinstance(outputs, torch.Tensor):
        outputs = getattr(outputs, "logits", None)
    return outputs if isinstance(outputs, torch.Tensor) else None
