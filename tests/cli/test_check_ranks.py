"""`castwise check --ranks` runs a script on ranks that it starts itself: under DDP, under FSDP2, and compares both."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.test_check import castwise

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

kind, eps, bug = (sys.argv[1:] + ["ddp", "1e-5", ""][len(sys.argv) - 1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
if bug == "fails" and rank == 1:
    raise RuntimeError("rank 1 cannot go on")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8, float(eps)), torch.nn.Linear(8, 2))
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
data = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(rank))
for x in data:
    optimizer.zero_grad()
    ((2 if bug == "twice" and rank == 1 else 1) * model(x).square().mean()).backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, warm_python_in_module: None) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(SCRIPT)
    for kind in ("ddp", "fsdp"):
        words = ("--steps", "1", "--ranks", "2", "--out", str(folder / kind))
        code, out, err = castwise("record", str(folder / "train.py"), *words, "--", kind)
        assert (code, out.partition(":")[0]) == (0, "recorded 1 steps in float32"), err
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_are_checked_together(recorded: Path, kind: str) -> None:
    words = (str(recorded / "train.py"), "--against", str(recorded / kind), "--", kind)
    assert castwise(*words)[:2] == (0, "identical: all losses, gradients, weights and buffers have the same bits\n")
    code, out, _ = castwise(*words, "1e-4")
    assert (code, out.partition("\n")[0]) == (1, "different function: 1, forward, step 1")


def test_a_sharded_model_is_the_same_function_as_a_replicated_one(recorded: Path) -> None:
    code, out, err = castwise(str(recorded / "train.py"), "--against", str(recorded / "ddp"), "--", "fsdp")
    assert (code, out.split()[0]) in ((0, "same"), (0, "identical:")), err


def test_a_bug_of_another_rank_is_seen_in_the_gradients(recorded: Path) -> None:
    words = (str(recorded / "train.py"), "--against", str(recorded / "ddp"), "--", "ddp", "1e-5")
    code, out, _ = castwise(*words, "twice")
    assert (code, out.partition("\n")[0]) == (1, "different function: between backward and step, step 1")
    code, _, err = castwise(*words, "fails")
    assert code == 125
    assert "rank 1 cannot go on" in err


def test_ops_of_ranks_are_compared(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("square()", "abs()"))
    monkeypatch.chdir(tmp_path)
    code, out, err = castwise("train.py", "--ops", str(recorded), "--ranks", "2", "--steps", "1")
    assert code == 0, err
    assert "pow float32 replaced by abs float32" in out.splitlines()[1]


def test_launchers_are_refused(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "castwise check: castwise starts the ranks itself, for each run: castwise check record --ranks N SCRIPT\n"
    for words in (("torchrun", "train.py"), ("-m", "torch.distributed.run", "train.py")):
        assert castwise("record", *words) == (125, "", said)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert castwise(str(recorded / "train.py")) == (125, "", said)
