"""In which dtype FSDP2 is to gather what, without ranks; with them it is in `tests/distributed/test_policy_fsdp.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from castwise import Policy
from castwise.policy._fsdp_units import gathered
from castwise.policy._module_rules import decide


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.conv = nn.ConvTranspose1d(4, 4, 1)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 8)
        self.decoder = self.head


def where(policy: Policy, units: Any) -> dict[str, str]:
    return gathered(policy, decide(policy, Model()), units)


def test_a_unit_is_gathered_in_the_one_low_precision_that_all_of_it_computes_in() -> None:
    found = where(Policy(compute="bfloat16", modules={"head": "float16"}), ["*.mlp", "*.conv", "head"])
    assert found["blocks.0.mlp"] == found["blocks.0.mlp.2"] == "bfloat16 with blocks.0.mlp"
    assert found["blocks.1.conv"] == "bfloat16 with blocks.1.conv"
    assert found["head"] == found["decoder"] == "float16 with head"
    assert found[""] == found["token"] == found["blocks"] == found["blocks.0.norm"] == "own dtype with (root)"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"modules": {"*.mlp.2": "float32"}}, "own dtype"),  # two dtypes in one unit
        ({"modules": {"*.mlp": "float32"}}, "own dtype"),
        ({"modules": {"*.mlp": "float16"}}, "float16"),
        ({"ops": {"linear": "float32"}}, "own dtype"),
        ({"ops": {"conv1d": "float16"}}, "own dtype"),  # it is not known which module calls it
        ({"ops": {"softmax": "float32"}}, "bfloat16"),
    ],
)
def test_rules_of_modules_and_of_ops_with_weights_count(fields: dict[str, Any], expected: str) -> None:
    assert where(Policy(compute="bfloat16", **fields), ["*.mlp"])["blocks.1.mlp.0"] == f"{expected} with blocks.1.mlp"


def test_inner_units_come_first_and_the_model_last_with_the_dtype_of_its_outputs() -> None:
    model = Model()
    policy = Policy(compute="bfloat16", output="float32")
    order = list(policy.fsdp(model, ["*.mlp", Block, "head"], reduce_dtype=torch.bfloat16))
    names = {id(module): name for name, module in model.named_modules()}
    *mlps, outer, other, head, whole = (names[id(module)] for module, _ in order)
    assert (set(mlps), {outer, other}) == ({"blocks.0.mlp", "blocks.1.mlp"}, {"blocks.0", "blocks.1"})
    assert (head, whole) == ("head", "")
    by_name = {names[id(module)]: each for module, each in order}
    common = {"reduce_dtype": torch.bfloat16, "cast_forward_inputs": False}
    assert by_name["head"] == MixedPrecisionPolicy(param_dtype=torch.bfloat16, **common)
    assert by_name["blocks.0"] == MixedPrecisionPolicy(param_dtype=None, **common)
    assert by_name[""] == MixedPrecisionPolicy(param_dtype=None, output_dtype=torch.float32, **common)
    ((_, alone),) = Policy(compute="bfloat16").fsdp(nn.Linear(1, 1), [])
    assert alone == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def test_what_is_no_unit_or_no_dtype_is_refused() -> None:
    policy = Policy(compute="bfloat16")
    with pytest.raises(TypeError, match=r"^units must be a list of keys, as in \['head'\]$"):
        policy.fsdp(Model(), "head")
    with pytest.raises(ValueError, match=r"^units\['hed'\] matches no module of the model; did you mean 'head'\?$"):
        policy.fsdp(Model(), ["hed"])
    with pytest.raises(TypeError, match=r"^reduce_dtype must be a torch.dtype, got 'float32'$"):
        policy.fsdp(Model(), ["head"], reduce_dtype="float32")  # type: ignore[arg-type]  # the point
    with pytest.raises(TypeError, match=r"^model must be a torch\.nn\.Module, got int"):
        policy.fsdp(3, ["head"])  # type: ignore[arg-type]  # the point
