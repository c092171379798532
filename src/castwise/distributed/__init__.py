"""Mixed precision over several processes, at the same relative paths as in torch."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
