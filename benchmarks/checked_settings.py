"""Check unchanged programs under other settings than those of the recording: what does `castwise check` say?

    python -m benchmarks.checked_settings                     # writes all rows but those of other versions of torch
    python -m benchmarks.checked_settings OTHER/bin/python    # and a row for the torch of another environment

The programs are three of benchmarks/changes, of which the GPT has dropout and the UNet draws noise, and one with a
`DataLoader`, whose two workers draw random numbers. Writes benchmarks/results/checked_settings-cpu.json and the table
in benchmarks/README.md. Takes about five minutes.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks import recording
from benchmarks.checked_changes import FOLDER, STEPS, compiled
from castwise.checking import Golden, check, record
from castwise.diagnosis._capsule import threads

PROGRAMS = ("gpt", "cnn", "unet", "loader")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROOT = Path(__file__).parents[1]
Train = Callable[[Any], Any]


class Noisy(Dataset[torch.Tensor]):
    """Samples with random numbers of torch and of Python, drawn where they are loaded."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(0, 1, 16) * index + torch.randn(16) + random.random()


def loader(probe: Any, *, dtype: torch.dtype, workers: int = 2, seed: int | None = 0) -> None:
    """Train on the samples in random order."""
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = (model(batch).float() - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms, with uninitialized memory filled."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "as recorded": (nullcontext, {}),
    "2 threads": (lambda: threads(2), {}),
    "deterministic algorithms": (deterministic, {}),
    "without oneDNN": (lambda: torch.backends.mkldnn.flags(enabled=False), {}),
    "data loader, 1 worker": (nullcontext, {"workers": 1}),
    "data loader, no workers": (nullcontext, {"workers": 0}),
    "another seed": (nullcontext, {"seed": 1}),
    "no seed": (nullcontext, {"seed": None}),
}
"""What surrounds a check, and what the program with a data loader is called with; if anything, only it is checked."""


def main() -> None:
    """Check each program under each setting, and write the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    goldens = {(program, dtype): record(train(program, dtype), STEPS) for program in PROGRAMS for dtype in DTYPES}
    rows: dict[str, dict[str, str]] = {}
    for setting, (around, options) in SETTINGS.items():
        rows[setting] = {}
        for (program, dtype), golden in goldens.items():
            if program == "loader" or not options:
                with around():
                    verdict = check(train(program, dtype, **options), golden).verdict
                rows[setting][f"{program}, {dtype}"] = verdict
                print(setting, program, dtype, verdict, flush=True)
    machine = recording.machine()
    for python in sys.argv[1:]:
        rows.update(in_environment(python, goldens))
        machine["command"] = machine["command"].replace(python, "OTHER/bin/python")
    about = {"machine": machine, "settings": rows}
    recording.write("checked_settings-cpu", about, table(about))


def in_environment(python: str, goldens: dict[tuple[str, str], Golden]) -> dict[str, dict[str, str]]:
    """Return the row of another environment, which needs torch, NumPy and typer."""
    with tempfile.TemporaryDirectory() as folder:
        for (program, dtype), golden in goldens.items():
            golden.save(Path(folder, f"{program}-{dtype}"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        code = f"from benchmarks.checked_settings import print_verdicts; print_verdicts({folder!r})"
        done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
    row: dict[str, dict[str, str]] = json.loads(done.stdout)
    return row


def print_verdicts(folder: str) -> None:
    """Print the verdicts on the programs against golden files of another environment, as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    verdicts = {}
    for path in sorted(Path(folder).iterdir()):
        program, dtype = path.name.split("-")
        verdicts[f"{program}, {dtype}"] = check(train(program, dtype), path).verdict
    print(json.dumps({f"torch {torch.__version__.partition('+')[0]}": verdicts}))


def train(program: str, dtype: str, **options: Any) -> Train:
    """Return a program in a dtype."""
    if program == "loader":
        return functools.partial(loader, dtype=DTYPES[dtype], **options)
    return compiled((FOLDER / f"{program}.py").read_text(), DTYPES[dtype])


def table(about: dict[str, Any]) -> str:
    """Return a row for each setting: the verdicts, each with its programs."""
    rows = ["| setting | verdict |", "|---|---|"]
    for setting, verdicts in about["settings"].items():
        said: dict[str, list[str]] = {}
        for program, verdict in verdicts.items():
            said.setdefault(re.sub(": all .*|, by up to [^;]*", "", verdict), []).append(program)
        texts = (verdict if len(said) == 1 else f"{verdict} ({'; '.join(names)})" for verdict, names in said.items())
        rows.append(f"| {setting} | {'<br>'.join(texts)} |")
    return "\n".join([recording.headline(about["machine"]), "", *rows])


if __name__ == "__main__":
    main()
