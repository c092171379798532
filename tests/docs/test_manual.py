"""The manual is built without a warning, every link in it leads somewhere, and nothing in it needs a network."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import identifiers
import pytest

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """The places of a page that can be linked to, where its links go, and what a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        loaded = [given[name] for name in ("src", "srcset", "poster", "data") if name in given]
        if tag == "link" and given.get("rel") not in {"search", "next", "prev", "canonical"}:
            loaded.append(given.get("href", ""))
        self.loads += loaded


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(built.rglob("*.html"))}


def target(page: Page, link: str) -> tuple[Path, str]:
    """The file and the place in it that a link of a page leads to."""
    parts = urlsplit(link)
    path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    return path, unquote(parts.fragment)


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    internal = 0
    for page in pages.values():
        for link in page.links:
            if urlsplit(link).scheme:
                continue
            path, place = target(page, link)
            assert path.is_file(), f"{page.path.name}: {link}"
            assert not place or path not in pages or place in pages[path].places, f"{page.path.name}: {link}"
            internal += 1
    assert internal > 1000


def test_nothing_is_loaded_from_a_network(built: Path, pages: dict[Path, Page]) -> None:
    loads = [(page.path.name, load) for page in pages.values() for load in page.loads]
    assert len(loads) > 100
    assert [load for load in loads if urlsplit(load[1]).scheme not in {"", "data"} or load[1].startswith("//")] == []
    for style in built.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()), style


def test_no_role_is_left_as_text(built: Path) -> None:
    """As it is in a table whose cells a `|` in the role has split: Sphinx does not warn."""
    left = {path.name for path in built.rglob("*.html") if re.search(r"\{[\w:]+\}`", path.read_text())}
    assert left == set()


def test_signatures_are_as_users_write_them(built: Path) -> None:
    for path in (built / "reference").glob("*.html"):
        for signature in re.findall(r'<dt class="sig[^"]*" id=.*?</dt>', path.read_text(), re.S):
            text = html.unescape(re.sub(r"<.*?>", "", signature))
            assert not re.search(r"~|<|= \.\.\.|\(value\)", text), text
            assert not re.search(r"= _?[A-Z][A-Z_]+\b", text), text  # a default is shown by its value


def test_each_keyword_leads_to_its_place(built: Path, pages: dict[Path, Page]) -> None:
    page = built / "reference" / "keywords.html"
    found = {}
    links = re.findall(
        r'<a class="reference internal" href="([^"]+#[^"]+)"[^>]*><code[^>]*>(.*?)</code>', page.read_text()
    )
    for link, name in links:
        path, place = target(pages[page], link)
        if place:  # those of the menu lead to pages
            assert place in pages[path].places
            found[re.sub(r"<.*?>", "", name)] = place.removeprefix("module-")
    expected = identifiers.keywords()
    assert len(expected) > 300
    assert {name: found.get(name) for name in expected} == expected


def test_the_start_page_opens_with_a_run_and_what_readers_get_and_its_figures_come_last(built: Path) -> None:
    page = (built / "index.html").read_text()
    opening, *sections = page.split("<h2>")
    places = [opening.index(text) for text in ("terminal.svg", "<p>When a loss turns NaN", "pip install", "<table")]
    assert places == sorted(places)
    assert opening[places[1] : places[2]].count("<p>") == 1
    assert re.findall(r"[.:](?=\s|</p>)", opening[places[1] : places[2]].partition("</p>")[0] + "</p>") == [":"]
    rows = re.findall(r"<tr.*?</tr>", opening[places[-1] :], re.DOTALL)[1:]
    assert {re.sub(r"<[^>]+>|\s", "", row.partition("</td>")[0]) for row in rows} >= {"bf16", "fp16", "LoRA", "RL"}
    assert all('<a class="reference' in row.partition("</td>")[2] for row in rows)
    for line in ("less time with", "bf16 inference", "it was developed with", "bytes per parameter: weight"):
        assert line in sections[-1]
        assert line not in opening


def test_the_notebook_is_a_page_with_its_outputs(built: Path) -> None:
    page = (built / "tutorials" / "notebook.html").read_text()
    notebook = json.loads((ROOT / "examples" / "bf16_in_a_notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tables = ["".join(output["data"]["text/html"]) for cell in cells for output in cell["outputs"] if "data" in output]
    assert len(tables) == 7
    assert all(table in page for table in tables)
    assert page.count('<div class="castwise-tiles">') == 2
    assert '<section id="find-a-nan-in-one-batch">' in page


def test_a_page_that_is_wrong_is_noticed(tmp_path: Path, warm_python: None) -> None:
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path[:0] = {[str(ROOT / 'docs' / '_ext'), str(ROOT)]!r}\n"
        "extensions = ['myst_parser', 'sphinx.ext.autodoc', 'results', 'prose_links']\nnitpicky = True\n"
    )
    (tmp_path / "index.md").write_text(
        "# A page\n\n{result}`step_cost-cpu.json#/nothing`\n\n{repo}`no/such/file.py`\n\n"
        "{py:class}`castwise.Missing`\n\n[a link](nowhere.md)\n"
    )
    command = [sys.executable, "-m", "sphinx", "-q", str(tmp_path), str(tmp_path / "html")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for fault in ("nothing at 'nothing'", "no 'no/such/file.py'", "castwise.Missing", "nowhere.md"):
        assert fault in said
