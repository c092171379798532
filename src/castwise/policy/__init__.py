"""Precision policies: which module and which op runs in which precision, and how a model is made to follow them."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
