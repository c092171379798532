"""Find where a non-finite value comes from: `castwise.diagnose`, and replays of recorded steps."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
