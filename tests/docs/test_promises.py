"""Pages that promise something name, in comments that no reader sees, the tests that would fail if it were false."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = ["SECURITY.md", "docs/explanation/testing.md", "docs/explanation/ranks.md", "docs/integrations/run.md"]
COMMENT = re.compile(r"<!--\s+(no promise|tests/[\w/]+\.py::\w+(?:\s+tests/[\w/]+\.py::\w+)*)\s+-->")


def blocks(text: str) -> Iterator[str]:
    """Return the text of each paragraph, list item and table row."""
    lines = text.splitlines()
    for token, inside in pairwise([*MarkdownIt("commonmark").enable("table").parse(text), Token("end", "", 0)]):
        if token.type == "tr_open" and inside.type == "td_open" and token.map is not None:
            yield lines[token.map[0]]
        elif token.type == "paragraph_open":
            yield inside.content
        elif token.type == "html_block" and COMMENT.search(token.content):
            yield f"outside a sentence: {token.content}"


@functools.cache
def functions(file: str) -> set[str]:
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def wrong(text: str) -> list[str]:
    """Return blocks without a comment or with one in the wrong place, and names of tests that do not exist."""
    found = []
    for block in blocks(text):
        if not COMMENT.search(block) or block.startswith("outside"):
            found.append(block)
        found += [f"no comment of ours: {other}" for other in re.findall("<!--.*?-->", COMMENT.sub("", block), re.S)]
    for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", " ".join(COMMENT.findall(text))):
        if not (name.startswith("test_") and name in functions(file)):
            found.append(f"{file}::{name}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_each_promise_names_its_test(page: str) -> None:
    assert wrong((ROOT / page).read_text()) == []


THIS = "<!-- tests/docs/test_promises.py::test_each_promise_names_its_test -->"


def test_a_promise_without_a_test_is_found() -> None:
    right = f"# A\n\na {THIS} b\n\n- c {THIS}\n\n```text\nd\n```\n\n| e | f |\n|---|---|\n| g | h {THIS} |\n"
    assert wrong(right + "\n<!-- setup\nx = 1\n-->\n\ni <!-- no promise -->\n") == []
    assert wrong(right.replace(f" {THIS}", "")) == ["a b", "c", "| g | h |"]
    assert wrong("a\n" + THIS + " b") == ["a", f"outside a sentence: {THIS} b"]
    assert wrong("a <!-- no test -->") == ["a <!-- no test -->", "no comment of ours: <!-- no test -->"]
    missing = ["tests/docs/test_promises.py::test_nothing", "tests/nowhere.py::test_a", "tests/conftest.py::blocks"]
    assert wrong(f"a <!-- {' '.join(missing)} -->") == missing
