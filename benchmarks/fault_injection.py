"""Raise in every function that watches a training run: the run must end with the same weights.

    python -m benchmarks.fault_injection [--part 1/1] [--only TEXT] [--small]

The functions are those of castwise's packages monitor, mistakes, tracing and installation, and of diagnosis.recording.
Each raises in turn from its first and from its third call on, with warnings shown and with warnings as errors
(`python -W error`), in each of the trainings below that calls it. Prints the runs that ended or whose weights differ,
one a line, and exits with 1 if there are any. `--part 2/20` tries every 20th function, beginning with the second.
`--small` is what the tests do: an eighth of the functions and those in `ALWAYS`, each in one training.

Faults are statements at the beginning of each function's body, which are put in when the module is imported. So nested
functions and functions behind decorators raise too, and the guards are the ones that users have.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import builtins
import contextlib
import gc
import importlib
import importlib.abc
import io
import json
import shutil
import sys
import tempfile
import types
import warnings
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any, NamedTuple

PACKAGES = ("monitor", "_mistakes", "tracing", "_installation", "diagnosis._recording")
FIRST_CALLS = (1, 3)

# The functions whose first statement no guard can be around: those that run the script's own call or are the guarded
# call themselves, and the script's calls of castwise, which would raise before anything is changed.
NOT_TRIED = {
    "castwise.monitor._monitor:Monitor.detach",
    "castwise.monitor._monitor:Monitor.__exit__",
    "castwise._installation:uninstall",
    "castwise._installation:end",
    "castwise._mistakes.scaled_gradients:ScaledGradient.__torch_function__",
    "castwise._mistakes.scaled_gradients:ScaledGradient.__deepcopy__",
    "castwise._mistakes.scaled_gradients:ScaledGradient.__reduce_ex__",
    "castwise._mistakes.scaled_gradients:ScaledGradient._plain",
    "castwise.tracing._module_hooks:_Hook.__call__",
    "castwise.tracing._module_hooks:_Hook._call",
    "castwise._installation.replacement:_Observed.__get__",
    "castwise._installation.replacement:_observed_save.observed",
    "castwise._installation.replacement:_observed_load_state_dict.observed",
    "castwise._installation.replacement:_observed_load.observed",
}

# Functions that once ended runs, in each kind of door.
ALWAYS = (
    "Activations._enter",
    "Activations.stop",
    "Backwards._gradient_came",
    "ModuleHooks._enter",
    "Monitor._knows",
    "Monitor._start",
    "QuantizedLayers.stop",
    "Recording.take",
    "ScalerObserver.stepped",
    "ScalerObserver.stepping",
    "ScalerObserver.updating",
    "StepNumbers.of",
    "Watch._is_elsewhere",
    "Watch._tick",
    "Watch._look_out_for_backward.start",
    "Account._before_step",
)


class Fault(Exception):  # noqa: N818  # it is planted, not an error of this program
    """The planted fault."""


class Faults:
    """The function that raises, and how often each function was called."""

    def __init__(self) -> None:
        self.target, self.first, self.calls = "", 1, Counter[str]()

    def __call__(self, key: str) -> None:
        """Run at the beginning of each function."""
        self.calls[key] += 1
        if key == self.target and self.calls[key] >= self.first:
            raise Fault(key)

    def plant(self, target: str, first: int) -> None:
        """Let a function raise from a call on."""
        self.target, self.first, self.calls = target, first, Counter()


FAULTS = Faults()


class _Instrument(ast.NodeTransformer):
    """Puts a call of `FAULTS` into each function."""

    def __init__(self, module: str) -> None:
        self._module, self._names = module, list[str]()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._names.append(node.name)
        self.generic_visit(node)
        call = ast.Expr(self._call())
        has_docstring = ast.get_docstring(node) is not None
        node.body.insert(int(has_docstring), ast.fix_missing_locations(ast.copy_location(call, node.body[0])))
        self._names.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._names.append(f"<lambda {node.lineno}>")
        self.generic_visit(node)
        body = ast.Subscript(ast.Tuple([self._call(), node.body], ast.Load()), ast.Constant(1), ast.Load())
        node.body = ast.fix_missing_locations(ast.copy_location(body, node.body))
        self._names.pop()
        return node

    def _call(self) -> ast.expr:
        key = ast.Constant(f"{self._module}:{'.'.join(self._names)}")
        return ast.Call(ast.Name("castwise_fault_point", ast.Load()), [key], [])


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = _Instrument(fullname).visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not any(name == f"castwise.{part}" or name.startswith(f"castwise.{part}.") for part in PACKAGES):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


builtins.castwise_fault_point = FAULTS  # type: ignore[attr-defined]  # for the instrumented modules
sys.meta_path.insert(0, _Finder())

import torch  # noqa: E402
from torch import nn  # noqa: E402

import castwise  # noqa: E402
import castwise._installation  # noqa: E402
import castwise._recipes.listeners  # noqa: E402
import castwise.report._summary  # noqa: E402
from castwise._torch_private import load_compiler  # noqa: E402
from castwise.amp._observers import OBSERVERS  # noqa: E402
from castwise.amp._thread_state import THREAD  # noqa: E402

load_compiler()  # before the names of torch's modules are noted


class Run(NamedTuple):
    """A training run.

    Args:
        weights: The weights at the end.
        refused: Calls of the script's own that raised the fault before anything was changed.
    """

    weights: list[torch.Tensor]
    refused: int = 0


class Net(nn.Module):
    """A few layers with a buffer, one of them with a recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Script:
    """A training script with a scaler, which calls castwise as `watch` says."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.data = Net(), torch.Generator().manual_seed(1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 0.9)
        self.refused = 0

    def batch(self, step: int) -> torch.Tensor:
        x = torch.randn(8, 16, generator=self.data)
        return torch.full_like(x, torch.inf) if step == 3 else x

    def begins(self, call: Callable[[], Any]) -> Any:
        """Make a call of castwise that may refuse before it has changed anything."""
        observers = list(OBSERVERS)
        try:
            return call()
        except Fault:
            assert observers == OBSERVERS, "a refused call is still observing"
            self.refused += 1
            return None

    def train(self, steps: int = 6) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for step in range(steps):
            for _ in range(2 if step == 4 else 1):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = self.model(self.batch(step)).square().mean()
                scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(self.optimizer)
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                assert norm > 0 or step == 3
            scaler.step(self.optimizer)
            scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if step == 1:
                self.save(scaler)
        self.model.eval()
        self.model(self.batch(0))
        return self.ends()

    def save(self, scaler: Any) -> None:
        file = io.BytesIO()
        torch.save({"optimizer": self.optimizer.state_dict(), "scaler": scaler.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])

    def ends(self) -> Run:
        return Run([param.detach().clone() for param in self.model.parameters()], self.refused)


def with_a_monitor(is_watched: bool) -> Run:
    """A monitor that diagnoses skipped steps, and a layer with a recipe."""
    script = Script()
    policy = castwise.Policy("float16", modules={"last": "float8_tensorwise"}, backend="emulated")
    bound = policy.bind(script.model)
    scaler = castwise.GradScaler("cpu", init_scale=2.0**12)
    monitor = None
    if is_watched:
        watched = {"every": 2, "on_nonfinite": "diagnose", "sinks": [tempfile.mkdtemp(dir=FOLDER)]}
        monitor = script.begins(lambda: castwise.Monitor(script.model, script.optimizer, scaler, **watched))
    if monitor is not None:
        script.begins(monitor.attach)
    for step in range(7):
        if monitor is not None:
            script.begins(lambda step=step: setattr(monitor, "step", 10 + step))
        with castwise.autocast("cpu", policy=bound):
            loss = script.model(script.batch(step)).square().mean()
        scaler.scale(loss).backward()
        if step == 5:  # by hand
            scaler.unscale_(script.optimizer)
            script.optimizer.step()
        else:
            scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        if is_watched and step == 4:  # which puts back everything that it changes
            with contextlib.suppress(Exception):  # a call of its own may raise
                castwise.trace(script.model, script.batch(0).clone(), policy=bound)
        elif step == 4:
            script.batch(0)
    if monitor is not None:
        monitor.detach()
    return script.ends()


def without_a_scaler(is_watched: bool) -> Run:
    """bf16, two optimizers, a monitor in a with block, and no scaler."""
    script = Script()
    heads = [torch.optim.SGD([*layer.parameters()], lr=0.1) for layer in (script.model.first, script.model.last)]

    def train() -> None:
        for step in range(5):
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = script.model(script.batch(step if step != 3 else 0)).square().mean()
            loss.backward()
            for optimizer in heads:
                optimizer.step()
                optimizer.zero_grad()

    monitor = None
    if is_watched:
        records: list[Any] = []
        monitor = script.begins(lambda: castwise.Monitor(script.model, heads, every=2, sinks=[records.append]))
    if monitor is None or script.begins(monitor.__enter__) is None:
        train()
    else:
        train()
        monitor.__exit__(None, None, None)
    return script.ends()


def while_installed(is_watched: bool) -> Run:
    """castwise.install with a folder, and a script that uses torch.amp."""
    script = Script()
    if is_watched:
        script.begins(lambda: castwise.install(tempfile.mkdtemp(dir=FOLDER), every=2, on_nonfinite="diagnose"))
    run = script.train()
    if is_watched:
        castwise.uninstall()
    return run


TRAININGS = (without_a_scaler, with_a_monitor, while_installed)
FOLDER = tempfile.mkdtemp(prefix="castwise-faults-")
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


class World:
    """What a run may leave behind in this process."""

    def __init__(self) -> None:
        self._optimizers = sys.modules[torch.optim.Optimizer.__module__]
        names = castwise._installation.replacement._NAMES
        modules = [importlib.import_module(".".join(filter(None, ["torch", name]))) for name in names]
        self._names = [(module, dict(vars(module))) for module in (*modules, torch, torch.serialization)]
        self._step = torch.optim.lr_scheduler.LRScheduler.step
        self._load = torch.optim.Optimizer.load_state_dict

    def restore(self) -> None:
        """Put it back as it was."""
        FAULTS.plant("", 1)
        gc.collect()  # models of earlier runs, which `install` would find
        castwise._installation._INSTALLED.clear()
        while torch.autocast_increment_nesting() > 1:  # regions that were entered and not left
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        THREAD.state = None
        watch = castwise._mistakes.watch.WATCH
        watch.stop()
        OBSERVERS.clear()
        for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            setattr(self._optimizers, hooks, OrderedDict())
        castwise._recipes.listeners.LISTENERS.clear()
        for module, attributes in self._names:
            for name in ("autocast", "GradScaler", "save", "custom_fwd", "custom_bwd", "ShardedGradScaler"):
                if name in attributes:
                    setattr(module, name, attributes[name])
        torch.optim.lr_scheduler.LRScheduler.step = self._step  # type: ignore[method-assign]  # as it was
        torch.optim.Optimizer.load_state_dict = self._load  # type: ignore[method-assign]  # as it was


def outcome(training: Callable[[bool], Run], expected: list[torch.Tensor], *, are_errors: bool) -> str:
    """Run a training with the planted fault. Return what went wrong; empty if nothing, "refused" if a call refused."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("error" if are_errors else "ignore")
        try:
            run = training(True)
        except Exception as error:
            return f"ended with {type(error).__name__}: {error}"
    if not all(torch.equal(a, b) for a, b in zip(run.weights, expected, strict=True)):
        return "other weights"
    return "refused" if run.refused else ""


def tries(
    part: tuple[int, int], only: str, *, is_small: bool
) -> Iterator[tuple[str, Callable[[bool], Run], str, int, bool]]:
    """Yield the faults to plant, by training."""
    world, tried = World(), set[str]()
    for training in TRAININGS:
        world.restore()
        assert outcome(training, training(False).weights, are_errors=False) == "", training.__name__
        called = Counter(FAULTS.calls)
        world.restore()
        for position, (key, count) in enumerate(sorted(called.items())):
            if key in NOT_TRIED or only not in key or position % part[1] != part[0] - 1:
                continue
            if is_small:
                number = zlib.crc32(key.encode())
                if key not in tried and (number % 8 == 0 or key.endswith(ALWAYS)):
                    tried.add(key)
                    yield training.__name__, training, key, 1, bool(number & 8)
                continue
            for first in FIRST_CALLS:
                for are_errors in (False, True) if count >= first else ():
                    yield training.__name__, training, key, first, are_errors


def main() -> int:
    """Plant all faults, and print those that ended a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="such as 2/20: every 20th function, beginning with the second")
    parser.add_argument("--only", default="", metavar="TEXT", help="functions with this in their name")
    parser.add_argument("--small", action="store_true", help="an eighth of the functions, each in one training")
    arguments = parser.parse_args()
    number, parts = map(int, arguments.part.split("/"))
    castwise.report._summary.end = lambda *_: None  # type: ignore[assignment]  # the report is not what is tested
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what has been imported; `install` looks for models among all other objects
    warnings.filterwarnings("ignore", message="this CPU has no units")
    world, counts, functions = World(), Counter[str](), set[str]()
    expected = {training: training(False).weights for training in TRAININGS}
    for name, training, key, first, are_errors in tries((number, parts), arguments.only, is_small=arguments.small):
        world.restore()
        FAULTS.plant(key, first)
        went_wrong = outcome(training, expected[training], are_errors=are_errors)
        functions.add(key)
        counts["runs"] += 1
        counts["refused" if went_wrong == "refused" else "wrong" if went_wrong else "same weights"] += 1
        if went_wrong not in ("", "refused"):
            how = ", warnings are errors" if are_errors else ""
            print(f"{key} from call {first} on, {name}{how}: {went_wrong}")
    world.restore()
    print(json.dumps({"functions": len(functions), **counts}))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
