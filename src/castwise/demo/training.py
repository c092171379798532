"""The usual mixed-precision training loop, with the library as a parameter.

The same lines run for every precision and library (in fp32 with region and scaler disabled), so two rows of the table
can differ only because of the library.
"""

from __future__ import annotations

import ctypes
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import castwise
from castwise.demo import gpt
from castwise.demo.corpus import Corpus, derive_seed
from castwise.demo.gpt import GPT
from castwise.demo.hardware import PRECISIONS, synchronize
from castwise.demo.memory import PeakMemory
from castwise.demo.ranks import Ranks
from castwise.demo.settings import BF16_SPLIT, CASTWISE, TORCH, Training
from castwise.monitor.monitor import Monitor

LEARNING_RATE = 5e-4
MAX_NORM = 1.0
VALIDATION_BATCHES = 8
WARM_UP_STEPS = 3  # these build kernels and fill the allocator, so their times do not count

_AUTOCASTS = {TORCH: torch.amp.autocast, CASTWISE: castwise.autocast}
_SCALERS = {TORCH: torch.amp.GradScaler, CASTWISE: castwise.GradScaler}


@dataclass(frozen=True)
class Step:
    """The outcome of a step: its number (from 1), loss, duration, scale, and the number of skipped steps so far."""

    number: int
    loss: float
    seconds: float
    scale: float
    skipped: int


@dataclass(frozen=True)
class Result:
    """The result of a training run, a row of the table; plain values only.

    Args:
        precision: "fp32", "bf16" or "fp16".
        library: "torch.amp" or "castwise".
        steps: Number of steps.
        loss: Mean loss on held-out text, in nats per byte.
        step_ms: Median duration of a step.
        tokens_per_s: Tokens per step divided by the median duration.
        peak_bytes: Peak memory minus the memory in use before the run, or None if unknown.
        skipped: Number of steps skipped by the scaler.
        weights_sha256: Digest of all weights, in fp32.
        weights: "fp32", or "bf16-split" for weights of `MasterWeights`.
        losses_sha256: Digest of all steps' losses.
        stored_bytes: Bytes per parameter of the linear layers: weight, cast, gradient and state; for one process.
    """

    precision: str
    library: str
    steps: int
    loss: float
    step_ms: float
    tokens_per_s: float
    peak_bytes: int | None
    skipped: int
    weights_sha256: str
    weights: str
    losses_sha256: str
    stored_bytes: float


class Trainer:
    """A model, its optimizer and its scaler, and their progress.

    Args:
        training: Model size, precision and library.
        corpus: Source of the batches.
        device: Device of the model.
        seed: Seed for the initial weights and the batches.
        ranks: The processes that train together.
    """

    def __init__(self, training: Training, corpus: Corpus, device: torch.device, seed: int, ranks: Ranks) -> None:
        self.training, self._corpus, self._device, self._seed = training, corpus, device, seed
        self._ranks = ranks
        self._memory = PeakMemory(device)
        torch.manual_seed(derive_seed(seed, "weights"))
        # Drawn on the CPU, so that initial weights are the same on every device.
        self._model = ranks.split(GPT(training.size).to(device))
        # torch's sharded scaler cannot unscale_ before a fused step on a CPU, and lets ranks disagree about it.
        fused = ranks.strategy is None
        adamw = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=fused, foreach=not fused)
        self._master = castwise.MasterWeights(adamw, self._model) if training.weights == BF16_SPLIT else None
        self._optimizer = adamw if self._master is None else self._master
        self._autocast = _AUTOCASTS[training.library]
        scaler = (_SCALERS if ranks.strategy is None else sharded_scalers())[training.library]
        self._scaler = scaler(device.type, enabled=training.precision == "fp16")
        self._seconds: list[float] = []
        self._losses: list[float] = []
        self._stored_bytes = 0.0
        self._skipped = 0
        self._peak_before: int | None = 0  # in an earlier process

    @property
    def steps_done(self) -> int:
        """Number of steps so far, including skipped ones."""
        return len(self._seconds)

    def step(self) -> Step:
        """Train on the next batch; reading the loss and the scale makes the host wait for the device."""
        batch = self._corpus.batch(self.training.size, self._seed, self.steps_done)
        tokens, targets = self._to_device(batch, self._ranks.share)
        scale_before = self._scaler.get_scale()
        synchronize(self._device)
        start = time.perf_counter()
        loss = self._update(tokens, targets)
        synchronize(self._device)
        self._seconds.append(time.perf_counter() - start)
        scale = self._scaler.get_scale()
        self._skipped += scale < scale_before  # the only public sign of a skipped step in both libraries
        self._losses.append(self._ranks.mean(loss))
        if self.steps_done == self.training.steps and self._ranks.strategy is None:
            self._stored_bytes = self._bytes_per_parameter()  # while there are gradients
        return Step(self.steps_done, self._losses[-1], self._seconds[-1], scale, self._skipped)

    def _update(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        with self._region():
            loss = gpt.loss(self._model(tokens), targets)
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        if self._master is None:
            self._ranks.clip_grad_norm_(self._model, MAX_NORM)
        else:
            self._master.clip_grad_norm_(MAX_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()

    def _region(self) -> AbstractContextManager[object]:
        precision = self.training.precision
        dtype = None if precision == "fp32" else PRECISIONS[precision]
        return self._autocast(self._device.type, dtype=dtype, enabled=precision != "fp32")

    def _to_device(
        self, batch: tuple[Tensor, Tensor], part: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        return part(tokens).to(self._device), part(targets).to(self._device)

    def result(self) -> Result:
        """Return the table row after all steps."""
        training = self.training
        peak_bytes = self._peak_bytes()
        seconds = statistics.median(self._seconds[WARM_UP_STEPS:] or self._seconds)
        return Result(
            precision=training.precision,
            library=training.library,
            steps=self.steps_done,
            loss=self._validation_loss(),
            step_ms=1000 * seconds,
            tokens_per_s=training.size.tokens / seconds,
            peak_bytes=peak_bytes,
            skipped=self._skipped,
            weights_sha256=self.digest(),
            weights=training.weights,
            losses_sha256=hashlib.sha256(",".join(map(float.hex, self._losses)).encode()).hexdigest(),
            stored_bytes=self._stored_bytes,
        )

    def _bytes_per_parameter(self) -> float:
        """Return the bytes per parameter of the linear layers, which autocast casts, counted from their tensors."""
        if self._master is not None:
            memory = self._master.memory()
            return sum(memory[what] for what in ("weights", "kept", "gradients", "state")) / memory["parameters"]
        linear = [module for module in self._model.modules() if isinstance(module, torch.nn.Linear)]
        params = [param for module in linear for param in module.parameters()]
        held = [value for param in params for value in self._optimizer.state.get(param, {}).values()]
        held += [*params, *(param.grad for param in params if param.grad is not None)]
        # The region keeps a cast of each weight until it ends.
        cast = 0 if self.training.precision == "fp32" else PRECISIONS[self.training.precision].itemsize
        n_params = sum(param.numel() for param in params)
        return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor)) / n_params + cast

    def monitor(self, every: int, folder: Path) -> Monitor:
        """Return a monitor, not yet entered, that samples the run every `every` steps and records to a folder."""
        return Monitor(self._model, self._optimizer, self._scaler, every=every, sinks=[folder])

    def digest(self) -> str:
        """Return the SHA-256 of the current weights, in fp32."""
        master = self._master
        return digest(self._ranks.weights(self._model) if master is None else master.fp32_state_dict(self._model))

    @torch.no_grad()
    def _validation_loss(self) -> float:
        losses = []
        for batch in self._corpus.validation(self.training.size, VALIDATION_BATCHES):
            with self._region():
                tokens, targets = self._to_device(batch)
                losses.append(gpt.loss(self._model(tokens), targets).item())
        return statistics.fmean(losses)

    def _peak_bytes(self) -> int | None:
        peak = self._memory.read()
        return None if peak is None or self._peak_before is None else max(peak, self._peak_before)

    def state_dict(self) -> dict[str, Any]:
        """Return all state that later steps and the result depend on."""
        return {
            "model": self._ranks.weights(self._model),
            "optimizer": self._ranks.optimizer_state(self._model, self._optimizer),
            "scaler": self._scaler.state_dict(),
            "seconds": self._seconds,
            "losses": self._losses,
            "stored_bytes": self._stored_bytes,
            "skipped": self._skipped,
            "peak_bytes": self._peak_bytes(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state_dict`."""
        self._ranks.load(self._model, self._optimizer, state["model"], state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self._seconds, self._losses = list(state["seconds"]), list(state["losses"])
        self._stored_bytes = state["stored_bytes"]
        self._skipped = state["skipped"]
        self._peak_before = state["peak_bytes"]


def sharded_scalers() -> dict[str, Any]:
    """Import and return the libraries' scalers for several processes, which are slow to import."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return {TORCH: ShardedGradScaler, CASTWISE: castwise.ShardedGradScaler}


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all weights with names and shapes; equal digests mean equal bits (-0.0 is not 0.0)."""
    sha256 = hashlib.sha256()
    for name, weight in weights.items():
        cpu = weight.detach().cpu().contiguous()
        sha256.update(f"{name} {cpu.dtype} {tuple(cpu.shape)}".encode())
        # Uses ctypes because torch does not require numpy.
        sha256.update(ctypes.string_at(cpu.data_ptr(), cpu.nbytes))
    return sha256.hexdigest()
