"""16-bit weights that learn as fp32 ones do, with any optimizer: `castwise.MasterWeights`."""
