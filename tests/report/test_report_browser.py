"""The page in a real Chromium: what people see, on a desk, on a phone, at night, by keyboard, and offline.

Needs `chromium` and `chromedriver` (Debian: `apt-get install chromium chromium-driver`) and fails without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.browser import Browser, contrast_ratio
from tests.monitor import recorded
from tests.monitor.recorded import sample, step, write
from torch import nn

import castwise
from castwise.monitor import Monitor
from castwise.report import write_report

EVIL = '<img src=x onerror="window.hacked=1"><b>name</b><a href="http://example.com">x</a>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about a training that took place, with a batch that was bad."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = castwise.GradScaler("cpu", init_scale=2.0**10, growth_interval=10)
    with Monitor(model, optimizer, scaler, every=4, sinks=[folder]):
        for number in range(1, 41):
            data = torch.randn(16, 8)
            if number == 22:
                data[3, 3] = float("nan")
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = model(data).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return write_report([folder], folder / "report.html")


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("troubled")
    return write_report([recorded.troubled(folder / "run", steps=3000, layers=3)], folder / "report.html")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    runs = recorded.healthy(folder / "a", steps=1000, layers=2), recorded.troubled(folder / "b", 2000, layers=2)
    return write_report(runs, folder / "report.html")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """302 modules in 16 samples."""
    folder = tmp_path_factory.mktemp("large")
    return write_report([recorded.large(folder / "run", samples=16)], folder / "report.html")


CULPRIT = "model.decoder.layers.25.attention.o_proj"


def test_a_training_that_took_place_is_drawn(browser: Browser, trained: Path) -> None:
    browser.open(trained)
    assert browser.run("document.documentElement.dataset.drawn") == "5"
    drawn = (
        "[...document.querySelectorAll('.plot')].map(plot => [plot.id, plot.querySelectorAll('svg.main-svg').length])"
    )
    assert {name: count > 0 for name, count in browser.run(drawn)} == {
        "timeline-1": True,
        "headroom_bits-1": True,
        "flush-1": True,
        "histogram-1": True,
        "exponent_map-1": True,
    }
    traces = browser.run("document.getElementById('timeline-1').data.map(trace => [trace.name, trace.x])")
    assert ["non-finite loss (1)", [22]] in traces
    assert browser.run("document.querySelectorAll('#timeline-1 .scatterlayer path.point').length") >= 2
    lines = "[...document.querySelectorAll('#timeline-1 .trace')].map(each => each.querySelectorAll('.js-line').length)"
    assert browser.run(lines).count(2) == 2  # the loss and its average, with a gap
    assert browser.run("document.querySelectorAll('#timeline-1 .shapelayer path').length") == 1
    assert browser.run("document.querySelector('[name=format]:checked').value") == "bf16"
    in_bf16 = browser.run("document.getElementById('headroom_bits-1-caption').textContent")
    browser.driver.execute_script("document.querySelector('[value=fp16]').click()")
    browser.wait_for(f"document.getElementById('headroom_bits-1-caption').textContent !== {json.dumps(in_bf16)}")
    assert in_bf16.startswith("Lowest for bf16 gradients: 1")
    cells = browser.run("document.getElementById('headroom_bits-1').data[0].z")
    assert [len(row) for row in cells] == [13] * 3  # two Linear layers and a LayerNorm; the ReLU has no parameters
    assert all(value is None or 0 < value < 999 for row in cells for value in row)
    assert browser.run("document.querySelectorAll('#headroom_bits-1 .heatmaplayer image').length") == 1
    assert browser.run("document.querySelectorAll('#histogram-1 .barlayer .point').length") > 20
    assert "22" in browser.driver.find_element(By.ID, "skips").text


def test_nothing_is_asked_of_the_network_and_nothing_goes_wrong(browser: Browser, several: Path) -> None:
    browser.open(several)
    curves = "[...document.querySelectorAll('#losses .legendtext')].map(text => text.textContent)"
    assert browser.run(curves) == ["a", "b"]
    for field in browser.driver.find_elements(By.CSS_SELECTOR, ".controls input"):
        browser.driver.execute_script("arguments[0].click()", field)
    outside = [url for url in browser.requests() if not url.startswith(("data:", "blob:"))]
    assert outside == [several.as_uri()]
    assert browser.logs("browser") == []


# Scrolls down, and notes the order in which figures are drawn, and how many tasks had their turn before each.
ORDER = """
window.order = [];
let tasks = 0;
addEventListener("DOMContentLoaded", () => exponents.scrollIntoView({ behavior: "instant" }));
setInterval(() => { tasks += 1; }, 0);
new MutationObserver((changes) => {
  for (const { target } of changes) {
    if (!target.matches(".plot.js-plotly-plot") || order.some(([id]) => id === target.id)) continue;
    order.push([target.id, tasks]);
  }
}).observe(document, { subtree: true, attributes: true, attributeFilter: ["class"] });
"""


def test_what_is_on_the_screen_is_drawn_first_and_the_browser_answers_between_figures(
    browser: Browser, several: Path
) -> None:
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": ORDER})
    browser.open(several)
    browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    order = browser.run("order")
    names = [name for name, _ in order]
    assert names[0] == "histogram-1"
    assert len({tasks for _, tasks in order}) > len(names) / 2
    assert len(names) == browser.run("document.querySelectorAll('.plot').length")


def test_figures_come_from_a_shared_script_and_the_page_says_if_that_is_missing(
    browser: Browser, troubled: Path, tmp_path: Path
) -> None:
    page = write_report([troubled.parent / "run"], tmp_path / "report.html", shared_script=True)
    (script,) = tmp_path.glob("*.js")
    browser.open(page)
    assert browser.run("document.querySelectorAll('.plot svg.main-svg').length") >= 4
    assert [url for url in browser.requests() if not url.startswith(("data:", "blob:"))][1:] == [script.as_uri()]
    assert browser.logs("browser") == []
    script.unlink()
    browser.open(page)
    assert browser.run("document.querySelectorAll('.plot, .plot svg').length") == 0
    for section in ("timeline", "maps", "exponents"):
        text = browser.driver.find_element(By.ID, section).text
        assert f"this page loads its figures' script from {script.name}, which is not there" in text
    assert "rounds to zero" not in browser.driver.find_element(By.CSS_SELECTOR, "#maps .readout").text
    browser.enter("[data-modules] [name=search]", "head")
    assert browser.run("document.querySelector('[data-modules] output').textContent").startswith("1 of")
    browser.driver.execute_script("document.querySelector('[name=theme][value=dark]').click()")
    browser.wait_for("getComputedStyle(document.querySelector('section')).backgroundColor === 'rgb(23, 30, 38)'")


def contrast(browser: Browser, selector: str, attribute: str) -> float:
    """The contrast of a text with the panel it stands on."""
    text = browser.run(f"getComputedStyle(document.querySelector({selector!r})).{attribute}")
    panel = browser.run("getComputedStyle(document.querySelector('section')).backgroundColor")
    return contrast_ratio(text, panel)


def test_text_and_plots_can_be_read_in_light_and_when_the_system_turns_dark(browser: Browser, troubled: Path) -> None:
    """4.5 is what WCAG 2.2 asks of text."""
    browser.open(troubled)
    for theme, panel in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(23, 30, 38)")):
        color = "getComputedStyle(document.querySelector('#headroom_bits-1 .ytick text')).fill"
        before = browser.run(color)
        browser.theme(theme)
        browser.wait_for(f"'{theme}' === 'light' || {color} !== '{before}'")
        assert browser.run("getComputedStyle(document.querySelector('section')).backgroundColor") == panel
        for selector in ("h2", ".lead", "figcaption", ".evidence dt", ".warning .severity", ".note .severity", "th"):
            assert contrast(browser, selector, "color") >= 4.5, selector
        for selector in ("#timeline-1 .xtick text", "#headroom_bits-1 .ytick text", "#histogram-1 .legendtext"):
            assert contrast(browser, selector, "fill") >= 4.5, selector
    assert_the_theme_can_be_switched_where_the_system_is_dark(browser)


def assert_the_theme_can_be_switched_where_the_system_is_dark(browser: Browser) -> None:
    panel = "getComputedStyle(document.querySelector('section')).backgroundColor"
    color = "getComputedStyle(document.querySelector('#headroom_bits-1 .ytick text')).fill"
    light, dark = "rgb(255, 255, 255)", "rgb(23, 30, 38)"
    inks = {"system": browser.run(color)}
    for choice, expected in (("light", light), ("dark", dark), ("system", dark)):
        before = inks.get("system" if choice != "system" else "dark")
        browser.driver.execute_script(f"document.querySelector('[name=theme][value={choice}]').click()")
        browser.wait_for(f"{panel} === '{expected}'")
        browser.wait_for(f"({color} === '{before}') === {json.dumps(expected == dark)}")
        inks[choice] = browser.run(color)
    assert inks["light"] != inks["dark"]
    browser.theme("light")
    browser.wait_for(f"{panel} === '{light}'")


def test_no_page_is_wider_than_its_screen_and_runs_stand_side_by_side_on_wide_ones(
    browser: Browser, several: Path
) -> None:
    lefts = "[...new Set([...document.querySelectorAll('#timeline .run')].map(r => r.getBoundingClientRect().left))]"
    rights = "Math.max(...[...document.querySelectorAll('.plot svg')].map(p => p.getBoundingClientRect().right))"
    browser.open(several, width=360)
    for width, columns in ((360, 1), (768, 1), (1400, 2), (2560, 2), (360, 1)):
        browser.resize(width, 900)
        browser.wait_for(f"{rights} <= {width}")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert len(browser.run(lefts)) == columns
    browser.run(
        "document.querySelector('#timeline .runs').append(document.querySelector('#timeline .run').cloneNode())"
    )
    browser.resize(1400, 900)
    browser.wait_for(f"{lefts}.length === 3")
    browser.resize(360, 900)
    heights = browser.run("[...document.querySelectorAll('.evidence dt')].map(each => each.offsetHeight)")
    assert max(heights) == min(heights), "names of facts are in one line, also on phones"


def test_long_lines_of_code_do_not_widen_the_page(browser: Browser, tmp_path: Path) -> None:
    recorded.healthy(tmp_path, steps=20, layers=1)
    file, code = tmp_path / "monitor.jsonl.gz", "optimizer.step(" + "a, " * 60 + ")"
    mistake = {"kind": "mistake", "name": "x", "text": "wrong", "corrected": code, "file": "t.py", "line": 1}
    recorded.write_lines(file, *recorded.lines_in(file), json.dumps({**mistake, "source": code}))
    browser.open(write_report([tmp_path], tmp_path / "report.html"), width=400)
    assert browser.run("document.documentElement.scrollWidth") <= 400
    assert (
        browser.run("document.querySelector('#mistakes .copy').closest('.remedy').querySelector('pre').innerText")
        == code
    )
    browser.driver.execute_script("document.querySelector('#mistakes .copy').click()")
    browser.wait_for("document.querySelector('#mistakes .copy').textContent !== 'Copy'")


def test_all_can_be_reached_by_keyboard_in_the_order_of_the_page(browser: Browser, troubled: Path) -> None:
    browser.open(troubled)
    reached = []
    for _ in range(80):
        browser.press(Keys.TAB)
        if browser.run("document.activeElement === document.body"):
            break
        reached.append(browser.focused())
        outlined = (
            "getComputedStyle(document.activeElement.closest('label') && document.activeElement.matches('[type=radio]')"
        )
        style = f"{outlined} ? document.activeElement.nextElementSibling : document.activeElement).outlineStyle"
        assert browser.run(style) != "none", reached[-1]
    assert 'class="skip-link"' in reached[0]
    places = ["skip-link", "#verdict", 'name="theme"', "#settings", 'name="kind"', 'name="format"', 'name="search"']
    places += ['name="all"', "headroom_bits-1", "flush-1", 'name="moment"', 'name="module"', "scroll modules"]
    found = [next(i for i, each in enumerate(reached) if place in each) for place in places]
    assert found == sorted(found)
    assert reached[-1].count("Skipped steps") == 1
    assert browser.run("[...document.querySelectorAll('.plot')].every(p => p.getAttribute('aria-label'))")
    levels = browser.run("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    browser.press(Keys.TAB)
    assert 'class="skip-link"' in browser.focused()
    browser.press(Keys.ENTER)
    assert browser.focused() == "verdict"


def test_cells_are_read_out_by_arrow_keys_and_controls_choose_format_numbers_and_module(
    browser: Browser, troubled: Path
) -> None:
    browser.open(troubled)
    browser.run("document.getElementById('flush-1').focus()")
    rows = recorded.modules(3)
    browser.press(*[Keys.ARROW_DOWN] * rows.index("head"), *[Keys.ARROW_RIGHT] * 40)
    read = browser.driver.find_element(By.CSS_SELECTOR, "[data-for='flush-1']").text
    assert read.startswith("head, step 3,000: ")
    assert read.endswith("% rounds to zero")
    assert float(read.split()[3].rstrip("%")) > 20

    least = "Math.min(...document.getElementById('headroom_bits-1').data[0].z.flat().filter(v => v !== null))"
    in_fp16 = browser.run(least)
    browser.driver.find_element(By.CSS_SELECTOR, "[value='fp16']").send_keys(Keys.ARROW_RIGHT)
    browser.wait_for(f"{least} > {in_fp16} + 100")  # bf16
    browser.driver.find_element(By.CSS_SELECTOR, "[value='bf16']").send_keys(Keys.ARROW_LEFT)
    browser.driver.find_element(By.CSS_SELECTOR, "[value='gradients']").send_keys(Keys.ARROW_RIGHT)
    browser.wait_for(f"{least} < 0")  # the outputs of an attention grow too large
    caption = "document.getElementById('histogram-1-caption').textContent"
    before = browser.run(caption)
    lowest = "document.getElementById('exponent_map-1').data[0].z.findIndex(row => row.some(value => value !== null))"
    lowest_of_all = browser.run(lowest)
    for field, value in (("module", "blocks.0.norm1"), ("module", "head"), ("moment", "last")):
        if value == "head":
            assert browser.run(lowest) > lowest_of_all  # the head's gradients are the smallest
        browser.driver.find_element(By.CSS_SELECTOR, f"[name={field}] [value='{value}']").click()
    browser.wait_for(f"{caption} !== {json.dumps(before)}")
    bars = browser.run("document.getElementById('histogram-1').data.slice(0, 2).map(trace => trace.x0)")
    assert bars[1] - bars[0] == 14  # the last scale of the run is 2^14


# Two clicks in one script, because they are a double click to plotly if they are at most 500 ms apart: a busy machine
# takes longer between two events of a driver.
DOUBLE_CLICK = """
const {x, y, width, height} = arguments[0].getBoundingClientRect();
const at = {bubbles: true, clientX: x + width / 2, clientY: y + height / 2};
for (const type of ['mousedown', 'mouseup', 'mousedown', 'mouseup'])
    (type === 'mousedown' ? arguments[0] : document).dispatchEvent(new MouseEvent(type, at));
"""


def test_dragging_over_the_steps_zooms_and_links_to_sections_stay_in_sight(browser: Browser, several: Path) -> None:
    browser.open(several)
    plot = browser.driver.find_element(By.CSS_SELECTOR, "#losses .nsewdrag")
    range_ = "document.getElementById('losses').layout.xaxis.range"
    whole = browser.run(range_)
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    drag = ActionChains(browser.driver).move_to_element_with_offset(plot, -100, 0).click_and_hold()
    drag.move_by_offset(150, 5).release().perform()
    browser.wait_for(f"{range_}[0] > {whole[0]} + 100")
    browser.driver.execute_script("document.querySelector('[value=dark]').click()")
    browser.wait_for("getComputedStyle(document.body).backgroundColor !== 'rgb(246, 247, 249)'")
    zoomed = browser.run(range_)
    assert 0 < zoomed[1] - zoomed[0] < (whole[1] - whole[0]) / 2, "also after a change of the theme"
    browser.driver.execute_script(DOUBLE_CLICK, browser.driver.find_element(By.CSS_SELECTOR, "#losses .nsewdrag"))
    browser.wait_for(f"{range_}[0] < {whole[0]} + 1")
    browser.driver.execute_script("document.getElementById('settings').scrollIntoView({behavior: 'instant'})")
    assert browser.run("document.querySelector('nav').getBoundingClientRect().top") == 0
    below = (
        "document.getElementById('settings').getBoundingClientRect().top >= document.querySelector('nav').offsetHeight"
    )
    assert browser.run(below)
    assert browser.logs("browser") == []


def test_a_legend_of_many_rows_takes_no_room_from_the_plots(browser: Browser, tmp_path: Path) -> None:
    causes = ("overflow", "non-finite loss", "non-finite weights", "another rank", "unknown", "non-finite gradients")
    steps = [step(i, 2.0**12, dict(enumerate(causes, 5)).get(i), loss=3 / i) for i in range(1, 99)]
    page = write_report([write(tmp_path / "run", *steps)], tmp_path / "report.html")
    heights = []
    for width in (1400, 400):
        browser.open(page, width=width)
        legend, title = (
            browser.run(f"document.querySelector('#timeline-1 {part}').getBoundingClientRect().toJSON()")
            for part in (".legend .bg", ".annotation-text")
        )
        assert legend["bottom"] <= title["top"] + 1, width
        assert legend["top"] >= browser.run("document.getElementById('timeline-1').getBoundingClientRect().top"), width
        heights.append(
            browser.run(
                "document.querySelector('#timeline-1 .plot .gridlayer, #timeline-1 .bglayer')"
                ".getBoundingClientRect().height"
            )
        )
    assert heights[1] >= 0.95 * heights[0]


# Texts of one axis whose boxes share more than a pixel.
OVERLAPS = """[...document.querySelectorAll('.plot')].flatMap(plot => ['x', 'y', 'y2', 'y3', 'y4'].flatMap(axis => {
    const boxes = [...plot.querySelectorAll(`.${axis}tick text`)].map(text => text.getBoundingClientRect());
    return boxes.flatMap((one, at) => boxes.slice(at + 1).filter(other =>
        one.left + 1 < other.right && other.left + 1 < one.right && one.top + 1 < other.bottom &&
        other.top + 1 < one.bottom).map(() => plot.id + axis));
}))"""


def test_302_modules_fit_a_narrow_page_and_labels_stand_apart(browser: Browser, large: Path) -> None:
    width = 400
    browser.open(large, width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OVERLAPS) == []
    browser.driver.execute_script("document.querySelector('[name=all]').click()")
    browser.wait_for("document.getElementById('flush-1').data[0].z.length === 302")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OVERLAPS) == []


def test_every_module_is_found_by_a_part_of_its_name(browser: Browser, large: Path) -> None:
    browser.open(large)
    assert browser.run("document.documentElement.scrollWidth") <= 1400
    assert browser.run(OVERLAPS) == []
    assert browser.run("document.getElementById('flush-1').names.length") == 24
    assert browser.run("document.querySelector('[data-rows]').textContent").startswith("24 of 302 modules")
    browser.enter("[data-controls*=flush] [name=search]", "Layers.49.")
    browser.wait_for("document.getElementById('flush-1').names.length === 6")
    labels = browser.run("[...document.querySelectorAll('#flush-1 .ytick text')].map(label => label.textContent)")
    assert labels[0] == "model.d….49.attention.q_proj"
    browser.run("document.getElementById('flush-1').focus()")
    browser.press(Keys.ARROW_DOWN)
    read = browser.driver.find_element(By.CSS_SELECTOR, "[data-for='flush-1']").text
    assert read.startswith("model.decoder.layers.49.attention.k_proj, step 1: ")
    hovered = browser.run("document.querySelector('#flush-1 .hoverlayer').textContent")
    assert hovered.startswith("model.decoder.layers.49.attention.k_proj")

    browser.enter("[data-modules] [name=search]", "layers.31.attention.gate")
    shown = "[...document.querySelectorAll('.modules tbody tr')].filter(row => !row.hidden).map(row => row.innerText)"
    found = browser.run(shown)
    assert [row.split()[0] for row in found] == ["model.decoder.layers.31.attention.gate"]
    assert browser.run("document.querySelector('[data-modules] output').textContent") == "1 of 302"


def test_what_a_diagnosis_names_comes_first_and_its_remedy_is_copied(browser: Browser, large: Path) -> None:
    browser.open(large)
    first = browser.driver.find_element(By.CSS_SELECTOR, ".modules tbody tr")
    assert first.get_attribute("class") == "diagnosed"
    assert first.text.startswith(CULPRIT)
    assert "diagnosed" in first.text
    labels = browser.run("[...document.querySelectorAll('#flush-1 .ytick text')].map(label => label.textContent)")
    assert [label for label in labels if label.startswith("▸")] == ["▸ model.d….25.attention.o_proj"]

    browser.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    box = browser.driver.find_element(By.CSS_SELECTOR, ".diagnosis")
    assert f"aten.bmm in {CULPRIT} gives inf." in box.text
    assert "input 0: -1 .. 1" not in box.text
    box.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert "input 0: -1 .. 1" in box.text
    box.find_element(By.CLASS_NAME, "copy").send_keys(Keys.ENTER)
    browser.wait_for("document.querySelector('.copy').textContent === 'Copied'")
    search = browser.driver.find_element(By.CSS_SELECTOR, "[data-modules] [name=search]")
    search.send_keys(Keys.CONTROL, "v")
    assert search.get_attribute("value") == (
        f'policy = castwise.Policy(compute="float16", modules={{"{CULPRIT}": "float32"}})'
    )
    browser.enter("[data-modules] [name=search]", "")
    assert_a_column_is_sorted_by_a_click_and_turned_by_another(browser)


def assert_a_column_is_sorted_by_a_click_and_turned_by_another(browser: Browser) -> None:
    heads = browser.driver.find_elements(By.CSS_SELECTOR, ".modules thead button")
    column = "[...document.querySelectorAll('.modules tbody tr')].map(row => row.cells[{}].dataset.value)"
    for place, kind in ((1, float), (0, str)):
        for sort, turned in (("ascending", False), ("descending", True)):
            browser.driver.execute_script("arguments[0].click()", heads[place])
            values = [kind(value) for value in browser.run(column.format(place))]
            assert len(values) == 302
            if kind is float:
                assert values == sorted(values, reverse=turned)
            else:
                assert (
                    values.index("model.decoder.layers.9.attention.up")
                    < values.index("model.decoder.layers.10.attention.up")
                    or turned
                )
            assert browser.run(f"document.querySelectorAll('.modules th')[{place}].ariaSort") == sort


def test_names_stay_text_in_the_page_and_in_plots(browser: Browser, tmp_path: Path) -> None:
    records = [step(i, 2.0**14, EVIL if i == 3 else None) for i in range(1, 9)]
    run = write(tmp_path / "run", *records, *(sample(i, 2.0**14, {EVIL: -16.0}, {EVIL: 15.0}) for i in range(1, 5)))
    page = write_report([run], tmp_path / "report.html")
    browser.open(page, theme="dark")
    assert browser.run("getComputedStyle(document.querySelector('section')).backgroundColor") == "rgb(23, 30, 38)"
    browser.run("document.getElementById('flush-1').focus()")
    browser.press(Keys.ARROW_DOWN)
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.querySelectorAll('img, a[href^=http], svg a').length") == 0
    assert EVIL in browser.driver.find_element(By.CSS_SELECTOR, "[data-for='flush-1']").text
    assert browser.driver.find_element(By.CSS_SELECTOR, "#flush-1 .ytick text").text.endswith(EVIL[-20:])
    assert browser.run("document.querySelector('.modules tbody th').title") == EVIL
    assert browser.logs("browser") == []


def test_an_empty_run_is_a_page_without_plots_that_fail(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_report([write(tmp_path)], tmp_path / "report.html"))
    assert browser.logs("browser") == []
    assert "Too little was recorded" in browser.driver.find_element(By.ID, "verdict").text


def test_a_map_without_a_fault_is_one_row_until_all_are_asked_for(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_report([recorded.healthy(tmp_path, steps=200, layers=1)], tmp_path / "report.html"))
    rows = "document.getElementById('{}-1').data[0].z.length"
    assert browser.run(rows.format("flush")) == 1
    assert browser.run(rows.format("headroom_bits")) == 9, "some have under 12 bits"
    assert "None of these 9 modules ever leaves" in browser.driver.find_element(By.ID, "flush-1-caption").text
    browser.run("document.getElementById('flush-1').focus()")
    browser.press(Keys.ARROW_DOWN)
    read = browser.driver.find_element(By.CSS_SELECTOR, "[data-for='flush-1']").text
    assert read == "worst of 9, step 100: 0% rounds to zero"
    browser.driver.execute_script("document.querySelector('[name=all]').click()")
    browser.wait_for(f"{rows.format('flush')} === 9")
    assert browser.run("document.querySelector('[data-rows]').textContent") == "All 9 modules."
    assert browser.logs("browser") == []
