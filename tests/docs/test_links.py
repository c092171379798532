"""Links between files of the repository lead to files, and tests that the manual names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for path in (*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "_build" not in path.parts
]


def slug(heading: str) -> str:
    """The place of a heading, as GitHub and MyST name it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken(path: Path, text: str) -> list[str]:
    text = re.sub(r"^(`{3,}).*?^\1[ ]*$", "", text, flags=re.M | re.S)
    found = []
    without_code = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "code", text, flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        where, _, place = link.partition("#")
        file = path.parent / where if where else path
        is_there = file.exists()
        if is_there and place and file.suffix == ".md":
            content = text if file == path else file.read_text()
            is_there = place in {slug(heading) for heading in re.findall(r"^#+ (.*)$", content, re.M)}
        if not is_there:
            found.append(link)
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_every_relative_link_leads_to_a_file(path: Path) -> None:
    # The page of benchmarks includes benchmarks/README.md; tests/docs/test_manual.py finds its places in the HTML.
    links = [link for link in broken(path, path.read_text()) if not link.startswith("../benchmarks.md#")]
    assert links == []


def test_a_broken_link_is_found() -> None:
    text = "# One two\n[a](nowhere.md) [b](#one-two) [c](#three) [d](README.md) [e](https://x.org)"
    assert broken(ROOT / "README.md", text) == ["nowhere.md", "#three"]


NAMED = sorted(
    {(file, name) for path in FILES for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text())}
)


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 40
    for file in {file for file, _ in NAMED}:
        functions = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert {name for of, name in NAMED if of == file} <= functions, file


def test_tests_of_differences_show_that_torch_goes_wrong() -> None:
    file = "tests/amp/test_torch_is_wrong.py"
    page = (ROOT / "docs" / "reference" / "differences.md").read_text()
    source = (ROOT / file).read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    named = re.findall(rf"`{file}::(\w+)`", page)
    assert len(named) > 12
    only_ours = {name for name in named if "THEIRS" not in {*re.findall(r"\w+", ast.unparse(functions[name]))}}
    # There torch's result depends on the addresses of objects.
    assert only_ours == {"test_the_inf_of_an_optimizer_that_only_the_scaler_holds_still_counts"}


def test_each_difference_names_its_test() -> None:
    page = (ROOT / "docs" / "reference" / "differences.md").read_text()
    rows = [row for row in re.findall(r"^\|.*\|$", page, re.M) if not row.startswith(("|---", "| torch", "| | |"))]
    assert len(rows) > 40
    assert [row for row in rows if "{repo}`tests/" not in row.split("|")[-2]] == []
