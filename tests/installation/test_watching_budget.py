"""What a watched step of training in bf16 costs: the functions of castwise that it enters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import castwise
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(200, 4)), 2)
entered = []

def note(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(castwise.__path__[0]):
        entered.append(name)

for number, (x,) in enumerate(loader, 1):
    if number in (69, 70):  # the last of them is counted; neither is sampled, nor checked closely
        sys.setprofile(note)
        entered.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sys.setprofile(None)
    if number == 70:
        break
print("entered", len(entered))
"""


def test_a_watched_step_of_forty_parameters_enters_few_functions(tmp_path: Path, warm_python: None) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "castwise", "run", "--out", str(tmp_path / "runs"), str(script)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(printed.split("entered ")[1].split()[0]) in range(100, 396)
