"""The compiled codecs of `MasterWeights` on the simulated accelerator, where each of their kernels is one launch.

The kernels are those that Inductor makes of them, which tests/master_weights/test_kernels.py counts.
"""

from __future__ import annotations

import pytest
import torch

from castwise.master_weights import _codecs as codecs
from castwise.master_weights import _kernels as kernels
from castwise.master_weights import _master_weights as master_weights

_library = torch.library.Library("castwise_test", "DEF")
_library.define("join(Tensor weights, Tensor residue, Tensor ties, *, Tensor(a!) out) -> ()")
_library.define("split(Tensor values, *, Tensor(a!) weights, Tensor(b!) residue, Tensor(c!) ties) -> ()")
_library.define("join_half(Tensor weights, Tensor residue, *, Tensor(a!) out) -> ()")
_library.define("split_half(Tensor values, *, Tensor(a!) weights, Tensor(b!) residue) -> ()")
_library.define("round(Tensor values, Tensor pool, Tensor starts, Tensor taken, *, Tensor(a!) out) -> ()")


_library.impl("join", lambda *inputs, out: kernels.join(*inputs, out), "CPU")  # which the device calls
_library.impl("split", lambda values, **written: kernels.split(values, *written.values()), "CPU")
_library.impl("join_half", lambda *inputs, out: kernels.join_half(*inputs, out), "CPU")
_library.impl("split_half", lambda values, **written: kernels.split_half(values, *written.values()), "CPU")
_library.impl("round", lambda *inputs, out: kernels.round_by_chance(*inputs, out), "CPU")


def _join_here(*tensors: torch.Tensor) -> bool:
    torch.ops.castwise_test.join(*tensors[:-1], out=tensors[-1])
    return True


def _split_here(values: torch.Tensor, weights: torch.Tensor, residue: torch.Tensor, ties: torch.Tensor) -> bool:
    torch.ops.castwise_test.split(values, weights=weights, residue=residue, ties=ties)
    return True


def _join_half_here(*tensors: torch.Tensor) -> bool:
    torch.ops.castwise_test.join_half(*tensors[:-1], out=tensors[-1])
    return True


def _split_half_here(values: torch.Tensor, weights: torch.Tensor, residue: torch.Tensor) -> bool:
    torch.ops.castwise_test.split_half(values, weights=weights, residue=residue)
    return True


def _round_here(*tensors: torch.Tensor) -> bool:
    torch.ops.castwise_test.round(*tensors[:-1], out=tensors[-1])
    return True


def compiled_codecs(patch: pytest.MonkeyPatch) -> None:
    """Let models of any size have compiled codecs on the device."""
    patch.setattr(codecs, "codec_kernels", lambda device: (_join_here, _split_here))
    patch.setattr(codecs, "half_kernels", lambda device: (_join_half_here, _split_half_here))
    patch.setattr(codecs, "rounding_kernel", lambda device: _round_here)
    patch.setattr(master_weights, "WORTH_COMPILING", 0)
