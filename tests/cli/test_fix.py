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
from castwise._mistakes.corrected_code import loss_in_fp32
from castwise._mistakes.mistake import Place
from castwise._mistakes.script_line import ScriptLine
from castwise.monitor import DiagnosisRecord, MistakeRecord
from castwise.monitor._recorded_run import Run

# Of the others, no one place of the script decides.
FIXED = {
    "backward_inside_autocast",
    "backward_inside_autocast_in_bf16",
    "clipped_by_value_while_scaled",
    "clipped_while_scaled",
    "half_with_autocast",
    "loss_not_scaled",
    "measured_while_scaled",
    "never_zeroed",
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


BACKWARD = "    s.scale(loss).backward()\n"
STEP = "    s.step(opt)\n    s.update()\n"
GO = "def go(s, opt, loss, on=1):\n"
REGION = "import torch\nwith torch.autocast('cpu'):\n    net(1)\n"
CLIP = "clipped-while-scaled"
SCHEDULE = "schedule-advanced-on-skip"
VALIDATION = "validation-outside-autocast"
INSIDE = "backward-inside-autocast"


@pytest.mark.parametrize(
    ("name", "script", "expected"),
    [
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n" + STEP, "    s.unscale_(opt)\n    clip_(1)  # here\n"),
        (
            CLIP,
            GO + BACKWARD + "    f()\n    clip_(1)  # here\n    s.unscale_(opt)\n" + STEP,
            BACKWARD + "    s.unscale_(opt)\n    f()\n    clip_(1)  # here\n" + STEP,
        ),
        (
            CLIP,
            GO + BACKWARD + "    all_reduce_(net)\n    clip_(1)  # here\n" + STEP,
            BACKWARD + "    all_reduce_(net)\n    s.unscale_(opt)\n    clip_(1)  # here\n" + STEP,
        ),
        (
            CLIP,
            GO + BACKWARD + "    if on % 2:\n        clip_(1)  # here\n" + STEP,
            BACKWARD + "    s.unscale_(opt)\n    if on % 2:\n        clip_(1)  # here\n" + STEP,
        ),
        (
            CLIP,
            "for i in on:\n"
            + BACKWARD
            + "    f()\n    if i % 4:\n        continue\n    g()\n    clip_(1)  # here\n"
            + STEP,
            "        continue\n    s.unscale_(opt)\n    g()\n    clip_(1)  # here\n",
        ),
        (
            "measured-while-scaled",
            GO + BACKWARD + "    for p in net:\n        total += p.grad.norm().item()  # here\n" + STEP,
            BACKWARD + "    s.unscale_(opt)\n    for p in net:\n",
        ),
        (
            "stepped-while-scaled",
            "def go(s, opt, loss):\r\n\x0c    s.scale(loss).backward()\r\n    if 1: opt.step()  # here\r\n",
            "    if 1: s.step(opt); s.update()  # here\r\n",
        ),
        ("stepped-while-scaled", GO + BACKWARD + "    opt.step()  # here", "    s.step(opt)  # here\n    s.update()"),
        (
            "loss-not-scaled",
            GO + BACKWARD + "    (loss +\n     on).backward(retain_graph=True)  # here\n" + STEP,
            "    s.scale(loss +\n     on).backward(retain_graph=True)  # here\n",
        ),
        (
            VALIDATION,
            REGION + "def test():\n\treturn f_loss(net(2), y)  # here\n",
            "\twith torch.autocast('cpu'):\n\t\treturn f_loss",
        ),
        (
            INSIDE,
            "with autocast('cpu'):\n  a = net(1)\n  a.backward(); a.item()  # here\n\n  print(1,\n 2)\n",
            "  a = net(1)\na.backward(); a.item()  # here\n\nprint(1,\n2)\n",
        ),
        (
            "scaler-not-saved",
            GO + BACKWARD + STEP + "    save({'opt': opt.state_dict()}, 'x')  # here\n",
            "save({'opt': opt.state_dict(), \"scaler\": s.state_dict()}, 'x')  # here\n",
        ),
        (
            "scaler-not-saved",
            GO
            + BACKWARD
            + STEP
            + "    save({'nets': {'a': a.state_dict()},\n      'opt': opt.state_dict()  # here\n    }, 'x')\n",
            "      'opt': opt.state_dict(),  # here\n      \"scaler\": s.state_dict(),\n    }, 'x')\n",
        ),
        (
            "half-with-autocast",
            "net = N().to(torch.float16)\nnet.train()\nwith autocast('cuda'):  # here\n    net(x)\n",
            "net = N()\nnet.train()\n",
        ),
        ("scaler-for-bf16", "s = GradScaler('cpu', )  # here\n", "GradScaler('cpu', enabled=False, )"),
        ("scaler-for-bf16", "s = GradScaler()  # here\n", "GradScaler(enabled=False)"),
        (
            "scaler-for-bf16",
            "try:\n    f()\nexcept E:\n    s = GradScaler()  # here\n",
            "    s = GradScaler(enabled=False)",
        ),
        (
            SCHEDULE,
            GO + BACKWARD + "    s.update()\n    x = s.get_scale()\n    rate.step()  # here\n",
            "    scale_before = s.get_scale()\n    s.update()\n    x = s.get_scale()\n    if s.get_scale() >= scale",
        ),
        (
            SCHEDULE,
            "scale_before = 1\n" + GO + BACKWARD + STEP + "    rate.step()  # here\n",
            "    scale_before1 = s.get_scale()\n    s.update()\n    if s.get_scale() >= scale_before1:\n        rate",
        ),
        (
            SCHEDULE,
            GO + BACKWARD + "    s.step(opt)\n    scale_before = s.get_scale()\n    s.update()\n    a.step()  # here\n",
            "    scale_before = s.get_scale()\n    s.update()\n    if s.get_scale() >= scale_before:\n",
        ),
    ],
)
def test_edits_keep_the_form_of_the_script(name: str, script: str, expected: str, tmp_path: Path) -> None:
    result = found_in(script, name, tmp_path)
    assert result.by_hand == ()
    assert expected in result.content().decode()
    compile(result.new, "train.py", "exec")


def found_in(script: str, name: str, folder: Path) -> Corrected:
    """What is made of a mistake in the line that ends in "# here"."""
    path = folder / "train.py"
    path.write_bytes(script.encode())
    [(line, text)] = [(number, text) for number, text in enumerate(script.split("\n"), 1) if "# here" in text]
    [result] = corrections([Run(path, mistakes=[MistakeRecord(name, "", "", str(path), line, text.strip())])])
    return result


@pytest.mark.parametrize(
    ("name", "script"),
    [
        # Gradients would be unscaled twice, or before the last backward.
        (CLIP, GO + "    for i in on:\n        s.scale(loss).backward()\n        clip_(1)  # here\n    s.step(opt)\n"),
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n    if on % 2:\n        s.step(opt)\n        s.update()\n"),
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n" + BACKWARD + STEP),
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n" + STEP + "    s.unscale_(opt)\n"),
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n    s.unscale_(opt)  # now\n" + STEP),
        (
            CLIP,
            GO + BACKWARD + "    clip_(1)  # here\n    s.unscale_(opt)\n    if on:\n        s.unscale_(opt)\n" + STEP,
        ),
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n    if on:\n        s.unscale_(opt)\n" + STEP),
        (CLIP, GO + BACKWARD + "    if on % 2:\n        clip_(1)  # here\n    if on % 2:\n        s.step(opt)\n"),
        (CLIP, "def clip(s, opt):\n    s.unscale_(opt)\n" + GO + BACKWARD + "    clip_(1)  # here\n" + STEP),
        (
            CLIP,
            "class T:\n  def f(self):\n    clip_(1)  # here\n"
            "  def g(self):\n    self.s.scale(1).backward()\n    self.s.step(self.o)\n",
        ),
        (CLIP, GO + BACKWARD + "    s.unscale_(opt)\n    f()\n    clip_(1)  # here\n" + STEP),
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n    if on:\n        return\n" + STEP),
        # Of another optimizer, or of what a loop runs over.
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n    s.step(opt)\n    s.step(on)\n"),
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n" + STEP + "def other(g):\n    g.step()\n    g.zero_grad()\n"),
        (CLIP, GO + BACKWARD + "    clip_(1)  # here\n    for o in opt:\n        s.step(o)\n"),
        (CLIP, GO + "    clip = lambda: clip_(1)  # here\n" + BACKWARD + STEP),
        (CLIP, GO + BACKWARD + "    a = 1; clip_(1)  # here\n" + STEP),
        ("stepped-while-scaled", GO + BACKWARD + "    for o in opt:\n        o.step()  # here\n"),
        ("stepped-while-scaled", GO + BACKWARD + "    return opt.step()  # here\n"),
        (
            "stepped-while-scaled",
            GO + "    if on:\n        s.scale(loss).backward()\n    else:\n        f()\n    opt.step()  # here\n",
        ),
        ("stepped-while-scaled", GO + BACKWARD + "    opt.step(closure=f)  # here\n"),
        (
            "stepped-while-scaled",
            "f = lambda o: s.step(o)\n" + GO + "    if on:\n        s.scale(1).backward()\n    opt.step()  # here\n",
        ),
        ("never-zeroed", GO + "    for i in on:\n        i.backward()\n    loss.backward()\n    opt.step()  # here\n"),
        ("never-zeroed", GO + "    loss.backward()\n    return opt.step()  # here\n"),
        ("never-zeroed", GO + "    loss.backward()\n    [o.step() for o in opt]  # here\n"),
        ("never-zeroed", GO + "    loss.backward()\n    s.step(optimizer=opt)  # here\n"),
        ("never-zeroed", GO + "    loss.backward()\n    opt.step(f)  # here\n"),
        ("never-zeroed", GO + "    for i in on:\n        loss.backward()\n    opt.step()  # here\n"),
        ("never-zeroed", GO + "    loss.backward()\n    opt.step()  # here\n    on.step()\n    on.zero_grad()\n"),
        ("loss-not-scaled", GO + BACKWARD + "    torch.autograd.backward(loss)  # here\n" + STEP),
        (
            "loss-not-scaled",
            GO + "    if s:\n        s.scale(loss).backward()\n    else:\n        loss.backward()  # here\n",
        ),
        # The region would take in, or leave out, something else.
        (VALIDATION, REGION + "out = net(2)  # here\nprint(out.numpy())\n"),
        (VALIDATION, REGION + "def f():\n    yield f_loss(net(2), y)  # here\n"),
        (VALIDATION, REGION + "f_loss(net(2), '''\n''')  # here\n"),
        (
            VALIDATION,
            "import torch\nwith torch.autocast('cpu', enabled=False):\n    net(1)\nf_loss(net(2), y)  # here\n",
        ),
        (
            VALIDATION,
            "import torch\ndef go(on):\n    with torch.autocast('cpu', enabled=on):\n        net(1)\n"
            "def f(on):\n    f_loss(net(2), y)  # here\n",
        ),
        (VALIDATION, REGION + "with torch.autocast('cuda'):\n    net(1)\nf_loss(net(2), y)  # here\n"),
        (INSIDE, "with autocast('cpu'):\n    for a in net(1):\n        a.backward()  # here\n"),
        (INSIDE, "with no_sync(), autocast('cpu'):\n    a = net(1)\n    a.backward()  # here\n"),
        (INSIDE, "with autocast('cpu'):\n    a = net(1)\n    a.backward()  # here\n    b = net(a)\n"),
        (INSIDE, "with autocast('a'):\n    with autocast('cpu'):\n        a = net(1)\n        a.backward()  # here\n"),
        ("scaler-not-saved", GO + BACKWARD + STEP + "    save({'a': a.state_dict()}, opt.state_dict())  # here\n"),
        ("scaler-not-saved", GO + BACKWARD + STEP + "    save({'opt': opt.state_dict(), 'scaler': 1})  # here\n"),
        ("scaler-for-bf16", "s = GradScaler('cpu', 1024.0, 2.0, 0.5, 2000, True)  # here\n"),
        ("scaler-for-bf16", "s = GradScaler(enabled=x)  # here\n"),
        ("scaler-for-bf16", "s = GradScaler(**x)  # here\n"),
        (
            "half-with-autocast",
            "net = N().half()\nnet.train()\nnet(x.half())\nwith autocast('a'):  # here\n    net(x)\n",
        ),
        ("half-with-autocast", "net = N(dtype=torch.float16)\nwith autocast('a'):  # here\n    net(x)\n"),
        (SCHEDULE, GO + BACKWARD + "    s.step(opt)\n    if on:\n        s.update()\n    schedule.step()  # here\n"),
    ],
)
def test_what_one_form_of_script_does_not_decide_is_left(name: str, script: str, tmp_path: Path) -> None:
    result = found_in(script, name, tmp_path)
    assert len(result.by_hand) == 1
    assert (result.new, result.diff()) == (script, "")


def test_of_two_mistakes_with_one_remedy_the_first_line_is_edited(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(GO + BACKWARD + "    log(norm(1))\n    clip_(1)\n" + STEP)
    result = corrected(path, (CLIP, 4), ("measured-while-scaled", 3))
    assert len(result.fixed) == 2
    assert [line.strip() for line in result.new.splitlines()[2:5]] == ["s.unscale_(opt)", "log(norm(1))", "clip_(1)"]


@pytest.mark.parametrize("unscaling", ["", "    s.unscale_(opt)\n"])
def test_two_mistakes_never_unscale_twice(unscaling: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(GO + BACKWARD + "    if on % 10 == 0:\n        log(norm(1))\n    clip_(1)\n" + unscaling + STEP)
    result = corrected(path, ("measured-while-scaled", 4), (CLIP, 5))
    assert (len(result.fixed), result.edits) == (2, 1)
    assert result.new_lines() == ([] if unscaling else ["s.unscale_(opt)"]), "a line that is moved is no new one"
    assert result.new == GO + BACKWARD + "    s.unscale_(opt)\n" + path.read_text()[len(GO + BACKWARD) :].replace(
        unscaling, "", bool(unscaling)
    )


@pytest.mark.parametrize(
    ("script", "encoding"),
    [("s = GradScaler()\n", "utf-8-sig"), ("# coding: latin-1\ns = GradScaler()  # \xe9\n", "latin-1")],
)
def test_a_script_keeps_its_encoding(script: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(script.encode(encoding))
    line = script.count("\n")
    [result] = corrections(
        [
            Run(tmp_path, mistakes=[MistakeRecord("scaler-for-bf16", "", "", str(file), line, script.splitlines()[-1])])
            for file in (tmp_path / "train.py", tmp_path / ".." / tmp_path.name / "train.py")
        ]
    )  # one script by two names
    assert result.content() == script.replace("()", "(enabled=False)").encode(encoding)


def test_long_and_deep_scripts_are_read_in_seconds_or_left(tmp_path: Path) -> None:
    long = "s = GradScaler()  # here\n" + "a.b(c).d(e.f)\nx = y.z\n" * 5000
    assert "enabled=False" in found_in(long, "scaler-for-bf16", tmp_path).new
    mistake = MistakeRecord("scaler-for-bf16", "", "", str(tmp_path / "train.py"), 99_999, "x")
    [gone] = corrections([Run(tmp_path, mistakes=[mistake])])
    assert "has changed since the run" in gone.by_hand[0][1]
    deep = "s = GradScaler()  # here\nx = " + "-" * 30_000 + "1\n"
    assert "cannot be read" in found_in(deep, "scaler-for-bf16", tmp_path).by_hand[0][1]


EPSILON = "and add an epsilon"


@pytest.mark.parametrize(
    ("op", "advice", "dtype", "line", "expected"),
    [
        ("aten.div", EPSILON, "bfloat16", "y = a / b.norm(dim=-1)", "y = a / b.norm(dim=-1).clamp_min(1e-12)"),
        ("aten.div", EPSILON, "float16", "y = a / b.norm(dim=-1)", ""),
        ("aten.div", EPSILON, "float32", "y = a / b", ""),
        ("aten.div", EPSILON, "float32", "y = a / b.std() / 2", ""),
        ("aten.div", EPSILON, "float32", "y = a / math.sqrt(8)", ""),
        ("aten.div", EPSILON, "float32", "y = a / self.norm(b)", ""),
        ("aten.div", EPSILON, "float32", "y = a / b.norm().clamp_min(1e-12)", ""),
        ("aten.reciprocal", EPSILON, "float32", "y = torch.reciprocal(w)", ""),
        ("aten.reciprocal", EPSILON, "float32", "y = 1 / w.norm()", "y = 1 / w.norm().clamp_min(1e-12)"),
        ("aten.mul", "the gradient of 1 / x: an epsilon", "float32", "1 / w.std()", "1 / w.std().clamp_min(1e-12)"),
        ("aten.div", EPSILON, "float32", "y = a / b.var().sqrt()", "y = a / b.var().clamp_min(1e-12).sqrt()"),
        ("aten.div", EPSILON, "float32", "y = a / torch.sqrt(b + c)", "y = a / torch.sqrt((b + c).clamp_min(1e-12))"),
        ("aten.div", EPSILON, "float32", "y = a / b.var().sqrt().sqrt()", ""),
        (
            "aten.mul",
            "the gradient of sqrt: an epsilon",
            "float32",
            "(a + b).sqrt()",
            "(a + b).clamp_min(1e-12).sqrt()",
        ),
        ("aten.log", EPSILON, "float32", "torch.log(p - q) * 2", "torch.log((p - q).clamp_min(1e-12)) * 2"),
        ("aten.log", EPSILON, "float32", "torch.log(p - q).sum()", "torch.log((p - q).clamp_min(1e-12)).sum()"),
        ("aten.log", EPSILON, "float32", "math.log(p)", ""),
        (
            "aten.acos_",
            "and clamp them",
            "float32",
            "y = torch.acos(c)",
            "y = torch.acos(c.clamp(-1 + 1e-6, 1 - 1e-6))",
        ),
        ("aten.acos_", "and clamp them", "bfloat16", "y = torch.acos(c)", ""),
        ("aten.linear", "find where they come from", "float32", "y = linear(c)", ""),
    ],
)
def test_the_input_of_an_op_is_bounded(
    op: str, advice: str, dtype: str, line: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(f"{line}\n")
    text = f"text\nat {tmp_path / 'model.py'}:1: {line}\ninput 0: {dtype} (4,), 0 .. 1"
    record = DiagnosisRecord(3, "fault", "forward", "", op, text, advice)
    [result] = corrections([Run(tmp_path, diagnoses=[record])])
    assert result.new == f"{expected or line}\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "if 1:\n    y = f(\n        a,\n        b / c.norm(),\n    )\n",
            "y = f(\n    a,\n    b / c.norm().clamp_min(1e-12),\n)",
        ),
        ("for _ in a:\n    for y in b / c.norm():\n        f(y)\n", "for y in b / c.norm().clamp_min(1e-12):"),
    ],
)
def test_a_short_edit_is_shown_with_all_of_its_statement(old: str, new: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(old)
    [(line, text)] = [(number, text) for number, text in enumerate(old.splitlines(), 1) if "norm" in text]
    text = f"text\nat {tmp_path / 'model.py'}:{line}: {text.strip()}\ninput 0: float32 (4,), 0 .. 1"
    [result] = corrections(
        [Run(tmp_path, diagnoses=[DiagnosisRecord(3, "fault", "forward", "", "aten.div", text, EPSILON)])]
    )
    assert result.new_lines() == new.splitlines()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "if torch:\r\n  l = f_loss(y, t)  # here\r\n",
            'if torch:\r\n  with torch.autocast("cpu", enabled=False):\r\n      l = f_loss(y.float(), t)  # here\r\n',
        ),
        ("l = f_loss(y, t)  # here\n", ""),
        ("a = torch; l = f_loss(y, t)  # here\n", ""),
        ("torch\nl = f_loss(net(x), t)  # here\n", ""),  # the model would run in fp32 too
        ("torch\nl = y.pow(gamma)  # here\n", ""),  # which may be a number
    ],
)
def test_a_loss_that_overflows_is_computed_in_fp32(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(old.encode())
    line = old[: old.index("# here")].count("\n") + 1
    code = loss_in_fp32(ScriptLine(Place(str(path), line)), "cpu")
    text = f"text\nat {path}:{line}: {old.splitlines()[line - 1].strip()}\ninput 0: float16 (4,), 0 .. 1"
    record = DiagnosisRecord(3, "fault", "loss", "", "aten.mul", text, "compute the loss in fp32: ...", code=code)
    [result] = corrections([Run(tmp_path, diagnoses=[record])])
    assert result.content().decode() == (new or old)


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
    assert "the line has changed since the run, or by this edit or another: run the script again" in said


def test_a_remedy_without_a_line_is_left_by_hand_but_for_a_scale(project: Path) -> None:
    advice, code = "keep 0 in fp32: castwise.autocast(...)", "policy = ...\nwith castwise.autocast(...):"
    overflow = DiagnosisRecord(
        3, "overflow", "forward", "0", "aten.addmm", "forward: 0", advice, None, "In 0.", code=code
    )
    scale = DiagnosisRecord(
        1, "overflow", "backward", "0", "aten.mm", "", "lower the scale", None, "S.", remedy="scale"
    )
    file = project / "castwise-run" / "1" / "monitor.jsonl.gz"
    kept = [line for line in recorded.lines_in(file) if '"mistake"' not in line]
    recorded.write_lines(file, *kept, *(json.dumps(record.to_json()) for record in (scale, overflow)))
    shown = (
        "In 0.\n  by hand, because no line of the script is known for it:\n    policy = ...\n    with castwise.autocast"
    )
    returned, diff, said = fix()
    assert (returned, diff) == (1, "")
    assert shown in said
    assert "nothing to edit" not in said
    assert json.loads(fix("--json")[1]) == {
        "scripts": [],
        "without_line": [{"text": "In 0.", "remedy": advice, "code": code}],
    }
    recorded.write_lines(file, *kept, json.dumps(scale.to_json()))
    assert fix() == (0, "", "castwise fix: the run has found nothing to edit in its script\n")


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
    assert "train.py was left, because it has changes that are not committed: commit it" in fix("--apply")[2]
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
