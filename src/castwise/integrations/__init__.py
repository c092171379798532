"""Integrations with other frameworks, one module each, imported only when used."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
