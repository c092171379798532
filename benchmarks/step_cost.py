"""What scaling and clipping add to an optimizer's step: castwise against torch.amp, in one process, in random order.

    python benchmarks/step_cost.py [--device cpu] [--rounds 15] [--sizes 124M 10M 1000-tiny]

Writes benchmarks/results/step_cost-<device>.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
import recording

WIDTH, LAYERS = 768, 12
LAYER = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
LAYER += [(WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]
SIZES: dict[str, list[tuple[int, ...]]] = {
    "124M": [(50257, WIDTH), (1024, WIDTH), *(LAYER * LAYERS)],
    "10M": [(1000, 1000), (1000,)] * 10,
    "1000-tiny": [(8, 8), (64,)] * 500,
}
OPTIMIZERS = {
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "foreach AdamW": (torch.optim.AdamW, {"foreach": True}),
    "fused SGD": (torch.optim.SGD, {"fused": True}),
    "foreach SGD": (torch.optim.SGD, {"foreach": True}),
}
BARE, CLIPPED, SCALED, BOTH = "step", "clip + step", "scaled step + update", "scaled + clipped step + update"
SCALE = 2.0**16


class Case:
    """Parameters with gradients, an optimizer, and every way to step it."""

    def __init__(self, shapes: list[tuple[int, ...]], optimizer: str, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        # A learning rate of zero would be a special case of nothing; this one moves the weights by little.
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = kind(self.params, lr=1e-6, **options)
        self.scaled = [torch.randn(shape, device=device) * SCALE for shape in shapes]
        for param in self.params:
            param.grad = torch.empty_like(param)
        self.scalers = {
            library: scaler(device, init_scale=SCALE)
            for library, scaler in {"torch": torch.amp.GradScaler, "castwise": castwise.GradScaler}.items()
        }
        for scaler in self.scalers.values():
            scaler.scale(torch.ones((), device=device))

    def ways(self) -> dict[tuple[str, str], Callable[[], None]]:
        theirs, ours = self.scalers["torch"], self.scalers["castwise"]
        return {
            ("torch", BARE): self.optimizer.step,
            ("torch", CLIPPED): lambda: (self.clip(), self.optimizer.step()),
            ("torch", SCALED): lambda: (theirs.step(self.optimizer), theirs.update()),
            ("torch", BOTH): lambda: (
                theirs.unscale_(self.optimizer),
                self.clip(),
                theirs.step(self.optimizer),
                theirs.update(),
            ),
            ("castwise", SCALED): lambda: (ours.step(self.optimizer), ours.update()),
            ("castwise", BOTH): lambda: (
                ours.clip_grad_norm_(self.optimizer, 1.0),
                ours.step(self.optimizer),
                ours.update(),
            ),
        }

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)

    def refill(self) -> None:
        torch._foreach_copy_([param.grad for param in self.params], self.scaled)

    def seconds(self, way: Callable[[], None]) -> float:
        self.refill()
        if self.device != "cuda":
            start = time.perf_counter()
            way()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        way()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Traffic(TorchDispatchMode):
    """Counts the bytes of gradients that ops read and write, and those that are allocated, until an optimizer runs.

    An op that writes to a gradient is taken to read it as well, which holds for all that are used here. Optimizers
    that are not fused are told apart by their not running at all: their `step` is replaced for the while.
    """

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self.gradients = {param.grad.untyped_storage().data_ptr() for param in params}
        self.read = self.written = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__.startswith("_fused_"):
            return None
        result = func(*args, **kwargs)
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        touched: dict[tuple[int, int], bool] = {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if self.is_gradient(tensor) and not is_view:
                    touched[tensor.data_ptr(), tensor.nbytes] = argument.alias_info is not None
        self.read += sum(nbytes for _, nbytes in touched)
        self.written += sum(nbytes for (_, nbytes), is_written in touched.items() if is_written)
        known = {self.storage(value) for value in args}
        if not is_view:
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(tensor, torch.Tensor) and self.storage(tensor) not in known | self.gradients:
                    self.allocated += tensor.nbytes
        return result

    def is_gradient(self, value: Any) -> bool:
        return self.storage(value) in self.gradients

    @staticmethod
    def storage(value: Any) -> int | None:
        return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) and value.numel() else None


def traffic(shapes: list[tuple[int, ...]], optimizer: str, device: str) -> dict[str, dict[str, float]]:
    """Return what is read, written and allocated before the optimizer, in multiples of the gradients' bytes."""
    found = {}
    for name in Case(shapes[:1], optimizer, device).ways():
        case = Case(shapes, optimizer, device)
        case.refill()
        case.optimizer.step()  # makes its state
        if "fused" not in optimizer:
            case.optimizer.step = lambda: None  # type: ignore[method-assign]
        total = sum(param.grad.nbytes for param in case.params)
        with Traffic(case.params) as counter:
            case.ways()[name]()
        found[" ".join(name)] = {
            "reads": counter.read / total,
            "writes": counter.written / total,
            "allocated": counter.allocated / total,
        }
    return found


def measure(sizes: list[str], device: str, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for size in sizes:
        for optimizer in OPTIMIZERS:
            case = Case(SIZES[size], optimizer, device)
            ways = case.ways()
            repeats = 20 if size == "1000-tiny" else 1
            times: dict[tuple[str, str], list[float]] = {name: [] for name in ways}
            for index in range(rounds + 2):
                for name in random.sample(list(ways), len(ways)):
                    taken = statistics.median(case.seconds(ways[name]) for _ in range(repeats))
                    if index >= 2:
                        times[name].append(taken)
            bare = times["torch", BARE]
            results[f"{size}, {optimizer}"] = {
                "median_ms": {" ".join(name): statistics.median(values) * 1e3 for name, values in times.items()},
                "relative_to_step": {" ".join(name): recording.ratio(values, bare) for name, values in times.items()},
                "castwise_to_torch": {
                    way: recording.ratio(times["castwise", way], times["torch", way]) for way in (SCALED, BOTH)
                },
                "castwise_clipped_to_torch_clipped_without_scaling": recording.ratio(
                    times["castwise", BOTH], times["torch", CLIPPED]
                ),
                "gradient_traffic_before_the_optimizer": traffic(SIZES[size], optimizer, device),
            }
            del case, ways
    return results


def table(record: dict[str, Any]) -> str:
    lines = [
        recording.title(record["machine"]),
        "",
        "| | step | torch: clip + step | torch: scaled | castwise: scaled | castwise / torch | torch: scaled + clipped "
        "| castwise: scaled + clipped | castwise / torch | castwise scaled + clipped / torch clipped |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in record["results"].items():
        bare = result["relative_to_step"]
        cells = [f"{result['median_ms'][f'torch {BARE}']:,.2f} ms", f"{bare[f'torch {CLIPPED}']['median']:.2f}"]
        for way in (SCALED, BOTH):
            ours_to_theirs = result["castwise_to_torch"][way]
            low, high = ours_to_theirs["quartiles"]
            cells += [f"{bare[f'{library} {way}']['median']:.2f}" for library in ("torch", "castwise")]
            cells += [f"{ours_to_theirs['median']:.3f} ({low:.3f} - {high:.3f})"]
        cells += [f"{result['castwise_clipped_to_torch_clipped_without_scaling']['median']:.3f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Gradient bytes read / written / allocated before the optimizer, in multiples of the gradients:", ""]
    lines += ["| | torch: scaled | castwise: scaled | torch: scaled + clipped | castwise: scaled + clipped |"]
    lines += ["|---|---|---|---|---|"]
    for name, result in record["results"].items():
        counts = [
            result["gradient_traffic_before_the_optimizer"][f"{library} {way}"]
            for way in (SCALED, BOTH)
            for library in ("torch", "castwise")
        ]
        lines.append(
            f"| {name} | "
            + " | ".join(f"{c['reads']:.2f} / {c['writes']:.2f} / {c['allocated']:.3f}" for c in counts)
            + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    record = {
        "machine": recording.machine(arguments.device),
        "results": measure(arguments.sizes, arguments.device, arguments.rounds),
    }
    recording.write(f"step_cost-{arguments.device}", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
