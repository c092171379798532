"""The cheapest policy that keeps the loss within a tolerance: `castwise.tune`."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
