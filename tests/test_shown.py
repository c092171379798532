"""Results print as text and are shown as HTML in notebooks, with the same words."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
import torch

import castwise
from castwise._shown import ShownText, Table, as_html, as_text

TABLE = Table([("name", "bytes"), ("<b>", "1,024")], {1}, "a title", "and 3 more")


def words(text: str) -> list[str]:
    return text.split()


def of_html(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    batches = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(2)]
    loss = torch.nn.functional.mse_loss
    return {
        "Drift": castwise.compare(model, batches, {"bf16": castwise.policies.bf16}, loss=loss),
        "Tuned": castwise.tune(model, batches, loss=loss),
        "Trace": castwise.trace(model, batches[0][0], policy=castwise.policies.bf16),
        "explain": castwise.policies.bf16_stable.explain(model),
    }


@pytest.mark.parametrize("name", ["Drift", "Tuned", "Trace", "explain"])
def test_a_notebook_shows_the_words_that_are_printed(name: str, results: dict[str, Any]) -> None:
    page = results[name]._repr_html_()
    assert words(of_html(page)) == words(str(results[name]))
    assert "<script" not in page
    assert len(page) < 20_000


@pytest.mark.parametrize("name", ["Drift", "Tuned", "Trace"])
def test_the_representation_is_one_short_line(name: str, results: dict[str, Any]) -> None:
    text = repr(results[name])
    assert text.startswith(f"{name}(")
    assert len(text) < 120
    assert "\n" not in text


def test_text_is_escaped_and_numbers_stand_on_the_right() -> None:
    page = as_html([TABLE, "a < b"])
    assert "<b>" not in page
    assert "a &lt; b" in page
    assert re.search(r'text-align:right">1,024<', page)
    assert as_text([TABLE, "a < b"]) == "a title\nname  bytes\n<b>   1,024\nand 3 more\n\na < b"


def test_a_shown_text_is_a_text() -> None:
    text = ShownText.of(TABLE, "end", between="\n")
    assert text == "a title\nname  bytes\n<b>   1,024\nand 3 more\nend"
    assert text.upper().endswith("END")
