"""The page about what precisions do to a model, in a real Chromium."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from selenium.webdriver.common.by import By
from tests.browser import contrast_ratio
from tests.report.test_report import Page
from tests.report.test_report_browser import EVIL, Browser, contrast
from torch import nn

import castwise
from castwise import policies
from castwise._number_text import percent
from castwise.comparison import Drift, Errors, ModuleDrift, PolicyDrift, Summary
from castwise.comparison._drift_map import HeatMap, heat_map
from castwise.tuning import Tuned

LAYERS = 120
# Look, colour and ground of each kind of cell of a heat map.
LOOKS = """Object.values(Object.fromEntries([...document.querySelectorAll('.heat td span')].map(cell => {
    const style = getComputedStyle(cell), look = cell.className.split(' ').pop();
    return [look, [look, style.color, style.backgroundColor]];
}))).filter(([look, , ground]) => !ground.endsWith(', 0)'))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


def batches(count: int = 1) -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(count)]


def test_the_title_says_which_policies_fail(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias.add_(1e5)
    few = [(torch.randn(8, 8), torch.randint(4, (8,)))]
    for chosen, title, reason in (
        (["fp16"], "fp16 fails", r"Its loss is nan: 0 \(Linear\) produces non-finite values from finite inputs\."),
        (["fp16", "bf16"], r"bf16 changes the loss by [\d.e+-]+ of [\d.e+-]+; fp16 fails", ""),
        (["fp16", "other"], "fp16 and other fail", r"fp16: its loss is nan: 0 \(Linear\) produces"),
    ):
        both = {"bf16": policies.bf16, "fp16": policies.fp16, "other": policies.fp16}
        given = {name: both[name] for name in chosen}
        page = castwise.compare(model, few, given, loss=F.cross_entropy).report(tmp_path / "drift.html")
        assert re.search(f"(?m)^castwise: {title}$", Page(page).text)
        assert re.search(reason, Page(page).text)


@pytest.fixture(scope="module")
def drift() -> Drift:
    """Of 120 layers, one of which overflows in fp16, and one of which has a name that is markup."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS // 2)))
    blocks.add_module(EVIL.replace(".", ""), nn.Linear(8, 8))
    model = nn.Sequential(blocks, nn.Linear(8, 4))
    with torch.no_grad():
        blocks[7][0].bias.add_(1e5)
    both = {"bf16": policies.bf16, "fp16": policies.fp16}
    return castwise.compare(model, batches(), both, loss=F.cross_entropy, vary="batch_size")


@pytest.fixture(scope="module")
def page(drift: Drift, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drift.report(tmp_path_factory.mktemp("drift") / "drift.html")


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    return castwise.tune(model, batches(4), loss=F.cross_entropy, formats=("bfloat16", "float32"), tolerance=2e-4)


def bars(browser: Browser, trace: int = 0) -> list[Any]:
    found: list[Any] = browser.run(f"document.getElementById('bars').data[{trace}].x")
    return found


def choose(browser: Browser, control: str, value: str) -> None:
    script = f"""
        const field = document.getElementById('bars-controls').elements.{control};
        field.value = {value!r};
        field.dispatchEvent(new Event('input', {{bubbles: true}}));
        field.dispatchEvent(new Event('change', {{bubbles: true}}));
    """
    browser.driver.execute_script(script)


def test_the_largest_effects_are_drawn_and_all_on_request(browser: Browser, page: Path, drift: Drift) -> None:
    browser.open(page)
    shown = "[...document.querySelectorAll('.heat tbody tr')].filter(row => row.getClientRects().length)"
    names = f"{shown}.map(row => row.dataset.name)"
    assert len(browser.run(names)) == 24
    assert browser.run("document.querySelector('.heat tbody tr .of-introduced.heat-bad').innerText") == "✕ inf"
    assert browser.run(f"{shown}.some(row => row.innerText.includes('inf') && row.dataset.name === '0.7.0')")
    by_error = browser.run(names)
    browser.driver.execute_script("document.querySelector('#heat-controls [value=shift]').click()")
    assert browser.run("document.querySelector('.heat .of-introduced').getClientRects().length") == 0
    assert browser.run(names)[0] == drift["fp16"].modules[0].name
    assert browser.run(names) != by_error
    browser.driver.execute_script("document.querySelector('#heat-controls [name=all]').click()")
    assert len(browser.run(names)) == len(drift["bf16"].modules)
    browser.enter("#heat-controls [name=search]", "0.7.")
    assert sorted(browser.run(names)) == ["0.7.0", "0.7.1"]
    assert len(bars(browser)) == len(bars(browser, 1)) == 40
    assert browser.run("document.getElementById('bars').layout.xaxis.type") == "log"
    assert browser.run("document.querySelectorAll('#bars .barlayer .point').length") > 40
    assert "40 of" in browser.driver.find_element(By.ID, "bars-caption").text
    browser.driver.execute_script("document.querySelector('#bars-controls [name=all]').click()")
    browser.wait_for(f"document.getElementById('bars').data[0].x.length > {LAYERS}")
    assert browser.run("document.getElementById('bars').clientHeight") > 26 * LAYERS
    labels = browser.run("document.getElementById('bars').layout.yaxis.ticktext")
    places = [labels.index(f"0.{place}.0") for place in (0, 7, 50)]
    assert places == sorted(places)


def test_names_are_filtered_and_policies_picked(browser: Browser, page: Path) -> None:
    browser.open(page)
    choose(browser, "search", "0.7.")
    browser.wait_for("document.getElementById('bars').data[0].x.length === 2")
    choose(browser, "policy", "fp16")
    browser.wait_for("document.getElementById('bars').data[0].customdata[0].includes('loss shift inf')")
    shown = "[...document.querySelectorAll('.effects:not([hidden])')].map((each) => each.dataset.policy)"
    assert browser.run(shown) == ["fp16"]
    of_rows = ".effects:not([hidden]) tbody tr:not([hidden]) th"
    rows = f"[...document.querySelectorAll('{of_rows}')].map((each) => each.innerText)"
    assert sorted(browser.run(rows)) == ["0.7.0", "0.7.1"]
    choose(browser, "policy", "batch_size")
    browser.wait_for(f"{shown}[0] === 'batch_size'")


def test_names_stay_text_and_nothing_is_asked_of_the_network(browser: Browser, page: Path) -> None:
    browser.open(page)
    choose(browser, "search", "img")
    browser.wait_for("document.getElementById('bars').data[0].x.length === 1")
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('main img, main .plot a').length") == 0
    outside = [url for url in browser.requests() if not url.startswith(("data:", "blob:"))]
    assert outside == [page.as_uri()]
    assert browser.logs("browser") == []


def test_text_and_plots_can_be_read_in_light_and_dark_on_screens_of_any_width(browser: Browser, page: Path) -> None:
    for width in (1400, 380):
        browser.open(page, width=width)
        assert browser.run("document.documentElement.scrollWidth") <= width
    for theme in ("light", "dark"):
        browser.open(page, theme=theme)
        for selector in ("h2", ".lead", "figcaption", "th"):
            assert contrast(browser, selector, "color") >= 4.5, selector
        for selector in ("#bars .xtick text", "#bars .ytick text", "#bars .legendtext"):
            assert contrast(browser, selector, "fill") >= 4.5, selector
        looks = browser.run(LOOKS)
        assert len(looks) >= 6
        for look, text, ground in looks:
            assert contrast_ratio(text, ground) >= 4.5, (theme, look)


def test_it_is_plain_why_a_policy_has_failed(browser: Browser, tmp_path: Path) -> None:
    class RefusesHalf(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            if output.dtype is torch.float16:
                raise ValueError("no <kernel> for Half")
            return output

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), RefusesHalf(4, 4))
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    policy = {
        "fp32": castwise.Policy("float32"),
        "fp16": policies.fp16,
        "overflow": castwise.Policy("float32", modules={"2": "float16"}),
    }
    found = castwise.compare(model, batches(), policy, loss=F.cross_entropy)
    failures = ["cannot be run: ValueError: no <kernel> for Half"]
    failures.append(f"its loss is {found['overflow'].summary.loss}: 2 (Linear) produces non-finite values")
    browser.open(found.report(tmp_path / "failed.html"))
    shown = [each.text for each in browser.driver.find_elements(By.CSS_SELECTOR, "#map .critical")]
    assert len(shown) == 2
    for text, name, failure in zip(shown, ["fp16", "overflow"], failures, strict=True):
        assert name in text
        assert failure in text
    summary = browser.driver.find_element(By.CSS_SELECTOR, "#summary tbody").text
    assert "fp16 cannot be run" in summary.splitlines()
    policies_drawn = "[...document.querySelectorAll('#bars-controls option')].map(option => option.value)"
    assert browser.run(policies_drawn) == ["fp32", "overflow"]
    assert browser.run("document.querySelector('#bars-controls select').value") == "overflow"  # fp32 has no errors
    assert browser.run("document.getElementById('bars').data[0].text").count("not finite") == 1
    assert "100% not finite" in browser.driver.find_element(By.CSS_SELECTOR, ".effects:not([hidden])").text
    heads = browser.driver.find_elements(By.CSS_SELECTOR, ".heat thead th")
    assert [head.text for head in heads] == ["Module", "fp32", "overflow fp32"]
    choose(browser, "policy", "fp32")
    browser.wait_for("document.getElementById('bars').data[0].text.join('') === '00000'")
    assert contrast(browser, "#map .critical p", "color") >= 4.5
    assert browser.logs("browser") == []


def test_the_frontier_is_a_curve_with_the_chosen_point(browser: Browser, tuned: Tuned, tmp_path: Path) -> None:
    browser.open(tuned.report(tmp_path / "tuned.html", shared_script=True))
    assert browser.run("document.documentElement.dataset.drawn") == "2"
    found = browser.run("document.getElementById('frontier-plot').data.map((each) => [each.name, each.x])")
    assert found == [
        ["policies", [point.cost for point in tuned.frontier.points]],
        ["chosen", [tuned.cost]],
    ]
    assert browser.run("document.getElementById('frontier-plot').layout.shapes[0].y0") == 2e-4
    assert "0" in browser.run("document.getElementById('frontier-plot').layout.yaxis.ticktext")  # float32's error
    chosen = "[...document.querySelectorAll('.heat td.chosen')].map(cell => cell.title.split(':')[0])"
    expected = [f"{name or '(root)'}, {format_name}" for name, format_name in tuned.formats.items()]
    assert sorted(browser.run(chosen)) == sorted(expected)
    assert browser.run("document.querySelectorAll('.heat td.chosen .of-introduced .tick').length") == len(expected)
    assert "gradient cosine" not in browser.driver.find_element(By.ID, "summary").text  # of which nothing is known
    assert "not known" not in browser.driver.find_element(By.ID, "effects").text
    text = browser.driver.find_element(By.ID, "map").text
    assert f"{tuned.cost:.3f}" in text
    assert tuned.policy._as_toml().strip() in text
    names = ", ".join(f"{name} in {format_name}" for name, format_name in tuned.policy.modules.items())
    assert names in browser.driver.find_element(By.TAG_NAME, "h1").text
    browser.driver.execute_script("document.querySelector('.copy').click()")
    browser.wait_for("document.querySelector('.copy').textContent !== 'Copy'")
    assert "within the tolerance" in text
    assert "Not tried" in browser.driver.find_element(By.ID, "notes").text
    assert browser.logs("browser") == []


def test_a_cell_says_what_a_rule_gives_a_module_and_what_it_returns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 4))
    both = {"bf16": policies.bf16, "mixed": castwise.Policy("bfloat16", modules={"1": "float32"})}
    drift = castwise.compare(model, batches(), both, loss=F.cross_entropy, gradients=False)
    map_ = heat_map(drift, {"1": "mixed"}, 1)
    assert map_ is not None
    assert map_.policies == [("bf16", "bf16"), ("mixed", "bf16")]
    assert set(map_.measures) == {"introduced", "shift"}
    cells = {row.name: row.cells for row in map_.rows}
    assert [[cell.format for cell in cells[name]] for name in ("0", "1", "2", "3")] == [
        ["returns fp32", "returns fp32"],
        ["", "fp32"],
        ["", "returns fp32"],
        ["", ""],
    ]
    assert cells["1"][0].values["introduced"].look in {"7", "8"}
    assert cells["1"][1].values["introduced"].text == "0"
    assert [cell.is_chosen for row in map_.rows for cell in row.cells].count(True) == 1
    assert cells["1"][1].is_chosen
    assert drift["bf16"]["0"].computes_in == "bfloat16"
    assert drift["bf16"]["0"].returns == "float32"


def test_the_map_of_one_policy_tells_its_modules_apart() -> None:
    """In bf16, a norm in fp32 beside errors that differ by a factor of three."""

    def module(place: int, error: float) -> ModuleDrift:
        introduced = Errors(error, 0.0, 1.0, 0.0, 0.0)
        return ModuleDrift(str(place), "Linear", place, 1, "bfloat16", None, None, introduced, None, None, None)

    def map_of(*errors_of_policies: tuple[float, ...]) -> HeatMap:
        summary = Summary(2.5, 2.5, 0.0, None, None, None, 1.0, None)
        drifts = [
            PolicyDrift(str(number), policies.bf16, summary, tuple(module(*pair) for pair in enumerate(errors)))
            for number, errors in enumerate(errors_of_policies)
        ]
        map_ = heat_map(drifts, {}, 1)
        assert map_ is not None
        return map_

    errors = 2.9e-3, 2.4e-3, 1.6e-3, 1.1e-3, 6e-8
    of_one = map_of(errors)
    looks = [row.cells[0].values["introduced"].look for row in of_one.rows]
    assert looks == ["8", "8", "6", "5", "1"]
    assert of_one.ranges["introduced"] == ("\N{LESS-THAN OR EQUAL TO} 2.9e-04", "2.9e-03")
    nearly_equal = map_of((2.9e-3, 2.8e-3, 2.7e-3))
    assert {row.cells[0].values["introduced"].look for row in nearly_equal.rows} == {"8"}
    of_two = map_of(errors, tuple(error / 8 for error in errors))
    assert [cell.values["introduced"].look for cell in of_two.rows[0].cells] == ["8", "6"]
    assert of_two.ranges["introduced"] == ("\N{LESS-THAN OR EQUAL TO} 2.9e-06", "2.9e-03")


def test_on_a_phone_three_policies_are_in_sight_and_names_stay_beside_their_numbers(
    browser: Browser, tmp_path: Path
) -> None:
    class Residual(nn.Linear):
        """Has a number and "returns fp32" in its cell."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(layer_norm_of_attention=nn.LayerNorm(8), block=Residual(8, 8)))
    compared = {"bf16": policies.bf16, "fp16": policies.fp16, "fp32": castwise.Policy("float32")}
    drift = castwise.compare(model, batches(), compared, loss=F.cross_entropy)
    browser.open(drift.report(tmp_path / "page.html"), width=400)
    assert browser.run("document.querySelector('.heat').getBoundingClientRect().right") <= 400
    name = "document.querySelector('.effects tbody th').getBoundingClientRect()"
    before = browser.run(f"{name}.left")
    browser.driver.execute_script("document.querySelector('.effects .scroll').scrollLeft = 200")
    assert browser.run(f"{name}.left") == pytest.approx(before, abs=20)
    assert browser.run(f"{name}.width") <= 160


def test_a_page_begins_with_the_result_and_gives_effects_in_units_of_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    drift = castwise.compare(model, batches(4), {"bf16": policies.bf16}, loss=F.cross_entropy)
    text = Page(drift.report(tmp_path / "page.html")).text
    bf16 = drift["bf16"]
    worst = max(bf16.modules, key=lambda module: module.loss_shift or 0.0)
    assert worst.loss_shift
    change = f"{bf16.summary.loss_error:.2g} of {bf16.summary.reference_loss:.4g}"
    assert text.count(f"bf16 changes the loss by {change}\n") == 2  # title and heading
    assert bf16.summary.gradient_errors is not None
    gradients = percent(bf16.summary.gradient_errors.relative_rms)
    loss = percent(bf16.summary.relative_loss_error)
    assert f"{loss} of the loss, gradients off by {gradients}, worst module: {worst.name}" in text
    head = text[text.rindex("The largest come first.") :]
    assert head.index("Introduced") < head.index("Carried") < head.index("Format") < head.index("Type")
    assert f"{worst.loss_shift / 2:.2e}" in text  # of one of four batches


def test_without_plotly_the_extra_is_named(drift: Drift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"a report needs jinja2: pip install 'castwise\[report\]'"):
        drift.report(tmp_path / "page.html")
