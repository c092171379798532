"""What `Policy.explain` prints."""

from __future__ import annotations

import re

import pytest
from tests.amp.models import Block, Model
from torch import nn

from castwise import Policy


def test_an_explanation_says_what_decided(capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy(
        compute="bfloat16",
        modules={"*norm": "float32", "blocks.1": "exclude", "blocks.1.mlp.*": "inherit"},
        ops={"softmax": "float32"},
        output="float32",
        in_place="cast",
    )
    model = Model()
    policy.explain(model)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "module"
    rows = {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in lines[1:]}
    assert rows["(root)"] == ["Model", "0", "bfloat16", "compute"]
    assert rows["head"] == ["Linear", "40", "bfloat16", "compute"]
    assert rows["blocks.0.norm"] == ["LayerNorm", "8", "float32", "*norm"]
    assert rows["blocks.1"] == ["Block", "0", "float32 (autocast off)", "blocks.1"]
    assert rows["blocks.1.mlp.0"] == ["Linear", "20", "float32", "blocks.1 (of blocks.1)"]
    assert lines[-3:] == [
        "ops: softmax in float32",
        "in-place writes: the source is cast to the destination's dtype",
        "outputs: float32",
    ]
    assert not model._forward_pre_hooks
    assert repr(policy).startswith("Policy(compute='bfloat16', modules={'*norm': 'float32', ")
    Policy(compute="bfloat16").explain(nn.Linear(1, 1))
    assert capsys.readouterr().out.splitlines()[1:] == ["(root)  Linear           2  bfloat16     compute"]
    policy.explain(model, units=[Block, "*.mlp"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in lines[1:]}
    assert rows["blocks.0.mlp.0"] == ["Linear", "20", "bfloat16", "bfloat16 with blocks.0.mlp", "compute"]
    assert rows["blocks.0.norm"] == ["LayerNorm", "8", "float32", "own dtype with blocks.0", "*norm"]
    assert rows["token"] == ["Embedding", "32", "bfloat16", "own dtype with (root)", "compute"]
    with pytest.raises(TypeError, match=re.escape("units must be a list of keys, as in ['blocks.*']")):
        policy.explain(model, units="blocks.*")


def test_a_table_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40))
    policy = Policy("bfloat16", modules={"": "float16", "1": "exclude"}, ops={"softmax": "float32", "sum": "float16"})
    text = policy.explain(model, units=["0"])
    assert (
        capsys.readouterr().out
        == f"{text}\n"
        == """\
module  type        parameters  computes in             gathered in            decided by
(root)  Sequential           0  float16                 own dtype with (root)  (root)
0       Linear           1,640  float16                 float16 with 0         (root) (of (root))
1       LayerNorm           80  float32 (autocast off)  own dtype with (root)  1
ops: softmax in float32, sum in float16
"""
    )
    policy.explain(model)
    assert capsys.readouterr().out.splitlines()[0].split() == [
        *("module", "type", "parameters", "computes", "in", "decided", "by"),
    ]
