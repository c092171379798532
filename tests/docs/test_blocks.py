"""Blocks of a page are run as docs/writing.md says, and a block that is wrong fails."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sybil import Sybil

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("blocks", ROOT / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(blocks)

Run = Callable[[str], dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the blocks of a page, and return its namespace."""

    def run(text: str) -> dict[str, Any]:
        page = tmp_path / "page.md"
        page.write_text(text)
        document = Sybil(parsers=[blocks._blocks], path=str(tmp_path), pattern="*.md").parse(page)
        blocks._begin(document.namespace)
        try:
            for example in document.examples():
                example.evaluate()
        finally:
            blocks._end(document.namespace)
        namespace: dict[str, Any] = document.namespace
        return namespace

    return run


RIGHT = {
    "python": "```python\nx = 1\n```\n\ntext\n\n```python\ny = x + 1\n```\n",
    "an indented block": "* item\n\n  ```python\n  y = 2\n  ```\n",
    "hidden setup in a list": "* item\n\n  <!-- setup\n  if 1:\n      x = 1\n  -->\n  ```python\n  y = x + 1\n  ```\n",
    "hidden setup": "<!-- setup\nx = 1\n-->\n```python\ny = x + 1\n```\n",
    "a doctest": "```python\n>>> y = 2\n>>> print(y, 'of', [1, 2, 3])\n2 of [1, ...]\n```\n",
    "a diff": "```diff\n-y = no_such_name\n+y = 2\n```\n",
    "what is printed": "```python\ny = 2\nprint('about', y)\n```\n<!-- prints -->\n```text\nabo...t 2\n```\n",
    "what is nearly printed": "```python\ny = 2\nprint(f'-1.234e+05 .. 0.999, -34208 of {y}')\n```\n"
    "<!-- prints: nearly -->\n```text\n-1.23e+05 .. 1.0, -34100 of 2\n```\n",
    "a file": '<!-- file: a/b.txt -->\n```text\n2\n```\n```python\ny = int(open("a/b.txt").read())\n```\n',
    "a script": "<!-- file: a.py -->\n```python\nprint(2)\n```\n```sh\npython a.py  # now\n```\n"
    "<!-- prints -->\n```text\n2\n```\n```python\ny = 2\n```\n",
    "a command in place": "<!-- file: a.py -->\n```python\nprint(2)\n```\n<!-- run: python a.py -->\n```sh\n"
    "torchrun --nnodes 2 --rdzv-endpoint far:2950 a.py\n```\n<!-- prints -->\n```text\n2\n```\n```python\ny = 2\n```\n",
    "policies": '```toml\ncompute = "bfloat16"\n```\n```json\n{"compute": "float16"}\n```\n```json\n[1]\n```\n'
    "```jsonl\n{}\n[]\n```\n```python\ny = 2\n```\n",
    "directives": "```{toctree}\nno such thing\n```\n```python\ny = 2\n```\n",
    "commands that take long": "```sh\nmake demo\npip install 'castwise[report]'\ncastwise demo --steps 3 \\\n"
    "  --data notes.txt\nOMP_NUM_THREADS=1 castwise doctor --json\n"
    "torchrun --nproc-per-node 2 -m castwise demo --steps 3\n"
    "python -m pytest tests/docs/test_blocks.py\nnox -s tests-3.12 -- tests/docs\n"
    "python examples/compare_schedules.py --record\n```\n```python\ny = 2\n```\n",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_page_runs(name: str, run: Run) -> None:
    before = Path.cwd()
    assert run(RIGHT[name])["y"] == 2
    assert Path.cwd() == before


WRONG = {
    "an error": "```python\n1 / 0\n```\n",
    "another name": "```python\nx = 1\n```\n```python\nz\n```\n",
    "a doctest": "```python\n>>> 1 + 1\n3\n```\n",
    "a diff": "```diff\n-x = 1\n+x = no_such_name\n```\n",
    "what is printed": "```python\nprint(1)\n```\n<!-- prints -->\n```text\n2\n```\n",
    "what is not nearly whole": "```python\nprint(34208)\n```\n<!-- prints: nearly -->\n```text\n33800\n```\n",
    "what is not nearly printed": "```python\nprint(1.02)\n```\n<!-- prints: nearly -->\n```text\n1.0\n```\n",
    "another count": "```python\nprint(1.0, 100)\n```\n<!-- prints: nearly -->\n```text\n1.0 101\n```\n",
    "one number more": "```python\nprint(1.0, 2.0)\n```\n<!-- prints: nearly -->\n```text\n1.0\n```\n",
    "tests that are not there": "```sh\npython -m pytest tests/nothing.py\n```\n",
    "a session": "```sh\nnox -s nothing-3.12\n```\n",
    "a Python": "```sh\nnox -s tests-3.9\n```\n",
    "toml": "```toml\na = \n```\n",
    "a policy": '```toml\ncompute = "float8"\n```\n',
    "json": "```json\n{a: 1}\n```\n",
    "jsonl": "```jsonl\n{}\n{\n```\n",
    "an option": "```sh\ncastwise demo --stepss 3\n```\n",
    "a subcommand": "```sh\ncastwise train\n```\n",
    "a command": "```sh\nrm -rf x\n```\n",
    "an extra": "```sh\npip install 'castwise[nothing]'\n```\n",
    "what is no target": "```sh\nmake .PHONY\n```\n",
    "a target": "```sh\nmake nothing\n```\n",
    "a script that is not there": "```sh\ntorchrun nothing.py\n```\n",
    "a script that fails": "<!-- file: a.py -->\n```python\n1 / 0\n```\n```sh\npython a.py\n```\n",
    "an unknown language": "```yaml\na: 1\n```\n",
    "no language": "```\na: 1\n```\n",
    "a mark of nothing": "<!-- prints -->\n\ntext\n",
    "an unknown mark": "<!-- skip -->\n```python\nx = 1\n```\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_page_fails(name: str, run: Run) -> None:
    with pytest.raises((Exception, SystemExit)):
        run(WRONG[name])


def test_cuda_means_the_cpu(run: Run) -> None:
    page = "```python\nx = torch.ones(1, device=\"cuda\")\nk = {'cuda': 1}\n```\n"
    found = run(f"<!-- setup\nimport torch\n-->\n{page}")
    assert found["x"].device.type == "cpu"
    assert found["k"] == {"cpu": 1}
