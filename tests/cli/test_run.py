"""`castwise run` on training scripts that were written for torch.amp; their authors did not know castwise."""

from __future__ import annotations

import contextlib
import html
import io
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.forked import Python, on_ranks
from tests.monitor.recorded import records_in, write_lines
from tests.warm_python import clients, executable
from typer.testing import CliRunner

import castwise
from castwise import Policy, schedules
from castwise._cli import app
from castwise._cli.policy_options import read_schedule
from castwise._cli.program import Program, cannot_import_torch
from castwise.monitor import Run
from castwise.monitor._run_files import run_in

SCRIPTS = Path(__file__).parent / "scripts"
RUN = [sys.executable, "-m", "castwise", "run"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": str(torch.get_num_threads()),
    "PYTHONDONTWRITEBYTECODE": "1",
    "COLUMNS": "2000",
}

IDIOMS = {
    "accumulation": ["accumulate.py"],
    "a-fused-and-a-plain-optimizer": ["two_optimizers.py"],
    "gan": ["gan.py"],
    "lbfgs-without-scaler": ["lbfgs.py"],
    "evaluation-of-an-encoder": ["encoder.py"],
    "gradient-penalty": ["gradient_penalty.py"],
    "custom-functions": ["custom_function.py"],
    "threads": ["threads.py"],
    "compiled": ["compiled.py"],
    "scripted": ["scripted.py"],
    "subclass-of-the-scaler": ["subclass.py"],
    "package": ["-m", "trainpkg"],
}


def started(command: list[str], folder: Path = SCRIPTS) -> subprocess.Popen[str]:
    def hear_ctrl_c() -> None:  # which a process that a shell has started in the background does not
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_ctrl_c
    )


def call(command: list[str], folder: Path = SCRIPTS) -> subprocess.CompletedProcess[str]:
    process = started(command, folder)
    output, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def forked(*arguments: object, folder: Path = SCRIPTS) -> subprocess.CompletedProcess[str]:
    """`castwise run` without the time to import torch, where it is not about how a process begins or ends."""
    process = Python(["-m", "castwise", "run", *arguments], folder, COLUMNS=2000)  # no line is wrapped
    output, errors = process.communicate()
    return subprocess.CompletedProcess(["castwise"], process.returncode, output, errors)


def printed_by(script: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a script prints with torch.amp; in this process, as to import torch anew takes longer than most of them."""
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.syspath_prepend(SCRIPTS)
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if script.endswith(".py"):
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__")
    return printed.getvalue()


def records(out: Path) -> list[dict[str, object]]:
    files = sorted(run_in(out).glob("*/monitor.jsonl.gz"))
    return [record for file in files for record in records_in(file)]


def causes_in(folder: Path) -> list[object]:
    return [step.cause for step in Run.read(folder).steps if step.skipped]


@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_script_prints_what_it_prints_without_castwise_and_no_mistakes(
    idiom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = IDIOMS[idiom]
    plain = printed_by(script[-1], monkeypatch)
    run = forked("--out", tmp_path, "--every", "5", *script)
    assert run.returncode == 0, run.stderr
    assert run.stdout == plain
    assert "weights " in run.stdout
    assert f"castwise: report: {run_in(tmp_path) / 'report.html'}" in run.stderr
    assert (run_in(tmp_path) / "report.html").read_text().endswith("</html>")
    kinds = [record["kind"] for record in records(tmp_path)]
    assert kinds.count("step") >= 10
    assert kinds.count("sample") >= 2
    assert "mistake" not in kinds


def test_a_resumed_script_goes_on_as_it_does_without(tmp_path: Path) -> None:
    """The checkpoint of the first part is castwise's, the second half is torch's, and the other way round."""
    script = str(SCRIPTS / "resume.py")
    whole, _ = Python([script, "--out", "whole"], tmp_path).communicate()
    assert forked(script, "--out", "a", "--stop-after", "27", folder=tmp_path).returncode == 0
    second = forked("--out", "second", script, "--out", "a", "--resume", folder=tmp_path)
    assert second.stdout.splitlines()[-1] == whole.splitlines()[-1]
    assert (run_in(tmp_path / "castwise-run") / "report.html").is_file()
    assert not [record for record in records(tmp_path / "second") if record["kind"] == "mistake"]


def test_every_rank_of_torchrun_is_recorded(tmp_path: Path) -> None:
    plain = on_ranks(2, ["ddp.py"], SCRIPTS)
    _, python = clients()  # the launcher has torch already; its ranks are real Pythons
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = call([*launcher, "-m", "castwise", "run", "--out", str(tmp_path), "--every", "5", "ddp.py"])
    assert run.returncode == 0, run.stderr
    assert run.stdout == "".join(plain)
    folders = sorted(file.parent.name for file in run_in(tmp_path).glob("*/monitor.jsonl.gz"))
    assert len(folders) == 2
    assert folders[1] == folders[0] + "-rank1"
    assert (run_in(tmp_path) / "report.html").is_file()
    assert run.stderr.count("castwise: report: ") == 1


FAULTS_OF_RANK_1 = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel


def train(model, scaler, nan=0, overflow=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 7):
        batch, factor = torch.ones(2, 4), 1.0
        if dist.get_rank() == 1:
            batch[1, 2] = torch.nan if step == nan else 1.0
            factor = 1e37 if step == overflow else 1.0
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


dist.init_process_group("gloo")
torch.manual_seed(0)
replica = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
train(replica, torch.amp.GradScaler("cpu", init_scale=2.0**8), nan=4)
train(torch.nn.Linear(4, 1), ShardedGradScaler("cpu", init_scale=2.0**8), overflow=3)
dist.barrier()
dist.destroy_process_group()
"""


def test_what_went_wrong_on_rank_1_is_not_taken_for_an_overflow_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAULTS_OF_RANK_1)
    on_ranks(2, ["-m", "castwise", "run", "--out", tmp_path / "out", "train.py"], tmp_path)
    as_ranks_know = {file.name: causes_in(file) for file in run_in(tmp_path / "out").iterdir() if file.is_dir()}
    assert as_ranks_know == {
        "Sequential": ["overflow"],
        "Sequential-rank1": ["non-finite loss"],
        "Linear": ["another rank"],
        "Linear-rank1": ["overflow"],
    }
    page = (run_in(tmp_path / "out") / "report.html").read_text()
    text = CliRunner().invoke(app, ["report", "--text", str(tmp_path / "out")], env={"COLUMNS": "500"}).stdout
    for shown in (page, text):
        assert (
            "The loss was inf or NaN on rank 1 at 1 step, first at step 4: the cause is the forward or the data"
            in shown
        )
        assert "Input 0 is nan at (1, 2)." in shown
        assert "Step 4 on rank 1" in shown
        assert "1 step skipped for overflow on rank 1" in shown
        assert "1 step skipped for overflow:" not in shown
        assert not re.search("-rank1(?!/capsule)", shown)  # one section for both ranks


ZEROS_ON_RANK_1 = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

class Gate(torch.nn.Module):
    def forward(self, x):
        return x / x.mean()

inner = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), Gate(), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 7):
    x = torch.full((4, 8), 0.0 if (rank, step) == (1, 4) else 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(inner[0].weight.isfinite().all().item(), flush=True)
dist.destroy_process_group()
"""


ZERO_SAMPLE = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden / hidden.norm(dim=-1, keepdim=True))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = WRAPPED(Net())
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(48, 8)
inputs[37] *= dist.get_rank() == 0
for (x,) in DataLoader(TensorDataset(inputs), batch_size=4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("wrapped", "guard"),
    [("torch.nn.parallel.DistributedDataParallel", ""), ("fully_shard", ""), ("fully_shard", "--guard")],
)
def test_the_sample_is_named_under_ddp_and_fsdp2(wrapped: str, guard: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ZERO_SAMPLE.replace("WRAPPED", wrapped))
    on_ranks(2, ["-m", "castwise", "run", "--out", tmp_path / "out", *filter(None, [guard]), "train.py"], tmp_path)
    printed = CliRunner().invoke(app, ["report", "--text", str(tmp_path / "out")]).stdout
    text = " ".join(printed.split())
    assert "Step 10 on rank 1: In the forward, aten.div gives nan, at " in text
    assert "ample 1 of the batch, dataset[37]" in text
    assert "ried on the batch of step 10: finite without sample 1" in text
    assert ("lost from step 10 on" in text) == (not guard)
    if wrapped == "fully_shard" and not guard:
        assert "on all ranks: castwise run --guard, or in code castwise.ShardedGradScaler(" in text


@pytest.mark.parametrize("guard", [False, True])
def test_without_a_scaler_the_rank_at_fault_is_named_and_ranks_skip_the_same_step(guard: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ZEROS_ON_RANK_1)
    options = ["--guard"] if guard else []
    on_ranks(2, ["-m", "castwise", "run", "--out", tmp_path / "out", *options, "train.py"], tmp_path)
    text = CliRunner().invoke(app, ["report", "--text", str(tmp_path / "out")], env={"COLUMNS": "500"}).stdout
    assert "the loss was inf or NaN on rank 1" in text.replace("The loss", "the loss")
    assert "Step 4 on rank 1" in text
    assert "In the forward, aten.div in module 1 gives nan" in text
    folders = [folder for folder in run_in(tmp_path / "out").iterdir() if folder.is_dir()]
    skipped = [[step.step for step in Run.read(folder).steps if step.skipped] for folder in folders]
    assert skipped == [[4] if guard else []] * 2


def test_of_a_fault_of_one_rank_the_others_do_not_speak_while_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ZEROS_ON_RANK_1.replace("(1, 4)", "(0, 4)"))
    command = ["-m", "castwise", "run", "--out", tmp_path / "out", "train.py"]
    first, other = on_ranks(2, command, tmp_path, together=True)
    assert "castwise: step 4: In the forward, aten.div in module 1 gives nan, at " in first
    assert other == "False\n"


TRAINING = """import torch
from torch.amp import GradScaler, autocast

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu")
for step in range(6):
    with autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(2, 4)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print("trained", type(scaler).__module__.split(".")[0], flush=True)
"""


ENDINGS = {
    "exception": "def fail():\n    raise ValueError('of the script')\n\nfail()\n",
    "exit-3": "sys.exit(3)\n",
    "os-exit": "os._exit(5)\n",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)\n",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n",
    "own-hook": "sys.excepthook = lambda *error: print('hook', error[1])\nraise KeyError('x')\n",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_ends_badly_ends_as_without_and_has_a_report(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal, sys, time\n" + "\n" * TRAINING.count("\n") + ENDINGS[ending])
    plain = call([sys.executable, str(script)])  # ends in the same line without having to wait for torch
    script.write_text("import os, signal, sys, time\n" + TRAINING + ENDINGS[ending])
    out = tmp_path / "out"
    is_without_python = ending in ("exit-3", "os-exit", "killed")  # which prints nothing then
    python = executable() if ending == "own-hook" else sys.executable  # a real one for those whose traceback it prints
    command = [python, *RUN[1:], "--out", str(out), str(script)]
    run = forked("--out", out, script) if is_without_python else call(command)
    assert run.returncode == plain.returncode != 0
    assert run.stdout == "trained castwise\n" + plain.stdout
    theirs = plain.stderr[plain.stderr.find("Traceback") :] if "Traceback" in plain.stderr else plain.stderr.strip()
    assert theirs in run.stderr
    assert run.stderr.count("Traceback") == plain.stderr.count("Traceback")
    assert "castwise/cli" not in run.stderr
    if ending in ("os-exit", "killed"):
        assert not (run_in(out) / "report.html").exists()
        assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert (run_in(out) / "report.html").is_file()
    assert [record["step"] for record in records(out) if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ending", ["exception", "exit-3", "interrupted"])
def test_a_script_without_torch_runs_without_it_and_ends_as_it_does(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "line.py"
    end = {**ENDINGS, "interrupted": "raise KeyboardInterrupt"}[ending]
    script.write_text(f"import sys\nprint(sys.argv[1:])\n{end}")
    plain = call([sys.executable, str(script), "--lr", "3"])
    run = call([sys.executable, "-X", "importtime", *RUN[1:], str(script), "--lr", "3"])
    assert (run.returncode, run.stdout) == (plain.returncode, plain.stdout)
    assert not re.search(r"\| +torch$", run.stderr, re.M)
    said = re.sub(r"^import time:.*\n", "", run.stderr, flags=re.M)
    assert said.replace("castwise: the script does not import torch, so nothing was recorded\n", "") == plain.stderr
    assert said != plain.stderr


@pytest.mark.parametrize(
    ("source", "cannot"),
    [
        ("print('hi')", True),
        ("import json, re\nfrom pathlib import Path\nre.compile(json.dumps(Path.cwd().name))", True),
        ("import csv, os, shutil\nos.listdir()", True),
        ("import os\nos.fork()", False),
        ("from os import fork as f\nf()", False),
        ("from sys import modules as m\nm['importlib']", False),
        ("import subprocess", False),
        ("from . import model", False),
        ("def f():\n    import torch", False),
        ("__import__('torch')", False),
        ("import sys\nsys.modules['builtins']", False),
        ("exec(input())", False),
        ("import random", False),  # of the folder
    ],
)
def test_a_script_that_could_import_torch_is_run_with_it(source: str, cannot: bool, tmp_path: Path) -> None:
    (tmp_path / "random.py").touch()
    assert cannot_import_torch(source.encode(), tmp_path) is cannot


def test_a_script_that_cannot_be_looked_into_is_run_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import math\n")
    program = Program(str(tmp_path / "train.py"), [], is_module=False)
    assert program.cannot_import_torch()
    for error in (PermissionError(), RecursionError()):
        monkeypatch.setattr(Path, "iterdir", raising(error))
        assert not program.cannot_import_torch()


def raising(error: Exception) -> Callable[[object], None]:
    def fail(_: object) -> None:
        raise error

    return fail


def test_mistakes_are_reported_in_the_terminal_and_in_the_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    wrong = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    source = TRAINING.replace("    scaler.step", f"    {wrong}\n    scaler.step")
    last = "the last line of the script"
    script.write_text(
        f"import sys, warnings\nwarnings.filterwarnings('ignore')\n{source}print({last!r}, file=sys.stderr)\n"
    )
    line = script.read_text().splitlines().index(f"    {wrong}") + 1
    run = forked("--out", tmp_path / "out", script)
    warning = f"castwise: {script}:{line}: gradients are clipped here while they are still multiplied"
    assert run.stderr.count(warning) == 1
    during, _, after = run.stderr.partition(f"{last}\n")
    assert warning in during
    counts, mistake, *_, edits, report = re.findall("^castwise: .*", after, re.MULTILINE)
    assert "; skipped: " in counts
    assert mistake.startswith(f"castwise: mistake: {script}:{line}: ")
    assert edits == f"castwise: castwise fix {tmp_path / 'out'} prints 1 edit of the script for this (untried):"
    assert f"{edits}\n              + scaler.unscale_(optimizer)\n" in after
    assert report == f"castwise: report: {run_in(tmp_path / 'out') / 'report.html'}"
    assert f"correct: scaler.unscale_(optimizer)\n             {wrong}" in run.stderr
    page = (run_in(tmp_path / "out") / "report.html").read_text()
    assert f"{script}:{line}" in page
    assert page.count("Mistakes in the script") == 1
    text = CliRunner().invoke(app, ["report", "--text", str(tmp_path / "out")]).stdout
    assert "mistake: " in text
    assert "scaler.unscale_(optimizer)" in text


def test_records_of_an_earlier_run_are_not_taken_for_those_of_a_script_that_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "Linear").mkdir()
    write_lines(tmp_path / "Linear" / "monitor.jsonl.gz", '{"kind": "end"}')
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    run = forked("--out", tmp_path, script)
    assert run.stderr == "castwise: no optimizer of a module has stepped, so nothing was recorded\n"


BY_HAND = """
import torch, warnings
warnings.simplefilter("ignore")
model, scaler = torch.nn.Linear(4, 1), torch.amp.GradScaler("cpu")
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(2, 4)).float().mean()
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.data -= 0.1 * p.grad / scaler.get_scale()
with torch.autocast("cpu", dtype=torch.bfloat16):
    model(torch.ones(2, 4))
"""
HOGWILD = """
import torch, torch.multiprocessing as mp

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    print(torch.autocast.__module__.partition(".")[0] + "\\n", end="", flush=True)  # one write, of two processes

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1).share_memory()
    workers = [mp.get_context("spawn").Process(target=train, args=(model,)) for _ in range(1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(sum(worker.exitcode for worker in workers))
"""


@pytest.mark.parametrize(
    ("source", "seen", "printed"),
    [
        (BY_HAND, "3 autocast regions in float16, 3 scaled losses, 1 autocast region in bfloat16", ""),
        (HOGWILD, "1 child process", "torch\n0\n"),  # a process that is spawned has torch's classes
    ],
    ids=["weights updated by hand", "hogwild"],
)
def test_a_run_without_a_modules_optimizer_says_what_was_seen(
    source: str, seen: str, printed: str, tmp_path: Path, warm_python: None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    run = call([sys.executable, *RUN[1:], "--out", str(tmp_path / "out"), str(script)], tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed
    assert run.stderr.splitlines()[-1].startswith(
        f"castwise: no optimizer of a module has stepped in this process, which saw {seen}"
    )


def test_workers_that_were_forked_have_records_of_their_own(tmp_path: Path, warm_python: None) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOGWILD.replace('"spawn"', '"fork"').replace("range(1)", "range(2)"))
    run = call([sys.executable, *RUN[1:], "--out", str(tmp_path / "out"), str(script)], tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "castwise\ncastwise\n0\n"
    assert run.stderr.rstrip().endswith(f"left records: run castwise report {run_in(tmp_path / 'out')}")
    files = [*run_in(tmp_path / "out").glob("Linear-process*/monitor.jsonl.gz")]
    assert len(files) == 2
    assert all(records_in(file)[0]["kind"] == "run" for file in files)


def test_a_package_is_not_imported_before_castwise_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_script").mkdir()
    (tmp_path / "of_a_script" / "__init__.py").touch()
    (tmp_path / "of_a_script" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    Program("of_a_script.train", [], is_module=True)
    assert "of_a_script" not in sys.modules


def test_where_warnings_are_errors_the_script_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    wrong = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    script.write_text(TRAINING.replace("    scaler.step", f"    {wrong}\n    scaler.step"))
    command = [sys.executable, "-W", "error", "-m", "castwise", "run", "--out", str(tmp_path / "out"), str(script)]
    run = call(command)
    assert run.returncode == 0, run.stderr
    assert "gradients are clipped here" in run.stderr


def test_settings_reach_the_script(tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"compute": "bfloat16"}))
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        + TRAINING.replace("model(torch.ones(2, 4)).float()", "(output := model(torch.ones(2, 4))).float()")
        + "print(output.dtype, scaler.schedule.init_scale, sys.argv[1:], __name__, __file__ == sys.argv[0])\n"
    )
    settings = ["--policy", str(policy), "--schedule", "Headroom(init_scale=8.0)", "--weight-cache", "--every", "7"]
    run = forked("--out", tmp_path / "out", *settings, script, "--lr", "1", "-m", "--out", "x")
    assert run.returncode == 0, run.stderr
    printed = run.stdout.splitlines()[-1]
    assert printed == "torch.bfloat16 8.0 ['--lr', '1', '-m', '--out', 'x'] __main__ True"
    (begin,) = (record for record in records(tmp_path / "out") if record["kind"] == "run")
    assert begin["settings"].items() >= {"every": 7}.items()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spelled", "schedule"),
    [
        ("Static(2.0**10)", schedules.Static(1024.0)),
        ("Dynamic(init_scale=2.0**-2, growth_interval=2**(3**2))", schedules.Dynamic(0.25, growth_interval=512)),
    ],
)
def test_numbers_of_a_schedule_may_be_powers(spelled: str, schedule: schedules.Schedule) -> None:
    assert read_schedule(spelled) == schedule


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["python", "-u", "train.py", "--lr", "3"],
            "leave out python, because castwise runs the script itself: castwise run train.py --lr 3",
        ),
        (
            [sys.executable, "train.py"],
            f"leave out {sys.executable}, because castwise runs the script itself: castwise run train.py",
        ),
        (
            ["python3.11", "train.py"],
            "leave out python3.11, because castwise runs the script itself: castwise run train.py",
        ),
        (
            ["python", "-X", "dev", "-Werror", "train.py", "-W", "x"],
            "itself: castwise run train.py -W x; with its options: python -X dev -Werror -m castwise run train.py",
        ),
        (
            ["python", "-W", "error", "-m", "train"],
            "itself: castwise run -m train; with its options: python -W error -m c",
        ),
        (
            ["python", "-u", "-c", "print(1)"],
            "castwise runs scripts and modules: save the code of python -c as a script",
        ),
        (["-c", "print(1)"], "castwise runs scripts and modules: save the code of -c as a script"),
        (["-u", "train.py"], "-u is an option of Python's: python -u -m castwise run SCRIPT"),
        (["-W", "error", "train.py"], "-W is an option of Python's: python -W ... -m castwise run SCRIPT"),
        (
            ["accelerate", "launch", "--num_processes", "2", "train.py", "--lr", "3"],
            "castwise in each process: accelerate launch --num_processes 2 -m castwise run train.py --lr 3\n",
        ),
        (["bin/torchrun", "--module", "a.train"], "process: bin/torchrun -m castwise run -m a.train\n"),
        (["accelerate"], "process: accelerate launch [options of accelerate] -m castwise run SCRIPT\n"),
        (["deepspeed", "train.py"], "process: deepspeed --module castwise run train.py\n"),
        (
            ["srun", "-n", "2", "/bin/python3", "train.py", "--set={}"],
            "process: srun -n 2 python -m castwise run train.py '--set={}'\n",
        ),
        (
            ["-m", "torch.distributed.run", "--nnodes=1", "train.py"],
            "process: python -m torch.distributed.run --nnodes=1 -m castwise run train.py\n",
        ),
        (["missing.py"], "cannot read missing.py: No such file or directory; give the path of a script, or -m"),
        (
            ["--lr", "3", "broken.py"],
            "there is no option --lr; put options of the script after it, as in `castwise run ",
        ),
        (["--lr=3", "--out", "x", "broken.py"], "there is no option --lr; put options of the script after it"),
        (["--polcy", "fp16", "broken.py"], "there is no option --polcy; did you mean 'policy'?; put options of the"),
        (["n" * 300], "n: File name too long"),
        (["--out", "n" * 300, "broken.py"], "n: File name too long"),
        (["-m", "missing.module"], "there is no module 'missing': check its name"),
        (
            ["--on-nonfinite", "z", "broken.py"],
            ": --on-nonfinite must be one of 'first', 'diagnose', 'nothing', got 'z'",
        ),
        (["--fail-on", "z", "broken.py"], ": --fail-on must be one of 'mistake', 'warning', 'critical', got 'z'"),
        (["broken.py"], "broken.py is not a Python script: "),
        (["--schedule", "Dinamic", "fine.py"], "--schedule must be one of 'Dynamic', "),
        (["--schedule", "Dynamic(init_scale=-1.0)", "fine.py"], "init_scale must be "),
        (["--schedule", "Static(9**9**9**9)", "fine.py"], "base and exponent of a power must be <= 1024"),
        (["--schedule", "Static(1024.0**1024)", "fine.py"], "finite real number, got 1024.0 ** 1024"),
        (["--schedule", "Static(0.0**-1)", "fine.py"], "finite real number, got 0.0 ** "),
        (["--schedule", "Static((-2)**0.5)", "fine.py"], "finite real number, got (-2) ** 0.5"),
        (["--schedule", "Static(2**'a')", "fine.py"], "base and exponent of a power must be numbers, got 2 ** 'a'"),
        (["--schedule", "Static(2.0**abs(3))", "fine.py"], "malformed node or string"),
        (["--out", "broken.py", "broken.py"], "--out must be a folder, but broken.py is a file"),
        (["--policy", "castwise.Policy()", "fine.py"], "Policy(...).to_file('policy.toml') writes such a file"),
        (
            ["--policy", "missing.toml", "fine.py"],
            "cannot read missing.toml: No such file or directory; check the path, or use one of 'bf16', ",
        ),
    ],
)
def test_what_cannot_be_run_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "fine.py").touch()
    (tmp_path / "broken.py").write_text("def")
    run = CliRunner().invoke(app, ["run", *arguments])
    assert run.exit_code == 2
    assert run.stderr.startswith("castwise run: ")
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "castwise-run").exists()


def losses(run: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    first, last = (float(line.removeprefix("loss ")) for line in run.stdout.splitlines() if line.startswith("loss "))
    return first, last


def finding(run: subprocess.CompletedProcess[str], out: Path) -> str:
    """The first finding on the terminal, which the report has as well."""
    (found,) = re.findall(r"^castwise: (?:critical|warning): (.*\n(?: .*\n)*)", run.stderr, re.MULTILINE)
    sentence = " ".join(found.split())
    page = html.unescape(re.sub(r"<[^>]*>", "", (run_in(out) / "report.html").read_text()))
    assert sentence.partition(" 2^")[0][:60] in page  # where it is set as a power
    return sentence


def test_a_module_that_overflows_is_named_and_the_policy_that_is_printed_helps(tmp_path: Path) -> None:
    fault, modules = ["broken.py", "--logits", "400"], dict[str, str]()
    out = tmp_path
    run = forked("--out", out, *fault)
    assert math.isnan(losses(run)[1])
    for _ in range(2):  # what overflows in one block hides the next
        said = finding(run, out)
        assert said.startswith("In the forward, aten.bmm in module blocks.")
        assert "broken.py:25" in said
        printed = re.search(r"castwise\.Policy\(.*?\}\)", said)
        assert printed is not None
        policy: Policy = eval(printed[0], {"castwise": castwise})
        modules |= policy.modules
        Policy(policy.compute, modules).to_file(tmp_path / "policy.toml")
        out = tmp_path / "out"
        run = forked("--out", out, "--policy", tmp_path / "policy.toml", *fault)
        if not math.isnan(losses(run)[1]):
            break
    assert set(modules) <= {"blocks.0.attn", "blocks.1.attn"}
    first, last = losses(run)
    assert last < 0.7 * first
    assert "critical" not in run.stderr


def test_a_batch_with_a_nan_is_named_down_to_the_element(tmp_path: Path) -> None:
    run = forked("--out", tmp_path, "broken.py", "--nan-batch", 10)
    said = finding(run, tmp_path)
    assert "step 10" in said
    assert "the forward or the data, not the scale" in said
    assert "Input 0 is nan at (1, 2, 3)" in said
    assert "drop or repair" in said
    first, last = losses(forked("--out", tmp_path, "broken.py"))  # without it
    assert last < 0.7 * first


def test_a_learning_rate_that_is_far_too_high_is_called_divergence(tmp_path: Path) -> None:
    run = forked("--out", tmp_path, "broken.py", "--lr", 3)
    said = finding(run, tmp_path)
    assert said.startswith("Training diverged: the loss grew from ")
    assert "Lower the learning rate (initially 3), warm it up, or clip" in said
    assert "Policy" not in said
    first, last = losses(forked("--out", tmp_path, "broken.py", "--lr", 0.1))
    assert last < 0.7 * first


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 0),
        (["--fail-on", "mistake"], 0),
        (["--fail-on", "critical"], 0),
        (["--fail-on", "mistake", "--fail-on", "warning"], 1),
    ],
)
def test_a_finding_fails_a_run_in_ci_if_it_is_asked_to(options: list[str], code: int, tmp_path: Path) -> None:
    run = forked("--out", tmp_path, *options, "broken.py", "--nan-batch", 2, "--steps", 4)
    assert run.returncode == code
    assert len(run.stdout.splitlines()) == 2
    assert (run_in(tmp_path) / "report.html").is_file()


def test_a_script_that_fails_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{TRAINING}\nraise SystemExit(7)\n")
    assert forked("--out", tmp_path / "out", "--fail-on", "mistake", tmp_path / "train.py").returncode == 7


def test_json_at_the_end_is_one_line_for_programs(tmp_path: Path) -> None:
    run = forked("--out", tmp_path, "--json", "--shared-script", "broken.py", "--nan-batch", 2, "--steps", 4)
    *_, last = run.stderr.splitlines()
    found = json.loads(last)
    assert found["report"] == str(run_in(tmp_path) / "report.html")
    assert (run_in(tmp_path) / "report.html").stat().st_size < 1e5
    assert len(list(tmp_path.glob("castwise-plotly-*.js"))) == 1  # in the folder of runs
    assert found["runs"][0]["skipped"] == {"non-finite loss": 1}
    assert found["runs"][0]["findings"][0]["severity"] == "warning"


UNSCALED = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(torch.randn(3, 4)).square().mean()
loss.backward()
optimizer.step()
"""


def test_a_nan_without_a_scaler_is_diagnosed_and_skipped_if_it_is_asked_for(tmp_path: Path) -> None:
    later = "import sys; print('the script goes on', file=sys.stderr)"
    (tmp_path / "bad.py").write_text(f"{UNSCALED.replace('3, 4)', '3, 4).log()')}\n{later}\n")
    run = forked("--out", tmp_path / "out", tmp_path / "bad.py")
    at_once, _, errors = " ".join(run.stderr.split()).partition("the script goes on")
    assert at_once.startswith("castwise: step 1: Input 0 is nan at ("), run
    assert at_once.count("castwise: ") == 1
    assert "castwise: 1 step, 1 of them taken with inf or NaN; skipped: none" in errors
    assert "critical: Training is lost from step 1 on: the loss was inf or NaN, and the step was taken." in errors
    assert "Step 1: Input 0 is nan at (" in errors
    errors = " ".join(forked("--out", tmp_path / "out", "--guard", tmp_path / "bad.py").stderr.split())
    assert "castwise: 1 step; skipped: 1 non-finite loss" in errors
    assert "Step 1: Input 0 is nan at (" in errors


def test_what_had_no_effect_without_a_scaler_is_reported_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNSCALED)
    options = ["--on-nonfinite", "nothing", "--schedule", "Guard", "--json"]
    *_, last = forked("--out", tmp_path / "out", *options, tmp_path / "train.py").stderr.splitlines()
    (note,) = json.loads(last)["notes"]
    assert note.startswith("the schedule Guard(")
    assert note.endswith(" had no effect: the script created no enabled torch GradScaler")
    run = forked("--out", tmp_path / "out", "--schedule", "Guard", "broken.py", "--steps", 2)
    assert "had no effect" not in run.stderr


@pytest.mark.parametrize(("on_nonfinite", "diagnosed"), [("first", 3), ("diagnose", 5), ("nothing", 0)])
def test_as_many_skips_are_diagnosed_as_are_asked_for(on_nonfinite: str, diagnosed: int, tmp_path: Path) -> None:
    forked("--out", tmp_path, "--on-nonfinite", on_nonfinite, "broken.py", "--logits", 400, "--steps", 5)
    assert [record["kind"] for record in records(tmp_path)].count("diagnosis") == diagnosed
