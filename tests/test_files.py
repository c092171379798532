"""Files are replaced whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.monitor import recorded

from castwise import Policy, _files, schedules
from castwise.monitor.report import write_report


def test_a_file_is_replaced_and_so_is_what_a_link_leads_to(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    for content in (b"one", b"two"):
        _files.replace(link, content)
        assert path.read_bytes() == content
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, link]


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
