"""The cost of each module in each format: flops, bytes, or seconds on this machine."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from castwise._recipes.recipe import RECIPES
from castwise._recipes.scalings import E2M1
from castwise.comparison._call_again import call_again
from castwise.comparison._kept_values import direct_tensors
from castwise.comparison._objective import is_out_of_memory
from castwise.comparison._precisions import Precision, Region
from castwise.comparison._reference_run import Call, Site
from castwise.comparison._watched_calls import Tap, Watch

COSTS = ("flops", "bytes", "measured")
# Cost of a flop relative to fp32. Tensor cores do twice as many flops in 16 bits as in TF32, NVIDIA's fp32 mode for
# matrix products (A100 and H100 data sheets); CPUs with units for a 16-bit format gain about the same. 8 bits double
# that rate, and 4 bits quadruple it (H100 and B200 data sheets).
FLOP_WEIGHTS = {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5}
FLOP_WEIGHTS |= {name: 0.125 if name == "nvfp4" else 0.25 for name in RECIPES}
_REPETITIONS = 5

Costs = dict[Tap, dict[str, float]]


def forwards(kind: str, formats: int) -> int:
    """Return the number of forwards of a batch that it takes to find the costs in a number of formats."""
    if kind == "flops":
        return 1
    reference_forwards, casting_forwards, format_forwards = 2, 1, _REPETITIONS if kind == "measured" else 1
    return reference_forwards + (casting_forwards + format_forwards) * formats


class OwnFlops:
    """Counts the flops of the matrix products and convolutions that each module calls directly, through a `Watch`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
        >>> flops = OwnFlops()
        >>> with Watch(model) as watch, flops.counting, watch.handling(flops.call):
        ...     _ = model(torch.ones(3, 4))
        >>> {tap.name: count for tap, count in flops.counts.items() if count}
        {'0': 192}
    """

    def __init__(self) -> None:
        self.counts: defaultdict[Tap, int] = defaultdict(int)
        self.counting: Any = FlopCounterMode(display=False, custom_mapping=_custom_formulas())
        self.counting.mod_tracker = _NoModules()  # type: ignore[assignment]  # all that torch uses of a tracker
        self._running: list[int] = []

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, and add its flops or bytes."""
        before = self.counting.get_total_flops()
        self._running.append(0)
        try:
            return tap.forward(*args, **kwargs)
        finally:
            total, inside = self.counting.get_total_flops() - before, self._running.pop()
            self.counts[tap] += total - inside
            if self._running:
                self._running[-1] += total


class _NoModules:
    """Replaces torch's module tracker, whose hooks fail if a forward computes gradients."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _custom_formulas() -> dict[Any, Callable[..., int]]:
    def of_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch's

    on_cpu = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return {} if on_cpu is None else {on_cpu: of_attention}


def of_flops(counts: dict[Tap, int], formats: Sequence[str]) -> Costs:
    """Return the flops of modules, weighted by `FLOP_WEIGHTS`; modules without flops are left out."""
    return {tap: {name: count * FLOP_WEIGHTS[name] for name in formats} for tap, count in counts.items() if count}


def bytes_of_weight(recipe: str) -> float:
    """Return the bytes per element of a weight in a recipe, not counting scales."""
    return 0.5 if RECIPES.get(recipe) and RECIPES[recipe].output[1].numbers is E2M1 else 1.0


class OutputBytes:
    """Adds up the bytes of module outputs and of the weights that modules read, through a `Watch`.

    Weights count in the dtype of the module's output, unless they are quantized.

    Args:
        counts: Bytes by module; this object is updated.
        quantized: Bytes per weight element of modules with a recipe, by module name.
    """

    def __init__(self, counts: dict[Tap, float], quantized: Mapping[str, float] | None = None) -> None:
        self._counts, self._quantized = counts, quantized or {}

    def call(self, tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, and add its flops or bytes."""
        output = tap.forward(*args, **kwargs)
        made = [tensor for tensor in direct_tensors(output) if tensor.is_floating_point()]
        if tap.has_own_ops and made:
            weights = sum(param.numel() for param in tap.module.parameters(recurse=False))
            weight_bytes = self._quantized.get(tap.name, made[0].itemsize)
            nbytes = sum(tensor.nbytes for tensor in made) + weights * weight_bytes
            self._counts[tap] = self._counts.get(tap, 0.0) + nbytes
        return output


def casting(watch: Watch, calls: Sequence[Call], device: str, precisions: dict[str, Precision]) -> set[Tap]:
    """Return the modules whose own format decides the dtype of their outputs.

    Others, such as activations and norms, compute in the dtype of their inputs, so rules for them save nothing.

    Args:
        watch, calls, device, precisions: See `measured`.
    """
    casting_taps = set()
    for call in calls:
        if call.tap.has_own_ops and call.tap not in casting_taps:
            try:
                made = [run() for run in _runs(watch, call, device, precisions).values()]
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                continue  # it cannot be run in isolation
            dtypes = {tuple((site, tensor.dtype) for site, tensor in outputs.items()) for outputs in made}
            if len(dtypes) > 1:
                casting_taps.add(call.tap)
    return casting_taps


def measured(watch: Watch, calls: Sequence[Call], device: str, precisions: dict[str, Precision]) -> Costs:
    """Return the time of each module's own ops in seconds, the minimum of several isolated runs.

    Modules get the inputs of the reference. If a format needs another dtype, the time of the casts is included.

    Args:
        watch: The model's watch.
        calls: The calls of a reference run.
        device: The `type` of the model's device.
        precisions: For each format, the precision that computes everything in it.
    """
    costs: Costs = {}
    for call in calls:
        if not call.tap.has_own_ops:
            continue
        module_costs = costs.setdefault(call.tap, dict.fromkeys(precisions, 0.0))
        for name, run in _runs(watch, call, device, precisions).items():
            module_costs[name] += min(_seconds(run, device) for _ in range(_REPETITIONS))
    return costs


def _runs(
    watch: Watch, call: Call, device: str, precisions: dict[str, Precision]
) -> dict[str, Callable[[], dict[Site, torch.Tensor]]]:
    """Return for each format a function that reruns a reference call in isolation."""
    runs: dict[str, Callable[[], dict[Site, torch.Tensor]]] = {}
    for name, precision in precisions.items():
        with precision.region():
            region = Region.here(device)
        runs[name] = functools.partial(
            call_again, watch, call, device, precision.weights, region, call.attributes, _unchanged
        )
    return runs


def _unchanged(child: Call | None, position: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _seconds(run: Callable[[], object], device: str) -> float:
    _wait_for(device)
    start = time.perf_counter()
    made = run()
    _wait_for(device)
    taken = time.perf_counter() - start
    del made
    return taken


def _wait_for(device: str) -> None:
    if device != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize()
