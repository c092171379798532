"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.monitor import recorded
from typer.testing import CliRunner

from castwise import Policy, _files, schedules
from castwise._cli import app
from castwise._locks import try_lock
from castwise.report import write_report


def replace(path: Path, content: bytes) -> None:
    _files.replace(path, content, "a file", lambda head: True)


def test_a_file_is_replaced_and_so_is_what_a_link_leads_to(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    for content in (b"one", b"two"):
        replace(link, content)
        assert path.read_bytes() == content
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_permissions_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    replace(path, b"secret")
    assert path.stat().st_mode & 0o777 == 0o600
    replace(tmp_path / "new", b"")
    (tmp_path / "plain").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_long_name_is_a_name_and_errors_have_it(tmp_path: Path) -> None:
    replace(tmp_path / ("n" * 255), b"")
    with pytest.raises(OSError, match="n" * 256):
        replace(tmp_path / ("n" * 256), b"")
    with pytest.raises(FileNotFoundError) as raised:
        replace(tmp_path / "no folder" / "file", b"")
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
    path, before = tmp_path / name, b""
    if there == "a folder":
        path.mkdir()
    else:
        WRITERS[name](path, run)
        before = path.read_bytes()

        def full(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=r"disk full|directory"):
        WRITERS[name](path, run)
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_dir() or path.read_bytes() == before


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "content", [b"mine", b"# by hand\ncompute = 'x'\n", b'{"a": 1}', b"<!doctype html>\n<title>mine"]
)
def test_a_file_that_castwise_has_not_written_is_refused_and_left_as_it_is(
    name: str, content: bytes, run: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FileExistsError, match=f"it exists and is not a.* that castwise has written; .*{name}"):
        WRITERS[name](path, run)
    assert path.read_bytes() == content
    path.write_bytes(b"")  # as `mktemp` creates it
    for _ in range(2):
        WRITERS[name](path, run)
        assert len(path.read_bytes()) > 10


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_private_files_new_content_is_private_from_the_first_byte_on(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch(mode=mode)
    path.chmod(mode)
    modes = []
    fsync = os.fsync

    def look(file: int) -> None:
        modes.extend(entry.stat().st_mode & 0o077 & ~mode for entry in tmp_path.iterdir() if entry != path)
        fsync(file)

    monkeypatch.setattr(os, "fsync", look)
    replace(path, b"secret")
    assert modes == [0]
    assert path.stat().st_mode & 0o777 == mode


def test_what_a_killed_process_has_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    left, written = (tmp_path / f".castwise-{number:016x}.tmp" for number in (1, 2))
    left.touch()
    others = [tmp_path / ".castwise-mine.tmp", tmp_path / ".0123456789abcdef", tmp_path / "x.tmp"]
    for other in others:
        other.touch()
    file = os.open(written, os.O_RDWR | os.O_CREAT)
    assert try_lock(file)
    replace(tmp_path / "new", b"content")
    os.close(file)
    assert sorted(tmp_path.iterdir()) == sorted([*others, written, tmp_path / "new"])
    replace(tmp_path / "new", b"content")
    assert not written.exists()


def test_a_long_search_does_not_begin_if_its_policy_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("# mine\n")
    result = CliRunner().invoke(app, ["tune", "-o", str(tmp_path / "policy.toml")])
    assert result.exit_code == 2
    assert "it exists and is not a policy that castwise has written" in result.stderr
    assert (tmp_path / "policy.toml").read_text() == "# mine\n"
