"""`Policy`: a frozen value, its errors, and its files."""

from __future__ import annotations

import contextlib
import pickle
import re
import string
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from castwise import Policy

DTYPES = ["float16", "bfloat16", "float32"]
RULES = [*DTYPES, "inherit", "exclude"]


def policy(**fields: Any) -> Policy:
    return Policy(**{"compute": "bfloat16", **fields})


def test_a_policy_is_a_frozen_value() -> None:
    one = policy(modules={"a": "float32"}, ops={"softmax": "float16"})
    same = policy(modules={"a": torch.float32}, ops={"softmax": torch.float16}, compute=torch.bfloat16)
    assert one == same
    assert hash(one) == hash(same)
    assert one != policy(modules={"a": "float32"})
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.modules["a"] == "float32"
    with pytest.raises(AttributeError):
        one.compute = "float16"  # type: ignore[misc]
    with pytest.raises(TypeError):
        one.modules["a"] = "float16"  # type: ignore[index]


def test_the_order_of_rules_counts() -> None:
    assert policy(modules={"a*": "float32", "*b": "float16"}) != policy(modules={"*b": "float16", "a*": "float32"})


def test_later_changes_of_what_was_given_change_nothing() -> None:
    rules = {"a": "float32"}
    one = policy(modules=rules)
    rules["a"] = "float16"
    assert one.modules["a"] == "float32"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"compute": "bf16"},
            "compute must be one of 'float16', 'bfloat16', 'float32', got 'bf16'; did you mean 'bfloat16'",
        ),
        (
            {"compute": torch.float64},
            "compute must be one of 'float16', 'bfloat16', 'float32', got 'float64'; did you mean",
        ),
        ({"compute": "inherit"}, "compute must be one of 'float16', 'bfloat16', 'float32', got 'inherit'"),
        (
            {"modules": {"a": "fp32"}},
            "modules['a'] must be one of 'float16', 'bfloat16', 'float32', 'inherit', 'exclude', 'fl",
        ),
        (
            {"ops": {"softmax": "exclude"}},
            "ops['softmax'] must be one of 'float16', 'bfloat16', 'float32', got 'exclude'",
        ),
        (
            {"output": "float"},
            "output must be one of 'float16', 'bfloat16', 'float32', got 'float'; did you mean 'float32'",
        ),
        ({"in_place": "allow"}, "in_place must be one of 'raise', 'cast', got 'allow'"),
        (
            {"modules": {nn.Linear: "float32", "type:torch.nn.modules.linear.Linear": "float16"}},
            "modules has two rules for 'type:torch.nn.modules.linear.Linear'",
        ),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        policy(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"compute": 16}, "compute must be one of 'float16', 'bfloat16', 'float32', got 16"),
        ({"modules": ["a"]}, "modules must be a mapping, got list"),
        ({"modules": {3: "float32"}}, "a key of modules must be a string, got 3"),
        ({"ops": {torch.softmax: "float32"}}, "a key of ops must be a string, got <built-in"),
        ({"ops": {"softmax": None}}, "ops['softmax'] must be one of 'float16', 'bfloat16', 'float32', got None"),
    ],
)
def test_wrong_types_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        policy(**fields)


def test_types_and_expressions_have_a_spelling() -> None:
    rules = {nn.LayerNorm: "float32", re.compile("A.*", re.IGNORECASE): "float16", re.compile("b"): "float16"}
    assert list(policy(modules=rules).modules) == [
        "type:torch.nn.modules.normalization.LayerNorm",
        "re:(?i)A.*",
        "re:b",
    ]


# -- files ------------------------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
policies = st.builds(
    Policy,
    compute=st.sampled_from(DTYPES),
    modules=st.dictionaries(names, st.sampled_from(RULES), max_size=4),
    ops=st.dictionaries(names, st.sampled_from(DTYPES), max_size=4),
    output=st.sampled_from([None, *DTYPES]),
    in_place=st.sampled_from(["raise", "cast"]),
)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@given(one=policies)
def test_a_file_gives_back_the_same_policy(suffix: str, one: Policy, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / f"policy{suffix}"
    one.to_file(path)
    assert Policy.from_file(path) == one


@given(
    text=st.text(st.sampled_from(string.printable), max_size=60) | st.text(max_size=20),
    suffix=st.sampled_from([".toml", ".json"]),
)
def test_whatever_a_file_holds_gives_a_policy_or_an_error_that_names_it(
    text: str, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ValueError):
        assert isinstance(Policy.from_file(path), Policy)
        return
    with pytest.raises(ValueError, match=re.escape(str(path))):
        Policy.from_file(path)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        (
            "p.toml",
            'compute = "bfloat16"\nmodule = 3\n',
            "unknown field 'module': fields are 'compute', 'modules', 'ops', 'output', 'in_place', 'back",
        ),
        ("p.toml", "compute = ", "p.toml: "),
        ("p.json", "[]", "expected a table of fields, got list"),
        ("p.json", "{}", "the field 'compute' is missing"),
        ("p.json", '{"compute": "bfloat16", "output": 3}', "output must be one of"),
        ("p.json", "[" * 100_000, "p.json: "),
        ("p.json", '{"compute": "bfloat16", "compute": "float16"}', "a name occurs twice in: 'compute', 'compute'"),
        ("p.json", '{"compute": "bfloat16", "modules": {"a": "float32", "a": "float16"}}', "a name occurs twice"),
        ("p.toml", "compute = '\xff'", "p.toml: "),
        ("p.toml", "# " * 600_000, "p.toml: a policy file may have at most 1,048,576 bytes, got 1,2"),
        ("p.json", '{"compute": "bfloat16"' + " " * 2**20, "p.json: a policy file may have at most 1,048,576 bytes"),
        ("p.yaml", "", "a policy file must end in .toml or .json, got"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(name: str, text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(error)) as caught:
        Policy.from_file(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["p.toml", "p.json"])
def test_a_file_may_begin_with_a_byte_order_mark_and_name_deep_modules(name: str, tmp_path: Path) -> None:
    one = Policy(compute="bfloat16", modules={".".join(["part"] * 40): "float32"})
    one.to_file(tmp_path / name)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert Policy.from_file(tmp_path / name) == one


def test_a_file_may_be_large_but_not_larger(tmp_path: Path) -> None:
    for length in (2**20, 2**20 + 1):
        (tmp_path / "p.json").write_text('{"compute": "bfloat16"}'.ljust(length))
        if length == 2**20:
            assert Policy.from_file(tmp_path / "p.json") == Policy(compute="bfloat16")
        else:
            with pytest.raises(ValueError, match=r"at most 1,048,576 bytes, got 1,048,577"):
                Policy.from_file(tmp_path / "p.json")


def test_threads_may_write_one_file(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def write() -> None:
        try:
            for _ in range(50):
                policy().to_file(tmp_path / "policy.toml")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["policy.toml"]


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "policy.json")
    policy().to_file(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Policy.from_file(tmp_path / "policy.json") == policy()


def test_without_a_reader_of_toml_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy().to_file(tmp_path / "policy.toml")
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"Python 3\.10 reads TOML only .* pip install tomli"):
        Policy.from_file(tmp_path / "policy.toml")


def test_a_bound_policy_shows_its_policy() -> None:
    model = nn.Linear(1, 1)
    assert repr(policy().bind(model)) == f"BoundPolicy({policy()!r})"
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        policy().bind("model")  # type: ignore[arg-type]


# -- what is written, and what is said ---------------------------------------------------------------------------------


def test_rules_are_hashed_and_shown_by_what_they_say() -> None:
    some, other = policy(modules={"head": "float32"}).modules, policy(modules={"head": "float16"}).modules
    assert hash(some) != hash(other)
    assert repr(some) == "{'head': 'float32'}"
    assert policy(output=torch.float32).output == "float32"


def test_files_are_read_by_people_too(tmp_path: Path) -> None:
    one = Policy(compute="bfloat16", modules={"höhe": "float32", "re:\x7f": "float16"}, output="float32")
    one.to_file(tmp_path / "policy.json")
    assert (
        (tmp_path / "policy.json").read_bytes().decode()
        == """\
{
  "compute": "bfloat16",
  "modules": {
    "h\\u00f6he": "float32",
    "re:\\u007f": "float16"
  },
  "ops": {},
  "output": "float32",
  "in_place": "raise",
  "backend": "auto"
}
"""
    )
    one.to_file(tmp_path / "policy.toml")
    assert (
        (tmp_path / "policy.toml").read_bytes().decode()
        == """\
compute = "bfloat16"
output = "float32"
in_place = "raise"
backend = "auto"

[modules]
"höhe" = "float32"
"re:\\u007F" = "float16"
"""
    )
    assert Policy.from_file(tmp_path / "policy.toml") == Policy.from_file(tmp_path / "policy.json") == one


def test_a_file_without_compute_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: the field 'compute' is missing$"):
        Policy.from_file(path)


def test_a_type_is_no_op() -> None:
    with pytest.raises(TypeError, match=r"^a key of ops must be a string, got <class"):
        policy(ops={nn.Linear: "float32"})


def test_toml_is_read_by_the_package_where_python_has_no_reader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy().to_file(tmp_path / "policy.toml")
    reader = types.ModuleType("tomli")
    reader.loads = lambda text: {"compute": "float16"}  # type: ignore[attr-defined]  # any module may have any
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", reader)
    assert Policy.from_file(tmp_path / "policy.toml") == Policy(compute="float16")
    monkeypatch.setitem(sys.modules, "tomli", None)
    text = "Python 3.10 reads TOML only with the package tomli: pip install tomli, or use .json"
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(text)}$"):
        Policy.from_file(tmp_path / "policy.toml")
