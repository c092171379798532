"""Which op ran where, and in which precision: `castwise.trace`, and the dispatch mode and hooks behind it."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
