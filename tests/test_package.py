"""Rules of the whole package: its public API, its signatures, what it imports, and in which direction."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import traceback
import typing
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import castwise

SOURCE = Path(castwise.__file__).parent
ROOT = Path(__file__).parents[1]
# Each package may import itself, those named, and the private modules beside them.
MAY_IMPORT = {
    "amp": set(),
    "cuda": {"amp"},
    "cpu": {"amp"},
    "distributed": {"amp"},
    "_doctor": {"amp", "_recipes"},
    "_recipes": set(),
    "policy": {"amp", "_recipes"},
    "weights": {"amp", "_recipes"},
    "master_weights": {"amp", "policy"},
    "tracing": {"amp", "policy", "_recipes", "weights"},
    "_mistakes": {"amp", "tracing"},
    "_invariants": {"amp"},
    "diagnosis": {"amp", "policy", "tracing", "_mistakes"},
    "checking": {"amp", "tracing", "_mistakes"},
    "comparison": {"amp", "policy", "_recipes", "tracing", "diagnosis", "report"},
    "tuning": {"amp", "policy", "_recipes", "_doctor", "comparison", "report"},
    "monitor": {"amp", "policy", "_recipes", "tracing", "_mistakes", "_invariants", "diagnosis", "checking"},
    "report": {"amp", "monitor"},
    "_fixing": {"_mistakes", "monitor", "report"},
    "_installation": {"amp", "policy", "weights", "master_weights", "diagnosis", "_mistakes", "_invariants", "monitor"}
    | {"report"},
    "integrations": {"amp", "distributed", "policy", "weights", "master_weights", "monitor", "report", "checking"},
    "_demo": {"amp", "monitor", "report", "_installation"},
    "_cli": {"amp", "policy", "tracing", "_mistakes", "_invariants", "monitor", "report", "_installation", "_doctor"}
    | {"_demo", "_fixing", "checking", "comparison", "diagnosis", "tuning"},
}
USE_THE_PUBLIC_API = {"_demo", "_cli"}
TORCHS_CLASSES = {"torch.autocast", "torch.amp.autocast", "torch.amp.GradScaler"}
# Who runs torch's mixed precision: as a rival, or to replay what another region did.
RUN_TORCHS_CLASSES = ("_demo/training.py", "diagnosis/_forward_state.py")
EXTRAS = [
    *("typer", "rich", "click", "hypothesis", "pytest", "plotly", "jinja2", "tensorboard", "selenium"),
    *("lightning", "pytorch_lightning", "accelerate", "transformers", "mlflow", "wandb"),
    *("pandas", "IPython"),
]

# Every name that scripts and frameworks find in torch, at the same relative path.
NAMES = {
    "": ["autocast", "GradScaler"],
    "amp": ["autocast", "custom_fwd", "custom_bwd", "is_autocast_available", "GradScaler"],
    "amp.autocast_mode": [
        "autocast",
        "custom_fwd",
        "custom_bwd",
        "is_autocast_available",
        "_cast",
        "autocast_decorator",
        "_UnmanagedAutocast",
        "_enter_autocast",
        "_exit_autocast",
    ],
    "amp.grad_scaler": ["GradScaler", "OptState", "_MultiDeviceReplicator", "_refresh_per_optimizer_state"],
    "cuda.amp": ["autocast", "custom_fwd", "custom_bwd", "GradScaler", "amp_definitely_not_available"],
    "cuda.amp.autocast_mode": ["autocast", "custom_fwd", "custom_bwd", "_cast"],
    "cuda.amp.grad_scaler": ["GradScaler", "OptState"],
    "cuda.amp.common": ["amp_definitely_not_available"],
    "distributed.fsdp.sharded_grad_scaler": [
        "ShardedGradScaler",
        "_GeneralMultiDeviceReplicator",
        "_is_supported_device",
        "_refresh_per_optimizer_state",
        "OptState",
        "GradScaler",
    ],
    "cpu.amp": ["autocast", "GradScaler"],
    "cpu.amp.autocast_mode": ["autocast"],
    "cpu.amp.grad_scaler": ["GradScaler"],
}
PLACES = [(module, name) for module, names in NAMES.items() for name in names]

CONTRACT = [
    *("scale", "unscale_", "step", "update", "get_scale", "is_enabled", "state_dict", "load_state_dict"),
    *("get_growth_factor", "set_growth_factor", "get_backoff_factor", "set_backoff_factor"),
    *("get_growth_interval", "set_growth_interval", "_lazy_init_scale_growth_tracker"),
    *("_check_scale_growth_tracker", "_get_scale_async", "_get_growth_tracker", "_check_inf_per_device"),
    *("_found_inf_per_device", "_unscale_grads_", "_maybe_opt_step", "__getstate__", "__setstate__", "__init__"),
]
ATTRIBUTES = ["_scale", "_growth_tracker", "_init_scale", "_init_growth_tracker", "_per_optimizer_states"]


# Every other name of these modules without two underscores, with what castwise has at the same path.
IMPORTED = "left out, because the module imports it for itself"
OTHER_NAMES = {
    "amp": {"_enter_autocast": "ours", "_exit_autocast": "ours"},
    "amp.autocast_mode": {
        **dict.fromkeys(["collections", "functools", "warnings", "Any", "torch", "np", "_dtype"], IMPORTED),
        "HAS_NUMPY": "left out, because castwise looks for numpy when it is given an array",
    },
    "amp.grad_scaler": dict.fromkeys(
        [
            "inspect",
            "warnings",
            "abc",
            "defaultdict",
            "Enum",
            "Any",
            "cast",
            "overload",
            "TYPE_CHECKING",
            "torch",
            "annotations",
        ],
        IMPORTED,
    ),
    "cuda.amp": {},
    "cuda.amp.autocast_mode": dict.fromkeys(["functools", "sys", "Any", "deprecated", "torch"], IMPORTED),
    "cuda.amp.grad_scaler": dict.fromkeys(["deprecated", "torch"], IMPORTED),
    "cuda.amp.common": dict.fromkeys(["find_spec", "torch"], IMPORTED),
    "cpu.amp": {},
    "cpu.amp.autocast_mode": dict.fromkeys(["sys", "Any", "deprecated", "torch"], IMPORTED),
    "cpu.amp.grad_scaler": dict.fromkeys(["deprecated", "torch"], IMPORTED),
    "distributed.fsdp.sharded_grad_scaler": {
        **dict.fromkeys(["logging", "abc", "defaultdict", "Iterable", "Any", "overload", "torch", "dist"], IMPORTED),
        "ProcessGroup": "same",
        "_MultiDeviceReplicator": "ours",
        "logger": "ours",
    },
}


@pytest.mark.parametrize("module", OTHER_NAMES)
def test_every_name_of_torchs_modules_is_accounted_for(module: str) -> None:
    of_torch, of_castwise = (importlib.import_module(f"{package}.{module}") for package in ("torch", "castwise"))
    submodules = {name.rpartition(".")[2] for name in sys.modules if name.startswith(f"torch.{module}.")}
    names = {name for name in vars(of_torch) if not name.startswith("__")} - submodules
    of_typing = {*typing.__all__}  # which of them torch imports differs between versions
    assert names - {*NAMES.get(module, ())} - OTHER_NAMES[module].keys() - of_typing == set()
    assert OTHER_NAMES[module].keys() - names == set()
    for name, where in OTHER_NAMES[module].items():
        if not where.startswith("left out, because "):
            is_same = getattr(of_castwise, name) is getattr(of_torch, name)
            assert where == ("same" if is_same else "ours"), name


def find(package: Any, module: str, name: str) -> Any:
    return getattr(importlib.import_module(".".join([package.__name__, *filter(None, [module])])), name)


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    # Of a class not its __new__, which torch has put there on some versions of Python.
    parameters = inspect.signature(function.__init__ if inspect.isclass(function) else function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


def test_the_face() -> None:
    assert castwise.__all__ == [
        "Cause",
        "GradScaler",
        "MasterWeights",
        "MixedPrecisionMistake",
        "Monitor",
        "Policy",
        "ScaleExhausted",
        "ShardedGradScaler",
        "WeightCache",
        "amp",
        "autocast",
        "compare",
        "compare_log_probs",
        "cpu",
        "cuda",
        "custom_bwd",
        "custom_fwd",
        "diagnose",
        "doctor",
        "install",
        "installed",
        "is_autocast_available",
        "policies",
        "schedules",
        "trace",
        "tune",
        "uninstall",
        "verdict",
    ]
    assert all(hasattr(castwise, name) for name in castwise.__all__)


def test_dir_lists_the_face_and_the_packages_with_public_names_alone() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file() and path.name[0] != "_"}
    code = "import castwise; import castwise._cli, castwise._shown; print(*dir(castwise))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(shown) == {*castwise.__all__, *packages}


@pytest.mark.parametrize(
    ("module", "name"),
    [place for place in PLACES if place[1] != "_UnmanagedAutocast" or torch.__version__ >= "2.12"],  # new there
)
def test_every_name_is_where_torch_has_it_with_torchs_signature(module: str, name: str) -> None:
    theirs, ours = find(torch, module, name), find(castwise, module, name)
    assert (ours is theirs) == (name == "OptState")  # code compares its members
    expected, got = shape(theirs), shape(ours)
    assert got[: len(expected)] == expected
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in got[len(expected) :])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("module", "name"), [place for place in PLACES if place[1] in {"autocast", "GradScaler", "ShardedGradScaler"}]
)
def test_every_class_is_one_of_torchs_class_at_the_same_path(module: str, name: str) -> None:
    theirs, ours = find(torch, module, name), find(castwise, module, name)
    assert issubclass(ours, theirs)
    made = ours() if module.startswith(("cuda", "cpu")) else ours("cpu")
    copies = [made, copy.copy(made), copy.deepcopy(made)]
    for instance in copies if name == "autocast" else [*copies, pickle.loads(pickle.dumps(made))]:
        assert type(instance) is ours
        assert isinstance(instance, theirs)


def test_private_classes_are_derived_from_torchs_that_they_stand_in_for() -> None:
    places = {(module, name) for module, name in PLACES if name.startswith("_")}
    places |= {
        (module, name) for module, names in OTHER_NAMES.items() for name, where in names.items() if where == "ours"
    }
    pairs = {
        (module, name): (getattr(importlib.import_module(f"torch.{module}"), name, None), find(castwise, module, name))
        for module, name in places
    }
    classes = {place[1]: issubclass(ours, theirs) for place, (theirs, ours) in pairs.items() if inspect.isclass(theirs)}
    new = {"_UnmanagedAutocast"} if torch.__version__ >= "2.12" else set()
    assert classes.keys() == {"_MultiDeviceReplicator", "_GeneralMultiDeviceReplicator", *new}
    assert all(classes.values()), classes


@pytest.mark.parametrize("cls", ["autocast", "GradScaler"])
def test_every_method_has_torchs_signature(cls: str) -> None:
    theirs, ours = getattr(torch.amp, cls), getattr(castwise, cls)
    methods = [name for name, value in vars(theirs).items() if inspect.isfunction(value)]
    assert len(methods) >= 4
    for name in methods:
        expected, got = shape(getattr(theirs, name)), shape(getattr(ours, name))
        assert got[: len(expected)] == expected, name
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in got[len(expected) :]), name


@pytest.mark.parametrize("cls", ["autocast", "GradScaler"])
def test_instances_are_torchs_but_no_member_is(cls: str) -> None:
    theirs, ours = getattr(torch.amp, cls), getattr(castwise, cls)
    assert isinstance(ours("cpu"), theirs)
    members = {name for name, value in vars(theirs).items() if inspect.isroutine(value)}
    if cls == "GradScaler":
        assert set(CONTRACT) <= members
        assert all(hasattr(ours("cpu"), name) for name in ATTRIBUTES)
    for name in members:
        assert inspect.getattr_static(ours, name) is not inspect.getattr_static(theirs, name), name


@pytest.mark.parametrize("module", ["cuda", "cpu"])
def test_deprecated_classes_are_made_of_ours(module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert isinstance(find(castwise, f"{module}.amp", "GradScaler")(), castwise.GradScaler)
        assert isinstance(find(castwise, f"{module}.amp", "autocast")(), castwise.autocast)


def loaded_after(statement: str, before: str = "") -> set[str]:
    """The modules that a statement loads, in a new process in which another one has been executed."""
    code = f"import sys\n{before}\nbefore = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_import_is_light() -> None:
    the_core = "import castwise; castwise.GradScaler, castwise.autocast, castwise.Policy, castwise.trace"
    ours = loaded_after(the_core, "import torch")
    assert {name for name in ours if name.split(".")[0] != "castwise"} == set()
    assert "castwise.tracing" in ours


def test_the_test_of_the_light_import_can_fail() -> None:
    assert {"typer", "rich"} <= loaded_after("import castwise._cli")
    assert not set(EXTRAS) & loaded_after("import castwise")


RESOLVE = """
import castwise, sys
for name in sys.argv[1:]:
    found = castwise
    for part in name.split(".")[1:]:
        found = getattr(found, part)
"""


def documented_names() -> set[str]:
    """Names such as `castwise.monitor.TensorBoard` in README and manual; integrations import their framework."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {name for page in pages for name in re.findall(r"\bcastwise(?:\.[A-Za-z_]\w*)+", page.read_text())}
    return {name for name in found if not name.startswith(("castwise.integrations.", "castwise._"))}


def test_documented_names_are_there_after_importing_castwise_alone() -> None:
    names = documented_names()
    assert {"castwise.monitor.TensorBoard", "castwise.report.Verdict"} <= names
    done = subprocess.run([sys.executable, "-c", RESOLVE, *sorted(names)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WITHOUT_FRAMEWORKS = """
import castwise, sys
for name in sys.argv[1:]:
    sys.modules[name] = None
    try:
        getattr(castwise.integrations, name)
    except ImportError as error:
        print(error)
"""


def test_an_integration_without_its_framework_names_the_extra() -> None:
    names = ["accelerate", "lightning", "pytorch_lightning"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FRAMEWORKS, *names], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(names)
    for name, text in zip(names, lines, strict=True):
        assert text.startswith(f"castwise.integrations.{name} needs ")
        assert "pip install" in text


def test_a_name_that_no_package_has_is_an_attribute_error() -> None:
    for package in (castwise, castwise.monitor, castwise.integrations):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
            _ = package.nothing
        assert not hasattr(package, "_nothing")


def imports(code: str, for_types: bool = False) -> set[str]:
    """The names that code imports from castwise, wherever it does; those that only type checkers look at on demand."""
    found, to_visit = set(), [ast.parse(code)]
    while to_visit:
        node: ast.AST = to_visit.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif for_types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            to_visit += ast.iter_child_nodes(node)
    return {name for name in found if name.split(".")[0] == "castwise"}


def module_of(path: Path) -> str:
    parts = ["castwise", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path.read_text() for path in SOURCE.rglob("*.py")}


def find_cycle(imported: dict[str, set[str]]) -> list[str]:
    """A way through imports that ends where it began; empty if there is none."""
    finished: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in finished:
            for other in sorted(imported.get(name, ())):
                if cycle := visit(other, [*way, name]):
                    return cycle
            finished.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in sorted(imported))), [])


def imported_modules(module: str, for_types: bool = False) -> set[str]:
    """The modules that a module names; of `from castwise.amp import x` that is `castwise.amp.x` if there is one."""
    found = set()
    for name in imports(MODULES[module], for_types):
        while name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {module}


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert find_cycle({module: imported_modules(module) for module in MODULES}) == []


def imported_packages() -> dict[str, set[str]]:
    """The packages that a package names, also for type checkers. All may name the face of castwise itself."""
    packages: dict[str, set[str]] = {}
    for module in MODULES:
        packages.setdefault(package_of(module), set()).update(map(package_of, imported_modules(module, for_types=True)))
    return {name: others - {name, "castwise"} for name, others in packages.items() if name != "castwise"}


def test_no_package_imports_itself_by_way_of_others() -> None:
    assert find_cycle(imported_packages()) == []


def test_packages_have_at_most_twelve_levels() -> None:
    packages = imported_packages()

    def level(name: str) -> int:
        return 1 + max(map(level, packages[name]), default=0)

    levels = {name: level(name) for name in packages if name != "castwise.__main__"}
    assert levels["castwise.amp"] <= 3
    assert max(levels.values()) <= 12


def test_the_test_of_cycles_can_fail() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert imports("if TYPE_CHECKING:\n    import castwise.a\ndef f():\n    from castwise import b") == {"castwise.b"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_in_one_direction(package: str) -> None:
    allowed = {package, *MAY_IMPORT[package]}
    if package in USE_THE_PUBLIC_API:
        allowed |= {"castwise itself", "__version__", *castwise.__all__}
    for module, code in MODULES.items():
        if module.split(".")[1:2] == [package]:
            targets = {[*name.split("."), "castwise itself"][1] for name in imports(code)}
            assert {
                target for target in targets if target in {"__version__", *MAY_IMPORT} or target[0] != "_"
            } <= allowed, module


def test_every_package_is_under_the_rule() -> None:
    # A folder that git has emptied may still hold compiled files.
    packages = {path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}
    assert {name for name in packages if not name.endswith(".py")} == set(MAY_IMPORT)


def test_no_module_has_the_name_of_a_public_function() -> None:
    functions = {name for name in castwise.__all__ if inspect.isfunction(getattr(castwise, name))}
    assert {"compare", "diagnose", "install", "trace", "tune", "verdict"} <= functions
    assert {name for module in MODULES for name in module.split(".")}.isdisjoint(functions)


# Private names that objects of torch have, and objects of castwise too.
OF_BOTH = {
    *("_buffers", "_dtype", "_enter_autocast", "_exit_autocast", "_modules", "_parameters", "_values", "_version"),
    "_sequence_nr",  # a node without its graph answers as torch's does
}
# Private names of others: of named tuples, Accelerate and Fabric; and parts of the names of ops.
OF_OTHERS = {"_make", "_replace", "_ShardedScaler", "_forward_module", "_legit", "_native_", "_transpose"}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_+[A-Za-z]\w*", name) is not None and not name.endswith("__")


NATIVE = ("torch._foreach_", "torch._amp_", "torch.ops.")


def is_op(name: str) -> bool:
    is_tensors = hasattr(torch.Tensor, name)  # such as _version, which is an op too
    return name.startswith(("_foreach_", "_amp_")) or (
        not is_tensors and any(hasattr(ops, name) for ops in (torch.ops.aten, torch.ops.c10d))
    )


class Names(NamedTuple):
    """The private names in some code: in imports from torch, attributes of `self`, other attributes, and strings."""

    imported: set[str]
    of_self: set[str]
    of_others: set[str]
    strings: set[str]


def private_names(code: str) -> Names:
    names = Names(set(), set(), set(), set())
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and not ast.unparse(node).startswith(NATIVE):
            (names.of_self if ast.unparse(node.value) == "self" else names.of_others).add(node.attr)
        elif isinstance(node, ast.Import):
            torchs = [alias.name for alias in node.names if alias.name.startswith("torch")]
            names.imported.update(part for name in torchs for part in name.split("."))
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            names.imported.update([*str(node.module).split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            names.strings.update(part for part in node.value.split(".") if not is_op(part))
    return Names(*(set(filter(is_private, some)) for some in names))


@functools.cache
def own_names() -> frozenset[str]:
    """The names that castwise defines."""
    names = {part for module in MODULES for part in module.split(".")}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.update([node.attr] if ast.unparse(node.value) == "self" else [])
    return frozenset(names)


def private_torch_names(code: str) -> set[str]:
    """The private names of torch in code: those that castwise does not define, or that are `OF_BOTH`."""
    names, own = private_names(code), own_names()
    torchs = (names.of_others - (own - OF_BOTH)) | names.imported | ((names.of_self | names.strings) - own)
    return {name for name in torchs - OF_OTHERS if not hasattr(sys, name) and not hasattr(os, name)}


def names_of_torch_private() -> set[str]:
    code = (SOURCE / "_torch_private.py").read_text()
    return private_torch_names(code) | (private_names(code).strings & OF_BOTH)


def test_private_names_of_torch_are_as_few_as_the_guide_says() -> None:
    names = names_of_torch_private()
    assert {"_version", "_pytree", "_mp_policy", "_parameters", "_dtype", "_exit_autocast"} <= names
    limit = re.search(r"Private torch names live in .*: at most (\d+),", (ROOT / "CONTRIBUTING.md").read_text())
    assert limit is not None
    assert len(names) <= int(limit[1])


# Forks for each name a process in which torch has it no longer, so that torch is imported once.
WITHOUT_NAMES = r"""
import importlib.util, json, os, re, sys, traceback, warnings
import torch, torch._dynamo

path, all_features, *names = sys.argv[1:]
source = open(path).read()

def train():
    import castwise

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    for kind in ({"foreach": True}, {"fused": True}):
        optimizer, scaler = torch.optim.AdamW(model.parameters(), **kind), castwise.GradScaler("cpu")
        for clip in (False, True):
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(2, 4)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    return [param.sum().item() for param in model.parameters()]

def features():
    import castwise

    x, model = torch.ones(2, 4), torch.nn.Linear(4, 4)

    class Region(torch.nn.Module):
        def forward(self, x):
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                return x @ x.T

    for forward in (torch.compile(Region(), backend="eager"), torch.export.export(Region(), (x,)).module()):
        torch.testing.assert_close(forward(x).float(), x @ x.T, rtol=1e-2, atol=0)
    narrow = torch.nn.Linear(4, 4)
    castwise.MasterWeights(torch.optim.SGD(narrow.parameters(), lr=1.0), narrow)
    assert narrow.weight.dtype is torch.bfloat16
    with castwise.autocast("cpu", dtype=torch.bfloat16, weight_cache=castwise.WeightCache(model)):
        model(x).sum().backward()
    castwise.trace(model, x)
    assert castwise.diagnose(model, torch.sum, x * torch.inf).phase == "input"

def train_without(name):
    renamed = re.sub(rf"(?<!\w){name}(?!\w)", name + "_of_another_release", source)
    assert (renamed != source) is (name != "no_name")
    spec = importlib.util.spec_from_loader("castwise._torch_private", loader=None)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        exec(compile(renamed, path, "exec"), vars(module))
        weights = train()
        if name in all_features.split():
            features()
    return weights, [str(one.message) for one in caught if str(one.message).startswith("torch ")]

for name in names:
    read, write = os.pipe()
    if not os.fork():
        warnings.simplefilter("ignore", UserWarning)
        try:
            result = train_without(name)
        except BaseException:
            result = traceback.format_exc()
        os.write(write, json.dumps({name: result}).encode())
        os._exit(0)
    os.close(write)
    print(os.read(read, 2**16).decode(), flush=True)
    os.wait()
"""


# What is said without a name: as soon as castwise is imported, or by the features that need it.
AS_LEAVES = "containers that are registered with torch count as one value"
SEE_CASTS = "dispatch modes see the casts of a WeightCache"
AS_NEW = "backwards are not detected, and a forward that a checkpoint recomputes counts as a new one"
WITHOUT_REGIONS = "exported programs run without the regions of castwise"
NO_OPS = "castwise.trace and castwise.diagnose see no ops"
UNDER_FUNC = "do not use a WeightCache under torch.func, which gets its copies"
OF_MODULES = {
    "_C": [UNDER_FUNC, AS_NEW, AS_NEW],
    "_python_dispatch": [NO_OPS, SEE_CASTS, SEE_CASTS],
    "_pytree": [AS_LEAVES, AS_LEAVES],
}
IS_OFF_FROM_THE_START = {
    "tree_map": AS_LEAVES,
    "tree_leaves": AS_LEAVES,
    "TorchDispatchMode": NO_OPS,
    "_disable_current_modes": SEE_CASTS,
    "is_in_torch_dispatch_mode": SEE_CASTS,
    "DisableTorchFunctionSubclass": "gradients are not watched for misuse while they are scaled",
    "_are_functorch_transforms_active": UNDER_FUNC,
    "_get_sequence_nr": AS_NEW,
    "_current_graph_task_id": AS_NEW,
    "_current_autograd_node": AS_NEW,
    "_get_current_function_mode_stack": "function modes also see castwise's own ops",
    "_version": "changes to gradients after clipping are not detected, and a WeightCache keeps no casts",
    "_BaseDataLoaderIter": "a diagnosis names the sample of a batch and not its index in the dataset",
}
IS_OFF = {
    "_enter_autocast": WITHOUT_REGIONS,
    "_exit_autocast": WITHOUT_REGIONS,
    "current_tx": "a region in compiled code is not undone if tracing stops inside it",
    "add_cleanup_hook": "a region in compiled code is not undone if tracing stops inside it",
    "PreDispatchTorchFunctionMode": WITHOUT_REGIONS,
    "ADInplaceOrView": "call WeightCache.invalidate() after collectives that write to the `.data` of weights",
    "_schema": None,  # ops are then taken to write to nothing
    "_apply": None,  # parameters are converted one by one
}


def test_without_a_private_name_plain_training_is_as_ever() -> None:
    """And features that need it say once what is off."""
    names = ["no_name", *sorted(names_of_torch_private() | IS_OFF.keys() | IS_OFF_FROM_THE_START.keys())]
    command = [sys.executable, "-c", WITHOUT_NAMES, str(SOURCE / "_torch_private.py"), " ".join(IS_OFF), *names]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = {name: of_name for line in printed.splitlines() for name, of_name in json.loads(line).items()}
    assert [*results] == names
    weights, _ = results["no_name"]
    for name, of_name in results.items():
        assert of_name[0] == weights, of_name
        said, off = [text.partition(": ")[2] for text in of_name[1]], IS_OFF | IS_OFF_FROM_THE_START
        assert said == OF_MODULES.get(name, [off[name]] if off.get(name) else []), name


def test_private_torch_names_are_reached_in_one_place() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.name != "_torch_private.py":
            assert not private_torch_names(path.read_text()), path


def test_castwise_defines_no_other_private_names_of_torchs_objects() -> None:
    layer = torch.nn.LSTM(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    objects = (layer, optimizer, scheduler, layer.weight_ih_l0, (layer.weight_ih_l0 * 2).grad_fn)
    names = {name for one in objects for name in dir(one)}
    assert set(filter(is_private, names & own_names())) == OF_BOTH & names


@pytest.mark.parametrize(
    "code",
    [
        *(
            "import torch._dynamo",
            "from torch._C import x",
            "from torch import _C",
            "torch._utils.y()",
            "grad._version",
        ),
        *("module._parameters", "getattr(x, '_orig_mod')", "names = ('forward', '_conv_forward')"),
        *("self._forward_hooks", "x = 'torch._dynamo.callback'", "ctx._dtype = 1"),
    ],
)
def test_the_test_of_private_names_can_fail(code: str) -> None:
    assert private_torch_names(code)


@pytest.mark.parametrize(
    "code",
    [
        *("torch._foreach_norm(x)", "torch.nn.utils.y()", "torch.ops.aten._to_copy", "x = 'aten._to_copy.default'"),
        *("self._scale", "self._parameters", "sys._getframe()", "x.__dict__", "x = 'an _orig_mod in a text'"),
    ],
)
def test_names_that_are_not_torchs_do_not_count(code: str) -> None:
    assert not private_torch_names(code)


def test_nothing_in_amp_falls_back_on_the_class_it_derives_from() -> None:
    for path in (SOURCE / "amp").rglob("*.py"):
        called = {
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        }
        assert "super" not in called, path


def test_torch_amp_is_used_for_isinstance_alone() -> None:
    for path in (SOURCE / "amp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            assert set(bases).isdisjoint({"torch.amp.GradScaler", "torch.autocast"}) or len(bases) == 1
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("torch.amp", "torch.cuda.amp")):
                assert ast.unparse(node) in {"torch.amp", "torch.amp.GradScaler"}, f"{path}: {ast.unparse(node)}"


def classes_of_torch_that_run(code: str) -> set[str]:
    """Which of torch's classes are called, or kept in a dict to be called; to ask `isinstance` is neither."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
        elif isinstance(node, ast.Dict):
            found |= {ast.unparse(value) for value in node.values}
        elif isinstance(node, ast.ImportFrom) and node.module in {"torch", "torch.amp"}:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found & TORCHS_CLASSES


def test_torchs_mixed_precision_runs_only_as_a_rival() -> None:
    running = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if classes_of_torch_that_run(path.read_text())
    }
    assert {path for path in running if not path.startswith(RUN_TORCHS_CLASSES)} == set()
    assert all(any(path.startswith(allowed) for path in running) for allowed in RUN_TORCHS_CLASSES)


@pytest.mark.parametrize(
    "code", ["torch.autocast('cpu')", "x = {'torch': torch.amp.GradScaler}", "from torch.amp import GradScaler"]
)
def test_the_test_of_rivals_can_fail(code: str) -> None:
    assert classes_of_torch_that_run(code)
    assert not classes_of_torch_that_run("isinstance(x, torch.autocast); castwise.autocast('cpu')")


@pytest.mark.parametrize("cls", [castwise.MixedPrecisionMistake, castwise.ScaleExhausted])
def test_a_traceback_names_an_exception_as_users_do(cls: type[BaseException]) -> None:
    assert traceback.format_exception_only(cls, cls.__new__(cls))[0].startswith(f"castwise.{cls.__name__}")
