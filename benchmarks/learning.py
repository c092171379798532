"""Compare how well models learn with 16-bit weights and with fp32 weights.

    pip install scipy torch-optimi torchao schedulefree
    python -m benchmarks.learning

Trains the demo's GPT under autocast in bf16 from the same weights on the same batches, with five seeds each: with fp32
weights, with plain bf16 weights in linear layers, with the methods of other libraries, and with
`castwise.MasterWeights`. All 16-bit methods keep only linear layers in bf16, so they differ only in how weights are
stepped and in how states are stored. torchao stores states of fewer than 4,096 elements in the dtype of the weight.
Compares the final held-out loss. Libraries that are not installed are skipped. Writes
benchmarks/results/learning-cpu.json and the table in benchmarks/README.md. Takes about fifteen minutes on two quiet
cores.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor, nn

import castwise
from benchmarks import recording
from benchmarks.fidelity import difference, spread
from benchmarks.recording import headline
from castwise._demo.corpus import Corpus, derive_seed, read_text
from castwise._demo.gpt import GPT, Size
from castwise._demo.gpt import loss as loss_of_text

SEEDS = range(5)
STEPS = 300
WINDOW = 25  # steps that training losses are averaged over
VALIDATION_BATCHES = 16
SIZE = Size(layers=1, heads=2, width=64, context=64, batch=8)
BF16 = torch.bfloat16
REFERENCE, BARE = "fp32 weights", "bf16 weights"
SPLIT, SPLIT_LOW, SPLIT_8BIT = "split", "split, bf16 states", "split, 8-bit states"
STOCHASTIC, STOCHASTIC_LOW = "stochastic", "stochastic, bf16 states"
OPTIMI, TORCHAO = "torch-optimi: Kahan", "torchao: stochastic"
TORCHAO_8BIT, TORCHAO_8BIT_FP32 = "torchao: stochastic, 8-bit states", "torchao: fp32 weights, 8-bit states"
PEERS = (OPTIMI, TORCHAO, TORCHAO_8BIT, TORCHAO_8BIT_FP32)
NAMES = {REFERENCE: REFERENCE, BARE: f"{BARE}, nothing kept"} | {name: name for name in PEERS}
LOW_STATES: dict[str, torch.dtype | str] = {SPLIT_LOW: BF16, STOCHASTIC_LOW: BF16, SPLIT_8BIT: "int8_blockwise"}
PACKAGES = {OPTIMI: "torch-optimi", "AdamWScheduleFree": "schedulefree"} | dict.fromkeys(PEERS[1:], "torchao")
MASTER_WEIGHTS: dict[str, dict[str, Any]] = {
    SPLIT: {},
    STOCHASTIC: {"method": "stochastic"},
    SPLIT_LOW: {},
    STOCHASTIC_LOW: {"method": "stochastic"},
    SPLIT_8BIT: {},
}
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01  # torch's for AdamW; torch-optimi has others
Optimizers = list[torch.optim.Optimizer]


def adamw(model: nn.Module, lr: float) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=DECAY)]


def adafactor(model: nn.Module, lr: float) -> Optimizers:
    return [torch.optim.Adafactor(model.parameters(), lr=lr)]


def muon(model: nn.Module, lr: float) -> Optimizers:
    """Return Muon for the matrices of the blocks, and AdamW for all other parameters."""
    assert isinstance(model, GPT)
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if not any(param is each for each in matrices)]
    return [
        torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr),
    ]


def schedule_free(model: nn.Module, lr: float) -> Optimizers:
    import schedulefree

    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=lr)
    optimizer.train()
    return [optimizer]


@dataclass(frozen=True)
class Family:
    """An optimizer, and the names of its states that are as large as a weight."""

    make: Callable[[nn.Module, float], Optimizers]
    learning_rate: float
    states: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    def methods(self) -> list[str]:
        """Return the compared methods, the reference first."""
        ours = [name for name in MASTER_WEIGHTS if self.states or name not in LOW_STATES]
        return [REFERENCE, BARE, *self.peers, *ours]


# Rates small enough that updates are often less than half a bf16 step, and large enough to learn in few steps. At 1e-3,
# AdamW's default, plain bf16 weights came within 0.004 of fp32 weights (two layers, one seed).
FAMILIES = {
    "AdamW": Family(adamw, 3e-4, ("exp_avg", "exp_avg_sq"), PEERS),
    "Muon": Family(muon, 3e-4, ("momentum_buffer", "exp_avg", "exp_avg_sq")),
    "Adafactor": Family(adafactor, 3e-3),
    "AdamWScheduleFree": Family(schedule_free, 1e-3, ("exp_avg_sq",)),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training run: losses by step, held-out loss, and bytes per linear-layer parameter."""

    losses: list[float]
    held_out: float
    bytes_per_parameter: float


def linear_params(model: nn.Module) -> list[Tensor]:
    """Return the parameters that are 16-bit in all methods except the reference."""
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return [param for module in linear for param in module.parameters()]


def optimizers_of(model: nn.Module, family: Family, method: str) -> Optimizers:
    """Narrow the model for a method, and return its optimizers."""
    if method in MASTER_WEIGHTS:
        return [
            castwise.MasterWeights(inner, model, state_dtype=low_state(inner, family, method), **MASTER_WEIGHTS[method])
            for inner in family.make(model, family.learning_rate)
        ]
    if method not in (REFERENCE, TORCHAO_8BIT_FP32):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.to(BF16)
    options = {"lr": family.learning_rate, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    if method == OPTIMI:
        import optimi

        return [optimi.AdamW(model.parameters(), kahan_sum=True, **options)]
    if method in PEERS:
        from torchao.optim import AdamW8bit, _AdamW

        make = _AdamW if method == TORCHAO else AdamW8bit
        return [make(model.parameters(), bf16_stochastic_round=method != TORCHAO_8BIT_FP32, **options)]
    return family.make(model, family.learning_rate)


def low_state(inner: torch.optim.Optimizer, family: Family, method: str) -> dict[str, Any] | None:
    """Return the formats of an optimizer's states that are not in fp32, or None."""
    if method not in LOW_STATES:
        return None
    is_muon = isinstance(inner, torch.optim.Muon)
    return {name: LOW_STATES[method] for name in family.states if (name == "momentum_buffer") == is_muon}


def train(family: Family, method: str, seed: int, steps: int) -> Outcome:
    corpus = Corpus(read_text(None), SIZE.context)
    torch.manual_seed(derive_seed(seed, "weights"))
    model = GPT(SIZE)
    optimizers = optimizers_of(model, family, method)
    switch(optimizers, "train")
    losses = []
    for step in range(steps):
        tokens, targets = corpus.batch(SIZE, seed, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with castwise.autocast("cpu", dtype=BF16):
            loss = loss_of_text(model(tokens), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    taken = bytes_per_parameter(model, optimizers)
    switch(optimizers, "eval")
    held_out = []
    with torch.no_grad(), castwise.autocast("cpu", dtype=BF16):
        for tokens, targets in corpus.validation(SIZE, VALIDATION_BATCHES):
            held_out.append(loss_of_text(model(tokens), targets).item())
    return Outcome(losses, statistics.fmean(held_out), taken)


def switch(optimizers: Optimizers, mode: str) -> None:
    """Call `train` or `eval` of schedule-free optimizers."""
    for optimizer in optimizers:
        if hasattr(optimizer, mode):
            getattr(optimizer, mode)()


def bytes_per_parameter(model: nn.Module, optimizers: Optimizers) -> float:
    """Return the bytes per parameter after a step: weights, autocast's copies, extra bits, gradients and state."""
    params = linear_params(model)
    number = sum(param.numel() for param in params)
    total = sum(param.nbytes for param in params)
    total += sum(param.grad.nbytes for param in params if param.grad is not None)
    total += sum(2 * param.numel() for param in params if param.dtype is torch.float32)  # autocast's copies
    for optimizer in optimizers:
        if isinstance(optimizer, castwise.MasterWeights):
            total += optimizer.memory()["kept"]
        for param in params:
            values = optimizer.state[param].values() if param in optimizer.state else ()
            total += sum(map(_bytes, values))
    return total / number


def _bytes(state: Any) -> int:
    """Return the bytes of a state of a parameter; those of codes and scales for one in 8 bits, ours or torchao's."""
    codes, scales = getattr(state, "codes", None), getattr(state, "scale", getattr(state, "scales", None))
    if codes is not None and scales is not None:
        return int(codes.nbytes + scales.nbytes)
    return state.nbytes if isinstance(state, Tensor) and state.dim() else 0


def why_not(name: str) -> str | None:
    """Return the reason why an optimizer or a method is skipped, or None."""
    package = PACKAGES.get(name)
    return None if package is None or version(package) else f"left out: {package} is not installed"


def version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def attempt(name: str, method: str, seed: int, steps: int) -> Outcome | str:
    """Train in a process of the pool, and return the outcome, or the error of another library."""
    torch.set_num_threads(1)  # the model is too small for more threads
    try:
        return train(FAMILIES[name], method, seed, steps)
    except Exception as error:
        if method not in FAMILIES[name].peers:
            raise
        return f"fails on this CPU: {type(error).__name__}: {error}".splitlines()[0]


def measure(name: str, pool: Executor, seeds: Sequence[int], steps: int = STEPS) -> dict[str, Any]:
    """Train with an optimizer, all methods and all seeds."""
    family = FAMILIES[name]
    skipped = {method: reason for method in family.methods() if (reason := why_not(name) or why_not(method))}
    asked = {
        method: [pool.submit(attempt, name, method, seed, steps) for seed in seeds]
        for method in family.methods()
        if method not in skipped
    }
    methods: dict[str, Any] = {}
    reference: list[Outcome] = []
    for method in family.methods():
        if method in skipped:
            methods[method] = {"skipped": skipped[method]}
            continue
        outcomes = [found for future in asked[method] if isinstance(found := future.result(), Outcome)]
        if len(outcomes) < len(seeds):
            methods[method] = {"skipped": next(each.result() for each in asked[method] if str is type(each.result()))}
            continue
        reference = reference or outcomes
        methods[method] = row(outcomes) if method == REFERENCE else {**row(outcomes), **beside(outcomes, reference)}
    return {"learning rate": family.learning_rate, "methods": methods}


def row(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    by_step = [statistics.fmean(losses) for losses in zip(*(each.losses for each in outcomes), strict=True)]
    return {
        **spread([outcome.held_out for outcome in outcomes]),
        "bytes per parameter": outcomes[0].bytes_per_parameter,
        "training loss, means of 25 steps": [
            round(statistics.fmean(by_step[begin : begin + WINDOW]), 5) for begin in range(0, len(by_step), WINDOW)
        ],
    }


def beside(outcomes: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, Any]:
    pairs = list(zip(outcomes, reference, strict=True))
    return {
        "minus fp32 weights": difference([a.held_out for a, _ in pairs], [b.held_out for _, b in pairs]),
        "seeds identical to fp32 weights": sum(a.losses == b.losses and a.held_out == b.held_out for a, b in pairs),
    }


def table(record: dict[str, Any]) -> str:
    lines = [
        headline(record["machine"]),
        "",
        "| optimizer, learning rate | weights | bytes per parameter | held-out loss, mean ± standard deviation of "
        f"{record['seeds']} seeds | minus fp32 weights (95% interval) | seeds identical to fp32 weights |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in record["optimizers"].items():
        for method, found in result["methods"].items():
            label = NAMES.get(method, f"MasterWeights, {method}")
            cells = [f"{name}, {result['learning rate']:g}", label]
            if "skipped" in found:
                lines.append(f"| {' | '.join([*cells, found['skipped'], '-', '-', '-'])} |")
                continue
            cells += [f"{found['bytes per parameter']:.1f}", f"{found['mean']:.4f} ± {found['sd']:.4f}"]
            if method == REFERENCE:
                cells += ["-", "-"]
            else:
                low, high = found["minus fp32 weights"]["interval"]
                cells += [f"{found['minus fp32 weights']['mean']:+.5f} ({low:+.5f} to {high:+.5f})"]
                cells += [f"{found['seeds identical to fp32 weights']} of {record['seeds']}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    about = {**recording.machine(), "scipy": scipy.__version__}
    about |= {package: version(package) for package in PACKAGES.values()}
    record: dict[str, Any] = {"machine": about, "seeds": len(SEEDS), "steps": STEPS, "optimizers": {}}
    # Spawned, because a fork of a process that used torch's threads may hang.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for name in FAMILIES:
            record["optimizers"][name] = measure(name, pool, SEEDS)
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    record["took_s"] = round(time.perf_counter() - start, 1)
    recording.write("learning-cpu", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
