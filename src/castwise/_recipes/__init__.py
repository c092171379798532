"""8-bit and 4-bit recipes: how the three products of an `nn.Linear` are quantized, and what computes them."""
