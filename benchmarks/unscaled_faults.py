"""Plant faults in training without a scaler, and count those whose place a monitor names.

    python -m benchmarks.unscaled_faults [--rounds 40] [--fewer 8]

Each round trains a small mixture of experts for a few steps and plants a fault at a random place in the next one: in
bf16 and fp32, compiled by "aot_eager", and on two ranks under DDP and FSDP2 (one expert), on one of the ranks. Writes
benchmarks/results/unscaled_faults-cpu.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.monitor import mixture
from tests.monitor.mixture import Mixture, loss_of
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import castwise
from benchmarks import recording
from benchmarks.recording import headline
from castwise.diagnosis import Diagnosis

TOO_LARGE = 1e39  # inf in bf16 and fp32
WAYS = ("bf16", "fp32", "bf16 compiled", "fp32 compiled", "bf16 under DDP", "bf16 under FSDP2")
IN_LOSS = "the loss"


class Planted:
    """A model, its next batch and its loss, of which one has a fault at a place."""

    def __init__(self, model: Mixture, x: Tensor) -> None:
        self.model, self.x, self.loss_of = model, x, loss_of
        self.place: str | None = None

    def linear(self) -> str:
        return random.choice([name for name in mixture.linears(self.model) if ".experts." not in name])

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        module = self.model.get_submodule(name)
        forward = module.forward
        module.forward = lambda x: change(forward(x))  # type: ignore[method-assign]
        self.place = name


def forward_overflow(planted: Planted) -> None:
    planted.change(planted.linear(), lambda y: y * TOO_LARGE)


def masked_row(planted: Planted) -> None:
    block = random.randrange(mixture.BLOCKS)
    planted.model.blocks[block].attn.masked_row = random.randrange(mixture.TOKENS)  # type: ignore[union-attr, assignment]
    planted.place = f"blocks.{block}.attn"


def backward_overflow(planted: Planted) -> None:
    planted.change(planted.linear(), lambda y: mixture.with_multiplied_gradient(y, TOO_LARGE))


def bad_data(planted: Planted) -> None:
    planted.x.view(-1)[random.randrange(planted.x.numel())] = torch.nan
    planted.place = "0"


def bad_weight(planted: Planted) -> None:
    planted.place = planted.linear()
    weight: Any = planted.model.get_submodule(planted.place).weight
    with torch.no_grad():
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        if local.numel():
            local.view(-1)[random.randrange(local.numel())] = torch.inf


def log_of_zero(planted: Planted) -> None:
    planted.loss_of = lambda logits: loss_of(logits) + (logits - logits).relu().log().mean()
    planted.place = IN_LOSS


FAULTS: dict[str, Callable[[Planted], None]] = {
    "overflow in the forward": forward_overflow,
    "attention: a row masked altogether": masked_row,
    "overflow in the backward": backward_overflow,
    "NaN in the data": bad_data,
    "inf in a weight": bad_weight,
    "log of 0 in the loss": log_of_zero,
    "none": lambda planted: None,
}


def wrapped(model: Mixture, way: str) -> Any:
    if way.endswith("compiled"):
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager")
    if way.endswith("DDP"):
        return DistributedDataParallel(model, find_unused_parameters=True)
    if way.endswith("FSDP2"):
        for block in model.blocks:
            # FSDP2 needs a gradient of the same parameters on all ranks, which experts without tokens do not have.
            block.moe = block.moe.experts[0]  # type: ignore[union-attr, index, assignment]
            fully_shard(block)
        return fully_shard(model)
    return model


def diagnosed(way: str, fault: str, seed: int, rank: int, at_fault: int) -> tuple[Diagnosis | None, str | None, float]:
    """Train until the fault, and return what is found, where the fault is, and the seconds that the last step took."""
    random.seed(seed)
    torch.manual_seed(seed)
    net: Any = wrapped(Mixture(), way)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    low = nullcontext() if way.startswith("fp32") else castwise.autocast("cpu", dtype=torch.bfloat16)
    steps = random.randrange(1, 4)
    torch.manual_seed(1000 * seed + rank)
    batches = mixture.batches()
    with castwise.Monitor(net, optimizer, every=10**6, on_nonfinite="diagnose") as monitor:
        for step in range(steps + 1):
            planted = Planted(getattr(net, "module", getattr(net, "_orig_mod", net)), next(batches))
            if step == steps:
                random.seed(seed + 1)
                if rank == at_fault:
                    FAULTS[fault](planted)
            optimizer.zero_grad()
            began = time.perf_counter()
            with low:
                loss = planted.loss_of(net(planted.x))
            loss.backward()
            optimizer.step()
        return monitor.diagnosis, planted.place, time.perf_counter() - began


def verdict(found: Diagnosis | None, place: str | None) -> str:
    """Return "named", "wrong" or "not found"; of a healthy step "quiet" or "wrong"."""
    if not found:
        return "quiet" if place is None else "not found"
    if found.phase == "loss" and not found.op:
        return "not found" if place is not None else "wrong"
    said = IN_LOSS if found.in_loss else found.argument if found.phase == "input" else found.module
    return "named" if place is not None and (said == place or said.startswith(f"{place}.")) else "wrong"


def count(way: str, rounds: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for fault in FAULTS:
        counts: Counter[str] = Counter()
        seconds: list[float] = []
        for seed in range(rounds):
            at_fault = seed % ranks
            found, place, took = diagnosed(way, fault, seed, rank, at_fault)
            if ranks > 1:
                of_ranks: list[Any] = [None] * ranks
                dist.all_gather_object(of_ranks, (found, place, took))
                place, took = of_ranks[at_fault][1], max(each for *_, each in of_ranks)
                judged = [verdict(found, place) for found, *_ in of_ranks]
                # Another rank has nothing to find, except in a weight that FSDP2 has split.
                are_right = all(said in ("quiet", "not found", judged[at_fault]) for said in judged)
                counts[judged[at_fault] if are_right else "wrong"] += 1
            else:
                counts[verdict(found, place)] += 1
            seconds.append(took)
        results[fault] = {**counts, "seconds": statistics.median(seconds)}
    return results


def on_ranks(rank: int, way: str, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = count(way, rounds, rank, 2)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure(rounds: int, fewer: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for way in WAYS:
        if "under" in way:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(on_ranks, (way, fewer, folder), nprocs=2)
                results[way] = json.loads(Path(folder, "results.json").read_text())
        else:
            results[way] = count(way, fewer if "compiled" in way else rounds)
        print(way, results[way], flush=True)
    return results


def table(record: dict[str, Any]) -> str:
    results = record["results"]
    lines = [headline(record["machine"]), "", f"| planted | {' | '.join(results)} |", "|---" * (1 + len(results)) + "|"]
    for fault in FAULTS:
        cells = [
            ", ".join(f"{number} {said}" for said, number in results[way][fault].items() if said != "seconds")
            for way in results
        ]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="of each fault, eager on one process")
    parser.add_argument("--fewer", type=int, default=8, help="of each fault, compiled and on ranks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more threads
    warnings.simplefilter("ignore")
    results = measure(arguments.rounds, arguments.fewer)
    record = {"machine": recording.machine(), "results": results}
    recording.write("unscaled_faults-cpu", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
