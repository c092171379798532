"""The usual mixed-precision training loop, with the library as a parameter.

The same lines run for every precision and library (in fp32 with region and scaler disabled), so two rows of the table
can differ only because of the library.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import castwise
from castwise._demo import gpt
from castwise._demo.corpus import Corpus, derive_seed
from castwise._demo.gpt import GPT, Size
from castwise._demo.hardware import PRECISIONS, synchronize
from castwise._demo.memory import PeakMemory
from castwise.monitor._monitor import Monitor

LEARNING_RATE = 5e-4
MAX_NORM = 1.0
VALIDATION_BATCHES = 8
WARM_UP_STEPS = 3  # these build kernels and fill the allocator, so their times do not count

TORCH, CASTWISE, MASTER_WEIGHTS = LIBRARIES = ("torch.amp", "castwise", "MasterWeights")
_AUTOCASTS = {TORCH: torch.amp.autocast, CASTWISE: castwise.autocast, MASTER_WEIGHTS: castwise.autocast}
_SCALERS = {TORCH: torch.amp.GradScaler, CASTWISE: castwise.GradScaler, MASTER_WEIGHTS: castwise.GradScaler}


@dataclass(frozen=True)
class Training:
    """A training run.

    Args:
        precision: "fp32", "bf16" or "fp16".
        library: "torch.amp", "castwise", or "MasterWeights" for castwise with 16-bit weights.
        size: Size of the model and its batches.
        steps: Number of steps.
    """

    precision: str
    library: str
    size: Size
    steps: int

    @property
    def name(self) -> str:
        """The precision and the library."""
        return f"{self.precision} {self.library}"

    def order(self) -> tuple[int, int]:
        """Return a sort key for the table: by precision, and in each the reference first."""
        return list(PRECISIONS).index(self.precision), LIBRARIES.index(self.library)


@dataclass(frozen=True)
class Result:
    """The result of a training run, a row of the table.

    Args:
        training: The run.
        loss: Mean loss on held-out text, in nats per byte.
        step_ms: Median duration of a step.
        peak_bytes: Peak memory minus the memory in use before the run, or None if unknown.
        stored_bytes: Bytes per parameter of the linear layers: weight, cast, gradient and optimizer state.
        skipped: Number of steps skipped by the scaler.
        losses: The loss of each step.
        weights: The final weights in fp32, on the CPU.
    """

    training: Training
    loss: float
    step_ms: float
    peak_bytes: int | None
    stored_bytes: float
    skipped: int
    losses: list[float]
    weights: dict[str, Tensor]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per step divided by the median duration."""
        return 1000 * self.training.size.tokens / self.step_ms

    def has_bits_of(self, other: Result) -> bool:
        """Return True if all losses and weights are the same, bit for bit: -0.0 is not 0.0, and a NaN is itself."""
        losses = [list(map(float.hex, result.losses)) for result in (self, other)]
        mine, others = (
            {name: weight.view(torch.uint8) for name, weight in result.weights.items()} for result in (self, other)
        )
        return losses[0] == losses[1] and all(torch.equal(mine[name], others[name]) for name in mine)


class Trainer:
    """A model, its optimizer and its scaler, and their progress.

    Args:
        training: Model size, precision and library.
        corpus: Source of the batches.
        device: Device of the model.

    Attributes:
        losses: The loss of each step so far, including skipped steps.
        skipped: Number of skipped steps so far.
    """

    def __init__(self, training: Training, corpus: Corpus, device: torch.device) -> None:
        self.training, self._corpus, self._device = training, corpus, device
        self._memory = PeakMemory(device)
        torch.manual_seed(derive_seed(0, "weights"))
        # Drawn on the CPU, so that initial weights are the same on every device.
        self._model = GPT(training.size).to(device)
        adamw = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)
        is_split = training.library == MASTER_WEIGHTS
        self._master = castwise.MasterWeights(adamw, self._model) if is_split else None
        self._optimizer = adamw if self._master is None else self._master
        self._autocast = _AUTOCASTS[training.library]
        self._scaler = _SCALERS[training.library](device.type, enabled=training.precision == "fp16")
        self._seconds: list[float] = []
        self.losses: list[float] = []
        self.skipped = 0

    def step(self) -> float:
        """Train on the next batch and return the seconds; reading loss and scale makes the host wait for the device."""
        batch = self._corpus.batch(self.training.size, 0, len(self.losses))
        tokens, targets = (part.to(self._device) for part in batch)
        scale_before = self._scaler.get_scale()
        synchronize(self._device)
        start = time.perf_counter()
        loss = self._update(tokens, targets)
        synchronize(self._device)
        self._seconds.append(time.perf_counter() - start)
        self.skipped += self._scaler.get_scale() < scale_before  # the only public sign of it in both libraries
        self.losses.append(loss.item())
        return self._seconds[-1]

    def _update(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        with self._region():
            loss = gpt.loss(self._model(tokens), targets)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
        self._scaler.unscale_(self._optimizer)
        if self._master is None:
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        else:
            self._master.clip_grad_norm_(MAX_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()

    def _region(self) -> AbstractContextManager[object]:
        dtype = PRECISIONS[self.training.precision]
        is_low = dtype is not torch.float32
        region: AbstractContextManager[object] = self._autocast(
            self._device.type, dtype=dtype if is_low else None, enabled=is_low
        )
        return region

    def result(self) -> Result:
        """Return the table row of the steps so far, with a copy of the weights."""
        peak_bytes = self._memory.read()  # before anything below adds to it
        fp32 = self._model.state_dict() if self._master is None else self._master.fp32_state_dict(self._model)
        return Result(
            training=self.training,
            loss=self._validation_loss(),
            step_ms=1000 * statistics.median(self._seconds[WARM_UP_STEPS:] or self._seconds),
            peak_bytes=peak_bytes,
            stored_bytes=self._bytes_per_parameter(),
            skipped=self.skipped,
            losses=self.losses,
            weights={name: weight.to("cpu", copy=True) for name, weight in fp32.items()},
        )

    def _bytes_per_parameter(self) -> float:
        """Return the bytes per parameter of the linear layers, which autocast casts, counted from their tensors."""
        if self._master is not None:
            memory = self._master.memory()
            return sum(memory[what] for what in ("weights", "kept", "gradients", "state")) / memory["parameters"]
        linear = [module for module in self._model.modules() if isinstance(module, nn.Linear)]
        params = [param for module in linear for param in module.parameters()]
        held = [value for param in params for value in self._optimizer.state.get(param, {}).values()]
        held += [*params, *(param.grad for param in params if param.grad is not None)]
        # The region keeps a cast of each weight until it ends.
        cast = 0 if self.training.precision == "fp32" else PRECISIONS[self.training.precision].itemsize
        n_params = sum(param.numel() for param in params)
        return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor)) / n_params + cast

    @torch.no_grad()
    def _validation_loss(self) -> float:
        losses = []
        for batch in self._corpus.validation(self.training.size, VALIDATION_BATCHES):
            tokens, targets = (part.to(self._device) for part in batch)
            with self._region():
                losses.append(gpt.loss(self._model(tokens), targets).item())
        return statistics.fmean(losses)

    def monitor(self, every: int, folder: Path) -> Monitor:
        """Return a monitor, not yet entered, that samples the run every `every` steps and records to a folder."""
        return Monitor(self._model, self._optimizer, self._scaler, every=every, sinks=[folder])
