from __future__ import annotations

from pathlib import Path

import pytest
import torch

from castwise._user_error import UserError
from castwise.demo import checkpoint
from castwise.demo.checkpoint import Checkpoint
from castwise.demo.run_folder import MetricsFile, create_run_folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.pt"
    trainer = {"model": {"weight": torch.arange(6.0)}, "skipped": 2}
    checkpoint.save(path, Checkpoint([{"library": "castwise"}], trainer, 41))
    return path


def assert_whole(loaded: Checkpoint) -> None:
    assert loaded.results == [{"library": "castwise"}]
    assert loaded.trainer is not None
    assert loaded.trainer["model"]["weight"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (loaded.trainer["skipped"], loaded.metrics_bytes) == (2, 41)


def test_a_checkpoint_comes_back_as_it_was(path: Path) -> None:
    assert_whole(checkpoint.load(path))


def test_no_checkpoint_is_the_start(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "none.pt") == Checkpoint([], None, 0)


def test_a_checkpoint_cut_anywhere_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match="damaged"):
            checkpoint.load(path)


def test_a_flipped_bit_anywhere_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(UserError, match="damaged"):
            checkpoint.load(path)


def test_a_write_that_fails_leaves_the_checkpoint_before(path: Path) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        checkpoint.save(path, Checkpoint([{"library": (n for n in ())}], None, 0))
    assert_whole(checkpoint.load(path))


def test_torch_load_opens_a_checkpoint(path: Path) -> None:
    assert torch.load(path)["trainer"]["skipped"] == 2


def test_another_programs_torch_file_is_refused(path: Path) -> None:
    torch.save({"model": {}}, path)
    with pytest.raises(UserError, match="not a checkpoint of castwise demo"):
        checkpoint.load(path)


def test_lines_after_the_checkpoint_are_cut_even_half_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = b'{"precision": 1}\n{"precision": 2}\n'
    path.write_bytes(lines + b'{"pre')
    metrics = MetricsFile(path, n_bytes=17)
    metrics.append({"precision": 2})
    assert metrics.sync() == 34
    metrics.close()
    assert path.read_bytes() == lines


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = {create_run_folder(tmp_path, {"n": n}) for n in range(3)}
    assert {folder.name for folder in folders} == {path.name for path in tmp_path.iterdir()}
    assert len(folders) == 3
