"""Which rule decides which module."""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from tests.amp.models import Model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from castwise import Policy
from castwise.policy._module_rules import decide, spelled


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
        ({"maybe:last:Block": "float32"}, []),  # it has no weights of its own
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
    assert computed({"head": "float32", "re:head|norm": "float16"}) == {"norm": "float16", "head": "float32"}
    perhaps = computed({"*norm": "float32", "maybe:type:L*": "float16"})
    assert perhaps["norm"] == "float32", "a type decides over a pattern if it is only perhaps there"
    assert perhaps["head"] == "float16"
    assert computed({"X": "float32", "*": "float16"}, nn.Sequential(OrderedDict(X=nn.Linear(1, 1)))) == {
        "": "float16",
        "X": "float32",
    }


def test_the_last_one_is_the_last_with_a_matrix() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert list(computed({"last:*": "float32"}, model)) == ["0"]


def test_a_rule_for_a_container_is_in_force_in_what_it_holds() -> None:
    def effective(modules: dict[Any, str]) -> dict[str, str | None]:
        return {each.name: each.effective for each in decide(Policy(compute="bfloat16", modules=modules), Model())}

    of_list = effective({"blocks": "float32", "blocks.1": "float16"})
    assert [of_list[name] for name in ("", "blocks", "blocks.0", "blocks.1")] == [None, "float32", "float32", "float16"]
    of_sequence = effective({"blocks.0.mlp": "float32"})
    assert of_sequence["blocks.0.mlp"] == "float32"
    assert of_sequence["blocks.0.mlp.0"] is None, "its forward is called from that of the Sequential"


def test_types_and_expressions_are_spelled_with_what_they_say() -> None:
    assert spelled(re.compile("he.d")) == "re:he.d"
    assert spelled(re.compile("he.d", re.IGNORECASE | re.DOTALL)) == "re:(?is)he.d"
    assert spelled(re.compile("he.d", re.VERBOSE | re.MULTILINE | re.ASCII)) == "re:(?amx)he.d"
    assert spelled("head") == "head"


def test_a_decision_names_its_rule_and_the_module_around_that_has_it() -> None:
    modules = {"blocks": "exclude", "blocks.0.mlp": "inherit", "*.1.norm": "float16", "head": "float32"}
    decisions = decide(Policy(compute="bfloat16", modules=modules), model := Model())
    assert [(each.name, each.module) for each in decisions] == list(model.named_modules())
    by_name = {each.name: each[2:7] for each in decisions}
    assert by_name[""] == by_name["token"] == by_name["norm"] == (None, None, "bfloat16", None, None)
    assert by_name["blocks"] == ("exclude", "exclude", "float32", "blocks", None)
    assert by_name["blocks.0"] == (None, "exclude", "float32", "blocks", "blocks")
    assert by_name["blocks.0.mlp"] == ("inherit", "inherit", "float32", "blocks", "blocks")
    assert by_name["blocks.0.mlp.2"] == (None, None, "float32", "blocks", "blocks")
    assert by_name["blocks.1.norm"] == ("float16", "float16", "float16", "*.1.norm", None)
    assert by_name["head"] == ("float32", "float32", "float32", "head", None)


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
        (
            {"last:Embeding": "float32"},
            "modules['last:Embeding'] matches no module of the model; did you mean 'Embedding'?",
        ),
        ({nn.Conv2d: "float32"}, "modules['type:torch.nn.modules.conv.Conv2d'] matches no module of the model"),
        ({"last:Conv*": "float32"}, "modules['last:Conv*'] matches no module"),
        ({"re:[": "float32"}, "'re:[' is not a regular expression: "),
        ({"he*": "float16", "head": "float32"}, "modules['he*'] = 'float16' contradicts modules['head'] = 'float32'"),
        (
            {"head": "float32", "he*": "float16"},
            "modules['he*'] = 'float16' contradicts modules['head'] = 'float32', which overrides it everywhere: "
            "a name overrides a pattern, a pattern overrides a type, and a later rule overrides an earlier one",
        ),
        ({"h*": "float32", "last:Linear": "float16"}, "modules['last:Linear'] = 'float16' contradicts modules['h*']"),
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
    with pytest.raises(ValueError, match=re.escape("'head' and 'decoder' are the same module, but modules['head']")):
        computed({"head": "float32", "decoder": "float16"}, model)
    assert computed({"he*": "float16", "decoder": "float32"}, model) == {"head": "float32", "decoder": "float32"}
    assert list(computed({"token": "float32"}, model)) == ["token"]


def test_names_are_those_without_wrappers() -> None:
    model = Model()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    for wrapped in (model, torch.compile(model), nn.DataParallel(model), Fabric(accelerator="cpu").setup(model)):
        assert list(computed({"blocks.0.norm": "float32", "head": "float32"}, wrapped)) == ["blocks.0.norm", "head"]


def test_only_modules_have_policies() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        decide(Policy(compute="bfloat16"), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("devices", "is_refused"), [([0], False), ([0, 1], True)])
def test_copies_in_threads_are_refused(devices: list[int], is_refused: bool) -> None:
    model = nn.DataParallel(Model())
    model.device_ids = devices
    text = (
        "DataParallel runs copies of the model in its own threads, where no policy is active: "
        "use DistributedDataParallel"
    )
    with pytest.raises(ValueError, match=f"^{text}$") if is_refused else nullcontext():
        decide(Policy(compute="bfloat16"), model)


def test_a_rule_for_the_projection_of_an_attention_is_refused_as_nothing_calls_its_forward() -> None:
    model = nn.Sequential(nn.Sequential(nn.MultiheadAttention(4, 2)), nn.Linear(4, 4))
    for key in ("0.0.out_proj", "*.out_proj"):
        with pytest.raises(ValueError, match=re.escape(f"modules['{key}'] names '0.0.out_proj'")) as caught:
            computed({key: "float32"}, model)
        assert str(caught.value).endswith(
            "whose forward torch.nn.MultiheadAttention never calls: write the rule for the attention module"
        )
    assert "1" in computed({nn.Linear: "float32"}, model)
    assert list(computed({"out_proj": "float32"}, nn.Sequential(OrderedDict(out_proj=nn.Linear(4, 4))))) == ["out_proj"]
