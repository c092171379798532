"""Results print as text and are shown as HTML in notebooks, with the same words; frames have their figures."""

from __future__ import annotations

import html
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from torch import nn

import castwise
from castwise._doctor import checkup
from castwise._shown import Code, ShownText, Table, as_html, as_text

TABLE = Table([("name", "bytes"), ("<b>", "1,024")], {1}, "a title", "and 3 more")
# What a result's page leaves out of its text, or says in a table's header.
HEADERS = {"advice", "measured", "range", "severity", "values"}


def words(text: str) -> set[str]:
    return {word.strip("():;") for word in text.split()} - HEADERS


def of_html(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def train(steps: int, folder: Path) -> None:
    """A run in fp16 with batches that overflow."""
    model = nn.Linear(4, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), castwise.GradScaler("cpu")
    with castwise.Monitor(model, optimizer, scaler, every=1, sinks=[castwise.monitor.JSONL(folder)]):
        for step in range(steps):
            optimizer.zero_grad()
            with castwise.autocast("cpu", dtype=torch.float16):
                loss = model(torch.full((2, 4), 1e6 if step > 1 else 1.0)).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def recorded(model: nn.Module) -> dict[str, Any]:
    tokens = [3, 1, 4, 1, 5]
    log_probs = model(torch.tensor([tokens])).log_softmax(-1)[0, :-1].gather(1, torch.tensor([tokens[1:]]).T)
    return {"tokens": tokens, "log_probs": [None, *log_probs.flatten().tolist()]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    batches = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(2)]
    loss = nn.functional.mse_loss
    language_model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).eval()
    run = tmp_path_factory.mktemp("run")
    train(8, run)
    with castwise.autocast("cpu", dtype=torch.float16):
        diagnosis = castwise.diagnose(nn.Linear(4, 2), lambda y: y.float().mean(), torch.full((2, 4), 1e6))
    golden = castwise.checking.record(lambda probe: probe("x", torch.ones(3)), steps=1)
    patch = pytest.MonkeyPatch()
    patch.setattr(checkup, "BUDGET_S", 0.1)
    machine = castwise.doctor()
    patch.undo()
    return {
        "Drift": castwise.compare(model, batches, {"bf16": castwise.policies.bf16}, loss=loss),
        "Tuned": castwise.tune(model, batches, loss=loss),
        "Trace": castwise.trace(model, batches[0][0], policy=castwise.policies.bf16),
        "RecordedDrift": castwise.compare_log_probs(language_model, [recorded(language_model)]),
        "Verdict": castwise.verdict(run),
        "Advice": castwise.verdict(run)[0],
        "Diagnosis": diagnosis,
        "CheckResult": castwise.checking.check(lambda probe: probe("x", torch.ones(3)), golden),
        "Checkup": machine,
        "explain": castwise.policies.bf16_stable.explain(model),
    }


CLASSES = ["Drift", "Tuned", "Trace", "RecordedDrift", "Verdict", "Advice", "Diagnosis", "CheckResult", "Checkup"]


@pytest.mark.parametrize("name", [*CLASSES, "explain"])
def test_a_notebook_shows_the_words_that_are_printed(name: str, results: dict[str, Any]) -> None:
    page = results[name]._repr_html_()
    page, tables = re.subn(r'<div class="castwise-tiles".*?</div>', "", page)
    assert tables == (name in ("Drift", "Tuned"))
    assert words(of_html(page)) == words(str(results[name]))
    assert "<script" not in page
    assert len(page) < 20_000


@pytest.mark.parametrize("name", CLASSES)
def test_the_representation_is_one_short_line(name: str, results: dict[str, Any]) -> None:
    text = repr(results[name])
    assert text.startswith(f"{name}(")
    assert len(text) < 200
    assert "\n" not in text


def test_representations_name_what_was_found(results: dict[str, Any]) -> None:
    assert repr(results["Verdict"]) == "Verdict(1 warning, 1 note)"
    assert repr(results["Diagnosis"]).startswith("Diagnosis(forward: the model's own code: aten.to gives inf (loss ")
    assert repr(results["CheckResult"]).startswith("CheckResult(identical: ")
    assert repr(results["Checkup"]).startswith("Checkup(recommended: cpu ")
    assert repr(results["explain"]) == "<text of 6 lines, which print() shows>"


def test_a_verdict_is_a_sequence(results: dict[str, Any]) -> None:
    verdict = results["Verdict"]
    assert verdict[0] is next(iter(verdict))
    assert verdict[-1] is verdict.advice[-1]
    assert verdict[:1] == verdict.advice[:1]


def test_a_clean_diagnosis_is_one_line() -> None:
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        found = castwise.diagnose(nn.Linear(4, 2), lambda y: y.float().mean(), torch.ones(2, 4))
    assert repr(found) == f"Diagnosis({found})"
    assert words(of_html(found._repr_html_())) == words(str(found))


def test_comparisons_are_a_picture_of_modules_and_formats_without_a_script(results: dict[str, Any]) -> None:
    for name, formats in (("Drift", ["bf16"]), ("Tuned", list(results["Tuned"].drift.policies))):
        [picture] = re.findall(r'<div class="castwise-tiles".*?</div>', results[name]._repr_html_())
        rows = [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in re.findall(r"<tr>(.*?)</tr>", picture)]
        assert rows[0] == ["", *formats]
        assert sorted(row[0] for row in rows[1:]) == ["(root)", "0", "1", "2"]
        numbers = [float(number) for row in rows[1:] for number in row[1:]]
        colours = re.findall(r"<td[^>]*background:rgba\(70,130,220,([\d.]+)\)", picture)
        largest = [colour for number, colour in zip(numbers, colours, strict=True) if number == max(numbers)]
        assert set(largest) == {"0.75"}
    framed = re.findall(r"<td[^>]*outline[^>]*>", results["Tuned"]._repr_html_())
    assert len(framed) == len(results["Tuned"].formats)


def test_text_is_escaped_and_numbers_stand_on_the_right() -> None:
    page = as_html([TABLE, "a < b", Code("if a < b:\n    c")])
    assert "<b>" not in page
    assert "a &lt; b" in page
    assert re.search(r'text-align:right;white-space:nowrap">1,024<', page)
    assert re.search(r"<pre[^>]*>if a &lt; b:\n    c</pre>", page)
    assert as_text([TABLE, "a < b"]) == "a title\nname  bytes\n<b>   1,024\nand 3 more\n\na < b"


def test_a_shown_text_is_a_text() -> None:
    text = ShownText.of(TABLE, "end", between="\n")
    assert text == "a title\nname  bytes\n<b>   1,024\nand 3 more\nend"
    assert text.upper().endswith("END")
    assert pickle.loads(pickle.dumps(text))._repr_html_() == text._repr_html_()


def test_memory_is_a_dict_that_is_shown_as_a_table() -> None:
    model = nn.Linear(64, 64)
    optimizer = castwise.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), model)
    memory = optimizer.memory()
    assert repr(memory) == repr(dict(memory))
    page = of_html(memory._repr_html_())
    assert dict(zip(*(memory.frame()[column] for column in ("part", "count")), strict=True)) == memory
    assert all(f"{name}  " in re.sub(r"\s+", "  ", page) and f"{count:,}" in page for name, count in memory.items())


def test_frames_have_the_figures_of_the_results(results: dict[str, Any]) -> None:
    drift = results["Drift"]
    frame = drift.frame()
    assert list(frame["module"]) == [module.name or "(root)" for module in drift["bf16"].modules]
    assert set(frame["policy"]) == {"bf16"}
    introduced = [module.introduced and module.introduced.relative_rms for module in drift["bf16"].modules]
    expected = pandas.Series(introduced, name="introduced", dtype=float)
    pandas.testing.assert_series_equal(frame["introduced"].astype(float), expected)
    points = results["Tuned"].frontier.points
    assert list(results["Tuned"].frame()["is_chosen"]) == [point.is_chosen for point in points]
    assert list(results["RecordedDrift"].frame()["tokens"]) == [4]
    assert list(results["Verdict"].frame()["severity"]) == [piece.severity for piece in results["Verdict"]]
    assert list(results["Checkup"].frame()["format"])[:3] == ["fp32", "bf16", "fp16"]
    diagnosis = results["Diagnosis"]
    ranges = [*diagnosis.inputs, *diagnosis.outputs, *(diagnosis.in_float32 or ())]
    assert list(diagnosis.frame()["inf"]) == [each.inf for each in ranges]
    assert set(diagnosis.frame()["values"]) == {"input", "output", "in float32"}


def test_without_pandas_a_frame_names_the_extra(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for name in ("Drift", "Tuned", "RecordedDrift", "Verdict", "Checkup", "Diagnosis"):
        with pytest.raises(ImportError, match=r"frame\(\) needs pandas: pip install 'castwise\[pandas\]'"):
            results[name].frame()


class Notebook:
    """Stands in for IPython in a kernel."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool = False) -> SimpleNamespace:
        assert raw
        self.pages.append(content["text/html"])
        return SimpleNamespace(update=self.display)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    found, ipython = Notebook(), ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=found.display))
    monkeypatch.setattr("castwise._notebook._SECONDS_BETWEEN", 0.0)
    return found


def test_a_notebook_shows_progress_and_then_removes_it(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.functional.mse_loss
    batches = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(2)]
    castwise.compare(model, batches, {"bf16": castwise.policies.bf16}, loss=loss)
    assert notebook.pages[0] == '<progress value="0" max="2"></progress> batches 0/2'
    assert notebook.pages[-2:] == ['<progress value="2" max="2"></progress> batches 2/2', ""]
    language_model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).eval()
    record = recorded(language_model)
    monkeypatch.setattr(checkup, "BUDGET_S", 0.1)
    for call, what in (
        (lambda: castwise.tune(model, batches, loss=loss), "policies"),
        (lambda: castwise.compare_log_probs(language_model, [record]), "sequences 0/1"),
        (lambda: castwise.checking.record(lambda probe: probe("x", torch.ones(3)), steps=1), "run 1 (plain)"),
        (castwise.doctor, "cpu: fp32"),
    ):
        notebook.pages.clear()
        call()
        assert any(what in page for page in notebook.pages)
        assert notebook.pages[-1] == ""
    with pytest.raises(TypeError):
        castwise.compare(model, [(torch.randn(3, 4), torch.randn(3, 2))], {"bf16": "no policy"}, loss=loss)
    assert notebook.pages[-1] == ""
    castwise.policies.bf16.explain(model)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_elsewhere_calls_print_nothing(
    shell: Any, notebook: Notebook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)  # in a script, and in a terminal
    batches = [(torch.randn(3, 4), torch.randn(3, 2))]
    castwise.compare(nn.Linear(4, 2), batches, {"bf16": castwise.policies.bf16}, loss=nn.functional.mse_loss)
    assert notebook.pages == []
    assert capsys.readouterr() == ("", "")
