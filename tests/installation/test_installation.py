"""castwise instead of torch's mixed precision: everywhere while it is installed, and nowhere afterwards."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import math
import pickle
import signal
import subprocess
import sys
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import sharded_grad_scaler as sharded
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import _installation as installation
from castwise._installation import account
from castwise._installation.account import Account
from castwise._installation.replacement import _NAMES
from castwise._installation.settings import Settings
from castwise._torch_private import load_compiler
from castwise.amp._observers import OBSERVERS
from castwise.monitor import Run
from castwise.monitor._run_files import read_runs, run_in

load_compiler()  # by which torch itself changes torch.manual_seed, as it does when the first optimizer is made
PLACES = [(module, name) for module, names in _NAMES.items() for name in names]


def at(package: Any, module: str, name: str) -> Any:
    return getattr(importlib.import_module(".".join(filter(None, [package.__name__, module]))), name)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Whatever a test does, torch is as it was before, to the last attribute of its modules of mixed precision."""
    modules = [importlib.import_module(".".join(filter(None, ["torch", module]))) for module in _NAMES]
    before = [dict(vars(module)) for module in modules]
    step, observers = torch.optim.lr_scheduler.LRScheduler.step, list(OBSERVERS)
    load_state_dict = torch.optim.Optimizer.load_state_dict
    yield
    castwise.uninstall()
    for module, attributes in zip(modules, before, strict=True):
        now = vars(module)
        assert [name for name, value in attributes.items() if now.get(name) is not value] == []
    assert torch.optim.lr_scheduler.LRScheduler.step is step
    assert torch.optim.Optimizer.load_state_dict is load_state_dict
    assert observers == OBSERVERS


def trained(model: nn.Module, steps: int = 3, **scaler: Any) -> list[torch.Tensor]:
    """Train with whatever torch.amp is by now, and return the weights."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = torch.amp.GradScaler("cpu", **scaler)
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(4, 8)).float().pow(2).mean()
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.mark.parametrize(("module", "name"), PLACES)
def test_torch_has_castwises_while_it_is_installed(module: str, name: str) -> None:
    theirs, ours = at(torch, module, name), at(castwise, module, name)
    with castwise.installed():
        assert at(torch, module, name) is ours
    assert at(torch, module, name) is theirs


def test_modules_that_have_imported_torchs_get_castwises_and_torchs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("library")
    library.Scaler, library.autocast = torch.cuda.amp.GradScaler, torch.autocast  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "library", library)
    before = dict(vars(library))
    with castwise.installed():
        assert library.Scaler is castwise.cuda.amp.GradScaler
        assert library.autocast is castwise.autocast
    assert vars(library) == before


def test_what_somebody_else_puts_in_place_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("library")
    library.autocast = torch.autocast  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "library", library)
    with castwise.installed():
        library.autocast = own = object()  # type: ignore[attr-defined]
    assert library.autocast is own


def test_what_was_made_of_torchs_before_is_named_once() -> None:
    class Early(torch.amp.GradScaler):
        pass

    scaler = torch.amp.GradScaler("cpu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        castwise.install()
    (text,) = [str(each.message) for each in warned if "not replaced" in str(each.message)]
    assert f"the class {Early.__module__}.test_what_was_made_of_torchs_before_is_named_once.<locals>.Early" in text
    assert "an object of torch.amp.grad_scaler.GradScaler" in text
    assert [each.filename for each in warned if "not replaced" in str(each.message)] == [__file__]
    del scaler


def test_it_is_installed_once() -> None:
    castwise.install()
    with pytest.raises(RuntimeError, match=r"castwise is already installed: call uninstall\(\) first"):
        castwise.install()
    assert castwise.uninstall() is None
    assert castwise.uninstall() is None


def test_nothing_is_recorded_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    castwise.install()
    trained(small_model())
    assert castwise.uninstall() is None
    assert list(tmp_path.iterdir()) == []


def test_signals_stay_those_of_the_program(tmp_path: Path) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with castwise.installed(tmp_path):
        trained(small_model())
        assert {number: signal.getsignal(number) for number in handlers} == handlers
        assert signal.set_wakeup_fd(-1) == -1


def test_a_report_before_the_end_does_not_wait_for_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise AssertionError("the report waits")

    so_far = Account(tmp_path, 100, 0.0)
    installation.begin(so_far, Settings(None, None, False))
    trained(small_model())
    with monkeypatch.context() as patch:
        for waiting, name in ((castwise.GradScaler, "synchronize"), (castwise.Monitor, "detach")):
            patch.setattr(waiting, name, wait)
        summary = so_far.report()
    assert summary is not None
    assert summary.report is not None
    assert summary.report.is_file()
    assert [len(run.steps) for run in summary.runs] == [3]


def test_an_error_in_the_block_undoes_it_all_the_same() -> None:
    with pytest.raises(KeyError), castwise.installed():
        raise KeyError
    assert torch.amp.GradScaler is not castwise.GradScaler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"policy": "bf16"}, "policy must be a castwise.Policy or None, got str"),
        ({"schedule": 1024.0}, "schedule must be one of castwise.schedules or None, got 1024.0"),
    ],
)
def test_nonsense_installs_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        castwise.install(**arguments)
    assert torch.amp.GradScaler is not castwise.GradScaler


def test_a_training_ends_with_the_same_bits_and_a_report(tmp_path: Path) -> None:
    expected = trained(small_model())
    with castwise.installed(tmp_path, every=2):
        got = trained(small_model())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    run = Run.read(run_in(tmp_path) / "Sequential")
    assert [step.step for step in run.steps] == [1, 2, 3]
    assert [sample.step for sample in run.samples] == [1, 2]
    assert run.samples[0].gradients.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert run.samples[1].activations.keys() == {"", "0", "1", "2"}
    assert run.ended
    assert (run_in(tmp_path) / "report.html").is_file()


def test_each_model_has_a_record_and_optimizers_of_one_model_share_it(tmp_path: Path) -> None:
    class Critic(nn.Linear):
        pass

    generator, critic = small_model(), Critic(8, 1)
    optimizers = [
        torch.optim.SGD(generator[0].parameters(), lr=0.1),
        torch.optim.AdamW(generator[2].parameters(), lr=0.1),
        torch.optim.SGD(critic.parameters(), lr=0.1),
    ]
    with castwise.installed(tmp_path):
        for _ in range(3):
            critic(generator(torch.randn(2, 8))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert sorted(file.parent.name for file in run_in(tmp_path).glob("*/monitor.jsonl.gz")) == ["Critic", "Sequential"]
    assert Run.read(run_in(tmp_path) / "Sequential").settings["optimizer"] == "SGD, AdamW"


def test_steps_of_master_weights_are_counted_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    first = castwise.MasterWeights(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    second = castwise.MasterWeights(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    with castwise.installed(tmp_path):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(2, 8)).float().mean()
            loss.backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
    (file,) = run_in(tmp_path).glob("*/monitor.jsonl.gz")
    run = Run.read(file)
    assert run.settings["optimizer"] == "MasterWeights, MasterWeights"
    assert len(run.steps) == 6  # as of two plain optimizers without a scaler


def test_models_that_the_script_lets_go_of_are_not_kept_alive(tmp_path: Path) -> None:
    with castwise.installed(tmp_path, every=2):
        for fold in range(3):
            model = small_model()
            trained(model)
            if fold == 0:
                first = weakref.ref(model)
        gc.collect()
        assert first() is None
    runs = [Run.read(file) for file in sorted(run_in(tmp_path).glob("*/monitor.jsonl.gz"))]
    assert [run.path.parent.name for run in runs] == ["Sequential", "Sequential-2", "Sequential-3"]
    assert all(run.ended and len(run.steps) == 3 for run in runs)


def test_a_second_run_gets_a_folder_of_its_own_and_is_the_latest(tmp_path: Path) -> None:
    folders = []
    for steps in (4, 2):
        with castwise.installed(tmp_path):
            trained(small_model(), steps)
        folders.append(run_in(tmp_path))
        assert (tmp_path / "latest").read_text() == f"{folders[-1].name}\n"
    assert [len(Run.read(folder / "Sequential").steps) for folder in folders] == [4, 2]


def test_regions_inside_of_compiled_code_are_castwises_in_one_graph() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    model, x = small_model(), torch.randn(2, 8)
    expected = forward(model, x)
    with castwise.installed():
        torch.compiler.reset()
        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)(model, x)
    torch.compiler.reset()
    assert compiled.dtype is torch.bfloat16
    assert torch.equal(compiled, expected)


def test_a_step_inside_of_compiled_code_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Compiled(nn.Sequential):
        pass

    model = Compiled(*small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with castwise.installed(tmp_path):
        torch.compiler.reset()
        compiled = torch.compile(step, backend="eager")
        for _ in range(4):
            compiled(torch.randn(2, 8))
    torch.compiler.reset()
    run = Run.read(run_in(tmp_path) / "Compiled")
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert "castwise" not in capfd.readouterr().err


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_computes_again_what_it_has_computed(use_reentrant: bool) -> None:
    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        model, x = small_model(), torch.randn(2, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(model, x, use_reentrant=use_reentrant)
        out.float().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient()
    with castwise.installed():
        assert torch.equal(gradient(), expected)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_policy_is_in_force_in_all_regions_under_names_that_begin_with_the_models_class() -> None:
    class Policied(nn.Sequential):
        pass

    class AlsoPolicied(nn.Linear):
        pass

    model, other, x = Policied(*small_model()), AlsoPolicied(8, 8), torch.randn(2, 8)
    rules = {"Policied.2": "float32", "AlsoPolicied": "float32"}
    with castwise.installed(policy=castwise.Policy(compute="bfloat16", modules=rules)):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                assert model[0](x).dtype is torch.bfloat16
                assert model(x).dtype is other(x).dtype is torch.float32
        with torch.autocast("cpu", enabled=False):
            assert model[0](x).dtype is torch.float32
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_models_that_are_made_after_the_first_region_have_no_rules_and_no_kept_casts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("castwise.weights._weight_cache._MIN_TRAINED", 0)
    first, x = small_model(), torch.randn(2, 8)
    policy = castwise.Policy(compute="bfloat16", modules={"type:Linear": "float32"})
    with castwise.installed(policy=policy):
        with torch.autocast("cpu"):
            assert first(x).dtype is torch.float32
        later = nn.Linear(8, 8)
        with torch.autocast("cpu"):
            assert later(x).dtype is torch.bfloat16
    del later
    with castwise.installed(weight_cache=True):
        with torch.autocast("cpu"):
            first(x)
        later = nn.Linear(8, 8)
        with torch.autocast("cpu"):
            cache = installation._INSTALLED[0][0]._settings._cache
            assert cache is not None
            before = cache.report().refreshes
            later(x)
            assert cache.report().refreshes == before > 0


def test_regions_inside_compiled_functions_have_no_policy_and_that_is_said() -> None:
    model, x = small_model(), torch.randn(2, 8)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x)  # type: ignore[no-any-return]

    with castwise.installed(policy=castwise.Policy(compute="bfloat16")):
        torch.compiler.reset()
        with pytest.warns(UserWarning, match="policy and the weight cache do not apply to regions inside compiled"):
            assert torch.compile(forward, backend="eager")().dtype is torch.float16
        torch.compiler.reset()


def test_what_is_loaded_at_the_start_the_first_optimizer_loads_and_the_report_at_the_end(tmp_path: Path) -> None:
    code = f"""
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = set(sys.modules)
import castwise
castwise.install({str(tmp_path)!r})
others = {{name for name in set(sys.modules) - before if name.partition(".")[0] != "castwise"}}
print(*others - {{"torch.distributed.fsdp.sharded_grad_scaler"}})  # of which the scaler is replaced
model(torch.ones(2)).sum().backward()
optimizer.step()
print(*[name for name in ("jinja2", "plotly") if name in sys.modules])
castwise.uninstall()
print(*[name for name in ("jinja2", "plotly") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["", "", "jinja2 plotly"]


def test_a_policys_output_is_said_to_have_no_effect_on_several_models() -> None:
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    castwise.install(policy=castwise.Policy(compute="bfloat16", output="float32"))
    try:
        with (
            pytest.warns(UserWarning, match="output has no effect, because there are several models"),
            torch.autocast("cpu"),
        ):
            models[0](torch.ones(1, 2))
    finally:
        castwise.uninstall()


def test_a_warning_of_a_learning_rate_schedule_is_given_at_the_line_that_calls_it() -> None:
    with castwise.installed():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with pytest.warns(UserWarning, match="lr_scheduler.step\\(\\)` before `optimizer.step") as caught:
            scheduler.step()
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": castwise.schedules.Static(8.0)},
        {"policy": castwise.Policy(compute="bfloat16")},
        {"weight_cache": True},
    ],
    ids=["plain", "schedule", "policy", "cache"],
)
def test_classes_are_derived_from_each_other_as_torchs_are_and_their_objects_can_be_copied(
    settings: dict[str, Any],
) -> None:
    def classes() -> list[Any]:
        scalers = [torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler, sharded.ShardedGradScaler]
        return [*scalers, torch.autocast, torch.cuda.amp.autocast, torch.cpu.amp.autocast]

    def order(of: list[Any]) -> list[list[bool]]:
        return [[issubclass(one, other) for other in of] for one in of]

    torchs = classes()
    with castwise.installed(**settings):
        ours = classes()
        assert order(ours) == order(torchs)
        for cls in ours:
            made = cls("cpu") if "device" in inspect.signature(cls).parameters or cls is torch.autocast else cls()
            for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
                assert type(copied) is cls


def test_a_schedule_moves_all_scalers_whatever_numbers_they_are_given() -> None:
    with castwise.installed(schedule=castwise.schedules.Static(8.0)):
        made = [torch.amp.GradScaler("cpu", init_scale=4.0), torch.GradScaler("cpu", 2.0, growth_interval=7)]
        disabled = torch.amp.GradScaler("cpu", enabled=False)
        pickled = pickle.dumps(made[0])
    copied = pickle.loads(pickled)
    assert [scaler.get_scale() for scaler in made] == [8.0, 8.0]
    assert all(scaler.schedule == castwise.schedules.Static(8.0) for scaler in [*made, copied])
    assert type(copied) is castwise.GradScaler
    assert not disabled.is_enabled()


def test_a_weight_cache_serves_all_regions_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "castwise.weights._weight_cache._MIN_TRAINED", 0
    )  # else small ones are left to autocast in training
    expected = trained(small_model())
    with castwise.installed(weight_cache=True):
        got = trained(small_model())
        from castwise._installation import _INSTALLED

        cache = _INSTALLED[0][0]._settings._cache
        assert cache is not None
        assert cache.report().refreshes > 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def trained_on(batches: list[torch.Tensor], model: nn.Module) -> None:
    """Train as a script does that knows nothing of castwise; batches that are not finite are skipped."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


GOOD, BAD = torch.ones(4, 8), torch.ones(4, 8).index_fill(0, torch.tensor([2]), math.nan)


def test_skipped_steps_are_diagnosed_from_the_first_one_on(tmp_path: Path) -> None:
    with castwise.installed(tmp_path, on_nonfinite="diagnose"):
        trained_on([BAD, GOOD, BAD, BAD, BAD, BAD], small_model())
    run = Run.read(run_in(tmp_path) / "Sequential")
    assert [diagnosis.step for diagnosis in run.diagnoses] == [1, 3, 4, 5, 6]
    assert {diagnosis.phase for diagnosis in run.diagnoses} == {"input"}


@pytest.mark.parametrize(("most", "diagnosed"), [(0, []), (3, [1, 3, 4])])
def test_no_more_skips_are_diagnosed_than_are_asked_for(most: int, diagnosed: list[int], tmp_path: Path) -> None:
    installation.begin(Account(tmp_path, 100, most), Settings(None, None, False))
    trained_on([BAD, GOOD, BAD, BAD, BAD, BAD], small_model())
    castwise.uninstall()
    assert [diagnosis.step for diagnosis in Run.read(run_in(tmp_path) / "Sequential").diagnoses] == diagnosed


def test_the_search_for_a_scale_leaves_diagnoses_to_a_later_nan(tmp_path: Path) -> None:
    installation.begin(Account(tmp_path, 100, 2), Settings(None, None, False))
    model = small_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    for batch in [GOOD] * 12 + [BAD]:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    castwise.uninstall()
    diagnoses = Run.read(run_in(tmp_path) / "Sequential").diagnoses
    assert [diagnosis.cause for diagnosis in diagnoses] == ["overflow", "overflow", "non-finite loss"]
    assert diagnoses[-1].phase == "input"


def test_of_a_gans_two_losses_the_replay_tells_which_was_not_finite(tmp_path: Path) -> None:
    class Critic(nn.Sequential):
        pass

    generator, critic = small_model(), Critic(nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    with castwise.installed(tmp_path, on_nonfinite="diagnose"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for real in (GOOD, GOOD, BAD, GOOD):
            with torch.autocast("cpu", dtype=torch.float16):
                fake = generator(torch.ones(4, 8))
                of_generator, of_critic = fake.float().mean(), critic(real).float().mean()
            for optimizer, loss in zip(optimizers, (of_generator, of_critic), strict=True):
                optimizer.zero_grad()
                scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    run, of_generator_run = Run.read(run_in(tmp_path) / "Critic"), Run.read(run_in(tmp_path) / "Sequential")
    assert [step.step for step in run.steps] == [step.step for step in of_generator_run.steps] == [1, 2, 3, 4]
    assert [step.cause for step in run.steps] == [None, None, "non-finite loss", None]
    assert [diagnosis.phase for diagnosis in run.diagnoses] == ["input"]
    assert not any(step.skipped for step in of_generator_run.steps)
    assert all(step.loss is None or math.isfinite(step.loss) for step in of_generator_run.steps)


def test_a_batch_that_is_too_large_is_not_kept_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert account.MOST_BYTES == 2**26
    monkeypatch.setattr(account, "MOST_BYTES", 4 * 8 * 4 - 1)
    with (
        castwise.installed(tmp_path, on_nonfinite="diagnose"),
        pytest.warns(UserWarning, match="takes more than .* MiB, so skipped steps are not diagnosed any more"),
    ):
        trained_on([BAD, BAD], small_model())
    run = Run.read(run_in(tmp_path) / "Sequential")
    assert [step.skipped for step in run.steps] == [True, True]
    # The graph of the loss is still walked.
    assert {diagnosis.phase for diagnosis in run.diagnoses} == {"loss"}
    assert run.diagnoses[0].advice.startswith("not all inputs of this op are known")


def test_where_gradients_of_outputs_are_too_large_faults_of_the_forward_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "MOST_BYTES", 4 * 8 * 4)
    with castwise.installed(tmp_path, on_nonfinite="diagnose"):
        trained_on([BAD], small_model())
    assert [diagnosis.step for diagnosis in Run.read(run_in(tmp_path) / "Sequential").diagnoses] == [1]


def test_buffers_that_a_forward_has_spoilt_are_replayed_as_they_were(tmp_path: Path) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("peak", torch.ones(()))
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.peak = torch.maximum(self.peak, x.detach().abs().amax())
            self.peak.mul_(1.0)
            return self.layer(x / self.peak)  # type: ignore[no-any-return]

    with castwise.installed(tmp_path, on_nonfinite="diagnose"):
        trained_on([BAD], Running())
    (diagnosis,) = Run.read(run_in(tmp_path) / "Running").diagnoses
    assert diagnosis.phase == "input"


def test_diagnoses_need_a_folder() -> None:
    with pytest.raises(
        ValueError, match=r'on_nonfinite="diagnose" requires a folder for its records: pass out=\.\.\. too'
    ):
        castwise.install(on_nonfinite="diagnose")
    with pytest.raises(ValueError, match='on_nonfinite must be "diagnose" or None, got 3'):
        castwise.install("x", on_nonfinite=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../../x", "Gen[a/b]", "n" * 300, "", "CON"])
def test_a_class_of_any_name_is_recorded_inside_of_the_folder(name: str, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    with castwise.installed(out):
        trained(type(name, (nn.Sequential,), {})(nn.Linear(8, 8)), 2)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} <= set(out.rglob("*"))
    (run,) = read_runs([out])
    assert run.settings["model"] == name
    assert len(run.steps) == 2
    assert (run_in(out) / "report.html").is_file()


def test_the_report_that_is_returned_is_in_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    castwise.install("runs")
    trained(small_model())
    monkeypatch.chdir("/")
    page = castwise.uninstall()
    assert page is not None
    assert page == run_in(tmp_path / "runs") / "report.html"


def test_a_monitor_that_records_into_the_same_folder_is_left_alone(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with castwise.Monitor(model, optimizer, sinks=[tmp_path / "Mine"]):
        model(GOOD).mean().backward()
        optimizer.step()
        with castwise.installed(tmp_path):
            trained(small_model())
        optimizer.step()
    assert len(Run.read(tmp_path / "Mine").steps) == 2


def test_ranks_that_start_together_find_nothing_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object, *_: object, **__: object) -> None:
        raise FileNotFoundError(f"another rank has just removed {path}")

    for name in ("Sequential", "Sequential-process7", "Sequential-rank1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "monitor.jsonl.gz").write_text("{}\n")
    monkeypatch.setattr(Path, "unlink", fail)
    with castwise.installed(tmp_path):
        trained(small_model())
    assert len(Run.read(run_in(tmp_path) / "Sequential").steps) == 3
    assert {file.read_text() for file in tmp_path.glob("Seq*/monitor.jsonl.gz")} == {"{}\n"}


@pytest.mark.parametrize("settings", [{}, {"schedule": castwise.schedules.Static(4.0)}], ids=["plain", "with settings"])
def test_what_torchs_classes_were_pickled_as_goes_on(settings: dict[str, Any]) -> None:
    """A script may have saved them whole, in a checkpoint from before castwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0), torch.cpu.amp.GradScaler(2.0, growth_interval=7)]
    scalers[0].scale(torch.ones(()))
    scalers[0].note = "of the script"  # type: ignore[attr-defined]
    scalers.append(torch.amp.GradScaler("cpu", enabled=False))
    saved = pickle.dumps((scalers, torch.autocast("cpu", torch.float16, cache_enabled=False)))
    scalers.clear()
    with castwise.installed(**settings):
        (used, deprecated, disabled), region = pickle.loads(saved)
        assert isinstance(used, castwise.GradScaler)
        assert (used.get_scale(), used.note, disabled.is_enabled()) == (8.0, "of the script", False)
        assert (deprecated.get_scale(), deprecated.get_growth_interval()) == (2.0, 7)
        param = nn.Parameter(torch.ones(2))
        used.scale(param.sum()).backward()
        used.step(torch.optim.SGD([param], lr=0.5))
        used.update()
        assert param.tolist() == [0.5, 0.5]
        with region:
            assert isinstance(region, castwise.autocast)
            assert (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()) == (torch.float16, False)
