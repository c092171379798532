"""The code that a message shows works where it is pasted, in a script with names of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.mistakes.pasting import pasted
from tests.mistakes.test_mistakes import MISTAKES, needs, run, wrong_lines

from castwise._mistakes import corrected_code
from castwise._mistakes.mistake import Place
from castwise._mistakes.script_line import ScriptLine, in_names_of_main

OWN_NAMES = {
    "scaler": "grad_scaler",
    "optimizer": "opt",
    "model": "net",
    "loss": "objective",
    "output": "prediction",
    "schedule": "rates",
}
# What corrects these is in several places, or in none that the line shows: their remedy is a sentence.
IN_WORDS = {
    "loss_inf_gradients_finite",
    "loss_inf_gradients_finite_with_a_scaler",
    "other_scaler",
    "updated_between_micro_batches",
}


def renamed(script: str) -> str:
    for name, own in OWN_NAMES.items():
        script = re.sub(rf"(?<![\w.'\"]){name}(?![\w-])", own, script)
    return script


@pytest.mark.parametrize("script", [pytest.param(each, marks=needs(each), id=each.stem) for each in MISTAKES])
def test_a_script_with_the_code_of_the_message_runs_without_the_mistake(script: Path, tmp_path: Path) -> None:
    torch._dynamo.reset()
    wrong, text = tmp_path / "wrong.py", renamed(script.read_text())
    wrong.write_text(text)
    [mistake], _ = run(wrong)
    assert [mistake.name] == [name for name, _ in wrong_lines(script)]
    assert not re.search(r"\b(optimizer|model|loss)\.(?!backward_pass)|\.\.\.", mistake.corrected)
    if script.stem in IN_WORDS:
        assert not re.search(r"[()=]", mistake.corrected)
        return
    right = tmp_path / "right.py"
    right.write_text(pasted(text, mistake))
    with torch._functorch.config.patch(backward_pass_autocast="same_as_forward"):  # which one of them sets
        mistakes, _ = run(right)
    assert mistake.name not in [each.name for each in mistakes]


IN_A_CLASS = """\
class Trainer:
    def __init__(self, net):
        self.net, self.amp = net, torch.amp.GradScaler("cuda")
        self.grad_scaler = torch.amp.GradScaler("cuda")
        self.opt = AdamW(net.parameters())

    def step(self):
        total = 0
        for p in self.net.parameters():
            total += p.grad.norm().item()  # here
        return total
"""
IN_A_FUNCTION = """\
def train(s, opt, net, batches):
    for batch in batches:
        with autocast("cuda"):
            loss = net(batch)
            s.scale(loss).backward()  # here
            nn.utils.clip_grad_norm_(
                net.parameters(), 1.0
            )
            s.step(opt)
        s.update()
"""
CLIPPED_FIRST = """\
for batch in batches:
    s.scale(net(batch)).backward()
    clip_grad_norm_(net.parameters(), 1.0)  # here
    s.unscale_(opt)
    s.step(opt)
"""
LOGGED_AND_CLIPPED_FIRST = """\
for batch in batches:
    s.scale(net(batch)).backward()
    if step % 10 == 0:
        log(get_total_norm(net))
    clip_grad_norm_(net.parameters(), 1.0)
    s.unscale_(opt)
    s.step(opt)
"""
UNSCALED_ON_A_BRANCH = """\
for batch in batches:
    s.scale(net(batch)).backward()
    log(get_total_norm(net))  # here
    if last:
        s.unscale_(opt)
        s.step(opt)
"""
OF_A_GAN = """\
for real in batches:
    s.scale(loss_of(critic, real)).backward()
    clip_grad_norm_(critic.parameters(), 1.0)  # here
    s.step(opt_c)
    s.scale(loss_of(maker, real)).backward()
    clip_grad_norm_(maker.parameters(), 1.0)
    s.step(opt_m)
    s.update()
"""
OF_ONE_LOSS = """\
for batch in batches:
    s.scale(net(batch)).backward()
    clip_grad_norm_(net.parameters(), 1.0)  # here
    s.step(opt_a)
    s.step(opt_b)
    s.update()
"""
IN_A_METHOD = """\
class Trainer:
    def __init__(self, net):
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1)
        self.rates = StepLR(self.opt, 1)

    def step(self, x):
        with torch.autocast("cuda", dtype=torch.float16):  # here
            loss = self.net(x)
        loss.backward()
        self.opt.step()
        self.rates.step()
"""
WITH_A_VARIABLE = """\
ctx = nullcontext() if cpu else torch.autocast("cuda")
with ctx:
    out = net(x)
loss = criterion(out, y)
loss = loss / 2
s.scale(loss).backward()  # here
"""
OF_SEVERAL = """\
s.scale(net(x)).backward()
for opt in opts:
    s.step(opt)
norm = get_total_norm(net)  # here
"""


@pytest.mark.parametrize(
    ("correct", "script", "expected"),
    [
        (
            corrected_code.unscaled_before,
            OF_A_GAN,
            "s.unscale_(opt_c)\nclip_grad_norm_(critic.parameters(), 1.0)",
        ),
        (
            corrected_code.unscaled_before,
            OF_ONE_LOSS,
            "s.unscale_(optimizer)\nclip_grad_norm_(net.parameters(), 1.0)\n# optimizer is that of the training loop",
        ),
        (corrected_code.unscaled_before, IN_A_CLASS, "# before line 9:\nself.grad_scaler.unscale_(self.opt)"),
        (
            corrected_code.after_region,
            IN_A_FUNCTION,
            "# moved from lines 5 to 9 to after the block of line 3:\ns.scale(loss).backward()\n"
            "nn.utils.clip_grad_norm_(\n    net.parameters(), 1.0\n)\ns.step(opt)",
        ),
        (
            corrected_code.after_region,
            "with autocast('cuda'):\n    out = net(x)\n    if last:\n        out.sum().backward()  # here\n",
            "# moved from lines 3 to 4 to after the block of line 1:\nif last:\n    out.sum().backward()",
        ),
        (
            corrected_code.after_region,
            "with autocast('cuda'):\n    for x in xs:\n        net(x).backward()  # here\n",
            "# after the autocast region, not in it:\nnet(x).backward()",
        ),
        (
            corrected_code.clipped_after_unscaling,
            CLIPPED_FIRST,
            "# moved from line 4 to before line 3:\ns.unscale_(opt)\n"
            "# or castwise's s.clip_grad_norm_(opt, max_norm), which reads them once",
        ),
        (
            corrected_code.unscaled_before,
            LOGGED_AND_CLIPPED_FIRST.replace("log(get_total_norm(net))", "log(get_total_norm(net))  # here"),
            "# moved from line 6 to before line 3:\ns.unscale_(opt)",
        ),
        (  # the same edit, so that both can be made
            corrected_code.unscaled_before,
            LOGGED_AND_CLIPPED_FIRST.replace("1.0)", "1.0)  # here"),
            "# moved from line 6 to before line 3:\ns.unscale_(opt)",
        ),
        (
            corrected_code.unscaled_before,
            LOGGED_AND_CLIPPED_FIRST.replace("1.0)", "1.0)  # here").replace("    s.unscale_(opt)\n", ""),
            "# before line 3:\ns.unscale_(opt)",
        ),
        (  # not before a backward that adds scaled gradients
            corrected_code.unscaled_before,
            LOGGED_AND_CLIPPED_FIRST.replace("(net.parameters(), 1.0)", "(net.parameters(), 1.0)  # here").replace(
                "    s.unscale_(opt)\n", "    s.scale(net(2)).backward()\n    s.unscale_(opt)\n"
            ),
            "# after line 7, which unscales them:\nclip_grad_norm_(net.parameters(), 1.0)",
        ),
        (
            corrected_code.unscaled_before,
            UNSCALED_ON_A_BRANCH,
            "# after line 5, which unscales them:\nlog(get_total_norm(net))",
        ),
        (
            corrected_code.unscaled_before,
            OF_SEVERAL,
            "s.unscale_(optimizer)\nnorm = get_total_norm(net)\n# optimizer is that of the training loop",
        ),
        (
            partial(corrected_code.scaled_training, device="cuda"),
            IN_A_METHOD,
            '# after line 3:\nself.scaler = torch.amp.GradScaler("cuda")\n'
            "# instead of line 9:\nself.scaler.scale(loss).backward()\n"
            "# instead of line 10:\nself.scaler.step(self.opt)\nself.scaler.update()\n"
            "# or dtype=torch.bfloat16, which needs no scaler",
        ),
        (
            corrected_code.loss_in_region,
            WITH_A_VARIABLE,
            "# moved from lines 4 to 5 to the end of the block of line 2:\nloss = criterion(out, y)\nloss = loss / 2",
        ),
        (
            corrected_code.made_once,
            "def train_epoch(net):\n    s = GradScaler()  # here\n    for x in data:\n        net(x)\n",
            "# once, before the loop that calls train_epoch, and passed to it:\ns = GradScaler()",
        ),
        (
            corrected_code.saved_with_scaler,
            "def save(opt):\n    torch.save({'opt': opt.state_dict()}, 'x.pt')  # here\n",
            "torch.save({'opt': opt.state_dict(), \"scaler\": scaler.state_dict()}, 'x.pt')\n"
            "# scaler is that of the training loop",
        ),
        (
            partial(corrected_code.scaler_for, device="cpu"),
            "from torch.cuda.amp import GradScaler\ns = GradScaler(init_scale=2.0**10)  # here\n",
            's = torch.amp.GradScaler("cpu", init_scale=2.0**10)',
        ),
        (
            corrected_code.in_fp32,
            "net = Net().to(torch.float16)\nnet.train()\nwith autocast('cuda'):  # here\n    net(1)\n",
            "# instead of line 1:\nnet = Net()",
        ),
        (
            corrected_code.in_fp32,
            "x = x.half()\nwith autocast('cuda'):  # here\n    net(x)\n",
            "keep the weights in fp32, without half: autocast casts the inputs of each op",
        ),
        (
            partial(corrected_code.loss_in_fp32, device="cuda"),
            "l = criterion(out, y)  # here\n",
            'with torch.autocast("cuda", enabled=False):\n    l = criterion(out.float(), y)',
        ),
        (
            partial(corrected_code.loss_in_fp32, device="cuda"),  # the model stays in its region
            "l = criterion(net(x), y)  # here\n",
            '# around the loss, with .float() on its arguments:\nwith torch.autocast("cuda", enabled=False):',
        ),
        (
            partial(corrected_code.in_region, region="torch.autocast('cuda')"),
            "if net(x) > 0:  # here\n    y = 1\n",
            "# around this line, and around what uses its result:\nwith torch.autocast('cuda'):",
        ),
    ],
)
def test_the_names_and_the_lines_are_those_of_the_script(
    correct: Callable[[ScriptLine], str], script: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    line = next(number for number, text in enumerate(script.splitlines(), 1) if text.endswith("# here"))
    assert correct(ScriptLine(Place(str(path), line))) == expected
    elsewhere = correct(ScriptLine(Place("<nowhere>", 1))), correct(ScriptLine(None))
    assert elsewhere[0] == elsewhere[1] != ""


def test_a_remedy_has_the_names_of_the_script_that_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text("def main(net):\n    opt = AdamW(net.parameters())\n    s.scale(net(1)).backward()\n")
    code = "with autocast(policy=policy.bind(model)):\nscaler = GradScaler()"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)  # no file under pytest-xdist
    assert in_names_of_main(code) == "with autocast(policy=policy.bind(net)):\ns = GradScaler()"
    monkeypatch.delattr(sys.modules["__main__"], "__file__")  # as in a notebook
    assert in_names_of_main(code) == code
