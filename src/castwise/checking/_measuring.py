"""`measure`: run a program once, in one of the ways that a check needs."""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.connection
import os
import platform
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from castwise._version import __version__
from castwise.checking._ops import OpLog
from castwise.checking._promotion import exact_arithmetic
from castwise.checking._recorder import Measurement, Recorder, without_compiler
from castwise.checking._rounding import RandomRounding

Train = Callable[..., Any]
Way = Literal["plain", "local", "compiled", "rounded", "exact", "exact-modules", "exact-rounded", "ops"]
"""How a program runs: as it is; with each module again in float64; so, but with compiled code as it is; with random
rounding; in float64; so, with sketches of modules; so, with random rounding; with a log of its ops."""

RERUNS = 2
"""Runs with random rounding in which modules run again in float64, too."""
_OURS = str(Path(__file__).parents[1])
PATIENCE_S = 10  # for ranks that are ended because another has failed


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
        ranks: Processes that run it together, with the variables that torchrun sets; more than one only apart.
        others: Whether to look for weights that no optimizer has.
        until: Modules after which it is ended, when all have run again in float64.
    """

    way: Way
    steps: int
    seed: int = 0
    ranks: int = 1
    others: bool = True
    until: frozenset[str] = frozenset()


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
        names_modules=is_exact,
        watches_modules=plan.way in ("exact-modules", "exact-rounded"),
        reruns=plan.way in ("local", "compiled") or (plan.way == "rounded" and plan.seed <= RERUNS),
        until=plan.until,
        compiles=plan.way == "compiled",
        sketches=plan.way not in ("local", "compiled"),
        others=plan.others,
        hashes=plan.way in ("plain", "local"),
        after_step=None if rounding is None else move,
    )
    log = OpLog(recorder.names) if plan.way == "ops" else None
    with ExitStack() as stack:
        stack.enter_context(_seeded())
        stack.enter_context(nullcontext() if plan.way in ("plain", "compiled") else without_compiler())
        stack.enter_context(recorder.watching())
        if is_exact:
            stack.enter_context(exact_arithmetic(rounding))
        elif rounding is not None:
            stack.enter_context(rounding)
        if log is not None:
            stack.enter_context(log.watching())
        try:
            train(*([recorder] if takes_probe else []))
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise
    recorder.measurement.about = {**about_process(), "ranks": plan.ranks}
    if log is not None:
        recorder.measurement.ops = log.calls
    if rounding is not None:
        recorder.measurement.dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in rounding.dtypes)
    return recorder.measurement


def about_process() -> dict[str, Any]:
    """Return what computes; in the process that does, because asking for a GPU's name starts CUDA."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "castwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "string_hash": hash("castwise") & 0xFFFFFFFF,  # by which orders of sets differ: see PYTHONHASHSEED
    }


def _takes_probe(train: Train) -> bool:
    try:
        parameters = inspect.signature(train).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in parameters)


@contextmanager
def _seeded() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    threads, of_python, of_numpy = torch.get_num_threads(), random.getstate(), numpy and numpy.random.get_state()
    accelerator = torch.accelerator.current_accelerator()
    devices = [*range(torch.accelerator.device_count())]  # named, or torch warns where there are several
    with torch.random.fork_rng(devices, device_type=accelerator.type if accelerator else "cuda"):
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
    """Run a program in new processes, so that it finds nothing of its earlier runs, and return what rank 0 has shown.

    Raises:
        ProgramError: It raised, or ended its process; the text has its traceback or the end of its output.
    """
    # A fork has torch loaded already. It is safe because this process has computed nothing, so has no threads. The
    # first optimizer of a process loads the compiler, which takes seconds, and is therefore made here.
    torch.optim.SGD([torch.empty(0)], lr=1.0)
    context: Any = multiprocessing.get_context("fork" if sys.platform.startswith("linux") else "spawn")
    port = _free_port() if plan.ranks > 1 else 0
    ranks: dict[Any, _Rank] = {}
    with tempfile.TemporaryDirectory(prefix="castwise-") as folder, _ended(ranks):
        for number in range(plan.ranks):
            output = Path(folder, f"output-{number}")
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_apart, args=(train, plan, number, port, theirs, str(output)))
            process.start()
            theirs.close()
            ranks[ours] = _Rank(number, process, output)
        results = _received(ranks)
    first = results[0]
    first.digests = of_all_ranks([result.digests for result in results])
    first.losses = of_all_ranks([result.losses for result in results])
    return first


def of_all_ranks(digests: Sequence[Sequence[str]]) -> list[str]:
    """Return a digest for each step that any rank has taken."""
    return ["+".join(of_step) for of_step in zip_longest(*digests, fillvalue="")]


class _Rank(NamedTuple):
    """A process that runs a program."""

    number: int
    process: Any
    output: Path


@contextmanager
def _ended(ranks: dict[Any, _Rank]) -> Iterator[None]:
    """Let the ranks end after the block; make them, if it raises."""
    patience_s: float | None = None
    try:
        yield
    except BaseException:
        patience_s = PATIENCE_S
        for rank in ranks.values():
            rank.process.terminate()
        raise
    finally:
        for end in ranks:
            with suppress(OSError):
                end.send("end")  # a rank that has sent its result ends only now: the others may still talk to it
            end.close()
        for rank in ranks.values():
            rank.process.join(patience_s)
            rank.process.kill()  # one that handles SIGTERM and waits for a rank that has gone
            rank.process.join()


def _received(ranks: dict[Any, _Rank]) -> list[Measurement]:
    """Return what each rank has sent, in their order."""
    results: dict[int, Measurement] = {}
    while len(results) < len(ranks):
        waited: list[Any] = [end for end, rank in ranks.items() if rank.number not in results]
        for end in multiprocessing.connection.wait(waited):
            rank = ranks[end]
            results[rank.number] = _result_of(end, rank)
    return [results[number] for number in sorted(results)]


def _result_of(end: Any, rank: _Rank) -> Measurement:
    try:
        result = end.recv()
    except EOFError:
        rank.process.join()
        printed = rank.output.read_text(errors="replace") if rank.output.exists() else ""
        code = rank.process.exitcode
        result = f"the program ended its process with exit code {code}\n{printed[-2000:]}".strip()
    if not isinstance(result, Measurement):
        raise ProgramError(str(result))
    return result


def _free_port() -> int:
    """Return a port at which the ranks can meet; what finds it is closed before they start."""
    distributed: Any = torch.distributed  # which exports no TCPStore to type checkers
    return int(distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


def _traceback(error: BaseException) -> str:
    """Return a traceback without the frames of castwise above those of the program."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = next((i for i, file in enumerate(files) if not file.startswith(_OURS)), 0)
    return "".join(traceback.format_exception(error, limit=own - len(files)))


def _run_apart(train: Train, plan: Plan, rank: int, port: int, end: Any, output: str) -> None:
    if plan.ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.ranks, "LOCAL_WORLD_SIZE": plan.ranks}
        os.environ.update({name: str(number) for name, number in (numbers | {"MASTER_PORT": port}).items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        result: object = measure(train, plan)
    except SystemExit as exit_:
        result = f"the program exited with code {exit_.code}"
    except BaseException as error:
        result = _traceback(error)
    end.send(result)
    with suppress(EOFError, OSError):
        end.recv()
    sys.stdout.flush()
    os._exit(0)
