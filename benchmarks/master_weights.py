"""The cost and savings of 16-bit weights with `MasterWeights`: memory, optimizer steps and whole training steps."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from benchmarks.benchmark import Benchmark, Record, Table, shown
from benchmarks.pairing import AGAIN, QUICK_S, TORCH, Rounds, compare, race, ratio, seconds
from benchmarks.step_cost import OPTIMIZERS
from castwise._demo.corpus import Corpus, read_text
from castwise._demo.gpt import GPT, SIZES, Block, Size
from castwise._demo.gpt import loss as loss_of_text
from castwise._demo.memory import PeakMemory
from castwise._demo.training import LEARNING_RATE, MAX_NORM
from castwise._torch_private import TorchDispatchMode

BF16 = torch.bfloat16
LOW_STATE = {"exp_avg": BF16, "exp_avg_sq": BF16}
FP32 = "fp32 weights"
SPLIT, SPLIT_LOW, STOCHASTIC_LOW = "split", "split, bf16 states", "stochastic, bf16 states"
COMPILED, COMPILED_LOW = "split, compiled", "split, bf16 states, compiled"
VARIANTS: dict[str, dict[str, Any]] = {
    SPLIT: {},
    COMPILED: {"compiled": True},
    SPLIT_LOW: {"state_dtype": LOW_STATE},
    COMPILED_LOW: {"state_dtype": LOW_STATE, "compiled": True},
    STOCHASTIC_LOW: {"method": "stochastic", "state_dtype": LOW_STATE},
}
KEPT_IN_MEMORY = (FP32, SPLIT, SPLIT_LOW, STOCHASTIC_LOW)
# Documented limits: bytes per 16-bit parameter, and time relative to fp32 weights.
BYTES = {SPLIT: 14.2, SPLIT_LOW: 10.2, STOCHASTIC_LOW: 8.1}
OPTIMIZER_STEP = {SPLIT: 2.0, COMPILED: 1.6, COMPILED_LOW: 3.0}
TRAINING_STEP = {SPLIT: 1.03, COMPILED: 1.01}
AS_IT_IS, GIVES_BACK = "malloc as it is", "malloc that gives back"
PEAKS = ((GIVES_BACK, "of steps"), (AS_IT_IS, "of steps"), (GIVES_BACK, "until the first step"))
ROWS = 8  # in a batch for the blocks; few, so that activations are small relative to weights


@dataclass(frozen=True)
class Plan:
    """Rounds and sizes.

    Args:
        rounds: Rounds of optimizer steps and training steps.
        blocks: Number of transformer blocks for optimizer steps and child processes.
        width: Width of the blocks.
        gpt: Size of the GPT for whole training steps.
        optimizers: Names in `OPTIMIZERS` of `step_cost`.
        children: Variants whose peak memory is measured, each in its own process.
    """

    rounds: Rounds
    blocks: int = 12
    width: int = 768
    gpt: Size = SIZES["small"]
    optimizers: tuple[str, ...] = ("fused AdamW", "foreach AdamW")
    children: tuple[str, ...] = KEPT_IN_MEMORY


class Rival:
    """A model with an optimizer, wrapped in a variant of `MasterWeights` unless weights are fp32.

    Args:
        variant: A name in `VARIANTS`; or `FP32`, `TORCH` or `AGAIN` for fp32 weights.
        model: An fp32 model, already on its device.
        optimizer: A name in `OPTIMIZERS` of `step_cost`.
        lr: The learning rate.
    """

    def __init__(self, variant: str, model: nn.Module, optimizer: str = "fused AdamW", lr: float = 1e-6) -> None:
        kind, options = OPTIMIZERS[optimizer]
        self.model = model
        inner: torch.optim.Optimizer = kind(model.parameters(), lr=lr, **options)
        self.master = castwise.MasterWeights(inner, model, **VARIANTS[variant]) if variant in VARIANTS else None
        self.optimizer = self.master or inner
        self.region = castwise.autocast if self.master else torch.autocast

    def backward(self, loss: Callable[[nn.Module], Tensor], device: str) -> Tensor:
        """Compute gradients under autocast in bf16, and return the loss."""
        with self.region(device, dtype=BF16):
            found = loss(self.model)
        found.backward()  # type: ignore[no-untyped-call]  # torch's
        return found.detach()

    def clip(self) -> Tensor:
        """Clip gradients to `MAX_NORM`."""
        if self.master is not None:
            return self.master.clip_grad_norm_(MAX_NORM)
        return nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def fill_gradients(self) -> None:
        """Give each parameter a random gradient of its dtype."""
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)


def blocks(count: int, width: int) -> nn.Sequential:
    """Return transformer blocks of the demo's GPT, with the shapes of `step_cost` but no embeddings."""
    torch.manual_seed(0)
    size = Size(layers=count, heads=max(1, width // 64), width=width, context=1, batch=ROWS)
    return nn.Sequential(*(Block(size) for _ in range(count)))


class CastBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Count the bytes of casts of parameters to another dtype."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._params = {param.data_ptr() for param in params}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count its bytes."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._params:
            self.count += result.nbytes
        return result


def bytes_of(variant: str, device: str, width: int = 256) -> Record:
    """Count the bytes of a linear layer's parameters after a step of AdamW, per parameter and in total."""
    model = blocks(1, width).to(device)
    low = [param for each in model.modules() if isinstance(each, nn.Linear) for param in each.parameters()]
    rival = Rival(variant, model)
    x = torch.randn(ROWS, 1, width, device=device)
    with CastBytes(low) as casts:
        rival.backward(lambda model: model(x).float().square().mean(), device)
    rival.optimizer.step()
    if rival.master is not None:
        found = rival.master.memory()
        found.pop("workspace")  # one bucket, however large the model
    else:
        found = {
            "parameters": sum(param.numel() for param in low),
            "weights": sum(param.nbytes for param in low),
            "kept": 0,
            "gradients": sum(param.grad.nbytes for param in low if param.grad is not None),
            "state": sum(rival.optimizer.state[param][name].nbytes for param in low for name in LOW_STATE),
        }
    number = found.pop("parameters")
    each = {name: value / number for name, value in {**found, "casts": casts.count}.items()}
    return with_limit({**each, "sum": sum(each.values())}, "sum", BYTES.get(variant))


def with_limit(record: Record, name: str, limit: float | None) -> Record:
    """Return a record with the limit of one of its values, and whether it is met."""
    return record if limit is None else {**record, "limit": limit, "within the limit": record[name] <= limit}


def peaks(variant: str, count: int, width: int, device: str) -> Record:
    """Train a few steps and return the peak bytes per parameter, when the optimizer is created and during the steps.

    Call it in a separate process, because memory freed earlier would hide a peak.
    """
    _few_steps(Rival(variant, blocks(1, 64).to(device)), 64, device)  # loads everything that a first step loads
    memory = PeakMemory(torch.device(device))
    rival = Rival(variant, blocks(count, width).to(device))
    made = memory.read()
    PeakMemory(torch.device(device))  # resets the mark; growth is counted from the same start
    _few_steps(rival, width, device)
    number = sum(param.numel() for param in rival.model.parameters())
    taken = {"until the first step": made, "of steps": memory.read()}
    return {"parameters": number, **{when: peak and peak / number for when, peak in taken.items()}}


def _few_steps(rival: Rival, width: int, device: str) -> None:
    x = torch.randn(ROWS, 1, width, device=device)
    for _ in range(4):
        rival.optimizer.zero_grad()
        rival.backward(lambda model: model(x).float().square().mean(), device)
        rival.optimizer.step()


_CHILD = """\
import json, sys
from benchmarks.master_weights import peaks
variant, blocks, width, device = sys.argv[1:]
print(json.dumps(peaks(variant, int(blocks), int(width), device)))
"""


def peaks_of_a_child(variant: str, count: int, width: int, device: str, *, gives_back: bool) -> Record:
    """Return `peaks` measured in a new process.

    Args:
        variant: A name in `VARIANTS`, or `FP32`.
        count: Number of transformer blocks.
        width: Width of the blocks.
        device: "cpu" or "cuda".
        gives_back: Whether glibc's malloc returns freed memory, so that the peak shows what tensors need.
    """
    command = [sys.executable, "-c", _CHILD, variant, str(count), str(width), device]
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": str(1 << 16)} if gives_back else {})}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def _emptied() -> Iterator[None]:
    """Free the body's memory afterwards; optimizers and their tensors form reference cycles."""
    yield
    gc.collect()


def optimizer_steps(optimizer: str, device: str, plan: Plan) -> Record:
    """Time steps of the optimizers on the same shapes in turns."""
    rivals = {}
    for name in (TORCH, *variants_of(optimizer, device)):
        rivals[name] = Rival(name, blocks(plan.blocks, plan.width).to(device), optimizer)
        rivals[name].fill_gradients()
    rivals[AGAIN] = rivals[TORCH]

    def timed(rival: Rival) -> Callable[[], float]:
        return lambda: seconds(rival.optimizer.step, device)

    times = race({name: timed(rival) for name, rival in rivals.items()}, plan.rounds)
    parameters = sum(param.numel() for param in rivals[TORCH].model.parameters())
    return {"parameters": parameters, **compared(times, OPTIMIZER_STEP if optimizer == "fused AdamW" else {})}


def variants_of(optimizer: str, device: str) -> list[str]:
    """Return the variants for an optimizer: the compiled ones are for fused ones on CPUs."""
    can_compile = OPTIMIZERS[optimizer][1].get("fused") and device == "cpu"
    return [name for name, options in VARIANTS.items() if can_compile or not options.get("compiled")]


def compared(times: dict[str, list[float]], limits: dict[str, float]) -> Record:
    """Return median times, and each variant's ratio to torch with fp32 weights."""
    null = ratio(times[AGAIN], times[TORCH])
    return {
        "seconds": {name: statistics.median(of_name) for name, of_name in times.items()},
        "to fp32 weights": {
            name: with_limit(dict(compare(times[name], times[TORCH], null)), "median", limits.get(name))
            for name in times
            if name in VARIANTS
        },
    }


def training_steps(device: str, plan: Plan) -> Record:
    """Time clipped training steps of the demo's GPT on the same batches in turns."""
    corpus = Corpus(read_text(None), plan.gpt.context)
    rivals, losses = {}, {}
    for name in (TORCH, AGAIN, SPLIT, *([COMPILED] if device == "cpu" else [])):
        torch.manual_seed(0)
        rivals[name] = Rival(name, GPT(plan.gpt).to(device), lr=LEARNING_RATE)
        losses[name] = list[float]()

    def step(name: str) -> Callable[[], float]:
        rival = rivals[name]

        def take() -> float:
            tokens, targets = (each.to(device) for each in corpus.batch(plan.gpt, 0, len(losses[name])))
            found = []

            def whole() -> None:
                rival.optimizer.zero_grad()
                found.append(rival.backward(lambda model: loss_of_text(model(tokens), targets), device))
                rival.clip()
                rival.optimizer.step()

            taken = seconds(whole, device)
            losses[name].append(found[0].item())
            return taken

        return take

    times = race({name: step(name) for name in rivals}, plan.rounds)
    return {
        "parameters": sum(param.numel() for param in rivals[TORCH].model.parameters()),
        "tokens": plan.gpt.tokens,
        "steps": len(losses[TORCH]),
        **compared(times, TRAINING_STEP),
        "same losses as fp32 weights": {name: losses[name] == losses[TORCH] for name in VARIANTS if name in losses},
    }


def measure(device: str, plan: Plan) -> Record:
    """Measure bytes, peaks of child processes, optimizer steps and training steps."""
    record: Record = {
        "bytes per parameter": {name: bytes_of(name, device) for name in KEPT_IN_MEMORY},
        "peaks": {
            name: {
                malloc: peaks_of_a_child(name, plan.blocks, plan.width, device, gives_back=malloc == GIVES_BACK)
                for malloc in (AS_IT_IS, GIVES_BACK)
            }
            for name in plan.children
        },
        "optimizer steps": {},
    }
    for optimizer in plan.optimizers:
        with _emptied():
            record["optimizer steps"][optimizer] = optimizer_steps(optimizer, device, plan)
    with _emptied():
        record["training step"] = training_steps(device, plan)
    return record


def tables(record: Record) -> list[Table]:
    """Return tables of bytes and of times."""
    return [_bytes_table(record), *_times_tables(record)]


def _bytes_table(record: Record) -> Table:
    kinds = ("weights", "casts", "kept", "gradients", "state")
    table = Table(
        ["", *kinds, "sum", "limit", *(f"peak {when}, {malloc}" for malloc, when in PEAKS)],
        above="Bytes per parameter, AdamW, linear layers in bf16:",
        below="Peaks are the memory growth per parameter of processes that train the blocks of the next table. glibc's "
        "malloc keeps much of the memory that is freed, unless MALLOC_MMAP_THRESHOLD_ is set to a low number of bytes.",
    )
    for name, found in record["bytes per parameter"].items():
        cells = [name, *(f"{found[kind]:.3f}" for kind in kinds), f"{found['sum']:.3f}", _limit(found)]
        peak = record["peaks"].get(name, {})
        for malloc, when in PEAKS:
            value = peak.get(malloc, {}).get(when)
            cells.append("-" if value is None else f"{value:.1f}")
        table.rows.append(cells)
    return table


def _limit(found: Record) -> str:
    if "limit" not in found:
        return "-"
    return f"{found['limit']:g}: {'met' if found['within the limit'] else 'MISSED'}"


def _times_tables(record: Record) -> list[Table]:
    columns = ["", "fp32 weights", "MasterWeights", "MasterWeights / fp32 weights (quartiles)", "verdict", "limit"]
    tables = []
    for optimizer, found in record["optimizer steps"].items():
        above = f"Steps of {optimizer} alone, {found['parameters']:,} parameters in transformer blocks:"
        tables.append(Table(columns, _times(found), above=above))
    found = record["training step"]
    same = found["same losses as fp32 weights"]
    rows = [[*row, "yes" if same[row[0]] else "no"] for row in _times(found)]
    above = f"Clipped training steps of the demo's GPT, {found['parameters']:,} parameters, {found['tokens']:,} tokens:"
    below = f"Losses of {found['steps']} steps are compared bit for bit with those of torch.autocast."
    tables.append(Table([*columns, "same losses"], rows, above=above, below=below))
    return tables


def _times(found: Record) -> list[list[str]]:
    rows = []
    for name, of_name in found["to fp32 weights"].items():
        cells = [name, *(f"{found['seconds'][each] * 1e3:.1f} ms" for each in (TORCH, name))]
        rows.append([*cells, shown(of_name), of_name["verdict"], _limit(of_name)])
    return rows


BENCHMARK = Benchmark(
    name="master_weights",
    title="16-bit weights",
    about="AdamW in `MasterWeights`, compared with the same optimizer on fp32 weights, both under autocast in bf16. "
    "Autocast's copies of weights exist from the forward to the backward, gradients from the backward to the step. "
    "The memory used by buckets does not depend on the size of the model.",
    quick=Plan(
        rounds=Rounds(9, QUICK_S),
        blocks=2,
        width=256,
        gpt=SIZES["tiny"],
        optimizers=("fused AdamW",),
        children=(),
    ),
    full=Plan(rounds=Rounds(25, 60.0)),
    measure=measure,
    tables=tables,
)
