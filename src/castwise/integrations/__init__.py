"""castwise in other frameworks: one file for each, imported only when it is used."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
