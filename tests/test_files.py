"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.monitor import recorded

from castwise import Policy, _files, schedules
from castwise.report.report import write_report


def test_a_file_is_replaced_and_so_is_what_a_link_leads_to(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    for content in (b"one", b"two"):
        _files.replace(link, content)
        assert path.read_bytes() == content
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_permissions_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    _files.replace(path, b"secret")
    assert path.stat().st_mode & 0o777 == 0o600
    _files.replace(tmp_path / "new", b"")
    (tmp_path / "plain").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _files.replace(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_long_name_is_a_name_and_errors_have_it(tmp_path: Path) -> None:
    _files.replace(tmp_path / ("n" * 255), b"")
    with pytest.raises(OSError, match="n" * 256):
        _files.replace(tmp_path / ("n" * 256), b"")
    with pytest.raises(FileNotFoundError) as raised:
        _files.replace(tmp_path / "no folder" / "file", b"")
    assert raised.value.filename == str(tmp_path / "no folder" / "file")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recorded.healthy(folder := tmp_path_factory.mktemp("run"), steps=10, layers=1)
    return folder


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "policy.json": lambda path, run: Policy("bfloat16").to_file(path),
    "policy.toml": lambda path, run: Policy("bfloat16").to_file(path),
    "trace.jsonl": lambda path, run: schedules.write_trace(path, [schedules.GradientRange(1.0)]),
    "report.html": lambda path, run: write_report([run], path),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("there", ["a folder", "a file that cannot be replaced"])
def test_what_cannot_be_written_leaves_all_as_it_was(
    name: str, there: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    if there == "a folder":
        path.mkdir()
    else:
        path.write_bytes(b"before")

        def full(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=r"disk full|directory"):
        WRITERS[name](path, run)
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_dir() or path.read_bytes() == b"before"
