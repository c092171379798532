"""Gradient scaling for models that are sharded over ranks."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
