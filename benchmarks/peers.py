"""Compare castwise with its peers: how they handle planted faults, how they move the scale, and what scaling costs.

    pip install lightning accelerate jmp jax keras torchao deepspeed
    python -m benchmarks.peers [--rounds 80]

Libraries that are not installed are skipped and listed. Writes benchmarks/results/peers-cpu.json and the tables in
docs/explanation/peers.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import io
import itertools
import json
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from benchmarks import recording
from benchmarks.pairing import ratio, seconds
from benchmarks.recording import headline

FEATURES, LEARNING_RATE = 4, 12.8
NANS, GOOD, TINY = 200, 200, 2.0**-20
USUAL = 2.0**-8  # keeps scaled gradients in fp16's range for models in fp16
PAGE = recording.HERE.parent / "docs" / "explanation" / "peers.md"
WIDTHS = (1024, 2048, 1024, 1024)
WORKER = "PEERS_STORE"


class Batch(NamedTuple):
    """A batch; the loss is multiplied by `factor`, which contains the faults."""

    x: torch.Tensor
    y: torch.Tensor
    factor: float = USUAL


class Seen(NamedTuple):
    """The state after a batch; `reported` is what the library reports about the step when asked, or None."""

    scale: float | None
    weight: list[float]
    reported: str | None = None


Train: TypeAlias = Callable[[list[Batch], float | None], Iterable[Seen]]
"""A function that trains on batches, with the given initial scale or the library's default (None)."""


class Regression(torch.nn.Module):
    """An elementwise model, which autocast leaves alone, so that all libraries compute in the dtype of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight.to(x.dtype)).sum(-1)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    return (model(batch.x).float() - batch.y).square().mean() * batch.factor


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def first_scale(init_scale: float | None) -> dict[str, Any]:
    return {"init_scale": init_scale} if init_scale else {}


def of_loop(library: Any, batches: list[Batch], init_scale: float | None, **options: Any) -> Iterator[Seen]:
    model = Regression()
    optimizer = sgd(model)
    schedule = castwise.schedules.Dynamic(**first_scale(init_scale), **options)
    scaler = library.GradScaler("cpu", **({"schedule": schedule} if options else first_scale(init_scale)))
    reported: list[str | None] = [None]
    if library is castwise:
        scaler.register_step_hook(lambda facts: reported.append(facts.cause and str(facts.cause)))
    for batch in batches:
        optimizer.zero_grad()
        with library.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Seen(scaler.get_scale(), model.weight.tolist(), reported[-1])


def of_lightning(batches: list[Batch], init_scale: float | None) -> Iterator[Seen]:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision

    seen: list[Seen] = []

    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Regression()

        def training_step(self, batch: tuple[Any, ...], _: int) -> torch.Tensor:
            return loss_of(self.net, Batch(*batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(Seen(scaler.get_scale(), self.net.weight.tolist()))

    scaler = torch.amp.GradScaler("cpu", **first_scale(init_scale))
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, plugins=plugin, **dict.fromkeys(names, False))
    trainer.fit(Training(), torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    yield from seen


def accelerator_of(precision: str, scaler: torch.amp.GradScaler | None = None) -> Any:
    """Return an Accelerator; a given scaler replaces the one it creates for fp16 on a GPU but not on a CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    if scaler is not None:
        accelerator.scaler = scaler
    return accelerator


def of_accelerate(batches: list[Batch], init_scale: float | None) -> Iterator[Seen]:
    scaler = torch.amp.GradScaler("cpu", **first_scale(init_scale))
    accelerator = accelerator_of("fp16", scaler)
    accelerator.native_amp = True
    model = Regression()
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(loss_of(prepared, batch))
        optimizer.step()
        yield Seen(scaler.get_scale(), model.weight.tolist(), "skipped" if optimizer.step_was_skipped else None)


def of_jmp(batches: list[Batch], init_scale: float | None) -> Iterator[Seen]:
    import jax
    import jmp

    @jax.jit
    def step(weight: Any, scale: Any, x: Any, y: Any, factor: Any) -> Any:
        def loss(weight: Any) -> Any:
            errors = (x * weight.astype(x.dtype)).sum(-1).astype("float32") - y
            return scale.scale((errors**2).mean() * factor)

        gradient = scale.unscale(jax.grad(loss)(weight))
        finite = jmp.all_finite(gradient)
        return jmp.select_tree(finite, weight - LEARNING_RATE * gradient, weight), scale.adjust(finite), finite

    weight, scale = jax.numpy.zeros(FEATURES), jmp.DynamicLossScale(jax.numpy.asarray(init_scale or 2.0**15))
    for batch in batches:
        weight, scale, finite = step(weight, scale, batch.x.numpy(), batch.y.numpy(), batch.factor)
        yield Seen(float(scale.loss_scale), weight.tolist(), None if finite else "not finite")


def of_keras(batches: list[Batch], init_scale: float | None) -> Iterator[Seen]:
    import keras

    dtype = "mixed_float16" if batches[0].x.dtype is torch.float16 else "float32"
    layers = [keras.layers.Dense(1, use_bias=False, dtype=dtype), keras.layers.Activation("linear", dtype="float32")]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.set_weights([torch.zeros(FEATURES, 1).numpy()])
    options = {"initial_scale": init_scale} if init_scale else {}
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(LEARNING_RATE), **options)
    model.compile(optimizer=optimizer, loss="mse")
    for batch in batches:
        factors = torch.full(batch.y.shape, batch.factor)
        model.train_on_batch(batch.x.numpy(), batch.y[:, None].numpy(), sample_weight=factors.numpy())
        yield Seen(float(optimizer.dynamic_scale.value), model.get_weights()[0].ravel().tolist())


def in_float8(model: torch.nn.Module) -> torch.nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


def of_torchao(batches: list[Batch], init_scale: float | None) -> Iterator[Seen]:
    model = in_float8(torch.nn.Sequential(torch.nn.Linear(FEATURES, 1, bias=False), torch.nn.Flatten(0)))
    weight = next(model.parameters())
    torch.nn.init.zeros_(weight)
    optimizer = sgd(model)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        yield Seen(None, weight.ravel().tolist())


def of_deepspeed(batches: list[Batch], init_scale: float | None) -> Iterator[Seen]:
    """Train with the engine, ZeRO stage 1, with an fp16 model, which a CPU rejects unless configured otherwise."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    model = Regression()
    config = {"train_micro_batch_size_per_gpu": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    config |= {"zero_allow_untested_optimizer": True}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    for batch in batches:
        engine.backward(loss_of(engine, batch._replace(x=batch.x.half())))
        engine.step()
        reported = None if engine.was_step_applied() else "skipped"
        yield Seen(float(optimizer.loss_scale), model.weight.tolist(), reported)


ALL = ("none", "NaN losses", "NaN losses, fp16", "overflow", "unscaling")


class Peer(NamedTuple):
    """A library, and how to train with it.

    Args:
        needs: Required packages, the library itself first.
        faults: The applicable faults: none due to scaling without a loss scale, and no fp32 ones in fp16.
    """

    train: Train
    needs: tuple[str, ...]
    faults: tuple[str, ...] = ALL


PEERS = {
    "castwise": Peer(functools.partial(of_loop, castwise), ("castwise",)),
    "castwise, min_scale=1": Peer(
        functools.partial(of_loop, castwise, min_scale=1.0), ("castwise",), ("none", "NaN losses", "NaN losses, fp16")
    ),
    'castwise, on_nonfinite_loss="hold"': Peer(
        functools.partial(of_loop, castwise, on_nonfinite_loss="hold"), ("castwise",)
    ),
    "torch.amp": Peer(functools.partial(of_loop, torch.amp), ("torch",)),
    "Lightning": Peer(of_lightning, ("lightning",)),
    "Accelerate": Peer(of_accelerate, ("accelerate",)),
    "jmp": Peer(of_jmp, ("jmp", "jax")),
    "Keras": Peer(of_keras, ("keras", "jax")),
    "torchao float8": Peer(of_torchao, ("torchao",), ("none", "NaN losses")),
    # Last, because its process group persists.
    "DeepSpeed": Peer(of_deepspeed, ("deepspeed",), ("none", "NaN losses, fp16", "overflow")),
}


def good(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.tensor([1.0, -2.0, 0.5, 1.5])
    xs = torch.randn(count, 8, FEATURES, generator=generator)
    return [Batch(x, x @ truth + 0.1 * torch.randn(8, generator=generator)) for x in xs]


def faults() -> dict[str, tuple[list[Batch], float | None, slice]]:
    """Return, by fault, the batches, the initial scale, and the position of the fault among the batches."""
    before, after = good(20), good(GOOD, seed=1)
    nans = [batch._replace(factor=math.nan) for batch in good(NANS, seed=2)]
    overflow = good(1)[0]._replace(
        y=torch.ones(8), factor=1e35
    )  # loss and gradients are finite, but overflow when scaled by 2^15
    # A loss of 1e33, scaled gradients of 2e33, and gradients of 2e39.
    large = Batch(torch.full((8, FEATURES), 1e5), torch.full((8,), 0.1), 1e35)
    in_fp16 = [batch._replace(x=batch.x.half()) for batch in before + nans + after]
    return {
        "none": (before + after, None, slice(20, 20)),
        "NaN losses": (before + nans + after, None, slice(20, 20 + NANS)),
        "NaN losses, fp16": (in_fp16, None, slice(20, 20 + NANS)),
        "overflow": ([*before, overflow, *after], None, slice(20, 21)),
        "unscaling": ([large, *after], TINY, slice(0, 1)),
    }


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Collect warnings, log records at the configured levels, and printed text."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear, out = Ear(), io.StringIO()
    named = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    loggers = [logging.root, *(logger for logger in named if not logger.propagate)]
    for logger in loggers:
        logger.addHandler(ear)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
            warnings.simplefilter("always")
            yield heard
    finally:
        for logger in loggers:
            logger.removeHandler(ear)
        heard += [str(warning.message) for warning in caught] + out.getvalue().splitlines()


def mean_square(weight: list[float]) -> float:
    batches = good(16, seed=3)
    errors = [(batch.x @ torch.tensor(weight) - batch.y).square().mean() for batch in batches]
    return float(torch.stack(errors).mean())


def outcome(train: Train, batches: list[Batch], init_scale: float | None, where: slice) -> dict[str, Any]:
    """Train with a fault, and return the observable outcome."""
    seen: list[Seen] = []
    error = None
    with listening() as heard:
        try:
            for each in train(batches, init_scale):
                seen.append(each)
        except Exception as stopped:
            error = f"{type(stopped).__name__}: {stopped}"
    weights = [[0.0] * FEATURES, *(each.weight for each in seen)]
    taken = [after != before and all(map(math.isfinite, after)) for before, after in itertools.pairwise(weights)]
    relative = mean_square(weights[-1]) / mean_square(weights[0])
    return {
        "scale before": seen[where.start - 1].scale if where.start else init_scale,
        "scale after": seen[min(where.stop, len(seen)) - 1].scale,
        "scale at the end": seen[-1].scale,
        "scales": [each.scale for each in seen[where][:8]],
        "batches": len(seen),
        "steps taken at the fault": sum(taken[where]),
        "steps taken after it": sum(taken[where.stop :]),
        "weights are finite": all(map(math.isfinite, weights[-1])),
        "loss at the end / at first": relative if math.isfinite(relative) else None,
        "reported": dict(Counter(each.reported for each in seen[where] if each.reported)),
        "heard": heard,
        "error": error,
    }


def behaviour(peer: Peer) -> dict[str, Any]:
    results = {}
    for name, (batches, init_scale, where) in faults().items():
        if name not in peer.faults:
            continue
        results[name] = outcome(peer.train, batches, init_scale, where)
        usual = results["none"]["heard"]
        results[name]["said"] = [text[:300] for text in dict.fromkeys(results[name]["heard"]) if text not in usual]
    for result in results.values():
        del result["heard"]
    return results


def nan_losses(results: dict[str, Any]) -> dict[str, Any]:
    return results["NaN losses"] if "NaN losses" in results else results["NaN losses, fp16"]


def rule(peer: Peer, of_nans: dict[str, Any]) -> dict[str, Any]:
    """Return the rule of the scale with default settings, as observed in training runs."""
    with listening():
        scales = [seen.scale for seen in peer.train(good(2100), None)]
    grown = next(index for index, scale in enumerate(scales) if scale != scales[0])
    falls = [of_nans["scale before"], *of_nans["scales"]]
    fallen = next(index for index, scale in enumerate(falls) if scale != falls[0])
    return {
        "init": scales[0],
        "growth": scales[grown] / scales[0],  # type: ignore[operator]
        "interval": grown + 1,
        "back-off": falls[fallen] / falls[0],
        "bad steps before it": fallen,
        "after 200 bad steps": of_nans["scale after"] if of_nans["error"] is None else "an error",
    }


class Casts(TorchDispatchMode):
    """Count how often a tensor is cast."""

    def __init__(self, watched: torch.Tensor) -> None:
        super().__init__()
        self.watched, self.count = watched, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}.get(func)
        if source is not None:
            self.count += args[source].data_ptr() == self.watched.data_ptr()
        return func(*args, **(kwargs or {}))


def casts() -> dict[str, int]:
    """Count the casts of a weight that is used twice in each of two regions in bf16, the same weight in all."""
    layer = torch.nn.Linear(8, 8, bias=False)
    cache = castwise.WeightCache(layer)
    bf16 = torch.bfloat16
    regions: dict[str, Callable[[], Any]] = {
        "castwise": lambda: castwise.autocast("cpu", bf16),
        "castwise, WeightCache": lambda: castwise.autocast("cpu", bf16, weight_cache=cache),
        "torch.amp": lambda: torch.autocast("cpu", bf16),
    }
    with contextlib.suppress(ImportError):
        from lightning.pytorch.plugins.precision import MixedPrecision

        regions["Lightning"] = MixedPrecision("bf16-mixed", "cpu").forward_context
    with contextlib.suppress(ImportError):
        regions["Accelerate"] = accelerator_of("bf16").autocast
    counts = {}
    for name, region in regions.items():
        with Casts(layer.weight) as counter:
            for _ in range(2):
                with region():
                    layer(layer(torch.ones(2, 8)))
        counts[name] = counter.count
    return counts


def compiles() -> dict[str, bool]:
    """Return, by library, whether a low-precision forward with loss scaling, if any, compiles to one graph."""
    forwards: dict[str, Callable[[torch.Tensor], Any]] = {}
    for name, library in {"castwise": castwise, "torch.amp": torch.amp}.items():
        layer, scaler = torch.nn.Linear(8, 8), library.GradScaler("cpu")
        scaler.scale(torch.zeros(()))

        def forward(x: torch.Tensor, library: Any = library, scaler: Any = scaler, layer: Any = layer) -> Any:
            with library.autocast("cpu", dtype=torch.bfloat16):
                loss = layer(x).float().square().mean()
            return scaler.scale(loss)

        forwards[name] = forward
    with contextlib.suppress(ImportError):
        forwards["torchao float8"] = in_float8(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    found = {}
    for name, forward in forwards.items():
        try:
            torch.compile(forward, fullgraph=True, backend="eager")(torch.ones(2, 8))
            found[name] = True
        except torch._dynamo.exc.Unsupported:
            found[name] = False
    return found


def as_a_rank(rank: int) -> None:
    """With each library, take a step in which one of two ranks has an inf, and print this rank's outcome."""
    dist.init_process_group("gloo", store=dist.FileStore(os.environ[WORKER], 2), rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name, library in {"torch.amp": ShardedGradScaler, "castwise": castwise.ShardedGradScaler}.items():
        for kind in ("fused AdamW", "AdamW"):
            param = torch.nn.Parameter(torch.ones(4))  # this rank's shard
            optimizer = torch.optim.AdamW([param], fused=kind.startswith("fused"))
            scaler = library("cpu", init_scale=1024.0)
            scaler.scale(torch.zeros(()))
            param.grad = torch.full((4,), math.inf if rank == 0 else 1.0)
            scaler.step(optimizer)
            scaler.update()
            found[f"{name}, {kind}"] = [bool((param != 1).any()), scaler.get_scale()]
    print(json.dumps(found))


def ranks() -> dict[str, Any]:
    """Return, by library, the outcome on each of two ranks: [whether it stepped, its scale]."""
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers", f"--worker={rank}"],
                env={**os.environ, WORKER: f"{folder}/store"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        of_ranks = [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


PLAIN, SCALED, BF16 = "fp32", "fp32, scaled", "bf16"
OPTIMIZERS: dict[str, dict[str, bool]] = {"AdamW": {}, "fused AdamW": {"fused": True}}


class Case:
    """An MLP, and the ways to take a training step."""

    def __init__(self, options: dict[str, bool]) -> None:
        self.options = options
        self.batch = torch.randn(64, WIDTHS[0])
        self.ways: dict[tuple[str, str], Callable[[], None]] = {}
        self.by_hand("torch.amp", torch.amp, PLAIN, SCALED, BF16)
        self.by_hand("castwise", castwise, SCALED, BF16)
        for add in (self.by_lightning, self.by_accelerate):
            with contextlib.suppress(ImportError):
                add()

    def trained(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
        model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-6, **self.options)

    def by_hand(self, name: str, library: Any, *modes: str) -> None:
        for mode in modes:
            model, optimizer = self.trained()
            scaler = library.GradScaler("cpu", enabled=mode == SCALED)

            def step(model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler, mode: str = mode) -> None:
                optimizer.zero_grad()
                with library.autocast("cpu", torch.bfloat16) if mode == BF16 else contextlib.nullcontext():
                    loss = model(self.batch).float().square().mean()
                if mode == SCALED:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    optimizer.step()

            self.ways[name, mode] = step

    def by_lightning(self) -> None:
        import lightning
        from lightning.fabric.plugins.precision import MixedPrecision

        class InFp32(MixedPrecision):
            """Lightning's scaling with an fp32 forward, because CPUs emulate fp16."""

            forward_context = contextlib.nullcontext

            def convert_input(self, data: Any) -> Any:
                return data

            convert_output = convert_input

        given = {PLAIN: {"precision": "32-true"}, SCALED: {"plugins": InFp32("16-mixed", "cpu")}}
        for mode, options in {**given, BF16: {"precision": "bf16-mixed"}}.items():
            fabric = lightning.Fabric(accelerator="cpu", devices=1, **options)
            model, optimizer = fabric.setup(*self.trained())

            def step(model: Any = model, optimizer: Any = optimizer, fabric: Any = fabric) -> None:
                optimizer.zero_grad()
                fabric.backward(model(self.batch).square().mean())
                optimizer.step()

            self.ways["Lightning", mode] = step

    def by_accelerate(self) -> None:
        for mode in (PLAIN, SCALED, BF16):
            scaler = torch.amp.GradScaler("cpu") if mode == SCALED else None
            accelerator = accelerator_of("bf16" if mode == BF16 else "no", scaler)
            model, optimizer = accelerator.prepare(*self.trained())

            def step(model: Any = model, optimizer: Any = optimizer, accelerator: Any = accelerator) -> None:
                optimizer.zero_grad()
                accelerator.backward(model(self.batch).square().mean())
                optimizer.step()

            self.ways["Accelerate", mode] = step


def cost(rounds: int) -> dict[str, Any]:
    """Time all ways in random order, each relative to the plain step of its own library in the same round."""
    results: dict[str, Any] = {}
    for name, options in OPTIMIZERS.items():
        ways = Case(options).ways
        times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for index in range(rounds + 3):
            for way in random.sample(list(ways), len(ways)):
                taken = seconds(ways[way], "cpu")
                if index >= 3:
                    times[way].append(taken)
        for library in dict.fromkeys(library for library, _ in ways):
            plain = times.get((library, PLAIN), times["torch.amp", PLAIN])
            results[f"{library}, {name}"] = {
                "plain ms": statistics.median(plain) * 1e3,
                **{f"{mode} / plain": ratio(times[library, mode], plain) for mode in (SCALED, BF16)},
            }
    return results


# -- the page -------------------------------------------------------------------------------------------------------


def power(scale: float | None) -> str:
    if not scale:
        return "-" if scale is None else "0"
    exponent = math.log2(scale)
    return "1" if scale == 1 else f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


def end(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    if result["error"] is not None:
        return "ends with an error"
    loss = result["loss at the end / at first"]
    return "not finite" if loss is None else f"loss at {loss:.2%}"


def words(result: dict[str, Any]) -> list[str]:
    """Return the cells about what the library reported."""
    said = textwrap.shorten(result["error"] or next(iter(result["said"]), "-"), 90, placeholder=" ...")
    reported = ", ".join(f"{count} x {what}" for what, count in result["reported"].items())
    return [said, reported or "-"]


def fault_tables(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{NANS} losses in a row are NaN, then {GOOD} batches are good. The columns fp32 and fp16 show how many "]
    lines[0] += "of the good batches changed the weights, and the final loss in percent of the initial one:"
    lines.append("")
    lines += [
        "| | scale before | after | fp32 | fp16 | unprompted message | on request |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of_peer in results.items():
        result = nan_losses(of_peer)
        cells = [power(result["scale before"]), power(result["scale after"])]
        for fault in ("NaN losses", "NaN losses, fp16"):
            cells.append(
                f"{of_peer[fault]['steps taken after it']}, {end(of_peer[fault])}" if fault in of_peer else "-"
            )
        lines.append(f"| {name} | {' | '.join([*cells, *words(result)])} |")
    titles = {
        "overflow": "One step overflows. Its loss is finite, and its gradients would be finite at scale 1:",
        "unscaling": f"At scale {power(TINY)}, scaled gradients are finite but overflow when unscaled:",
    }
    for fault, title in titles.items():
        lines += ["", title, "", "| | step | scale before | after | result | unprompted message | on request |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for name, result in ((name, of_peer.get(fault)) for name, of_peer in results.items()):
            if result is not None:
                is_taken = result["weights are finite"] is False or result["steps taken at the fault"]
                cells = [power(result["scale before"]), power(result["scale after"]), end(result), *words(result)]
                lines.append(f"| {name} | {'taken' if is_taken else 'skipped'} | {' | '.join(cells)} |")
    return lines


def tables(record: dict[str, Any]) -> str:
    about = record["machine"]
    lines = [headline(about), "", ", ".join(f"{name} {version}" for name, version in record["versions"].items())]
    if record["missing"]:
        lines += ["", f"Not installed: {', '.join(record['missing'])}."]
    lines += ["", *fault_tables(record["faults"]), "", "One of two ranks has an inf in its gradient shard:", ""]
    lines += ["| | rank 0 (has the inf) | rank 1 |", "|---|---|---|"]
    for name, of_ranks in record["ranks"].items():
        cells = [f"{'steps' if stepped else 'skips'}, new scale {power(scale)}" for stepped, scale in of_ranks]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "How the scale moves with default settings, as observed:", ""]
    lines += ["| | initial scale | growth | after good steps | backoff | after bad steps | after 200 bad steps |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, of_peer in record["rules"].items():
        last = of_peer["after 200 bad steps"]
        cells = [power(of_peer["init"]), f"{of_peer['growth']:g}", str(of_peer["interval"]), f"{of_peer['back-off']:g}"]
        cells += [str(of_peer["bad steps before it"]), last if isinstance(last, str) else power(last)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Step time relative to a plain fp32 step of the same library, median (quartiles):", ""]
    lines += ["| | plain step | scaled | bf16 |", "|---|---|---|---|"]
    for name, result in record["cost"].items():
        cells = [f"{result['plain ms']:.1f} ms"]
        for mode in (SCALED, BF16):
            low, high = result[f"{mode} / plain"]["quartiles"]
            cells.append(f"{result[f'{mode} / plain']['median']:.3f} ({low:.3f} - {high:.3f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    counts = ", ".join(f"{name} {count}" for name, count in record["casts"].items())
    whole = ", ".join(f"{name} {'yes' if value else 'no'}" for name, value in record["compiles as one graph"].items())
    lines += ["", f"Casts of a weight that is used twice in each of two regions: {counts}."]
    lines += [f"The forward, with loss scaling where there is any, compiles as one graph: {whole}."]
    return "\n".join(lines)


def write(record: dict[str, Any]) -> None:
    (recording.HERE / "results" / "peers-cpu.json").write_text(json.dumps(record, indent=2) + "\n")
    begin, end = "<!-- peers-cpu begins -->", "<!-- peers-cpu ends -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{tables(record)}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--worker", type=int)
    arguments = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "jax")
    torch.set_num_threads(1)
    if arguments.worker is not None:
        as_a_rank(arguments.worker)
        return
    load, start = os.getloadavg()[0], time.perf_counter()
    record: dict[str, Any] = {"machine": recording.machine(), "load": load, "rounds": arguments.rounds}
    record["cost"] = cost(arguments.rounds)
    record |= {"casts": casts(), "compiles as one graph": compiles(), "ranks": ranks()}
    record |= {"versions": {}, "missing": [], "faults": {}, "rules": {}}
    for name, peer in PEERS.items():
        try:
            versions = {each: importlib.metadata.version(each) for each in peer.needs if importlib.import_module(each)}
        except ImportError:
            record["missing"].append(name)
            continue
        record["versions"] |= versions
        results = record["faults"][name] = behaviour(peer)
        of_nans = nan_losses(results)
        if of_nans["scale after"] != of_nans["scale before"]:
            record["rules"][name] = rule(peer, of_nans)
    record["seconds"] = time.perf_counter() - start
    write(record)
    print(tables(record))


if __name__ == "__main__":
    main()
