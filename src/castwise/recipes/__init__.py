"""Recipes of 8 and 4 bits: how the three products of an `nn.Linear` are quantized, and what computes them."""
