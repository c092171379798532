"""Run tests with each supported minor version of torch and of Python, in environments made for it and then removed.

    python benchmarks/torch_versions.py                # the small set with every torch, before a release
    python benchmarks/torch_versions.py 2.15           # the small set with one torch; other rows are kept
    python benchmarks/torch_versions.py 2.15 --all     # all tests except the manual's
    python benchmarks/torch_versions.py 2.15 --names   # only look up the private names; writes nothing
    python benchmarks/torch_versions.py 2.13 --in .venv/bin/python   # in an environment that exists
    python benchmarks/torch_versions.py --pythons      # the light tests with every Python that is installed
    python benchmarks/torch_versions.py --pythons 3.12 # the light tests with one Python

Writes files in benchmarks/results/ and the tables in docs/explanation/testing.md. Needs only the standard library. With
the CUDA libraries, an environment takes 3 GB to download and 6 GB of disk.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "testing.md"

VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

SMALL = (
    "tests/test_package.py",  # the contract: names, signatures, classes
    "tests/amp/test_autocast_lockstep.py",
    "tests/amp/test_grad_scaler_lockstep.py",
    "tests/amp/test_step_budget.py",
    "tests/amp/test_torch_is_wrong.py",
    "tests/amp/test_autocast_compile.py",
    "tests/amp/test_grad_scaler_compile.py",
    "tests/amp/test_torch_words.py",  # messages and deprecations, which programs match
    "tests/cuda/amp/test_deprecated.py",
    "tests/distributed/fsdp/test_sharded_grad_scaler.py",
    "tests/master_weights/test_master_weights.py",
    "tests/doctor/test_notes.py",
)
ALL = ("tests", "--ignore=tests/docs")  # the manual shows the output of one version
LIGHT = (
    "tests/test_package.py",
    "tests/amp/test_autocast_lockstep.py",
    "tests/amp/test_grad_scaler_lockstep.py",
    "tests/amp/test_step_budget.py",
    "tests/amp/test_torch_is_wrong.py",
    "tests/amp/test_autocast_compile.py",
    "tests/amp/test_grad_scaler_compile.py",
    "tests/policy/test_policy.py",
    "tests/cli/test_run.py",
    "tests/mistakes",
)
WARNINGS = (
    "error::FutureWarning",
    "error::DeprecationWarning",
    # torch 2.11 gives these warnings to itself, in torch.export and Inductor.
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:`isinstance(treespec:FutureWarning",  # PYTHONWARNINGS would end it at its comma
)


class Suite(NamedTuple):
    """The tests that are run with some versions of torch or of Python, and the name of their result file and table."""

    name: str
    of: str
    versions: tuple[str, ...]
    tests: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def result(self) -> Path:
        """The file with a record for each version."""
        return ROOT / "benchmarks" / "results" / f"{self.name}.json"


SMALL_SET = Suite("torch_versions", "torch", VERSIONS, SMALL, WARNINGS)
ALL_TESTS = Suite("all_tests", "torch", (VERSIONS[0], VERSIONS[-1]), ALL)
LIGHT_TESTS = Suite("python_versions", "python", PYTHONS, LIGHT)

# Private names of `castwise._torch_private`, with what is off without them. Names after ":" are not attributes of an
# importable object: torch sets or reads them on the user's objects, so they are looked up in the module's source. Those
# of `grad_fn` are parts of the names that an autograd node has.
NAMES = {
    "torch.utils._pytree.tree_map": "containers registered with torch",
    "torch.utils._pytree.tree_leaves": "containers registered with torch",
    "torch.utils._python_dispatch.TorchDispatchMode": "trace, diagnose, WeightCache in training",
    "torch.utils._python_dispatch._disable_current_modes": "hiding castwise's ops from dispatch modes",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode": "hiding castwise's ops from dispatch modes",
    "torch.DisableTorchFunctionSubclass": "checks for misused gradients",
    "torch._C._are_functorch_transforms_active": "detection of functorch transforms",
    "torch.Tensor._version": "detection of writes",
    "torch._C._dynamo.eval_frame._FrameAction": "keeping Dynamo out of castwise's functions",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "keeping Dynamo out of castwise's functions",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "keeping Dynamo out of castwise's functions",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "detection of Dynamo",
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx": "calls after tracing",
    "torch._dynamo.output_graph.OutputGraph.add_cleanup_hook": "calls after tracing",
    "torch._dynamo.output_graph:tracing_context": "lines in messages about compiled code",
    "torch._dynamo.callback.callback_handler.start_callbacks": "detection of compilations",
    "torch._dynamo.callback.callback_handler.end_callbacks": "detection of compilations",
    "torch._dynamo.trace_rules.get_torch_obj_rule_map": "loading the compiler ahead",
    "torch._functorch.config.backward_pass_autocast": "backwards outside autocast under a policy",
    "torch.autograd.Variable._execution_engine": "calls at the end of a backward",
    "torch.autograd._get_sequence_nr": "counting forwards",
    "torch._C._current_graph_task_id": "detection of backwards",
    "torch._C._current_autograd_node": "detection of recomputed forwards",
    "torch.autograd.graph.Node._sequence_nr": "detection of recomputed forwards",
    "grad_fn:_saved_": "ops of the loss in a diagnosis",
    "grad_fn:_raw_saved_": "checkpointed functions are not called again by a diagnosis",
    "grad_fn:_sym_sizes": "ops of the loss in a diagnosis",
    "grad_fn:_input_metadata": "repeating losses of spikes",
    "torch.distributed.fsdp.fully_shard.state": "FSDP2's precision in reports",
    "torch.distributed.fsdp._fully_shard._fsdp_state:_mp_policy": "FSDP2's precision in reports",
    "torch.distributed.fsdp._common_utils:_fsdp_flattened": "detection of FSDP1's parameters",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor.trigger_wait": "tensor parallelism in a diagnosis",
    "torch.ops.aten.add.Tensor._schema": "schemas of ops",
    "torch.overrides._get_current_function_mode_stack": "detection of function modes",
    "torch.amp._enter_autocast": "regions in exported programs",
    "torch.amp._exit_autocast": "regions in exported programs",
    "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode": "regions in exported programs",
    "torch.Tensor._backward_hooks": "holding hooks of gradients back while diagnosing",
    "torch.Tensor._post_accumulate_grad_hooks": "holding hooks back while diagnosing",
    "torch.nn.modules.module:_parameters": "policies, WeightCache, diagnose, compare",
    "torch.nn.modules.module:_buffers": "diagnose, compare, trace",
    "torch.nn.modules.module:_modules": "policies, WeightCache",
    "torch.nn.Module._apply": "narrowing by MasterWeights",
    "torch.nn.Module._replicate_for_data_parallel": "WeightCache in DataParallel",
    "torch.optim.lr_scheduler:_opt_called": "a scheduler's view of a MasterWeights",
    "torch.amp.grad_scaler:_step_supports_amp_scaling": "unscaling in the step of fused optimizers",
    "torch.amp.autocast_mode:_fwd_used_autocast": "castwise's custom_fwd with torch's custom_bwd",
    "torch.amp.autocast_mode:_dtype": "castwise's custom_fwd with torch's custom_bwd",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "names inside checkpoint wrappers",
    "torch.DispatchKey.ADInplaceOrView": "detection of writes by collectives",
    "torch.DispatchKeySet.highestPriorityTypeId": "detection of writes by collectives",
    "torch.utils.hooks:hooks_dict_ref": "the hooks of an optimizer in a MasterWeights",
    "torch._dynamo.decorators:_dynamo_marked_constant": "constants in compiled code",
    "torch._dynamo.eval_frame:_torchdynamo_disable": "functions that Dynamo never traces",
    "torch._jit_internal:_jit_override_qualname": "torch.jit.script",
    "torch.jit.frontend.make_source_context": "torch.jit.script",
    "torch.jit.annotations.try_ann_to_type": "torch.jit.script",
    "torch._dynamo.eval_frame:get_compiler_config": "detection of compiled code",
    "torch._dynamo.eval_frame:dynamo_ctx": "comparisons with a compiled model's settings",
    "torch.utils.data.dataloader._BaseDataLoaderIter._next_index": "indices of samples in a dataset",
}

# Runs in the environment: imports as much of each name as is a module, and gets the rest as attributes.
LOOK_UP = """
import functools, importlib, inspect, json, platform, sys, torch

def is_there(name):
    module, _, mark = name.partition(":")
    if module == "grad_fn":
        weight = torch.ones(1, 1, 1, requires_grad=True)
        return any(mark in own for own in dir(torch.conv1d(torch.ones(1, 1, 2), weight).grad_fn))
    if mark:
        return mark in inspect.getsource(importlib.import_module(module))
    *parts, last = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
            break
        except ImportError:
            pass
    try:
        return hasattr(functools.reduce(getattr, parts[end:], owner), last)
    except AttributeError:
        return False

missing = [name for name in json.loads(sys.argv[1]) if not is_there(name)]
print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "missing": missing}))
"""


def interpreter(version: str) -> str | None:
    """Return the path of a Python of a minor version, None if none is installed."""
    try:  # a shim of pyenv is there even if its version is not chosen
        command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def make_environment(folder: Path, base: str, torch: str | None) -> Path:
    """Install castwise and everything its tests need for a Python, with a version of torch; return the interpreter."""
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if torch is not None:
        lines = [*(line for line in lines if not line.startswith("torch==")), f"torch=={torch}.*"]
    pins.write_text("\n".join(lines))
    subprocess.run([base, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", pins, "-e", f"{ROOT}[dev]"], check=True)
    return python


def minutes_since(begun: float) -> float:
    """Return how long ago `time.monotonic()` was so."""
    return round((time.monotonic() - begun) / 60, 1)


def pytest(python: Path, arguments: tuple[str, ...], warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run tests; return how many had each outcome, which failed, and the minutes.

    Warning filters hold in the tests and in processes that they start: subprocesses, and ranks forked from a server.
    """
    processes = ("-q", "-n", "auto", "--maxprocesses", "4", "-p", "no:cacheprovider")
    filters = [word for one in warnings for word in ("-W", one)]
    settings = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000", "PYTHONWARNINGS": ",".join(warnings)}
    settings["PYTHONDONTWRITEBYTECODE"] = ""  # else each of hundreds of processes compiles torch again
    command = [str(python), "-m", "pytest", *processes, *filters, *arguments]
    begun = time.monotonic()
    lines = [""]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    outcomes = {
        word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1])
    }
    return {
        **{kind: outcomes.get(kind, 0) for kind in ("passed", "skipped", "failed", "error")},
        "not passed": re.findall(r"^(?:FAILED|ERROR) (\S+)", "".join(lines), re.M),
        "status": run.returncode,
        "minutes": minutes_since(begun),
    }


def look_up(python: Path) -> dict[str, Any]:
    """Return the versions of an environment, and the private names that its torch lacks."""
    command = [str(python), "-c", LOOK_UP, json.dumps([*NAMES])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {**found, "date": datetime.date.today().isoformat()}


def table(suite: Suite, record: dict[str, Any]) -> str:
    """Return a table with a row per version."""
    outcomes = "passed | skipped | failed | errors | minutes of tests | minutes to install"
    lines = [f"| torch | Python | date | {outcomes} | private names missing |", f"|{'---|' * 10}"]
    for version in suite.versions:
        found = {"torch": "-", "python": "-", suite.of: version, "date": "-", "missing": [], **record.get(version, {})}
        missing = "; ".join(f"`{name}`: {NAMES[name]} is off" for name in found["missing"]) or "none"
        tests = [found.get(kind, "not run") for kind in ("passed", "skipped", "failed", "error", "minutes")]
        tests.append(found.get("minutes to install", "-"))
        cells = [*(found[key] for key in ("torch", "python", "date")), *tests, missing if version in record else "-"]
        lines.append(f"| {' | '.join(map(str, cells))} <!-- no promise --> |")
    return "\n".join(lines) + "\n"


def shown(suite: Suite, record: dict[str, Any]) -> str:
    """Return the part of the page that a suite writes."""
    return f"<!-- {suite.name} begins -->\n{table(suite, record)}<!-- {suite.name} ends -->\n"


def write(suite: Suite, version: str, found: dict[str, Any]) -> None:
    """Write one version's result and the table of all."""
    record = json.loads(suite.result.read_text()) if suite.result.exists() else {}
    record[version] = found
    record = {name: record[name] for name in suite.versions if name in record}
    suite.result.write_text(json.dumps(record, indent=2) + "\n")
    part = rf"<!-- {suite.name} begins -->\n.*?<!-- {suite.name} ends -->\n"
    PAGE.write_text(re.sub(part, lambda _: shown(suite, record), PAGE.read_text(), flags=re.S))


def test(suite: Suite, version: str, python: Path | None, only_names: bool) -> dict[str, Any]:
    """Run a suite with one version, in an environment of its own if none is given; return what was found."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        if python is None:
            base = sys.executable if suite.of == "torch" else interpreter(version)
            if base is None:
                return {"not run": f"python{version} is not installed"}
            begun = time.monotonic()
            python = make_environment(Path(folder), base, version if suite.of == "torch" else None)
            found["minutes to install"] = minutes_since(begun)
        about = look_up(python)
        if not about[suite.of].startswith(f"{version}."):
            sys.exit(f"{python} has {suite.of} {about[suite.of]}, not {version}")
        return about | found | ({} if only_names else pytest(python, suite.tests, suite.warnings))


def main() -> None:
    """Test the versions one after the other; fail if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = f"of torch: {', '.join(VERSIONS)}; of Python: {', '.join(PYTHONS)}"
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=every)
    parser.add_argument("--all", action="store_true", help="run all tests; only with the oldest and the newest torch")
    parser.add_argument("--pythons", action="store_true", help="run the light tests; versions are those of Python")
    parser.add_argument("--names", action="store_true", help="only look up the private names; write nothing")
    parser.add_argument("--in", dest="python", type=Path, help="the interpreter of an environment that exists")
    options = parser.parse_args()
    suite = ALL_TESTS if options.all else LIGHT_TESTS if options.pythons else SMALL_SET
    if unknown := set(options.versions) - set(suite.versions):
        parser.error(f"VERSION must be one of {', '.join(suite.versions)}, got {', '.join(sorted(unknown))}")
    if options.python and len(options.versions) != 1:
        parser.error("--in needs one version")
    failed = []
    for version in options.versions or suite.versions:
        found = test(suite, version, options.python and options.python.absolute(), options.names)
        if "status" in found:
            write(suite, version, found)
        print(f"{suite.of} {version}: {json.dumps(found)}", flush=True)
        if found.get("status"):
            failed.append(version)
    if failed:
        sys.exit(f"tests failed with {suite.of} {', '.join(failed)}")


if __name__ == "__main__":
    main()
