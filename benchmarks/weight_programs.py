"""Train random programs with 16-bit weights and with fp32 weights, and count those whose bits differ.

    python -m benchmarks.weight_programs [--programs 20000] [--frameworks 300]

A program is drawn from a seed: a small network, an optimizer and its options, micro-batches, clipping, a scaler with or
without steps that overflow, a schedule, a layer that is frozen for a while, checkpointing, and a state dict that is
saved and loaded half way. It is trained with fp32 weights under autocast, and with `castwise.MasterWeights`; losses,
norms, weights and states of the optimizer must have the same bits. Writes
benchmarks/results/weight_programs-cpu.json and the table in benchmarks/README.md. Takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import castwise
from benchmarks import recording
from castwise.master_weights import _buckets

KINDS = ("loop", "Accelerate", "Fabric", "Lightning", "Trainer")
WIDTHS = (3, 8, 17, 32)
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": functools.partial(optim.SGD, lr=0.05),
    "SGD, momentum": functools.partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam, amsgrad": functools.partial(optim.Adam, lr=1e-2, amsgrad=True),
    "AdamW": functools.partial(optim.AdamW, lr=1e-2, weight_decay=0.1),
    "Adagrad": functools.partial(optim.Adagrad, lr=1e-2),
    "Adamax": functools.partial(optim.Adamax, lr=1e-2),
    "NAdam": functools.partial(optim.NAdam, lr=1e-2),
    "RAdam": functools.partial(optim.RAdam, lr=1e-2),
    "RMSprop": functools.partial(optim.RMSprop, lr=1e-3, centered=True),
    "Adadelta": functools.partial(optim.Adadelta, lr=0.5),
    "Rprop": functools.partial(optim.Rprop, lr=1e-3),
    "Adafactor": functools.partial(optim.Adafactor, lr=1e-2),
}
HAVE_FUSED = ("SGD", "SGD, momentum", "Adam, amsgrad", "AdamW", "Adagrad")


@dataclass(frozen=True)
class Program:
    """A training that can be repeated, but for its weights' format.

    Args:
        seed: Seeds weights, batches and dropout.
        kind: One of `KINDS`.
        width: Features of each layer.
        layers: Kinds of the network's layers.
        optimizer: One of `OPTIMIZERS`.
        implementation: "foreach", "fused" or "for-loop".
        has_groups: Whether biases are in a group with another learning rate.
        steps: Optimizer steps.
        micro_batches: Micro-batches per step.
        clip: "norm", "max norm", "value", "both" or "nothing".
        scaler: "scale", "guard" or "none".
        bad_step: A step whose loss is inf, or None.
        schedule: Whether the learning rate changes.
        frozen_from: The first step in which the head is frozen, or None; two steps later it is trained again.
        checkpointed: Whether the layers are recomputed in the backward.
        saved_after: The step after which model and optimizer are saved, and loaded into new ones, or None.
        bucket: Bytes of fp32 weights that are stepped at once.
        keeps_gradients: Whether gradients are set to zero instead of None.
    """

    seed: int
    kind: str
    width: int
    layers: tuple[str, ...]
    optimizer: str
    implementation: str
    has_groups: bool
    steps: int
    micro_batches: int
    clip: str
    scaler: str
    bad_step: int | None
    schedule: bool
    frozen_from: int | None
    checkpointed: bool
    saved_after: int | None
    bucket: int
    keeps_gradients: bool

    @property
    def is_compiled(self) -> bool:
        """Whether steps are compiled: most of those that can be."""
        return (self.optimizer, self.implementation) == ("AdamW", "fused") and self.seed % 4 > 0

    def __str__(self) -> str:
        return ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))


def draw(seed: int, kind: str = "loop") -> Program:
    """Return the program of a seed."""
    pick = random.Random(f"{kind} {seed}")
    optimizer = pick.choice(list(OPTIMIZERS))
    steps, alone = pick.randint(2, 5), kind == "loop"
    frozen_from = pick.randrange(steps) if alone and pick.random() < 0.2 else None
    # Fused SGD cannot begin the momentum of one parameter later than that of another.
    may_fuse = optimizer in HAVE_FUSED and (optimizer != "SGD, momentum" or frozen_from is None)
    implementations = ["foreach", "for-loop", *(["fused"] if may_fuse else [])]
    scaler = pick.choice(["none", "none", "guard", "scale"])
    scaler = "none" if kind == "Trainer" else scaler  # which has none for bf16
    clip = pick.choice(["nothing", "norm", "norm", "value", *(["max norm", "both"] if alone else [])])
    return Program(
        seed=seed,
        kind=kind,
        width=pick.choice(WIDTHS),
        layers=tuple(
            pick.choices(["linear", "linear", "unbiased", "norm", "conv", "gelu", "dropout"], k=pick.randint(1, 5))
        ),
        optimizer=optimizer,
        implementation=pick.choice(implementations),
        has_groups=pick.random() < 0.3,
        steps=steps,
        micro_batches=pick.choice([1, 1, 2, 3]),
        clip=clip,
        scaler=scaler,
        bad_step=pick.randrange(steps) if scaler != "none" and pick.random() < 0.3 else None,
        schedule=pick.random() < 0.3,
        frozen_from=frozen_from,
        checkpointed=pick.random() < 0.2,
        saved_after=pick.randrange(steps - 1) if alone and pick.random() < 0.3 else None,
        bucket=pick.choice([256, 4096, 4 << 20]),
        keeps_gradients=pick.random() < 0.2,
    )


class Net(nn.Module):
    """Embedded tokens, the layers of a program, each with a skip connection, and a head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program.width
        makes: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: nn.Linear(width, width),
            "unbiased": lambda: nn.Linear(width, width, bias=False),
            "norm": lambda: nn.LayerNorm(width),
            "conv": lambda: nn.Conv1d(width, width, 3, padding=1),
            "gelu": nn.GELU,
            "dropout": lambda: nn.Dropout(0.2),
        }
        self.token, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.layers = nn.ModuleList(makes[name]() for name in program.layers)
        self.checkpointed = program.checkpointed

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x.transpose(1, 2)).transpose(1, 2) if isinstance(layer, nn.Conv1d) else layer(x))
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return self.head(x)  # type: ignore[no-any-return]


@dataclass
class Training:
    """A program in one of the two formats.

    Args:
        program: The program.
        with_master: Whether weights are in 16 bits.
        numbers: Losses and norms.
    """

    program: Program
    with_master: bool
    numbers: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.program.seed)
        self.model = Net(self.program)
        freeze(self.model, self.program, 0)
        self.optimizer: Any = self.optimizer_of(self.model)

    def optimizer_of(self, model: nn.Module) -> Any:
        program = self.program
        options = {} if program.optimizer == "Adafactor" else {program.implementation: True}
        options = {} if program.implementation == "for-loop" else options
        biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
        others = [param for name, param in model.named_parameters() if not name.endswith("bias")]
        groups = [{"params": others}, {"params": biases, "lr": 1e-3}] if program.has_groups else [*model.parameters()]
        inner = OPTIMIZERS[program.optimizer](groups, **options)
        if not self.with_master:
            return inner
        sums: dict[str, Any] = {}
        if program.micro_batches > 1 or program.keeps_gradients:
            sums = {"accumulate": "compensated"} if program.seed % 2 else {"grad_dtype": torch.float32}
        with buckets_of(program.bucket):
            return castwise.MasterWeights(inner, model, compiled=program.is_compiled, **sums)

    def batches(self) -> Iterator[list[Tensor]]:
        draws = torch.Generator().manual_seed(self.program.seed)
        for _ in range(self.program.steps):
            yield [torch.randint(11, (2, 4), generator=draws) for _ in range(self.program.micro_batches)]

    def loss(self, forward: Callable[[Tensor], Tensor], tokens: Tensor, step: int) -> Tensor:
        """Return the loss of a micro-batch; inf in the program's bad step."""
        loss = nn.functional.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.numbers.append(loss.detach())
        loss = loss / self.program.micro_batches
        return loss * torch.inf if step == self.program.bad_step else loss

    def result(self) -> list[Tensor]:
        """Return the numbers, weights and states."""
        weights = self.optimizer.fp32_state_dict(self.model) if self.with_master else self.model.state_dict()
        return [*self.numbers, *weights.values(), *self.states()]

    def states(self) -> Iterator[Tensor]:
        """Yield the states of parameters that have stepped. A skipped fused step makes some of zeros, others none."""
        for param in self.model.parameters():
            state = self.optimizer.state.get(param, {})
            tensors = [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
            yield from tensors if any(tensor.any() for tensor in tensors) else ()


@contextmanager
def buckets_of(nbytes: int) -> Iterator[None]:
    """Have `MasterWeights` that are made in the block step so many bytes of fp32 weights at once."""
    before = _buckets._BUCKET_BYTES
    _buckets._BUCKET_BYTES = nbytes
    try:
        yield
    finally:
        _buckets._BUCKET_BYTES = before


def loop(training: Training) -> None:
    """Train in a loop by hand, with everything that is drawn."""
    program = training.program
    scaler = scaler_of(program)
    for step, batch in enumerate(training.batches()):
        freeze(training.model, program, step)
        for tokens in batch:
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = training.loss(training.model, tokens, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
        training.numbers += clipped(training, scaler)
        if scaler is None:
            training.optimizer.step()
        else:
            scaler.step(training.optimizer)
            scaler.update()
        schedule(training, step)
        training.optimizer.zero_grad(set_to_none=not program.keeps_gradients)
        if step == program.saved_after:
            reload(training)


def scaler_of(program: Program) -> castwise.GradScaler | None:
    if program.scaler == "none":
        return None
    if program.scaler == "guard":
        return castwise.GradScaler("cpu", schedule=castwise.schedules.Guard())
    return castwise.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)


def freeze(model: Net, program: Program, step: int) -> None:
    """Freeze the head at a step, and train it again two steps later."""
    if program.frozen_from is not None and step in (program.frozen_from, program.frozen_from + 2):
        model.head.requires_grad_(step != program.frozen_from)


def clipped(training: Training, scaler: castwise.GradScaler | None) -> list[Tensor]:
    """Clip as the program does, and return norms."""
    # In the optimizer's order, as in its own clipping, because the order of a sum changes its last bits.
    params = [param for group in training.optimizer.param_groups for param in group["params"]]
    how = training.program.clip
    norms = []
    if how in ("norm", "max norm", "both"):
        order = torch.inf if how == "max norm" else 2.0
        if scaler is not None:
            norms.append(scaler.clip_grad_norm_(training.optimizer, 0.5, order))
        elif training.with_master:
            norms.append(training.optimizer.clip_grad_norm_(0.5, order))
        else:
            norms.append(nn.utils.clip_grad_norm_(params, 0.5, order))
    if how in ("value", "both"):
        if scaler is not None:
            scaler.clip_grad_value_(training.optimizer, 0.02)
        elif training.with_master:
            training.optimizer.clip_grad_value_(0.02)
        else:
            nn.utils.clip_grad_value_(params, 0.02)
    return norms


def schedule(training: Training, step: int) -> None:
    if training.program.schedule:
        for group in training.optimizer.param_groups:
            group["lr"] = group["lr"] * (0.5 if step % 2 else 1.5)


def reload(training: Training) -> None:
    """Go on with a new model and a new optimizer, which load what the old ones save."""
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    training.model = Net(training.program)
    training.optimizer = training.optimizer_of(training.model)
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])


def accelerated(training: Training) -> None:
    """Train with Accelerate, as `castwise.integrations.accelerate` prepares it."""
    import accelerate
    import accelerate.state

    from castwise.integrations.accelerate import prepare

    program = training.program
    guard = castwise.schedules.Guard() if program.scaler == "guard" else None
    accumulation = {"gradient_accumulation_steps": program.micro_batches}
    accelerator = prepare(accelerate.Accelerator(cpu=True, mixed_precision="bf16", **accumulation), schedule=guard)
    model, optimizer = accelerator.prepare(training.model, training.optimizer)
    for step, batch in enumerate(training.batches()):
        for tokens in batch:
            with accelerator.accumulate(model):
                accelerator.backward(training.loss(model, tokens, step))
                if accelerator.sync_gradients and program.clip == "norm":
                    training.numbers.append(torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                elif accelerator.sync_gradients and program.clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.02)
                optimizer.step()
                optimizer.zero_grad(set_to_none=not program.keeps_gradients)
        schedule(training, step)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def fabricated(training: Training) -> None:
    """Train with Lightning's Fabric and castwise's plugin."""
    import lightning

    from castwise.integrations.lightning import FabricMixedPrecision

    program = training.program
    plugin = FabricMixedPrecision("bf16-mixed", "cpu", scaler_of(program))
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model, optimizer = fabric.setup(training.model, training.optimizer)
    bound = {"norm": {"max_norm": 0.5, "error_if_nonfinite": False}, "value": {"clip_val": 0.02}}.get(program.clip)
    for step, batch in enumerate(training.batches()):
        for tokens in batch:
            fabric.backward(training.loss(model, tokens, step))
        norm = None if bound is None else fabric.clip_gradients(model, optimizer, **bound)
        training.numbers += [] if norm is None else [norm]
        optimizer.step()
        schedule(training, step)
        optimizer.zero_grad(set_to_none=not program.keeps_gradients)


def by_lightning(training: Training) -> None:
    """Train with Lightning's Trainer and castwise's plugin."""
    import lightning

    from castwise.integrations.lightning import MixedPrecision

    program = training.program

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = training.model, 0

        def training_step(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            step = (self.calls - 1) // program.micro_batches
            # The Trainer divides by the number of micro-batches itself.
            return training.loss(self.net, tokens, step) * program.micro_batches

        def configure_optimizers(self) -> Any:
            return training.optimizer

    clip = {"norm": ("norm", 0.5), "value": ("value", 0.02)}.get(program.clip)
    clips = {} if clip is None else {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=program.micro_batches,
            default_root_dir=folder, plugins=MixedPrecision("bf16-mixed", "cpu", scaler_of(program)), **quiet, **clips,
        )  # fmt: skip
        trainer.fit(
            Module(),
            torch.utils.data.DataLoader([each for batch in training.batches() for each in batch], batch_size=None),
        )


def by_transformers(training: Training) -> None:
    """Train with the Transformers Trainer, whose accelerator castwise prepares."""
    import accelerate.state
    import transformers

    from castwise.integrations.accelerate import prepare

    program = training.program

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = training.model

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"loss": training.loss(self.net, tokens, -1) * program.micro_batches}  # the Trainer divides, too

    def factor(step: int) -> float:
        return 1.0 / (1 + step) if program.schedule else 1.0

    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            *(folder,), max_steps=program.steps, use_cpu=True, bf16=True, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_steps=1, per_device_train_batch_size=2, remove_unused_columns=False,
            gradient_accumulation_steps=program.micro_batches, max_grad_norm=0.5 if program.clip == "norm" else 0.0,
        )  # fmt: skip
        rows = [{"tokens": row} for batch in training.batches() for tokens in batch for row in tokens]
        optimizers = training.optimizer, torch.optim.lr_scheduler.LambdaLR(training.optimizer, factor)
        trainer = transformers.Trainer(
            Model(), settings, train_dataset=rows, optimizers=optimizers,
            callbacks=[], data_collator=lambda rows: {"tokens": torch.stack([row["tokens"] for row in rows])},
        )  # fmt: skip
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        prepare(trainer.accelerator)
        trainer.train()
    training.numbers += [torch.tensor(row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


RUN = dict(zip(KINDS, (loop, accelerated, fabricated, by_lightning, by_transformers), strict=True))


def results(program: Program) -> list[list[Tensor]]:
    """Return what a program computes with fp32 weights, and with 16-bit ones."""
    out = []
    for with_master in (False, True):
        training = Training(program, with_master)
        torch.manual_seed(program.seed)
        RUN[program.kind](training)
        out.append(training.result())
    return out


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return True if two lists of tensors have the same bits, NaN included."""
    return len(a) == len(b) and all(x.dtype == y.dtype and same(x, y) for x, y in zip(a, b, strict=True))


def same(a: Tensor, b: Tensor) -> bool:
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def attempt(seed: int, kind: str) -> str | None:
    """Return how a program differs, or None."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # a Trainer describes the machine each time
    program = draw(seed, kind)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference, ours = results(program)
    except Exception as error:
        return f"{type(error).__name__}: {error}: {program}"
    return None if same_bits(reference, ours) else f"differs: {program}"


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.weight_programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=20_000, help="programs in a loop by hand")
    parser.add_argument("--frameworks", type=int, default=300, help="programs with each framework")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    options = parser.parse_args()
    start, kinds = time.perf_counter(), {}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for kind in KINDS:
            number = options.programs if kind == "loop" else options.frameworks
            seeds = range(options.first, options.first + number)
            differ = [each for each in pool.map(functools.partial(attempt, kind=kind), seeds, chunksize=50) if each]
            kinds[kind] = {"programs": number, "different": len(differ)}
            print(*differ[:20], f"{kind}: {time.perf_counter() - start:.0f} s", sep="\n", file=sys.stderr)
    record = {"machine": recording.machine(), "kinds": kinds}
    recording.write("weight_programs-cpu", record, table(record))


def table(record: dict[str, Any]) -> str:
    rows = [f"| {kind} | {row['programs']:,} | {row['different']:,} |" for kind, row in record["kinds"].items()]
    head = [
        recording.headline(record["machine"]),
        "",
        "| programs | number | other bits than fp32 weights |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    main()
