"""The fixture `castwise_check`: it records, passes, and fails with the verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEST = """
import os, torch

def train(probe):
    torch.manual_seed(0)
    probe("out", torch.randn(8) * float(os.environ["FACTOR"]))

def test_numerics(castwise_check):
    castwise_check(train, golden="goldens/golden.cwcheck", steps=1)
"""


def test_it_records_then_passes_and_then_fails_with_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_numerics.py").write_text(TEST)

    def printed(code: int, *options: str, factor: str = "1.0") -> str:
        monkeypatch.setenv("FACTOR", factor)
        plugins = ["-p", "castwise.integrations.pytest", "-p", "no:cacheprovider"]
        assert pytest.main(["-q", *plugins, *options, "--rootdir", str(tmp_path), str(tmp_path)]) == code
        return re.sub(r"\s+", " ", capsys.readouterr().out)

    assert "write it with `pytest --castwise-record`" in printed(1)
    assert "1 passed" in printed(0, "--castwise-record")
    assert "1 passed" in printed(0)
    assert "different function: value out" in printed(1, factor="1.001")
