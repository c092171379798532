"""Whether torch multiplies 8-bit numbers on a CPU: 2.11 does not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional


def _has_kernels() -> bool:
    eights, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(1)
    kind = functional.ScalingType.TensorWise
    try:
        functional.scaled_mm(eights, eights.t(), one, kind, one, kind)
    except NotImplementedError:
        return False
    return True


needs_kernels = pytest.mark.skipif(
    torch.__version__ < "2.13" and not _has_kernels(), reason="this torch multiplies no 8-bit numbers on a CPU"
)
