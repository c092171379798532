"""A copy of the project in which "cuda" is the simulated accelerator, to run `benchmarks.gpu` without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_FOLDERS = ("benchmarks", "docs", "examples", "src", "tests")
_FUTURE = "from __future__ import annotations\n"


def project_on_sim(folder: Path) -> None:
    """Copy the project into a folder, with code that names CUDA changed to name the device "sim".

    These are the benchmarks, the demo, and the tests that need a GPU.
    """
    for name in _FOLDERS:
        shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for file in _ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, folder / file.name)
    files = [*folder.glob("benchmarks/*.py"), *folder.glob("src/castwise/_demo/*.py")]
    files += [path for path in folder.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text()]
    for file in files:
        code = file.read_text()
        on_sim = code.replace('"cuda"', '"sim"').replace(".cuda()", ".sim()").replace("-cuda.json", "-sim.json")
        on_sim = on_sim.replace("torch.cuda.", "cuda_on_sim.")
        if on_sim != code:
            file.write_text(on_sim.replace(_FUTURE, f"{_FUTURE}from tests.accelerator import cuda_on_sim\n", 1))
