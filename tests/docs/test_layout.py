"""Every page of the manual in a real browser: on a phone and on a desk, by day and by night."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser import STILL, Browser, contrast_ratio

LOADED = "document.readyState === 'complete'"
PHONE, DESK = 400, 1400
SMALLEST_TEXT_PX = 9

# What is wrong with the page that is shown, by kind; tables and code may scroll by themselves.
LOOK = """
const wide = document.documentElement.clientWidth;
const shown = element => {
  const style = getComputedStyle(element), box = element.getBoundingClientRect();
  return style.visibility !== "hidden" && style.display !== "none" && box.width > 1 && box.height > 1;
};
const scrolls = element => {
  for (let up = element; up && up !== document.body; up = up.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(up).overflowX)) return true;
  return false;
};
const all = selector => [...document.querySelectorAll(selector)].filter(shown);
const names = elements => elements.map(element => element.outerHTML.slice(0, 90)).slice(0, 5);
const leaves = "p, pre, table, li, dt, h1, h2, h3, h4, img, svg";
const boxes = all(`article :is(${leaves})`).filter(element => !element.querySelector(leaves))
  .map(element => [element, element.getBoundingClientRect()]).sort((a, b) => a[1].top - b[1].top);
const overlaps = [];
boxes.forEach(([element, box], place) => {
  for (const [other, its] of boxes.slice(place + 1)) {
    if (its.top >= box.bottom - 1) break;
    const shared = Math.min(box.right, its.right) - Math.max(box.left, its.left);
    if (shared > 1 && !element.contains(other) && !other.contains(element)) overlaps.push(element, other);
  }
});
const columns = all(".sidebar-drawer, .main > .content, .toc-drawer").map(column => column.getBoundingClientRect())
  .filter(box => box.right > 0 && box.left < wide).sort((a, b) => a.left - b.left);
const drawings = all("article .picture svg");
return {
  "wider than the screen": document.documentElement.scrollWidth > wide ? [document.documentElement.scrollWidth] : [],
  "out of the screen": names(all("article *")
    .filter(element => element.getBoundingClientRect().right > wide + 1 && !scrolls(element))),
  "over another": names(overlaps),
  "columns over each other": columns.filter((box, place) => place && box.left < columns[place - 1].right - 1),
  "no alternative text": names(all("article img").filter(image => !image.alt)
    .concat(drawings.filter(drawing => drawing.getAttribute("role") !== "img" || !drawing.ariaLabel))),
  "too small to read": names(drawings.flatMap(drawing => [...drawing.querySelectorAll("text")])
    .filter(text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a < SMALLEST)),
};
""".replace("SMALLEST", str(SMALLEST_TEXT_PX))
COLOURS = """
return [...document.querySelectorAll("article .picture text")].map(text => getComputedStyle(text).fill);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"), *STILL)
    yield browser
    browser.driver.quit()


def wrong(browser: Browser) -> dict[str, list[object]]:
    found: dict[str, list[object]] = browser.driver.execute_script(LOOK)
    return {kind: which for kind, which in found.items() if which}


def test_every_page_fits_its_screen_and_nothing_lies_over_another(browser: Browser, built: Path) -> None:
    pages = [page for page in sorted(built.rglob("*.html")) if "_static" not in page.parts]
    assert len(pages) > 50
    found, widths = {}, [PHONE, DESK]
    for page in pages:
        name = str(page.relative_to(built))
        browser.open(page, widths[0], ready=LOADED)
        found[name, widths[0]] = wrong(browser)
        browser.resize(widths[1])
        browser.wait_for(f"innerWidth === {widths[1]}")
        found[name, widths[1]] = wrong(browser)
        widths.reverse()  # so that the next page opens in the size that the browser has
    assert {page: which for page, which in found.items() if which} == {}


def test_each_fault_is_found(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<meta name=viewport content='width=device-width'><body style='margin: 0'><article><p>one</p>"
        "<p style='margin-top: -30px'>over it</p><pre style='width: 900px'>wide</pre>"
        "<img src='data:,' width=9 height=9>"
        "<div class='picture'><svg role='img' width=50 height=20 viewBox='0 0 500 200'><text y=20>small</text></svg>"
        "</div></article><div class='sidebar-drawer'>menu</div>"
        "<div class='main'><div class='content' style='margin-top: -10px'>text</div></div>"
    )
    browser.open(page, PHONE, ready=LOADED)
    assert set(wrong(browser)) == {
        "wider than the screen",
        "out of the screen",
        "over another",
        "columns over each other",
        "no alternative text",
        "too small to read",
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_can_be_seen_by_day_and_by_night(browser: Browser, built: Path, theme: str) -> None:
    """Text of drawings has the contrast that WCAG 2.2 asks of graphics, 3; photographs are those of the theme."""
    seen = 0
    for page in sorted(built.rglob("*.html")):
        html = page.read_text()
        if 'class="picture"' not in html and "only-dark" not in html:
            continue
        browser.open(page, DESK, theme=theme, ready=LOADED)
        paper = browser.run("getComputedStyle(document.body).backgroundColor")
        for colour in set(browser.driver.execute_script(COLOURS)):
            assert contrast_ratio(colour, paper) >= 3, (page.name, colour)
            seen += 1
        shown = "[...document.querySelectorAll('article img')].filter(i => i.offsetWidth).map(i => i.src)"
        photographs = [Path(source).stem for source in browser.run(shown)]
        assert [name for name in photographs if re.search("-(light|dark)$", name) and not name.endswith(theme)] == []
        seen += len(photographs)
    assert seen > 10
