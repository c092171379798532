"""`castwise fix`: the edits of scripts, and what it writes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.mistakes.test_mistakes import MISTAKES, run, wrong_lines
from tests.monitor import recorded
from typer.testing import CliRunner

from castwise._cli import app
from castwise._fixing.corrections import Corrected, corrections
from castwise.monitor import DiagnosisRecord, MistakeRecord
from castwise.monitor._recorded_run import Run

# Of the others, no one place of the script decides.
FIXED = {
    "backward_inside_autocast",
    "backward_inside_autocast_in_bf16",
    "clipped_by_value_while_scaled",
    "clipped_while_scaled",
    "loss_not_scaled",
    "measured_while_scaled",
    "never_zeroed",
    "never_zeroed_with_a_scaler",
    "norm_kept_while_scaled",
    "scaler_for_bf16",
    "scaler_not_saved",
    "schedule_advanced_on_skip",
    "stepped_while_scaled",
    "stepped_while_scaled_and_updated",
    "stepped_without_scaler",
    "validation_outside_autocast",
}


def corrected(path: Path, *mistakes: tuple[str, int]) -> Corrected:
    lines = path.read_text().splitlines()
    records = [MistakeRecord(name, "", "", str(path), line, lines[line - 1].strip()) for name, line in mistakes]
    [result] = corrections([Run(path, mistakes=records)])
    return result


@pytest.mark.parametrize("script", MISTAKES, ids=lambda path: path.stem)
def test_an_edited_script_runs_without_its_mistake(script: Path, tmp_path: Path) -> None:
    result = corrected(script, *wrong_lines(script))
    assert bool(result.fixed) == (script.stem in FIXED)
    assert len(result.fixed) + len(result.by_hand) == 1
    if result.fixed:
        edited = tmp_path / script.name
        edited.write_bytes(result.content())
        mistakes, _ = run(edited)
        assert mistakes == []


@pytest.mark.parametrize(
    ("name", "script", "expected"),
    [
        pytest.param(
            "clipped-while-scaled",
            "class T:\n    def clip(self):\n        clip_(self.net)  # here\n    def go(self, loss):\n"
            "        self.amp.scale(loss).backward()\n        self.amp.step(self.opt)\n        self.amp.update()\n",
            "        self.amp.unscale_(self.opt)\n        clip_(self.net)  # here\n",
            id="names of another method of the class",
        ),
        pytest.param(
            "clipped-while-scaled",
            "class T:\n    def clip(self):\n        clip_(self.net)  # here\nclass U:\n    def go(self, loss):\n"
            "        self.amp.scale(loss).backward()\n        self.amp.step(self.opt)\n",
            "the script has no one scaler",
            id="names of another class",
        ),
        pytest.param(
            "clipped-while-scaled",
            "def go(s, opt, loss):\n\ts.scale(loss).backward(); clip_(1)  # here\n\ts.step(opt)\n",
            "the line has several statements",
            id="two statements of a line",
        ),
        pytest.param(
            "clipped-while-scaled",
            "def go(s, a, b, loss):\n    s.scale(loss).backward()\n    clip_(1)  # here\n"
            "    s.step(a)\n    s.step(b)\n",
            "the script has no one scaler",
            id="two optimizers",
        ),
        pytest.param(
            "clipped-while-scaled",
            "def go(s, opt, loss):\n    s.scale(loss).backward()\n    clip_(1)  # here\n    s.unscale_(opt)\n"
            "    s.step(opt)\n",
            "s.unscale_ is called elsewhere",
            id="unscaled later",
        ),
        pytest.param(
            "clipped-while-scaled",
            "def go(s, opt, loss):\n    s.scale(loss).backward()\n    while clip_(1) > 1:  # here\n        pass\n"
            "    s.step(opt)\n",
            "the line is not a statement",
            id="the head of a block",
        ),
        pytest.param(
            "stepped-while-scaled",
            "def go(s, opt, loss):\r\n\x0c    s.scale(loss).backward()\r\n    if 1: opt.step()  # here\r\n",
            "    if 1: s.step(opt); s.update()  # here\r\n",
            id="a block of one line, ends of lines of Windows, a form feed",
        ),
        pytest.param(
            "stepped-while-scaled",
            "def go(s, opt, loss):\n    s.scale(loss).backward()\n    opt.step()  # here",
            "    s.step(opt)  # here\n    s.update()",
            id="no end of the last line",
        ),
        pytest.param(
            "loss-not-scaled",
            "def go(s, opt, a, b):\n    s.scale(a).backward()\n    (b +\n     a).backward(retain_graph=True)  # here\n"
            "    s.step(opt)\n",
            "    (s.scale(b +\n     a)).backward(retain_graph=True)  # here\n",
            id="a loss in brackets",
        ),
        pytest.param(
            "validation-outside-autocast",
            "import torch\ndef go(net, on):\n    with torch.autocast('cpu', enabled=on):\n        net(1)\n"
            "    out = net(2)  # here\n\n    loss = f(out)\n    total = 1\n    print(out)\n    for _ in out: pass\n",
            "    with torch.autocast('cpu', enabled=on):\n        out = net(2)  # here\n\n        loss = f(out)\n"
            "        total = 1\n        print(out)\n    for _",
            id="what reads the output",
        ),
        pytest.param(
            "validation-outside-autocast",
            "import torch\ndef go(net, on):\n    with torch.autocast('cpu', enabled=on):\n        net(1)\n"
            "def test(net):\n    return net(2)  # here\n",
            "the arguments of its autocast region are not known there: on",
            id="arguments of another function",
        ),
        pytest.param(
            "validation-outside-autocast",
            "import torch\nwith torch.autocast('cpu'):\n    net(1)\nnet('''a\n''')  # here\n",
            "the line is not a statement",
            id="a text of several lines",
        ),
        pytest.param(
            "backward-inside-autocast",
            "with autocast('cpu'):\n  a = net(1)\n  a.backward(); b = 1  # here\n\n  c = (1,\n 2)\n",
            "  a = net(1)\na.backward(); b = 1  # here\n\nc = (1,\n2)\n",
            id="with what follows it",
        ),
        pytest.param(
            "backward-inside-autocast",
            "with autocast('cpu'):\n    for a in net(1):\n        a.backward()  # here\n",
            "the backward is not directly in the block",
            id="in a loop",
        ),
        pytest.param(
            "scaler-not-saved",
            "s.scale(loss).backward()\ns.step(opt)\ns = 1\nopt = 1\nsave({'opt': opt.state_dict()}, 'x')  # here\n",
            "save({'opt': opt.state_dict(), \"scaler\": s.state_dict()}, 'x')  # here\n",
            id="a dict of one line",
        ),
        pytest.param(
            "scaler-not-saved",
            "s = opt = 1\ns.scale(loss).backward()\nsave({\n  'opt': opt.state_dict()  # here\n}, 'x')\n",
            "  'opt': opt.state_dict(),  # here\n  \"scaler\": s.state_dict(),\n}, 'x')\n",
            id="no last comma",
        ),
        pytest.param(
            "scaler-for-bf16", "s = GradScaler('cpu', )  # here\n", "GradScaler('cpu', enabled=False, )", id="a"
        ),
        pytest.param("scaler-for-bf16", "s = GradScaler()  # here\n", "GradScaler(enabled=False)", id="no argument"),
        pytest.param("scaler-for-bf16", "s = GradScaler(enabled=x)  # here\n", "the scaler is", id="enabled by x"),
    ],
)
def test_edits_keep_the_form_of_the_script(name: str, script: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(script.encode())
    line = next(number for number, text in enumerate(script.split("\n"), 1) if "# here" in text)
    source = script.split("\n")[line - 1].strip()
    [result] = corrections([Run(path, mistakes=[MistakeRecord(name, "", "", str(path), line, source)])])
    if result.by_hand:
        assert result.by_hand[0][1].startswith(expected)
        assert (result.new, result.diff()) == (script, "")
    else:
        assert expected in result.content().decode()
        compile(result.new, "train.py", "exec")


def test_of_two_mistakes_with_one_remedy_the_first_line_is_edited(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def go(s, opt, loss):\n    s.scale(loss).backward()\n    log(norm(1))\n    clip_(1)\n    opt.step()\n"
        "    s.update()\n    s.step(opt)\n"
    )
    mistakes = ("clipped-while-scaled", 4), ("measured-while-scaled", 3), ("stepped-without-scaler", 5)
    result = corrected(path, *mistakes)
    assert len(result.fixed) == 3
    assert [line.strip() for line in result.new.splitlines()[2:6]] == [
        "s.unscale_(opt)",
        "log(norm(1))",
        "clip_(1)",
        "s.step(opt)",
    ]


@pytest.mark.parametrize(
    ("op", "advice", "line", "expected"),
    [
        ("aten.div", "and add an epsilon", "y = a / b.norm(dim=-1)", "y = a / b.norm(dim=-1).clamp_min(1e-7)"),
        ("aten.div", "and add an epsilon", "y = a / b", ""),
        ("aten.div", "and add an epsilon", "y = a / b.std() / c.std()", ""),
        ("aten.mul", "the gradient of sqrt at 0: an epsilon", "(a + 1).sqrt()", "((a + 1).clamp_min(1e-7)).sqrt()"),
        ("aten.log", "or clamp them", "y = torch.log(p - q) * 2", "y = torch.log((p - q).clamp_min(1e-7)) * 2"),
        ("aten.acos_", "and clamp them", "y = torch.acos(c)", "y = torch.acos(c.clamp(-1 + 1e-6, 1 - 1e-6))"),
        ("aten.linear", "find where they come from", "y = linear(c)", ""),
    ],
)  # fmt: skip
def test_the_input_of_an_op_is_bounded(op: str, advice: str, line: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"{line}\n")
    text = f"text\nat {tmp_path / 'model.py'}:1: {line}"
    record = DiagnosisRecord(3, "fault", "forward", "", op, text, advice)
    [result] = corrections([Run(tmp_path, diagnoses=[record])])
    assert result.new == f"{expected or line}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script, and a run that found two mistakes in it, one of which has an edit."""
    monkeypatch.chdir(tmp_path)
    script = next(script for script in MISTAKES if script.stem == "clipped_while_scaled")
    (tmp_path / "train.py").write_bytes(script.read_bytes())
    (tmp_path / "train.py").chmod(0o755)
    [(name, line)] = wrong_lines(script)
    lines = script.read_text().splitlines()
    records = [
        MistakeRecord(name, "clipped", "scaler.unscale_(optimizer)", "train.py", line, lines[line - 1].strip()),
        MistakeRecord("scaler-rebuilt", "replaced", "create it once", "train.py", 7, lines[6].strip()),
    ]
    recorded.healthy(tmp_path / "castwise-run" / "1", steps=20, layers=1)
    file = tmp_path / "castwise-run" / "1" / "monitor.jsonl.gz"
    recorded.write_lines(file, *recorded.lines_in(file), *(json.dumps(record.to_json()) for record in records))
    for command in (
        ["init", "-q"],
        ["add", "train.py"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"],
    ):
        subprocess.run(["git", *command], check=True, cwd=tmp_path)
    return tmp_path


def fix(*options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["fix", *options])
    return result.exit_code, result.stdout, result.stderr


def test_the_diff_applies_and_what_is_left_is_said(project: Path) -> None:
    code, diff, said = fix()
    assert code == 1  # one is left
    assert "castwise fix: 1 edit; --apply writes them\n" in said
    assert "train.py:7: replaced\n  by hand, because no one place of the script decides it:\n    create it once" in said
    [script] = json.loads(fix("--json")[1])["scripts"]
    assert (script["script"], script["diff"]) == ("train.py", diff)
    assert [[each["line"] for each in script[key]] for key in ("fixed", "by_hand")] == [[12], [7]]
    subprocess.run(["git", "apply"], input=diff.encode(), check=True, cwd=project)
    assert "    scaler.unscale_(optimizer)\n" in (project / "train.py").read_text()
    code, diff, said = fix()  # of lines that are elsewhere now
    assert (code, diff) == (1, "")
    assert "the line has changed since the run" in said


def test_scripts_are_written_with_a_copy_and_uncommitted_ones_only_when_forced(project: Path) -> None:
    script = project / "train.py"
    before = script.read_bytes()
    code, printed, said = fix("--apply")
    assert (code, printed) == (1, "")
    assert "wrote train.py, with a copy in train.py.orig\n" in said
    assert (project / "train.py.orig").read_bytes() == before
    assert script.stat().st_mode & 0o777 == 0o755
    script.write_bytes(before + b"# more\n")
    assert fix("--apply")[0] == 2
    assert "train.py has changes that are not committed: commit them, or give --force" in fix("--apply")[2]
    assert script.read_bytes() == before + b"# more\n"
    assert "wrote train.py, with a copy in train.py.orig1\n" in fix("--apply", "--force")[2]
    assert (project / "train.py.orig").read_bytes() == before
    assert re.search(r"unscale_\(optimizer\)\n.*\n.*\n.*\n.*\n# more", script.read_text()) is not None


def test_scripts_that_are_gone_or_installed_are_left(project: Path) -> None:
    (project / "train.py").unlink()
    code, diff, said = fix()
    assert (code, diff) == (1, "")
    assert "by hand, because train.py cannot be read: No such file or directory" in said
    library = project / "site-packages" / "x.py"
    library.parent.mkdir()
    library.write_text("s = GradScaler()\n")
    assert corrected(library, ("scaler-for-bf16", 1)).by_hand[0][1].endswith("it belongs to an installed package")
    assert fix("nowhere") == (
        2,
        "",
        "castwise fix: there is no nowhere: give the folder of a run, which has a monitor.jsonl.gz\n",
    )
