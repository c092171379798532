"""Faults planted in castwise, each of which the tests on the simulated accelerator must find.

`python -m tests.accelerator.mutations` copies the package, plants one fault after another, and runs the tests that
should fail. It prints what they found, and ends with 1 if a fault was not found. `-k WORD` selects faults.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    """A fault: a piece of code, what replaces it, and the test file that must fail."""

    name: str
    file: str
    code: str
    fault: str
    tests: str


MUTATIONS = [
    Mutation(
        "no wait for an event",
        "amp/_readback.py",
        "            self._arrived.synchronize()\n",
        "            pass\n",
        "test_steps.py",
    ),
    Mutation(
        "no pinned memory",
        "amp/_readback.py",
        'device="cpu", pin_memory=True)\n            self._host.copy_',
        'device="cpu")\n            self._host.copy_',
        "test_steps.py",
    ),
    Mutation(
        "no event at all",
        "amp/_devices.py",
        "accelerator.type != device_type:\n        return False",
        "accelerator.type != device_type:\n        return False\n    return False",
        "test_steps.py",
    ),
    Mutation("results are read an update early", "amp/_readback.py", "DELAY = 2\n", "DELAY = 1\n", "test_steps.py"),
    Mutation(
        "the host reads found_inf of a fused step",
        "amp/grad_scaler.py",
        "may_be_skipped = not found_inf.is_cpu or self._decide_skip(record)",
        "may_be_skipped = self._decide_skip(record) or True",
        "test_steps.py",
    ),
    Mutation(
        "the scale is read before each step that is not fused",
        "amp/grad_scaler.py",
        "scale.is_cpu or self._scale_bound.of(scale) < 1.0",
        "scale.item() < 1.0",
        "test_counts.py",
    ),
    Mutation(
        "unscaling is always checked again",
        "amp/grad_scaler.py",
        "scale.is_cpu or self._scale_bound.of(scale) < 1.0",
        "True",
        "test_counts.py",
    ),
    Mutation(
        "unscaling is never checked again",
        "amp/grad_scaler.py",
        "scale.is_cpu or self._scale_bound.of(scale) < 1.0",
        "scale.is_cpu",
        "test_steps.py",
    ),
    Mutation(
        "the bound of the scale does not fall",
        "amp/_readback.py",
        "self._number, lowest_after(self._number), (scale",
        "self._number, self._number, (scale",
        "test_steps.py",
    ),
    Mutation(
        "a factor stays on another device",
        "amp/_measure.py",
        "here = factor if factor.device == group.device else factor.to(group.device, non_blocking=True)",
        "here = factor",
        "test_steps.py",
    ),
    Mutation(
        "two flags instead of one launch",
        "amp/_measure.py",
        "return torch.fmax(self.coefficient, self.found_inf) / scale",
        "return torch.where(self.found_inf != 0, 1.0, self.coefficient) / scale",
        "test_counts.py",
    ),
    Mutation(
        "one transfer for each step",
        "amp/_outcomes.py",
        "_TOGETHER = 16 ",
        "_TOGETHER = 1 ",
        "test_counts.py",
    ),
    Mutation(
        "a result is copied on a stream of its own",
        "amp/_readback.py",
        "            self._host.copy_(tensor, non_blocking=True)\n",
        "            with torch.Stream(tensor.device):\n                self._host.copy_(tensor, non_blocking=True)\n",
        "test_steps.py",
    ),
    Mutation(
        "pinned memory is used again too early",
        "amp/_readback.py",
        "            self._host.copy_(tensor, non_blocking=True)\n",
        "            self._host.fill_(1.0)\n            tensor.copy_(self._host, non_blocking=True)\n"
        "            self._host.copy_(tensor, non_blocking=True)\n",
        "test_steps.py",
    ),
    Mutation(
        "ties are found on the CPU",
        "master_weights/_codecs.py",
        '_ListedTies(length) if device.type == "cpu" else _PackedTies(length, device)',
        "_ListedTies(length)",
        "test_master_weights.py",
    ),
    Mutation(
        "buckets are as small as on a CPU",
        "master_weights/_buckets.py",
        '    if device.type == "cpu":\n        return _BUCKET_BYTES // 4\n    share',
        "    return _BUCKET_BYTES // 4\n    share",
        "test_master_weights.py",
    ),
    Mutation(
        "codecs are not compiled",
        "master_weights/_codecs.py",
        "if is_compiled and length % 8 == 0",
        "if not is_compiled and length % 8 == 0",
        "test_master_weights.py",
    ),
    Mutation(
        "16-bit weights are written over gradients that are yet to be copied",
        "master_weights/_master_weights.py",
        "                if copied:\n                    torch._foreach_copy_([to",
        "                if copied:\n                    loans[0].low.zero_()\n"
        "                    torch._foreach_copy_([to",
        "test_master_weights.py",
    ),
    Mutation(
        "the step count of random streams is copied to the device",
        "master_weights/_codecs.py",
        "torch.full((), _signed(self.taken), dtype=torch.int32, device=device)",
        "torch.full((), _signed(self.taken), dtype=torch.int32).to(device)",
        "test_master_weights.py",
    ),
    Mutation(
        "a skipped step counts as taken",
        "master_weights/_codecs.py",
        "found_inf.reshape(()) == 0)\n\n",
        "1)\n\n",
        "test_master_weights.py",
    ),
    Mutation(
        "the second collective waits for the first",
        "amp/_agreement.py",
        "_CHECK_DELAY = 4\n",
        "_CHECK_DELAY = 1\n",
        "test_ranks.py",
    ),
    Mutation(
        "digests are copied from pageable memory and waited for",
        "amp/_agreement.py",
        "    pair = torch.full((2,), first, dtype=torch.float64, device=device)\n",
        "    pair = torch.full((2,), first, dtype=torch.float64).to(device)\n",
        "test_ranks.py",
    ),
    Mutation(
        "bins are counted with a read",
        "monitor/_exponents.py",
        'add = _add_on_cpu if values.device.type == "cpu" else _add_without_a_sync',
        "add = _add_on_cpu",
        "test_tools.py",
    ),
]


def planted(mutation: Mutation, folder: Path) -> Path:
    """Copy castwise into a folder, with the fault; return the path to import it from."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    file = source / "castwise" / mutation.file
    text = file.read_text()
    if text.count(mutation.code) != 1:
        raise SystemExit(f"{mutation.file} has {text.count(mutation.code)} pieces for {mutation.name!r}, not one")
    file.write_text(text.replace(mutation.code, mutation.fault))
    return source


def failures(mutation: Mutation) -> str:
    """Run the tests against castwise with a fault; return the first that fails, or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(planted(mutation, Path(folder))), str(ROOT)])
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", f"tests/accelerator/{mutation.tests}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition("::")[2] if run.returncode == 1 and failed else ""


def main(word: str = "") -> int:
    """Print each fault and the test that found it; return 1 if one was not found."""
    missed = 0
    for mutation in MUTATIONS:
        if word in mutation.name:
            found = failures(mutation)
            missed += not found
            print(f"{mutation.name}: {found or 'NOT FOUND'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2] if sys.argv[1:2] == ["-k"] else ""))
