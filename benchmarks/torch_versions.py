"""Run tests with each supported minor version of torch, in an environment that is made for it and removed afterwards.

    python benchmarks/torch_versions.py               # the small set with every version, before a release
    python benchmarks/torch_versions.py 2.15          # the small set with one version; other rows are kept
    python benchmarks/torch_versions.py 2.15 --all    # all tests except the manual's; writes nothing
    python benchmarks/torch_versions.py 2.15 --names  # only look up the private names
    python benchmarks/torch_versions.py 2.13 --in .venv/bin/python   # in an environment that exists

Writes benchmarks/results/torch_versions.json and the table in docs/explanation/testing.md. Needs only the standard
library. With the CUDA libraries, an environment takes 3 GB to download and 6 GB of disk.
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
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "torch_versions.json"
PAGE = ROOT / "docs" / "explanation" / "testing.md"
BEGINS, ENDS = "<!-- torch_versions begins -->\n", "<!-- torch_versions ends -->\n"

VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")

SMALL = (
    "tests/test_package.py",  # the contract: names, signatures, classes
    "tests/amp/test_autocast_lockstep.py",
    "tests/amp/test_grad_scaler_lockstep.py",
    "tests/amp/test_step_budget.py",
    "tests/amp/test_torch_is_wrong.py",
    "tests/amp/test_autocast_compile.py",
    "tests/amp/test_grad_scaler_compile.py",
    "tests/distributed/fsdp/test_sharded_grad_scaler.py",
    "tests/master_weights/test_master_weights.py",
    "tests/doctor/test_notes.py",
)
ALL = ("tests", "--ignore=tests/docs")  # the manual shows the output of one version
ERRORS = (
    *("-W", "error::FutureWarning", "-W", "error::DeprecationWarning"),
    # torch 2.11 gives these warnings to itself, in torch.export and Inductor.
    *("-W", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    *("-W", "ignore:`isinstance(treespec, LeafSpec)` is deprecated:FutureWarning"),
)

# Private names of `castwise._torch_private`, with what is off without them. Names after ":" are not attributes of an
# importable object: torch sets or reads them on the user's objects, so they are looked up in the module's source.
NAMES = {
    "torch.utils._pytree.tree_map": "containers registered with torch",
    "torch.utils._pytree.tree_leaves": "containers registered with torch",
    "torch.utils._python_dispatch.TorchDispatchMode": "trace, diagnose, WeightCache in training",
    "torch.utils._python_dispatch._disable_current_modes": "hiding castwise's ops from dispatch modes",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode": "hiding castwise's ops from dispatch modes",
    "torch._C.DisableTorchFunctionSubclass": "checks for misused gradients",
    "torch._C._are_functorch_transforms_active": "detection of functorch transforms",
    "torch._C._get_privateuse1_backend_name": "names of custom backends",
    "torch.Tensor._version": "detection of writes",
    "torch._C._dynamo.eval_frame._FrameAction": "keeping Dynamo out of castwise's functions",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "keeping Dynamo out of castwise's functions",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "keeping Dynamo out of castwise's functions",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "detection of Dynamo",
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx": "calls after tracing",
    "torch._dynamo.output_graph.OutputGraph.add_cleanup_hook": "calls after tracing",
    "torch._guards.TracingContext.extract_stack": "lines in messages about compiled code",
    "torch._dynamo.callback.callback_handler.start_callbacks": "detection of compilations",
    "torch._dynamo.callback.callback_handler.end_callbacks": "detection of compilations",
    "torch._dynamo.trace_rules.get_torch_obj_rule_map": "loading the compiler ahead",
    "torch._functorch.config.backward_pass_autocast": "backwards outside autocast under a policy",
    "torch.autograd.Variable._execution_engine": "calls at the end of a backward",
    "torch._C._autograd._get_sequence_nr": "counting forwards",
    "torch._C._current_graph_task_id": "detection of backwards",
    "torch._C._current_autograd_node": "detection of recomputed forwards",
    "torch.autograd.graph.Node._sequence_nr": "detection of recomputed forwards",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "FSDP2's precision in reports",
    "torch.distributed.fsdp._fully_shard._fsdp_state:_mp_policy": "FSDP2's precision in reports",
    "torch.distributed.fsdp._common_utils:_fsdp_flattened": "detection of FSDP1's parameters",
    "torch.ops.aten.add.Tensor._schema": "schemas of ops",
    "torch.overrides._get_current_function_mode_stack": "detection of function modes",
    "torch.amp._enter_autocast": "regions in exported programs",
    "torch.amp._exit_autocast": "regions in exported programs",
    "torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode": "regions in exported programs",
    "torch.Tensor._post_accumulate_grad_hooks": "holding hooks back while diagnosing",
    "torch.nn.Module._compiled_call_impl": "detection of compiled modules",
    "torch._C._after_ADInplaceOrView_keyset": "detection of writes by collectives",
    "torch._dynamo.decorators:_dynamo_marked_constant": "constants in compiled code",
    "torch._dynamo.eval_frame:_torchdynamo_disable": "functions that Dynamo never traces",
    "torch._jit_internal:_jit_override_qualname": "torch.jit.script",
}

# Runs in the environment: imports as much of each name as is a module, and gets the rest as attributes.
LOOK_UP = """
import functools, importlib, inspect, json, platform, sys, torch

def is_there(name):
    module, _, mark = name.partition(":")
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


def make_environment(folder: Path, version: str) -> Path:
    """Install castwise and everything its tests need, with a version of torch; return the interpreter."""
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins.write_text("\n".join([*(line for line in lines if not line.startswith("torch==")), f"torch=={version}.*"]))
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", pins, "-e", f"{ROOT}[dev]"], check=True)
    return python


def pytest(python: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Run tests; return how many had each outcome, which failed, and the minutes."""
    processes = ("-q", "-n", "auto", "--maxprocesses", "4", "-p", "no:cacheprovider")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}
    command = [str(python), "-m", "pytest", *processes, *arguments]
    begun = time.monotonic()
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(run.stdout[-20_000:], run.stderr[-5_000:], sep="\n")
    last = run.stdout.splitlines()[-1] if run.stdout else ""
    outcomes = {
        word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    }
    return {
        **{kind: outcomes.get(kind, 0) for kind in ("passed", "skipped", "failed", "error")},
        "not passed": re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.M),
        "status": run.returncode,
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }


def look_up(python: Path) -> dict[str, Any]:
    """Return the versions of an environment, and the private names that its torch lacks."""
    command = [str(python), "-c", LOOK_UP, json.dumps([*NAMES])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {**found, "date": datetime.date.today().isoformat()}


def table(record: dict[str, Any]) -> str:
    """Return a table with a row per version."""
    lines = ["| torch | Python | date | passed | skipped | failed | errors | minutes | private names missing |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for of_version in record.values():
        missing = "; ".join(f"`{name}`: {NAMES[name]} is off" for name in of_version["missing"]) or "none"
        tests = [of_version.get(kind, "not run") for kind in ("passed", "skipped", "failed", "error", "minutes")]
        cells = [*(of_version[key] for key in ("torch", "python", "date")), *tests, missing]
        lines.append(f"| {' | '.join(map(str, cells))} <!-- no promise --> |")
    return "\n".join(lines) + "\n"


def write(version: str, found: dict[str, Any]) -> None:
    """Write one version's result and the table of all."""
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    record[version] = found
    record = {name: record[name] for name in VERSIONS if name in record}
    RESULT.write_text(json.dumps(record, indent=2) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGINS)
    PAGE.write_text(f"{before}{BEGINS}{table(record)}{ENDS}{rest.partition(ENDS)[2]}")


def main() -> None:
    """Test the versions one after the other; fail if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(VERSIONS))
    parser.add_argument("--all", action="store_true", help="run all tests; write nothing")
    parser.add_argument("--names", action="store_true", help="only look up the private names")
    parser.add_argument("--in", dest="python", type=Path, help="the interpreter of an environment that exists")
    options = parser.parse_args()
    if unknown := set(options.versions) - set(VERSIONS):
        parser.error(f"VERSION must be one of {', '.join(VERSIONS)}, got {', '.join(sorted(unknown))}")
    if options.python and len(options.versions) != 1:
        parser.error("--in needs one version")
    failed = []
    for version in options.versions or VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            python = options.python.absolute() if options.python else make_environment(Path(folder), version)
            about = look_up(python)
            if not about["torch"].startswith(f"{version}."):
                sys.exit(f"{python} has torch {about['torch']}, not {version}")
            if options.names:
                found = about
            elif options.all:
                found = about | pytest(python, ALL)
            else:
                found = about | pytest(python, (*ERRORS, *SMALL))
        if not (options.all or options.names):
            write(version, found)
        print(f"torch {version}: {json.dumps(found)}", flush=True)
        if found.get("status"):
            failed.append(version)
    if failed:
        sys.exit(f"tests failed with torch {', '.join(failed)}")


if __name__ == "__main__":
    main()
