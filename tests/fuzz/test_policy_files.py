"""Policy files: a policy, or an error that names the file; and none is ever half written."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.damage import JSON, a_share, attempt, changed, mangled

from castwise import Policy

POLICY = Policy(
    compute="bfloat16",
    modules={"blocks.*.norm": "float32", "re:.*[0-9]": "float16", "type:*Norm*": "inherit", "naïve \x7f": "exclude"},
    ops={"softmax": "float32", "aten.bmm": "bfloat16"},
    output="float32",
    in_place="cast",
)


def contents(tmp_path_factory: pytest.TempPathFactory, suffix: str) -> bytes:
    path = tmp_path_factory.getbasetemp() / f"valid{suffix}"
    POLICY.to_file(path)
    return path.read_bytes()


def read(path: Path) -> None:
    policy, refusal = attempt(lambda: Policy.from_file(path), ValueError)
    if refusal is not None:
        assert refusal.startswith(f"{path}: ")
        assert "\n" not in refusal
        return
    path.unlink()  # else it is left as it is, because castwise has not written it
    policy.to_file(path)
    assert Policy.from_file(path) == policy
    assert not list(path.parent.glob(".castwise-*"))


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@given(data=st.data())
@a_share(8)
def test_damaged_files_are_policies_or_refused(
    suffix: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    path.write_bytes(data.draw(mangled(contents(tmp_path_factory, suffix))))
    read(path)


@given(fields=changed(json.loads(POLICY._as_json())) | JSON)
@a_share(8)
def test_other_values_are_policies_or_refused(fields: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "other.json"
    path.write_text(json.dumps(fields))
    read(path)


@given(fields=changed({"compute": "bfloat16", "modules": {"a": "float32"}, "ops": {"softmax": "float32"}}))
@a_share(16)
def test_other_arguments_are_policies_or_refused(fields: Any) -> None:
    with contextlib.suppress(TypeError, ValueError):
        arguments = {name: value for name, value in fields.items() if re.fullmatch(r"[a-z_]+", name)}
        assert hash(Policy(**arguments)) == hash(Policy(**arguments))


def test_a_folder_is_no_policy(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").mkdir()
    with pytest.raises(OSError, match="directory"):
        Policy.from_file(tmp_path / "policy.toml")
