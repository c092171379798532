"""`measure`: run a program once, in one of the ways that a check needs."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from castwise._torch_private import is_compiler_loaded
from castwise._version import __version__
from castwise.checking._promotion import exact_arithmetic
from castwise.checking._recorder import Measurement, Recorder
from castwise.checking._rounding import RandomRounding

Train = Callable[..., Any]
Way = Literal["plain", "local", "rounded", "exact", "exact-rounded"]
"""How a program runs: as it is; with each module again in float64; also with random rounding; in float64; in float64
with random rounding."""


class ProgramError(Exception):
    """A program could not be run to its last step.

    Args:
        message: Its traceback, or its exit code and what it printed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


@dataclass(frozen=True)
class Plan:
    """How to run a program.

    Args:
        way: See `Way`.
        steps: Optimizer steps until it is ended.
        seed: Seed of the random rounding.
    """

    way: Way
    steps: int
    seed: int = 0


def measure(train: Train, plan: Plan) -> Measurement:
    """Run a program in this process.

    Random number generators are seeded first, and are as before afterwards.

    Args:
        train: A function of no argument, or of a `Probe`.
        plan: How to run it.
    """
    is_exact = plan.way.startswith("exact")
    rounding = RandomRounding(plan.seed) if "rounded" in plan.way else None

    def move(params: list[torch.Tensor]) -> None:
        if rounding is not None:
            for param in params:
                param.copy_(rounding.moved(param))

    takes_probe = _takes_probe(train)
    recorder = Recorder(
        plan.steps,
        ends_late=takes_probe,
        watches_modules=is_exact,
        reruns=plan.way in ("local", "rounded"),
        after_step=None if rounding is None else move,
    )
    with ExitStack() as stack:
        stack.enter_context(_seeded())
        stack.enter_context(nullcontext() if plan.way == "plain" else _without_compiler())
        stack.enter_context(recorder.watching())
        if is_exact:
            stack.enter_context(exact_arithmetic())
        if rounding is not None:
            stack.enter_context(rounding)
        try:
            train(*([recorder] if takes_probe else []))
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise
    recorder.measurement.about = _about()
    if rounding is not None:
        recorder.measurement.dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in rounding.dtypes)
    return recorder.measurement


def _about() -> dict[str, Any]:
    """Return what computes; in the process that does, because asking for a GPU's name starts CUDA."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "castwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_cuda else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _takes_probe(train: Train) -> bool:
    try:
        parameters = inspect.signature(train).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in parameters)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Run compiled code eagerly: neither modules nor ops of compiled code can be watched."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # for a compiler that the program loads
    try:
        with torch.compiler.set_stance("force_eager") if is_compiler_loaded() else nullcontext():
            yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


@contextmanager
def _seeded() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    threads, of_python, of_numpy = torch.get_num_threads(), random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        if numpy:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy:
                numpy.random.set_state(of_numpy)
            torch.set_num_threads(threads)


def measure_apart(train: Train, plan: Plan) -> Measurement:
    """Run a program in a new process, so that it finds nothing of its earlier runs.

    Raises:
        ProgramError: It raised, or ended its process; the text has its traceback or the end of its output.
    """
    # A fork has torch loaded already. It is safe because this process has computed nothing, so has no threads. The
    # first optimizer of a process loads the compiler, which takes seconds, and is therefore made here.
    torch.optim.SGD([torch.empty(0)], lr=1.0)
    context: Any = multiprocessing.get_context("fork" if sys.platform.startswith("linux") else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="castwise-") as folder:
        output = Path(folder, "output")
        process = context.Process(target=_run_apart, args=(train, plan, sender, str(output)))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            result = None
        finally:
            process.join()
        printed = output.read_text(errors="replace") if output.exists() else ""
    if isinstance(result, Measurement):
        return result
    if result is None:
        raise ProgramError(
            f"the program ended its process with exit code {process.exitcode}\n{printed[-2000:]}".strip()
        )
    raise ProgramError(str(result))


def _run_apart(train: Train, plan: Plan, sender: Any, output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        result: object = measure(train, plan)
    except SystemExit as exit_:
        result = f"the program exited with code {exit_.code}"
    except BaseException:
        result = traceback.format_exc()
    sender.send(result)
    sender.close()
    sys.stdout.flush()
    os._exit(0)
