"""Casts of weights that outlive a region."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
