"""16-bit weights that train like fp32 weights, with any optimizer: `castwise.MasterWeights`."""
