"""Casts of weights that outlive a region."""
