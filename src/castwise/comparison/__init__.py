"""How a precision changes the values of a model, module by module."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
