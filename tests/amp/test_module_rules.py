"""Which rule decides which module."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from castwise import Policy
from castwise.amp.module_rules import decide


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)
        self.loss = nn.CrossEntropyLoss()


def computed(modules: dict[Any, str], model: nn.Module | None = None) -> dict[str, str]:
    decisions = decide(Policy(compute="bfloat16", modules=modules), Model() if model is None else model)
    return {decision.name: decision.compute for decision in decisions if decision.compute != "bfloat16"}


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"head": "float32"}, ["head"]),
        ({"*.norm": "float32"}, ["blocks.0.norm", "blocks.1.norm"]),
        ({"*norm": "float32"}, ["blocks.0.norm", "blocks.1.norm", "norm"]),
        ({"blocks.[01].norm": "float32"}, ["blocks.0.norm", "blocks.1.norm"]),
        ({r"re:blocks\.\d\.norm": "float32"}, ["blocks.0.norm", "blocks.1.norm"]),
        ({re.compile("HEAD|NORM", re.IGNORECASE): "float32"}, ["norm", "head"]),
        ({nn.LayerNorm: "float32"}, ["blocks.0.norm", "blocks.1.norm", "norm"]),
        ({"type:LayerNorm": "float32"}, ["blocks.0.norm", "blocks.1.norm", "norm"]),
        ({"type:torch.nn.LayerNorm": "float32"}, ["blocks.0.norm", "blocks.1.norm", "norm"]),
        ({"type:*Norm*": "float32"}, ["blocks.0.norm", "blocks.1.norm", "norm"]),
        ({"last:*": "float32"}, ["head"]),
        ({"last:Embedding": "float32"}, ["token"]),
        ({"maybe:type:Conv*": "float32", "head": "exclude"}, ["head"]),
        ({"maybe:head": "float32"}, ["head"]),
        ({"blocks.0.mlp": "float32"}, ["blocks.0.mlp", "blocks.0.mlp.0", "blocks.0.mlp.1", "blocks.0.mlp.2"]),
        (
            {"blocks.0.mlp": "float32", "blocks.0.mlp.2": "bfloat16"},
            ["blocks.0.mlp", "blocks.0.mlp.0", "blocks.0.mlp.1"],
        ),
        ({"blocks.*.norm": "float32", "blocks.1.norm": "inherit"}, ["blocks.0.norm"]),
        (
            {"blocks.1": "float32", "blocks.1.*": "inherit", "*.mlp.*": "bfloat16"},
            ["blocks.1", "blocks.1.norm", "blocks.1.mlp"],
        ),
    ],
)
def test_a_rule_holds_for_what_its_key_matches_and_for_modules_inside(
    modules: dict[Any, str], expected: list[str]
) -> None:
    assert list(computed(modules)) == expected


def test_a_name_decides_over_a_pattern_over_a_type_and_a_later_rule_over_an_earlier() -> None:
    rules = {
        "blocks.0.norm": "float16",  # a name, before all that match it as well
        "*.norm": "float32",
        "blocks.?.norm": "exclude",
        nn.LayerNorm: "bfloat16",
    }
    by_key = {
        decision.name: decision.key
        for decision in decide(
            Policy(
                compute="float16",
                modules={"*.norm": "float32", **{k: v for k, v in rules.items() if k != "blocks.?.norm"}},
            ),
            Model(),
        )
    }
    assert by_key["blocks.0.norm"] == "blocks.0.norm"
    assert by_key["blocks.1.norm"] == "*.norm"
    assert by_key["norm"] == "type:torch.nn.modules.normalization.LayerNorm"
    later = Policy(compute="float16", modules={"*norm": "float32", "blocks.*.norm": "bfloat16"})
    assert {d.name: d.compute for d in decide(later, Model())}["blocks.0.norm"] == "bfloat16"


def test_rules_that_overlap_in_part_bind() -> None:
    policy = Policy(
        compute="float16",
        modules={"*.norm": "float32", "head": "float32", "blocks.0.*": "bfloat16"},
        ops={"softmax": "float16", "layer_norm": "float16"},
        output="float32",
    )
    assert policy.bind(model := Model()) is policy.bind(model)


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ({"hed": "float32"}, "modules['hed'] matches no module of the model; did you mean 'head'?"),
        ({"block.*": "float32"}, "modules['block.*'] matches no module of the model; did you mean 'blocks"),
        (
            {"type:LayerNrm": "float32"},
            "modules['type:LayerNrm'] matches no module of the model; did you mean 'LayerNorm'",
        ),
        ({nn.Conv2d: "float32"}, "modules['type:torch.nn.modules.conv.Conv2d'] matches no module of the model"),
        ({"last:Conv*": "float32"}, "modules['last:Conv*'] matches no module"),
        ({"re:[": "float32"}, "'re:[' is not a regular expression: "),
        ({"he*": "float16", "head": "float32"}, "modules['he*'] = 'float16' contradicts modules['head'] = 'float32'"),
        ({"*.norm": "float32", "blocks.*": "float16"}, "modules['*.norm'] = 'float32' contradicts modules['blocks.*']"),
    ],
)
def test_keys_that_match_nothing_or_never_decide_are_errors(modules: dict[Any, str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Policy(compute="bfloat16", modules=modules).bind(Model())


def test_a_module_with_two_names_has_one_rule() -> None:
    model = Model()
    model.decoder = model.head
    assert list(computed({"head": "float32"}, model)) == ["head", "decoder"]
    with pytest.raises(ValueError, match=re.escape("'head' and 'decoder' are one module, for which modules['head']")):
        computed({"head": "float32", "decoder": "float16"}, model)
    assert computed({"he*": "float16", "decoder": "float32"}, model) == {"head": "float32", "decoder": "float32"}


def test_names_are_those_without_wrappers() -> None:
    model = Model()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    for wrapped in (model, torch.compile(model), nn.DataParallel(model)):
        assert list(computed({"blocks.0.norm": "float32", "head": "float32"}, wrapped)) == ["blocks.0.norm", "head"]


def test_only_modules_have_policies() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        Policy(compute="bfloat16").bind(3)  # type: ignore[arg-type]


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
        "writes in place: the source is cast to the destination",
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
    with pytest.raises(TypeError, match=re.escape("units must be several keys, as in ['blocks.*']")):
        policy.explain(model, units="blocks.*")
