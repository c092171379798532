"""Precision policies: which module and which op runs in which precision, and what holds a model to it."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
