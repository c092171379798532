"""The page as text: what is in it, what cannot be in it, and how large it gets. `test_report_browser.py` opens it."""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs
from tests.monitor import recorded
from tests.monitor.recorded import sample, step, write

from castwise.monitor import Run
from castwise.monitor._records import NormsRecord, SampleRecord, StepRecord
from castwise.report import _page as pages
from castwise.report import write_report
from castwise.report._downsampling import changes, extremes, in_buckets
from castwise.report._figures.exponent_map import exponent_map
from castwise.report._figures.losses import LossCurve, moving_average
from castwise.report._figures.maps import FLUSH, HEADROOM, MAX_COLUMNS, heat_map
from castwise.report._figures.norm_map import norm_map
from castwise.report._figures.timeline import MAX_MARKS, marks, timeline
from castwise.report._html_report import RunView, labels, short_names
from castwise.report._plotly_script import without_unused
from castwise.report._run_facts import RunFacts, Skips
from castwise.report._worst_modules import worst_modules

EVIL = '</script><img src=x onerror="hacked=1"><script>hacked=1</script>&lt;b&gt;'


class Page(HTMLParser):
    """Tags with their attributes, and the texts of scripts and of everything else."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif not self._open or self._open[-1] != "style":
            self.text += data

    @property
    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads(unpacked(self.scripts[0]))
        return figures

    @property
    def has_one_plotly(self) -> bool:
        """Whether the page has plotly.js once, packed."""
        figures, plotly, *others = self.scripts
        return "plotly.js v" in unpacked(plotly) and not any("plotly.js v" in script for script in (figures, *others))


def unpacked(script: str) -> str:
    return gzip.decompress(base64.b64decode(script)).decode()


def page_of(tmp_path: Path, *runs: Path | Run) -> Page:
    return Page(write_report(runs, tmp_path / "page.html"))


def without_variables(value: Any) -> Any:
    """Colours that the page's script would have put in."""
    if isinstance(value, str):
        return "#123456" if value.startswith("--") else value
    if isinstance(value, list):
        return [without_variables(each) for each in value]
    return {key: without_variables(each) for key, each in value.items()} if isinstance(value, dict) else value


def test_one_file_holds_all_and_asks_for_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path, recorded.troubled(tmp_path / "run", steps=2000, layers=2))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
    assert page.has_one_plotly
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert not (attributes.get("href") or "#").startswith(("http", "//")), tag
    policy = next(each["content"] for tag, each in page.tags if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert policy.count("'sha256-") == 2


def test_pages_share_a_script_that_is_written_once_and_never_over_another_file(tmp_path: Path) -> None:
    run = recorded.troubled(tmp_path / "run", steps=200, layers=1)
    for folder in ("pages", "other"):
        (tmp_path / folder).mkdir()
    page = Page(write_report([run], tmp_path / "pages" / "1.html", shared_script=True))
    (script,) = (tmp_path / "pages").glob("*.js")
    assert re.fullmatch(r"castwise-plotly-\d+\.\d+\.\d+\.js", script.name)
    assert "plotly.js v" in script.read_text()
    assert script.stat().st_size < 1.5e6
    assert (tmp_path / "pages" / "1.html").stat().st_size < 1e5
    nonces = [attributes["nonce"] for tag, attributes in page.tags if attributes.get("data-url") == script.name]
    policy = next(each["content"] for tag, each in page.tags if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert re.fullmatch(rf"default-src 'none'; .*script-src 'nonce-{nonces[0]}' 'sha256-\S+' ", policy)

    before = script.stat().st_mtime_ns
    write_report([run], tmp_path / "other" / "2.html", shared_script=tmp_path / "pages")
    assert 'data-url="../pages/' in (tmp_path / "other" / "2.html").read_text()
    assert script.stat().st_mtime_ns == before
    script.write_text(script.read_text()[:-9])  # of a disk that was full
    write_report([run], tmp_path / "pages" / "1.html", shared_script=True)
    assert script.read_text().endswith("}));")
    script.write_text("mine")
    with pytest.raises(FileExistsError, match="not a script that castwise has written"):
        write_report([run], tmp_path / "pages" / "3.html", shared_script=True)
    assert script.read_text() == "mine"
    assert not (tmp_path / "pages" / "3.html").exists()


def test_of_plotly_only_what_pages_use_is_in_them() -> None:
    """The browser draws all figures with it; see `test_report_browser.py`."""
    whole = str(get_plotlyjs())
    known = json.loads(pages.template("plotly_cuts.json"))
    used = without_unused(whole, known)
    assert used == pages.load_plotly()
    assert len(used) < len(whole) / 3, "run tests/report/plotly_cuts.mjs for this version of plotly"
    assert 'moduleType:"trace",name:"heatmap"' in used
    assert 'moduleType:"trace",name:"scatter3d"' not in used
    assert without_unused(f"{whole} ", known) == f"{whole} ", "of another library, nothing is left out"


def test_every_figure_is_one_that_plotly_knows_in_each_of_its_choices(tmp_path: Path) -> None:
    figures = page_of(tmp_path, recorded.troubled(tmp_path / "run", steps=2000, layers=1)).figures
    assert set(figures) == {"timeline-1", "headroom_bits-1", "flush-1", "histogram-1", "exponent_map-1"}
    for figure in figures.values():
        for choice in [{}, *list(figure.get("choices", {}).values())[:9]]:
            patches = choice.get("data", []) + [{}] * len(figure["data"])
            data = [{**trace, **patch} for trace, patch in zip(figure["data"], patches, strict=False)]
            layout = {**figure["layout"], **choice.get("layout", {})}
            go.Figure(data=without_variables(data), layout=without_variables(layout))  # raises on what it cannot draw


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    records = [step(i, 2.0**14, "overflow" if i == 3 else None, parameters=[f"{EVIL}.weight"]) for i in range(1, 9)]
    run = write(
        tmp_path / "<b>run<script>",
        *records,
        *(sample(i, 2.0**14, {EVIL: -16.0}, {EVIL: 15.0}) for i in range(1, 5)),
        {"kind": "mistake", "line": 1, **dict.fromkeys(("name", "text", "corrected", "file", "source"), EVIL)},
        {"kind": "diagnosis", "step": 3, **dict.fromkeys(("cause", "phase", "module", "op", "text", "advice"), EVIL)},
        **{EVIL: EVIL},
    )
    page = page_of(tmp_path, run)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 3
    assert "img" not in tags
    assert page.text.count(EVIL) >= 14
    assert page.figures["flush-1"]["names"]["outputs"] == [EVIL]  # as it is: the page's script escapes it for plotly


def test_mistakes_lead_where_the_verdict_has_only_notes(tmp_path: Path) -> None:
    mistake = {
        "kind": "mistake",
        "line": 1,
        "file": "t.py",
        **dict.fromkeys(("name", "text", "corrected", "source"), "x"),
    }
    for name, first, second in (("healthy", "mistakes", "verdict"), ("troubled", "verdict", "mistakes")):
        getattr(recorded, name)(tmp_path / name, steps=400, layers=1)
        file = tmp_path / name / "monitor.jsonl.gz"
        recorded.write_lines(file, *recorded.lines_in(file), json.dumps(mistake))
        page = page_of(tmp_path, tmp_path / name)
        sections = [attributes.get("id") for tag, attributes in page.tags if tag == "section"]
        assert sections[:2] == [first, second]
        links = [attributes.get("href") for tag, attributes in page.tags if tag == "a" and "class" not in attributes]
        assert links[:2] == [f"#{first}", f"#{second}"]


def test_an_edit_that_corrects_two_mistakes_is_offered_once(tmp_path: Path) -> None:
    edits = [
        "# moved from line 9 to before line 4:\nf()\n# or g()",
        "# moved from line 9 to before line 4:\nf()",
        "h()",
        "h()",
        "log what backward is called on",
    ]
    recorded.healthy(tmp_path / "run", steps=20, layers=1)
    file = tmp_path / "run" / "monitor.jsonl.gz"
    common = {"kind": "mistake", "file": "t.py", **dict.fromkeys(("name", "text", "source"), "x")}
    mistakes = [json.dumps({**common, "line": line, "corrected": edit}) for line, edit in enumerate(edits, 5)]
    recorded.write_lines(file, *recorded.lines_in(file), *mistakes)
    page = page_of(tmp_path, tmp_path / "run")
    assert page.text.count("The edit for line 5 corrects this too.") == 1
    assert [attributes.get("aria-label") for _, attributes in page.tags].count("Corrected code") == 3
    assert "Remedy: Log what backward is called on." in page.text


@pytest.mark.parametrize(
    ("known", "title"),
    [
        ({"loss": 2.0}, "Loss"),
        ({"loss": 2.0, "scale": 2.0}, "Loss and scale"),
        ({}, "Gradient norm"),
        ({"grad_norm": None}, "Loss"),  # with a sentence that there is none
        ({"loss": "nan"}, "Loss"),
    ],
)
def test_the_title_of_the_timeline_is_what_it_draws(known: dict[str, Any], title: str, tmp_path: Path) -> None:
    records = [{**step(number, None), "loss": None, **known} for number in range(1, 9)]
    assert f"\n{title}\n" in page_of(tmp_path, write(tmp_path / "run", *records)).text.replace("  ", "")


def test_the_map_holds_what_was_recorded(tmp_path: Path) -> None:
    run = Run.read(recorded.troubled(tmp_path, steps=1500, layers=1))
    modules = list(run.samples[0].modules)
    for measure in (HEADROOM, FLUSH):
        figure = heat_map(measure, RunFacts(run), {"gradients": modules, "outputs": modules})
        for kind, key in (("gradients", "modules"), ("outputs", "activations")):
            for name in ("fp16", "bf16", "e4m3", "e5m2"):
                cells = figure["choices"][f"{kind}/{name}"]["data"][0]["z"]
                for row, module in enumerate(modules):
                    for column, each in enumerate(run.samples):
                        stats = getattr(each, key)[module]
                        expected = None if stats.nonfinite else getattr(stats.formats[name], measure.key)
                        assert cells[row][column] == (expected and pytest.approx(expected, rel=6e-3))


def test_a_map_of_many_samples_keeps_the_worst_of_each_column(tmp_path: Path) -> None:
    calm = [sample(i, 2.0**14, {"a": -16.0}, {}) for i in range(1, 1001)]
    calm[123] = sample(124, 2.0**14, {"a": 2.0}, {})
    calm[777] = sample(778, 2.0**14, {"a": -50.0}, {})
    choice, rows = "gradients/fp16", {"gradients": ["a"], "outputs": []}
    facts = RunFacts(Run(Path(), samples=[*map(SampleRecord.from_json, calm)]))
    headroom = heat_map(HEADROOM, facts, rows)["choices"][choice]["data"]
    flush = heat_map(FLUSH, facts, rows)["choices"][choice]["data"]
    assert len(headroom[0]["x"]) == MAX_COLUMNS
    assert min(headroom[0]["z"][0]) < 0
    assert max(flush[0]["z"][0]) > 0.9
    assert len(headroom[1]["x"]) == len(flush[1]["x"]) == 1  # marked, not only coloured


def test_exponents_over_the_steps_are_those_of_the_samples_at_their_scales(tmp_path: Path) -> None:
    run = Run.read(recorded.troubled(tmp_path, steps=3000, layers=1))
    figure = exponent_map(run.samples, ["head"], in_fp16=True)
    assert figure is not None
    lowest = figure["data"][0]["y0"] - 0.5
    last = run.samples[-1]
    shift = math.log2(last.scale)
    for choice, modules in (("head", ["head"]), ("*", list(last.modules))):
        rows = figure["choices"][choice]["data"][0]["z"]
        drawn = {lowest + row: values[-1] for row, values in enumerate(rows) if values[-1] is not None}
        counts = Counter[float]()
        for name in modules:
            counts.update({exponent + shift: count for exponent, count in last.modules[name].exponents.items()})
        elements = sum(last.modules[name].numel for name in modules)
        assert drawn == {exponent: max(round(math.log2(count / elements)), -16) for exponent, count in counts.items()}
    many = [replace(last, step=step) for step in range(1000)]
    assert len((exponent_map(many, [], in_fp16=True) or {})["data"][0]["x"]) == 60
    assert exponent_map(many[:1], ["head"], in_fp16=True) is None


def test_norms_around_spikes_are_drawn_after_the_loss_and_above_their_median_before(tmp_path: Path) -> None:
    name = "<b>a</b>.weight"
    first = NormsRecord(50, (-2, -1, 0, 1), {name: (1.0, 1.0, 8.0, math.inf), "b": (2.0, 2.0, 2.0, 1.0)})
    second = NormsRecord(90, (-1, 0), {"c": (1.0, 4.0), name: (1.0, 2.0)})
    page = page_of(tmp_path, Run(tmp_path, steps=[StepRecord(step=50, skipped=False, loss=2.0)], norms=[first, second]))
    assert list(page.figures)[:2] == ["timeline-1", "norms-1"]
    figure = page.figures["norms-1"]
    (cells,) = figure["data"]
    assert figure["rows"] == [name, "c", "b"]
    assert cells["y"] == ["&lt;b&gt;a&lt;/b&gt;.weight", "c", "b"]
    assert cells["text"][0] == ["48", "49", "50", "51", " ", "89", "90"]
    assert cells["z"] == [
        [0.0, 0.0, 3.0, None, None, 0.0, 1.0],
        [None, None, None, None, None, 0.0, 2.0],
        [0.0, 0.0, 0.0, -1.0, None, None, None],
    ]
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [1.5, 5.5]
    assert "Around the spike at step 50, the gradient of <b>a</b>.weight rose most: to 23 times its median" in page.text
    assert norm_map([]) is None


def test_every_skip_is_in_one_mark() -> None:
    few = Skips("overflow", [3, 77, 1500], [])
    assert marks(few) == [(3, "step 3"), (77, "step 77"), (1500, "step 1,500")]
    many = marks(Skips("overflow", range(1, 100_001), []))
    assert len(many) == MAX_MARKS
    assert sum(int(text.split()[0]) for _, text in many) == 100_000
    assert many[0][1] == "66 skips in steps 1 to 66"


def test_skips_are_marked_by_cause_in_colour_and_shape(tmp_path: Path) -> None:
    causes = ["overflow", "non-finite loss", "non-finite weights", "another rank", "unknown"]
    records = [step(i, 2.0**10, causes[i] if i < 5 else None, loss=5.0) for i in range(10)]
    figure = timeline(RunFacts(Run(tmp_path, steps=[*map(StepRecord.from_json, records)])))
    strips = [trace for trace in figure["data"] if trace["yaxis"] == "y"]
    assert [(trace["name"], trace["x"]) for trace in strips] == [
        (f"{cause} (1)", [i]) for i, cause in enumerate(causes)
    ]
    for look in ("color", "symbol"):
        assert len({trace["marker"][look] for trace in strips}) == 5
    taken = [*records, step(10, 2.0**10, "non-finite loss", skipped=False)]
    figure = timeline(RunFacts(Run(tmp_path, steps=[*map(StepRecord.from_json, taken)])))
    assert ("taken, non-finite loss (1)", [10]) in [(trace["name"], trace["x"]) for trace in figure["data"]]


@pytest.mark.parametrize("first", [0, 1, 5000])
def test_the_axis_of_steps_begins_where_the_run_does(first: int, tmp_path: Path) -> None:
    steps = [StepRecord.from_json(step(first + i, 2.0**10)) for i in range(101)]
    figure = timeline(RunFacts(Run(tmp_path, steps=steps)))
    begin, end = figure["layout"]["xaxis"]["range"]
    assert first - 2 < begin < first < first + 100 < end < first + 102


def test_a_loss_has_a_strong_average_and_a_gap_where_it_was_not_finite(tmp_path: Path) -> None:
    losses = [4.0 + (i % 7) / 7 for i in range(1000)]
    for bad in (*range(100, 104), 500):
        losses[bad] = math.nan if bad < 500 else math.inf
    records = [step(i, None, loss=recorded.spelled(loss)) for i, loss in enumerate(losses)]
    facts = RunFacts(Run(tmp_path, steps=[*map(StepRecord.from_json, records)]))
    curve = LossCurve.of(facts)
    assert curve is not None
    assert [(gap.first, gap.last, gap.word) for gap in curve.gaps] == [(100, 103, "NaN"), (500, 500, "inf")]
    weights = [(1 - 1 / curve.averaged) ** age for age in range(995)]
    finite = [loss for loss in losses if math.isfinite(loss)]
    expected = sum(map(math.prod, zip(weights, reversed(finite), strict=True))) / sum(weights)
    assert (curve.averaged, curve.last) == (19, pytest.approx(expected))

    figure = timeline(facts)
    assert figure is not None
    each, average = (trace for trace in figure["data"] if trace["name"].startswith("loss, "))
    for trace in (each, average):
        assert [x for x, y in zip(trace["x"], trace["y"], strict=True) if y is None] == [100, 500]
        assert trace["x"] == sorted(trace["x"])
    assert each["opacity"] < 1 < each["line"]["width"] + 0.5 < average["line"]["width"]
    assert [(shape["x0"], shape["x1"]) for shape in figure["layout"]["shapes"]] == [(99.5, 103.5), (499.5, 500.5)]
    heights = {name: axis["domain"] for name, axis in figure["layout"].items() if name.startswith("yaxis")}
    assert max(heights, key=lambda name: heights[name][1] - heights[name][0]) == "yaxis3"  # the loss
    caption = RunView.of("run", 1, facts.run, []).timeline_caption()
    assert "The loss has 2 gaps; in the first, it is NaN in steps 100 to 103." in caption
    assert "exponential moving averages over about 19 steps" in caption


def test_losses_of_several_runs_are_in_one_plot_and_the_caption_says_where_they_ended(tmp_path: Path) -> None:
    lost = [step(i, None, loss=2.0 if i < 40 else "nan", seconds=0.012) for i in range(1, 61)]
    runs = [
        recorded.healthy(tmp_path / "a", steps=600, layers=1),
        write(tmp_path / "b<i>", *lost, lr=0.5, model="ViT"),
        write(tmp_path / "c", step(1, None, loss=None)),
    ]
    page = page_of(tmp_path, *runs)
    losses = page.figures["losses"]
    assert [trace["name"] for trace in losses["data"] if trace["showlegend"]] == ["a", "b&lt;i&gt;"]
    strong = [trace["line"]["color"] for trace in losses["data"] if trace["showlegend"]]
    assert len(set(strong)) == 2
    (cross,) = (trace for trace in losses["data"] if trace["mode"] == "markers")
    assert (cross["x"], cross["text"]) == ([39], ["NaN in steps 40 to 60"])
    go.Figure(data=without_variables(losses["data"]), layout=without_variables(losses["layout"]))
    assert "At the end: a 7." in page.text
    assert "b<i> NaN from step 40 on." in page.text
    assert re.search(r"ViT, AdamW, .*, 60 steps, lr 0\.5", page.text)
    differing = [attributes for _, attributes in page.tags if "differs" in (attributes.get("class") or "")]
    assert len(differing) == 4  # the model of each, and the lr of one
    titles = [note["text"] for note in page.figures["timeline-1"]["layout"]["annotations"]]
    assert titles == ["<b>skips</b>", "<b>scale</b>", "<b>gradient norm</b>"], "no second plot of the loss"
    assert page.text.count("Faint lines are the losses") == 1
    text = " ".join(page.text.split())
    assert "Run Steps Skipped Loss at the end Seconds a step a 600 2 7.102 0.01 b<i>" in text
    assert "b<i> 60 (-540) 0 (-2) NaN 0.012 (+20%) c 1 (-599) 0 (-2) 0.01 a Steps" in text
    found = {"kind": "invariant", "step": 1, "name": "never-updated", "text": "w stays.", "remedy": "Look at it."}
    only_loss = step(1, None, loss=2.0, grad_norm=None)
    other = page_of(tmp_path, write(tmp_path / "d", only_loss, found), write(tmp_path / "e", only_loss))
    assert [(trace["name"], trace["y"]) for trace in other.figures["timeline-1"]["data"]] == [("findings (1)", [0])]
    assert other.text.count("Only the loss was recorded, which is in the plot of all runs.") == 1
    alone = page_of(tmp_path, runs[0]).figures
    assert "losses" not in alone
    assert "<b>loss</b>" in [note["text"] for note in alone["timeline-1"]["layout"]["annotations"]]


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        ("bfloat16", 1.0, "bf16"),
        ("bfloat16", 2.0**14, "bf16"),
        ("float16", 2.0**14, "fp16"),
        ("float16", 1.0, "fp16"),
        ("", 2.0**14, "fp16"),
        ("float32", 1.0, ""),
        ("", 1.0, ""),
    ],
)
def test_a_run_is_judged_by_the_format_that_it_computed_in(
    dtype: str, scale: float, expected: str, tmp_path: Path
) -> None:
    """Norms return fp32 in autocast regions; too large for fp16 are the outputs of all runs."""
    records = [step(i, None if scale == 1 else scale) for i in range(1, 13)]
    for i in range(1, 13):
        one = sample(i, scale, {"a": -16.0, "b": 4.0 if scale == 1 else -16.0}, {"a": 1.0, "b": 16.0})
        if dtype:
            one["dtypes"] = {"a": dtype, **dict.fromkeys(("b", "norm", "lm"), "float32")}
        records.append(one)
    run = Run.read(write(tmp_path / "run", *records))
    view = RunView.of("run", 1, run, [*range(1, 13)])
    assert view.facts.computes_in == expected
    names = [name for name, *_ in view.key_numbers()]
    in_format = [f"Least headroom, {expected}", f"Most underflow, {expected}"]
    assert names[3 + (scale != 1) :] == (in_format if expected else ["Format", "Largest gradient"])
    (outputs,) = (piece for piece in view.verdict if piece.text.startswith("Outputs of b "))
    is_judged = expected == "fp16"
    assert outputs.severity == ("warning" if is_judged else "note")
    assert ("Outputs of b are too large for fp16" in outputs.text) == is_judged
    assert ("use bf16" in str(view.verdict)) == is_judged
    page = page_of(tmp_path, run)
    checked = [each["value"] for _, each in page.tags if "checked" in each and each["name"] in ("kind", "format")]
    assert checked == ["outputs" if is_judged else "gradients", expected or "fp16"]
    assert ("This run computed in bf16" in page.text) == (expected == "bf16")
    assert ("does not show in which format" in page.text) == (not expected and not dtype)
    assert ("outputs of 4 of 4 modules" in page.text) == (dtype == "float32")
    assert ("would round to zero in fp16" in page.text) == (not is_judged)


def test_norms_are_those_of_clipping_or_else_of_samples(tmp_path: Path) -> None:
    records = [step(i, 2.0**10, grad_norm=7.0 if i == 3 else None) for i in range(1, 6)]
    norms = {2: 1.5, 3: 7.5, 4: float("nan")}
    ranges = [{**sample(i, 2.0**10, {"a": -16.0}, {}), "grad_norm": norm} for i, norm in norms.items()]
    steps = [*map(StepRecord.from_json, records)]
    samples = [*map(SampleRecord.from_json, [*ranges, sample(5, 1.0, {}, {})])]
    figure = timeline(RunFacts(Run(tmp_path, steps=steps, samples=samples)))
    (line,) = (trace for trace in figure["data"] if trace["name"] == "gradient norm")
    assert (line["x"], line["y"]) == ([2, 3], [1.5, 7.0])


def test_a_long_run_makes_no_larger_page(tmp_path: Path) -> None:
    rng = random.Random(0)
    sizes = []
    for n in (10_000, 50_000):
        records = [
            StepRecord.from_json(
                step(i, 2.0 ** rng.randint(10, 16), "overflow" if rng.random() < 0.05 else None, loss=rng.random())
            )
            for i in range(1, n + 1)
        ]
        one = SampleRecord.from_json(sample(0, 2.0**14, dict.fromkeys(recorded.modules(10), -16.0), {}))
        ranges = [replace(one, step=i * n // 300) for i in range(300)]
        run = Run(tmp_path / "run" / "monitor.jsonl.gz", steps=records, samples=ranges)
        sizes.append(write_report([run], tmp_path / f"{n}.html").stat().st_size)
    assert sizes[1] < 1.05 * sizes[0]
    assert sizes[1] < 1.2e6


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_empty_and_short_runs_have_a_page(n: int, sampled: bool, tmp_path: Path) -> None:
    records = [step(i, 2.0**10, loss=None, grad_norm=None) for i in range(1, n + 1)]
    ranges = [sample(i, 2.0**10, {"a": -16.0}, {"a": 1.0}) for i in range(1, n + 1)] if sampled else []
    page = page_of(tmp_path, write(tmp_path / "run", *records, *ranges))
    assert "Too little was recorded" in page.text
    assert ("No ranges were sampled" in page.text) == (not ranges)
    assert ("Neither scale nor loss" in page.text) == (not records)


def test_runs_in_which_nothing_was_finite_or_all_was_zero_have_a_page(tmp_path: Path) -> None:
    broken = [sample(i, 2.0**10, {"a": -16.0}, {"a": 1.0}, not_finite=("a",)) for i in range(1, 5)]
    zero = sample(9, 1.0, {"a": -16.0}, {"a": 1.0})
    empty = {"largest": 0.0, "smallest": None, "zero": 1.0, "exponents": {"lowest": 0, "counts": []}}
    for stats in (zero["modules"]["a"], zero["activations"]["a"]):
        stats.update(empty)
        for fit in stats["formats"].values():
            fit.update(flush=0.0, subnormal=0.0, headroom_bits="inf")
    skipped = [step(i, 2.0 ** (10 - i), "non-finite loss", loss="nan", grad_norm="inf") for i in range(1, 40)]
    text = page_of(tmp_path, write(tmp_path / "a", *skipped, *broken), write(tmp_path / "b", zero)).text
    assert "The scale collapsed" in text


def test_numbers_at_the_end_of_floating_point_have_a_page(tmp_path: Path) -> None:
    losses = [(-1) ** i * 1.7e308 for i in range(40)]
    assert all(math.isfinite(average) for _, average in moving_average([*enumerate(losses)], 8))
    records = [step(i, None, loss=loss, grad_norm=10.0 ** (7.6 * i)) for i, loss in enumerate(losses, 1)]
    samples = [sample(i, 1.0, {"a": -16.0}, {"a": 1.0}) for i in (1, 2)]
    samples[0]["activations"]["a"]["smallest"] = "inf"
    samples[1]["modules"]["a"]["numel"] = 0
    assert (
        "At the end: b " in page_of(tmp_path, *[write(tmp_path / name / "1", *records, *samples) for name in "bc"]).text
    )


def test_without_a_finite_sample_nothing_is_said_of_headroom_and_underflow(tmp_path: Path) -> None:
    broken = [sample(i, 2.0**10, {"a": -16.0}, {"a": 1.0}, not_finite=("a",)) for i in range(1, 5)]
    page = page_of(
        tmp_path, write(tmp_path / "run", *(step(i, 2.0**10, "non-finite loss") for i in range(1, 5)), *broken)
    )
    assert "all zero" not in page.text.lower()
    assert page.text.count("no sample was finite") == 2  # of gradients: the maps show outputs too
    assert page.text.count("No sample was finite (4 samples, steps 1 to 4): there is nothing to draw.") == 1
    assert "Least headroom, fp16" not in page.text
    assert "none finite" in page.text

    for record in broken:
        record["activations"]["a"]["nonfinite"] = 0.5
    page = page_of(tmp_path, write(tmp_path / "all", *broken))
    assert page.text.count("No sample was finite (4 samples, steps 1 to 4): there is nothing to draw.") == 2
    assert set(page.figures) == set()
    assert [attributes.get("data-controls") for tag, attributes in page.tags if tag == "form"] == [None, None]


def test_a_diagnosis_and_its_remedy_stand_whole_and_once_code_first(tmp_path: Path) -> None:
    module = "encoder." + ".".join(f"blocks.{i}" for i in range(60))
    code = f'policy = castwise.Policy(compute="float16", modules={{"{module}": "float32"}})'
    found = dict.fromkeys(("phase", "op"), "")
    advice = f'keep {module} in fp32: castwise.autocast("cpu", {code.replace("policy = ", "policy=")}.bind(model))'
    text = f"first\n  at src/model.py:22: y = a @ b\n  input 0: all of it\n{advice}"
    found |= {"text": text, "advice": advice, "remedy": "float32", "code": code, "op": "aten.bmm"}
    found |= {"kind": "diagnosis", "cause": "overflow", "module": module, "summary": f"aten.bmm in {module} gives inf."}
    steps = [step(i, 2.0**14, "overflow" if i == 3 else None) for i in range(1, 9)]
    page = page_of(tmp_path, write(tmp_path / "run", *steps, {**found, "step": 3, "rank": 1}))
    for text in (f"Step 3 on rank 1: aten.bmm in {module} gives inf.", code, "input 0: all of it"):
        assert page.text.count(text) == 1, text
    assert [tag for tag, _ in page.tags].count("details") == 1
    sentence = f"Keep {module} in fp32."
    assert len(sentence) < len(code)
    source = "src/model.py:22: y = a @ b"
    assert 0 < page.text.index(source) < page.text.index(code) < page.text.index(sentence) < page.text.rindex(source)
    assert "castwise.autocast(" not in page.text


def test_a_remedy_and_samples_of_many_steps_are_shown_once_under_a_scale_that_collapsed(tmp_path: Path) -> None:
    lost = range(4, 34)
    steps = [step(i, 2.0 ** (10 - max(0, i - 3)), "non-finite loss" if i in lost else None) for i in range(1, 34)]
    remedy = "drop or repair such samples"
    found = dict.fromkeys(("phase", "op"), "") | {"kind": "diagnosis", "cause": "non-finite loss", "module": ""}
    found |= {"summary": "Input 0 is nan.", "advice": remedy, "remedy": "input", "text": "Input 0 is nan."}
    faults = [{**found, "step": i, "sample": "sample 3 of the batch" if i < 30 else f"sample {i}"} for i in lost]
    page = page_of(tmp_path, write(tmp_path / "run", *steps, *faults))
    assert "The scale collapsed to" in page.text
    assert page.text.lower().count(remedy) == 1
    assert page.text.count("sample 3 of the batch") == 1
    assert "26 steps, 4 to 29: sample 3 of the batch" in page.text
    assert "Step 33: sample 33" in page.text
    many = [(i, f"sample {i}") for i in range(1, 12)]
    lines = replace(RunFacts(Run.read(tmp_path / "run")).diagnosed[0], samples=many).sample_lines
    assert lines[-2:] == ["Step 8: sample 8", "and 3 more"]


def test_a_page_begins_with_the_verdict_in_a_few_words_and_what_was_trained(tmp_path: Path) -> None:
    found = dict.fromkeys(("summary", "advice"), "") | {"kind": "diagnosis", "cause": "non-finite loss", "step": 8}
    found |= {"phase": "forward", "module": "", "op": "aten.div", "text": "nan\n  at /home/me/train.py:22: a / b"}
    fine = [step(i, None) for i in range(1, 8)]
    lost = [step(i, None, "non-finite loss", skipped=False) for i in (8, 9)]
    calm = [sample(i, 2.0**14, {"a": -16.0}, {"a": 1.0}) for i in range(1, 5)]
    bad = sample(9, 1.0, {"a": -16.0}, {"a": 1.0}, not_finite=("a",))
    settings = {"model": "GPT", "optimizer": "AdamW"}
    runs = write(tmp_path / "lost", *fine, *lost, found, bad, **settings), write(tmp_path / "fine", *fine, *calm)
    for name, run, headline in (
        ("lost", runs[0], "Training is lost from step 8 on: aten.div in train.py:22"),
        ("fine", runs[1], "Nothing to fix"),
    ):
        page = page_of(tmp_path, run)
        assert page.text.count(headline + "\n") == 2, headline  # title and heading
        assert f"castwise: {headline}\n" in page.text
        assert ("Samples with inf or NaN" in page.text) == (name == "lost")
        assert "Not finite at overflows" not in page.text
        assert f"{name}: {'GPT, AdamW, ' if name == 'lost' else ''}" in page.text
    for module, kind in (("", None), ("a", ("outputs", "fp16"))):  # the former is that of a fault in the loss too
        found = {**found, "module": module}
        whole = sample(9, 1.0, {"a": -16.0}, {"a": 1.0, "": 1.0}, not_finite=("a",))
        run = Run.read(write(tmp_path / f"of {module}", *fine, *lost, found, whole))
        assert RunView.of("", 1, run, [9]).opens_with == kind
    assert "GPT: AdamW, " in page_of(tmp_path, write(tmp_path / "GPT", *fine, **settings)).text
    both = page_of(tmp_path, *runs).text
    assert "2 runs, side by side" in both
    assert "lost: Training is lost from step 8 on: aten.div in train.py:22. GPT, AdamW" in both


def test_a_module_whose_name_is_a_number_is_called_module(tmp_path: Path) -> None:
    fine = [sample(i, 2.0**14, {"2": -16.0, "2.1": -16.0}, {"2": 1.0, "2.1": 1.0}) for i in range(1, 5)]
    broken = sample(5, 2.0**14, {"2": -16.0, "2.1": -16.0}, {"2": 1.0, "2.1": 1.0})
    broken["activations"]["2.1"]["nonfinite"] = 0.5
    run = Run.read(write(tmp_path / "run", *(step(i, 2.0**14) for i in range(1, 6)), *fine, broken))
    view = RunView.of("run", 1, run, [1, 2, 3, 4, 5])
    assert [note for name, _, note in view.key_numbers() if name.endswith("fp16")] == ["module 2", ""]
    assert "in module 2 at step 1" in view.figures["headroom_bits"]["choices"]["gradients/fp16"]["caption"]
    assert ("Most underflow, fp16", "none", "") in view.key_numbers()
    assert "Outputs of module 2.1 were inf or NaN" in str(view.verdict)
    assert not [tag for tag, attributes in page_of(tmp_path, run).tags if attributes.get("id") == "skips"]  # no skip


def test_cells_are_equal_and_runs_have_the_same_columns(tmp_path: Path) -> None:
    one, other = ([1, 2, 4, 100], [1, 4, 50])
    of_steps = [
        [sample(i, 1.0, {"a": -16.0}, {}, not_finite=("a",) * (i == 4)) for i in steps] for steps in (one, other)
    ]
    facts = [RunFacts(Run(Path(), samples=[*map(SampleRecord.from_json, records)])) for records in of_steps]
    rows = {"gradients": ["a"], "outputs": []}
    for steps, run, shown in ((None, 0, [1, 2, 4, 100]), ([1, 2, 4, 50, 100], 1, [1, None, 4, 50, None])):
        figure = heat_map(HEADROOM, facts[run], rows, steps)
        cells, marks = figure["choices"]["gradients/fp16"]["data"]
        assert cells["x"] == list(range(len(shown)))
        assert cells["customdata"] == shown
        assert [value is None for value in cells["z"][0]] == [each in (None, 4) for each in shown]
        assert (marks["x"], marks["customdata"]) == ([2], [1])  # not finite
        assert figure["layout"]["xaxis"]["ticktext"] == [f"{each}" for each in steps or shown]


def test_modules_are_ranked_by_their_own_numbers_after_those_that_a_diagnosis_names(tmp_path: Path) -> None:
    gradients = {"victim": -16.0, "near": 1.0, "culprit": -16.0}
    steps = [
        step(i, 2.0**10, "non-finite loss" if i == 3 else None, parameters=["victim.weight"] * (i == 3))
        for i in range(1, 9)
    ]
    found = dict.fromkeys(("phase", "op", "text", "advice"), "")
    found |= {"kind": "diagnosis", "cause": "non-finite loss", "module": "culprit"}
    ranges = sample(4, 2.0**10, gradients, dict.fromkeys(gradients, 1.0))
    run = write(tmp_path, *steps, ranges, {**found, "step": 3})
    ranked = worst_modules(RunFacts(Run.read(run)))
    assert [(module.name, module.is_diagnosed) for module in ranked] == [
        ("culprit", True),
        ("near", False),
        ("victim", False),
    ]
    assert [module.blamed for module in ranked] == [0, 0, 0]


def test_a_run_of_300_modules_makes_a_small_page_in_which_all_are_found(tmp_path: Path) -> None:
    run = recorded.large(tmp_path / "run", samples=30)
    page = write_report([run], tmp_path / "page.html")
    assert page.stat().st_size < 1e6
    named = [attributes.get("data-value") for tag, attributes in Page(page).tags if tag == "th"]
    assert len(set(named)) == 303  # and None, of the heads
    assert len(Page(page).figures["flush-1"]["names"]["gradients"]) == 302


def test_runs_side_by_side_share_their_axes(tmp_path: Path) -> None:
    runs = recorded.healthy(tmp_path / "a", steps=600, layers=1), recorded.troubled(tmp_path / "b", 3000, layers=2)
    page = page_of(tmp_path, *runs)
    for name, axis in [("timeline", "xaxis"), ("timeline", "yaxis2"), ("flush", "xaxis"), ("histogram", "xaxis")]:
        first, second = (page.figures[f"{name}-{place}"]["layout"][axis] for place in (1, 2))
        assert first["range"] == second["range"], (name, axis)
    assert page.figures["timeline-1"]["layout"]["xaxis"]["range"][1] > 3000
    assert page.has_one_plotly


def test_runs_are_called_by_what_tells_them_apart() -> None:
    assert labels([Path("/runs/a/monitor.jsonl.gz"), Path("/runs/b/monitor.jsonl.gz")]) == ["a", "b"]
    assert labels([Path("/x/fp16/monitor.jsonl.gz"), Path("/y/fp16/monitor.jsonl.gz")]) == ["x/fp16", "y/fp16"]
    assert labels([Path("/x/a/monitor.jsonl.gz")] * 2) == ["x/a (1)", "x/a (2)"]


def test_pages_of_several_runs_have_short_names_and_show_of_schedules_what_differs(tmp_path: Path) -> None:
    morning, noon, at_noon_too = "20261127-101502-3f9c/GPT", "20261127-121733-77de/GPT", "20261127-121733-3f9c/GPT"
    for names, short in (
        ([morning, noon], ["101502", "121733"]),
        ([noon, at_noon_too], ["77de", "3f9c"]),
        (["demo-fp16", "demo-bf16"], ["fp16", "bf16"]),
        (["lr-0.1", "lr-0.01"], ["lr-0.1", "lr-0.01"]),
        (["a", "a-b"], ["a", "a-b"]),
        ([morning], [morning]),
    ):
        assert short_names(names) == short
    dynamic = "Dynamic(init_scale=65536.0, patience=20, on_exhausted='warn', growth_factor=2.0, growth_interval={})"
    runs = [
        write(tmp_path / name, step(1, 2.0**16), schedule=schedule)
        for name, schedule in (
            (morning, dynamic.format(100)),
            (noon, dynamic.format(2000)),
            ("20261127-140000-0000/GPT", "no scaling"),
        )
    ]
    page = page_of(tmp_path, *runs)
    for text in ("101502: ", "schedule Dynamic(growth_interval=100)", "schedule no scaling"):
        assert page.text.count(text) == 1
    titles = [attributes.get("title") for tag, attributes in page.tags if tag in ("b", "h3")]
    assert str(runs[1]) in titles
    page = page_of(tmp_path, runs[0], write(tmp_path / "x", schedule="Static(init_scale=65536.0, patience=20)"))
    assert "schedule Static\n" in page.text


def test_no_runs_and_missing_extras_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="write_report needs at least one run, got none"):
        write_report([], tmp_path / "page.html")
    for name in ("jinja2", "plotly"):
        with monkeypatch.context() as without:
            for module in [each for each in sys.modules if each.split(".")[0] == name]:
                without.delitem(sys.modules, module)
            without.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=rf"a report needs {name}: pip install 'castwise\[report\]'"):
                write_report([write(tmp_path / "run")], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_downsampling_keeps_ends_and_extremes() -> None:
    rng = random.Random(0)
    points = [(i, rng.gauss(0, 1)) for i in range(50_000)]
    points[31_415] = (31_415, 99.0)
    points[100] = (100, math.nan)
    kept = extremes(points, buckets=100)
    assert len(kept) <= 202
    assert kept == sorted(kept)
    assert {points[0], points[-1], (31_415, 99.0)} <= set(kept)
    assert extremes(points[:90], buckets=100) == points[:90]


def test_a_step_function_is_its_changes() -> None:
    scales = [(i, 2.0 ** (16 - i // 1000)) for i in range(10_000)]
    assert changes(scales) == [*((i, 2.0 ** (16 - i // 1000)) for i in range(0, 10_000, 1000)), scales[-1]]
    assert changes([]) == []
    assert [list(each) for each in in_buckets(range(5), 2)] == [[0, 1], [2, 3, 4]]
    assert in_buckets([], 3) == []


def test_layers_in_8_and_4_bits_have_a_table_of_what_was_lost(tmp_path: Path) -> None:
    def operand(error: float | str, flushed: float) -> dict[str, Any]:
        return {"saturated": 0.0, "flushed": flushed, "relative_error": error, "scale": [0.5, 2.0]}

    layers = [
        {EVIL: {"recipe": "mxfp8 (emulated)", "input": operand(error, flushed), "weight": operand("nan", 0.0)}}
        for error, flushed in ((0.02, 0.25), (0.04, 0.0), ("inf", 0.0))
    ]
    samples = [{**sample(i + 1, 1.0, {}, {}), "quantized": layers[i]} for i in range(3)]
    new = write(tmp_path / "new", *(step(i + 1, 1.0) for i in range(3)), *samples)
    write_report([Run.read(new)], tmp_path / "new.html")
    text = " ".join(Page(tmp_path / "new.html").text.split())
    assert "mxfp8 (emulated)input 3% 25% 0% 0.5 to 2" in text
    assert "mxfp8 (emulated)weight nan% 0% 0%" in text
    write_report([Run.read(write(tmp_path / "old", step(1, 1.0)))], tmp_path / "old.html")
    assert "Layers in 8 and 4 bits" not in Page(tmp_path / "old.html").text
