"""Mixed precision over several processes, at torch's own relative paths."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
