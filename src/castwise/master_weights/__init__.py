"""16-bit weights that learn as fp32 ones do, with any optimizer: `castwise.MasterWeights`."""

from castwise.master_weights.master_weights import MasterWeights

__all__ = ["MasterWeights"]
