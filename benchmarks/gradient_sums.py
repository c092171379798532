"""Measure what rounding costs sums of bf16 gradients over micro-batches and over ranks, and what avoids it.

    python -m benchmarks.gradient_sums

Errors are relative to fp64 sums of the same bf16 gradients: the norm of the difference, divided by the norm of the sum.
Adding is timed in one thread, as the backward of a weight of 2^17 elements whose gradient is given. Writes
benchmarks/results/gradient_sums-cpu.json, which docs/tutorials/less-memory.md quotes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import castwise
from benchmarks import recording
from castwise import MasterWeights

STORE = "GRADIENT_SUMS_STORE"
ELEMENTS, ROUNDS = 1 << 17, 301
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compensated": {"accumulate": "compensated"},
    "grad_dtype": {"grad_dtype": torch.float32},
}


def micro_batch(seed: int, elements: int = ELEMENTS) -> torch.Tensor:
    """Return a gradient whose elements are of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(elements, 1, generator=generator).exp_()
    return (torch.randn(elements, 1, generator=generator) * size).bfloat16()


def holder(**settings: Any) -> tuple[nn.Linear, MasterWeights]:
    """Return a layer of one weight, and the optimizer whose step subtracts its gradient."""
    layer = nn.Linear(1, ELEMENTS, bias=False)
    nn.init.zeros_(layer.weight)
    return layer, MasterWeights(torch.optim.SGD(layer.parameters(), lr=1.0), layer, **settings)


def sums(count: int) -> dict[str, dict[str, float]]:
    """Return the error of each way to add gradients, and the bytes per parameter that they need before the step."""
    grads = [micro_batch(seed) for seed in range(count)]
    exact = torch.stack([grad.double() for grad in grads]).sum(0)
    found = {}
    for way, settings in WAYS.items():
        layer, optimizer = holder(**settings)
        for grad in grads:
            torch.autograd.backward(layer.weight, grad)
        nbytes = optimizer.memory()["gradients"] / ELEMENTS
        optimizer.step()
        total = -optimizer.fp32_state_dict(layer)["weight"].double()
        found[way] = {"error": float((total - exact).norm() / exact.norm()), "bytes": nbytes}
    return found


def nanoseconds() -> dict[str, float]:
    """Return the median nanoseconds per element of adding a gradient to another."""
    layers = {way: holder(**settings) for way, settings in WAYS.items()}
    grad, taken = micro_batch(0), {way: list[float]() for way in WAYS}
    for _ in range(ROUNDS):
        for way, (layer, optimizer) in layers.items():
            optimizer.zero_grad()
            torch.autograd.backward(layer.weight, grad)
            torch.autograd.backward(layer.weight, grad)
            start = time.perf_counter()
            torch.autograd.backward(layer.weight, grad)
            taken[way].append((time.perf_counter() - start) / ELEMENTS * 1e9)
    return {way: statistics.median(of_way) for way, of_way in taken.items()}


def net() -> nn.Sequential:
    """Return the network whose gradients are averaged over ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def averaged(way: str) -> torch.Tensor:
    """Return the average over ranks of the gradients of one backward, as a step gets it, in fp64."""
    model: Any = net()
    if way.startswith("FSDP2"):
        reduced_in = torch.float32 if "reduce_dtype" in way else None
        for module in (model[0], model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced_in))
    optimizer: Any = None
    if "weights" not in way:
        accumulate = "compensated" if "sum_over_ranks" in way else "plain"
        optimizer = MasterWeights(torch.optim.SGD(model.parameters()), model, accumulate=accumulate)
    wrapped = nn.parallel.DistributedDataParallel(model) if way.startswith("DDP") else model
    if "sum_over_ranks" in way:
        optimizer.sum_over_ranks(wrapped)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 + dist.get_rank()))
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        wrapped(x).float().square().mean().backward()
    grads = []
    for param in model.parameters():
        in_fp32 = None if optimizer is None else optimizer._fp32_grad(param, param.grad, ())
        grad = param.grad if in_fp32 is None else in_fp32
        grads.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).double().flatten())
    return torch.cat(grads)


def over_ranks() -> dict[str, float]:
    """Return the error of each way to average gradients over the ranks of this process's group."""
    exact = averaged("weights")  # not reduced
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    ways = ("DDP of fp32 weights", "DDP", "DDP, sum_over_ranks")
    ways += ("FSDP2 of fp32 weights", "FSDP2", "FSDP2, reduce_dtype")
    return {way: float((averaged(way) - exact).norm() / exact.norm()) for way in ways}


def on_ranks(count: int) -> dict[str, float]:
    """Start the ranks, and return what the first one found."""
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gradient_sums", f"--worker={rank}", f"--ranks={count}"],
                env={**os.environ, STORE: f"{folder}/store"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        outputs = [worker.communicate()[0] for worker in workers]
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker is not None:
        dist.init_process_group("gloo", f"file://{os.environ[STORE]}", rank=options.worker, world_size=options.ranks)
        print(json.dumps(over_ranks()), flush=True)
        dist.destroy_process_group()
        return
    found = {
        "machine": recording.machine(),
        "micro-batches": {str(count): sums(count) for count in (2, 8, 64)},
        "ns per element": nanoseconds(),
        "ranks": {str(count): on_ranks(count) for count in (2, 4)},
    }
    path = recording.HERE / "results" / "gradient_sums-cpu.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
