"""castwise inside of other frameworks: one file for each, which is imported only by whoever uses it."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
